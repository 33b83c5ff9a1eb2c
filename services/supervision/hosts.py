"""Starters of a run's services and simulators: as processes, or as tasks of one process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from sparring.pipeline.monitoring import logs
from sparring.pipeline.queues.interface import Transport
from sparring.services.process.hosting import SPARRING, HostedService, ProcessHost, Task, start_task
from sparring.services.process.runtime import Context
from sparring.services.supervision.topology import ServicePlan, Topology


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
    """Starts services as processes.

    Args:
        topology: of the run; saved in its folder.
        host: starts the processes.
    """

    def __init__(self, topology: Topology, host: ProcessHost) -> None:
        self._host = host
        self.adopt(topology)

    def adopt(self, topology: Topology) -> None:
        """Starts services of another topology from now on."""
        self._run = topology.run
        self._cores = topology.cores

    def service(self, plan: ServicePlan, incarnation: str, *, first: bool) -> HostedService:
        """Starts a service as a process."""
        command = [*SPARRING, "service", plan.name, "--run", str(self._run.directory)]
        command += ["--start", incarnation, *(["--first"] if first else [])]
        if cores := self._cores.get(plan.name):
            command += ["--cores", ",".join(map(str, cores))]
        threads = {"OMP_NUM_THREADS": str(plan.threads or 1)}
        output = sys.stdout.buffer if plan.name == "monitor" else None
        return self._host.start(plan.name, command, threads, output)


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
