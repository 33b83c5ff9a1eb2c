"""Writes the metrics of all services to the console and to the files of the run.

| | |
|---|---|
| consumes | `Metrics` on the topic of every service |
| produces | console lines, and files in the folder of the run |
| waits for | updates of a topic; the next second; its stop |
| unblocked by | every service, about once a second |

Files: `metrics.jsonl` (a line per interval and behavior) and `services.jsonl` (a line per service every 30 s), of which
rotation deletes the oldest lines; `status.json` (the state of the run, every second), `metrics.prom` (for Prometheus),
`BEHAVIOR/events.out.tfevents.*` (for TensorBoard), and at the end `curves.png`.

No service waits for the monitor: training continues when it dies. It saves its sums in `monitor.json` every second,
from which its next incarnation continues.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

import anyio

from sparring.pipeline.errors import QueueClosed
from sparring.pipeline.messages.channels import METRICS
from sparring.pipeline.monitoring import console, events, logs, prometheus, status
from sparring.pipeline.monitoring.files import RunFiles, to_json
from sparring.pipeline.monitoring.intervals import Interval, Intervals
from sparring.pipeline.monitoring.metrics import Registry
from sparring.pipeline.monitoring.overview import Overview
from sparring.pipeline.monitoring.pace import Pace
from sparring.pipeline.monitoring.stalls import Stall, Stalls
from sparring.pipeline.monitoring.summary import BehaviorSummary, summarize_behavior
from sparring.pipeline.monitoring.writing import Writing
from sparring.pipeline.queues.interface import Publisher, Subscription, Transport
from sparring.services.process.runtime import Context, follow_growth

SILENT_S = 10.0
"""Seconds without an answer after which a service is shown as silent."""

TOPIC_PACE_S = 0.5
"""Numbers change every second; other keys of the topics change hundreds of times per second."""


Adopt = Callable[["RunInfo"], Coroutine[None, None, None]]
Follow = Callable[[Adopt], Coroutine[None, None, None]]


class StopSignal(Protocol):
    """Signals the end of the monitor, as an `anyio.Event` does."""

    async def wait(self) -> object:
        """Waits until the run has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """Describes the run for the monitor.

    Attributes:
        run_id: id of the run.
        run_dir: existing folder of the run.
        services: names of all other services that publish.
        behaviors: `summary_freq` in steps, by behavior name.
        max_steps: step at which the run ends, by behavior name.
        summary_freq: `summary_freq` of other behaviors, in steps.
        training: False if the run only acts.
        tick_s: seconds between two ticks; the greatest age of `status.json`.
        service_lines_s: seconds between two lines of a service in `services.jsonl`.
        line_interval_s: seconds after which a behavior gets a line although no interval has ended.
        sinks: services at the end of the flow, whose waits are examined for stalls.
        stall_timeout_s: seconds without a change that make a stall.
        again: whether an earlier incarnation of the monitor has died.
        log_bytes: size at which `services.jsonl` and `metrics.jsonl` are rotated.
        logs_kept: number of rotated files of each that are kept.
    """

    run_id: str
    run_dir: Path
    services: Sequence[str]
    behaviors: Mapping[str, int]
    max_steps: Mapping[str, int] = field(default_factory=dict)
    summary_freq: int = 50_000
    training: bool = True
    tick_s: float = 1.0
    service_lines_s: float = 30.0
    line_interval_s: float = 60.0
    sinks: Sequence[str] = ()
    stall_timeout_s: float = 300.0
    again: bool = False
    log_bytes: int = 16 * 2**20
    logs_kept: int = 3


async def run(context: Context) -> None:
    """Watches the run of `context` until it is stopped."""

    async def follow_behaviors(adopt: Adopt) -> None:
        await follow_growth(context, lambda _names: adopt(_info_of(context)))

    await monitor(
        context.transport,
        _info_of(context),
        clock=context.clock,
        wall_clock=context.wall_clock,
        stop=context.stop,
        stream=sys.stdout,
        registry=context.registry,
        topic=await context.transport.publisher(context.service),
        follow_behaviors=follow_behaviors,
    )


def _info_of(context: Context) -> RunInfo:
    settings, learns = context.run.settings, context.run.playing is None
    return RunInfo(
        run_id=context.run.id,
        run_dir=context.run.directory,
        services=context.run.services,
        behaviors={name: behavior.summary_freq for name, behavior in settings.behaviors.items()},
        max_steps={name: behavior.max_steps for name, behavior in settings.behaviors.items() if learns},
        training=learns,
        sinks=context.run.sinks,
        stall_timeout_s=settings.pipeline.stall_timeout_s,
        again=not context.first,
        log_bytes=settings.pipeline.logs.most_bytes,
        logs_kept=settings.pipeline.logs.kept,
    )


async def monitor(
    transport: Transport,
    run: RunInfo,
    *,
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
    stop: StopSignal,
    stream: TextIO,
    registry: Registry,
    topic: Publisher | None = None,
    follow_behaviors: Follow | None = None,
) -> None:
    """Watches a run until `stop`, then closes all intervals and plots the curves.

    Args:
        transport: opens subscriptions to the topics.
        run: description of the run.
        clock: gives rising seconds.
        wall_clock: gives seconds since the epoch.
        stop: set after all services have published their final numbers.
        stream: console stream; a terminal also shows progress bars.
        registry: the monitor's own numbers.
        topic: topic on which these are published, if any.
        follow_behaviors: calls its argument with the description of the run whenever that has got behaviors.

    Raises:
        OSError: a file of the run cannot be written at the start or the end; other failures are counted.

    Cancelled: the files are at most a second old, and no curves are plotted.
    """
    subscriptions: dict[str, Subscription] = {}
    display = console.display(stream, clock, _log_closed_console)
    try:
        for service in run.services:
            subscriptions[service] = await transport.subscribe(service, TOPIC_PACE_S)
        watch = MonitorState(run, subscriptions, display, clock=clock, wall_clock=wall_clock)
        registry.add("unwatched_s", watch.unwatched_s)
        writing = Writing(registry, logs.get(), clock, limit_s=0)

        async def adopt(run: RunInfo) -> None:
            for service in [one for one in run.services if one not in subscriptions]:
                subscriptions[service] = await transport.subscribe(service, TOPIC_PACE_S)
                tasks.start_soon(_follow, subscriptions[service], watch)
            watch.adopt(run)

        async with anyio.create_task_group() as tasks:
            for subscription in subscriptions.values():
                tasks.start_soon(_follow, subscription, watch)
            if follow_behaviors is not None:
                tasks.start_soon(follow_behaviors, adopt)
            tasks.start_soon(_tick, watch, registry, writing, topic, run.tick_s, wall_clock)
            await stop.wait()
            tasks.cancel_scope.cancel()
        watch.finish()
    finally:
        display.close()
        with anyio.CancelScope(shield=True):
            for subscription in subscriptions.values():
                await subscription.aclose()


def _log_closed_console(error: OSError) -> None:
    """Logs that the console was closed; the monitor continues to write its files."""
    logs.get().warning("console_closed", error=str(error))


async def _follow(subscription: Subscription, watch: MonitorState) -> None:
    while True:
        watch.take(subscription)
        try:
            await subscription.changed()
        except QueueClosed:
            return


async def _tick(
    watch: MonitorState,
    own: Registry,
    writing: Writing,
    topic: Publisher | None,
    period_s: float,
    wall_clock: Callable[[], float],
) -> None:
    while True:
        own.add("ticks")
        try:
            own.add("intervals", watch.tick())
        except OSError as error:  # later files contain the numbers, or one line is missing
            writing.failed(error, "metrics")
        own.gauge("stalled", len(watch.stalled))
        if topic is not None:
            topic.publish(METRICS, own.snapshot(wall_clock()))
        await anyio.sleep(period_s)


class MonitorState:
    """Collects numbers, and writes files and lines; it is the monitor without its waiting.

    Attributes:
        stalled: stalls at the last tick.
        unwatched_s: seconds without a monitor between an incarnation that died and this one, whose counts belong to the
            next interval.

    Args:
        run: description of the run.
        subscriptions: subscriptions by service.
        display: console display.
        clock: gives rising seconds.
        wall_clock: gives seconds since the epoch.
    """

    def __init__(
        self,
        run: RunInfo,
        subscriptions: Mapping[str, Subscription],
        display: console.Display,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._run = run
        self._subscriptions = subscriptions
        self._display = display
        self._clock = clock
        self._wall_clock = wall_clock
        self._files = RunFiles(run.run_dir, wall_clock(), run.log_bytes, run.logs_kept)
        self._overview = Overview(run.services, training=run.training)
        self._intervals = Intervals(self._overview, run.behaviors, run.summary_freq, run.max_steps)
        self._paces: dict[str, Pace] = {}
        self._windows = status.CounterWindows()
        self._service_lines: dict[str, dict[str, Any]] = {}
        self._service_lines_due_s = clock() + run.service_lines_s
        self._arrived_s: dict[str, float] = {}
        self._line_at_s: dict[str, float] = {}
        self._last: dict[str, Interval] = {}
        self._stalls = Stalls(run.sinks, run.stall_timeout_s)
        self.stalled: list[Stall] = []
        self.unwatched_s = 0.0
        self._restore()

    def adopt(self, run: RunInfo) -> None:
        """Continues with a run that has more behaviors."""
        self._run = run
        self._overview.expect(run.services)
        self._intervals.adopt(run.behaviors, run.max_steps)
        self._stalls.sinks = run.sinks

    def take(self, subscription: Subscription) -> None:
        """Adds the latest numbers of a topic."""
        metrics = subscription.latest(METRICS)
        if metrics is not None and self._overview.update(metrics):
            self._arrived_s[metrics.service] = self._clock()
            self._stalls.update(metrics, self._clock())

    def tick(self) -> int:
        """Writes due lines and files; returns the number of intervals that ended."""
        clock_s, time_s = self._clock(), self._wall_clock()
        self.stalled = self._stalls.look(clock_s)
        ended = 0
        for behavior in self._behaviors():
            self._look(behavior, clock_s, time_s)
            if self._intervals.due(behavior):
                self._close_interval(behavior, clock_s, time_s)
                ended += 1
            elif clock_s - self._line_at_s[behavior] >= self._run.line_interval_s:
                self._report_progress(behavior, clock_s, time_s)
        if clock_s >= self._service_lines_due_s:
            self._service_lines_due_s = clock_s + self._run.service_lines_s
            self._write_services(time_s)
        self._write_status(clock_s, time_s, ended=False)
        return ended

    def finish(self) -> None:
        """Adds the final numbers, closes every interval, and plots the curves."""
        for subscription in self._subscriptions.values():
            self.take(subscription)
        clock_s, time_s = self._clock(), self._wall_clock()
        for behavior in self._behaviors():
            self._look(behavior, clock_s, time_s)
            if self._intervals.progressed(behavior):
                self._close_interval(behavior, clock_s, time_s)
        self._write_services(time_s)
        self._write_status(clock_s, time_s, ended=True)
        self._files.plot_curves(self._run.run_id)

    def _behaviors(self) -> list[str]:
        return sorted({*self._run.behaviors, *self._overview.behaviors()})

    def _look(self, behavior: str, clock_s: float, time_s: float) -> None:
        self._intervals.track(behavior, time_s)
        self._line_at_s.setdefault(behavior, clock_s)
        produced = int(self._overview.of(behavior).counters.get("steps", 0))
        self._paces.setdefault(behavior, Pace()).look(clock_s, produced)

    def _close_interval(self, behavior: str, clock_s: float, time_s: float) -> None:
        interval = self._intervals.close(behavior, time_s)
        self._last[behavior], self._line_at_s[behavior] = interval, clock_s
        self._files.append(interval.plain())
        self._files.add_events(logs.file_name(behavior), events.scalars(interval), interval.step, time_s)
        self._display.line(console.line(interval))

    def _report_progress(self, behavior: str, clock_s: float, time_s: float) -> None:
        self._line_at_s[behavior] = clock_s
        self._display.line(console.meanwhile(self._intervals.peek(behavior, time_s), self._stuck()))

    def _stuck(self) -> list[str]:
        """Returns the stalls, else the services that are silent or wait."""
        if self.stalled:
            return [f"STALLED {stall.text}" for stall in self.stalled]
        found = []
        for service, subscription in self._subscriptions.items():
            latest, age_s = self._overview.services[service].latest, subscription.heartbeat_age
            if latest is None:
                found.append(f"{service} has not reported yet")
            elif age_s > SILENT_S:
                found.append(f"{service} is silent")
            elif latest.waiting_for:
                found.append(f"{service} waits for {latest.waiting_for}")
        return found

    def _write_services(self, time_s: float) -> None:
        for service, totals in self._overview.services.items():
            self._service_lines[service] = self._windows.report(service, totals, time_s)
            self._files.append_service(self._service_lines[service])
        stalled = [stall.root for stall in self.stalled]
        text = prometheus.text(self._run.run_id, self._overview.services, self._behaviors(), stalled)
        self._files.replace("metrics.prom", text)

    def _write_status(self, clock_s: float, time_s: float, *, ended: bool) -> None:
        content = {
            "run_id": self._run.run_id,
            "time_s": time_s,
            "ended": ended,
            "stalls": [stall.text for stall in self.stalled],
            "services": {service: self._service(service, clock_s) for service in self._overview.services},
            "behaviors": {behavior: self._behavior(behavior, time_s) for behavior in self._behaviors()},
        }
        self._files.replace("status.json", to_json(content))
        self._files.replace("monitor.json", to_json(self._state(time_s)))

    def _service(self, service: str, clock_s: float) -> dict[str, Any]:
        subscription = self._subscriptions.get(service)
        heartbeat_age_s = subscription.heartbeat_age if subscription else float("inf")
        age_s = clock_s - self._arrived_s.get(service, float("-inf"))
        line = self._service_lines.get(service)
        return status.service_entry(self._overview.services[service], line, heartbeat_age_s, age_s)

    def _behavior(self, behavior: str, time_s: float) -> dict[str, Any]:
        pace, now = self._paces[behavior], self._intervals.peek(behavior, time_s)
        self._display.progress(behavior, now.step, now.max_steps, pace.recent)
        return status.behavior_entry(now, self._last.get(behavior), self._summary(behavior), pace.recent)

    def _summary(self, behavior: str) -> BehaviorSummary:
        return summarize_behavior(
            self._overview, behavior, self._paces[behavior].mean(self._overview.trained(behavior))
        )

    def _state(self, time_s: float) -> dict[str, Any]:
        return {
            "time_s": time_s,
            "services": self._overview.state(),
            "intervals": self._intervals.state(),
            "paces": {behavior: pace.state() for behavior, pace in self._paces.items()},
        }

    def _restore(self) -> None:
        text = self._files.read("monitor.json")
        if text is None:
            return
        try:
            state = json.loads(text)
            paces = {behavior: Pace.restored(pace) for behavior, pace in state["paces"].items()}
            gap_s = self._wall_clock() - state["time_s"]
            self._intervals.restore(state["intervals"], gap_s)
            self._overview.restore(state["services"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            logs.get().warning("monitor.json cannot be read: counting starts from 0", error=repr(error))
            return
        self._paces = paces
        if self._run.again:
            self.unwatched_s = max(0.0, gap_s)
            logs.get().warning("unwatched", seconds=round(self.unwatched_s, 1))
