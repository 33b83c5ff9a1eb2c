"""Who plays whom, and what came of it: what coordination tells stepping, and hears back along the way of the steps.

A *seat* is a behavior id ("Soccer?team=1"). In self-play one team learns; the seats of all others are played by
*ghosts*, fixed policies. A *draw* fixes these; a match begins under one and ends under it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from sparring.pipeline.messages.schema import F32, I32, I64, record

NOBODY: Final = -1
"""The learning team of a draw under which nobody learns."""


@record("matchup")
class Matchup:
    """Which policies meet in a match.

    Attributes:
        number: unique in the run; only rises.
        team: that learns; `NOBODY` where none does.
        ghosts: what plays each other seat: a version of its behavior's weights where positive, an opponent from
            elsewhere where negative.
    """

    number: int
    team: int
    ghosts: dict[str, int]


@record("assignment")
class MatchupAssignment:
    """What the matches that begin from now on are played with.

    Attributes:
        serial: counts the assignments of a run from 1.
        matchups: simulator number n takes matchups[n % len(matchups)]; where simulators say which agents form a match,
            each of their matches takes the next.
    """

    serial: int
    matchups: tuple[Matchup, ...]


@record("results")
class Results:
    """Matches that ended. Their rows, one for each seat, lie one after the other.

    `m` matches, `r` rows.

    Attributes:
        numbers: [m] number of each match, unique within the source.
        matchups: [m] number of its draw.
        simulators: [m] connection number of its simulator.
        row_counts: [m] how many rows it has; 0 where there is no result: its simulator went away, or nobody of the team
            that learns was in it.
        names: behavior ids; a later record of a source has those of an earlier one first.
        who: [r] which of `names`.
        scores: [r] 1 won, 0.5 drawn, 0 lost; -1 where only the score of the others is known.
        explicit: [r] 1 where the simulator said so, 0 where it is the sign of the final reward.
        rewards: [r] the final reward: own and group's, mean of the agents that ended last.
        before: matches that the source had told of with this behavior before these: what is sent again after a crash
            is known by it.
    """

    numbers: I64
    matchups: I64
    simulators: I32
    row_counts: I32
    names: tuple[str, ...]
    who: I32
    scores: F32
    explicit: I32
    rewards: F32
    before: int = 0


class MatchEnd(NamedTuple):
    """One match of `Results`.

    Attributes:
        number: of it.
        matchup: number of its draw.
        simulator: connection number.
        behavior_ids: behavior ids of its rows.
        scores: by seat.
        rewards: by seat.
        explicit: the simulator said who won.
    """

    number: int
    matchup: int
    simulator: int
    behavior_ids: list[str]
    scores: dict[str, float]
    rewards: dict[str, float]
    explicit: bool


def one_by_one(results: Results) -> Iterator[MatchEnd]:
    """The matches of a record."""
    at = 0
    heads = (results.numbers, results.matchups, results.simulators, results.row_counts)
    for number, matchup, simulator, count in zip(*(column.tolist() for column in heads), strict=True):
        rows = slice(at, at + count)
        at += count
        behavior_ids = [results.names[one] for one in results.who[rows].tolist()]
        yield MatchEnd(
            number=number,
            matchup=matchup,
            simulator=simulator,
            behavior_ids=behavior_ids,
            scores=dict(zip(behavior_ids, results.scores[rows].tolist(), strict=True)),
            rewards=dict(zip(behavior_ids, results.rewards[rows].tolist(), strict=True)),
            explicit=bool(results.explicit[rows].any()),
        )


@record("rating")
class Rating:
    """A player that a learner has met.

    Attributes:
        elo: rating by matches of two teams.
        mu: by matches of more.
        matches: of the learner against it.
        win_rate: of the learner, a draw counts half.
    """

    elo: float
    mu: float
    matches: int
    win_rate: float


@record("rated")
class RatedLearner:
    """A learner under self-play.

    Attributes:
        team: that learns now, -1 before it is known.
        learning: it is one of this behavior name's.
        elo: rating by matches of two teams.
        mu: by matches of more.
        sigma: how uncertain that is.
        ghost_steps: steps that ghosts have played.
        opponents: by player, those it has met and may meet again.
    """

    team: int
    learning: bool
    elo: float
    mu: float
    sigma: float
    ghost_steps: int
    opponents: dict[str, Rating]
