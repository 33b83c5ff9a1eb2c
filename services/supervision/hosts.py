"""Starters of a run's services and simulators on this machine: as processes, or as tasks of one process.

`services/cluster/host.py` starts them on the nodes of a cluster.
"""

import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from sparring.pipeline.monitoring import logs
from sparring.pipeline.queues.interface import Transport
from sparring.pipeline.queues.zmq import ZmqTransport
from sparring.services.process.hosting import SPARRING, HostedService, ProcessHost, Task
from sparring.services.process.lifeline import CORES_VARIABLE
from sparring.services.process.runtime import Context
from sparring.services.supervision.topology import ServicePlan, SimulatorPlan, Topology, WriterPlan

Plan = ServicePlan | SimulatorPlan | WriterPlan


class Host(Protocol):
    """Starts the parts of a run: services, as processes or tasks, and simulators.

    Attributes:
        topology: of the run; parts that start later read it.
    """

    topology: Topology

    async def start(self, plan: Plan, incarnation: str, /, *, first: bool) -> HostedService:
        """Starts an incarnation of a part, which ends with this process.

        Raises:
            OSError: its program cannot be started.
        """

    async def adopt(self, topology: Topology, /) -> None:
        """Takes over a topology with more parts, whose file is saved."""


@dataclass
class Processes:
    """Starts services and simulators as processes.

    Attributes:
        topology: of the run; saved in its folder.
        host: starts the processes.
        forks: from a process that has imported what services need; False where none runs as a process.
    """

    topology: Topology
    host: ProcessHost
    forks: bool = True

    async def start(self, plan: Plan, incarnation: str, *, first: bool) -> HostedService:
        """Starts a part; raises as `Host.start`."""
        if isinstance(plan, SimulatorPlan):
            cores = ",".join(map(str, self.topology.cores.get(plan.name, ())))
            environment, own = {**plan.environment, CORES_VARIABLE: cores}, len(SPARRING)
            if self.forks and plan.command[:own] == SPARRING:
                return await self.host.forked(plan.name, plan.command[own:], environment, watched=True)
            return self.host.watched(plan.name, plan.command, environment)
        if isinstance(plan, WriterPlan):
            arguments = ["writer", plan.writer, "--run", str(self.topology.run.directory), "--supervised"]
            if not self.forks:
                return self.host.start(plan.name, [*SPARRING, *arguments], {"OMP_NUM_THREADS": "1"})
            return await self.host.forked(plan.name, arguments, {"OMP_NUM_THREADS": "1"})
        output = sys.stdout.buffer if plan.name == "monitor" else None
        return await self.host.forked(plan.name, *self._service(plan, incarnation, first=first), output)

    async def adopt(self, topology: Topology) -> None:
        """Takes over a topology with more parts."""
        self.topology = topology

    def _service(self, plan: ServicePlan, incarnation: str, *, first: bool) -> tuple[list[str], dict[str, str]]:
        """Returns the arguments and variables of a service's process."""
        arguments = ["service", plan.name, "--run", str(self.topology.run.directory)]
        arguments += ["--start", incarnation, *(["--first"] if first else [])]
        if cores := self.topology.cores.get(plan.name):
            arguments += ["--cores", ",".join(map(str, cores))]
        return arguments, {"OMP_NUM_THREADS": str(plan.threads or 1)}


class HostElsewhere(Protocol):
    """Makes a host that starts parts on other machines, as `services/cluster/host.py` does."""

    async def host(self, topology: Topology, here: Processes, transport: ZmqTransport, tasks: TaskGroup) -> Host:
        """Returns the host.

        Args:
            topology: of the run.
            here: starts what runs on this machine.
            transport: of the supervisor.
            tasks: follow the parts.
        """

    async def watch(self, fail: Callable[[str], None]) -> None:
        """Calls `fail` with an error once nothing can be started elsewhere any more."""


@dataclass
class Tasks:
    """Starts services as tasks of one process.

    Attributes:
        topology: of the run.
        processes: starts the simulators.
        tasks: group that the services run in.
        transport: opens one for each incarnation.
    """

    topology: Topology
    processes: Processes
    tasks: TaskGroup
    transport: Callable[[str], AbstractAsyncContextManager[Transport]]
    _started: dict[str, Task] = field(default_factory=dict, init=False)

    async def adopt(self, topology: Topology) -> None:
        """Takes over a topology with more parts."""
        self.topology = topology

    @property
    def hanging(self) -> list[str]:
        """Returns the services that have not ended: a thread of theirs may hang, which only ends with this process."""
        return [name for name, task in self._started.items() if not task.ended.is_set()]

    async def start(self, plan: Plan, incarnation: str, *, first: bool) -> HostedService:
        """Starts a service as a task, anything else as a process; raises as `Host.start`."""
        if not isinstance(plan, ServicePlan):
            return await self.processes.start(plan, incarnation, first=first)

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

        task = self._started[plan.name] = Task(plan.name)
        self.tasks.start_soon(task.run, work)
        return task
