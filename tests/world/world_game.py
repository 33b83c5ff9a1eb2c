"""A game in which each decision has a unique number, which its observation carries to the learner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.simulation.game import decisions, ends
from sparring.pipeline.specs import ActionSpec, BehaviorId, BehaviorSpec, ObservationSpec

SIZE = 4
_BASE = 4096
_PRIME = 4093


def written(number: int, match: int) -> list[float]:
    """Returns an observation that holds the numbers of a decision and its match."""
    return [float(number % _BASE), float(number // _BASE), float(match), float((number * 31 + match) % _PRIME)]


def read(rows: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns decision and match numbers [n] of observations [n, 4]; -1 in rows that were damaged."""
    whole = np.nan_to_num(rows, nan=-1.0, posinf=-1.0, neginf=-1.0).astype(np.int64)
    numbers, matches = whole[:, 0] + _BASE * whole[:, 1], whole[:, 2]
    good = (numbers * 31 + matches) % _PRIME == whole[:, 3]
    return np.where(good, numbers, -1), np.where(good, matches, -1)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of a game.

    Attributes:
        areas: number of parallel areas; each plays a match of all behavior ids.
        members: agents of each behavior id in an area.
        groups: "" for none, "behavior_id" for one group per behavior id and area, "area" for one group per area.
        contests: whether all agents of an area end together, with outcomes.
        ends: share of steps in which episodes end.
    """

    behavior_ids: tuple[str, ...]
    areas: int
    members: int
    groups: str
    contests: bool
    ends: float


class NumberedGame:
    """A game with numbered decisions.

    Args:
        rules: what is played.
        chance: random source that decides which agents end.
        number: returns a new number for a decision or match.
    """

    name = "tally"

    def __init__(self, rules: Rules, chance: Random, number: Callable[[], int]) -> None:
        self._rules = rules
        self._chance = chance
        self._number = number
        self._matches = [0] * rules.areas
        self._here = {behavior_id: np.ones((rules.areas, rules.members), bool) for behavior_id in rules.behavior_ids}

    def behaviors(self) -> Mapping[str, BehaviorSpec]:
        spec = BehaviorSpec(
            observations=(ObservationSpec(name="number", shape=(SIZE,)),), actions=ActionSpec(discrete=(2,))
        )
        return dict.fromkeys(self._rules.behavior_ids, spec)

    def reset(self, parameters: Mapping[str, float], seed: int | None) -> Sequence[BehaviorReport]:
        del parameters, seed
        for area in range(self._rules.areas):
            self._begin(area)
        return self._reports({})

    def step(self, actions: Mapping[str, BehaviorActions]) -> Sequence[BehaviorReport]:
        del actions
        before = {behavior_id: here.copy() for behavior_id, here in self._here.items()}
        over = {area for area in range(self._rules.areas) if self._chance.random() < self._rules.ends}
        for behavior_id, here in self._here.items():
            for area in range(self._rules.areas):
                if area not in over:
                    self._end_and_restart(behavior_id, here, area)
        ended_agents = {behavior_id: here & ~self._here[behavior_id] for behavior_id, here in before.items()}
        for area in sorted(over):
            for behavior_id, here in before.items():
                ended_agents[behavior_id][area] |= here[area]
        last = {
            behavior_id: self._ends(behavior_id, ended) for behavior_id, ended in ended_agents.items() if ended.any()
        }
        for area in sorted(over):
            self._begin(area)
        return self._reports(last)

    def close(self) -> None:
        """Does nothing; the game holds no resources."""

    def _begin(self, area: int) -> None:
        self._matches[area] = self._number()
        for here in self._here.values():
            here[area] = True

    def _end_and_restart(self, behavior_id: str, here: NDArray[np.bool_], area: int) -> None:
        """Ends members before their area and restarts them; one member always stays."""
        if self._rules.contests:
            return
        for member in range(self._rules.members):
            if not here[area, member]:
                here[area, member] = self._chance.random() < 0.3
            elif here[area].sum() > 1 and self._chance.random() < self._rules.ends:
                here[area, member] = False

    def _rows(self, behavior_id: str, which: NDArray[np.bool_], *, deciding: bool) -> tuple[Any, Any, Any]:
        """Returns agents, observations and matches of the agents in `which`."""
        areas, members = np.nonzero(which)
        agents = areas * self._rules.members + members
        matches = [self._matches[area] for area in areas]
        observations = [written(self._number() if deciding else 0, match) for match in matches]
        return agents, np.array(observations, np.float32).reshape(-1, SIZE), np.array(matches, np.int64)

    def _reports(self, last: Mapping[str, Any]) -> Sequence[BehaviorReport]:
        reports = []
        for at, behavior_id in enumerate(self._rules.behavior_ids):
            following = None
            if self._here[behavior_id].any():
                agents, observations, matches = self._rows(behavior_id, self._here[behavior_id], deciding=True)
                areas = agents // self._rules.members
                groups = {"": None, "behavior_id": 1 + areas + at * self._rules.areas, "area": 1 + areas}[
                    self._rules.groups
                ]
                following = decisions(
                    agents,
                    observations,
                    rewards=np.full(len(agents), 0.5),
                    groups=groups,
                    group_rewards=None if groups is None else np.ones(len(agents)),
                    matches=matches if self._rules.contests else None,
                )
            if following is not None or behavior_id in last:
                reports.append(BehaviorReport(behavior=behavior_id, decisions=following, ends=last.get(behavior_id)))
        return reports

    def _ends(self, behavior_id: str, ended: NDArray[np.bool_]) -> Any:
        agents, observations, matches = self._rows(behavior_id, ended, deciding=False)
        team = BehaviorId.parse(behavior_id).team
        won = [float((match + team) % 2) for match in matches.tolist()]
        return ends(
            agents,
            observations,
            rewards=np.ones(len(agents)),
            interrupted=[self._chance.random() < 0.3] * len(agents),
            group_rewards=np.ones(len(agents)) if self._rules.groups else None,
            outcomes=won if self._rules.contests else None,
            matches=matches if self._rules.contests else None,
        )
