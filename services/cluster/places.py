"""Reserves places for the parts of a run on the nodes of a cluster, and starts an agent for each."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import anyio
import ray
from anyio.abc import TaskGroup
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import sparring
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.queues.zmq import ZmqTransport
from sparring.pipeline.settings import Settings
from sparring.services.cluster.agent import Agent
from sparring.services.cluster.calls import CALL_S, CLOSE_S, LOOK_S, RemoteAgent, alive, ask, first_line, refuse
from sparring.services.cluster.host import ClusterHost
from sparring.services.cluster.placement import Unit, described, total
from sparring.services.process.encryption import service_key
from sparring.services.process.runtime import SUPERVISOR
from sparring.services.supervision.hosts import Host, Processes
from sparring.services.supervision.ports import Ports, endpoint
from sparring.services.supervision.topology import Topology

HEAD_S: Final = 20.0
"""Seconds without an answer of the cluster's head after which the run ends, while the other nodes still work."""
TRY_S: Final = 20.0
"""Seconds for the start of an agent, before another is tried: the node may be dying."""
SMALLEST: Final = {"CPU": 0.001}
"""A bundle needs some resource."""


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
        for node in alive():
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
                group = placement_group([dict(unit.bundle) or SMALLEST for unit in units], strategy=strategy)
            except ValueError as error:
                raise SettingsError(f"got pipeline.placement, which Ray refuses: {first_line(error)}") from error
            self._places |= {part: (group, index) for index, unit in enumerate(units) for part in unit.parts}
        groups = list({id(group): group for group, _ in self._places.values()}.values())
        with anyio.move_on_after(placement.timeout_s) as scope:
            for group in groups:
                while (await ask(partial(placement_group_table, group)))["state"] != "CREATED":  # noqa: ASYNC110
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
        self._places[part] = await ask(partial(placement_group, [dict(unit.bundle) or SMALLEST])), 0
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
                        actor = await ask(partial(make, part, self.node_address, self.settings.pipeline.interface))
                        found = await actor.describe.remote()
                except (RayError, TimeoutError) as error:
                    if actor is not None:
                        with suppress(RayError):
                            ray.kill(actor)
                    refuse(str(error))
                    cause = first_line(error) or cause
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
                    await ask(ray.nodes)
                except Exception:
                    await anyio.sleep(LOOK_S)
                else:
                    answered = time.monotonic()
            if not scope.cancelled_caught:
                await anyio.sleep(LOOK_S)
            if time.monotonic() - answered > HEAD_S:
                fail(f"the head of the cluster has not answered for {HEAD_S:g} s")
                return

    def close(self) -> None:
        """Ends all agents and frees their places."""
        ended = [agent.actor.close.remote() for agent in self.agents.values()]  # which removes its folder
        if ended:
            with suppress(RayError):
                ray.wait(ended, num_returns=len(ended), timeout=CLOSE_S / 2)
        for agent in self.agents.values():
            with suppress(RayError):
                ray.kill(agent.actor)
        for group in {id(group): group for group, _ in self._places.values()}.values():
            with suppress(RayError):
                remove_placement_group(group)


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
            f"got no answer of the node {agent.address} for {agent.part} ({first_line(error)}); start the run again"
        ) from error
