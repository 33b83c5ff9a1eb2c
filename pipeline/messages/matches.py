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


@record("draw")
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
        draws: simulator number n takes draws[n % len(draws)]; where simulators say which agents form a match, each of
            its matches takes the next.
    """

    serial: int
    draws: tuple[Matchup, ...]


@record("results")
class Results:
    """Matches that ended. Their rows, one for each seat, lie one after the other.

    `m` matches, `r` rows.

    Attributes:
        numbers: [m] number of each match, unique within the source.
        draws: [m] number of its draw.
        simulators: [m] connection number of its simulator.
        seats: [m] how many rows it has; 0 where there is no result: its simulator went away, or nobody of the team
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
    draws: I64
    simulators: I32
    seats: I32
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
        draw: number of its draw.
        simulator: connection number.
        seats: behavior ids of its rows.
        scores: by seat.
        rewards: by seat.
        explicit: the simulator said who won.
    """

    number: int
    draw: int
    simulator: int
    seats: list[str]
    scores: dict[str, float]
    rewards: dict[str, float]
    explicit: bool


def one_by_one(results: Results) -> Iterator[MatchEnd]:
    """The matches of a record."""
    at = 0
    heads = (results.numbers, results.draws, results.simulators, results.seats)
    for number, draw, simulator, count in zip(*(column.tolist() for column in heads), strict=True):
        rows = slice(at, at + count)
        at += count
        seats = [results.names[one] for one in results.who[rows].tolist()]
        yield MatchEnd(
            number=number,
            draw=draw,
            simulator=simulator,
            seats=seats,
            scores=dict(zip(seats, results.scores[rows].tolist(), strict=True)),
            rewards=dict(zip(seats, results.rewards[rows].tolist(), strict=True)),
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
