"""Ratings: Elo against its formula, Plackett-Luce against true strengths, and the effect of match results."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.coordination.opponents import ExternalOpponent
from sparring.pipeline.coordination.self_play import Ratings, SelfPlay, expected
from tests.coordination.self_play_world import FAR, behavior_id, ghosts_by_place, matchups, results, started_rules

RATING = st.floats(-1000, 4000)
A0, A1, A2, B1, C2 = (
    behavior_id("A", 0),
    behavior_id("A", 1),
    behavior_id("A", 2),
    behavior_id("B", 1),
    behavior_id("C", 2),
)
SCORE = st.sampled_from([0.0, 0.5, 1.0])


def ratings_of(**elo: float) -> Ratings:
    ratings = Ratings()
    for player, rating in elo.items():
        ratings.enter(player, elo=rating)
    return ratings


# ---------------------------------------------------------------- Elo


@given(own=RATING, other=RATING)
def test_the_expected_score_follows_elos_formula(own: float, other: float) -> None:
    """It is E = 1 / (1 + 10^((other - own) / 400)), and both sum to 1."""
    assert expected(own, other) == pytest.approx(1 / (1 + math.pow(10, (other - own) / 400)))
    assert expected(own, other) + expected(other, own) == pytest.approx(1)


@given(own=RATING, other=RATING, score=SCORE)
def test_one_match_moves_both_ratings_by_k_times_the_surprise(own: float, other: float, score: float) -> None:
    """K is 16, the sum stays, and a draw moves the ratings towards each other."""
    ratings = ratings_of(a=own, b=other)
    ratings.rate([["a"], ["b"]], [score, 1 - score])
    change = 16 * (score - 1 / (1 + math.pow(10, (other - own) / 400)))
    assert ratings.elo["a"] == pytest.approx(own + change)
    assert ratings.elo["b"] == pytest.approx(other - change)
    assert ratings.matches == 1


def test_known_changes_of_ratings() -> None:
    """Equals move by 8 for a win and 0 for a draw; with 400 points between them an expected win moves 16 / 11."""
    for score, change in ((1.0, 8.0), (0.5, 0.0), (0.0, -8.0)):
        ratings = ratings_of(a=1200, b=1200)
        ratings.rate([["a"], ["b"]], [score, 1 - score])
        assert ratings.elo == {"a": 1200 + change, "b": 1200 - change}
    ratings = ratings_of(a=1600, b=1200)
    ratings.rate([["a"], ["b"]], [1.0, 0.0])
    assert ratings.elo["a"] == pytest.approx(1600 + 16 / 11)


@given(sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)), score=SCORE, data=st.data())
def test_teams_are_rated_by_their_mean_and_move_together(sizes: tuple[int, int], score: float, data: Any) -> None:
    """Each player of a team moves by the same amount, with one update per match."""
    teams = [[f"{side}{at}" for at in range(size)] for side, size in zip("ab", sizes, strict=True)]
    ratings = ratings_of(**{player: data.draw(RATING) for team in teams for player in team})
    before = dict(ratings.elo)
    means = [sum(before[player] for player in team) / len(team) for team in teams]
    ratings.rate(teams, [score, 1 - score])
    change = 16 * (score - 1 / (1 + math.pow(10, (means[1] - means[0]) / 400)))
    for team, sign in zip(teams, (1, -1), strict=True):
        for player in team:
            assert ratings.elo[player] == pytest.approx(before[player] + sign * change)


def test_a_player_entered_again_keeps_its_rating() -> None:
    """A new player may start with the rating of another."""
    ratings = ratings_of(a=1300)
    ratings.enter("a", elo=1000)
    ratings.enter("b", like="a")
    assert ratings.elo == {"a": 1300, "b": 1300}
    ratings.leave("a")
    ratings.leave("a")
    assert ratings.elo == {"b": 1300}


# ---------------------------------------------------------------- matches


def play_two_teams(
    rules: SelfPlay, own: float, other: float | None = None, place: int = 0, matches: int = 1
) -> list[dict[str, Any]]:
    """Plays matches of the symmetric game under one of its matchups."""
    number = matchups(rules)[place].number
    scores = {A0: own, A1: 1 - own if other is None else other}
    return list(rules.results(results([(number, scores)] * matches)))


def test_a_snapshot_starts_with_the_rating_of_the_learner() -> None:
    """It is rated separately afterwards."""
    rules = started_rules({"A": (0, 1)}, save_steps=10, swap_steps=10, play_against_latest_model_ratio=1.0)
    play_two_teams(rules, 1.0, matches=5)
    rating = rules.ratings.elo["A"]
    rules.weights("A", 2, 10)
    assert rules.ratings.elo["A@2"] == rating > 1200
    rules.ghosts("A", 10)
    play_two_teams(rules, 0.0, matches=3)
    assert rules.ratings.elo["A"] < rating < rules.ratings.elo["A@2"]


def test_a_latest_policy_starts_with_the_rating_of_the_learner() -> None:
    """It becomes a version when it is sampled."""
    rules = started_rules({"A": (0, 1)}, save_steps=1000, swap_steps=10, play_against_latest_model_ratio=1.0)
    play_two_teams(rules, 1.0, matches=5)
    rules.weights("A", 2, 10)
    rules.ghosts("A", 10)
    assert rules.playing == {("A", 2)}
    assert rules.ratings.elo["A@2"] == rules.ratings.elo["A"]


def test_learners_and_first_snapshots_start_with_initial_elo() -> None:
    """Each name has its own `initial_elo`."""
    rules = started_rules({"A": (0,), "B": (1,)}, per_name={"B": {"initial_elo": 900.0}})
    assert rules.ratings.elo == {"A": 1200.0, "A@1": 1200.0, "B": 900.0, "B@1": 900.0}


@settings(max_examples=60)
@given(scores=st.lists(SCORE, min_size=1, max_size=30))
def test_each_match_is_one_update(scores: list[float]) -> None:
    """A batch of matches applies the formula match by match, and the sum of ratings stays."""
    rules = started_rules({"A": (0, 1)})
    number = matchups(rules)[0].number
    lines = list(rules.results(results([(number, {A0: score, A1: 1 - score}) for score in scores])))
    own = other = 1200.0
    for score in scores:
        change = 16 * (score - 1 / (1 + math.pow(10, (other - own) / 400)))
        own, other = own + change, other - change
    assert [rules.ratings.elo["A"], rules.ratings.elo["A@1"]] == pytest.approx([own, other])
    assert rules.ratings.elo["A"] + rules.ratings.elo["A@1"] == pytest.approx(2400)
    assert rules.ratings.matches == len(lines) == len(scores)
    record = rules.sides["A"].records["A@1"]
    assert (record.matches, record.points) == (len(scores), sum(scores))


def test_an_uneven_team_moves_by_one_update() -> None:
    """A match has one row per behavior id, and a team of two names moves by one update."""
    rules = started_rules({"K": (0,), "S": (0,), "O": (1,)})
    number = matchups(rules)[0].number
    scores = {behavior_id("K", 0): 1.0, behavior_id("S", 0): 1.0, behavior_id("O", 1): 0.0}
    (line,) = rules.results(results([(number, scores)]))
    assert line["players"] == {behavior_id("K", 0): "K", behavior_id("S", 0): "S", behavior_id("O", 1): "O@1"}
    assert rules.ratings.matches == 1
    assert rules.ratings.elo["K"] == rules.ratings.elo["S"] == 1208
    assert rules.ratings.elo["O@1"] == 1192


def test_an_unknown_score_is_the_complement_of_the_learners() -> None:
    """Without match ids only the learning team's group reports an outcome."""
    one, other = started_rules({"A": (0, 1)}), started_rules({"A": (0, 1)})
    for score in (1.0, 0.5, 0.0):
        play_two_teams(one, score)
        (line,) = play_two_teams(other, score, -1.0)
        assert line["scores"] == {A0: score}
    assert one.ratings.elo == other.ratings.elo


def test_a_match_is_rated_for_the_learner_of_its_matchup() -> None:
    """A match under way at a change of team ends under its old assignment."""
    rules = started_rules({"A": (0,), "B": (1,)}, team_change=10)
    number = matchups(rules)[0].number
    rules.weights("A", 2, 10)
    assert rules.team == 1
    (line,) = rules.results(results([(number, {A0: 1.0, B1: 0.0})]))
    assert (line["team"], line["players"]) == (0, {A0: "A", B1: "B@1"})
    assert rules.ratings.elo["A"] == 1208
    assert rules.ratings.elo["B@1"] == 1192
    assert rules.ratings.elo["B"] == 1200


def test_a_team_that_was_named_after_the_matchup_has_not_played() -> None:
    """Stepping names all teams of a simulator beside one whose agents share no match."""
    rules = started_rules({"A": (0, 1)})
    ended = results([(matchups(rules)[0].number, {A0: 1.0, A1: -1.0, A2: -1.0})])
    rules.set_teams("A", (0, 1, 2))
    (line,) = rules.results(ended)
    assert line["players"] == {A0: "A", A1: "A@1"}
    assert (rules.ratings.elo["A"], rules.ratings.elo["A@1"], rules.played) == (1208, 1192, {0, 1})


def test_matches_of_unknown_matchups_are_counted_and_not_rated() -> None:
    """Their scores change no rating."""
    rules = started_rules({"A": (0, 1)})
    known = matchups(rules)[0].number
    before = dict(rules.ratings.elo)
    assert not list(rules.results(results([(999, {A0: 1.0, A1: 0.0})] * 3)))
    assert (rules.unknown, rules.ratings.elo, rules.ratings.matches) == (3, before, 0)
    lines = list(rules.results(results([(999, {A0: 1.0, A1: 0.0}), (known, {A1: 1.0, A0: 0.0})])))
    assert [line["match"] for line in lines] == [2]
    assert (rules.unknown, rules.ratings.matches) == (4, 1)
    assert rules.ratings.elo["A"] == 1192


def test_a_simulator_that_plays_the_other_team_is_rated_as_scripted() -> None:
    """The opponent of a match with one behavior id is `scripted`, which has its own rating."""
    rules = started_rules({"A": (0,)}, initial_elo=1000.0)
    number = matchups(rules)[0].number
    lines = list(rules.results(results([(number, {A0: 1.0})] * 2)))
    assert lines[0]["players"] == {A0: "A"}
    second = 16 * (1 - 1 / (1 + math.pow(10, -16 / 400)))
    assert rules.ratings.elo["A"] == pytest.approx(1008 + second)
    assert rules.ratings.elo["scripted"] == pytest.approx(992 - second)
    assert rules.ratings.matches == 2
    assert rules.sides["A"].records["scripted"].matches == 2


def test_an_episode_without_opponents_is_no_match() -> None:
    """Where one team plays and the simulator does not say who won, the sign of its reward is no victory."""
    rules = started_rules({"A": (0,)}, initial_elo=1000.0)
    ended = results([(matchups(rules)[0].number, {A0: 1.0})] * 2)
    assert not list(rules.results(replace(ended, explicit=np.zeros(2, np.int32))))
    assert (rules.ratings.matches, rules.ratings.elo["A"]) == (0, 1000.0)
    assert "scripted" not in rules.ratings.elo


def test_an_external_opponent_is_rated_under_its_label() -> None:
    """It starts with `initial_elo`, as it is no copy of the learner."""
    rules = started_rules({"A": (0, 1)}, external={"A": [ExternalOpponent("old", 1e12)]}, save_steps=10)
    (line,) = play_two_teams(rules, 0.0)
    assert line["players"] == {A0: "A", A1: "old"}
    assert (rules.ratings.elo["A"], rules.ratings.elo["old"]) == (1192, 1208)


def test_lines_of_the_match_table_hold_plain_values() -> None:
    """They hold match, simulator, matchup, team, players, learners' steps, scores, and whether these were stated."""
    rules = started_rules({"A": (0, 1)})
    number = matchups(rules)[1].number
    found = results([(number, {A0: 0.5, A1: 0.5})], numbers=[17], simulators=[5])
    (line,) = json.loads(json.dumps(list(rules.results(found))))
    assert line == {
        "match": 17,
        "simulator": 5,
        "matchup": number,
        "team": 0,
        "players": {A0: "A", A1: "A@1"},
        "steps": {"A": 0},
        "scores": {A0: 0.5, A1: 0.5},
        "explicit": True,
    }


def test_players_that_cannot_play_any_more_are_removed() -> None:
    """Ratings and records stay bounded for any number of snapshots."""
    rules = started_rules({"A": (0, 1)}, save_steps=1, swap_steps=1, window=2, team_change=FAR)
    for version in range(2, 600):
        rules.weights("A", version, version)
        rules.ghosts("A", version)
        play_two_teams(rules, 0.5)
    # learner, window, ghosts of known matchups
    assert len(rules.ratings.elo) <= 260
    assert len(rules.sides["A"].records) <= 260
    assert all(f"A@{version}" in rules.ratings.elo for version in rules.sides["A"].window)


# ---------------------------------------------------------------- more than two teams

STRENGTH = 0.65 / 0.35
"""Ratio of strengths at which the stronger player wins 65 % of the pairings."""


def free_for_all(rules: SelfPlay, strengths: dict[str, float], matches: int, rng: random.Random) -> None:
    """Plays matches by Luce's choice: winner and second are sampled by strength; scores are 1, 0.5 and 0."""
    for at in range(matches):
        matchup = matchups(rules)[at % len(matchups(rules))]
        keys = {one: rng.expovariate(strength) for one, strength in strengths.items()}
        ranked = sorted(keys, key=lambda one: keys[one])
        scores = {ranked[0]: 1.0, ranked[1]: 0.5, ranked[2]: 0.0}
        list(rules.results(results([(matchup.number, {one: scores[one] for one in (A0, B1, C2)})], numbers=[at + 1])))


@pytest.mark.parametrize("seed", range(10))
def test_the_true_order_of_three_players_is_recovered_within_300_matches(seed: int) -> None:
    """The stronger player wins 65 % of each pairing; mu and sigma stay finite, and sigma falls."""
    rng = random.Random(seed)
    behavior_ids = rng.sample([A0, B1, C2], 3)
    rules = started_rules({"A": (0,), "B": (1,), "C": (2,)}, seed=seed)
    players = {A0: "A", B1: "B@1", C2: "C@1"}
    before = {players[one]: rules.ratings.skills[players[one]] for one in behavior_ids}
    free_for_all(rules, {one: STRENGTH**-at for at, one in enumerate(behavior_ids)}, 300, rng)
    skills = {player: rules.ratings.skills[player] for player in players.values()}
    assert sorted(skills, key=lambda player: -skills[player][0]) == [players[one] for one in behavior_ids]
    assert all(math.isfinite(mu) and 0 < sigma < before[player][1] for player, (mu, sigma) in skills.items())
    assert rules.ratings.matches == 300


def test_sigma_falls_with_matches() -> None:
    """Every match makes a rating more certain."""
    rng = random.Random(1)
    rules = started_rules({"A": (0,), "B": (1,), "C": (2,)})
    sigmas = [rules.ratings.skills["A"][1]]
    for _ in range(4):
        free_for_all(rules, {A0: 1.0, B1: 1.0, C2: 1.0}, 10, rng)
        sigmas.append(rules.ratings.skills["A"][1])
    assert sigmas == sorted(sigmas, reverse=True)


def test_a_snapshot_of_a_free_for_all_starts_with_mu_and_sigma_of_the_learner() -> None:
    """Elo ratings of two teams do the same."""
    rules = started_rules({"A": (0,), "B": (1,), "C": (2,)}, save_steps=10)
    free_for_all(rules, {A0: 5.0, B1: 1.0, C2: 1.0}, 20, random.Random(0))
    rules.weights("A", 2, 10)
    assert rules.ratings.skills["A@2"] == rules.ratings.skills["A"]


def play_three_teams(rules: SelfPlay, place: int, scores: dict[str, float]) -> None:
    list(rules.results(results([(matchups(rules)[place].number, scores)])))


def test_the_win_rate_against_a_snapshot_is_that_against_its_team() -> None:
    """The second of three has beaten the last and lost to the first."""
    rules = started_rules({"A": (0,), "B": (1,), "C": (2,)})
    play_three_teams(rules, 0, {A0: 0.5, B1: 1.0, C2: 0.0})
    records = rules.sides["A"].records
    assert (records["B@1"].points, records["C@1"].points) == (0.0, 1.0)


def test_losers_of_a_free_for_all_tie_with_each_other() -> None:
    """Only the winner has beaten the learner."""
    rules = started_rules({"A": (0,), "B": (1,), "C": (2,)})
    play_three_teams(rules, 0, {A0: 0.0, B1: 1.0, C2: 0.0})
    records = rules.sides["A"].records
    assert (records["B@1"].points, records["C@1"].points) == (0.0, 0.5)


def test_a_snapshot_with_two_teams_is_rated_for_both() -> None:
    """Its rating does not depend on which of its teams won."""
    skills = []
    for scores in ({A0: 0.5, A1: 1.0, A2: 0.0}, {A0: 0.5, A1: 0.0, A2: 1.0}):
        rules = started_rules({"A": (0, 1, 2)})
        assert ghosts_by_place(rules)[0][1] == {A1: 1, A2: 1}
        play_three_teams(rules, 0, scores)
        skills.append(rules.ratings.skills["A@1"])
    assert skills[0] == pytest.approx(skills[1])
