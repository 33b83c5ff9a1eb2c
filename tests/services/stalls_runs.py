"""A supervisor of the graph in memory: services and simulators are tasks, under any clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import structlog
from anyio.abc import TaskGroup

from sparring.pipeline.messages.channels import METRICS
from sparring.pipeline.messages.metrics import Metrics
from sparring.pipeline.monitoring.stalls import Stalls
from sparring.pipeline.queues.interface import Subscription
from sparring.pipeline.queues.memory import MemoryHub, MemoryTransport
from sparring.pipeline.settings import parse_settings
from sparring.services.process.hosting import HostedService, Task
from sparring.services.process.runtime import Context
from sparring.services.supervision.supervisor import Supervisor
from sparring.services.supervision.topology import ServicePlan, Topology, build
from tests.services.services_graph import MemoryListener, settings_text


def topology(folder: Path, **values: Any) -> Topology:
    """Returns a small graph without monitor; values unknown to `settings_text` go to the section `pipeline`."""
    pipeline = {"export": False} | {
        name: values.pop(name) for name in ("stall_timeout_s", "stalls", "restarts") if name in values
    }
    text = settings_text(**values).rstrip().removesuffix("}")
    text += "".join(f", {name}: {json.dumps(value)}" for name, value in pipeline.items()) + "}\n"
    made = build(parse_settings(text, "test").settings, run_id="test", directory=folder, seed=1)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    return replace(made, services=tuple(plan for plan in made.services if plan.name != "monitor"), writers=())


@dataclass
class TaskHost:
    """Starts services as tasks under any clock; `compute` takes the place of a learner's thread, by start."""

    topology: Topology
    tasks: TaskGroup
    hub: MemoryHub
    compute: Callable[[str], Callable[[Callable[[], Any]], Any]]
    listener: MemoryListener | None = None
    started: dict[str, list[Task]] = field(default_factory=dict)

    async def start(self, plan: ServicePlan, start: str, *, first: bool) -> HostedService:
        async def work(stop: anyio.Event) -> None:
            transport = MemoryTransport(self.hub, start=start)
            async with transport:
                context = Context(
                    run=self.topology.run,
                    service=plan.name,
                    start=start,
                    first=first,
                    transport=transport,
                    stop=stop,
                    log=structlog.get_logger(),
                    compute=self.compute(plan.name),
                    listen=self._listen,
                )
                try:
                    await plan.load()(context)
                except anyio.get_cancelled_exc_class():
                    transport.abandon()
                    raise

        task = Task(plan.name)
        self.tasks.start_soon(task.run, work)
        self.started.setdefault(plan.name, []).append(task)
        return task

    async def _listen(self, _address: str) -> Any:
        self.listener = MemoryListener()
        return self.listener


async def supervised(
    tasks: TaskGroup,
    stack: AsyncExitStack,
    folder: Path,
    compute: Callable[[str], Callable[[Callable[[], Any]], Any]],
    **values: Any,
) -> tuple[Supervisor, TaskHost]:
    """Returns a supervisor of a graph in memory, and its host."""
    made, hub = topology(folder, **values), MemoryHub()
    host = TaskHost(made, tasks, hub, compute)
    transport = await stack.enter_async_context(MemoryTransport(hub, start="supervisor.1"))
    return Supervisor(host, transport, None, clock=anyio.current_time), host  # type: ignore[arg-type]


async def stalls_after(stalls: Stalls, topics: Mapping[str, Subscription], seconds: float) -> list[Any]:
    """Returns the stalls found after some seconds by checking every second."""
    found: list[Any] = []
    for _ in range(round(seconds)):
        await anyio.sleep(1)
        for topic in topics.values():
            metrics = topic.latest(METRICS)
            if isinstance(metrics, Metrics):
                stalls.update(metrics, anyio.current_time())
        found = stalls.look(anyio.current_time())
    return found
