"""The main machine's side of a run on several: tells the others what to run, and hears what has come of it.

consumes       HostState from the boards of the other machines
produces       HostRun and HostOrders on the board "supervisor"
waits for      `sparring join` on each machine, `pipeline.host_timeout_s` at most
unblocked by   a machine that joins, or is given up
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
from sparring.pipeline.messages.hosts import HostRun, HostState
from sparring.pipeline.monitoring import logs
from sparring.pipeline.queues.interface import Subscription, Transport
from sparring.services.process.hosting import HostedService, ProcessHost
from sparring.services.process.machines import Machine
from sparring.services.supervision.hosts import Processes
from sparring.services.supervision.ports import SUPERVISOR
from sparring.services.supervision.topology import RUN_FILE, ServicePlan, Topology

LOOK_S: Final = 0.5
RELEASE_S: Final = 5.0
"""How long the end of a run waits for the other machines to hear of it."""


class Machines:
    """Starts each part of a run on its machine.

    Args:
        topology: of the run.
        processes: on this machine.
        others: by name.
    """

    def __init__(self, topology: Topology, processes: ProcessHost, others: Mapping[str, Machine]) -> None:
        self._topology = topology
        self._processes = processes
        self._here = Processes(topology, processes)
        self._others = others

    def adopt(self, topology: Topology) -> None:
        """The run has grown, which one on several machines does not."""
        self._topology = topology
        self._here.adopt(topology)

    def service(self, plan: ServicePlan, start: str, *, first: bool) -> HostedService:
        """Starts a service as a process."""
        other = self._others.get(self._topology.place(plan.name))
        if other is None:
            return self._here.service(plan, start, first=first)
        return other.start(plan.name, start, first=first)

    def watched(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> HostedService:
        """Starts a simulator."""
        other = self._others.get(self._topology.place(name))
        return self._processes.watched(name, command, environment) if other is None else other.start(name)

    async def release(self, status: str) -> None:
        """Tells the other machines that the run has ended, and waits a little until they have heard it."""
        for other in self._others.values():
            other.end(status)
        with anyio.move_on_after(RELEASE_S):
            for other in self._others.values():
                await other.released.wait()


@asynccontextmanager
async def machines(
    topology: Topology, processes: ProcessHost, transport: Transport, clock: Callable[[], float]
) -> AsyncIterator[Machines]:
    """The machines of a run, until its end; without others just this one."""
    names = [name for name in topology.run.hosts if name != topology.host]
    if not names:
        yield Machines(topology, processes, {})
        return
    topic = await transport.topic(SUPERVISOR.removeprefix("topic:"))
    topic.publish("run", _description(topology))
    patience_s = topology.run.settings.pipeline.host_timeout_s
    others = {name: Machine(name, partial(topic.publish, f"orders:{name}"), clock, patience_s) for name in names}
    async with anyio.create_task_group() as tasks:
        for name, other in others.items():
            tasks.start_soon(_follow, other, await transport.subscribe(f"host-{name}"))
        address = topology.endpoints[SUPERVISOR]
        keys = "" if topology.run.keys is None else " --keys DIR"  # theirs is a copy, and may be elsewhere
        commands = [f"sparring join {address} --host {name}{keys}" for name in names]
        logs.get().info("waiting_for_machines", start_there=commands, notice=True)
        yield Machines(topology, processes, others)
        tasks.cancel_scope.cancel()


async def _follow(other: Machine, subscription: Subscription) -> None:
    """Takes what a machine says, and looks whether it still is there."""
    log: Any = logs.get()
    while True:
        with anyio.move_on_after(LOOK_S):
            await subscription.changed()
            state = subscription.latest.get("state")
            if isinstance(state, HostState) and other.heard(state):
                log.info("machine_joined", host=other.name, notice=True)
        happened = other.look(subscription.heard_age)
        if happened:
            log.warning(f"machine_{happened}", host=other.name, notice=True)


def _description(topology: Topology) -> HostRun:
    """What the other machines must have before they start anything."""
    directory = topology.run.directory
    paths = [directory / OPPONENTS_FILE]
    for name in topology.run.learners:
        paths += sorted(path for path in initial_folder(directory, name).rglob("*") if path.is_file())
    files = {path.relative_to(directory).as_posix(): _octets(path) for path in paths if path.exists()}
    return HostRun(content=_octets(directory / RUN_FILE), files=files)


def _octets(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(path.read_bytes(), np.uint8)
