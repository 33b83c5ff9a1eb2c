"""Writers in processes of their own: crashes, hangs, and runs that do not notice."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog.testing
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sparring.pipeline.monitoring.intervals import Interval
from sparring.pipeline.monitoring.writers.delivery import DeliveryState, load_state, state_path
from sparring.pipeline.settings import parse_settings
from sparring.services.process.runtime import Playback
from sparring.services.supervision.active_run import ActiveRun
from sparring.services.supervision.topology import Topology, WriterPlan, build
from sparring.services.supervision.writers import START_S, Writers
from tests.monitoring.conftest import make_interval as make_interval
from tests.monitoring.test_monitoring_writers import STATS_WRITER
from tests.plugin_packages import install
from tests.services.services_helpers import HANG_S, Training, config
from tests.services.started import start

Make = Callable[..., Interval]

WRITERS = """
import os, time
from pathlib import Path
from sparring.pipeline.monitoring.writers import Event, RunInfo, Writer

class Keeper(Writer):
    def open(self, run: RunInfo) -> None:
        self.path = run.folder / f"{type(self).__name__}.txt"

    def write(self, event: Event) -> None:
        with self.path.open("a") as file:
            file.write(f"{event.kind} {event.values.get('step', '')}\\n")

    def is_first_interval(self, event: Event) -> bool:
        return event.kind == "interval" and not self.path.exists() and not self.path.write_text("")

class Crash(Keeper):
    def write(self, event: Event) -> None:
        if self.is_first_interval(event):
            os.abort()
        super().write(event)

class Hang(Keeper):
    def write(self, event: Event) -> None:
        if self.is_first_interval(event):
            time.sleep(10_000)
        super().write(event)

class Fail(Keeper):
    def write(self, event: Event) -> None:
        raise ValueError(event.kind)
"""
ENTRIES = "\n".join(f"{name.lower()} = own_writers:{name}" for name in ("Keeper", "Crash", "Hang", "Fail"))
TEXT = """
behaviors: {{Goal: {{}}}}
{text}
pipeline: {{address: "unix:///nowhere", {pipeline}}}
"""


def topology_of(folder: Path, text: str = "", pipeline: str = "", **info: Any) -> Topology:
    settings = parse_settings(TEXT.format(text=text, pipeline=pipeline), "test").settings
    return build(settings, run_id="test", directory=folder, seed=1, **info)


def write_lines(folder: Path, make_interval: Make, *steps: int) -> None:
    lines = [json.dumps(make_interval(step=step, behavior="Goal").plain()) for step in steps]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


def written_by(name: str, folder: Path, make_interval: Make, text: str, pipeline: str = "") -> DeliveryState:
    """Runs the process of a writer for a run that has ended; returns its state."""
    topology_of(folder, text, pipeline).save()
    write_lines(folder, make_interval, 1000, 2000, 3000)
    (folder / "summary.json").write_text('{"status": "completed", "error": null}')
    started = start(["writer", name, "--run", str(folder)])
    with started.stdout as output:
        assert started.wait(HANG_S) == 0, output.read()
    state = load_state(state_path(folder, name))
    assert state is not None
    return state


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_writer_without_a_supervisor_ends_at_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    topology_of(tmp_path, "").save()
    started = start(["writer", "tensorboard", "--run", str(tmp_path)])
    with started.stdout as output:
        while not state_path(tmp_path, "tensorboard").exists():
            assert started.poll() is None, output.read()
            time.sleep(0.05)
        started.send_signal(number)
        assert started.wait(HANG_S) == (130 if number == signal.SIGINT else -number)
        assert "Traceback" not in output.read()


@pytest.mark.skipif(sys.platform != "linux", reason="services are forked on Linux alone")
def test_a_forked_writer_ends_as_any_process_does(tmp_path: Path, make_interval: Make) -> None:
    """A user's module may hold open files; wandb, for one, removes its temporary files at its exit."""
    (tmp_path / "at_exit.py").write_text(
        "import atexit, pathlib\nhere = pathlib.Path(__file__)\natexit.register(here.with_name('done').touch)\n"
        "out = here.with_name('kinds').open('w')\n\ndef call(event):\n    out.write(event.kind + ' ')\n"
    )
    where = f"python_path: ['{tmp_path}']"
    written_by("callbacks", tmp_path, make_interval, "writers: {callbacks: {functions: ['at_exit:call']}}", where)
    assert (tmp_path / "done").exists()
    assert (tmp_path / "kinds").read_text() == "interval interval interval end "


# ---------------------------------------------------------------- the supervisor, with fake processes


class FakeWriter:
    """A process that saves a state now and then, until it hangs, fails or is killed."""

    pid = cpu_s = None
    starved_s = 0.0

    def __init__(self, failure: str = "", *, hopeless: bool = False, alive_s: float = 1e9) -> None:
        self.killed_at: float | None = None
        self.hopeless = hopeless
        self._failure, self._alive_s = failure, alive_s
        self._ended = anyio.Event()

    async def live(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        DeliveryState().save(path)
        began = anyio.current_time()
        while not self._ended.is_set() and anyio.current_time() - began < self._alive_s:
            now = round(anyio.current_time() * 1e9)
            os.utime(path, ns=(now, now))
            await anyio.sleep(0.5)

    async def wait(self) -> str:
        if self._failure:
            return self._failure
        await self._ended.wait()
        return "signal SIGKILL" if self.killed_at is not None else ""

    def stop(self) -> None:
        self._ended.set()

    def kill(self) -> None:
        self.killed_at = anyio.current_time()
        self._ended.set()


class FakeHost:
    """Starts the processes that a test wants, one after another; the last one again and again."""

    def __init__(self, topology: Topology, tasks: Any, *wanted: Callable[[], FakeWriter]) -> None:
        self.topology = topology
        self.started: list[FakeWriter] = []
        self.started_at: list[float] = []
        self._tasks, self._wanted = tasks, wanted

    async def start(self, plan: WriterPlan, incarnation: str, *, first: bool) -> FakeWriter:
        assert incarnation == f"writer-tensorboard.s-{len(self.started) + 1}"
        writer = self._wanted[min(len(self.started), len(self._wanted) - 1)]()
        self.started.append(writer)
        self.started_at.append(anyio.current_time())
        if not writer._failure:
            self._tasks.start_soon(writer.live, state_path(self.topology.run.directory, plan.writer))
        return writer


@contextmanager
def events() -> Iterator[list[str]]:
    names: list[str] = []
    with structlog.testing.capture_logs() as lines:
        yield names
    names += [f"{line['event']} {line.get('error', '')}".strip() for line in lines]


async def kept_for(folder: Path, seconds: float, *wanted: Callable[[], FakeWriter], pipeline: str = "") -> FakeHost:
    """Keeps a writer for some virtual seconds."""
    async with anyio.create_task_group() as tasks:
        host = FakeHost(topology_of(folder, pipeline=pipeline), tasks, *wanted)
        active = ActiveRun(host, anyio.current_time, structlog.get_logger(), "s")  # type: ignore[arg-type]
        tasks.start_soon(Writers(active).run)
        await anyio.sleep(seconds)
        tasks.cancel_scope.cancel()
    return host


@pytest.mark.anyio
async def test_writer_that_hangs_is_killed_and_restarted(tmp_path: Path) -> None:
    with events() as found:
        host = await kept_for(tmp_path, 200, lambda: FakeWriter(alive_s=30), FakeWriter)
    assert len(host.started) == 2
    assert host.started[0].killed_at is not None
    assert 85 < host.started[0].killed_at < 95  # timeout_s of 60
    assert found == ["writer_hangs", "writer_failed signal SIGKILL"]


@pytest.mark.anyio
async def test_writer_that_does_not_begin_is_killed(tmp_path: Path) -> None:
    host = await kept_for(tmp_path, START_S + 60 + 5, lambda: FakeWriter(alive_s=0))
    assert host.started[0].killed_at is not None


@pytest.mark.anyio
async def test_writer_that_fails_too_often_is_left_alone_for_a_while(tmp_path: Path) -> None:
    limits = "restarts: {backoff_s: 1, period_s: 100}, writer_limits: {failures: 3}"
    with events() as found:
        host = await kept_for(tmp_path, 108, lambda: FakeWriter("exit status 1"), pipeline=limits)
    assert [round(at - host.started_at[0]) for at in host.started_at] == [0, 1, 3, 7, 107]
    assert set(found) == {"writer_failed exit status 1"}


class Leaving(FakeWriter):
    """A process that ends with status 0."""

    async def wait(self) -> str:
        return ""


@pytest.mark.anyio
@pytest.mark.parametrize("over", [False, True])
async def test_writer_that_ends_is_restarted_before_the_end_of_the_run_only(tmp_path: Path, over: bool) -> None:
    if over:
        (tmp_path / "summary.json").write_text("{}")
    limits = "restarts: {backoff_s: 1, period_s: 100}, writer_limits: {failures: 3}"
    with events() as found:
        host = await kept_for(tmp_path, 5, Leaving, pipeline=limits)
    assert len(host.started) == (1 if over else 3)
    assert set(found) == (set() if over else {"writer_failed exit status 0 before the end of the run"})


@pytest.mark.anyio
async def test_writer_that_a_restart_cannot_repair_is_given_up(tmp_path: Path) -> None:
    with events() as found:
        host = await kept_for(tmp_path, 1000, lambda: FakeWriter("no wandb", hopeless=True))
    assert len(host.started) == 1
    assert found == ["writer_given_up no wandb"]


@pytest.mark.anyio
@pytest.mark.parametrize(("hurried_s", "waited_s"), [(None, 60), (7.0, 7)])
async def test_end_waits_for_a_writer_no_longer_than_its_limit_or_an_interrupt_and_counts_what_is_left(
    tmp_path: Path, make_interval: Make, monkeypatch: pytest.MonkeyPatch, hurried_s: float | None, waited_s: float
) -> None:
    monkeypatch.setattr("sparring.services.process.forking.abandon", lambda: None)
    for name in ("run.json", "summary.json"):
        (tmp_path / name).write_text("{}")
    write_lines(tmp_path, make_interval, 1000, 2000)

    async def later(seconds: float) -> None:
        await anyio.sleep(seconds)
        active.hurry()

    with structlog.testing.capture_logs() as lines:
        async with anyio.create_task_group() as tasks:
            host = FakeHost(topology_of(tmp_path), tasks, lambda: FakeWriter(alive_s=0 if hurried_s else 1e9))
            active = ActiveRun(host, anyio.current_time, structlog.get_logger(), "s")  # type: ignore[arg-type]
            tasks.start_soon((writers := Writers(active)).run)
            await anyio.sleep(5)
            began = anyio.current_time()
            if hurried_s is not None:  # the virtual time would go on to it while the events are counted
                tasks.start_soon(later, hurried_s)
            await writers.finish()
    assert anyio.current_time() - began == pytest.approx(waited_s, abs=1)
    (line,) = [line for line in lines if line["event"] == "events_not_written"]
    assert (line["writer"], line["unread"]) == ("tensorboard", 2)
    state = load_state(state_path(tmp_path, "tensorboard"))
    assert state is not None
    assert state.counts == {"unread": 2}


def test_run_that_plays_has_no_other_writer_than_tensorboard(tmp_path: Path) -> None:
    text = "writers: {jsonl: {path: x}}\n"
    assert [plan.name for plan in topology_of(tmp_path, text).writers] == ["writer-tensorboard", "writer-jsonl"]
    played = topology_of(tmp_path, text, playing=Playback(checkpoints={}))
    assert [plan.writer for plan in played.writers] == ["tensorboard"]
    assert not topology_of(tmp_path, "writers: {tensorboard: false}\n").writers


# ---------------------------------------------------------------- real processes


@pytest.mark.slow
def test_run_does_not_notice_writers_that_crash_hang_and_fail(tmp_path: Path) -> None:
    """Each loses the events that it was given then, which are counted, and gets all others once."""
    (site := tmp_path / "site").mkdir()
    install(site, "own_writers", "sparring.writers", ENTRIES, WRITERS)
    install(
        site, "own_stats", "mlagents.stats_writer", "own = own_stats:get_own", STATS_WRITER.replace('"r1"', '"run"')
    )
    (tmp_path / "own_calls.py").write_text(
        "import importlib.util\ndef call(event):\n    assert importlib.util.find_spec('mlagents') is None\n"
    )
    path = config(tmp_path, max_steps=10**9, num_epoch=10, count=1)
    own = "keeper: {}, crash: {}, hang: {}, fail: {}, mlagents: {names: [own]}"
    text = f"  writer_limits: {{timeout_s: 10}}\nwriters: {{{own}, callbacks: {{functions: ['own_calls:call']}}}}\n"
    path.write_text(path.read_text() + text)
    training = Training(tmp_path, str(path), forked=False, tensorboard=True, environment={"PYTHONPATH": str(site)})
    folder = training.directory
    written = [folder / f"{name}.txt" for name in ("Crash", "Hang")]
    training.wait_for(lambda _: all(one.exists() and one.read_text() for one in written))  # after their restarts
    training.process.send_signal(signal.SIGINT)
    assert training.end() == 0, "\n".join(training.lines)
    console = "\n".join(training.lines)
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) > 1

    def kept(name: str) -> list[int]:
        lines = (folder / f"{name}.txt").read_text().splitlines()
        assert lines[-1] == "end "
        return [int(line.split()[1]) for line in lines if line.startswith("interval")]

    states = {name: load_state(state_path(folder, name)) for name in ("keeper", "crash", "hang", "fail", "mlagents")}
    counts = {name: dict(state.counts) for name, state in states.items() if state is not None}
    assert (kept("Keeper"), counts["keeper"].keys()) == (steps, {"delivered"})
    for name in ("crash", "hang"):
        assert kept(name.capitalize()) == steps[1:], console
        assert counts[name]["interrupted"] == 1
        assert counts[name]["delivered"] == counts["keeper"]["delivered"] - 1
        assert f"writer_failed  writer={name}" in console
    assert counts["fail"] == {"raised": counts["keeper"]["delivered"]}
    assert "writer_hangs  writer=hang" in console
    assert "note=writer fail: ValueError('interval'); this interval is lost" in console
    assert counts["mlagents"] == load_state(state_path(folder, "callbacks")).counts == counts["keeper"]  # type: ignore[union-attr]
    events = EventAccumulator(str(folder / "Balance"))
    events.Reload()
    assert [one.step for one in events.Scalars("Is Training")] == steps


@pytest.mark.slow
def test_wandb_offline(tmp_path: Path, make_interval: Make) -> None:
    pytest.importorskip("wandb")
    state = written_by("wandb", tmp_path, make_interval, "writers: {wandb: {mode: offline, tags: [a]}}")
    assert state.counts == {"delivered": 4}
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert all(word in content for word in (b"Goal/Policy/Entropy", b"Goal/step", b"completed", b"buffer_size"))


@pytest.mark.slow
def test_mlflow_in_a_file(tmp_path: Path, make_interval: Make) -> None:
    """A writer that is restarted goes on with the same run."""
    pytest.importorskip("mlflow")
    state = written_by("mlflow", tmp_path, make_interval, "writers: {mlflow: {experiment: soccer}}")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(make_interval(step=4000, behavior="Goal").plain()) + "\n")
    started = start(["writer", "mlflow", "--run", str(tmp_path)])
    with started.stdout:
        assert started.wait(HANG_S) == 0
    assert state.counts == {"delivered": 4}
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        query = "SELECT step, value FROM metrics WHERE key = 'Goal/Policy/Entropy' ORDER BY step"
        assert database.execute(query).fetchall() == [(step, 1.42) for step in (1000, 2000, 3000, 4000)]
        assert database.execute("SELECT status FROM runs").fetchall() == [("FINISHED",)]
        query = "SELECT value FROM params WHERE key = 'behaviors.Goal.trainer_type'"
        assert database.execute(query).fetchall() == [("ppo",)]


@pytest.mark.slow
def test_trackio_in_a_file(tmp_path: Path, make_interval: Make) -> None:
    pytest.importorskip("trackio")
    state = written_by("trackio", tmp_path, make_interval, "writers: {trackio: {project: soccer}}")
    assert state.counts == {"delivered": 4}
    with closing(sqlite3.connect(tmp_path / "trackio" / "soccer.db")) as database:
        found = database.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    assert [step for step, _ in found] == [1000, 2000, 3000]
    assert "Goal/Policy/Entropy" in str(found[0][1])
