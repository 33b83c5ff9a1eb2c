"""Watches the parts of a run: kills services that do not answer, reports stalls, bounds files that others write.

It writes `processes.json`: the share of a core that each process has which is no service, and so has no topic.

It also says on the console when a game is to be started by hand, because one that is started earlier finds no trainer.

consumes       the topics of all services: heartbeats, metrics, simulators given up; the standard error of bridges
produces       killed parts, which are then restarted; log lines; the end of a run that stalls too often; a file
waits for      its next look
unblocked by   time alone
"""

import json
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
from structlog.typing import FilteringBoundLogger

from sparring.pipeline.errors import NOTICE
from sparring.pipeline.files import DAMAGE, regular, write_atomically
from sparring.pipeline.messages.channels import METRICS, STEPPING_STATE
from sparring.pipeline.messages.metrics import Metrics
from sparring.pipeline.monitoring import logs
from sparring.pipeline.monitoring.files import full, trim
from sparring.pipeline.monitoring.progress import SIMULATORS
from sparring.pipeline.monitoring.stalls import Stall, StallHistory, Stalls
from sparring.pipeline.monitoring.writing import COUNTER
from sparring.pipeline.queues.interface import Subscription
from sparring.pipeline.settings import started_by_hand
from sparring.services.process.hosting import Process, group_cpu_s
from sparring.services.supervision.active_run import ActiveRun, Part

HANG_S = 9.0
"""A service that has answered and then stays silent for this long is killed, so that a hang is found within 10 s.

On a machine that is too busy, the time for which it could run and was given no core does not count.
"""

MONITOR_HANG_S = 30.0
"""The same for the monitor, which no other service waits for and which runs at the lowest priority."""

START_S = 90.0
"""A service that has not answered since its start is killed after so much CPU time, or so long without any.

On a machine that is too busy it gets little CPU time, and needs as much of it as elsewhere.
"""

WRITES_S = 10.0
"""The shortest time between two reports that a service cannot write."""

_ANY_CPU_S: Final = 0.1
_FRESH_S: Final = 2.0
"""A heartbeat that is no older than this is on time."""

LOOK_S = 0.5
_PAUSE_S = 5.0
"""A longer gap between two looks means that this process or the whole machine was paused."""
_MEASURE_S = 2.0
"""Time over which a share of a core is measured."""
_TRIM_S = 2.0
"""A file that others write can exceed its bound by what they write in that time."""

ASKS: Final = "press Play"
"""A bridge writes these words once it listens for its game."""

PROCESSES: Final = "processes.json"
_WRITE_FAILED: Final = "not_written"
_MOST_BYTES: Final = 65536
_MOST_NOTES: Final = 1000


class Watchdog:
    """Watches the parts of a run."""

    def __init__(self, active: ActiveRun) -> None:
        run, self._settings = active.topology.run, active.settings
        self._active = active
        self._abandoned: dict[tuple[str, str], int] = {}  # times, by incarnation of stepping and simulator
        self._reported_writes: dict[str, tuple[float, float]] = {}  # by service: failed writes reported, and when
        # A simulator that others start may connect at any time.
        self._launches = len(active.topology.simulators) > len(started_by_hand(run.settings))
        self._stalls = Stalls(run.sinks, self._settings.stall_timeout_s)
        self._history = StallHistory(self._settings.stall_timeout_s, self._settings.stalls.period_s)

    async def watch(self) -> None:
        """Kills services that do not answer and handles stalls, until it is cancelled."""
        active = self._active
        looked = awake = active.clock()
        while True:
            await anyio.sleep(LOOK_S)
            now = active.clock()
            if now - looked > _PAUSE_S:  # after a pause of our own, what arrived meanwhile is still to be read
                awake = now
            looked = now
            for name, topic in active.topics.items():
                self._check_answers(active.parts[name], topic, now, awake)
                if (metrics := topic.latest(METRICS)) is not None:
                    self._check_writes(metrics, now)
                    self._judge(name, metrics, now)
            self._check_simulators(now)
            self._stalls.sinks = active.topology.run.sinks
            if not active.over.is_set():  # parts that are being stopped wait for each other
                self._check_progress(self._stalls.look(now), now)

    def _judge(self, name: str, metrics: Metrics, now: float) -> None:
        """Adds the numbers of a service to those that show stalls, unless an incarnation that died published them."""
        part = self._active.parts[name]
        if part.down or metrics.start != self._active.incarnation(name, part.starts):
            self._stalls.forget(name)
        elif name in self._active.topology.run.services:
            self._stalls.update(metrics, now)

    async def watch_folder(self) -> None:
        """Ends a run whose folder is gone, and bounds the files in it that other programs write.

        These are the standard error of all parts, and the logs of Unity players.
        """
        bounds, folder = self._settings.logs, self._active.topology.run.directory
        while True:
            self._active.check_folder()
            if self._active.gone:
                return
            await anyio.sleep(_TRIM_S)
            for path in (*folder.glob("logs/*.stderr"), *folder.glob("run_logs/*.log")):
                if not full(path, bounds.most_bytes):
                    continue
                try:
                    lost = await anyio.to_thread.run_sync(trim, path, bounds.most_bytes, bounds.kept)
                    self._active.log.info("log_rotated", file=str(path), lost_bytes=lost)
                except OSError as error:
                    self._active.log.warning("log_rotation_failed", file=str(path), error=str(error))

    async def measure(self) -> None:
        """Writes how busy simulators, the monitor and writers are, until it is cancelled."""
        run, used, measured = self._active.topology.run, dict[int, float](), self._active.clock()
        while True:
            await anyio.sleep(_MEASURE_S)
            parts = [part for part in self._active.parts.values() if part.name not in run.services]
            pids = {part.name: part.hosted.pid for part in parts if isinstance(part.hosted, Process)}
            if not pids:
                continue
            before, began = used, measured
            used = await anyio.to_thread.run_sync(group_cpu_s, pids.values())
            measured = self._active.clock()
            spent = {name: max(0.0, used[pid] - before.get(pid, used[pid])) for name, pid in pids.items()}
            content = json.dumps({name: round(cpu_s / (measured - began), 3) for name, cpu_s in spent.items()})
            write = partial(write_atomically, run.directory / PROCESSES, content.encode(), durable=False)
            try:
                await anyio.to_thread.run_sync(write, abandon_on_cancel=True)
            except OSError as error:
                self._active.log.info("processes_not_written", error=str(error))

    def _check_answers(self, part: Part, topic: Subscription, now: float, awake: float) -> None:
        if part.hosted is None or part.stopping or part.down:
            return
        if topic.heartbeat_age >= now - part.started_at:
            self._check_start(part, now, awake)
            return
        whole_s = part.hosted.starved_s
        if topic.heartbeat_age < _FRESH_S:
            part.starved_s = whole_s
        starved_s = max(0.0, whole_s - part.starved_s)  # less where a thread has ended, with its time
        since = min(topic.heartbeat_age, now - awake) - starved_s
        if since > (HANG_S if part.name in self._active.topology.run.services else MONITOR_HANG_S):
            self._kill_silent(part, "hangs", since)

    def _check_start(self, part: Part, now: float, awake: float) -> None:
        """Kills a service that has not answered yet, and has had enough time for that."""
        cpu_s = None if part.hosted is None else part.hosted.cpu_s
        if cpu_s is not None and cpu_s - part.cpu_s >= _ANY_CPU_S:
            part.cpu_s, part.given_at = cpu_s, now
        idle_s = now - max(part.given_at, part.started_at, awake)
        if part.cpu_s > START_S:
            self._kill_silent(part, f"does not answer after {part.cpu_s:.0f} s of CPU time", now - part.started_at)
        elif idle_s > START_S:
            self._kill_silent(part, "does not start, and uses no CPU time", idle_s)

    def _kill_silent(self, part: Part, cause: str, silent_s: float) -> None:
        found = {"cause": cause, "seconds": round(silent_s, 1), "effect": "it is killed, and started again"}
        self._active.log.warning("heartbeat_missed", part=part.name, **found, notice=True)
        part.started_at, part.reported = self._active.clock(), True  # until it has ended
        part.kill()

    def _check_simulators(self, now: float) -> None:
        """Kills simulators that the run has started and stepping has given up: a hanging one never reconnects."""
        for name in self._active.topology.run.stepping:
            state = self._active.latest(name, STEPPING_STATE)
            if state is None:
                continue
            for number, times in state.given_up.items():
                key = (state.source, number)
                fresh, self._abandoned[key] = times > self._abandoned.get(key, 0), times
                part = self._active.parts.get(f"simulator-{number}")  # None where it was started by hand
                limit_s = self._settings.simulator_timeout_s
                if fresh and part is not None and part.hosted is not None and now - part.started_at > limit_s:
                    self._kill_silent(part, "is silent", limit_s)

    def _check_writes(self, metrics: Metrics, now: float) -> None:
        """Reports a service that cannot write: on a full disk it cannot write its own log either."""
        name, count = metrics.service, metrics.counters.get(COUNTER, 0)
        reported, at = self._reported_writes.get(name, (0, -WRITES_S))
        if count > reported and now - at >= WRITES_S:
            self._reported_writes[name] = count, now
            folder = str(self._active.topology.run.directory)
            self._active.log.warning(_WRITE_FAILED, part=name, times=int(count), folder=folder, notice=True)

    def _check_progress(self, stalls: list[Stall], now: float) -> None:
        """Reports stalls, kills a service that is stuck, and ends a run with too many stalls."""
        log = self._active.log
        for root in self._history.over(stalls):
            log.info("stall_resolved", root=root, notice=True)
        for stall in self._history.news(stalls, now):
            count = self._history.count(now) if stall.root != SIMULATORS or self._launches else 0
            log.warning("stalled", root=stall.root, cause=stall.text, count=count, notice=True)
            if count > self._settings.stalls.budget:
                log.error("run_stalled", error=stall.text, notice=True)
                self._active.end("stalled", stall.text)
            elif stall.kind == "stuck":
                part = self._active.parts[stall.root]
                part.reported = True
                part.kill()


async def relay(files: Callable[[], Iterable[Path]], log: FilteringBoundLogger, pace_s: float = 0.5) -> None:
    """Logs what other processes have for the user, until it is cancelled, and then once more.

    These are lines in which a bridge asks for its game or notes something, and notices in the logs of services.

    Args:
        files: returns the standard error of bridges and writers, and the logs (.jsonl) of services; lines that exist
            already are skipped, as an earlier session wrote them.
        log: for the console.
        pace_s: seconds between two looks.
    """
    ends = {path: path.stat().st_size for path in files() if path.exists()}
    notes: set[str] = set()

    def look() -> None:
        for path in files():
            new, ends[path] = written_since(path, ends.get(path, 0))
            for line in new.decode(errors="replace").splitlines():
                if path.suffix == ".jsonl":
                    level, note = _notice_of(line)
                elif ASKS in line:
                    log.info("start_the_game", part=path.stem, note=line, notice=True)
                    continue
                else:
                    level, note = "warning", line.removeprefix(NOTICE) if line.startswith(NOTICE) else ""
                if note and note not in notes and len(notes) < _MOST_NOTES:
                    notes.add(note)
                    getattr(log, level)("notice", part=path.stem, note=note, notice=True)

    try:
        while True:
            look()
            await anyio.sleep(pace_s)
    finally:
        look()


def _notice_of(line: str) -> tuple[str, str]:
    """Returns level and text of a line of a log; no text where it is not for the console, or is there already."""
    if '"notice": true' not in line:
        return "", ""
    try:
        found = json.loads(line)
        level = found["level"]
        facts = [f"{name}={value}" for name, value in found.items() if name not in logs.PLACED | {"start"}]
        own = level in ("info", "warning", "error") and found["event"] != _WRITE_FAILED  # `_check_writes` says that
        return (level, "  ".join([found["event"], *facts])) if own else ("", "")
    except DAMAGE:
        return "", ""


def written_since(path: Path, end: int) -> tuple[bytes, int]:
    """Returns the whole lines of a file after `end`, or all where it was emptied since, and the offset of their end."""
    try:
        with regular(path).open("rb") as file:
            end = end if end <= os.fstat(file.fileno()).st_size else 0
            file.seek(end)
            text = file.read(_MOST_BYTES)
    except OSError:
        return b"", end
    whole = text if len(text) == _MOST_BYTES else text[: text.rfind(b"\n") + 1]
    return whole, end + len(whole)
