"""The rows: what is done to a run, and what must come of it."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from sparring.pipeline.monitoring.summary import STATUSES
from sparring.services.supervision.supervisor import LOOKER_S
from tests.faults.faulty_proxy import FaultyProxy
from tests.faults.judge import ANY, Allowed, expect, expect_balance, judge, judge_restored, killed
from tests.faults.places import destroy, network, small_disk
from tests.faults.trial import (
    AREAS,
    BEHAVIOR,
    BUFFER,
    LEARNER,
    LONG_S,
    RECOVERY_S,
    SERVICES,
    SILENCE_S,
    SIMULATORS,
    Trial,
    in_flight,
    resumed,
)

PAUSE_S = 3.0
"""Shorter than any deadline."""
ABSENCE_S = SILENCE_S + 3.0
"""Longer than simulators and trainer wait for each other."""
GONE_S = 5.0
"""After its supervisor's death nothing of a run is left."""
DISK_MB = 12


@dataclass(frozen=True)
class Outcome:
    """What came of a run that did as its row says.

    Attributes:
        lost: steps.
        recovery_s: from the fault to training; None where there is none.
    """

    lost: int
    recovery_s: float | None = None


@dataclass(frozen=True)
class Bench:
    """Where a row is tried.

    Attributes:
        folder: empty.
        mode: `overlap` or `lockstep`.
        seconds: that a run is meant to take.
        seed: of run and fault.
    """

    folder: Path
    mode: str
    seconds: float
    seed: int

    @contextlib.contextmanager
    def trial(self, extra_s: float = 0.0, **settings: Any) -> Iterator[Trial]:
        """A run that is over afterwards, with all its processes."""
        trial = Trial(self.folder, self.mode, self.seconds + extra_s, self.seed, **settings)
        try:
            yield trial
        except BaseException:
            (self.folder / "console.txt").write_text("\n".join(trial.training.lines))
            trial.close()
            raise
        left = trial.close()
        expect(not left, f"processes outlived the run: {left}")


def completes(trial: Trial, allowed: Allowed) -> Outcome:
    """The run goes on to its end."""
    status = trial.end()
    expect(status == 0, f"exit status {status}: {trial.training.lines[-3:]}")
    return Outcome(judge(trial, allowed), trial.recovery_s)


# ---------------------------------------------------------------- processes


def kill(part: str, bench: Bench) -> Outcome:
    """kill -9; it is started again."""
    with bench.trial() as trial:
        trial.under_way()
        trained = trial.trained()
        with trial.recovering():
            if part == "watcher-0":
                psutil.Process(trial.training.pid("simulator-0")).kill()
            else:
                trial.kill(part)
            before = [path.name for path in trial.folder.newest_first()]
        outcome = completes(trial, killed(part))
        if part == LEARNER:
            judge_restored(trial, before, trained)
        return outcome


def kill_and_stop(part: str, bench: Bench) -> Outcome:
    """kill -9, and Ctrl-C while what it held is still under way."""
    with bench.trial() as trial:
        trial.under_way()
        trial.kill(part)
        trial.wait(lambda: starts(trial, part) > 1, f"{part} is started anew", LONG_S)
        wanted = trial.version + trial.random.randrange(1, 5)
        trial.wait(lambda: trial.version >= wanted, "training after the fault", LONG_S)
        trial.interrupt()
        status = trial.end()
        expect(status == 0, f"exit status {status}: {trial.training.lines[-3:]}")
        return Outcome(judge(trial, killed(part), status="stopped"))


def pause(part: str, bench: Bench) -> Outcome:
    """SIGSTOP for a moment, then SIGCONT; nobody fails and nothing is lost."""
    with bench.trial() as trial:
        trial.under_way()
        with trial.recovering():
            pid = trial.stop(part)
            time.sleep(PAUSE_S)
            resumed(pid)
        return completes(trial, Allowed(times=0))


def hang(part: str, bench: Bench) -> Outcome:
    """SIGSTOP for good; the supervisor finds it silent, and starts it again."""
    # Training does not wait for the monitor, which is given more time: such a run has to last longer than that.
    with bench.trial(1.5 * LOOKER_S if part == "monitor" else 0.0) as trial:
        trial.under_way(bench.seconds)
        with trial.recovering():
            trial.stop(part)
            trial.wait(lambda: trial.log("supervisor", "silent"), f"{part} is found silent", LONG_S)
        outcome = completes(trial, killed(part))
        silent = [one["part"] for one in trial.log("supervisor", "silent")]
        expect(silent == [part], f"{silent} were found silent")
        return outcome


def absent(bench: Bench) -> Outcome:
    """A simulator hangs for longer than its trainer waits: it is given up, ended, and started again."""
    with bench.trial() as trial:
        trial.under_way()
        with trial.recovering():
            trial.stop("simulator-0")
            trial.wait(lambda: trial.log("stepping-0", "simulator_silent"), "the simulator is given up", LONG_S)
            trial.wait(lambda: len(trial.log("stepping-0", "simulator_connected")) > 2, "it comes back", LONG_S)
        silent = [one["part"] for one in trial.log("supervisor", "silent")]
        expect(silent == ["simulator-0"], f"{silent} were found silent")
        return completes(trial, killed("simulator-0"))


def supervisor(bench: Bench) -> Outcome:
    """kill -9; nothing of the run is left, and `--resume` goes on."""
    with bench.trial() as trial:
        trial.under_way()
        family = trial.family()
        trained, version = trial.trained(), trial.version
        began = time.monotonic()
        trial.training.process.send_signal(signal.SIGKILL)
        trial.training.process.wait()
        before = [path.name for path in trial.folder.newest_first()]
        _, alive = psutil.wait_procs(family, timeout=GONE_S)
        expect(not alive, f"still there after {GONE_S:g} s: {alive}")
        step_counts = json.loads((trial.directory / "coordination.json").read_text())
        lost_before = sum(one["steps"] for one in step_counts["behaviors"][BEHAVIOR]["ledger"]["incidents"])
        expect(lost_before == 0, f"lost before the fault: {lost_before}")
        trial.resume()
        trial.wait(lambda: trial.version >= version + 4 or trial.nearly_done(), "training after --resume", LONG_S)
        trial.recovery_s = time.monotonic() - began
        status = trial.end()
        expect(status == 0, f"exit status {status}: {trial.training.lines[-3:]}")
        outcome = Outcome(judge_resumed(trial), trial.recovery_s)
        judge_restored(trial, before, trained)
        return outcome


def judge_resumed(trial: Trial) -> int:
    """Of each part what it held is lost, which was all in flight, and the updates since the checkpoint."""
    lost: int = trial.training.summary["behaviors"][BEHAVIOR]["step_counts"]["lost"]
    restored = trial.restored()[-1]
    updates = restored["version"] - 1 - restored["saved"]
    most = updates * (BUFFER + in_flight("lockstep") - BUFFER) + in_flight(trial.mode)
    expect(0 <= lost <= most, f"{lost} steps lost, at most {most}")
    step_counts = trial.training.summary["behaviors"][BEHAVIOR]["step_counts"]
    expect_balance(step_counts)
    expect(trial.training.summary["status"] == "completed", "did not complete")
    return lost


def again(trial: Trial, part: str, often: int) -> bool:
    """Whether a part has been started more than so often."""
    return starts(trial, part) > often


def too_often(part: str, bench: Bench) -> Outcome:
    """It is killed again and again; the run stops in order and says so."""
    with bench.trial(budget=2) as trial:
        trial.under_way()
        trial.wait(trial.folder.newest_first, "a first checkpoint, which the end is to keep", LONG_S)
        for number in range(3):
            if number:
                trial.wait(partial(again, trial, part, number), f"{part} is started anew", LONG_S)
                time.sleep(trial.random.uniform(0.0, 4.0))
            saved = trial.folder.load_latest().trained
            trial.kill(part)
        status = trial.end()
        expect(status == 1, f"exit status {status}")
        summary = trial.training.summary
        expect(summary["status"] == "failed", f"status {summary['status']}")
        error = summary["error"]
        expect(error.startswith(f"{part} failed 3 times") and "SIGKILL" in error, f"error {error!r}")
        expect(error in "\n".join(trial.training.lines), "the console does not say it")
        figures, last = summary["behaviors"][BEHAVIOR], trial.folder.load_latest().trained
        # A learner that is dead saves nothing any more; all others leave it time to save what it has.
        kept = last >= saved > 0 if part == LEARNER else last == figures["steps"] >= saved
        expect(kept, f"checkpoint of {last}, the summary says {figures['steps']}, before there was one of {saved}")
        expect_balance(figures["step_counts"])
        return Outcome(figures["step_counts"]["lost"])


def starts(trial: Trial, part: str) -> int:
    """How often a part was started."""
    return sum(one["part"] == part for one in trial.log("supervisor", "started"))


# ---------------------------------------------------------------- links


@contextlib.contextmanager
def proxied(bench: Bench, host: str = "127.0.0.1", prefix: tuple[str, ...] = ()) -> Iterator[tuple[Trial, FaultyProxy]]:
    """A run whose simulators connect through a faulty proxy."""

    def upstream() -> tuple[str, int]:
        plain = json.loads((bench.folder / "results" / "run" / "run.json").read_text())
        parts = urlsplit(plain["addresses"]["stepping-0"])
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    proxy = FaultyProxy(upstream, host)
    try:
        with bench.trial(simulator=(*prefix, "...", "--connect", proxy.address)) as trial:
            yield trial, proxy
    finally:
        proxy.close()


LINKS: dict[str, Callable[[FaultyProxy], None]] = {}
_LATE = ("delayed", "silent-for-a-moment")
"""Of these, those that break nothing."""


def _link(act: Callable[[FaultyProxy], None]) -> Callable[[FaultyProxy], None]:
    LINKS[act.__name__.replace("_", "-")] = act
    return act


@_link
def cut(proxy: FaultyProxy) -> None:
    """Reset."""
    proxy.cut()


@_link
def cut_in_a_message(proxy: FaultyProxy) -> None:
    """Reset in the middle of a message."""
    proxy.cut_in_a_message()


@_link
def cut_and_refused(proxy: FaultyProxy) -> None:
    """Reset, and for a while nobody gets through."""
    proxy.refuse(on=True)
    proxy.cut()
    time.sleep(PAUSE_S)
    proxy.refuse(on=False)


@_link
def half_closed_towards_trainer(proxy: FaultyProxy) -> None:
    """One direction ends."""
    proxy.close_towards_trainer()


@_link
def half_closed_towards_simulator(proxy: FaultyProxy) -> None:
    """The other direction ends."""
    proxy.close_towards_simulator()


@_link
def delayed(proxy: FaultyProxy) -> None:
    """Everything comes late for a while."""
    proxy.delay(0.2)
    time.sleep(PAUSE_S)
    proxy.delay(0)


@_link
def silent_for_a_moment(proxy: FaultyProxy) -> None:
    """Nothing comes, for less than the deadline."""
    proxy.silence(on=True)
    time.sleep(PAUSE_S)
    proxy.silence(on=False)


@_link
def silent_for_long(proxy: FaultyProxy) -> None:
    """Nothing comes, for longer than the deadline; then all that was held."""
    proxy.silence(on=True)
    time.sleep(ABSENCE_S)
    proxy.silence(on=False)


def link(kind: str, bench: Bench) -> Outcome:
    """The way between simulators and stepping is harmed."""
    with proxied(bench) as (trial, proxy):
        trial.under_way()
        with trial.recovering():
            LINKS[kind](proxy)
        expect(kind in _LATE or connections(trial) > SIMULATORS, "no simulator had to connect again")
        expect(kind not in _LATE or proxy.late > 0, "nothing came late")
        return completes(trial, across(kind))


def connections(trial: Trial) -> int:
    """How often simulators have connected."""
    return len(trial.log("stepping-0", "simulator_connected"))


def across(kind: str) -> Allowed:
    """What a harmed link allows: a simulator's step may have left it and never have come."""
    broken = kind not in (*_LATE, "down-for-a-moment")
    # Back before its old connection was given up, a simulator may hear that its number is taken; it is started anew.
    taken = Allowed(failed="simulator", times=ANY, certain=False, unheard=2 * AREAS, counted=False)
    return taken if broken else Allowed(times=0)


def wire(seconds: float, kind: str, bench: Bench) -> Outcome:
    """Simulators live in a network of their own; its link goes down for some seconds."""
    with network() as own, proxied(bench, own.host, own.prefix) as (trial, _):
        trial.under_way()
        with trial.recovering():
            own.down()
            time.sleep(seconds)
            own.up()
        expect(kind == "down-for-a-moment" or connections(trial) > SIMULATORS, "no simulator had to connect again")
        return completes(trial, across(kind))


def services_cut(bench: Bench) -> Outcome:
    """All links between services are destroyed, one after the other; nobody fails and nothing is lost."""
    with bench.trial(transport="tcp") as trial:
        trial.under_way()
        with trial.recovering():
            for name, endpoint in sorted(trial.endpoints().items()):
                port = urlsplit(endpoint).port
                assert port is not None
                # Without self-play nobody follows what ghosts play with.
                expect(destroy(port) > 0 or name == "topic:ghosts", f"there was no connection to {name}")
                time.sleep(trial.random.uniform(0.0, 0.3))
        return completes(trial, Allowed(times=0))


def services_down(bench: Bench) -> Outcome:
    """Services and simulators live in a network of their own whose loopback goes down for a moment."""
    with network() as own, bench.trial(transport="tcp", prefix=own.prefix) as trial:
        trial.under_way()
        with trial.recovering():
            own.down("lo")
            time.sleep(PAUSE_S)
            own.up("lo")
        return completes(trial, Allowed(times=0))


# ---------------------------------------------------------------- disk


def disk(bench: Bench, *, freed: bool) -> Outcome:
    """The run's disk is full; after some seconds there is room again, or never."""
    place = bench.folder / "small"
    with small_disk(place, DISK_MB) as small:
        try:
            with bench.trial(results=place, patience_s=LONG_S if freed else 2 * RECOVERY_S) as trial:
                trial.under_way()
                began, trained = time.monotonic(), trial.trained()
                small.fill()
                if not freed:
                    return _given_up(trial, trained)
                time.sleep(2 * RECOVERY_S)
                small.free()
                wanted = trial.version + 4
                trial.wait(lambda: trial.version >= wanted or trial.nearly_done(), "training with room again")
                trial.recovery_s = time.monotonic() - began
                return _went_on(trial)
        finally:
            shutil.copytree(place, bench.folder / "disk", ignore=shutil.ignore_patterns("ballast"))


def _went_on(trial: Trial) -> Outcome:
    """With room again the run completes as if nothing had been."""
    status = trial.end()
    expect(status == 0, f"exit status {status}: {trial.training.lines[-3:]}")
    summary = trial.training.summary
    step_counts = summary["behaviors"][BEHAVIOR]["step_counts"]
    expect(summary["status"] == "completed", f"status {summary['status']}")
    expect(step_counts["lost"] == 0, f"{step_counts['lost']} steps lost")
    expect(trial.folder.load_latest().trained == summary["behaviors"][BEHAVIOR]["steps"], "the last checkpoint is old")
    expect(any("not_written" in line for line in trial.training.lines), "nobody was told")
    return Outcome(step_counts["lost"], trial.recovery_s)


def _given_up(trial: Trial, trained: int) -> Outcome:
    """Without room the run ends, says why, and leaves the checkpoint before intact."""
    status = trial.end()
    expect(status in (STATUSES["failed"], STATUSES["stalled"]), f"exit status {status}: {trial.training.lines[-3:]}")
    causes = [line for line in trial.training.lines if "run_failed" in line or "run_stalled" in line]
    told = any(word in line for line in causes for word in ("No space left", "room from the disk", "no room"))
    expect(told, f"cause not told: {causes or trial.training.lines[-5:]}")
    found = trial.folder.newest_first()
    if found:
        last = trial.folder.load_latest()  # raises where it is not what was written
        expect(last.trained <= trained + 8 * in_flight(trial.mode), f"checkpoint of {last.trained}, trained {trained}")
    return Outcome(0)


# ---------------------------------------------------------------- the table

ROWS: dict[str, Callable[[Bench], Outcome]] = {
    **{f"{part} killed": partial(kill, part) for part in ("simulator-0", "watcher-0", *SERVICES)},
    **{f"{part} killed, then Ctrl-C": partial(kill_and_stop, part) for part in SERVICES},
    **{f"{part} stopped {PAUSE_S:g} s": partial(pause, part) for part in ("simulator-0", *SERVICES)},
    **{f"{part} hangs": partial(hang, part) for part in SERVICES},
    "simulator-0 hangs": absent,
    **{f"link {kind}": partial(link, kind) for kind in LINKS},
    f"network down {PAUSE_S:g} s": partial(wire, PAUSE_S, "down-for-a-moment"),
    f"network down {ABSENCE_S:g} s": partial(wire, ABSENCE_S, "down-for-long"),
    "links of services cut": services_cut,
    f"links of services down {PAUSE_S:g} s": services_down,
    "supervisor killed": supervisor,
    "disk full, then freed": partial(disk, freed=True),
    "disk full": partial(disk, freed=False),
    **{f"{part} killed too often": partial(too_often, part) for part in ("simulator-0", *SERVICES)},
}
