"""Tournaments count every line-up equally often, however long its matches take."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.coordination.opponents import Tournament
from sparring.pipeline.evaluation.statistics import counted, standings
from sparring.pipeline.messages.matches import NO_TEAM, Matchup
from sparring.pipeline.messages.simulator import Decisions, Ends
from sparring.pipeline.specs import ActionSpec, BehaviorId, BehaviorSpec, ObservationSpec
from sparring.pipeline.stepping.agents import Behavior, Slots, SlotTable
from sparring.pipeline.stepping.connections import Arrival, SimulatorBehavior, SimulatorConnection
from sparring.pipeline.stepping.matches import Matches
from tests.coordination.self_play_world import behavior_id, matchups, results

LineUp = tuple[str, ...]
Outcome = Callable[[random.Random, LineUp], tuple[float, float]]
"""Decides a match: score of the first team, and duration."""


def labels(tournament: Tournament, one: Matchup) -> LineUp:
    """Returns the player of each team, in the order of teams."""
    by_team = {BehaviorId.parse(name).team: tournament.player("", number) for name, number in one.ghosts.items()}
    return tuple(by_team[team] for team in sorted(by_team))


def started_tournament(
    names: dict[str, tuple[int, ...]], players: int, matches: int, *, mirror: bool = False
) -> Tournament:
    tournament = Tournament(list(names), [f"p{at}" for at in range(players)], matches, mirror=mirror)
    for name, teams in names.items():
        tournament.set_teams(name, teams)
    return tournament


@dataclass
class PlayedTournament:
    """Simulators that play matches in turn, each at its own speed.

    A match keeps the matchup that its simulator has at its start.
    """

    tournament: Tournament
    simulators: int
    rng: random.Random
    decide: Outcome
    number: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)
    under_way: list[tuple[float, int, int, int, float]] = field(default_factory=list)
    began: list[tuple[int, LineUp]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    ghosts: dict[int, str] = field(default_factory=dict)

    def begin(self, simulator: int, now: float) -> None:
        offered = matchups(self.tournament)
        one = offered[simulator % len(offered)]
        self.number += 1
        score, time = self.decide(self.rng, labels(self.tournament, one))
        self.began.append((self.number, labels(self.tournament, one)))
        self.ghosts = {BehaviorId.parse(name).team: name for name in one.ghosts}
        heapq.heappush(self.under_way, (now + time, self.number, simulator, one.number, score))

    def play(self, limit: int = 20_000) -> None:
        for simulator in range(self.simulators):
            self.begin(simulator, 0.0)
        while not self.tournament.complete:
            assert self.number < limit, "never complete"
            now, number, simulator, matchup, score = heapq.heappop(self.under_way)
            teams = sorted(self.ghosts)
            scores = {self.ghosts[team]: score if at == 0 else 1 - score for at, team in enumerate(teams)}
            found = results([(matchup, scores)], numbers=[number], simulators=[simulator])
            self.lines += self.tournament.results(found)
            self.ended.append(number)
            self.begin(simulator, now)

    @property
    def contiguous(self) -> int:
        """Returns the highest number up to which all matches have ended."""
        return next(number for number in itertools.count() if number + 1 not in self.ended)


def fair(rng: random.Random, lineup: LineUp) -> tuple[float, float]:
    return float(rng.random() < 0.5), 1.0


def by_line_up(rng: random.Random, lineup: LineUp) -> tuple[float, float]:
    """Decides by chance, with line-ups that take fifty times as long as others."""
    return float(rng.random() < 0.5), 1.0 + 49.0 * (int(lineup[0][1:]) % 2) + rng.random()


def quick_wins(rng: random.Random, lineup: LineUp) -> tuple[float, float]:
    """Decides by chance, with losses of the first team that take thirty times as long as wins."""
    won = rng.random() < 0.5
    return float(won), 1.0 if won else 30.0


GAMES: list[dict[str, tuple[int, ...]]] = [{"S": (0, 1)}, {"A": (0,), "B": (1,)}, {"S": (0, 1, 2)}]


@settings(max_examples=20)
@given(
    names=st.sampled_from(GAMES),
    players=st.integers(2, 4),
    matches=st.integers(1, 9),
    mirror=st.booleans(),
    simulators=st.integers(1, 7),
    seed=st.integers(0, 2**31),
    decide=st.sampled_from([fair, by_line_up, quick_wins]),
)
def test_every_line_up_counts_equally_and_with_its_first_matches(
    names: dict[str, tuple[int, ...]],
    players: int,
    matches: int,
    mirror: bool,
    simulators: int,
    seed: int,
    decide: Outcome,
) -> None:
    """The matches of each line-up that began first are counted, and each pair has its number of matches."""
    tournament = started_tournament(names, players, matches, mirror=mirror)
    offered = {labels(tournament, one) for one in matchups(tournament)}
    played = PlayedTournament(tournament, simulators, random.Random(seed), decide)
    played.play()
    lineups = {number: lineup for number, lineup in played.began if number <= played.contiguous}
    found = counted(played.lines)
    assert standings(tournament.players, found).fewest(mirror=mirror) >= matches
    counts = Counter(lineups[line["match"]] for line in found)
    assert counts.keys() == offered
    assert len(set(counts.values())) == 1
    for lineup, count in counts.items():
        first = [number for number, one in lineups.items() if one == lineup][:count]
        assert sorted(line["match"] for line in found if lineups[line["match"]] == lineup) == first
    for pair in itertools.combinations([f"p{at}" for at in range(players)], 2):
        assert sum(count for lineup, count in counts.items() if set(pair) <= set(lineup)) >= matches


@settings(max_examples=25)
@given(simulators=st.integers(1, 6), seed=st.integers(0, 2**31), matches=st.integers(2, 12))
def test_a_tournament_is_complete_exactly_when_every_line_up_has_its_quota(
    simulators: int, seed: int, matches: int
) -> None:
    """Two orders of two players share the matches of a pair; matches after an open one do not count yet."""
    tournament = started_tournament({"S": (0, 1)}, 2, matches)
    quota = -(-matches // 2)
    played = PlayedTournament(tournament, simulators, random.Random(seed), quick_wins)
    for simulator in range(simulators):
        played.begin(simulator, 0.0)
    for _ in range(2000):
        counts = Counter(lineup for number, lineup in played.began if number <= played.contiguous)
        contiguous = min(counts[("p0", "p1")], counts[("p1", "p0")]) >= quota
        assert tournament.complete == contiguous
        if contiguous:
            return
        now, number, simulator, matchup, score = heapq.heappop(played.under_way)
        scores = {behavior_id("S", 0): score, behavior_id("S", 1): 1 - score}
        played.lines += tournament.results(results([(matchup, scores)], numbers=[number]))
        played.ended.append(number)
        played.begin(simulator, now)
    raise AssertionError("never complete")


def test_short_matches_are_not_favored() -> None:
    """Half of the counted matches are wins, although wins are thirty times shorter."""
    played = PlayedTournament(started_tournament({"S": (0, 1)}, 3, 300), 8, random.Random(7), quick_wins)
    played.play()
    first = [line["scores"][behavior_id("S", 0)] for line in counted(played.lines)]
    assert len(first) >= 900
    assert sum(first) / len(first) == pytest.approx(0.5, abs=0.07)
    early = [line["scores"][behavior_id("S", 0)] for line in played.lines[:50]]
    assert sum(early) / len(early) > 0.6, "the test's own premise: early matches are wins more often"


def test_equal_players_get_equal_ratings() -> None:
    """The advantage of a side cancels out, as each pair plays in both orders."""

    def first_team_is_better(rng: random.Random, lineup: LineUp) -> tuple[float, float]:
        return float(rng.random() < 0.8), 1.0 + rng.random()

    played = PlayedTournament(started_tournament({"S": (0, 1)}, 3, 200), 5, random.Random(3), first_team_is_better)
    played.play()
    found = standings(["p0", "p1", "p2"], counted(played.lines))
    assert (abs(found.ratings) <= 2 * found.margins).all()


# ---------------------------------------------------------------- line-ups


def line_ups(names: dict[str, tuple[int, ...]], players: int, *, mirror: bool = False) -> list[LineUp]:
    tournament = started_tournament(names, players, 1, mirror=mirror)
    return [labels(tournament, one) for one in matchups(tournament)]


def test_all_orders_of_different_players_play() -> None:
    """Three players on two sides make six line-ups."""
    players = ["p0", "p1", "p2"]
    found = line_ups({"S": (0, 1)}, 3)
    assert sorted(found) == sorted(itertools.permutations(players, 2))


def test_in_a_mirror_each_player_also_plays_itself() -> None:
    """Three players make nine line-ups, and a single player makes one."""
    assert sorted(line_ups({"S": (0, 1)}, 3, mirror=True)) == sorted(itertools.product(["p0", "p1", "p2"], repeat=2))
    assert line_ups({"S": (0, 1)}, 1, mirror=True) == [("p0", "p0")]


def test_more_teams_than_players_have_at_least_two_different_players() -> None:
    """Three teams of two players make all line-ups but those of one player."""
    found = line_ups({"S": (0, 1, 2)}, 2)
    assert sorted(found) == sorted(one for one in itertools.product(["p0", "p1"], repeat=3) if len(set(one)) == 2)


def test_a_player_of_an_asymmetric_game_has_a_policy_for_each_name() -> None:
    """Each player is chaser once and runner once, and no team learns."""
    tournament = started_tournament({"Chaser": (0,), "Runner": (1,)}, 2, 1)
    found = [one.ghosts for one in matchups(tournament)]
    assert found == [{"Chaser?team=0": -1, "Runner?team=1": -2}, {"Chaser?team=0": -2, "Runner?team=1": -1}]
    assert {one.team for one in matchups(tournament)} == {NO_TEAM}
    assert tournament.playing == {("Chaser", -1), ("Chaser", -2), ("Runner", -1), ("Runner", -2)}
    assert tournament.wanted == tournament.playing


def test_no_match_is_assigned_before_all_names_are_known() -> None:
    """A runner alone has no opponent."""
    tournament = Tournament(["Chaser", "Runner"], ["x", "y"], 1)
    tournament.set_teams("Runner", (1,))
    assert tournament.assignment is None
    assert not tournament.complete
    assert not tournament.playing


def test_a_line_holds_players_and_scores() -> None:
    """Both are plain values by behavior id."""
    tournament = started_tournament({"Chaser": (0,), "Runner": (1,)}, 2, 1)
    scores = {"Chaser?team=0": 0.0, "Runner?team=1": 1.0}
    (line,) = tournament.results(results([(2, scores)], numbers=[1], simulators=[3]))
    assert line["players"] == {"Chaser?team=0": "p1", "Runner?team=1": "p0"}
    assert line["scores"] == scores
    assert (line["match"], line["matchup"], line["simulator"], line["explicit"]) == (1, 2, 3, True)


# ---------------------------------------------------------------- assignments


def test_a_line_up_with_enough_matches_leaves_the_assignment() -> None:
    """The remaining line-ups share the simulators under a new serial."""
    tournament = started_tournament({"S": (0, 1)}, 2, 4)
    assert tournament.assignment is not None
    first = tournament.assignment.serial
    scores = {behavior_id("S", 0): 1.0, behavior_id("S", 1): 0.0}
    list(tournament.results(results([(1, scores), (1, scores)], numbers=[1, 2])))
    assert [one.number for one in matchups(tournament)] == [2]
    assert tournament.assignment.serial == first + 1
    list(tournament.results(results([(2, scores)], numbers=[3])))
    assert tournament.assignment.serial == first + 1
    assert not tournament.complete
    list(tournament.results(results([(2, scores)], numbers=[4])))
    assert tournament.complete


def matchups_after(tournament: Tournament, steps: list[tuple[str, tuple[int, ...]]]) -> Iterator[Matchup]:
    for name, teams in steps:
        tournament.set_teams(name, teams)
        if tournament.assignment is not None:
            yield from matchups(tournament)


def test_a_matchup_number_stands_for_one_line_up_for_ever() -> None:
    """Numbers are unique in the run, although simulators report their teams in turn."""
    tournament = Tournament(["S"], ["x", "y"], 2)
    known: dict[int, dict[str, int]] = {}
    for one in matchups_after(tournament, [("S", (0,)), ("S", (0, 1)), ("S", (0, 1, 2))]):
        assert known.setdefault(one.number, one.ghosts) == one.ghosts


def test_matches_of_too_few_teams_do_not_count_for_others() -> None:
    """A match that began before the second team was known belongs to no line-up of two."""
    tournament = Tournament(["S"], ["x", "y"], 2)
    tournament.set_teams("S", (0,))
    early = matchups(tournament) if tournament.assignment is not None else ()
    tournament.set_teams("S", (0, 1))
    numbers = range(1, len(early) + 1)
    list(
        tournament.results(results([(one.number, {behavior_id("S", 0): 1.0}) for one in early], numbers=list(numbers)))
    )
    assert not tournament.complete


def connection_of(number: int, behavior: Behavior, *behavior_ids: BehaviorId) -> SimulatorConnection:
    """Returns a simulator with these ids of one behavior."""
    hosted = {str(one): SimulatorBehavior(str(one), one, behavior) for one in behavior_ids}
    return SimulatorConnection(number=number, key=number, behaviors=hosted)


def first_decisions(match: int | None = None) -> Decisions:
    """Returns the decision of one agent, in a match with this id if one is given."""
    matches = None if match is None else np.array([match], np.int64)
    agents, rewards = np.zeros(1, np.int64), np.zeros(1, np.float32)
    return Decisions(agents=agents, observations=(), rewards=rewards, matches=matches)


def last_rewards(reward: float) -> Ends:
    """Returns the end of one agent."""
    agents, rewards = np.zeros(1, np.int64), np.array([reward], np.float32)
    return Ends(agents=agents, observations=(), rewards=rewards, interrupted=np.zeros(1, bool))


SPEC = BehaviorSpec(observations=(ObservationSpec(name="all", shape=(1,)),), actions=ActionSpec(continuous=1))


def test_matches_of_single_agents_are_numbered_as_they_begin() -> None:
    """Matches are counted by number; numbered by their end, short ones would count more."""
    tournament = started_tournament({"S": (0, 1)}, 2, 2)
    matches, table = Matches(["S"]), SlotTable(8)
    matches.assignment = tournament.assignment
    connection = connection_of(
        0, Behavior("S", SPEC, table), BehaviorId(name="S", team=0), BehaviorId(name="S", team=1)
    )
    first = connection.behaviors[behavior_id("S", 0)]
    slots = table.take(2)
    for slot in slots:  # one episode begins after the other
        table.begin(np.array([slot], np.int32), 0, 0, 0)
        arrival = Arrival(first, decisions=first_decisions(), slots=np.array([slot], np.int32))
        matches.begin(connection, arrival, np.array([0]))
    found = []
    for slot in slots[::-1]:  # and the later one ends first
        matches.end(connection, [Arrival(first, ends=last_rewards(1.0), vacated=np.array([slot], np.int32))])
        (reported,) = matches.take("stepping-0.5f3a-1")
        found += reported.numbers.tolist()
    assert found == [2, 1]


def test_a_match_lost_with_its_simulator_does_not_block_the_tournament() -> None:
    """A simulator dies in its first match; the other plays ten times as many matches as needed."""
    tournament = started_tournament({"S": (0, 1)}, 2, 2)
    matches, table = Matches(["S"]), SlotTable(8)
    behavior = Behavior("S", SPEC, table)
    teams = BehaviorId(name="S", team=0), BehaviorId(name="S", team=1)
    dying, remaining = connection_of(0, behavior, *teams), connection_of(1, behavior, *teams)

    def begin(connection: SimulatorConnection, match: int) -> Slots:
        slots = table.take(2)
        for at, one in enumerate(connection.behaviors.values()):
            arrival = Arrival(one, decisions=first_decisions(match), slots=slots[at : at + 1])
            matches.begin(connection, arrival, np.array([0]))
        return slots

    def end(slots: Slots) -> None:
        for at, one in enumerate(remaining.behaviors.values()):
            arrival = Arrival(one, ends=last_rewards(1.0 - 2 * at), vacated=slots[at : at + 1])
            matches.end(remaining, [arrival])
        table.give_back(slots)

    matches.assignment = tournament.assignment
    begin(dying, 1)
    matches.drop(dying)
    for number in range(1, 21):
        matches.assignment = tournament.assignment
        end(begin(remaining, number))
        for reported in matches.take("stepping-0.5f3a-1"):
            list(tournament.results(reported))
    assert matches.ended == 20
    assert tournament.complete
