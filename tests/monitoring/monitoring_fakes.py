"""A fake run: topics in memory, services that publish given numbers, and a monitor that reads them."""

from __future__ import annotations

import io
import json
import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import structlog

from sparring.pipeline.messages.metrics import Metrics
from sparring.pipeline.monitoring.console import Display
from sparring.pipeline.monitoring.logs import PROGRESS
from sparring.pipeline.monitoring.metrics import LAG_BOUNDS, LATENCY_BOUNDS, Registry
from sparring.pipeline.monitoring.overview import Overview
from sparring.pipeline.settings import parse_settings
from sparring.services.process.runtime import Context, Playback, Run
from sparring.services.stages import monitor
from sparring.services.stages.monitor import MonitorState

EPOCH_S = 1_700_000_000.0


class FakeSubscription:
    """A subscription into which a test publishes."""

    def __init__(self) -> None:
        self.records: dict[str, Any] = {}
        self.publisher = ""
        self.heartbeat_age = math.inf
        self.closed = False
        self._news = anyio.Event()

    def publish(self, record: Metrics) -> None:
        self.records["metrics"] = record
        self.publisher, self.heartbeat_age = record.start, 0.0
        self._news.set()

    async def changed(self) -> None:
        await self._news.wait()
        self._news = anyio.Event()

    def latest(self, topic: Any) -> Any:
        return self.records.get(topic.key)

    async def aclose(self) -> None:
        self.closed = True


class FakeTransport:
    """Opens fake subscriptions and keeps them."""

    def __init__(self) -> None:
        self.subscriptions: dict[str, FakeSubscription] = {}
        self.published: list[tuple[str, Any]] = []

    async def subscribe(self, service: str, *_topics: object, pace: float = 0.0) -> FakeSubscription:
        subscription = self.subscriptions.setdefault(service, FakeSubscription())
        if subscription.records:  # a new subscriber gets what is there
            subscription._news.set()
        return subscription

    async def publisher(self, service: str) -> FakeTransport:
        assert service == "monitor"
        return self

    def publish(self, topic: Any, record: Any) -> None:
        self.published.append((topic.key, record))

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the monitor must not use {name}")


class FakeRun:
    """The services of a run with the behavior Balance, and the numbers that they publish."""

    services = ("stepping-0", "assembly", "coordination", "learning-Balance")

    def __init__(self) -> None:
        self.starts = dict.fromkeys(self.services, 1)
        self.registries = {service: self._registry(service) for service in self.services}
        self.produced = self.trained = 0

    def _registry(self, service: str) -> Registry:
        registry = Registry(service, f"{service}.{self.starts[service]}")
        registry.histogram("lag/Balance", LAG_BOUNDS)
        registry.histogram("action_latency_s", LATENCY_BOUNDS)
        return registry

    def restart(self, service: str) -> None:
        self.starts[service] += 1
        self.registries[service] = self._registry(service)

    def collect(self, steps: int, returns: list[float], length: int = 100) -> None:
        self.produced += steps
        self.registries["stepping-0"].add("steps/Balance", steps)
        self.registries["stepping-0"].observe_many("action_latency_s", [0.0005] * 99 + [0.004])
        self.registries["stepping-0"].queue("steps", messages=3, steps=300, capacity=64, waits=1, waited_s=0.5)
        assembly = self.registries["assembly"]
        assembly.observe_moments("episode_return", returns, "Balance")
        assembly.observe_moments("episode_length", [length] * len(returns), "Balance")
        assembly.gauge("episodes_open/Balance", 64)
        assembly.gauge("episode_oldest/Balance", 812)
        self._keep_step_counts()

    def train(self, steps: int, lag: int = 1, entropy: float = 1.42) -> None:
        self.trained += steps
        learner = self.registries["learning-Balance"]
        learner.add("trained/Balance", steps)
        learner.add("updates/Balance")
        learner.gauge("max_steps/Balance", 500_000)
        learner.gauge("version/Balance", 7)
        learner.observe_many("lag/Balance", [lag] * steps)
        learner.observe_moments("Policy/Entropy", [entropy] * 10, "Balance")
        learner.observe_moments("Losses/Policy Loss", [0.25] * 10, "Balance")
        learner.observe_moments("Losses/Value Loss", [0.5] * 10, "Balance")
        self._keep_step_counts()

    def _keep_step_counts(self) -> None:
        step_counts = {"produced": self.produced, "trained": self.trained, "open": self.produced - self.trained}
        for column in ("produced", "trained", "ghost", "stale", "lost", "open"):
            self.registries["coordination"].gauge(f"step_counts.{column}/Balance", step_counts.get(column, 0))
        self.registries["coordination"].gauge("episodes/Balance", 37)
        self.registries["coordination"].gauge("reward_mean_last100/Balance", 45.0)

    def records(self, time_s: float = EPOCH_S) -> list[Metrics]:
        return [registry.snapshot(time_s, "segments") for registry in self.registries.values()]

    def update(self, overview: Overview) -> None:
        for record in self.records():
            overview.update(record)

    def publish(self, transport: FakeTransport) -> None:
        for record in self.records():
            transport.subscriptions[record.service].publish(record)


def monitor_context(
    folder: Path, transport: Any = None, *, training: bool = True, first: bool = True, pipeline: str = "{}"
) -> Context:
    """Returns the context of a monitor of the run with the behavior Balance."""
    text = f"behaviors: {{Balance: {{max_steps: 500000, summary_freq: 10000}}}}\npipeline: {pipeline}"
    settings = parse_settings(text, "run.yaml").settings
    addresses = {"stepping-0": "unix:///stepping-0"}
    run = Run(
        id="r1",
        directory=folder,
        settings=settings,
        seed=1,
        addresses=addresses,
        simulators={},
        playing=None if training else Playback(checkpoints={"Balance": "Balance/last"}),
    )
    assert run.services == FakeRun.services
    return Context(
        run=run,
        service="monitor",
        start="monitor.1",
        first=first,
        transport=transport,
        stop=anyio.Event(),
        log=structlog.get_logger(),
        wall_clock=lambda: EPOCH_S + anyio.current_time() % 1e6,
    )


def read_once(run: FakeRun, folder: Path) -> None:
    """Writes the files of a live run, of which a monitor has read the present numbers."""
    context = replace(monitor_context(folder), clock=lambda: 1.0, wall_clock=lambda: EPOCH_S)
    watch = MonitorState(context, {}, Display(logging.NullHandler()))
    for record in run.records():
        subscription = FakeSubscription()
        subscription.publish(record)
        watch.take(subscription)
    watch.tick()


class MonitorRun:
    """An incarnation of the monitor and its output."""

    def __init__(self, transport: FakeTransport, folder: Path, **info: Any) -> None:
        self.folder = folder
        self.out = io.StringIO()
        self.killed = anyio.CancelScope()
        self.published = transport.published = []
        self.context = monitor_context(folder, transport, **info)

    async def run(self) -> None:
        with self.killed:
            handler = logging.StreamHandler(self.out)
            handler.addFilter(lambda record: record.levelno > PROGRESS)
            await monitor.run(self.context, Display(handler))

    def kill(self) -> None:
        """Ends the monitor at once, without a final report."""
        self.killed.cancel()

    @property
    def lines(self) -> list[str]:
        return self.out.getvalue().splitlines()

    def read(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    def records(self, kind: str) -> list[dict[str, Any]]:
        name = "services.jsonl" if kind == "service" else "metrics.jsonl"
        records = [json.loads(line) for line in (self.folder / name).read_text().splitlines()]
        return [record for record in records if record["type"] == kind]


@asynccontextmanager
async def running_monitor(transport: FakeTransport, folder: Path, **info: Any) -> AsyncIterator[MonitorRun]:
    """Runs a monitor: the block begins between two ticks, and after it all files are written."""
    monitor_run = MonitorRun(transport, folder, **info)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(monitor_run.run)
        await seconds(0.5)
        yield monitor_run
        if not monitor_run.killed.cancel_called:
            monitor_run.context.stop.set()


async def seconds(number: float) -> None:
    await anyio.sleep(number)  # virtual time


async def work(run: FakeRun, transport: FakeTransport, ticks: int, steps: int = 5_000) -> None:
    """Publishes some steps and two episodes per tick of one second."""
    for _ in range(ticks):
        run.collect(steps, [40.0, 50.0])
        run.train(steps)
        run.publish(transport)
        await seconds(1)
