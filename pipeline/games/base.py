"""Holds what the built-in games share: areas side by side, their random source, and reports of their agents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.messages.simulator import BehaviorReport, Decisions, Ends
from sparring.pipeline.simulation.game import decisions, ends
from sparring.pipeline.specs import ActionSpec, Array, BehaviorSpec, ObservationSpec

Bools = NDArray[np.bool_]
Float = NDArray[np.float64]
Ints = NDArray[np.int64]
Seen = Array | Sequence[Array]
"""An observation of n agents [n, ...], or one for each observation of their spec."""


def one_vector(name: str, size: int, actions: ActionSpec) -> BehaviorSpec:
    """Returns the spec of agents that observe one vector."""
    return BehaviorSpec(observations=(ObservationSpec(name=name, shape=(size,)),), actions=actions)


def lengths(vectors: Float) -> Float:
    """Returns the lengths of vectors [..., 2]."""
    found: Float = np.sqrt((vectors * vectors).sum(-1))
    return found


class BuiltInGame:
    """Simulates areas side by side; this class itself has one agent of one behavior in each.

    Args:
        areas: number of areas.
        specs: spec of each behavior id.

    Attributes:
        _areas: [areas] numbers of the areas.
        _ages: [areas] steps since the area's episode began.
        _parameters: of the last reset.
    """

    def __init__(self, areas: int, specs: Mapping[str, BehaviorSpec]) -> None:
        self._specs = specs
        self._areas: Ints = np.arange(areas, dtype=np.int64)
        self._ages = np.zeros(areas, np.int64)
        self._random = np.random.default_rng()
        self._parameters: Mapping[str, float] = {}

    def behaviors(self) -> Mapping[str, BehaviorSpec]:
        """Returns the spec of each behavior id."""
        return self._specs

    def reset(self, parameters: Mapping[str, float], seed: int | None) -> tuple[BehaviorReport, ...]:
        """Begins new episodes in all areas."""
        self._parameters = parameters
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self._begin(self._areas)
        return self._first_reports()

    def close(self) -> None:
        """Does nothing: the game holds no resources."""

    def _begin(self, areas: Ints) -> None:
        """Begins new episodes in some areas."""
        raise NotImplementedError

    def _observe(self) -> Seen:
        """Returns the observations of all agents."""
        raise NotImplementedError

    def _first_reports(self) -> tuple[BehaviorReport, ...]:
        """Returns the reports of episodes that have just begun."""
        return self._report(decisions(self._areas, self._observe()))

    def _report(self, following: Decisions | None, last: Ends | None = None) -> tuple[BehaviorReport]:
        """Returns the report of a game with one behavior."""
        return (BehaviorReport(behavior=next(iter(self._specs)), decisions=following, ends=last),)


class GroupGame(BuiltInGame):
    """Simulates areas with one group each, whose members may be absent.

    Args:
        areas: number of areas.
        members: size of each group.
        specs: spec of each behavior id.

    Attributes:
        _here: [areas, members] members that are present.
    """

    def __init__(self, areas: int, members: int, specs: Mapping[str, BehaviorSpec]) -> None:
        super().__init__(areas, specs)
        self._agents = np.arange(areas * members, dtype=np.int64).reshape(areas, members)
        self._groups = np.repeat(1 + self._areas, members).reshape(areas, members)
        self._here = np.ones((areas, members), bool)

    def _decisions(self, rows: Bools, seen: Seen, earned: Array | None) -> Decisions | None:
        """Returns the decisions of some members; None if there are none.

        Args:
            rows: [areas, members] with n members.
            seen: [n, ...] their observations.
            earned: [areas, 1 or members] group rewards.
        """
        if not rows.any():
            return None
        shared = None if earned is None else np.broadcast_to(earned, rows.shape)[rows]
        return decisions(self._agents[rows], seen, groups=self._groups[rows], group_rewards=shared)

    def _ends(self, rows: Bools, seen: Seen, earned: Array, interrupted: Bools | None = None) -> Ends | None:
        """Returns the ends of some members; None if there are none. `interrupted` is [areas, members], or None."""
        if not rows.any():
            return None
        cut = None if interrupted is None else interrupted[rows]
        shared = np.broadcast_to(earned, rows.shape)[rows]
        return ends(self._agents[rows], seen, interrupted=cut, group_rewards=shared)


class MatchGame(BuiltInGame):
    """Simulates areas with a match of teams each; all agents of an area begin and end together.

    Args:
        areas: number of areas.
        specs: spec of each behavior id, one for each team that is reported.
        agents: [areas, players] ids, team by team.
        members: players in a team.

    Attributes:
        _groups: [areas, players] ids of the teams' groups; None: the agents have no group.
    """

    def __init__(self, areas: int, specs: Mapping[str, BehaviorSpec], agents: Ints, members: int = 1) -> None:
        super().__init__(areas, specs)
        self._agents = agents
        self._members = members
        self._groups: Ints | None = None
        self._matches = self._areas.copy()

    def _observe_teams(self) -> Sequence[Sequence[Array]]:
        """Returns the observations of each team, each [areas, members, ...]."""
        raise NotImplementedError

    def _first_reports(self) -> tuple[BehaviorReport, ...]:
        nothing = np.zeros(self._agents.shape, np.float32)
        return self._team_reports(nothing, None if self._groups is None else nothing)

    def _next_match(self, areas: Ints) -> None:
        self._ages[areas] = 0
        self._matches[areas] += self._areas.size  # a match id is never used twice

    def _play_on(
        self, over: Ints, rewards: Float, outcomes: Float, interrupted: Bools, group_rewards: Float | None = None
    ) -> tuple[BehaviorReport, ...]:
        """Ends the matches of some areas, begins their next ones, and returns the reports of all.

        Args:
            over: [n] areas whose match is over.
            rewards: [areas, players].
            outcomes: [n, players] 1 won, 0.5 drawn, 0 lost.
            interrupted: [n] matches that a limit has ended.
            group_rewards: [areas, players].
        """
        if not over.size:
            return self._team_reports(rewards, group_rewards)
        seen, last = self._observe_teams(), []
        for team in range(len(self._specs)):
            side = self._side(team)
            shared = None if group_rewards is None else group_rewards[over, side].ravel()
            last.append(
                ends(
                    self._agents[over, side].ravel(),
                    [_rows(one[over]) for one in seen[team]],
                    rewards=rewards[over, side].ravel(),
                    interrupted=np.repeat(interrupted, self._members),
                    group_rewards=shared,
                    outcomes=outcomes[:, side].ravel(),
                    matches=np.repeat(self._matches[over], self._members),
                )
            )
        self._begin(over)
        rewards[over] = 0
        if group_rewards is not None:
            group_rewards[over] = 0
        return self._team_reports(rewards, group_rewards, last)

    def _team_reports(
        self, rewards: Array, group_rewards: Array | None, last: Sequence[Ends] | None = None
    ) -> tuple[BehaviorReport, ...]:
        seen, matches = self._observe_teams(), np.repeat(self._matches, self._members)
        reports = []
        for team, key in enumerate(self._specs):
            side = self._side(team)
            following = decisions(
                self._agents[:, side].ravel(),
                [_rows(one) for one in seen[team]],
                rewards=rewards[:, side].ravel(),
                groups=None if self._groups is None else self._groups[:, side].ravel(),
                group_rewards=None if group_rewards is None else group_rewards[:, side].ravel(),
                matches=matches,
            )
            reports.append(BehaviorReport(behavior=key, decisions=following, ends=last[team] if last else None))
        return tuple(reports)

    def _side(self, team: int) -> slice:
        return slice(team * self._members, (team + 1) * self._members)


def _rows(column: Array) -> Array:
    """Returns a column [areas, members, ...] as one row for each agent, [n, ...]."""
    return column.reshape(-1, *column.shape[2:])
