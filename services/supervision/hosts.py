"""Starters of a run's services and simulators: as processes, on one machine or several, or as tasks of one process.

The main machine sends orders to the others and follows their state:

consumes       HostState from the topics of the other machines
produces       HostRun and HostOrders on the topic "supervisor"
waits for      `sparring join` on each machine, `pipeline.host_timeout_s` at most
unblocked by   a machine that joins, or the end of that time
"""

import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import anyio
import numpy as np
from anyio.abc import TaskGroup

from sparring.pipeline.coordination.opponents import OPPONENTS_FILE
from sparring.pipeline.learning.checkpoints import initial_folder
from sparring.pipeline.messages.channels import HOST_RUN, HOST_STATE, orders_topic
from sparring.pipeline.messages.hosts import HostRun
from sparring.pipeline.monitoring import logs
from sparring.pipeline.queues.interface import Subscription, Transport
from sparring.pipeline.specs import Array
from sparring.services.process.hosting import SPARRING, HostedService, ProcessHost, Task
from sparring.services.process.lifeline import CORES_VARIABLE
from sparring.services.process.machines import Machine
from sparring.services.process.runtime import SUPERVISOR, Context
from sparring.services.supervision.topology import RUN_FILE, ServicePlan, SimulatorPlan, Topology

LOOK_S: Final = 0.5
RELEASE_S: Final = 5.0
"""How long the end of a run waits until the other machines have received it."""

Plan = ServicePlan | SimulatorPlan


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


@dataclass
class Processes:
    """Starts services and simulators as processes, each on its machine.

    Attributes:
        topology: of the run; saved in its folder. With other machines it never changes.
        host: starts the processes of this machine.
        others: the other machines by name.
    """

    topology: Topology
    host: ProcessHost
    others: Mapping[str, Machine] = field(default_factory=dict)

    async def start(self, plan: Plan, incarnation: str, *, first: bool) -> HostedService:
        """Starts a part; raises as `Host.start`."""
        if isinstance(plan, SimulatorPlan):
            other = self.others.get(plan.host)
            return self.start_here(plan, incarnation, first=first) if other is None else other.start(plan.name)
        if other := self.others.get(self.topology.place(plan.name)):
            return other.start(plan.name, incarnation, first=first)
        output = sys.stdout.buffer if plan.name == "monitor" else None
        return await self.host.forked(plan.name, *self._service(plan, incarnation, first=first), output)

    def start_here(self, plan: Plan, incarnation: str, *, first: bool) -> HostedService:
        """Starts a part on this machine, without a fork server; raises as `Host.start`."""
        if isinstance(plan, SimulatorPlan):
            cores = ",".join(map(str, self.topology.cores.get(plan.name, ())))
            return self.host.watched(plan.name, plan.command, {**plan.environment, CORES_VARIABLE: cores})
        arguments, environment = self._service(plan, incarnation, first=first)
        return self.host.start(plan.name, [*SPARRING, *arguments], environment)

    def _service(self, plan: ServicePlan, incarnation: str, *, first: bool) -> tuple[list[str], dict[str, str]]:
        """Returns the arguments and variables of a service's process."""
        arguments = ["service", plan.name, "--run", str(self.topology.run.directory)]
        arguments += ["--start", incarnation, *(["--first"] if first else [])]
        if cores := self.topology.cores.get(plan.name):
            arguments += ["--cores", ",".join(map(str, cores))]
        return arguments, {"OMP_NUM_THREADS": str(plan.threads or 1)}

    async def release(self, status: str) -> None:
        """Orders the other machines to end the run, and waits up to `RELEASE_S` until they have received that."""
        for other in self.others.values():
            other.end(status)
        with anyio.move_on_after(RELEASE_S):
            for other in self.others.values():
                await other.released.wait()


@asynccontextmanager
async def machines(topology: Topology, processes: ProcessHost, transport: Transport) -> AsyncIterator[Processes]:
    """Opens the machines of a run, until its end; without others just this one."""
    names = [name for name in topology.run.hosts if name != topology.host]
    if not names:
        yield Processes(topology, processes)
        return
    topic = await transport.publisher(SUPERVISOR)
    topic.publish(HOST_RUN, _description(topology))
    timeout_s = topology.run.settings.pipeline.host_timeout_s
    others = {
        name: Machine(name, partial(topic.publish, orders_topic(name)), time.monotonic, timeout_s) for name in names
    }
    async with anyio.create_task_group() as tasks:
        for name, other in others.items():
            tasks.start_soon(_follow, other, await transport.subscribe(f"host-{name}"))
        address = topology.endpoints[f"topic:{SUPERVISOR}"]
        keys = "" if topology.run.keys is None else " --keys DIR"  # their copy may be in another folder
        commands = [f"sparring join {address} --host {name}{keys}" for name in names]
        logs.get().info("waiting_for_machines", start_there=commands, notice=True)
        yield Processes(topology, processes, others)
        tasks.cancel_scope.cancel()


async def _follow(other: Machine, subscription: Subscription) -> None:
    """Follows the state of a machine, and checks that it still publishes."""
    log = logs.get()
    while True:
        with anyio.move_on_after(LOOK_S):
            await subscription.changed()
            state = subscription.latest(HOST_STATE)
            if state is not None and other.on_state(state):
                log.info("machine_joined", host=other.name, notice=True)
        change = other.check(subscription.heartbeat_age)
        if change:
            log.warning(f"machine_{change}", host=other.name, notice=True)


def _description(topology: Topology) -> HostRun:
    """Returns the files that the other machines need before they start anything."""
    directory = topology.run.directory
    paths = [directory / OPPONENTS_FILE]
    for name in topology.run.learners:
        paths += sorted(path for path in initial_folder(directory, name).rglob("*") if path.is_file())
    files = {path.relative_to(directory).as_posix(): _octets(path) for path in paths if path.exists()}
    return HostRun(content=_octets(directory / RUN_FILE), files=files)


def _octets(path: Path) -> Array:
    return np.frombuffer(path.read_bytes(), np.uint8)


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

    @property
    def hanging(self) -> list[str]:
        """Returns the services that have not ended: a thread of theirs may hang, which only ends with this process."""
        return [name for name, task in self._started.items() if not task.ended.is_set()]

    async def start(self, plan: Plan, incarnation: str, *, first: bool) -> HostedService:
        """Starts a service as a task, or a simulator as a process; raises as `Host.start`."""
        if isinstance(plan, SimulatorPlan):
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
