"""The main machine's side of a run on several machines: sends orders to the others and follows their state.

consumes       HostState from the topics of the other machines
produces       HostRun and HostOrders on the topic "supervisor"
waits for      `sparring join` on each machine, `pipeline.host_timeout_s` at most
unblocked by   a machine that joins, or the end of that time
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import numpy as np

from sparring.pipeline.coordination.opponents import OPPONENTS_FILE
from sparring.pipeline.learning.checkpoints import initial_folder
from sparring.pipeline.messages.channels import HOST_RUN, HOST_STATE, orders_topic
from sparring.pipeline.messages.hosts import HostRun
from sparring.pipeline.monitoring import logs
from sparring.pipeline.queues.interface import Subscription, Transport
from sparring.services.process.hosting import HostedService, ProcessHost
from sparring.services.process.machines import Machine
from sparring.services.process.runtime import SUPERVISOR
from sparring.services.supervision.hosts import Processes
from sparring.services.supervision.topology import RUN_FILE, ServicePlan, Topology

LOOK_S: Final = 0.5
RELEASE_S: Final = 5.0
"""How long the end of a run waits until the other machines have received it."""


class Machines:
    """Starts each part of a run on its machine.

    Args:
        topology: of the run.
        processes: starts simulators on this machine.
        others: the other machines by name.
    """

    def __init__(self, topology: Topology, processes: ProcessHost, others: Mapping[str, Machine]) -> None:
        self._topology = topology
        self._processes = processes
        self._here = Processes(topology, processes)
        self._others = others

    def adopt(self, topology: Topology) -> None:
        """Starts services of another topology from now on; with other machines a topology never changes."""
        self._topology = topology
        self._here.adopt(topology)

    def service(self, plan: ServicePlan, incarnation: str, *, first: bool) -> HostedService:
        """Starts a service as a process."""
        other = self._others.get(self._topology.place(plan.name))
        if other is None:
            return self._here.service(plan, incarnation, first=first)
        return other.start(plan.name, incarnation, first=first)

    def watched(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> HostedService:
        """Starts a simulator."""
        other = self._others.get(self._topology.place(name))
        return self._processes.watched(name, command, environment) if other is None else other.start(name)

    async def release(self, status: str) -> None:
        """Orders the other machines to end the run, and waits up to `RELEASE_S` until they have received that."""
        for other in self._others.values():
            other.end(status)
        with anyio.move_on_after(RELEASE_S):
            for other in self._others.values():
                await other.released.wait()


@asynccontextmanager
async def machines(
    topology: Topology, processes: ProcessHost, transport: Transport, clock: Callable[[], float]
) -> AsyncIterator[Machines]:
    """Opens the machines of a run, until its end; without others just this one."""
    names = [name for name in topology.run.hosts if name != topology.host]
    if not names:
        yield Machines(topology, processes, {})
        return
    topic = await transport.publisher(SUPERVISOR)
    topic.publish(HOST_RUN, _description(topology))
    timeout_s = topology.run.settings.pipeline.host_timeout_s
    others = {name: Machine(name, partial(topic.publish, orders_topic(name)), clock, timeout_s) for name in names}
    async with anyio.create_task_group() as tasks:
        for name, other in others.items():
            tasks.start_soon(_follow, other, await transport.subscribe(f"host-{name}"))
        address = topology.endpoints[f"topic:{SUPERVISOR}"]
        keys = "" if topology.run.keys is None else " --keys DIR"  # their copy may be in another folder
        commands = [f"sparring join {address} --host {name}{keys}" for name in names]
        logs.get().info("waiting_for_machines", start_there=commands, notice=True)
        yield Machines(topology, processes, others)
        tasks.cancel_scope.cancel()


async def _follow(other: Machine, subscription: Subscription) -> None:
    """Follows the state of a machine, and checks that it still publishes."""
    log: Any = logs.get()
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


def _octets(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(path.read_bytes(), np.uint8)
