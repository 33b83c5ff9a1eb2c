"""The main machine's side of a run on several machines: sends orders to the others and follows their state.

consumes       HostState from the topics of the other machines
produces       HostRun and HostOrders on the topic "supervisor"
waits for      `sparring join` on each machine, `pipeline.host_timeout_s` at most
unblocked by   a machine that joins, or the end of that time
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import numpy as np

from sparring.pipeline.coordination.opponents import OPPONENTS_FILE
from sparring.pipeline.learning.checkpoints import initial_folder
from sparring.pipeline.messages.hosts import HostRun, HostState
from sparring.pipeline.monitoring import logs
from sparring.pipeline.queues.interface import Subscription, Transport
from sparring.pipeline.specs import Array
from sparring.services.process.hosting import ProcessHost
from sparring.services.process.machines import Machine
from sparring.services.supervision.hosts import Processes
from sparring.services.supervision.ports import SUPERVISOR
from sparring.services.supervision.topology import RUN_FILE, Topology

LOOK_S: Final = 0.5


@asynccontextmanager
async def machines(
    topology: Topology, processes: ProcessHost, transport: Transport, clock: Callable[[], float]
) -> AsyncIterator[Processes]:
    """Opens the machines of a run, until its end; without others just this one."""
    names = [name for name in topology.run.hosts if name != topology.host]
    if not names:
        yield Processes(topology, processes)
        return
    topic = await transport.topic(SUPERVISOR.removeprefix("topic:"))
    topic.publish("run", _description(topology))
    timeout_s = topology.run.settings.pipeline.host_timeout_s
    others = {name: Machine(name, partial(topic.publish, f"orders:{name}"), clock, timeout_s) for name in names}
    async with anyio.create_task_group() as tasks:
        for name, other in others.items():
            tasks.start_soon(_follow, other, await transport.subscribe(f"host-{name}"))
        address = topology.endpoints[SUPERVISOR]
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
            state = subscription.latest.get("state")
            if isinstance(state, HostState) and other.on_state(state):
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
