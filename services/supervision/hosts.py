"""Starters of a run's services and simulators: as processes, or as tasks of one process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final, Protocol

import anyio
from anyio.abc import TaskGroup

from sparring.pipeline.monitoring import logs
from sparring.pipeline.queues.interface import Transport
from sparring.services.process.hosting import SPARRING, HostedService, ProcessHost, Task, start_task
from sparring.services.process.machines import Machine
from sparring.services.process.runtime import Context
from sparring.services.supervision.topology import ServicePlan, Topology

RELEASE_S: Final = 5.0
"""How long the end of a run waits until the other machines have received it."""


class Host(Protocol):
    """Starts services, as processes or tasks."""

    def service(self, plan: ServicePlan, incarnation: str, /, *, first: bool) -> HostedService:
        """Starts one service."""

    def adopt(self, topology: Topology) -> None:
        """Starts services of another topology from now on."""


class Launcher(Protocol):
    """Starts simulators."""

    def watched(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> HostedService:
        """Starts a foreign program that ends with this process."""


@dataclass
class Processes:
    """Starts services and simulators as processes, each on its machine.

    Attributes:
        topology: of the run; saved in its folder.
        host: starts the processes of this machine.
        others: the other machines by name.
    """

    topology: Topology
    host: ProcessHost
    others: Mapping[str, Machine] = field(default_factory=dict)

    def adopt(self, topology: Topology) -> None:
        """Starts services of another topology from now on; with other machines a topology never changes."""
        self.topology = topology

    def service(self, plan: ServicePlan, incarnation: str, *, first: bool) -> HostedService:
        """Starts a service."""
        if other := self.others.get(self.topology.place(plan.name)):
            return other.start(plan.name, incarnation, first=first)
        command = [*SPARRING, "service", plan.name, "--run", str(self.topology.run.directory)]
        command += ["--start", incarnation, *(["--first"] if first else [])]
        if cores := self.topology.cores.get(plan.name):
            command += ["--cores", ",".join(map(str, cores))]
        threads = {"OMP_NUM_THREADS": str(plan.threads or 1)}
        output = sys.stdout.buffer if plan.name == "monitor" else None
        return self.host.start(plan.name, command, threads, output)

    def watched(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> HostedService:
        """Starts a simulator."""
        other = self.others.get(self.topology.place(name))
        return self.host.watched(name, command, environment) if other is None else other.start(name)

    async def release(self, status: str) -> None:
        """Orders the other machines to end the run, and waits up to `RELEASE_S` until they have received that."""
        for other in self.others.values():
            other.end(status)
        with anyio.move_on_after(RELEASE_S):
            for other in self.others.values():
                await other.released.wait()


@dataclass
class Tasks:
    """Starts services as tasks of one process.

    Attributes:
        topology: of the run.
        tasks: group that they run in.
        transport: opens one for each incarnation.
    """

    topology: Topology
    tasks: TaskGroup
    transport: Callable[[str], AbstractAsyncContextManager[Transport]]
    _started: dict[str, Task] = field(default_factory=dict, init=False)

    def adopt(self, topology: Topology) -> None:
        """Starts services of another topology from now on."""
        self.topology = topology

    @property
    def hanging(self) -> list[str]:
        """Returns the services that have not ended: a thread of theirs may hang, which only ends with this process."""
        return [name for name, task in self._started.items() if not task.over]

    def service(self, plan: ServicePlan, incarnation: str, *, first: bool) -> HostedService:
        """Starts a service as a task."""

        async def work(stop: anyio.Event) -> None:
            async with self.transport(incarnation) as transport:
                context = Context(
                    run=self.topology.run,
                    service=plan.name,
                    start=incarnation,
                    first=first,
                    transport=transport,
                    stop=stop,
                    log=logs.get(service=plan.name),
                    clock=time.monotonic,
                    reload=lambda: self.topology.run,
                )
                await plan.load()(context)

        self._started[plan.name] = start_task(self.tasks, plan.name, work)
        return self._started[plan.name]
