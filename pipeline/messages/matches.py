"""Coordination assigns matchups to stepping, and stepping reports the results of the matches to it.

In self-play one team learns; *ghosts*, fixed policies, play the behavior ids ("Soccer?team=1") of all other teams. A
*matchup* names these ghosts; a match begins and ends under the same one.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from sparring.pipeline.messages.schema import F32, I32, I64, record
from sparring.pipeline.specs import BehaviorId

NO_TEAM: Final = -1
"""Learning team of a matchup in which only ghosts play."""


@record("matchup")
class Matchup:
    """A matchup names the policies that meet in a match.

    Attributes:
        number: unique in the run; only rises.
        team: the team that learns; `NO_TEAM` where none does.
        ghosts: policy number by behavior id of the other teams: a version of the behavior's weights where positive, an
            external opponent where negative.
    """

    number: int
    team: int
    ghosts: dict[str, int]

    def covers(self, behavior_id: BehaviorId) -> bool:
        """Returns whether a behavior id was known when the matchup was made."""
        return behavior_id.team == self.team or str(behavior_id) in self.ghosts


@record("assignment")
class MatchupAssignment:
    """Matches that begin from now on are played under these matchups.

    Attributes:
        serial: counts the assignments of a run from 1.
        matchups: simulator number n plays matchups[n % len(matchups)]; where it reports match ids, each of its matches
            takes the next one.
    """

    serial: int
    matchups: tuple[Matchup, ...]


def ghosts_of(matchups: Iterable[Matchup]) -> set[tuple[str, int]]:
    """Returns the ghosts of matchups by behavior name and number."""
    return {(BehaviorId.parse(one).name, number) for matchup in matchups for one, number in matchup.ghosts.items()}


@record("results")
class Results:
    """Stepping reports the `m` matches that ended, in `r` rows: one for each behavior id of each match, in order.

    It keeps them until coordination has them on disk, and sends them again to a restarted coordination.

    Attributes:
        source: stepping's incarnation.
        behavior: name of the learning agents' behavior.
        before: matches that the source reported of this behavior before these.
        numbers: [m] number of each match, unique within the source.
        matchups: [m] number of its matchup.
        simulators: [m] connection number of its simulator.
        row_counts: [m] number of its rows; 0 where there is no result, because its simulator disconnected or no agent
            of the learning team took part.
        names: behavior ids; a later record of a source begins with those of its earlier ones.
        who: [r] index into `names`.
        scores: [r] 1 won, 0.5 drawn, 0 lost; -1 where only the score of the others is known.
        explicit: [r] 1 where the simulator reported the score, 0 where it is the sign of the final reward.
        rewards: [r] final reward, own plus group's: the mean over the agents that ended last.
    """

    source: str
    behavior: str
    before: int
    numbers: I64
    matchups: I64
    simulators: I32
    row_counts: I32
    names: tuple[str, ...]
    who: I32
    scores: F32
    explicit: I32
    rewards: F32


class MatchEnd(NamedTuple):
    """A MatchEnd is one match of `Results`.

    Attributes:
        number: unique within the source.
        matchup: number of its matchup.
        simulator: connection number.
        behavior_ids: of its rows, in order.
        scores: by behavior id.
        rewards: by behavior id.
        explicit: the simulator reported who won.
    """

    number: int
    matchup: int
    simulator: int
    behavior_ids: list[str]
    scores: dict[str, float]
    rewards: dict[str, float]
    explicit: bool


def one_by_one(results: Results) -> Iterator[MatchEnd]:
    """Yields the matches of a record."""
    at = 0
    heads = (results.numbers, results.matchups, results.simulators, results.row_counts)
    for number, matchup, simulator, count in zip(*(column.tolist() for column in heads), strict=True):
        rows = slice(at, at + count)
        at += count
        names = [results.names[one] for one in results.who[rows].tolist()]
        columns = results.scores, results.rewards
        scores, rewards = (dict(zip(names, column[rows].tolist(), strict=True)) for column in columns)
        explicit = bool(results.explicit[rows].any())
        yield MatchEnd(number, matchup, simulator, names, scores, rewards, explicit)


@record("rating")
class Rating:
    """A Rating describes a player that a learner has met.

    Attributes:
        elo: rating by matches of two teams.
        mu: rating by matches of more teams.
        matches: of the learner against this player.
        win_rate: of the learner; a tie counts half.
    """

    elo: float
    mu: float
    matches: int
    win_rate: float


@record("rated")
class RatedLearner:
    """A RatedLearner describes one learner under self-play.

    Attributes:
        team: the team that learns now; -1 before it is known.
        learning: that team belongs to this behavior name.
        elo: rating by matches of two teams.
        mu: rating by matches of more teams.
        sigma: uncertainty of `mu`.
        ghost_steps: steps that ghosts have played.
        opponents: by player, those that it has met and may meet again.
    """

    team: int
    learning: bool
    elo: float
    mu: float
    sigma: float
    ghost_steps: int
    opponents: dict[str, Rating]
