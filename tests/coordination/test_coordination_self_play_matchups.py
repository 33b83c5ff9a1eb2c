"""How often each opponent is sampled: latest or past, uniform or prioritized, own or external."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from scipy.stats import binomtest, chisquare

from sparring.pipeline.coordination.opponents import ExternalOpponent
from sparring.pipeline.coordination.self_play import SelfPlay
from tests.coordination.self_play_world import FAR, behavior_id, matchups, results, started_rules

GHOST = behavior_id("A", 1)
LEARNER = behavior_id("A", 0)
RARE = 1e-4
"""Probability that a correct sampler fails; with fixed seeds it does not vary between runs."""


def with_window(size: int, **settings: object) -> SelfPlay:
    """Returns rules of a symmetric game with snapshots 1 to `size`, and latest weights that are no snapshot."""
    settings = {"swap_steps": 10, "save_steps": 10, "window": size, "team_change": FAR, **settings}
    rules = started_rules({"A": (0, 1)}, **settings)
    for version in range(2, size + 1):
        rules.weights("A", version, 10 * (version - 1))
    rules.weights("A", size + 1, 10 * (size - 1) + 1)
    assert rules.sides["A"].window == list(range(1, size + 1))
    rules.ghosts("A", 10)
    return rules


def ghosts_after_swaps(rules: SelfPlay, count: int) -> list[tuple[int, ...]]:
    """Returns the ghosts of each place after each of `count` swaps."""
    found = []
    for _ in range(count):
        rules.ghosts("A", rules.sides["A"].ghost + 10)
        found.append(tuple(one.ghosts[GHOST] for one in matchups(rules)))
    return found


def test_past_opponents_are_sampled_uniformly_for_each_place() -> None:
    """With ratio 0 snapshots are uniform and independent of other places and of the swap before."""
    found = ghosts_after_swaps(with_window(5, play_against_latest_model_ratio=0.0, seed=0, places=3), 800)
    for place in range(3):
        assert chisquare([Counter(one[place] for one in found)[version] for version in range(1, 6)]).pvalue > RARE
    pairs = [(one, other) for one in range(1, 6) for other in range(1, 6)]
    together = Counter((one[0], one[1]) for one in found)
    assert chisquare([together[pair] for pair in pairs]).pvalue > RARE
    following = Counter((one[0], other[0]) for one, other in itertools.pairwise(found))
    assert chisquare([following[pair] for pair in pairs]).pvalue > RARE


@pytest.mark.parametrize("ratio", [0.0, 0.2, 0.5, 1.0])
def test_the_latest_policy_is_sampled_with_its_ratio(ratio: float) -> None:
    """The other samples are uniform over the window."""
    sampled = list(itertools.chain(*ghosts_after_swaps(with_window(4, play_against_latest_model_ratio=ratio), 400)))
    latest = sampled.count(5)
    if ratio in (0.0, 1.0):
        assert latest == ratio * len(sampled)
    else:
        assert binomtest(latest, len(sampled), ratio).pvalue > RARE
        assert chisquare([sampled.count(version) for version in range(1, 5)]).pvalue > RARE


def play(rules: SelfPlay, score: dict[int, float]) -> None:
    """Plays one match under each matchup."""
    found = [
        (one.number, {LEARNER: score[one.ghosts[GHOST]], GHOST: 1 - score[one.ghosts[GHOST]]})
        for one in matchups(rules)
    ]
    assert len(list(rules.results(results(found)))) == len(found)


def test_prioritized_sampling_prefers_opponents_that_win() -> None:
    """Shares follow (1 - win rate)^2: the learner loses to 3, ties with 2 and wins against 1."""
    rules = with_window(3, play_against_latest_model_ratio=0.0, opponent_sampling="prioritized", seed=0)
    for _ in range(60):
        for _ in range(5):
            play(rules, {1: 1.0, 2: 0.5, 3: 0.0})
        ghosts_after_swaps(rules, 1)
    sampled = Counter(itertools.chain(*ghosts_after_swaps(rules, 400)))
    assert sampled[3] > sampled[2] > sampled[1]
    assert sampled[3] / sampled.total() == pytest.approx(1 / 1.25, abs=0.06)
    assert sampled[2] / sampled.total() == pytest.approx(0.25 / 1.25, abs=0.06)


def test_prioritized_sampling_without_a_match_is_uniform() -> None:
    """No win rate is known yet."""
    rules = with_window(4, play_against_latest_model_ratio=0.0, opponent_sampling="prioritized")
    sampled = Counter(itertools.chain(*ghosts_after_swaps(rules, 300)))
    assert chisquare([sampled[version] for version in range(1, 5)]).pvalue > RARE


def test_uniform_sampling_ignores_results() -> None:
    """Records are kept, and do not change the samples."""
    rules = with_window(3, play_against_latest_model_ratio=0.0)
    for _ in range(20):
        play(rules, {1: 1.0, 2: 0.5, 3: 0.0})
        ghosts_after_swaps(rules, 1)
    sampled = Counter(itertools.chain(*ghosts_after_swaps(rules, 300)))
    assert chisquare([sampled[version] for version in range(1, 4)]).pvalue > RARE


def test_external_opponents_are_sampled_by_their_weights() -> None:
    """All snapshots of the run together have weight 1; external opponents have negative numbers."""
    external = {"A": [ExternalOpponent("old", 2.0), ExternalOpponent("bot", 1.0)]}
    sampled = Counter(itertools.chain(*ghosts_after_swaps(with_window(3, external=external), 400)))
    own = sum(count for number, count in sampled.items() if number > 0)
    assert (
        chisquare(
            [own, sampled[-1], sampled[-2]], [sampled.total() / 4, sampled.total() / 2, sampled.total() / 4]
        ).pvalue
        > RARE
    )


def test_without_external_opponents_only_versions_are_sampled() -> None:
    """All numbers are positive."""
    assert all(number > 0 for one in ghosts_after_swaps(with_window(3), 50) for number in one)


def test_a_team_without_which_matches_end_is_not_rated_and_gets_no_turn() -> None:
    """Simulators have named it, and its agents never act: its turn would never end."""
    rules = with_window(1, team_change=100)
    number = matchups(rules)[0].number
    assert len(list(rules.results(results([(number, {LEARNER: 1.0})])))) == 1
    assert (rules.ratings.matches, rules.absent, rules.team) == (0, {1}, 0)
    rules.weights("A", 9, 1000)
    assert rules.team == 0
    list(rules.results(results([(number, {LEARNER: 1.0, GHOST: 0.0})])))
    assert (rules.ratings.matches, rules.absent) == (1, set())
    rules.weights("A", 10, 2000)
    assert rules.team == 1
