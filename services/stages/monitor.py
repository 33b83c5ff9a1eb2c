"""Writes the metrics of all services to the console and to the files of the run.

| | |
|---|---|
| consumes | `Metrics` on the topic of every service |
| produces | console lines, and files in the folder of the run |
| waits for | updates of a topic; the next second; its stop |
| unblocked by | every service, about once a second |

Files: `metrics.jsonl` (a line per interval and behavior) and `services.jsonl` (a line per service every 30 s), of which
rotation deletes the oldest lines; `status.json` (the state of the run, every second), `metrics.prom` (for Prometheus,
which may also ask for its content by HTTP),
and at the end `curves.png`. Writers pass on what is in `metrics.jsonl`, each in a process of its own.

No service waits for the monitor: training continues when it dies. It saves its sums in `monitor.json` every second,
from which its next incarnation continues.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import anyio
from pydantic import TypeAdapter, ValidationError

from sparring.pipeline.files import Json, regular
from sparring.pipeline.messages.channels import METRICS
from sparring.pipeline.monitoring import console, logs
from sparring.pipeline.monitoring.console import Display
from sparring.pipeline.monitoring.files import RunFiles, to_json
from sparring.pipeline.monitoring.intervals import Interval, Intervals, IntervalStart, Pace
from sparring.pipeline.monitoring.overview import Overview, Totals
from sparring.pipeline.monitoring.prometheus import Exporter
from sparring.pipeline.monitoring.stalls import Stall, Stalls
from sparring.pipeline.monitoring.summary import CounterWindows, behavior_entry, service_entry, summarize_behavior
from sparring.pipeline.monitoring.writers.delivery import states
from sparring.pipeline.queues.interface import Subscription
from sparring.services.process.runtime import Context, follow, follow_growth, publish_metrics

SILENT_S = 10.0
"""Seconds without an answer after which a service is shown as silent."""

TOPIC_PACE_S = 0.5
"""Numbers change every second; other keys of the topics change hundreds of times per second."""

SERVICE_LINES_S = 30.0
"""Seconds between two lines of a service in `services.jsonl`."""

LINE_INTERVAL_S = 60.0
"""Seconds after which a behavior gets a line although no interval has ended."""


async def run(context: Context, display: Display | None = None) -> None:
    """Watches a run until it is stopped, then closes all intervals and plots the curves.

    Args:
        context: of the monitor, which stops after all services have published their final numbers.
        display: console, by default standard output.

    Raises:
        OSError: a file of the run cannot be written at the start or the end; other failures are counted.

    Cancelled: the files are at most a second old, and no curves are plotted.
    """
    subscriptions: dict[str, Subscription] = {}
    if display is None:
        display = Display(logs.LineWriter(logs.Terminal(1)))
    try:
        state = MonitorState(context, subscriptions, display)
        topic = await context.transport.publisher(context.service)

        async def follow_services(services: Iterable[str]) -> None:
            for service in services:
                subscriptions[service] = await context.transport.subscribe(service, METRICS, pace=TOPIC_PACE_S)
                tasks.start_soon(follow, subscriptions[service], state.take)

        async def grow(names: Sequence[str]) -> None:
            state.grow()
            await follow_services(f"learning-{name}" for name in names)

        with _served(context, state.exporter):
            async with anyio.create_task_group() as tasks:
                await follow_services(context.run.services)
                tasks.start_soon(publish_metrics, context, topic, state.refresh)
                tasks.start_soon(follow_growth, context, grow)
                await context.stop.wait()
                tasks.cancel_scope.cancel()
        state.finish()
    finally:
        display.close()
        with anyio.CancelScope(shield=True):
            for subscription in subscriptions.values():
                await subscription.aclose()


@contextmanager
def _served(context: Context, exporter: Exporter) -> Iterator[None]:
    """Answers Prometheus at the address of the settings, if there is one; an address in use does not end the run."""
    address = context.run.settings.pipeline.metrics_address
    if address is None:
        yield
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(exporter.served(address))
        except OSError as error:
            remedy = "free the port, or set pipeline.metrics_address to another"
            context.log.warning("metrics_not_served", address=address, error=str(error), remedy=remedy, notice=True)
        else:
            context.log.info("metrics_served", address=f"http{address.removeprefix('tcp')}/metrics", notice=True)
        yield


@dataclass(frozen=True, kw_only=True, slots=True)
class _SavedState:
    """Holds the content of `monitor.json`."""

    time_s: float
    services: dict[str, Totals]
    intervals: dict[str, IntervalStart]
    paces: dict[str, dict[str, float]]


_SAVED_STATE = TypeAdapter(_SavedState)


class MonitorState:
    """Collects numbers, and writes files and lines; it is the monitor without its waiting.

    Attributes:
        stalled: stalls at the last tick.
        exporter: numbers for Prometheus.

    Args:
        context: of the monitor.
        subscriptions: subscriptions by service.
        display: console display.
    """

    def __init__(self, context: Context, subscriptions: Mapping[str, Subscription], display: Display) -> None:
        run, limits = context.run, context.run.settings.pipeline
        self._context = context
        self._subscriptions = subscriptions
        self._display = display
        self._files = RunFiles(run.directory, limits.logs.most_bytes, limits.logs.kept)
        self._overview = Overview(training=run.playing is None)
        self._intervals = Intervals(self._overview, {}, {})
        self._paces: defaultdict[str, Pace] = defaultdict(Pace)
        self._windows = CounterWindows()
        self._service_lines: dict[str, dict[str, Json]] = {}
        self._service_lines_due_s = context.clock() + SERVICE_LINES_S
        self._arrived_s: dict[str, float] = {}
        self._line_at_s: dict[str, float] = {}
        self._last: dict[str, Interval] = {}
        self._progress: dict[str, str] = {}
        self._stalls = Stalls((), limits.stall_timeout_s)
        self.stalled: list[Stall] = []
        self.exporter = Exporter(run.id)
        context.registry.add("unwatched_s", self._restore())
        self.grow()

    def grow(self) -> None:
        """Takes over the behaviors that the run has."""
        run = self._context.run
        behaviors = run.settings.behaviors.items()
        self._overview.expect(run.services)
        self._intervals.frequencies = {name: one.summary_freq for name, one in behaviors}
        self._intervals.max_steps = {name: one.max_steps for name, one in behaviors if run.playing is None}
        self._stalls.sinks = run.sinks

    def take(self, subscription: Subscription) -> None:
        """Adds the latest numbers of a topic."""
        metrics = subscription.latest(METRICS)
        if metrics is not None and self._overview.update(metrics):
            self._arrived_s[metrics.service] = self._context.clock()
            self._stalls.update(metrics, self._context.clock())

    def refresh(self) -> None:
        """Writes due lines and files, and updates the monitor's own numbers."""
        registry = self._context.registry
        registry.add("ticks")
        try:
            registry.add("intervals", self.tick())
        except OSError as error:  # later files contain the numbers, or one line is missing
            self._context.writing.failed(error, "metrics")
        registry.gauge("stalled", len(self.stalled))
        if self.exporter.refused:
            registry.reach("requests_refused", self.exporter.refused)

    def tick(self, *, last: bool = False) -> int:
        """Writes due lines and files, the last time all of them; returns the number of intervals that ended."""
        clock_s, time_s = self._context.clock(), self._context.wall_clock()
        if not last:
            self.stalled = self._stalls.look(clock_s)
        ended = 0
        for behavior in self._behaviors():
            self._look(behavior, clock_s, time_s)
            if self._intervals.progressed(behavior) if last else self._intervals.due(behavior):
                self._close_interval(behavior, clock_s, time_s)
                ended += 1
            elif not last and clock_s - self._line_at_s[behavior] >= LINE_INTERVAL_S:
                self._line_at_s[behavior] = clock_s
                self._display.line(console.meanwhile(self._intervals.peek(behavior, time_s), self._stuck()))
        if last or clock_s >= self._service_lines_due_s:
            self._service_lines_due_s = clock_s + SERVICE_LINES_S
            self._write_services(time_s)
        self._write_status(clock_s, time_s, ended=last)
        return ended

    def finish(self) -> None:
        """Adds the final numbers, closes every interval, and plots the curves; a full disk only leaves these out."""
        for subscription in self._subscriptions.values():
            self.take(subscription)
        for write in (partial(self.tick, last=True), partial(self._files.plot_curves, self._context.run.id)):
            try:
                write()
            except OSError as error:
                self._context.writing.failed(error, "the last metrics")

    def _behaviors(self) -> list[str]:
        return sorted({*self._context.run.settings.behaviors, *self._overview.behaviors()})

    def _look(self, behavior: str, clock_s: float, time_s: float) -> None:
        self._intervals.track(behavior, time_s)
        self._line_at_s.setdefault(behavior, clock_s)
        produced = int(self._overview.numbers.counters.get(f"steps/{behavior}", 0))
        self._paces[behavior].look(clock_s, produced)

    def _close_interval(self, behavior: str, clock_s: float, time_s: float) -> None:
        interval = self._intervals.close(behavior, time_s)
        self._last[behavior], self._line_at_s[behavior] = interval, clock_s
        self._files.intervals.append(to_json(interval.plain()))
        self._display.line(console.line(interval))

    def _stuck(self) -> list[str]:
        """Returns the stalls, else the services that are silent or wait."""
        if self.stalled:
            return [f"STALLED {stall.text}" for stall in self.stalled]
        found = []
        for service, subscription in self._subscriptions.items():
            latest, age_s = self._overview.services[service].latest, subscription.heartbeat_age
            if not latest.start:
                found.append(f"{service} has not reported yet")
            elif age_s > SILENT_S:
                found.append(f"{service} is silent")
            elif latest.waiting_for:
                found.append(f"{service} waits for {latest.waiting_for}")
        return found

    def _write_services(self, time_s: float) -> None:
        for service, totals in self._overview.services.items():
            self._service_lines[service] = self._windows.report(service, totals, time_s)
            self._files.services.append(to_json(self._service_lines[service]))
        self._export()
        self._files.replace("metrics.prom", self.exporter.text())

    def _export(self) -> None:
        roots = [stall.root for stall in self.stalled]
        self.exporter.update(self._overview.services, self._behaviors(), roots, states(self._context.run.directory))

    def _write_status(self, clock_s: float, time_s: float, *, ended: bool) -> None:
        content = {
            "run_id": self._context.run.id,
            "time_s": time_s,
            "ended": ended,
            "stalls": [stall.text for stall in self.stalled],
            "services": {service: self._service(service, clock_s) for service in self._overview.services},
            "behaviors": {behavior: self._behavior(behavior, time_s) for behavior in self._behaviors()},
            "writers": {
                name: {"starts": state.starts, **state.counts}
                for name, state in states(self._context.run.directory).items()
            },
        }
        self._files.replace("status.json", to_json(content))
        if self._context.run.settings.pipeline.metrics_address is not None:
            self._export()
        self._display.progress(list(self._progress.values()))
        starts, services = self._intervals.starts, self._overview.services
        paces = {behavior: {"active_s": pace.active_s} for behavior, pace in self._paces.items()}
        state = _SavedState(time_s=time_s, services=services, intervals=starts, paces=paces)
        self._files.replace("monitor.json", _SAVED_STATE.dump_json(state))

    def _service(self, service: str, clock_s: float) -> dict[str, Json]:
        subscription, line = self._subscriptions.get(service), self._service_lines.get(service)
        heartbeat_age_s = subscription.heartbeat_age if subscription else float("inf")
        age_s = clock_s - self._arrived_s.get(service, float("-inf"))
        return service_entry(self._overview.services[service], line, heartbeat_age_s, age_s)

    def _behavior(self, behavior: str, time_s: float) -> dict[str, Json]:
        pace, now = self._paces[behavior], self._intervals.peek(behavior, time_s)
        results = summarize_behavior(self._overview, behavior, pace.mean(self._overview.trained(behavior)))
        self._progress[behavior] = console.progress(now, results.steps_per_s)
        return behavior_entry(now, self._last.get(behavior), results, pace.recent)

    def _restore(self) -> float:
        """Continues from the sums of an earlier incarnation; returns the seconds without a monitor since it died.

        What was counted meanwhile belongs to the next interval.
        """
        path = self._context.run.directory / "monitor.json"
        if not path.exists():
            return 0.0
        try:
            state = _SAVED_STATE.validate_json(regular(path).read_bytes())
        except (OSError, ValidationError) as error:
            self._context.log.warning("monitor.json cannot be read: counting starts from 0", error=repr(error))
            return 0.0
        gap_s = self._context.wall_clock() - state.time_s
        self._intervals.restore(state.intervals, gap_s)
        self._overview.restore(state.services)
        self._paces.update({behavior: Pace(**saved) for behavior, saved in state.paces.items()})
        if self._context.first:
            return 0.0
        self._context.log.warning("unwatched", seconds=round(max(0.0, gap_s), 1))
        return max(0.0, gap_s)
