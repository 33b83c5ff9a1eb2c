"""One behavior name over all simulators of a stepping process: its slots, its budget, how it acts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.messages.simulator import BehaviorActions
from sparring.pipeline.messages.state import ProducedSteps, StepAllowance
from sparring.pipeline.specs import BehaviorId, BehaviorSpec
from sparring.pipeline.stepping.agents import Ids, Slots, SlotTable
from sparring.pipeline.stepping.connections import Arrival, SimulatorBehavior, SimulatorConnection
from sparring.pipeline.stepping.steps import Choice, SampledActions, join_columns, join_optional

Seen = tuple[tuple[NDArray[Any], ...], NDArray[np.bool_] | None, NDArray[np.float32] | None]
"""Observations, masks, and what agents carry, of the same rows."""


class Policy(Protocol):
    """Weights of one behavior, or a script of the simulators."""

    @property
    def version(self) -> int:
        """Policy version."""

    @property
    def script(self) -> str:
        """Name of a script that the simulators act by themselves, "" where `act` says what to do."""

    @property
    def carried(self) -> int:
        """Numbers that an agent carries from one decision to the next."""

    def act(
        self,
        observations: tuple[NDArray[Any], ...],
        masks: NDArray[np.bool_] | None,
        carried: NDArray[np.float32] | None,
    ) -> SampledActions:
        """Chooses for all rows in one pass; what the agents carry on takes the place of what they `carried`."""


@dataclass(slots=True)
class Behavior:
    """One behavior name over all simulators.

    Attributes:
        spec: the first simulator's; all others must agree.
        table: slots of its agents.
        produced: completed steps of agents that learn.
        running: actions whose outcome has not come, of simulators that are not waiting for us.
        ghosts: steps completed by ghosts.
        allowance: how far this process may go.
        row_bytes: of one agent's observations.
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
        """Steps that may still be started."""
        return self.allowance.steps - self.produced - self.running

    @property
    def exhausted(self) -> bool:
        """Whether it had a budget and has used it up."""
        return self.allowance.serial > 0 and self.remaining <= 0


def enroll(
    connection: SimulatorConnection, specs: Mapping[str, BehaviorSpec], behaviors: dict[str, Behavior], max_agents: int
) -> None:
    """Enters the behaviors that a simulator names.

    Args:
        connection: the simulator.
        specs: by behavior id.
        behaviors: those known so far, by name; gets the new ones.
        max_agents: most agents of each.

    Raises:
        RemoteProtocolError: a spec contradicts what is known; nothing was entered.
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


def check_room(name: str, behavior: Behavior, n: int, connections: Iterable[SimulatorConnection]) -> None:
    """Refuses `n` more agents beside those here and those of frames not taken over yet, if that is too many.

    Raises:
        RemoteProtocolError: it is.
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


def standing(name: str, behavior: Behavior, connections: Iterable[SimulatorConnection]) -> ProducedSteps:
    """Where a behavior stands."""
    frames = [c.frame for c in connections if c.frame is not None]
    return ProducedSteps(
        steps=behavior.produced,
        serial=behavior.allowance.serial,
        allowance=behavior.allowance.steps,
        agents=behavior.table.taken,
        ghosts=behavior.ghosts,
        waiting=sum(len(a.slots) for frame in frames for a in frame.waiting if a.simulator_behavior.id.name == name),
    )


def choose(
    arrivals: list[Arrival], behavior: Behavior, policy: Policy | None, ghosts: Callable[[int], Policy]
) -> Choice:
    """Chooses for all rows of a behavior, in one pass for each policy that plays.

    Args:
        arrivals: whose decisions.
        behavior: theirs.
        policy: the latest weights; None where nobody learns.
        ghosts: other policies of the behavior, by number.
    """
    decisions = [arrival.decisions for arrival in arrivals if arrival.decisions is not None]
    slots = [arrival.slots for arrival in arrivals]
    observations = tuple(join_columns(c) for c in zip(*(rows.observations for rows in decisions), strict=True))
    masks = join_optional([rows.masks for rows in decisions], map(len, slots))
    table, carried, carried_on = behavior.table, None, None
    players = table.ghosts[join_columns(slots)] if table.ghosted else np.empty(0, np.int64)
    numbers_playing = np.unique(players).tolist() if table.ghosted else [0]
    policies = {one: ghosts(one) if one or policy is None else policy for one in numbers_playing}
    if numbers := max(one.carried for one in policies.values()):
        all_slots = join_columns(slots)
        carried = table.carry(all_slots, numbers)
        carried_on = carried.copy()
    if len(policies) == 1:
        chosen = next(iter(policies.values())).act(observations, masks, carried_on)
    else:
        chosen = _by_player(players, policies, (observations, masks, carried_on))
    if carried is not None:
        carried = carried[:, : policy.carried] if policy is not None and policy.carried else None
    if carried_on is not None:
        table.carried[all_slots, :numbers] = carried_on
    for column in slots:
        table.acted[column] = True
    return Choice(slots, chosen, masks, 0 if policy is None else policy.version, carried)


def _by_player(players: Ids, policies: Mapping[int, Policy], seen: Seen) -> SampledActions:
    """One forward pass for each of `players`; what agents carry on takes the place of what they carried."""
    observations, masks, carried = seen
    parts, orders = [], []
    for player, policy in policies.items():
        rows = np.flatnonzero(players == player)
        own = carried[rows, : policy.carried] if carried is not None and policy.carried else None
        parts.append(policy.act(tuple(c[rows] for c in observations), None if masks is None else masks[rows], own))
        if carried is not None and own is not None:
            carried[rows, : policy.carried] = own
        orders.append(rows)
    back = np.argsort(np.concatenate(orders))
    names = [column.name for column in fields(SampledActions)]
    return SampledActions(**{name: np.concatenate([getattr(part, name) for part in parts])[back] for name in names})


def answer(arrival: Arrival, chosen: SampledActions, rows: slice, scripts: NDArray[np.int32] | None) -> BehaviorActions:
    """A simulator's part of the actions, in its own order.

    Args:
        arrival: its decisions.
        chosen: for all simulators.
        rows: which are its own.
        scripts: [n] for its decisions, number of its script that acts, 0 for none; None where none does.
    """
    assert arrival.decisions is not None
    agents, executed, discrete = arrival.decisions.agents, chosen.executed[rows], chosen.discrete[rows]
    if (back := arrival.restore) is not None:
        agents, executed, discrete = agents[back], executed[back], discrete[back]
        scripts = None if scripts is None else scripts[back]
    return BehaviorActions(
        behavior=arrival.behavior, agents=agents, continuous=executed, discrete=discrete, scripts=scripts
    )


def scripts_of(
    slots: Slots, table: SlotTable, playing: Mapping[int, str], offered: Sequence[str]
) -> NDArray[np.int32] | None:
    """[n] Number, from 1, of the simulator's script that acts for each agent, 0 for none; None where none does.

    Args:
        slots: [n] of the agents.
        table: of the behavior.
        playing: by number, opponents that are scripts.
        offered: scripts of the simulator.
    """
    if not playing or not table.ghosted:
        return None
    found, players = np.zeros(len(slots), np.int32), table.ghosts[slots]
    for number, script in playing.items():
        found[players == number] = offered.index(script) + 1
    return found if found.any() else None
