"""Policies act for all waiting agents of a behavior; each simulator gets its part of the actions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.messages.rows import concatenate, join_columns, pick, pick_where
from sparring.pipeline.messages.simulator import Act, BehaviorActions, Reset
from sparring.pipeline.messages.steps import ActionsChosen
from sparring.pipeline.specs import Array
from sparring.pipeline.stepping.agents import Behavior, Ids
from sparring.pipeline.stepping.connections import Arrival
from sparring.pipeline.stepping.steps import SampledActions

Masks = NDArray[np.bool_] | None
Carried = NDArray[np.float32] | None


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

    def act(self, observations: tuple[Array, ...], masks: Masks, carried: Carried) -> SampledActions:
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


def choose(
    behavior: Behavior, arrivals: Sequence[Arrival], policy: Policy | None, ghosts: Mapping[tuple[str, int], Policy]
) -> tuple[SampledActions, ActionsChosen]:
    """Chooses actions for all rows of a behavior, in one pass for each policy that plays.

    Args:
        behavior: of all arrivals.
        arrivals: reports with decisions.
        policy: the latest weights; None where no team of the behavior learns.
        ghosts: fixed policies, by behavior name and number.

    Returns:
        Actions of all rows, and those of learning agents for assembly.
    """
    table = behavior.table
    decisions = [arrival.decisions for arrival in arrivals if arrival.decisions is not None]
    slots, observations, masks = arrivals[0].slots, decisions[0].observations, decisions[0].masks
    if len(decisions) > 1:
        slots = np.concatenate([arrival.slots for arrival in arrivals])
        observations = tuple(map(np.concatenate, zip(*(rows.observations for rows in decisions), strict=True)))
        masks = join_columns([rows.masks for rows in decisions], (len(rows.agents) for rows in decisions))
    playing = np.unique(table.ghosts[slots]).tolist() if table.has_ghosts else [0]
    policies = {one: ghosts[behavior.name, one] if one or policy is None else policy for one in playing}
    carried = updated = None
    if numbers := max(one.carried for one in policies.values()):
        carried = table.carry(slots, numbers)
        updated = carried.copy()
    if len(policies) == 1:
        chosen = next(iter(policies.values())).act(observations, masks, updated)
    else:
        chosen = _act_by_player(table.ghosts[slots], policies, observations, masks, updated)
    if updated is not None:
        table.carried[slots, :numbers] = updated
    table.acted[slots] = True
    own = 0 if policy is None else policy.carried
    learned = ActionsChosen(
        slots=slots,
        log_probs=chosen.log_probs,
        versions=np.full(len(slots), 0 if policy is None else policy.version),
        continuous=chosen.continuous if chosen.continuous.shape[1] else None,
        discrete=chosen.discrete if chosen.discrete.shape[1] else None,
        carried=carried[:, :own] if carried is not None and own else None,
    )
    return chosen, pick_where(learned, table.learning[slots]) if table.has_ghosts else learned


def _act_by_player(
    players: Ids, policies: Mapping[int, Policy], observations: tuple[Array, ...], masks: Masks, carried: Carried
) -> SampledActions:
    """Acts in one forward pass for each of `players`, and updates what agents carry in place."""
    parts, orders = [], [np.flatnonzero(players == player) for player in policies]
    for policy, rows in zip(policies.values(), orders, strict=True):
        own = carried[rows, : policy.carried] if carried is not None and policy.carried else None
        parts.append(policy.act(tuple(c[rows] for c in observations), None if masks is None else masks[rows], own))
        if carried is not None and own is not None:
            carried[rows, : policy.carried] = own
    return pick(concatenate(parts), np.argsort(np.concatenate(orders)))


def select_actions(
    arrival: Arrival, chosen: SampledActions, rows: slice, playing: Mapping[int, str], offered: Sequence[str]
) -> BehaviorActions:
    """Selects a simulator's part of the actions, in its own order.

    Args:
        arrival: its decisions.
        chosen: actions for all simulators.
        rows: rows of this simulator.
        playing: scripts of opponents, by number of the opponent.
        offered: scripts of the simulator.
    """
    assert arrival.decisions is not None
    agents, executed, discrete = arrival.decisions.agents, chosen.executed[rows], chosen.discrete[rows]
    scripts = _scripts_of(arrival, playing, offered)
    if (back := arrival.restore) is not None:
        agents, executed, discrete = agents[back], executed[back], discrete[back]
        scripts = None if scripts is None else scripts[back]
    return BehaviorActions(
        behavior=arrival.simulator_behavior.text,
        agents=agents,
        continuous=executed,
        discrete=discrete,
        scripts=scripts,
    )


def _scripts_of(arrival: Arrival, playing: Mapping[int, str], offered: Sequence[str]) -> NDArray[np.int32] | None:
    """Returns the number, [n], of the script that acts for each agent, 0 for none; None where no script acts."""
    if not playing or not arrival.table.has_ghosts:
        return None
    found, players = np.zeros(len(arrival.slots), np.int32), arrival.table.ghosts[arrival.slots]
    for number, script in playing.items():
        found[players == number] = offered.index(script) + 1
    return found if found.any() else None
