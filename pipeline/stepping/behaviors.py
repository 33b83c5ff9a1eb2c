"""One behavior name over all simulators of a stepping process: its slots, its budget, how it acts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.messages.service import Permit
from pipeline.messages.simulator import BehaviorActions
from pipeline.specs import BehaviorSpec
from pipeline.stepping.agents import SlotTable
from pipeline.stepping.connections import Arrival
from pipeline.stepping.steps import Choice, Chosen, join_columns, join_optional


class Policy(Protocol):
    """The current weights of one behavior."""

    @property
    def version(self) -> int:
        """Policy version."""

    @property
    def carried(self) -> int:
        """Numbers that an agent carries from one decision to the next."""

    def act(
        self,
        observations: tuple[NDArray[Any], ...],
        masks: NDArray[np.bool_] | None,
        carried: NDArray[np.float32] | None,
    ) -> Chosen:
        """Chooses for all rows in one pass; what the agents carry on takes the place of what they `carried`."""


@dataclass(slots=True)
class Behavior:
    """One behavior name over all simulators.

    Attributes:
        spec: the first simulator's; all others must agree.
        table: slots of its agents.
        produced: completed steps.
        running: actions whose outcome has not come, of simulators that are not waiting for us.
        permit: how far this process may go.
        row_bytes: of one agent's observations.
    """

    spec: BehaviorSpec
    table: SlotTable
    produced: int = 0
    running: int = 0
    permit: Permit = field(default_factory=lambda: Permit(serial=0, allowance=0))
    row_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.row_bytes = self.spec.observation_bytes

    @property
    def remaining(self) -> int:
        """Steps that may still be started."""
        return self.permit.allowance - self.produced - self.running


def choose(arrivals: list[Arrival], behavior: Behavior, policy: Policy) -> Choice:
    """Chooses for all rows of a behavior."""
    decisions = [arrival.decisions for arrival in arrivals if arrival.decisions is not None]
    slots = [arrival.slots for arrival in arrivals]
    columns = zip(*(rows.observations for rows in decisions), strict=True)
    masks = join_optional([rows.masks for rows in decisions], map(len, slots))
    table, carried, carried_on = behavior.table, None, None
    if policy.carried:
        all_slots = join_columns(slots)
        carried = table.carry(all_slots, policy.carried)
        carried_on = carried.copy()
    chosen = policy.act(tuple(join_columns(column) for column in columns), masks, carried_on)
    if carried_on is not None:
        table.carried[all_slots] = carried_on
    for column in slots:
        table.acted[column] = True
    return Choice(slots, chosen, masks, policy.version, carried)


def answer(arrival: Arrival, chosen: Chosen, rows: slice) -> BehaviorActions:
    """A simulator's part of the actions, in its own order."""
    assert arrival.decisions is not None
    agents, executed, discrete = arrival.decisions.agents, chosen.executed[rows], chosen.discrete[rows]
    if arrival.restore is not None:
        agents, executed, discrete = agents[arrival.restore], executed[arrival.restore], discrete[arrival.restore]
    return BehaviorActions(behavior=arrival.behavior, agents=agents, continuous=executed, discrete=discrete)
