"""Policies act for all waiting agents of a behavior; each simulator gets its part of the actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.messages.simulator import Act, BehaviorActions, Reset
from sparring.pipeline.specs import Array
from sparring.pipeline.stepping.agents import Ids, Slots, SlotTable
from sparring.pipeline.stepping.behaviors import Behavior
from sparring.pipeline.stepping.connections import Arrival, SimulatorConnection
from sparring.pipeline.stepping.steps import Choice, SampledActions, join_columns, join_optional

ActorInputs = tuple[tuple[Array, ...], NDArray[np.bool_] | None, NDArray[np.float32] | None]
"""Observations, masks, and what agents carry, of the same rows."""


class Policy(Protocol):
    """A Policy acts with weights of one behavior, or names a script of the simulators."""

    @property
    def version(self) -> int:
        """Returns the policy version."""

    @property
    def script(self) -> str:
        """Returns the script that simulators act by themselves; "" where `act` chooses the actions."""

    @property
    def carried(self) -> int:
        """Returns how many numbers an agent carries from one decision to the next."""

    def act(
        self,
        observations: tuple[Array, ...],
        masks: NDArray[np.bool_] | None,
        carried: NDArray[np.float32] | None,
    ) -> SampledActions:
        """Chooses actions for all rows in one pass and updates `carried` in place."""


@dataclass(slots=True)
class TickResult:
    """A TickResult holds the answers of one tick.

    Attributes:
        acts: connection key, Act or Reset, time of the frame's arrival, seconds backpressured.
        acted: rows acted for.
        rows: of these, rows of learning agents.
        bytes: bytes of the observations of `rows`.
    """

    acts: list[tuple[int, Act | Reset, float, float]] = field(default_factory=list)
    acted: int = 0
    rows: int = 0
    bytes: int = 0


@dataclass(slots=True)
class BehaviorAnswers:
    """BehaviorAnswers hold the actions chosen in one tick for all waiting agents of one behavior.

    Attributes:
        choice: of the learning agents only; None where none of them acts.
        acted: number of agents.
        learning: how many of these learn.
        actions: key of a connection, and its actions for one behavior id.
    """

    choice: Choice | None
    acted: int
    learning: int
    actions: list[tuple[int, BehaviorActions]]


def answer_behavior(
    name: str,
    entries: Sequence[tuple[SimulatorConnection, Arrival]],
    behavior: Behavior,
    policy: Policy | None,
    ghosts: Mapping[tuple[str, int], Policy],
) -> BehaviorAnswers:
    """Chooses actions for all waiting agents of a behavior and splits them among the simulators.

    Args:
        name: of the behavior.
        entries: reports with decisions, and their simulators.
        behavior: theirs.
        policy: the latest weights; None where no team of the behavior learns.
        ghosts: fixed policies, by behavior name and number.
    """
    table = behavior.table
    choice = choose([arrival for _, arrival in entries], behavior, policy, lambda number: ghosts[name, number])
    scripted = {number: one.script for (own, number), one in ghosts.items() if own == name and one.script}
    actions, at = [], 0
    for connection, arrival in entries:
        rows = slice(at, at + len(arrival.slots))
        scripts = scripts_of(arrival.slots, table, scripted, connection.scripts.get(name, ()))
        actions.append((connection.key, select_actions(arrival, choice.chosen, rows, scripts)))
        at = rows.stop
    learning = sum(arrival.learning for _, arrival in entries)
    learned = choice.select(table.learning[join_columns(choice.slots)]) if table.has_ghosts else choice
    return BehaviorAnswers(learned, at, learning, actions)


def choose(
    arrivals: list[Arrival], behavior: Behavior, policy: Policy | None, ghosts: Callable[[int], Policy]
) -> Choice:
    """Chooses actions for all rows of a behavior, in one pass for each policy that plays.

    Args:
        arrivals: reports with decisions.
        behavior: theirs.
        policy: the latest weights; None where no team of the behavior learns.
        ghosts: returns the other policies of the behavior, by number.
    """
    decisions = [arrival.decisions for arrival in arrivals if arrival.decisions is not None]
    slots = [arrival.slots for arrival in arrivals]
    observations = tuple(join_columns(c) for c in zip(*(rows.observations for rows in decisions), strict=True))
    masks = join_optional([rows.masks for rows in decisions], map(len, slots))
    table, carried, carried_on = behavior.table, None, None
    players = table.ghosts[join_columns(slots)] if table.has_ghosts else np.empty(0, np.int64)
    numbers_playing = np.unique(players).tolist() if table.has_ghosts else [0]
    policies = {one: ghosts(one) if one or policy is None else policy for one in numbers_playing}
    if numbers := max(one.carried for one in policies.values()):
        all_slots = join_columns(slots)
        carried = table.carry(all_slots, numbers)
        carried_on = carried.copy()
    if len(policies) == 1:
        chosen = next(iter(policies.values())).act(observations, masks, carried_on)
    else:
        chosen = _act_by_player(players, policies, (observations, masks, carried_on))
    if carried is not None:
        carried = carried[:, : policy.carried] if policy is not None and policy.carried else None
    if carried_on is not None:
        table.carried[all_slots, :numbers] = carried_on
    for column in slots:
        table.acted[column] = True
    return Choice(slots, chosen, masks, 0 if policy is None else policy.version, carried)


def _act_by_player(players: Ids, policies: Mapping[int, Policy], inputs: ActorInputs) -> SampledActions:
    """Acts in one forward pass for each of `players`, and updates what agents carry in place."""
    observations, masks, carried = inputs
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


def select_actions(
    arrival: Arrival, chosen: SampledActions, rows: slice, scripts: NDArray[np.int32] | None
) -> BehaviorActions:
    """Selects a simulator's part of the actions, in its own order.

    Args:
        arrival: its decisions.
        chosen: actions for all simulators.
        rows: rows of this simulator.
        scripts: [n] number of the script that acts for each decision, 0 for none; None where no script acts.
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
    """Returns the number, [n], from 1, of the script that acts for each agent, 0 for none; None where no script acts.

    Args:
        slots: [n] of the agents.
        table: of the behavior.
        playing: scripts of opponents, by number of the opponent.
        offered: scripts of the simulator.
    """
    if not playing or not table.has_ghosts:
        return None
    found, players = np.zeros(len(slots), np.int32), table.ghosts[slots]
    for number, script in playing.items():
        found[players == number] = offered.index(script) + 1
    return found if found.any() else None
