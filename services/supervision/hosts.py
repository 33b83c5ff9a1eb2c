"""Starters of a run's services and simulators: as processes, or as tasks of one process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import MappingProxyType
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
_NO_OTHERS: Final[Mapping[str, Machine]] = MappingProxyType({})


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


class Processes:
    """Starts services and simulators as processes, each on its machine.

    Args:
        topology: of the run; saved in its folder.
        host: starts the processes of this machine.
        others: the other machines by name.
    """

    def __init__(self, topology: Topology, host: ProcessHost, others: Mapping[str, Machine] = _NO_OTHERS) -> None:
        self._host = host
        self._others = others
        self.adopt(topology)

    def adopt(self, topology: Topology) -> None:
        """Starts services of another topology from now on; with other machines a topology never changes."""
        self._topology = topology

    def service(self, plan: ServicePlan, incarnation: str, *, first: bool) -> HostedService:
        """Starts a service."""
        if other := self._others.get(self._topology.place(plan.name)):
            return other.start(plan.name, incarnation, first=first)
        command = [*SPARRING, "service", plan.name, "--run", str(self._topology.run.directory)]
        command += ["--start", incarnation, *(["--first"] if first else [])]
        if cores := self._topology.cores.get(plan.name):
            command += ["--cores", ",".join(map(str, cores))]
        threads = {"OMP_NUM_THREADS": str(plan.threads or 1)}
        output = sys.stdout.buffer if plan.name == "monitor" else None
        return self._host.start(plan.name, command, threads, output)

    def watched(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> HostedService:
        """Starts a simulator."""
        other = self._others.get(self._topology.place(name))
        return self._host.watched(name, command, environment) if other is None else other.start(name)

    async def release(self, status: str) -> None:
        """Orders the other machines to end the run, and waits up to `RELEASE_S` until they have received that."""
        for other in self._others.values():
            other.end(status)
        with anyio.move_on_after(RELEASE_S):
            for other in self._others.values():
                await other.released.wait()


class Tasks:
    """Starts services as tasks of one process.

    Args:
        topology: of the run.
        tasks: group that they run in.
        transport: opens one for each incarnation.
    """

    def __init__(
        self, topology: Topology, tasks: TaskGroup, transport: Callable[[str], AbstractAsyncContextManager[Transport]]
    ) -> None:
        self._tasks = tasks
        self._transport = transport
        self._started: dict[str, Task] = {}
        self.adopt(topology)

    def adopt(self, topology: Topology) -> None:
        """Starts services of another topology from now on."""
        self._run = topology.run

    @property
    def hanging(self) -> list[str]:
        """Returns the services that have not ended: a thread of theirs may hang, which only ends with this process."""
        return [name for name, task in self._started.items() if not task.over]

    def service(self, plan: ServicePlan, incarnation: str, *, first: bool) -> HostedService:
        """Starts a service as a task."""

        async def work(stop: anyio.Event) -> None:
            async with self._transport(incarnation) as transport:
                context = Context(
                    run=self._run,
                    service=plan.name,
                    start=incarnation,
                    first=first,
                    transport=transport,
                    stop=stop,
                    log=logs.get(service=plan.name),
                    clock=time.monotonic,
                    reload=lambda: self._run,
                )
                await plan.load()(context)

        self._started[plan.name] = start_task(self._tasks, plan.name, work)
        return self._started[plan.name]
