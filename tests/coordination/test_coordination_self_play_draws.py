"""How often each opponent is drawn: latest or past, uniform or the harder the more often, and from elsewhere."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from scipy.stats import binomtest, chisquare

from sparring.pipeline.coordination.opponents import ExternalOpponent
from sparring.pipeline.coordination.self_play import SelfPlay
from tests.coordination.self_play_world import FAR, begun, behavior_id, matchups, results

GHOST = behavior_id("A", 1)
LEARNER = behavior_id("A", 0)
RARE = 1e-4
"""A correct draw fails with this chance, once for the fixed seed and not at every run."""


def with_window(size: int, **settings: object) -> SelfPlay:
    """A symmetric game with snapshots 1 to `size`, and latest weights that are no snapshot."""
    settings = {"swap_steps": 10, "save_steps": 10, "window": size, "team_change": FAR, **settings}
    rules = begun({"A": (0, 1)}, **settings)
    for version in range(2, size + 1):
        rules.weights("A", version, 10 * (version - 1))
    rules.weights("A", size + 1, 10 * (size - 1) + 1)
    assert rules.sides["A"].window == list(range(1, size + 1))
    rules.ghosts("A", 10)
    return rules


def crossings(rules: SelfPlay, count: int) -> list[tuple[int, ...]]:
    """The ghosts of each place after each of so many crossings."""
    found = []
    for _ in range(count):
        rules.ghosts("A", rules.sides["A"].ghost + 10)
        found.append(tuple(one.ghosts[GHOST] for one in matchups(rules)))
    return found


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_past_opponents_are_drawn_uniformly_and_separately_for_each_place(seed: int) -> None:
    """Ratio 0: every snapshot as often, at every place, whatever another place or the crossing before has drawn."""
    found = crossings(with_window(5, play_against_latest_model_ratio=0.0, seed=seed, places=3), 800)
    for place in range(3):
        assert chisquare([Counter(one[place] for one in found)[version] for version in range(1, 6)]).pvalue > RARE
    pairs = [(one, other) for one in range(1, 6) for other in range(1, 6)]
    together = Counter((one[0], one[1]) for one in found)
    assert chisquare([together[pair] for pair in pairs]).pvalue > RARE
    following = Counter((one[0], other[0]) for one, other in itertools.pairwise(found))
    assert chisquare([following[pair] for pair in pairs]).pvalue > RARE


@pytest.mark.parametrize("ratio", [0.0, 0.2, 0.5, 1.0])
def test_the_latest_policy_is_drawn_with_its_ratio(ratio: float) -> None:
    """Never at 0, always at 1, else about so often; the rest is uniform over the window."""
    drawn = list(itertools.chain(*crossings(with_window(4, play_against_latest_model_ratio=ratio), 400)))
    latest = drawn.count(5)
    if ratio in (0.0, 1.0):
        assert latest == ratio * len(drawn)
    else:
        assert binomtest(latest, len(drawn), ratio).pvalue > RARE
        assert chisquare([drawn.count(version) for version in range(1, 5)]).pvalue > RARE


def play(rules: SelfPlay, score: dict[int, float]) -> None:
    """One match under each draw."""
    found = [
        (one.number, {LEARNER: score[one.ghosts[GHOST]], GHOST: 1 - score[one.ghosts[GHOST]]})
        for one in matchups(rules)
    ]
    assert len(list(rules.results(results(found)))) == len(found)


@pytest.mark.parametrize("seed", [0, 1])
def test_prioritized_sampling_prefers_those_that_the_learner_loses_against(seed: int) -> None:
    """Shares follow (1 - win rate)^2: lost against 3, drawn against 2, won against 1."""
    rules = with_window(3, play_against_latest_model_ratio=0.0, opponent_sampling="prioritized", seed=seed)
    for _ in range(60):
        for _ in range(5):
            play(rules, {1: 1.0, 2: 0.5, 3: 0.0})
        crossings(rules, 1)
    drawn = Counter(itertools.chain(*crossings(rules, 400)))
    assert drawn[3] > drawn[2] > drawn[1]
    assert drawn[3] / drawn.total() == pytest.approx(1 / 1.25, abs=0.06)
    assert drawn[2] / drawn.total() == pytest.approx(0.25 / 1.25, abs=0.06)


def test_prioritized_sampling_without_a_match_is_uniform() -> None:
    """Nothing is known of anybody yet."""
    rules = with_window(4, play_against_latest_model_ratio=0.0, opponent_sampling="prioritized")
    drawn = Counter(itertools.chain(*crossings(rules, 300)))
    assert chisquare([drawn[version] for version in range(1, 5)]).pvalue > RARE


def test_uniform_sampling_does_not_care_who_wins() -> None:
    """Records are kept, and change nothing of the draws."""
    rules = with_window(3, play_against_latest_model_ratio=0.0)
    for _ in range(20):
        play(rules, {1: 1.0, 2: 0.5, 3: 0.0})
        crossings(rules, 1)
    drawn = Counter(itertools.chain(*crossings(rules, 300)))
    assert chisquare([drawn[version] for version in range(1, 4)]).pvalue > RARE


def test_opponents_from_elsewhere_are_drawn_by_their_weights() -> None:
    """All snapshots of the run together have weight 1; numbers from elsewhere are negative."""
    strangers = {"A": [ExternalOpponent("old", 2.0), ExternalOpponent("bot", 1.0)]}
    drawn = Counter(itertools.chain(*crossings(with_window(3, elsewhere=strangers), 400)))
    own = sum(count for number, count in drawn.items() if number > 0)
    assert (
        chisquare([own, drawn[-1], drawn[-2]], [drawn.total() / 4, drawn.total() / 2, drawn.total() / 4]).pvalue > RARE
    )


def test_without_opponents_from_elsewhere_none_is_drawn() -> None:
    """All numbers are versions."""
    assert all(number > 0 for one in crossings(with_window(3), 50) for number in one)
