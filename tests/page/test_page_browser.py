"""A real browser shows what the files of a run say, live, over a restart of the page, and runs no script of a name."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from sparring.pipeline.monitoring import curves
from sparring.services.page.runs import Runs, load
from sparring.services.process.hosting import SPARRING
from tests.page.browser import CHROMIUM, Browser, browser
from tests.page.page_runs import interval, write_league, write_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]

DEMO = Path(__file__).parents[2] / "configs" / "soccer.yaml"
"""What `scripts/demo` trains."""
SHORT = (
    "summary_freq=1024",
    "hyperparameters.buffer_size=512",
    "hyperparameters.batch_size=128",
    "max_steps=100000000",
)
FIRST_POINT_S = 90.0
HOSTILE = "<img src=x onerror=alert(1)>"
LINES = """[...document.querySelectorAll("figure.chart")].map(({ chart }) => ({
  title: chart.caption.textContent, lines: chart.lines.map(({ x, mean }) => [[...x], [...mean]]) }))"""


@contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command of sparring, and ends it."""
    process = subprocess.Popen([*SPARRING, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def check_panels(tab: Browser, records: list[Any]) -> None:
    """Checks that each panel holds the points of the intervals."""
    shown, by_behavior = {panel["title"]: panel["lines"] for panel in tab.value(LINES)}, curves.lineages(records)
    assert len(shown.keys() & curves.PANELS.keys()) > 5
    for title in curves.PANELS:
        expected = curves._points(by_behavior, title).values()
        for (steps, values), points in zip(shown.get(title, []), expected, strict=True):
            known = [point for point in zip(steps, values, strict=True) if point[1] is not None]
            np.testing.assert_allclose(known, points, rtol=1e-6, err_msg=title)


def written(results: Path) -> list[Any]:
    """Returns the lines of the intervals of the run."""
    return [json.loads(line) for line in (results / "run" / "metrics.jsonl").read_text().splitlines()]


def started_last(results: Path, part: str) -> tuple[int, int]:
    """Returns the number of the present incarnation of a part, and its process id."""
    lines = map(json.loads, (results / "run" / "logs" / "supervisor.jsonl").read_text().splitlines())
    found = [line for line in lines if line["event"] == "started" and line["part"] == part]
    return found[-1]["start"], found[-1]["pid"]


def test_page_shows_the_demo_from_its_first_point_on_and_over_every_restart(tmp_path: Path) -> None:
    results, port = tmp_path / "results", free_port()
    write_run(results / HOSTILE, [interval(100, HOSTILE, simulators={HOSTILE: 1.0})], stalls=[HOSTILE])
    address, began = f"http://127.0.0.1:{port}/", time.monotonic()
    settings = [word for one in SHORT for word in ("--set", f"behaviors.Soccer.{one}")]
    words = ("train", str(DEMO), "--run-id", "run", "--results-dir", str(results), "--no-export", *settings)
    with browser(tmp_path / "browser") as tab:
        last = f"{LINES}.find(({{ lines }}) => lines.length)?.lines[0][0].at(-1)"
        with started(*words, "--page", f"127.0.0.1:{port}"):
            while not listens(port):
                assert time.monotonic() - began < FIRST_POINT_S
                time.sleep(0.1)
            tab.show(f"{address}#/run/run")
            tab.wait_for(last, FIRST_POINT_S - (time.monotonic() - began))
            start, monitor = started_last(results, "monitor")
            os.kill(monitor, signal.SIGKILL)
            while started_last(results, "monitor")[0] == start:
                time.sleep(0.1)
            step = tab.value(last)
            tab.wait_for(f"{last} > {step} + 1024")
            tab.value("location.hash = '#/run/run/pipeline'")
            tab.wait_for(
                "[...document.querySelectorAll('.service strong')].some((one) => /\\/s$/.test(one.textContent))"
            )
            tab.wait_for("document.querySelectorAll('[data-name=simulators] meter').length === 2")
            services = json.loads((results / "run" / "status.json").read_text())["services"]
            shown = tab.value("[...document.querySelectorAll('.service')].map((one) => one.dataset.name)")
            assert set(shown) == {"simulators", *services}
            assert all(one["cpu_s"] > 0 for one in services.values())
            tab.value("location.hash = '#/run/run'")
            tab.wait_for(last)
        tab.wait_for("document.getElementById('link').textContent === 'reconnecting'")
        with started("page", str(results), "--address", f"127.0.0.1:{port}"):
            tab.wait_for("document.getElementById('link').textContent === 'live'")
            tab.wait_for("document.querySelector('.state')?.textContent === 'stopped'")
            step = written(results)[-1]["step"]
            tab.wait_for(f"{last} === {step}")
            with started(*words, "--resume"):
                tab.wait_for(f"{last} > {step} && document.querySelector('.state').textContent === 'running'")
            tab.wait_for("document.querySelector('.state').textContent === 'stopped'")
            tab.wait_for(f"{last} === {written(results)[-1]['step']}")
            check_panels(tab, written(results))
            for view in ("curves", "pipeline", "league", "watch"):
                tab.value(f"location.hash = '#/run/' + encodeURIComponent({HOSTILE!r}) + '/{view}'")
                tab.wait_for(f"document.querySelector('h1').textContent === {HOSTILE!r}")
            tab.value("location.hash = '#/'")
            tab.wait_for(f"document.querySelector('.cards').textContent.includes({HOSTILE!r})")
            assert tab.value("document.querySelectorAll('main img').length") == 0
    errors = [text for text in tab.errors if "ERR_CONNECTION" not in text and "ERR_INCOMPLETE" not in text]
    assert errors == []
    assert [one for one in tab.requests if not one.startswith((address, "about:", "data:"))] == []


VIEWS = {
    "#/?run=run": "document.querySelector('canvas')",
    "#/run/run/curves": "document.querySelectorAll('canvas').length > 3",
    "#/run/run/pipeline": "document.querySelectorAll('.service').length > 3",
    "#/run/run/league": "document.querySelector('canvas')",
    "#/run/run/watch": "document.querySelector('.score strong')",
}
READY = {
    "curves": "document.querySelector('.facts')?.children.length > 0",
    "pipeline": "!!document.querySelector('.service, [role=alert]')",
    "league": "!document.querySelector('main').textContent.includes('Reading the matches')",
    "watch": "!document.querySelector('main').textContent.includes('Looking for recorded')",
}
"""Whether a view shows what came of a run."""
NAMED = {
    *("alert", "article", "button", "checkbox", "columnheader", "combobox", "DisclosureTriangle", "figure", "heading"),
    *("image", "link", "meter", "navigation", "progressbar", "region", "rowheader", "slider", "table"),
}
"""Roles of what has a name for a screen reader."""
FOCUSED = "((one) => one.getAttribute('aria-label') ?? one.textContent.trim())(document.activeElement)"
FOCUSABLE = """[...document.querySelectorAll("a[href], button, select, input, summary, [tabindex='0']")]
  .filter((one) => one.checkVisibility())"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Browser, str, Path]]:
    """A browser, the address of a page, and the folder of its runs."""
    folder, port = tmp_path_factory.mktemp("page"), free_port()
    write_league(folder / "results" / "run")
    with (
        started("page", str(folder / "results"), "--address", f"127.0.0.1:{port}"),
        browser(folder / "browser") as tab,
    ):
        while not listens(port):
            time.sleep(0.1)
        yield tab, f"http://127.0.0.1:{port}/", folder / "results"


@pytest.mark.parametrize("view", VIEWS)
def test_screen_reader_and_keyboard_reach_all_of_a_view(shown: tuple[Browser, str, Path], view: str) -> None:
    tab, address, _ = shown
    tab.show(address + view)
    tab.wait_for(f"!!({VIEWS[view]})")
    nodes = tab.tree()
    roles = [role for role, *_ in nodes]
    assert [node for node in nodes if node[0] in NAMED and not node[1].strip()] == []
    assert all(roles.count(one) == 1 for one in ("banner", "main", "navigation"))
    assert "status" in roles
    texts = {name for role, name, _ in nodes if role == "StaticText"}
    if "canvas" in VIEWS[view]:
        assert roles.count("figure") <= len([text for text in texts if "lowest" in text and "points" in text])
    missed = f"{FOCUSABLE}.filter((one) => !one.dataset.reached).length"
    for _ in range(2 * tab.value(f"{FOCUSABLE}.length") + 2):
        tab.press("Tab", 9)
        tab.value("document.activeElement.dataset.reached = 1")
    assert tab.value(missed) == 0
    assert tab.value("document.documentElement.scrollWidth <= innerWidth")
    tab.send("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
    tab.wait_for("document.documentElement.scrollWidth <= 390")


def test_keys_do_what_buttons_do_and_live_regions_speak_only_of_changes(shown: tuple[Browser, str, Path]) -> None:
    tab, address, results = shown
    tab.show(f"{address}#/run/run/curves")
    tab.wait_for("document.querySelectorAll('canvas').length > 3")
    tab.value("document.querySelector('.zoom button').focus()")
    tab.press("+", 187, "+")
    tab.wait_for("document.querySelector('figure').chart.group.range?.length === 2")
    tab.press("0", 48, "0")
    tab.wait_for("document.querySelector('figure').chart.group.range === null")
    tab.value("document.querySelector('nav a[href$=watch]').focus()")
    tab.press("Enter", 13, "\r")
    tab.wait_for("!!document.querySelector('.score strong')?.textContent")
    tab.value("document.querySelector('.controls button').focus()")
    if tab.value("document.querySelector('.controls button').textContent") == "Pause":
        tab.press(" ", 32, " ")
    tab.wait_for("document.querySelector('.controls button').textContent === 'Play'")
    tab.value("document.getElementById('scrub').focus()")
    for key, code, score in (("Home", 36, "0 : 0"), ("End", 35, "0 : 1")):
        tab.press(key, code)
        tab.wait_for(f"document.querySelector('.score strong').textContent === '{score}'")
    assert "team 2 won" in tab.value("document.querySelector('.score').textContent")
    tab.value("location.hash = '#/run/run/pipeline'")
    tab.wait_for("!!document.querySelector('.scroll')")
    tab.value("document.querySelector('.scroll').focus()")
    tab.value(
        "new MutationObserver((found) => (window.spoken = found.length)).observe(document.querySelector('main [role="
        "status]'), { childList: true, subtree: true })"
    )
    status = json.loads((results / "run" / "status.json").read_text())
    status["behaviors"]["Walk"]["agents"] = 77
    (results / "run" / "status.json").write_text(json.dumps(status))
    tab.wait_for("document.querySelector('[data-name=simulators]').textContent.includes('77')")
    assert tab.value(FOCUSED).startswith("Step accounting")
    assert tab.value("window.spoken") is None
    assert tab.errors == []


BROKEN = """(async () => {
  const odd = [null, [], {}, "text", -1, 1e308, [[]], { a: null }, true], broken = new Set();
  function* damaged(content) {
    yield* odd;
    const isList = Array.isArray(content), inner = Object(content) === content ? Object.entries(content) : [];
    for (const [key, value] of isList ? inner.slice(0, 3) : inner) {
      for (const other of damaged(value)) yield Object.assign(isList ? [...content] : { ...content }, { [key]: other });
    }
  }
  async function check(name, content, show) {
    for (const one of damaged(content)) {
      try { await show(one); } catch (error) { broken.add(`${name}: ${error}`); }
    }
  }
  const load = async (name) => (await import(`/assets/${name.toLowerCase()}.js`))[name];
  const [Overview, Pipeline, League, Watch] = await Promise.all(["Overview", "Pipeline", "League", "Watch"].map(load));
  const overview = new Overview(), pipeline = new Pipeline("run"), league = new League("run"), watch = new Watch("run");
  await check("runs", RUNS, (one) => overview.onRuns({ run: one }));
  await check("status", STATUS, (one) => pipeline.onStatus(one ?? {}));
  await check("league", LEAGUE, (one) => league.show(one ?? {}));
  const [screen] = watch.screens, plain = window.fetch;
  document.body.append(watch.element);
  await check("replay", REPLAY, async (lines) => {
    const text = Array.isArray(lines) ? lines.map((one) => JSON.stringify(one)).join("\\n") : "text";
    window.fetch = async () => new Response(text);
    await screen.load();
    [0, 0.15, 99].forEach((time) => screen.draw(time));
  });
  window.fetch = plain;
  [overview, pipeline, league, watch].forEach((view) => view.close?.());
  watch.element.remove();
  return [...broken];
})()"""


def test_no_odd_value_at_any_place_breaks_a_view(shown: tuple[Browser, str, Path]) -> None:
    tab, address, results = shown
    tab.show(f"{address}#/")
    tab.wait_for("!!document.querySelector('.card')")
    runs, folder = Runs(results), results / "run"
    contents = {
        "RUNS": json.loads(runs.overview()["run"]),
        "STATUS": load(folder / "status.json") | {"processes": load(folder / "processes.json")},
        "LEAGUE": runs.league("run"),
        "REPLAY": [json.loads(line) for line in next(folder.glob("replays/*")).read_text().splitlines()[:3]],
    }
    script = BROKEN
    for name, content in contents.items():
        script = script.replace(f", {name},", f", {json.dumps(content)},")
    broken = tab.value(script)
    assert not broken, "\n".join(broken)
    assert tab.errors == []


def test_damaged_runs_leave_every_view_standing(shown: tuple[Browser, str, Path]) -> None:
    tab, address, results = shown
    sound = {path: path.read_bytes() for path in (results / "run").rglob("*.json*") if path.is_file()}
    random = Random(1)
    for number in range(6):
        for path, content in sound.items():
            copy = results / f"damaged-{number}" / path.relative_to(results / "run")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(
                "".join(json.dumps(damage(json.loads(line), random)) + "\n" for line in content.splitlines())
            )
    tab.show(f"{address}#/")
    tab.wait_for("document.querySelectorAll('.card').length === 7")
    for number in range(6):
        for view, ready in READY.items():
            tab.value(f"location.hash = '#/run/damaged-{number}/{view}'")
            tab.wait_for(f"document.querySelector('h1').textContent === 'damaged-{number}' && {ready}")
            assert tab.value("document.querySelectorAll('[role=alert]').length") == 0, (number, view)
    assert [text for text in tab.errors if "status of 4" not in text] == []


ODD: tuple[Any, ...] = (None, None, None, None, [], {}, "text", -1, 1e308, float("nan"), [[]], {"a": None}, True)


def damage(content: Any, random: Random) -> Any:
    """Replaces some parts of a content by odd ones."""
    if random.random() < 0.08:
        return random.choice(ODD)
    if isinstance(content, dict):
        return {name: damage(value, random) for name, value in content.items()}
    return [damage(value, random) for value in content] if isinstance(content, list) else content
