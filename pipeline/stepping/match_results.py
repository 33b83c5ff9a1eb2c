"""Match results collect the outcomes of ended matches until they are reported."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.messages.matches import Results
from sparring.pipeline.messages.simulator import Ends
from sparring.pipeline.specs import BehaviorId

UNKNOWN: Final = -1.0
"""Score where only the scores of the others are known."""

Columns = NDArray[np.float64]


class MatchOutcome(NamedTuple):
    """A MatchOutcome holds numbers for one behavior id in one match, or columns for many matches.

    Attributes:
        scores: 1 won, 0.5 drawn, 0 lost, -1 unknown.
        explicit: 1 where the simulator reported the score.
        rewards: final rewards.
    """

    scores: Any
    explicit: Any
    rewards: Any


class MatchResults:
    """MatchResults collect the results of one behavior name until they are taken.

    Attributes:
        reported: results added so far.
    """

    def __init__(self) -> None:
        self.reported = 0
        self._matches: list[NDArray[np.int64]] = []  # [m, 4] number, matchup, simulator, number of rows
        self._rows: list[Columns] = []  # [r, 4] behavior id, score, explicit, reward

    def add(self, matches: NDArray[np.int64], rows: Columns) -> None:
        """Adds matches [m, 4] and their rows [r, 4]."""
        self._matches.append(matches)
        self._rows.append(rows)
        self.reported += len(matches)

    def take(self, source: str, behavior: str, behavior_ids: Iterable[BehaviorId]) -> Results | None:
        """Returns all results of the incarnation `source` and forgets them; None where there are none."""
        if not self._matches:
            return None
        numbers, matchups, simulators, counts = np.concatenate(self._matches).T.copy()
        who, scores, explicit, rewards = np.concatenate(self._rows).T.copy()
        self._matches, self._rows = [], []
        return Results(
            source=source,
            behavior=behavior,
            before=self.reported - len(numbers),
            numbers=numbers,
            matchups=matchups,
            simulators=simulators.astype(np.int32),
            row_counts=counts.astype(np.int32),
            names=tuple(map(str, behavior_ids)),
            who=who.astype(np.int32),
            scores=scores.astype(np.float32),
            explicit=explicit.astype(np.int32),
            rewards=rewards.astype(np.float32),
        )


def outcomes_of(ends: Ends, rows: NDArray[np.intp]) -> MatchOutcome:
    """Returns the outcomes of some agents, in columns."""
    rewards = ends.rewards[rows].astype(np.float64)
    if ends.group_rewards is not None:
        rewards += ends.group_rewards[rows]
    is_explicit = ends.outcomes is not None
    scores = 0.5 + 0.5 * np.sign(rewards) if ends.outcomes is None else ends.outcomes[rows]
    return MatchOutcome(scores, np.full(len(rows), float(is_explicit)), rewards)


def joint_outcome(ends: Ends, rows: NDArray[np.intp]) -> MatchOutcome:
    """Returns the mean reported outcome of agents that ended together, else the sign of their mean reward."""
    scores, explicit, rewards = outcomes_of(ends, rows)
    reward = float(rewards.mean())
    score = float(scores.mean()) if explicit[0] else 0.5 + 0.5 * float(np.sign(reward))
    return MatchOutcome(score, float(explicit[0]), reward)
