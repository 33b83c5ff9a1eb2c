"""Holds what the built-in games share: areas side by side, their random source, reports, and plane geometry."""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.messages.simulator import BehaviorReport, Decisions, Ends
from sparring.pipeline.specs import ActionSpec, Array, BehaviorSpec, ObservationSpec

_DOUBLE: Final = np.dtype(np.float64)
T = TypeVar("T")
Bools = NDArray[np.bool_]
Float = NDArray[np.float64]
Ints = NDArray[np.int64]


def one_vector(name: str, size: int, actions: ActionSpec) -> BehaviorSpec:
    """Returns the spec of agents that observe one vector."""
    return BehaviorSpec(observations=(ObservationSpec(name=name, shape=(size,)),), actions=actions)


class BuiltInGame:
    """Simulates areas side by side, each with the same players.

    A column of players is [areas, players, ...] here, or [areas] where the players of an area are alike.

    Args:
        areas: number of areas.
        specs: spec of each behavior id.
        players: number of players in an area.

    Attributes:
        _ids: behavior ids.
        _areas: [areas] numbers of the areas.
        _ages: [areas] steps since the area's episode began.
        _agents: [areas, players] ids of the agents, by default the numbers of the players: area by area, from 0.
        _sides: for each behavior the numbers of its players, by default as many for each; others are not reported.
        _here: [areas, players] players that are present.
        _can_leave: some players may be absent.
        _groups: column of the ids of groups; None: the agents have no group.
        _matches: [areas] ids of matches; None: an episode is no match.
        _parameters: environment parameters of the last reset.
        _constants: those of `DEFAULTS`, as the last reset gave them.
        on_end: called with [n] areas before new episodes begin in them.
    """

    DEFAULTS: ClassVar[Mapping[str, float]] = {}
    """Environment parameters that are read at a reset, with their defaults."""

    def __init__(self, areas: int, specs: Mapping[str, BehaviorSpec], players: int = 1) -> None:
        self._specs = specs
        self._ids = list(specs)
        self._areas: Ints = np.arange(areas, dtype=np.int64)
        self._ages = np.zeros(areas, np.int64)
        self._agents = np.arange(areas * players, dtype=np.int64)
        self._area_of = np.repeat(self._areas, players)
        numbers = self._agents.reshape(areas, players)
        self._sides = [side.ravel() for side in np.array_split(numbers, len(specs), 1)]
        self._here = np.ones((areas, players), bool)
        self._can_leave = False
        self._groups: Ints | None = None
        self._matches: Ints | None = None
        self._random = np.random.default_rng()
        self._parameters: Mapping[str, float] = {}
        self._constants = dict(self.DEFAULTS)
        self.on_end: Callable[[Ints], None] = _ignore

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
        nothing = np.zeros(self._areas.size)
        return self._reports(rewards=nothing, group_rewards=None if self._groups is None else nothing)

    def close(self) -> None:
        """Does nothing: the game holds no resources."""

    def _begin(self, areas: Ints) -> None:
        """Sets the state of some areas to that of a new episode."""
        raise NotImplementedError

    def _observe(self) -> Sequence[Sequence[Array]]:
        """Returns the observations of each behavior: rows of all players."""
        raise NotImplementedError

    def _start(self, areas: Ints) -> None:
        """Begins new episodes in some areas."""
        self.on_end(areas)
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
        leaving: Bools | None = None,
        **ended: Array,
    ) -> tuple[BehaviorReport, ...]:
        """Ends the episodes of some players, begins the next ones of areas, and returns the reports of all.

        Args:
            over: [areas] areas whose episode is over.
            rewards: column of the agents' own rewards; it is changed.
            group_rewards: column of the rewards of their groups; it is changed.
            did_discrete: column of actions, as in `Decisions`.
            leaving: column of the players that end, by default all players of the areas `over`.
            ended: further columns of `Ends`.
        """
        columns = {"rewards": rewards, "group_rewards": group_rewards, "did_discrete": did_discrete}
        last = self._end(over if leaving is None else leaving, **columns, **ended)
        if last:
            rewards[over] = 0
            if group_rewards is not None:
                group_rewards[over] = 0
            self._start(over.nonzero()[0])
        return self._reports(last, **columns)

    def _end(self, leaving: Bools, **columns: Array | None) -> list[Ends | None]:
        """Returns the ends of some players for each behavior; empty for no players.

        Args:
            leaving: column of the players that end.
            columns: columns of `Ends`.
        """
        if not np.count_nonzero(leaving):
            return []
        columns = {"interrupted": np.zeros(self._areas.size, bool), "matches": self._matches, **columns}
        observed = enumerate(self._observe())
        return [self._record(Ends, side, leaving, seen, columns) for side, seen in observed]

    def _reports(
        self, last: Sequence[Ends | None] = (), deciding: Bools | None = None, **columns: Array | None
    ) -> tuple[BehaviorReport, ...]:
        """Returns the reports of all behaviors that have any.

        Args:
            last: ends of each behavior; empty for none.
            deciding: column of the players that want an action, by default all that are present.
            columns: columns of `Decisions`.
        """
        rows = self._here if deciding is None and self._can_leave else deciding
        columns["groups"], columns["matches"] = self._groups, self._matches
        reports = []
        for side, seen in enumerate(self._observe()):
            following = self._record(Decisions, side, rows, seen, columns)
            ended = last[side] if last else None
            if following is not None or ended is not None:
                reports.append(BehaviorReport(behavior=self._ids[side], decisions=following, ends=ended))
        return tuple(reports)

    def _record(
        self,
        record: Callable[..., T],
        side: int,
        rows: Bools | None,
        seen: Sequence[Array],
        columns: Mapping[str, Array | None],
    ) -> T | None:
        """Returns the record of some players of a side; None for no players."""
        players = self._sides[side]
        if rows is not None:
            players = players[self._select(rows, players)]
            if not players.size:
                return None
        parts = {name: self._select(column, players) for name, column in columns.items() if column is not None}
        observations = tuple([_narrow(column[players]) for column in seen])
        return record(agents=self._agents[players], observations=observations, **parts)

    def _select(self, column: Array, players: Ints) -> Array:
        """Returns a new column of the players with these numbers, [n, ...]."""
        if column.ndim == 1:
            return _narrow(column[self._area_of[players]])
        return _narrow(column.reshape(-1, *column.shape[2:])[players])


def _ignore(_: Ints) -> None:
    """Does nothing: the game is not recorded."""


def _narrow(column: Array) -> Array:
    """Returns a column as messages have it."""
    return column.astype(np.float32) if column.dtype == _DOUBLE else column


def lengths(vectors: Float) -> Float:
    """Returns the lengths of vectors [..., 2]."""
    x, y = vectors[..., 0], vectors[..., 1]
    found: Float = np.sqrt(x * x + y * y)
    return found


def directions(angles: Float) -> Float:
    """Returns unit vectors, [..., 2], of angles in radians."""
    return np.stack([np.cos(angles), np.sin(angles)], -1)


def half_turn(angles: Float) -> Float:
    """Returns the same directions as angles from -pi to pi."""
    found: Float = angles - 2 * np.pi * np.rint(angles / (2 * np.pi))
    return found


def in_own_frame(vectors: Float, headings: Float) -> Float:
    """Turns vectors [areas, players, n, 2] to [areas, players, 2n]: ahead and to the left of each player's heading."""
    cosine, sine = np.cos(headings)[..., None], np.sin(headings)[..., None]
    ahead = vectors[..., 0] * cosine + vectors[..., 1] * sine
    aside = vectors[..., 1] * cosine - vectors[..., 0] * sine
    turned: Float = np.stack([ahead, aside], -1).reshape(*vectors.shape[:2], -1)
    return turned
