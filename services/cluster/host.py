"""Starts the parts of a run on the nodes of a Ray cluster, each through an agent, and follows them.

consumes       what agents report: the end of a part, its files
produces       placement groups and agents; Endpoints on the topic "supervisor"; copies of logs and checkpoints
waits for      places, answers of agents and of the cluster's head
unblocked by   these, or a deadline of its own: calls into Ray may hang (`CALL_S`, `LOST_S`)

    train ---- Cluster ---- Agent (Ray actor) ---- `sparring service ...` or a simulator
                 |            one for each part of the run
              ClusterHost: the supervisor starts parts here, as it does on one machine
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from sparring.pipeline.coordination.opponents import OPPONENTS_FILE
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.learning.checkpoints import CheckpointFolder, initial_folder
from sparring.pipeline.messages.channels import ENDPOINTS
from sparring.pipeline.messages.state import Endpoints
from sparring.pipeline.monitoring import logs
from sparring.pipeline.queues.interface import Publisher
from sparring.pipeline.queues.zmq import ZmqTransport
from sparring.pipeline.simulation.replays import FOLDER_VARIABLE
from sparring.services.cluster.agent import CHUNK
from sparring.services.cluster.calls import LOOK_S, RemoteAgent, first_line
from sparring.services.cluster.mirror import Mirror
from sparring.services.process.encryption import KEYS_VARIABLE
from sparring.services.process.hosting import SPARRING, HostedService
from sparring.services.supervision.hosts import Plan, Processes
from sparring.services.supervision.ports import endpoint
from sparring.services.supervision.topology import RUN_FILE, ServicePlan, SimulatorPlan, Topology, simulator_plans

if TYPE_CHECKING:
    from sparring.services.cluster.places import Cluster

LOST_S: Final = 25.0
"""Seconds without an answer after which a part is lost with its node; its agent has ended it by then (`SILENT_S`)."""
LAST_COPY_S: Final = 60.0
"""Seconds for copying what a part wrote last, once it has ended."""


@dataclass
class RemotePart:
    """One incarnation of a part on a node, as `HostedService` describes.

    Attributes:
        agent: that owns it.
        mirror: copies its files.
        pid: process id on its node.
        copying: it has ended, and what it wrote last is being copied.
    """

    agent: RemoteAgent
    mirror: Mirror
    pid: int
    cpu_s: float | None = field(default=None, init=False)
    starved_s: float = field(default=0.0, init=False)
    hopeless: bool = field(default=False, init=False)
    copying: bool = field(default=False, init=False)
    _failure: str = field(default="", init=False)
    _heard: float = field(default=0.0, init=False)
    _ended: anyio.Event = field(default_factory=anyio.Event, init=False)

    async def wait(self) -> str:
        """Waits for its end; returns "" where it ended in order, else what went wrong."""
        await self._ended.wait()
        return self._failure

    def stop(self) -> None:
        """Asks it to end in order."""
        self.agent.tell("stop")

    def kill(self) -> None:
        """Ends it at once."""
        self.agent.tell("kill")

    async def follow(self, lost: Callable[[RemoteAgent], None]) -> None:
        """Follows the part to its end; calls `lost` where its node is gone."""
        ended, log = 0.0, logs.get()
        self._heard = time.monotonic()
        try:
            while True:
                try:
                    state = await self.agent.call("poll")
                    self._heard, self.cpu_s, self.hopeless = time.monotonic(), state["cpu_s"], state["hopeless"]
                    copied = await self._copy(state["files"])
                    if state["ended"]:
                        self.copying, ended = True, ended or time.monotonic()
                        if copied or time.monotonic() - ended > LAST_COPY_S:
                            self._failure = state["failure"] or ("" if copied else "what it wrote last was not copied")
                            return
                except (RayError, TimeoutError) as error:
                    gone = isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError)
                    if gone or time.monotonic() - self._heard > LOST_S:
                        self._failure = f"its node {self.agent.address} was lost: {first_line(error)}"
                        lost(self.agent)
                        return
                    log.info("no_answer", part=self.agent.part, error=first_line(error))
                    await anyio.sleep(LOOK_S)
        finally:
            self._ended.set()

    async def _copy(self, files: Mapping[str, Sequence[int]]) -> bool:
        """Copies what is new; returns whether it is here now."""

        async def read(name: str, offset: int) -> bytes:
            content = bytes(await self.agent.call("read", name, offset))
            self._heard = time.monotonic()
            return content

        try:
            await self.mirror.update(files, read)
        except TimeoutError:  # of a call, which `follow` judges
            raise
        except OSError as error:  # the disk here is full: what is missing is copied later
            logs.get().warning("not_copied", part=self.agent.part, error=str(error), notice=True)
            return False
        return True


@dataclass
class ClusterHost:
    """Starts parts on their nodes, and coordination and monitor here.

    Attributes:
        topology: of the run; its endpoints change where a part is placed on another node.
        cluster: where it runs.
        here: starts what runs on this machine.
        transport: of the supervisor.
        topic: of the supervisor.
        tasks: follow the parts.
        key: CURVE key of the run.
    """

    topology: Topology
    cluster: Cluster
    here: Processes
    transport: ZmqTransport
    topic: Publisher
    tasks: TaskGroup
    key: str
    _mirrors: dict[int, Mirror] = field(default_factory=dict, init=False)  # by agent

    async def start(self, plan: Plan, incarnation: str, *, first: bool) -> HostedService:
        """Starts a part; raises as `Host.start`."""
        if isinstance(plan, ServicePlan) and plan.name.startswith("learning-") and plan.name not in self.cluster.parts:
            await self.cluster.add_learner(plan.name)
        if plan.name not in self.cluster.parts:
            return await self.here.start(plan, incarnation, first=first)
        began = time.monotonic()
        while True:
            agent = self.cluster.agents.get(plan.name)
            try:
                if agent is None:
                    agent = await self._place_again(plan.name)
                return await self._start(agent, plan, incarnation, first=first)
            except SettingsError as error:
                raise OSError(str(error)) from error
            except (RayError, TimeoutError) as error:
                if (placed := self.cluster.agents.get(plan.name)) is not None:
                    self.cluster.forget(placed)
                if time.monotonic() - began > 2 * self.cluster.settings.pipeline.placement.timeout_s:
                    raise OSError(f"{plan.name} was started on no node: {first_line(error)}") from error

    async def adopt(self, topology: Topology) -> None:
        """Takes over a topology with more parts, and sends its file to the services that run."""
        self.topology = self.here.topology = topology
        for agent in list(self.cluster.agents.values()):
            with suppress(RayError, TimeoutError):  # its part is started again, with the file
                await self._write(agent, RUN_FILE)

    async def _place_again(self, part: str) -> RemoteAgent:
        """Places a part that has no place, and publishes the endpoints that change by this."""
        agent = await self.cluster.place(part)
        topology, changed, moved = self.topology, {}, {}
        for name in [name for name, service in topology.listeners.items() if service == part]:
            port = int(topology.endpoints[name].rpartition(":")[2])
            changed[name] = endpoint(agent.address, await agent.call("reserve", port, here=False))
        if part in topology.run.addresses and "address" not in topology.run.settings.pipeline.model_fields_set:
            host, _, text = topology.run.addresses[part].rpartition(":")
            moved[part] = f"{host}:{await agent.call('reserve', int(text), here=True)}"
        topology = self.topology  # others may have moved meanwhile; from here on nothing waits
        run = replace(topology.run, addresses={**topology.run.addresses, **moved})
        self.topology = self.here.topology = replace(topology, run=run, endpoints={**topology.endpoints, **changed})
        self.topology.save()
        self.transport.move(changed)
        self.topic.publish(ENDPOINTS, Endpoints(addresses=dict(self.topology.endpoints)))
        logs.get().info("placed", part=part, node=agent.address, notice=True)
        return agent

    async def _start(self, agent: RemoteAgent, plan: Plan, incarnation: str, *, first: bool) -> RemotePart:
        run = self.topology.run
        if isinstance(plan, SimulatorPlan):
            plans = simulator_plans(run.settings, run.seed, run.addresses, run.directory)
            plan = next(one for one in plans if one.name == plan.name)
            own = plan.command[: len(SPARRING)] == SPARRING
            command = ["sparring", *plan.command[len(SPARRING) :]] if own else list(plan.command)
            environment = {**plan.environment, "SPARRING_LOGS": f"{agent.folder}/run_logs", FOLDER_VARIABLE: ""}
        else:
            assert isinstance(plan, ServicePlan), "writers run here"
            command = ["sparring", "service", plan.name, "--run", agent.folder, "--start", incarnation]
            command += ["--first"] if first else []
            environment = {"OMP_NUM_THREADS": str(plan.threads or 1)}
            if run.keys is not None:  # an endpoint without them would be open
                environment[KEYS_VARIABLE] = str(run.keys)
        bounds, watched = run.settings.pipeline.logs, isinstance(plan, SimulatorPlan)
        sent = [] if watched else await self._send(plan.name, agent)
        if agent.fresh:
            behavior = plan.name.removeprefix("learning-") if plan.name.startswith("learning-") else ""
            limits = {"most_bytes": bounds.most_bytes, "kept": bounds.kept}
            self._mirrors[id(agent)] = Mirror(run.directory, behavior, sent, **limits)
            agent.fresh = False
        rotation, key = (bounds.most_bytes, bounds.kept), "" if watched else self.key
        pid = await agent.call("start", command, environment, rotation, watched=watched, key=key)
        part = RemotePart(agent, self._mirrors[id(agent)], pid)
        self.tasks.start_soon(part.follow, self.cluster.forget)
        return part

    async def _send(self, service: str, agent: RemoteAgent) -> list[str]:
        """Sends the files that a service needs, and returns their names; a learner needs weights where it has none."""
        folder = self.topology.run.directory
        paths = [folder / RUN_FILE, folder / OPPONENTS_FILE]
        if agent.fresh and service.startswith("learning-"):
            behavior = service.removeprefix("learning-")
            weights = [initial_folder(folder, behavior), *CheckpointFolder(folder, behavior).newest_first()[:1]]
            paths += [path for one in weights for path in sorted(one.rglob("*"))]
            paths.append(folder / behavior / "version")
        names = [path.relative_to(folder).as_posix() for path in paths if path.is_file()]
        for name in names:
            await self._write(agent, name)
        return names

    async def _write(self, agent: RemoteAgent, name: str) -> None:
        """Sends a file of the run's folder, in pieces."""
        with (self.topology.run.directory / name).open("rb") as file:
            more = False
            while (content := await anyio.to_thread.run_sync(file.read, CHUNK)) or not more:
                await agent.call("write", name, content, more=more)
                more = True
