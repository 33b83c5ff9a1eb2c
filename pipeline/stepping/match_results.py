"""Matches end with outcomes, which are collected until they are reported."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.messages.matches import Matchup, Results
from sparring.pipeline.messages.simulator import Ends
from sparring.pipeline.specs import BehaviorId
from sparring.pipeline.stepping.agents import Ids

Outcomes = NDArray[np.float64]
"""[n, 3] or [3]: score (1 won, 0.5 drawn, 0 lost, -1 unknown), 1 where the simulator reported it, final reward."""

UNKNOWN: Final[Outcomes] = np.array([-1.0, 0.0, 0.0])
"""Outcome of the others where a simulator does not match them with each other."""

Kind = Literal["match", "group"]
MatchKey = tuple[Kind, int]
"""Kind and value of the id that the agents of a match share in their simulator."""


@dataclass(slots=True)
class Match:
    """A Match has begun and not ended yet.

    Attributes:
        number: unique within the source; below 0 where it is not reported: a group of ghosts.
        matchup: the matchup of its policies.
        live: number of its live agents.
        outcomes: by behavior id, outcome [3] of the agents that ended last.
    """

    number: int
    key: MatchKey
    matchup: Matchup
    live: int = 0
    outcomes: dict[BehaviorId, Outcomes] = field(default_factory=dict)


class MatchResults:
    """MatchResults collect the results of one behavior name until they are taken.

    Attributes:
        reported: results added so far.
    """

    def __init__(self) -> None:
        self.reported = 0
        self._matches: list[Ids] = []  # [m, 4] number, matchup, simulator, number of rows
        self._rows: list[Outcomes] = []  # [r, 4] behavior id, and its outcome

    def add(self, matches: Ids, rows: Outcomes) -> None:
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


def outcomes_of(ends: Ends, rows: NDArray[np.intp]) -> Outcomes:
    """Returns the outcomes [n, 3] of some agents."""
    rewards = ends.rewards[rows].astype(np.float64)
    if ends.group_rewards is not None:
        rewards += ends.group_rewards[rows]
    scores = 0.5 + 0.5 * np.sign(rewards) if ends.outcomes is None else ends.outcomes[rows]
    return np.stack([scores, np.full(len(rows), float(ends.outcomes is not None)), rewards], axis=1)


def joint_outcome(ends: Ends, rows: NDArray[np.intp]) -> Outcomes:
    """Returns the mean reported outcome [3] of agents that ended together, else the sign of their mean reward."""
    outcomes = outcomes_of(ends, rows)
    reward = outcomes[:, 2].mean()
    score = 0.5 + 0.5 * np.sign(reward) if ends.outcomes is None else ends.outcomes[rows].mean()
    return np.array([score, outcomes[0, 1], reward])
