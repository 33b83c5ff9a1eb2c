"""Behaviors of a stepping process are shared by all its simulators: each has a table of slots and a step allowance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.messages.state import ProducedSteps, StepAllowance
from sparring.pipeline.specs import BehaviorId, BehaviorSpec
from sparring.pipeline.stepping.agents import SlotTable
from sparring.pipeline.stepping.connections import Arrival, SimulatorBehavior, SimulatorConnection


@dataclass(slots=True)
class Behavior:
    """A Behavior tracks one behavior name over all simulators.

    Attributes:
        spec: the first simulator's; all others must agree.
        table: slots of its agents.
        produced: completed steps of learning agents.
        running: actions without an outcome yet, of simulators that have been answered.
        ghosts: steps completed by ghosts.
        allowance: latest step allowance of this process.
        row_bytes: bytes of one agent's observations.
    """

    spec: BehaviorSpec
    table: SlotTable
    produced: int = 0
    running: int = 0
    ghosts: int = 0
    allowance: StepAllowance = field(default_factory=lambda: StepAllowance(serial=0, steps=0))
    row_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.row_bytes = self.spec.observation_bytes

    @property
    def remaining(self) -> int:
        """Returns the number of steps that may still be started."""
        return self.allowance.steps - self.produced - self.running

    @property
    def is_exhausted(self) -> bool:
        """Returns whether it had a step allowance and has used it up."""
        return self.allowance.serial > 0 and self.remaining <= 0

    def grant(self, allowance: StepAllowance) -> None:
        """Adopts a step allowance; the same allowance received again does not restore returned steps."""
        if allowance.serial < self.allowance.serial:
            return
        if allowance.serial == self.allowance.serial:
            allowance = replace(allowance, steps=min(allowance.steps, self.allowance.steps))
        self.allowance = allowance

    def return_unused(self) -> None:
        """Returns the unused steps of its allowance where it has no agents."""
        if not self.table.taken and self.allowance.steps > self.produced:
            self.allowance = replace(self.allowance, steps=self.produced)


def register_behaviors(
    connection: SimulatorConnection, specs: Mapping[str, BehaviorSpec], behaviors: dict[str, Behavior], max_agents: int
) -> None:
    """Registers the behaviors that a simulator names.

    Args:
        connection: the simulator.
        specs: by behavior id.
        behaviors: those known so far, by name; gets the new ones.
        max_agents: maximum number of agents of each.

    Raises:
        RemoteProtocolError: a spec contradicts a known one; nothing was registered.
    """
    for text, spec in specs.items():
        name = BehaviorId.parse(text).name
        known = behaviors.get(name)
        if known is not None and known.spec != spec:
            raise RemoteProtocolError(
                "specs",
                got=f"another spec for {name!r}: {spec}",
                expected=f"the same in all simulators and teams: {known.spec}",
                remedy="run one build of the simulator, or give the other behavior another name",
            )
    for text, spec in specs.items():
        behavior_id = BehaviorId.parse(text)
        behaviors.setdefault(behavior_id.name, Behavior(spec=spec, table=SlotTable(max_agents)))
        connection.behaviors.setdefault(text, SimulatorBehavior(behavior_id, spec))
        connection.pending.setdefault(behavior_id.name, 0)


def new_agents(arrivals: Iterable[Arrival]) -> dict[str, int]:
    """Counts the new agents of a Step, by behavior name."""
    new: dict[str, int] = {}
    for arrival in arrivals:
        if arrival.unknown:
            name = arrival.simulator_behavior.id.name
            new[name] = new.get(name, 0) + arrival.unknown
    return new


def check_capacity(name: str, behavior: Behavior, n: int, connections: Iterable[SimulatorConnection]) -> None:
    """Rejects `n` more agents where these, the live ones and those of frames not applied yet exceed the limit.

    Raises:
        RemoteProtocolError: the limit would be exceeded.
    """
    table = behavior.table
    frames = [c.frame for c in connections if c.frame is not None and not c.frame.reported]
    expected = sum(a.unknown for frame in frames for a in frame.arrivals if a.simulator_behavior.id.name == name)
    if table.taken + expected + n > table.limit:
        raise RemoteProtocolError(
            "too_large",
            got=f"{n} more agents of {name} beside {table.taken + expected}",
            expected=f"at most {table.limit} agents of one behavior",
            remedy="run fewer areas, or raise pipeline.max_agents",
        )


def produced_steps(name: str, behavior: Behavior, connections: Iterable[SimulatorConnection]) -> ProducedSteps:
    """Returns the published state of a behavior."""
    frames = [c.frame for c in connections if c.frame is not None]
    return ProducedSteps(
        steps=behavior.produced,
        serial=behavior.allowance.serial,
        allowance=behavior.allowance.steps,
        agents=behavior.table.taken,
        ghosts=behavior.ghosts,
        waiting=sum(len(a.slots) for frame in frames for a in frame.waiting if a.simulator_behavior.id.name == name),
    )
