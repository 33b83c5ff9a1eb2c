"""Results of a tournament: points, ratings, intervals and the heat map."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from scipy.stats import binomtest

from sparring.pipeline.evaluation.ratings import wilson
from sparring.pipeline.evaluation.statistics import TournamentTable, counted, heat_map, standings


def line(match: int, players: dict[str, str], scores: dict[str, float], matchup: int = 1) -> dict[str, Any]:
    return {"match": match, "simulator": 0, "matchup": matchup, "players": players, "scores": scores}


def two(match: int, own: str, other: str, score: float, matchup: int = 1) -> dict[str, Any]:
    """A match of two teams of one behavior."""
    behavior_ids = {"S?team=0": own, "S?team=1": other}
    return line(match, behavior_ids, {"S?team=0": score, "S?team=1": 1 - score}, matchup)


def test_matrix_of_points_is_the_sum_over_matches() -> None:
    """A pair counts its matches in either order; a draw is half a point for both."""
    lines = [two(1, "a", "b", 1.0), two(2, "b", "a", 1.0), two(3, "a", "b", 0.5), two(4, "a", "b", 1.0)]
    found = standings(["a", "b", "c"], [*lines, two(5, "c", "a", 1.0)])
    assert found.matches.tolist() == [[0, 4, 1], [4, 0, 0], [1, 0, 0]]
    assert found.points.tolist() == [[0, 2.5, 0], [1.5, 0, 0], [1, 0, 0]]
    assert found.shares[0, 1] == 2.5 / 4
    assert math.isnan(found.shares[1, 2])


def test_teams_of_several_behaviors_are_one_player() -> None:
    """A match counts once for a pair, however many behaviors a team has."""
    players = {"K?team=0": "a", "S?team=0": "a", "K?team=1": "b", "S?team=1": "b"}
    scores = {"K?team=0": 1.0, "S?team=0": 1.0, "K?team=1": 0.0, "S?team=1": 0.0}
    found = standings(["a", "b"], [line(1, players, scores)])
    assert found.matches.tolist() == [[0, 1], [1, 0]]
    assert found.points.tolist() == [[0, 1], [0, 0]]


def test_unknown_score_is_the_complement_of_the_other() -> None:
    """This holds if only one team reported its outcome."""
    found = standings(["a", "b"], [line(1, {"S?team=0": "a", "S?team=1": "b"}, {"S?team=0": 1.0, "S?team=1": -1.0})])
    assert found.points.tolist() == [[0, 1], [0, 0]]


def test_three_teams_make_three_pairs() -> None:
    """1, 0.5 and 0: the second has lost to the first and beaten the third."""
    players = {"S?team=0": "a", "S?team=1": "b", "S?team=2": "c"}
    found = standings(["a", "b", "c"], [line(1, players, {"S?team=0": 0.5, "S?team=1": 1.0, "S?team=2": 0.0})])
    assert found.points.tolist() == [[0, 0, 1], [1, 0, 1], [0, 0, 0]]
    assert (found.matches == 1 - np.eye(3)).all()


def test_match_of_a_player_against_itself_changes_no_rating() -> None:
    """Such a match shows the advantage of a side, not the strength of the player."""
    mirror = [two(at, "a", "a", 1.0) for at in range(1, 20)]
    even = [two(20, "a", "b", 1.0), two(21, "b", "a", 1.0)]
    found = standings(["a", "b"], [*mirror, *even])
    assert found.ratings == pytest.approx([0, 0], abs=1e-6)
    assert (found.matches[0, 0], found.points[0, 0]) == (19, 19)
    assert (found.fewest(), found.fewest(mirror=True)) == (2, 0), "b has not played itself"
    assert standings(["a"], mirror).fewest(mirror=True) == 19


# ---------------------------------------------------------------- which matches count


def test_equally_many_first_matches_of_each_matchup_count() -> None:
    """Matchup 1 was played more often than matchup 2; matches that began after a missing one do not count."""
    lines = [two(n, "a", "b", 1.0, matchup) for n, matchup in [(4, 1), (1, 1), (2, 2), (3, 1), (5, 2), (6, 1), (8, 2)]]
    found = counted(lines)
    assert sorted(one["match"] for one in found) == [1, 2, 3, 5]
    assert counted([]) == []


# ---------------------------------------------------------------- ratings

TRUE = np.array([-300.0, -100.0, 0.0, 150.0, 250.0])


def tournament(strengths: np.ndarray[Any, Any], each: int, random: np.random.Generator) -> TournamentTable:
    """Plays all pairs by the model of Bradley and Terry."""
    players = [f"p{at}" for at in range(len(strengths))]

    def lines() -> Iterator[dict[str, Any]]:
        number = 0
        for one in range(len(players)):
            for other in range(one + 1, len(players)):
                chance = 1 / (1 + 10 ** ((strengths[other] - strengths[one]) / 400))
                for _ in range(each):
                    number += 1
                    yield two(number, players[one], players[other], float(random.random() < chance))

    return standings(players, lines())


def test_known_strengths_are_estimated() -> None:
    """With many matches the ratings are close to the true ones, in the true order, and their mean is 0."""
    found = tournament(TRUE, 2000, np.random.default_rng(0))
    assert found.ratings == pytest.approx(TRUE - TRUE.mean(), abs=25)
    assert found.ratings.mean() == pytest.approx(0, abs=1e-6)
    assert found.order() == [4, 3, 2, 1, 0]
    assert (found.margins < 25).all()


def test_rating_intervals_cover_the_truth_at_their_confidence() -> None:
    """In 200 tournaments of 5 players with 50 matches per pair, 90 to 99 % of the intervals contain the truth."""
    random = np.random.default_rng(1)
    truth = TRUE - TRUE.mean()
    inside = [
        np.abs(found.ratings - truth) <= found.margins for found in (tournament(TRUE, 50, random) for _ in range(200))
    ]
    assert 0.90 <= np.mean(inside) <= 0.99


def test_intervals_narrow_with_the_number_of_matches() -> None:
    """The width is about proportional to 1 / sqrt(matches)."""
    few, many = (tournament(TRUE, each, np.random.default_rng(2)).margins for each in (50, 800))
    assert few / many == pytest.approx(np.full(5, 4.0), rel=0.2)


def test_player_that_always_wins_has_a_finite_rating() -> None:
    """So has a player that always loses: they have the highest and the lowest rating."""
    lines = [two(n, *pair, 1.0) for n, pair in enumerate([("a", "b"), ("a", "c"), ("b", "c")] * 200, 1)]
    found = standings(["a", "b", "c"], lines)
    assert np.isfinite(found.ratings).all()
    assert np.isfinite(found.margins).all()
    assert found.order() == [0, 1, 2]
    assert found.ratings[0] > 400


def test_ratings_do_not_depend_on_the_order_of_the_players() -> None:
    """They depend on the results only."""
    lines = [two(n, "a", "b", float(n % 3 > 0)) for n in range(1, 30)] + [two(30, "c", "b", 1.0)]
    one, other = standings(["a", "b", "c"], lines), standings(["c", "a", "b"], lines)
    assert one.ratings == pytest.approx(other.ratings[[1, 2, 0]], abs=0.05)
    assert one.margins == pytest.approx(other.margins[[1, 2, 0]], abs=0.05)


def test_without_matches_all_players_are_equal() -> None:
    """The intervals are wide because nothing is known."""
    found = standings(["a", "b"], [])
    assert found.ratings.tolist() == [0, 0]
    assert np.isfinite(found.margins).all()
    assert (found.margins > 400).all()


# ---------------------------------------------------------------- intervals of shares


@pytest.mark.parametrize("matches", [1, 2, 7, 50, 200])
def test_intervals_of_shares_are_wilson_intervals(matches: int) -> None:
    """They equal scipy's for numbers of wins."""
    for won in {0, 1, matches // 2, matches}:
        expected = binomtest(won, matches).proportion_ci(0.95, method="wilson")
        assert wilson(won, matches) == pytest.approx((expected.low, expected.high), abs=1e-9)


@pytest.mark.parametrize("points", [0.0, 0.5, 3.5, 10.0])
def test_interval_contains_its_share(points: float) -> None:
    """The interval is within 0..1, also with drawn matches."""
    low, high = wilson(points, 10)
    assert 0 <= low <= high <= 1
    assert low - 1e-12 <= points / 10 <= high + 1e-12


# ---------------------------------------------------------------- output


def test_plain_values_of_the_table_are_valid_json() -> None:
    """The strongest player is first, each with its interval and its results against the others."""
    found = json.loads(json.dumps(standings(["a", "b"], [two(1, "b", "a", 1.0), two(2, "b", "a", 1.0)]).plain()))
    assert [one["player"] for one in found["players"]] == ["b", "a"]
    best = found["players"][0]
    assert best["interval"][0] < best["rating"] < best["interval"][1]
    assert best["against"]["a"]["matches"] == 2
    assert best["against"]["a"]["share"] == 1.0


def test_heat_map_fills_its_picture_with_short_labels_and_colors_for_the_color_blind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(Axes, "set_yticks", lambda _axes, _ticks, labels, **_: drawn.update(labels=labels))
    show = Axes.imshow
    monkeypatch.setattr(Axes, "imshow", lambda *args, **given: drawn.update(given) or show(*args, **given))
    name = "a-long-name-of-a-run-20261125-140000"
    heat_map(standings([f"{name}@1000", f"{name}@2000"], [two(1, f"{name}@2000", f"{name}@1000", 1.0)]), "title")
    assert drawn["labels"] == ["a-long-name…140000@2000  1", "a-long-name…140000@1000  2"]
    assert (drawn["aspect"], drawn["cmap"]) == ("auto", "PuOr")


@pytest.mark.parametrize("players", [["a", "b"], ["$x^", "run-1@2000", "untrained"]])
def test_heat_map_is_a_png(players: list[str]) -> None:
    """It has the signature of the format, whatever the names of players, even if some pairs have no match."""
    found = heat_map(standings(players, [two(1, players[0], players[1], 1.0)]), "title_$")
    assert found.startswith(b"\x89PNG\r\n\x1a\n")
