"""A real browser shows what the files of a run say, live, over a restart of the page, and runs no script of a name."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparring.pipeline.monitoring import curves
from sparring.services.process.hosting import SPARRING
from tests.page.browser import CHROMIUM, Browser, browser
from tests.page.page_runs import interval, write_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]

CONFIG = """
behaviors:
  Goal:
    max_steps: 100000000
    summary_freq: 512
    hyperparameters: {batch_size: 64, buffer_size: 512}
simulators: [{name: goal, areas: 16}]
"""
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


def test_page_shows_a_run_from_its_first_point_on(tmp_path: Path) -> None:
    results, config, port = tmp_path / "results", tmp_path / "goal.yaml", free_port()
    config.write_text(CONFIG)
    write_run(results / HOSTILE, [interval(100, HOSTILE, simulators={HOSTILE: 1.0})], stalls=[HOSTILE])
    address, began = f"http://127.0.0.1:{port}/", time.monotonic()
    words = ("--run-id", "run", "--results-dir", str(results), "--page", f"127.0.0.1:{port}", "--no-export")
    with browser(tmp_path / "browser") as tab:
        with started("train", str(config), *words):
            while not listens(port):
                assert time.monotonic() - began < FIRST_POINT_S
                time.sleep(0.1)
            tab.show(f"{address}#/run/run")
            tab.wait_for(f"{LINES}.some(({{ lines }}) => lines.length)", FIRST_POINT_S - (time.monotonic() - began))
            points = tab.value(f"{LINES}[0].lines[0][0].length")
            tab.wait_for(f"{LINES}[0].lines[0][0].length > {points}")
            tab.value("location.hash = '#/run/run/pipeline'")
            tab.wait_for(
                "[...document.querySelectorAll('.service strong')].some((one) => /\\/s$/.test(one.textContent))"
            )
            services = json.loads((results / "run" / "status.json").read_text())["services"]
            shown = tab.value("[...document.querySelectorAll('.service')].map((one) => one.dataset.name)")
            assert set(shown) == {"simulators", *services}
            assert all(one["cpu_s"] > 0 for one in services.values())
        tab.wait_for("document.getElementById('link').textContent === 'reconnecting'")
        with started("page", str(results), "--address", f"127.0.0.1:{port}"):
            tab.wait_for("document.getElementById('link').textContent === 'live'")
            tab.value("location.hash = '#/run/run'")
            tab.wait_for("document.querySelector('.state')?.textContent === 'stopped'")
            tab.wait_for(f"{LINES}.some(({{ lines }}) => lines.length)")
            lines = (results / "run" / "metrics.jsonl").read_text().splitlines()
            check_panels(tab, [json.loads(line) for line in lines])
            for view in ("curves", "pipeline", "league", "watch"):
                tab.value(f"location.hash = '#/run/' + encodeURIComponent({HOSTILE!r}) + '/{view}'")
                tab.wait_for(f"document.querySelector('h1').textContent === {HOSTILE!r}")
            tab.value("location.hash = '#/'")
            tab.wait_for(f"document.querySelector('.cards').textContent.includes({HOSTILE!r})")
            assert tab.value("document.querySelectorAll('main img').length") == 0
    errors = [text for text in tab.errors if "ERR_CONNECTION" not in text and "ERR_INCOMPLETE" not in text]
    assert errors == []
    assert [one for one in tab.requests if not one.startswith((address, "about:", "data:"))] == []
