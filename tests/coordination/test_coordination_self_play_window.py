"""Snapshots in the window, changes of opponents, and which policies play and may play."""

from __future__ import annotations

import itertools
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.coordination.settings import SelfPlaySettings
from sparring.pipeline.specs import BehaviorId
from tests.coordination.self_play_world import (
    FAR,
    Event,
    EventSource,
    apply,
    behavior_id,
    ghosts_by_place,
    learn,
    matchups,
    started_rules,
)

# ---------------------------------------------------------------- seeds


def history_of(seed: int) -> list[Any]:
    rules = started_rules({"A": (0, 1), "B": (2,)}, seed=seed, save_steps=10, swap_steps=10, team_change=50, window=5)
    found = []
    for step in range(1, 25):
        learn(rules, rules.learning[0], 10)
        rules.ghosts("A", 10 * step)
        rules.ghosts("B", 10 * step)
        found.append(ghosts_by_place(rules))
    return found


def test_a_seed_fixes_the_matchups() -> None:
    """The same seed samples the same opponents, another seed samples others."""
    assert history_of(1) == history_of(1)
    assert len({str(history_of(seed)) for seed in range(5)}) == 5


# ---------------------------------------------------------------- changes of opponents


def test_without_a_swap_ghosts_keep_the_first_weights() -> None:
    """With ratio 1 ghosts play the first weights until the swap, whatever is learned."""
    rules = started_rules(
        {"A": (0, 1)}, save_steps=100, team_change=FAR, swap_steps=10_000, play_against_latest_model_ratio=1.0
    )
    for step in range(1, 50):
        learn(rules, "A", 50)
        rules.ghosts("A", 50 * step)
        assert {number for _, number in rules.playing} == {1}


def test_an_idle_name_with_ratio_0_plays_its_first_weights() -> None:
    """A name that never learned has no other snapshot, however often it is sampled."""
    rules = started_rules({"A": (0,), "B": (1,)}, team_change=FAR, swap_steps=10, play_against_latest_model_ratio=0.0)
    for step in range(1, 50):
        learn(rules, "A", 50)
        rules.ghosts("B", 50 * step)
        assert rules.playing == {("B", 1)}


def test_each_name_has_its_own_swap_steps() -> None:
    """Ghost steps of one name never change the opponents of another."""
    rules = started_rules(
        {"A": (0,), "B": (1,), "C": (2,)},
        per_name={"B": {"swap_steps": 100}, "C": {"swap_steps": 10}},
        team_change=FAR,
        save_steps=1,
        play_against_latest_model_ratio=1.0,
    )
    for name in "BC":
        learn(rules, name, 5)  # late updates of idle learners: version 2
    rules.ghosts("B", 99)
    assert rules.playing == {("B", 1), ("C", 1)}
    rules.ghosts("C", 10)
    assert rules.playing == {("B", 1), ("C", 2)}
    rules.ghosts("B", 100)
    assert rules.playing == {("B", 2), ("C", 2)}


def test_in_lockstep_opponents_change_with_new_weights_only() -> None:
    """Changes by ghost steps would make a round depend on the order of messages."""
    rules = started_rules(
        {"A": (0, 1)}, lockstep=True, swap_steps=10, team_change=FAR, play_against_latest_model_ratio=1.0
    )
    learn(rules, "A", 5)
    rules.ghosts("A", 500)
    rules.weights("A", 2, 5)  # known already
    assert rules.playing == {("A", 1)}
    learn(rules, "A", 5)
    assert rules.playing == {("A", 3)}


@settings(max_examples=25)
@given(steps=st.lists(st.integers(0, 30), min_size=1, max_size=30), window=st.integers(1, 5), save=st.integers(1, 40))
def test_the_window_holds_the_last_snapshots(steps: list[int], window: int, save: int) -> None:
    """It holds 1 to `window` rising versions, at least `save_steps` learner steps apart."""
    rules = started_rules({"A": (0, 1)}, window=window, save_steps=save, team_change=FAR)
    reached = {1: 0}
    for gained in steps:
        learn(rules, "A", gained)
        reached[rules.sides["A"].version] = rules.sides["A"].trained
        found = rules.sides["A"].window
        assert 1 <= len(found) <= window
        assert all(reached[b] - reached[a] >= save for a, b in itertools.pairwise(found))
        assert reached[rules.sides["A"].version] - reached[found[-1]] < save


def test_default_settings_are_documented_values() -> None:
    """`team_change` is five times `save_steps` unless it is set."""
    own = SelfPlaySettings()
    assert (own.save_steps, own.team_change, own.swap_steps, own.window) == (20_000, 100_000, 2_000, 10)
    assert (own.play_against_latest_model_ratio, own.initial_elo) == (0.5, 1200.0)
    assert SelfPlaySettings(save_steps=300).team_change == 1500
    assert SelfPlaySettings(save_steps=300, team_change=7).team_change == 7


def test_simulators_play_different_opponents_at_once() -> None:
    """Opponents are sampled separately for each place."""
    rules = started_rules({"A": (0, 1)}, window=5, save_steps=1, team_change=FAR, play_against_latest_model_ratio=0.0)
    for _ in range(4):
        learn(rules, "A", 1)
    different = 0
    for crossing in range(1, 21):
        rules.ghosts("A", 2000 * crossing)
        different += len({one.ghosts[behavior_id("A", 1)] for one in matchups(rules)}) > 1
    assert different >= 15


def test_wanted_are_all_policies_that_play_or_may_be_sampled() -> None:
    """Weights of the windows are needed, and those of playing ghosts that have left a window."""
    rng = random.Random(4)
    rules = started_rules({"A": (0, 1), "B": (2,)}, window=2, save_steps=5, swap_steps=60, team_change=100)
    source = EventSource({"A": (0, 1), "B": (2,)}, {"A": FAR, "B": FAR})
    for _ in range(100):
        apply(rules, source.message_of(Event(rng.choice(["weights", "ghosts"]), rng.randrange(2), rng.randrange(30))))
        named = {(BehaviorId.parse(one).name, n) for matchup in matchups(rules) for one, n in matchup.ghosts.items()}
        assert rules.playing == named
        assert rules.wanted == named | {(name, v) for name, side in rules.sides.items() for v in side.window}
