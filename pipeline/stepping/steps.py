"""Ticks collect steps for assembly as they arrive, and join them into columns when they are taken.

Joining is deferred because simulators wait for their actions, while no service waits for a single step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.messages.simulator import Decisions, Ends
from sparring.pipeline.messages.steps import ActionsChosen, AgentsEnded, AgentsStarted, BehaviorSteps, OutcomesReported
from sparring.pipeline.specs import Array
from sparring.pipeline.stepping.agents import Ids, Slots, SlotTable


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledActions:
    """SampledActions are the actions of `n` agents.

    Attributes:
        continuous: [n, continuous] raw sample.
        executed: [n, continuous] actions that the simulator gets, in [-1, 1].
        discrete: [n, branches] chosen index.
        log_probs: [n] of the joint action.
    """

    continuous: NDArray[np.float32]
    executed: NDArray[np.float32]
    discrete: NDArray[np.int32]
    log_probs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Choice:
    """A Choice holds the actions of one forward pass for `slots`, one column per simulator and behavior id.

    Attributes:
        carried: [n, numbers] recurrent state and previous action at this decision; None where neither is needed.
    """

    slots: list[Slots]
    chosen: SampledActions
    masks: NDArray[np.bool_] | None
    version: int
    carried: NDArray[np.float32] | None = None

    def select(self, learning: NDArray[np.bool_]) -> Choice | None:
        """Returns the choice of the learning rows only; None where no row learns."""
        if learning.all():
            return self
        rows = np.flatnonzero(learning)
        if not rows.size:
            return None
        chosen = {column.name: getattr(self.chosen, column.name)[rows] for column in fields(SampledActions)}
        return Choice(
            [join_columns(self.slots)[rows]],
            SampledActions(**chosen),
            None if self.masks is None else self.masks[rows],
            self.version,
            None if self.carried is None else self.carried[rows],
        )


class AgentEpisodes:
    """AgentEpisodes copy rows of `table`, whose slots other agents may have later.

    Args:
        table: of the behavior name.
        slots: [n] of the agents.
        fresh: the episodes start now.
    """

    __slots__ = ("agents", "fresh", "groups", "lessons", "matchups", "simulators", "slots", "teams")

    def __init__(self, table: SlotTable, slots: Slots, *, fresh: bool) -> None:
        self.slots = slots
        self.agents: Ids = table.agents[slots]
        self.groups: Ids = table.groups[slots]
        self.teams: Slots = table.teams[slots]
        self.simulators: Slots = table.simulators[slots]
        self.matchups: Ids | None = table.matchups[slots] if table.has_ghosts else None
        self.lessons: Ids | None = table.lessons[slots] if table.has_curricula else None
        self.fresh = np.full(len(slots), fresh)


@dataclass(slots=True)
class BehaviorTick:
    """A BehaviorTick collects one tick of one behavior name; its lists have an entry per simulator and behavior id.

    Attributes:
        number: of the tick.
        completed: steps completed by `ended` and `reported`.
    """

    number: int
    completed: int = 0
    lost: list[Slots] = field(default_factory=list)
    ended: list[tuple[Ends, Slots]] = field(default_factory=list)
    joined: list[AgentEpisodes] = field(default_factory=list)
    reported: list[tuple[Decisions, Slots]] = field(default_factory=list)
    choice: Choice | None = None

    def join_all(self, table: SlotTable) -> None:
        """Lists all learning live agents of `table`, not only those that are new."""
        live = np.flatnonzero(table.live & table.learning).astype(np.int32)
        listed = [agent_episodes.slots[agent_episodes.fresh] for agent_episodes in self.joined]
        self.joined = [agent_episodes for agent_episodes in self.joined if agent_episodes.fresh.all()]
        again = live[~np.isin(live, np.concatenate(listed))] if listed else live
        if again.size:
            self.joined.append(AgentEpisodes(table, again, fresh=False))

    def rows(self) -> list[int]:
        """Returns the numbers of rows lost, ended, joined, reported and acted."""
        return [
            sum(map(len, self.lost)),
            sum(len(slots) for _, slots in self.ended),
            sum(len(agent_episodes.slots) for agent_episodes in self.joined),
            sum(len(slots) for _, slots in self.reported),
            0 if self.choice is None else len(self.choice.chosen.log_probs),
        ]


class PendingSteps:
    """PendingSteps collect the ticks of all behaviors since the last `take`."""

    def __init__(self) -> None:
        self._produced_before: dict[str, int] = {}
        self._ticks: dict[str, list[BehaviorTick]] = {}

    @property
    def is_empty(self) -> bool:
        """Returns whether there are none."""
        return not self._ticks

    def add(self, name: str, tick: BehaviorTick, produced_before: int) -> BehaviorTick:
        """Adds a tick of behavior `name`, to be filled later; `produced_before` counts the steps before it."""
        if name not in self._ticks:
            self._ticks[name] = []
            self._produced_before[name] = produced_before
        self._ticks[name].append(tick)
        return tick

    def take(self) -> tuple[BehaviorSteps, ...]:
        """Returns all steps as records and forgets them."""
        ticks, self._ticks = self._ticks, {}
        return tuple(_steps(name, ticks[name], self._produced_before[name]) for name in sorted(ticks))


def join_columns(columns: Sequence[Any]) -> Any:
    """Concatenates columns, without a copy where there is only one."""
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def join_optional(columns: Sequence[Any], rows: Iterable[int], missing: float = 0) -> Any:
    """Concatenates columns, with rows of `missing` for a column that is None; returns None where all are."""
    like = next((column for column in columns if column is not None), None)
    if like is None:
        return None
    return join_columns(
        [
            np.full((n, *like.shape[1:]), missing, like.dtype) if column is None else column
            for column, n in zip(columns, rows, strict=True)
        ]
    )


def _steps(name: str, ticks: list[BehaviorTick], produced_before: int) -> BehaviorSteps:
    lost = [slots for tick in ticks for slots in tick.lost]
    return BehaviorSteps(
        behavior=name,
        produced_before=produced_before,
        ticks=np.array([tick.number for tick in ticks], np.int64),
        completed=np.array([tick.completed for tick in ticks], np.int64),
        rows=np.array([tick.rows() for tick in ticks], np.int32),
        lost=join_columns(lost) if lost else None,
        ended=_ended([entry for tick in ticks for entry in tick.ended]),
        joined=_joined([agent_episodes for tick in ticks for agent_episodes in tick.joined]),
        reported=_reported([entry for tick in ticks for entry in tick.reported]),
        acted=_acted(ticks),
    )


def _ended(entries: list[tuple[Ends, Slots]]) -> AgentsEnded | None:
    if not entries:
        return None
    sizes = [len(slots) for _, slots in entries]
    return AgentsEnded(
        slots=join_columns([slots for _, slots in entries]),
        observations=_observations([ends for ends, _ in entries]),
        rewards=join_columns([ends.rewards for ends, _ in entries]),
        interrupted=join_columns([ends.interrupted for ends, _ in entries]),
        group_rewards=join_optional([ends.group_rewards for ends, _ in entries], sizes),
        outcomes=join_optional([ends.outcomes for ends, _ in entries], sizes, missing=-1),
    )


def _joined(entries: list[AgentEpisodes]) -> AgentsStarted | None:
    if not entries:
        return None
    names = [
        name for name in AgentEpisodes.__slots__ if getattr(entries[0], name) is not None
    ]  # all of a behavior or none
    return AgentsStarted(
        **{name: join_columns([getattr(agent_episodes, name) for agent_episodes in entries]) for name in names}
    )


def _reported(entries: list[tuple[Decisions, Slots]]) -> OutcomesReported | None:
    if not entries:
        return None
    return OutcomesReported(
        slots=join_columns([slots for _, slots in entries]),
        observations=_observations([decisions for decisions, _ in entries]),
        rewards=join_columns([decisions.rewards for decisions, _ in entries]),
        group_rewards=join_optional(
            [decisions.group_rewards for decisions, _ in entries], [len(slots) for _, slots in entries]
        ),
    )


def _acted(ticks: list[BehaviorTick]) -> ActionsChosen | None:
    choices = [tick.choice for tick in ticks if tick.choice is not None]
    if not choices:
        return None
    chosen, sizes = [choice.chosen for choice in choices], [len(choice.chosen.log_probs) for choice in choices]
    versions: NDArray[np.int64] = np.repeat(np.array([choice.version for choice in choices], np.int64), sizes)
    return ActionsChosen(
        slots=None if all(map(_as_reported, ticks)) else join_columns([s for choice in choices for s in choice.slots]),
        log_probs=join_columns([one.log_probs for one in chosen]),
        versions=versions,
        continuous=join_columns([one.continuous for one in chosen]) if chosen[0].continuous.shape[1] else None,
        discrete=join_columns([one.discrete for one in chosen]) if chosen[0].discrete.shape[1] else None,
        masks=join_optional([choice.masks for choice in choices], sizes),
        carried=join_optional([choice.carried for choice in choices], sizes),
    )


def _as_reported(tick: BehaviorTick) -> bool:
    """Returns whether the rows acted for are the rows reported: then they need no slots of their own."""
    acted = [] if tick.choice is None else tick.choice.slots
    return len(acted) == len(tick.reported) and all(
        ours is theirs for ours, (_, theirs) in zip(acted, tick.reported, strict=True)
    )


def _observations(rows: Sequence[Decisions] | Sequence[Ends]) -> tuple[Array, ...]:
    return tuple(join_columns(column) for column in zip(*(one.observations for one in rows), strict=True))
