"""Starts the parts of a run on the nodes of a Ray cluster, each through an agent, and follows them.

consumes       what agents report: the end of a part, its files
produces       placement groups and agents; Endpoints on the topic "supervisor"; copies of logs and checkpoints
waits for      places, answers of agents and of the cluster's head
unblocked by   these, or a deadline of its own: calls into Ray may hang (`CALL_S`, `LOST_S`, `HEAD_S`)

    train ---- Cluster ---- Agent (Ray actor) ---- `sparring service ...` or a simulator
                 |            one for each part of the run
              ClusterHost: the supervisor starts parts here, as it does on one machine
"""

import asyncio
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import anyio
import anyio.to_thread
import ray
import ray.autoscaler.sdk
from anyio.abc import TaskGroup
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import sparring
from sparring.pipeline.coordination.opponents import OPPONENTS_FILE
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.learning.checkpoints import CheckpointFolder, initial_folder
from sparring.pipeline.messages.channels import ENDPOINTS
from sparring.pipeline.messages.state import Endpoints
from sparring.pipeline.monitoring import logs
from sparring.pipeline.queues.interface import Publisher
from sparring.pipeline.queues.zmq import ZmqTransport
from sparring.pipeline.settings import Settings
from sparring.pipeline.simulation.replays import FOLDER_VARIABLE
from sparring.services.cluster.agent import CHUNK, Agent, address_of
from sparring.services.cluster.mirror import Mirror
from sparring.services.cluster.placement import Unit, described, lacking, stepping_processes, total, units_of
from sparring.services.process.encryption import KEYS_VARIABLE, service_key
from sparring.services.process.hosting import SPARRING, HostedService
from sparring.services.process.lifeline import end_strays
from sparring.services.process.runtime import SUPERVISOR
from sparring.services.supervision.hosts import Host, Plan, Processes
from sparring.services.supervision.ports import Ports, endpoint
from sparring.services.supervision.topology import RUN_FILE, ServicePlan, SimulatorPlan, Topology, simulator_plans

CALL_S: Final = 10.0
"""Seconds for an answer of an agent."""
LOST_S: Final = 25.0
"""Seconds without an answer after which a part is lost with its node; its agent has ended it by then (`SILENT_S`)."""
HEAD_S: Final = 20.0
"""Seconds without an answer of the cluster's head after which the run ends, while the other nodes still work."""
TRY_S: Final = 20.0
"""Seconds for the start of an agent, before another is tried: the node may be dying."""
_LOOK_S: Final = 0.5
_CLOSE_S: Final = 10.0
_JOIN_S: Final = 300.0
"""Seconds for Ray to start, or to connect to a cluster."""
LAST_COPY_S: Final = 60.0
"""Seconds for copying what a part wrote last, once it has ended."""
_SMALLEST: Final = {"CPU": 0.001}
"""A bundle needs some resource."""


@dataclass(kw_only=True)
class RemoteAgent:
    """An agent on a node.

    Attributes:
        actor: its Ray actor.
        part: that it owns.
        address: IP address of its node.
        folder: of the part there.
        fresh: it has got no files yet.
    """

    actor: Any
    part: str
    address: str
    folder: str
    fresh: bool = True

    async def call(self, method: str, *arguments: object, **options: object) -> Any:
        """Calls a method of the agent.

        Raises:
            TimeoutError: no answer in `CALL_S`.
            RayError: the agent failed, or its node is away.
        """
        with anyio.fail_after(CALL_S):
            return await getattr(self.actor, method).remote(*arguments, **options)

    def tell(self, method: str) -> None:
        """Calls a method of the agent without waiting for its end."""
        with suppress(RayError):
            getattr(self.actor, method).remote()


@dataclass
class Cluster:
    """A connection to a Ray cluster, and the agents of one run there.

    Attributes:
        settings: of the run, with the number of stepping processes that the cluster has room for.
        address: IP address at which the nodes reach this machine.
        units: of the run.
        node_address: IP address of all nodes, where they are this machine alone; "" for their own.
        agents: by part; without those whose node was lost.
    """

    settings: Settings
    address: str
    units: list[Unit]
    node_address: str = ""
    agents: dict[str, RemoteAgent] = field(default_factory=dict)
    _places: dict[str, tuple[Any, int]] = field(default_factory=dict)  # by part, placement group and bundle

    @property
    def parts(self) -> list[str]:
        """Returns the names of all parts that run on nodes."""
        return [part for unit in self.units for part in unit.parts]

    def described(self) -> Iterator[str]:
        """Describes what would run where, line by line."""
        yield "coordination, monitor: here"
        for unit in self.units:
            where = "one node, which no other stepping process shares" if unit.apart else "one node"
            yield f"{', '.join(unit.parts)}: on {where} with {described(unit.bundle)}"
        if self.settings.unnamed is not None:
            each = described(self.settings.pipeline.placement.learning.bundle)
            yield f"learners of behaviors that simulators name: each on one node with {each}, once it is named"
        for node in _alive():
            yield f"node {node['NodeManagerAddress']}: {described(node['Resources'])}"

    def place_all(self) -> Ports:
        """Places all parts; returns what finds their ports. Raises as `open`."""
        anyio.run(self.open)
        return ClusterPorts(self)

    async def open(self) -> None:
        """Reserves the places of all parts and starts their agents.

        Raises:
            SettingsError: something does not fit, or a node cannot run a part.
        """
        placement = self.settings.pipeline.placement
        spread = "STRICT_SPREAD" if placement.stepping.per == "node" else placement.strategy
        stepping = [unit for unit in self.units if unit.name.startswith("stepping-")]
        others = [unit for unit in self.units if unit not in stepping]
        for units, strategy in ((stepping, spread), (others, placement.strategy)):
            try:
                group = placement_group([dict(unit.bundle) or _SMALLEST for unit in units], strategy=strategy)
            except ValueError as error:
                raise SettingsError(f"got pipeline.placement, which Ray refuses: {_first_line(error)}") from error
            self._places |= {part: (group, index) for index, unit in enumerate(units) for part in unit.parts}
        groups = list({id(group): group for group, _ in self._places.values()}.values())
        with anyio.move_on_after(placement.timeout_s) as scope:
            for group in groups:
                while (await _ask(partial(placement_group_table, group)))["state"] != "CREATED":  # noqa: ASYNC110
                    await anyio.sleep(0.1)
        if scope.cancelled_caught:
            raise SettingsError(
                f"got no places for the run in {placement.timeout_s:g} s; expected "
                f"{described(total(unit.bundle for unit in self.units))} free; others use the cluster: free are "
                f"{described(ray.available_resources())}; wait for them, add nodes, or lower pipeline.placement"
            )
        try:
            async with anyio.create_task_group() as tasks:
                for part in self.parts:
                    tasks.start_soon(self.place, part)
        except* SettingsError as errors:
            raise errors.exceptions[0] from None
        except* OSError as errors:
            raise SettingsError(str(errors.exceptions[0])) from None

    async def add_learner(self, part: str) -> None:
        """Asks for a place for a learner whose behavior a simulator has named; `place` waits for it."""
        bundle = self.settings.pipeline.placement.learning.bundle
        unit = Unit(parts={part: {} if self.node_address else bundle})  # this machine alone has room for any number
        self._places[part] = await _ask(partial(placement_group, [dict(unit.bundle) or _SMALLEST])), 0
        self.units.append(unit)

    async def place(self, part: str) -> RemoteAgent:
        """Starts an agent for a part, on a node that has its place.

        Raises:
            OSError: no node has had one for `pipeline.placement.timeout_s`.
            SettingsError: its node cannot run it.
        """
        own = next(unit.parts[part] for unit in self.units if part in unit.parts)
        group, index = self._places[part]
        options = {
            "num_cpus": own.get("CPU", 0),
            "num_gpus": own.get("GPU", 0),
            "resources": {name: amount for name, amount in own.items() if name not in ("CPU", "GPU")},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            "max_concurrency": 4,
        }
        make = ray.remote(Agent).options(**options).remote
        limit_s, cause = self.settings.pipeline.placement.timeout_s, "nothing answered"
        with anyio.move_on_after(limit_s):
            while True:
                actor = None
                try:
                    with anyio.fail_after(TRY_S):
                        actor = await _ask(partial(make, part, self.node_address, self.settings.pipeline.interface))
                        found = await actor.describe.remote()
                except (RayError, TimeoutError) as error:
                    if actor is not None:
                        with suppress(RayError):
                            ray.kill(actor)
                    _refuse(str(error))
                    cause = _first_line(error) or cause
                    await anyio.sleep(1.0)
                else:
                    self._check(found)
                    agent = RemoteAgent(actor=actor, part=part, address=found["address"], folder=found["folder"])
                    self.agents[part] = agent
                    return agent
        needs = described(own) if own else "a node"
        raise OSError(f"got no node for {part} in {limit_s:g} s ({cause}); expected one with {needs} free")

    def _check(self, found: Mapping[str, str]) -> None:
        own = sparring.__version__
        if found["version"] != own:
            raise SettingsError(
                f"got sparring {found['version']} on the node {found['address']}; expected {own}, as here; install it"
            )

    def forget(self, agent: RemoteAgent) -> None:
        """Removes an agent whose node was lost, so that its part is placed again."""
        if self.agents.get(agent.part) is agent:
            del self.agents[agent.part]
        with suppress(RayError):
            ray.kill(agent.actor)

    async def host(self, topology: Topology, here: Processes, transport: ZmqTransport, tasks: TaskGroup) -> Host:
        """Returns what starts the parts of a run, as `HostElsewhere` describes."""
        topic, key = await transport.publisher(SUPERVISOR), service_key(topology.run)
        return ClusterHost(topology, self, here, transport, topic, tasks, key or "")

    async def watch(self, fail: Callable[[str], None]) -> None:
        """Calls `fail` once the head of the cluster has not answered for `HEAD_S`."""
        answered = time.monotonic()
        while True:
            with anyio.move_on_after(CALL_S / 2) as scope:
                try:
                    await _ask(ray.nodes)
                except Exception:
                    await anyio.sleep(_LOOK_S)
                else:
                    answered = time.monotonic()
            if not scope.cancelled_caught:
                await anyio.sleep(_LOOK_S)
            if time.monotonic() - answered > HEAD_S:
                fail(f"the head of the cluster has not answered for {HEAD_S:g} s")
                return

    def close(self) -> None:
        """Ends all agents and frees their places."""
        ended = [agent.actor.close.remote() for agent in self.agents.values()]  # which removes its folder
        if ended:
            with suppress(RayError):
                ray.wait(ended, num_returns=len(ended), timeout=_CLOSE_S / 2)
        for agent in self.agents.values():
            with suppress(RayError):
                ray.kill(agent.actor)
        for group in {id(group): group for group, _ in self._places.values()}.values():
            with suppress(RayError):
                remove_placement_group(group)


@contextmanager
def connected(address: str | None, settings: Settings) -> Iterator[Cluster]:
    """Connects to a cluster, and plans the run there.

    Args:
        address: of its head, as "10.0.0.1:6379"; "" or None for that which the environment names (`RAY_ADDRESS`), or
            else for a cluster of this machine alone that ends with the run.
        settings: of the run.

    Raises:
        SettingsError: no cluster answers there, or something has no room on any node.
    """
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if address.startswith("ray://"):
        raise SettingsError(
            f"got --ray {address}; expected an address of the cluster itself, because the run must be started on one "
            "of its nodes; run it there, for example by `ray job submit`, with --ray auto"
        )
    _refuse_silence(address)
    for name in ("ray", "ray._private.worker"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what matters of it is told in terms of the run
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    if address == "local":
        wanted = total(unit.bundle for unit in units_of(settings, settings.pipeline.stepping_processes))
        cores = max(os.cpu_count() or 1, math.floor(wanted.get("CPU", 0)) + 1)  # room for learners that are added
        options |= {"num_cpus": cores, "include_dashboard": False}
    cluster, left = None, threading.Event()
    try:
        _join(address, options, left)
        cluster = _planned(settings, "127.0.0.1" if address == "local" else "")
        yield cluster
    finally:
        if cluster is not None:
            _bounded(cluster.close)
        if settings.pipeline.placement.wait_s:
            _bounded(lambda: ray.autoscaler.sdk.request_resources(bundles=[]))
        _bounded(ray.shutdown)
        left.set()


def _join(address: str, options: Mapping[str, Any], left: threading.Event) -> None:
    """Connects this process to a cluster, in a thread.

    In the main one Ray would handle SIGTERM, by an exception that its own code swallows at times. The thread lives
    until `left` is set, because the processes that Ray starts end with it.

    Raises:
        SettingsError: no cluster can be used there.
    """
    failures: list[BaseException] = [TimeoutError(f"no answer in {_JOIN_S:g} s")]
    joined = threading.Event()

    def join() -> None:
        try:
            ray.init(address, **options)
            failures.clear()
        except (Exception, SystemExit) as error:
            failures[:] = [error]
        joined.set()
        left.wait()

    deadline = time.monotonic() + _JOIN_S
    threading.Thread(target=join, daemon=True).start()
    try:
        while not joined.wait(_LOOK_S / 10) and time.monotonic() < deadline:
            _keep_handler()
    except KeyboardInterrupt:
        if not joined.wait(_CLOSE_S):  # Ray holds a lock for as long, for which the exit of the interpreter would wait
            threading.excepthook = lambda _: None  # of Ray's threads, whose head is ended
            end_strays((), _CLOSE_S)
            os._exit(128 + signal.SIGINT)
        raise
    _keep_handler()
    if failures:
        raise SettingsError(
            f"got --ray {address}, where no cluster can be used ({_first_line(failures[0])}); expected one with the "
            "same versions of Ray and Python; start it with `ray start --head`, or correct the address"
        ) from failures[0]


def _keep_handler() -> None:
    """Installs Python's handler of SIGTERM again, in place of one that a library of Ray has installed below it."""
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def _refuse_silence(address: str) -> None:
    """Raises a SettingsError where nothing listens at an address: Ray would try for minutes."""
    from ray._private.utils import read_ray_address  # what `auto` means

    where = read_ray_address() if address == "auto" else address
    host, _, port = (where or "").rpartition(":")
    if address == "local" or (address == "auto" and not host):  # Ray says itself that there is none
        return
    try:
        if not port.isdecimal():
            raise OSError("no port")
        socket.create_connection((host.strip("[]"), int(port)), timeout=CALL_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise SettingsError(
            f"got --ray {address}, where no cluster answers ({why}); expected HOST:PORT of a head; start it with "
            "`ray start --head`, or correct the address"
        ) from error


def _planned(settings: Settings, node_address: str) -> Cluster:
    """Plans the run on the cluster, for whose growth it waits up to `pipeline.placement.wait_s`."""
    placement = settings.pipeline.placement
    deadline = time.monotonic() + placement.wait_s
    while True:
        nodes = {node["NodeManagerAddress"] + " " + node["NodeID"][:6]: node["Resources"] for node in _alive()}
        count = stepping_processes(settings, list(nodes.values()))
        units = units_of(settings, count)
        if not (left := lacking(units, list(nodes.values()))):
            break
        if time.monotonic() >= deadline:
            needs = "; ".join(f"{unit.name} needs {described(unit.bundle)}" for unit in left)
            has = "; ".join(f"{name}: {described(amounts)}" for name, amounts in nodes.items()) or "no node"
            raise SettingsError(
                f"got a cluster without room for {', '.join(unit.name for unit in left)} ({needs}); expected nodes "
                f"with it beside all else; it has {has}; add nodes, lower pipeline.placement, or let "
                "pipeline.placement.wait_s give an autoscaler time"
            )
        # It counts until another request, which `connected` makes at the end.
        ray.autoscaler.sdk.request_resources(bundles=[dict(unit.bundle) or _SMALLEST for unit in units])
        time.sleep(1.0)
    pipeline = settings.pipeline.model_copy(update={"stepping_processes": count})
    address = address_of(settings.pipeline.interface, node_address or str(ray.util.get_node_ip_address()))
    return Cluster(settings.model_copy(update={"pipeline": pipeline}), address, units, node_address)


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


# ---------------------------------------------------------------- ports


class ClusterPorts(Ports):
    """Finds the ports of a run on the nodes where its parts are placed.

    Args:
        cluster: whose agents run.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self._cluster = cluster

    def endpoint(self, service: str, number: int) -> str:
        """Returns an endpoint at which a service can listen for others."""
        del number
        agent = self._cluster.agents.get(service)
        if agent is None:
            return endpoint(self._cluster.address, self.find(self._cluster.address))
        return endpoint(agent.address, _reserved(agent, here=False))

    def address(self, service: str, host: str, port: int) -> str:
        """Returns the address at which a stepping process listens for simulators: those of its node by default."""
        agent = self._cluster.agents[service]
        if "address" in self._cluster.settings.pipeline.model_fields_set:
            return endpoint(host, port or _reserved(agent, here=False))
        return endpoint("127.0.0.1", _reserved(agent, here=True))


def _reserved(agent: RemoteAgent, *, here: bool) -> int:
    try:
        return int(ray.get(agent.actor.reserve.remote(0, here=here), timeout=CALL_S))
    except RayError as error:
        raise SettingsError(
            f"got no answer of the node {agent.address} for {agent.part} ({_first_line(error)}); start the run again"
        ) from error


# ---------------------------------------------------------------- the host


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
                        self._failure = f"its node {self.agent.address} was lost: {_first_line(error)}"
                        lost(self.agent)
                        return
                    log.info("no_answer", part=self.agent.part, error=_first_line(error))
                    await anyio.sleep(_LOOK_S)
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
                    raise OSError(f"{plan.name} was started on no node: {_first_line(error)}") from error

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


# ---------------------------------------------------------------- small helpers


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _refuse(text: str) -> None:
    """Raises a SettingsError for an error of an agent that another try would repeat."""
    for sign, remedy in (
        ("No module named 'sparring", "install sparring on every node, in the Python that runs Ray there"),
        ("got pipeline.interface", ""),
    ):
        line = next((line.strip() for line in text.splitlines() if sign in line), None)
        if line is not None:
            raise SettingsError(f"{line}; {remedy}" if remedy else line[line.index(sign) :])


async def _ask(work: Callable[[], Any]) -> Any:
    """Calls into Ray in a thread of its own, which may hang without holding up anything, the end included."""
    done, loop = anyio.Event(), asyncio.get_running_loop()
    answers: list[tuple[Any, Exception | None]] = []

    def call() -> None:
        try:
            answers.append((work(), None))
        except Exception as error:
            answers.append((None, error))
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=call, daemon=True).start()
    await done.wait()
    answer, failure = answers[0]
    if failure is not None:
        raise failure
    return answer


def _bounded(work: Callable[[], None]) -> None:
    """Works in a thread, for `_CLOSE_S` at most: without its head, Ray may not answer any more."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_CLOSE_S)
