"""Which opponent plays next: samples under self-play, and the line-ups of a tournament. Rules without I/O."""

import itertools
import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from sparring.pipeline import plugins
from sparring.pipeline.coordination.settings import Candidate, OpponentSampling, SelfPlaySettings
from sparring.pipeline.errors import FOREIGN, ServiceError
from sparring.pipeline.files import reading, regular
from sparring.pipeline.messages.matches import NO_TEAM, Matchup, MatchupAssignment, Results, one_by_one
from sparring.pipeline.specs import BehaviorId

OPPONENTS_FILE: Final = "opponents.json"


@dataclass(frozen=True, slots=True)
class ExternalOpponent:
    """An opponent that is no snapshot of this run.

    Attributes:
        label: its name as a player.
        weight: relative frequency; all snapshots together have 1.
        script: of the simulators, that plays it; "" for weights.
    """

    label: str
    weight: float
    script: str = ""


def opponents_of(directory: Path) -> dict[str, list[ExternalOpponent]]:
    """Returns the external opponents in the folder of a run, by behavior name, in the order of their numbers.

    Raises:
        SettingsError: their file is damaged.
    """
    path = directory / OPPONENTS_FILE
    with reading(path, "the opponents of the run", "restore it, or begin a new run"):
        known = json.loads(regular(path).read_text()) if path.exists() else {}
        return {
            name: [ExternalOpponent(label, one["weight"], one["script"]) for label, one in own.items()]
            for name, own in known.items()
        }


class Record(NamedTuple):
    """The record of matches against one opponent.

    Attributes:
        matches: how many.
        points: 1 for each won, 0.5 for each drawn.
    """

    matches: int = 0
    points: float = 0.0

    @property
    def rate(self) -> float:
        """Win rate, where a draw counts half, smoothed towards 0.5 while matches are few (Laplace)."""
        return (self.points + 1) / (self.matches + 2)


@dataclass(slots=True)
class Side:
    """One behavior name under self-play; it is saved as it is.

    Attributes:
        settings: its own.
        max_steps: where its learner ends.
        external: opponents that are no snapshots of this run.
        teams: numbers of its teams.
        version: of its latest weights.
        trained: steps in their lineage.
        steps: learner steps in all, those that a crash rolled back included.
        saved_at: of these, at the last snapshot.
        ghost: steps that ghosts have played.
        swapped_at: of these, at the last change of opponents.
        crossings: changes of opponents so far.
        window: versions of the snapshots, oldest first.
        records: by player, what its learner has made of it.
    """

    settings: SelfPlaySettings
    max_steps: int
    external: list[ExternalOpponent] = field(default_factory=list)
    teams: list[int] = field(default_factory=list)
    version: int = 0
    trained: int = 0
    steps: int = 0
    saved_at: int = 0
    ghost: int = 0
    swapped_at: int = 0
    crossings: int = 0
    window: list[int] = field(default_factory=list)
    records: dict[str, Record] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Whether its learner has reached its end."""
        return self.trained >= self.max_steps


def sample_opponent(
    seed: Sequence[int], behavior_id: BehaviorId, side: Side, candidate: Callable[[int], Candidate]
) -> int:
    """Samples what plays a behavior id: a version of its side, or minus the number (from 1) of an external opponent.

    The random numbers come from `seed` and the behavior id alone, so that no sample depends on how many came before.

    Args:
        seed: of the run, and of the occasion.
        behavior_id: that the opponent plays.
        side: of the behavior id.
        candidate: returns what is known of a snapshot, by its version.

    Raises:
        ServiceError: the plug-in that samples snapshots fails.
    """
    settings = side.settings
    random = np.random.default_rng([*seed, zlib.crc32(str(behavior_id).encode())])
    weights = [1.0, *(one.weight for one in side.external)]
    which = int(random.choice(len(weights), p=np.array(weights) / sum(weights)))
    latest = random.random() < settings.play_against_latest_model_ratio
    share = random.random()
    if which:
        return -which
    if latest or not side.window:
        return side.version
    ends = np.cumsum(_weights(settings.opponent_sampling, [candidate(version) for version in side.window]))
    at = int(np.searchsorted(ends, share * ends[-1], side="right"))
    return side.window[min(at, len(side.window) - 1)]


def _weights(sampling: OpponentSampling, candidates: Sequence[Candidate]) -> Sequence[float]:
    """Returns how often each candidate is to be sampled.

    Raises:
        ServiceError: the plug-in fails, or returns other than one number for each, of which none is below 0.
    """
    try:
        found: Any = [float(one) for one in sampling.weights(candidates)]
        is_valid = len(found) == len(candidates) and all(one >= 0 for one in found) and 0 < sum(found) < math.inf
    except FOREIGN as error:  # whatever the code of a foreign package raises
        found, is_valid = f"{type(error).__name__}: {error}", False
    if not is_valid:
        package = plugins.origin(plugins.OPPONENTS, sampling.type)
        raise ServiceError(
            f"got {found} from opponent_sampling {sampling.type} of {package}; "
            f"expected {len(candidates)} finite numbers of at least 0, one above it; mend it, or choose uniform"
        )
    return found  # type: ignore[no-any-return]


class Tournament:
    """Lets fixed players play each other in all orders, decides who plays whom, and counts what is missing.

    No team learns. A *line-up* says which player has which team. All line-ups of different players are played, as often
    as each other; where there are more teams than players, those with at least two different ones.

    Args:
        names: of the behaviors.
        players: labels; the number of each, from 1, is what plays for it, negative.
        matches: of each pair of players, at least.
        mirror: each also plays itself.

    Attributes:
        assignment: who plays now; None before all teams are known.
        team: `NO_TEAM`, as no team learns.
        changes: none.
    """

    def __init__(self, names: Sequence[str], players: Sequence[str], matches: int, *, mirror: bool = False) -> None:
        self.names = frozenset(names)
        self.sides: dict[str, Any] = {}
        self.players = tuple(players)
        self.assignment: MatchupAssignment | None = None
        self.team = NO_TEAM
        self.changes = 0
        self._matches = matches
        self._mirror = mirror
        self._teams: dict[str, set[int]] = {}
        self._lineups: dict[int, tuple[int, ...]] = {}  # by number of the matchup, player of each team
        self._quota = 0
        self._ended: dict[int, int] = {}  # number of a match: its matchup
        self._whole = 0  # all matches up to this number have ended

    @property
    def playing(self) -> set[tuple[str, int]]:
        """Behavior name and number of all players."""
        if self.assignment is None:
            return set()
        return {(name, -number) for name in self._teams for number in range(1, len(self.players) + 1)}

    wanted = playing

    @property
    def complete(self) -> bool:
        """Whether every line-up has been played often enough.

        Matches count in the order in which they began, once all that began before have ended: else short ones would
        count more often.
        """
        if not self._lineups:
            return False
        return min(self._counts(range(1, self._whole + 1)).values()) >= self._quota

    def _counts(self, numbers: Iterable[int]) -> dict[int, int]:
        """Counts ended matches by line-up; matches from before all teams were known belong to none."""
        counts = Counter(self._ended[number] for number in numbers)
        return {matchup: counts[matchup] for matchup in self._lineups}

    def player(self, _name: str, number: int) -> str:
        """Returns the label of a player."""
        return self.players[-number - 1]

    def set_teams(self, name: str, teams: tuple[int, ...]) -> None:
        """Takes over the teams of a behavior name that simulators have."""
        known = self._teams.setdefault(name, set())
        if known >= set(teams):
            return
        known |= set(teams)
        if self._teams.keys() >= self.names and len(self._order()) > 1:
            self._begin()

    def ghosts(self, name: str, steps: int) -> None:
        """Does nothing: a tournament does not depend on steps."""

    def results(self, results: Results, first: int = 0) -> Iterator[dict[str, Any]]:
        """Counts matches that ended, and yields a line of the match file for each from the `first` on."""
        for match in itertools.islice(one_by_one(results), first, None):
            lineup, teams = self._lineups.get(match.matchup), self._order()
            line = {"match": match.number, "simulator": match.simulator, "matchup": match.matchup}
            if lineup is None or not match.behavior_ids:
                self._ended[match.number] = 0
                yield {**line, "lost": True}
                continue
            self._ended[match.number] = match.matchup
            yield {
                **line,
                "players": {s: self.players[lineup[teams.index(BehaviorId.parse(s).team)]] for s in match.behavior_ids},
                "scores": match.scores,
                "rewards": match.rewards,
                "explicit": match.explicit,
            }
        while self._whole + 1 in self._ended:
            self._whole += 1
        counts = self._counts(self._ended)  # line-ups that have been played often enough leave the assignment
        left = [matchup for matchup, count in counts.items() if count < self._quota] or list(self._lineups)
        if self.assignment is not None and left != [one.number for one in self.assignment.matchups]:
            self._assign(left)

    # ---------------------------------------------------------------- inside

    def _order(self) -> list[int]:
        return sorted(set().union(*self._teams.values()))

    def _begin(self) -> None:
        """Begins the tournament, because all teams are known."""
        teams, count = self._order(), len(self.players)
        lineups: list[tuple[int, ...]] = list(itertools.permutations(range(count), len(teams)))
        if self._mirror or count < len(teams):
            every = itertools.product(range(count), repeat=len(teams))
            lineups = [one for one in every if self._mirror or len(set(one)) > 1]
        self._lineups = dict(enumerate(lineups, max(self._lineups, default=0) + 1))
        of_a_pair = sum({0, 1} <= set(one) for one in lineups) or 1
        self._quota = -(-self._matches // of_a_pair)
        self._assign(list(self._lineups))

    def _assign(self, numbers: Sequence[int]) -> None:
        teams = self._order()
        matchups = []
        for number in numbers:
            ghosts = {
                str(BehaviorId(name=name, team=team)): -1 - self._lineups[number][teams.index(team)]
                for name, own in sorted(self._teams.items())
                for team in sorted(own)
            }
            matchups.append(Matchup(number=number, team=NO_TEAM, ghosts=ghosts))
        serial = 1 if self.assignment is None else self.assignment.serial + 1
        self.assignment = MatchupAssignment(serial=serial, matchups=tuple(matchups))
