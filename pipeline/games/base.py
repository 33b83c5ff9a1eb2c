"""Holds what the built-in games share: areas side by side, their random source, reports, and plane geometry."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.messages.simulator import BehaviorReport, Ends
from sparring.pipeline.simulation.game import decisions, ends
from sparring.pipeline.specs import ActionSpec, Array, BehaviorSpec, ObservationSpec

T = TypeVar("T")
Bools = NDArray[np.bool_]
Float = NDArray[np.float64]
Ints = NDArray[np.int64]


def one_vector(name: str, size: int, actions: ActionSpec) -> BehaviorSpec:
    """Returns the spec of agents that observe one vector."""
    return BehaviorSpec(observations=(ObservationSpec(name=name, shape=(size,)),), actions=actions)


class BuiltInGame:
    """Simulates areas side by side, each with the same players.

    A column of players is [areas, players, ...] here, or [areas] or [areas, 1, ...] where the players of an area are
    alike.

    Args:
        areas: number of areas.
        specs: spec of each behavior id.
        players: number of players in an area.

    Attributes:
        _ids: behavior ids.
        _sides: for each behavior its players in an area, by default as many for each; those of none are not reported.
        _areas: [areas] numbers of the areas.
        _ages: [areas] steps since the area's episode began.
        _agents: [areas, players] ids of the agents.
        _here: [areas, players] players that are present.
        _groups: column of the ids of groups; None: the agents have no group.
        _matches: [areas] ids of matches; None: an episode is no match.
        _parameters: environment parameters of the last reset.
        _constants: those of `DEFAULTS`, as the last reset gave them.
    """

    DEFAULTS: ClassVar[Mapping[str, float]] = {}
    """Environment parameters that are read at a reset, with their defaults."""

    def __init__(self, areas: int, specs: Mapping[str, BehaviorSpec], players: int = 1) -> None:
        self._specs = specs
        self._ids = list(specs)
        size = players // len(specs)
        self._sides = [slice(first, first + size) for first in range(0, players, size)]
        self._areas: Ints = np.arange(areas, dtype=np.int64)
        self._ages = np.zeros(areas, np.int64)
        self._agents = np.arange(areas * players, dtype=np.int64).reshape(areas, players)
        self._here = np.ones(self._agents.shape, bool)
        self._groups: Ints | None = None
        self._matches: Ints | None = None
        self._random = np.random.default_rng()
        self._parameters: Mapping[str, float] = {}
        self._constants = dict(self.DEFAULTS)

    def behaviors(self) -> Mapping[str, BehaviorSpec]:
        """Returns the spec of each behavior id."""
        return self._specs

    def reset(self, parameters: Mapping[str, float], seed: int | None) -> tuple[BehaviorReport, ...]:
        """Begins new episodes in all areas."""
        self._parameters = parameters
        self._constants = {name: parameters.get(name, default) for name, default in self.DEFAULTS.items()}
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self._start(self._areas)
        return self._reports(group_rewards=None if self._groups is None else np.zeros(self._areas.size))

    def close(self) -> None:
        """Does nothing: the game holds no resources."""

    def _begin(self, areas: Ints) -> None:
        """Sets the state of some areas to that of a new episode."""
        raise NotImplementedError

    def _observe(self) -> Sequence[Sequence[Array]]:
        """Returns the observations of each behavior, as columns of all players."""
        raise NotImplementedError

    def _start(self, areas: Ints) -> None:
        """Begins new episodes in some areas."""
        self._ages[areas] = 0
        if self._matches is not None:
            self._matches[areas] += self._areas.size  # a match id is never used twice
        self._begin(areas)

    def _play_on(
        self,
        over: Bools,
        rewards: Array,
        group_rewards: Array | None = None,
        did_discrete: Array | None = None,
        **ended: Array | None,
    ) -> tuple[BehaviorReport, ...]:
        """Ends the episodes of all players of some areas, begins the next ones, and returns the reports of all.

        Args:
            over: [areas] areas whose episode is over.
            rewards: column of the agents' own rewards.
            group_rewards: column of the rewards of their groups.
            did_discrete: column of actions, as for `decisions`.
            ended: further columns of the ends, as for `ends`.
        """
        if not over.any():
            return self._reports(rewards=rewards, group_rewards=group_rewards, did_discrete=did_discrete)
        last = self._end(over, rewards=rewards, group_rewards=group_rewards, did_discrete=did_discrete, **ended)
        self._start(over.nonzero()[0])
        earned, shared = (
            None if column is None else np.where(self._wide(over), 0, self._wide(column))
            for column in (rewards, group_rewards)
        )
        return self._reports(last, rewards=earned, group_rewards=shared, did_discrete=did_discrete)

    def _end(self, rows: Bools, **columns: Array | None) -> list[Ends | None]:
        """Returns the ends of some players for each behavior.

        Args:
            rows: column of the players that end.
            columns: columns as for `ends`.
        """
        return self._records(ends, rows, matches=self._matches, **columns)

    def _reports(
        self, last: Sequence[Ends | None] = (), deciding: Bools | None = None, **columns: Array | None
    ) -> tuple[BehaviorReport, ...]:
        """Returns the reports of all behaviors that have any.

        Args:
            last: ends of each behavior; empty for none.
            deciding: column of the players that want an action, by default all that are present.
            columns: columns as for `decisions`.
        """
        rows = self._here if deciding is None else deciding
        following = self._records(decisions, rows, groups=self._groups, matches=self._matches, **columns)
        reports = (
            BehaviorReport(behavior=key, decisions=one, ends=ended)
            for key, one, ended in zip(self._ids, following, last or [None] * len(self._ids), strict=True)
        )
        return tuple(one for one in reports if one.decisions is not None or one.ends is not None)

    def _records(self, build: Callable[..., T], rows: Bools, **columns: Array | None) -> list[T | None]:
        """Returns what `build` makes of some players for each behavior, None for no players."""
        found: list[T | None] = [None] * len(self._ids)
        if not np.count_nonzero(rows):
            return found
        given = {name: column for name, column in columns.items() if column is not None}
        for number, (side, seen) in enumerate(zip(self._sides, self._observe(), strict=True)):
            own = self._wide(rows)[:, side].ravel()
            if count := np.count_nonzero(own):
                select = partial(self._select, side, None if count == own.size else own.nonzero()[0])
                parts = {name: select(column) for name, column in given.items()}
                found[number] = build(select(self._agents), [select(one) for one in seen], **parts)
        return found

    def _select(self, side: slice, chosen: Ints | None, column: Array) -> Array:
        """Returns a new column of one side's players, [n, ...]: all, or the chosen ones of them."""
        own = self._wide(column)[:, side]
        rows = own.reshape(-1, *own.shape[2:])
        return rows.copy() if chosen is None else rows[chosen]

    def _wide(self, column: Array) -> Array:
        """Returns a column with an entry for each player, [areas, players, ...]."""
        column = column[:, None] if column.ndim == 1 else column
        if column.shape[1] == self._agents.shape[1]:
            return column
        return np.repeat(column, self._agents.shape[1], 1)


def lengths(vectors: Float) -> Float:
    """Returns the lengths of vectors [..., 2]."""
    found: Float = np.sqrt((vectors * vectors).sum(-1))
    return found


def directions(angles: Float) -> Float:
    """Returns unit vectors, [..., 2], of angles in radians."""
    return np.stack([np.cos(angles), np.sin(angles)], -1)


def half_turn(angles: Float) -> Float:
    """Returns the same directions as angles from -pi to pi."""
    found: Float = angles - 2 * np.pi * np.round(angles / (2 * np.pi))
    return found


def in_own_frame(vectors: Float, headings: Float) -> Float:
    """Turns vectors [areas, players, n, 2] to [areas, players, 2n]: ahead and to the left of each player's heading."""
    cosine, sine = np.cos(headings)[..., None], np.sin(headings)[..., None]
    ahead = vectors[..., 0] * cosine + vectors[..., 1] * sine
    aside = vectors[..., 1] * cosine - vectors[..., 0] * sine
    turned: Float = np.stack([ahead, aside], -1).reshape(*vectors.shape[:2], -1)
    return turned
