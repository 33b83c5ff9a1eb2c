"""Which team learns and who plays against it: beside a slow twin, over random histories, and in known games."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.coordination.self_play import SelfPlay
from sparring.pipeline.coordination.settings import SelfPlaySettings
from sparring.pipeline.specs import BehaviorId
from tests.coordination.self_play_world import (
    FAR,
    LAYOUTS,
    Event,
    Layout,
    Source,
    Twin,
    begun,
    behavior_id,
    ghosts_by_place,
    histories,
    make,
    matchups,
    one_settings,
    tell,
)


class Beside:
    """Rules and their twin, which hear the same."""

    def __init__(
        self, layout: Layout, own: Sequence[Mapping[str, Any]], ends: Sequence[int], *, lockstep: bool, seed: int
    ) -> None:
        per_name = {name: dict(own[at]) for at, name in enumerate(layout)}
        end = {name: ends[at] for at, name in enumerate(layout)}
        self.layout = layout
        self.twin = Twin(layout, per_name, end, lockstep=lockstep)
        self.rules = make(layout, max_steps=end, seed=seed, lockstep=lockstep, per_name=per_name)
        self.source = Source(layout, end)
        self.drawn: dict[str, tuple[int, list[int]]] = {}
        for name, teams in layout.items():
            self.rules.set_teams(name, teams)
        for name in layout:
            tell(self.rules, ("weights", name, 1, 0))
            self.twin.tell(("weights", name, 1, 0))
        self.check()

    def hear(self, event: Event) -> None:
        said = self.source.say(event)
        tell(self.rules, said)
        self.twin.tell(said)
        self.check()

    def check(self) -> None:
        rules, twin = self.rules, self.twin
        assert rules.team == twin.team
        assert rules.changes == twin.team_changes
        assert {name: side.window for name, side in rules.sides.items()} == {
            name: side.window for name, side in twin.sides.items()
        }
        assert all(one.team == twin.team for one in matchups(rules))
        for one in twin.ghost_ids():
            self._check_behavior(one)
        assert all(set(one.ghosts) == set(twin.ghost_ids()) for one in matchups(rules))

    def _check_behavior(self, one: str) -> None:
        """The same as before until its moment has come; then something that may be drawn at that moment."""
        now = [drawn.ghosts[one] for drawn in matchups(self.rules)]
        stamp = self.twin.stamps[one]
        if self.drawn.get(one, (0, []))[0] == stamp:
            assert now == self.drawn[one][1]
        else:
            assert set(now) <= self.twin.candidates(one)
        self.drawn[one] = (stamp, now)


ENDS = st.sampled_from([FAR, 60, 150])


@settings(max_examples=250)
@given(
    layout=st.sampled_from(LAYOUTS),
    own=st.lists(one_settings(), min_size=3, max_size=3),
    ends=st.lists(ENDS, min_size=3, max_size=3),
    lockstep=st.booleans(),
    seed=st.integers(0, 2**31),
    history=histories(),
)
def test_rules_do_what_their_slow_twin_does(
    layout: Layout,
    own: list[dict[str, Any]],
    ends: list[int],
    lockstep: bool,
    seed: int,
    history: list[Event],
) -> None:
    """Learning team, windows and moments of change are the twin's; a draw stays fixed between these moments."""
    beside = Beside(layout, own, ends, lockstep=lockstep, seed=seed)
    for event in history:
        beside.hear(event)


@settings(max_examples=60)
@given(own=one_settings(), history=histories(), lockstep=st.booleans())
def test_names_of_one_team_learn_together(own: dict[str, Any], history: list[Event], lockstep: bool) -> None:
    """Keeper and striker against one other name: the team changes when either has learned for its turn."""
    beside = Beside({"K": (0,), "S": (0,), "O": (1,)}, [own] * 3, [FAR] * 3, lockstep=lockstep, seed=3)
    for event in history:
        beside.hear(event)
        assert set(beside.rules.learning) == ({"K", "S"} if beside.rules.team == 0 else {"O"})


@settings(max_examples=100)
@given(layout=st.sampled_from(LAYOUTS), history=histories(("weights", "ghosts")), lockstep=st.booleans())
def test_an_assignment_gets_a_new_serial_exactly_when_it_is_another(
    layout: Layout, history: list[Event], lockstep: bool
) -> None:
    """Serials rise by one; a number of a draw stands for one team and one set of ghosts for ever."""
    rules = begun(layout, lockstep=lockstep, save_steps=20, swap_steps=30, team_change=50)
    source = Source(layout, dict.fromkeys(layout, FAR))
    known: dict[int, tuple[int, dict[str, int]]] = {}
    serial, former = 1, matchups(rules)
    for event in history:
        tell(rules, source.say(event))
        assert rules.assignment is not None
        changed = [one.number for one in former] != [one.number for one in matchups(rules)]
        assert rules.assignment.serial == serial + changed
        serial, former = rules.assignment.serial, matchups(rules)
        for one in former:
            assert known.setdefault(one.number, (one.team, dict(one.ghosts))) == (one.team, dict(one.ghosts))


# ---------------------------------------------------------------- rotation


def learn(rules: SelfPlay, name: str, steps: int) -> None:
    side = rules.sides[name]
    rules.weights(name, side.version + 1, side.trained + steps)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_team_has_its_turn(layout: Layout) -> None:
    """Teams rotate through a queue, each for `team_change` learner steps, however the names share them."""
    rules = begun(layout, save_steps=10, team_change=100)
    order = sorted(team for teams in layout.values() for team in teams)
    seen = []
    for _ in range(3 * len(order)):
        seen.append(rules.team)
        for _ in range(4):
            learn(rules, rules.learning[0], 25)
    assert seen == order * 3


def test_the_turn_of_a_team_is_counted_in_its_own_learner_steps() -> None:
    """Weights that an idle learner still publishes change nothing of the turn of the other."""
    rules = begun({"A": (0,), "B": (1,)}, save_steps=10, team_change=100)
    learn(rules, "A", 99)
    learn(rules, "B", 500)
    assert rules.team == 0
    learn(rules, "A", 1)
    assert rules.team == 1


def test_a_team_whose_learner_is_done_is_passed_over() -> None:
    """Of three names one ends early: the others go on taking turns."""
    rules = begun({"A": (0,), "B": (1,), "C": (2,)}, max_steps={"A": FAR, "B": 100, "C": FAR}, team_change=100)
    seen = []
    for _ in range(7):
        seen.append(rules.team)
        learn(rules, rules.learning[0], 100)
    assert seen == [0, 1, 2, 0, 2, 0, 2]


def test_a_team_gives_up_the_rest_of_its_turn_when_its_learner_is_done() -> None:
    """Nobody waits for `team_change` steps that never come."""
    rules = begun({"A": (0,), "B": (1,)}, max_steps={"A": 50, "B": FAR}, team_change=1000)
    learn(rules, "A", 50)
    assert rules.team == 1
    for _ in range(5):
        learn(rules, "B", 1000)
        assert rules.team == 1


def test_a_learner_thrown_back_neither_stalls_nor_counts_twice() -> None:
    """Trained falls and the version rises: what it learns from there counts on, and the fall itself nothing."""
    rules = begun({"A": (0,), "B": (1,)}, save_steps=40, team_change=100)
    rules.weights("A", 2, 60)
    rules.weights("A", 3, 20)  # thrown back
    assert rules.team == 0
    assert rules.sides["A"].window == [1, 2]
    rules.weights("A", 4, 59)
    assert rules.team == 0
    rules.weights("A", 5, 60)
    assert (rules.team, rules.sides["A"].window) == (1, [1, 2, 5])


@settings(max_examples=60)
@given(history=histories(("weights", "back", "ghosts")), layout=st.sampled_from(LAYOUTS))
def test_after_any_history_somebody_learns_who_can(history: list[Event], layout: Layout) -> None:
    """The learning team is never one that is done while another is not."""
    rules = begun(layout, max_steps=120, save_steps=10, team_change=40)
    source = Source(layout, dict.fromkeys(layout, 120))
    for event in history:
        tell(rules, source.say(event))
        if not all(side.done for side in rules.sides.values()):
            assert not all(rules.sides[name].done for name in rules.learning)


# ---------------------------------------------------------------- what is heard in which order


def outcomes(orders: Any, heard: Sequence[tuple[str, Any]]) -> list[tuple[int | None, Any]]:
    """Team and ghosts after the same things were heard in several orders, and after a common history."""
    found = []
    for order in orders:
        rules = make({"A": (), "B": ()}, seed=5, save_steps=10, swap_steps=5, team_change=60, max_steps=10_000)
        for at in order:
            kind, what = heard[at]
            getattr(rules, kind)(*what)
        first = (rules.team, ghosts_by_place(rules))
        for step in range(12):
            learn(rules, rules.learning[0], 15)
            rules.ghosts("A", 4 * step)
            rules.ghosts("B", 6 * step)
        found.append((rules.team, (first, ghosts_by_place(rules))))
    return found


def test_draws_do_not_depend_on_the_order_in_which_teams_and_names_are_heard_of() -> None:
    """Two simulators that show teams one after the other, and weights that come before, between and after."""
    heard: list[tuple[str, Any]] = [
        ("set_teams", ("A", (1,))),
        ("set_teams", ("A", (0,))),
        ("set_teams", ("B", (2,))),
        ("weights", ("A", 1, 0)),
        ("weights", ("B", 1, 0)),
    ]
    found = outcomes(itertools.permutations(range(5)), heard)
    assert all(one == found[0] for one in found)
    assert found[0][1][0][0] == 0


def test_who_learns_first_does_not_depend_on_whether_weights_or_teams_are_heard_of_first() -> None:
    """Checkpoints that were trained before, under new books: steps that nobody learned in this turn are no part of it.

    So goes on a run whose file of books was taken away, as its error message says.
    """
    heard: list[tuple[str, Any]] = [
        ("set_teams", ("A", (0,))),
        ("set_teams", ("B", (1,))),
        ("weights", ("A", 7, 500)),
        ("weights", ("B", 9, 400)),
    ]
    found = outcomes(itertools.permutations(range(4)), heard)
    assert all(one == found[0] for one in found)


def team_after(order: Sequence[str]) -> int | None:
    rules = make({"A": (0,), "B": (1,)}, max_steps=100, team_change=1000)
    told = {
        "seats A": lambda: rules.set_teams("A", (0,)),
        "seats B": lambda: rules.set_teams("B", (1,)),
        "weights A": lambda: rules.weights("A", 3, 100),
        "weights B": lambda: rules.weights("B", 1, 0),
    }
    for one in order:
        told[one]()
    return rules.team


def test_a_learner_that_was_done_before_anybody_began_is_passed_over() -> None:
    """In whichever order it is heard of: it will publish nothing that could end its turn."""
    orders = itertools.permutations(["seats A", "seats B", "weights A", "weights B"])
    assert [order for order in orders if team_after(order) != 1] == []


def test_nobody_is_assigned_before_all_names_are_known() -> None:
    """An opponent whose weights nobody has published yet cannot play."""
    rules = make({"A": (0,), "B": (1,)})
    rules.set_teams("A", (0,))
    rules.set_teams("B", (1,))
    rules.weights("A", 1, 0)
    assert rules.assignment is None
    rules.weights("B", 1, 0)
    assert ghosts_by_place(rules) == [(0, {behavior_id("B", 1): 1})] * 4


def test_a_team_that_comes_late_joins_the_queue() -> None:
    """It is played by ghosts at once, those of the others stay, and its turn comes."""
    rules = begun({"A": (0, 1)}, team_change=100, save_steps=10, play_against_latest_model_ratio=0.0)
    learn(rules, "A", 100)
    before = ghosts_by_place(rules)
    rules.set_teams("A", (0, 1, 2))
    after = ghosts_by_place(rules)
    assert [ghosts[behavior_id("A", 0)] for _, ghosts in after] == [ghosts[behavior_id("A", 0)] for _, ghosts in before]
    assert all(behavior_id("A", 2) in ghosts for _, ghosts in after)
    seen = []
    for _ in range(6):
        seen.append(rules.team)
        learn(rules, "A", 100)
    assert set(seen) == {0, 1, 2}
    assert seen[:3] == seen[3:]


# ---------------------------------------------------------------- seeds


def history_of(seed: int) -> list[Any]:
    rules = begun({"A": (0, 1), "B": (2,)}, seed=seed, save_steps=10, swap_steps=10, team_change=50, window=5)
    found = []
    for step in range(1, 25):
        learn(rules, rules.learning[0], 10)
        rules.ghosts("A", 10 * step)
        rules.ghosts("B", 10 * step)
        found.append(ghosts_by_place(rules))
    return found


def test_a_seed_fixes_the_draws() -> None:
    """The same seed draws the same, another seed draws otherwise."""
    assert history_of(1) == history_of(1)
    assert len({str(history_of(seed)) for seed in range(5)}) == 5


# ---------------------------------------------------------------- the negative cases


def test_a_swap_beyond_the_end_leaves_the_untrained_opponent() -> None:
    """Symmetric, ratio 1, the swap never comes: whatever is learned, the ghosts play the first weights."""
    rules = begun(
        {"A": (0, 1)}, save_steps=100, team_change=FAR, swap_steps=10_000, play_against_latest_model_ratio=1.0
    )
    for step in range(1, 50):
        learn(rules, "A", 50)
        rules.ghosts("A", 50 * step)
        assert {number for _, number in rules.playing} == {1}


def test_an_idle_side_that_only_plays_its_snapshots_plays_the_untrained_one() -> None:
    """Asymmetric, ratio 0: a side that never learned has but its first weights to play, however often it is drawn."""
    rules = begun({"A": (0,), "B": (1,)}, team_change=FAR, swap_steps=10, play_against_latest_model_ratio=0.0)
    for step in range(1, 50):
        learn(rules, "A", 50)
        rules.ghosts("B", 50 * step)
        assert rules.playing == {("B", 1)}


def test_each_name_has_its_own_swap_steps() -> None:
    """Ghost steps of one name never change the opponents of another."""
    rules = begun(
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
    """However many steps ghosts have played: else a round would depend on who is heard of first."""
    rules = begun({"A": (0, 1)}, lockstep=True, swap_steps=10, team_change=FAR, play_against_latest_model_ratio=1.0)
    learn(rules, "A", 5)
    rules.ghosts("A", 500)
    rules.weights("A", 2, 5)  # known already
    assert rules.playing == {("A", 1)}
    learn(rules, "A", 5)
    assert rules.playing == {("A", 3)}


@settings(max_examples=50)
@given(steps=st.lists(st.integers(0, 30), min_size=1, max_size=30), window=st.integers(1, 5), save=st.integers(1, 40))
def test_the_window_holds_the_last_snapshots(steps: list[int], window: int, save: int) -> None:
    """At most `window` versions in rising order, at least `save_steps` learner steps apart, and never none."""
    rules = begun({"A": (0, 1)}, window=window, save_steps=save, team_change=FAR)
    reached = {1: 0}
    for gained in steps:
        learn(rules, "A", gained)
        reached[rules.sides["A"].version] = rules.sides["A"].trained
        found = rules.sides["A"].window
        assert 1 <= len(found) <= window
        assert all(reached[b] - reached[a] >= save for a, b in itertools.pairwise(found))
        assert reached[rules.sides["A"].version] - reached[found[-1]] < save


def test_default_settings_are_those_of_the_issue() -> None:
    """`team_change` follows `save_steps`, five to one, unless it is said."""
    own = SelfPlaySettings()
    assert (own.save_steps, own.team_change, own.swap_steps, own.window) == (20_000, 100_000, 2_000, 10)
    assert (own.play_against_latest_model_ratio, own.initial_elo) == (0.5, 1200.0)
    assert SelfPlaySettings(save_steps=300).team_change == 1500
    assert SelfPlaySettings(save_steps=300, team_change=7).team_change == 7


def test_several_simulators_meet_different_opponents_at_one_moment() -> None:
    """Draws are separate for each place, so that two simulators are soon seen with different ones."""
    rules = begun({"A": (0, 1)}, window=5, save_steps=1, team_change=FAR, play_against_latest_model_ratio=0.0)
    for _ in range(4):
        learn(rules, "A", 1)
    different = 0
    for crossing in range(1, 21):
        rules.ghosts("A", 2000 * crossing)
        different += len({one.ghosts[behavior_id("A", 1)] for one in matchups(rules)}) > 1
    assert different >= 15


def test_what_plays_and_may_be_drawn_is_wanted() -> None:
    """The weights of all of them are needed: of the windows, and of ghosts that have left these."""
    rng = random.Random(4)
    rules = begun({"A": (0, 1), "B": (2,)}, window=2, save_steps=5, swap_steps=60, team_change=100)
    source = Source({"A": (0, 1), "B": (2,)}, {"A": FAR, "B": FAR})
    for _ in range(100):
        tell(rules, source.say(Event(rng.choice(["weights", "ghosts"]), rng.randrange(2), rng.randrange(30))))
        named = {(BehaviorId.parse(one).name, n) for matchup in matchups(rules) for one, n in matchup.ghosts.items()}
        assert rules.playing == named
        assert rules.wanted == named | {(name, v) for name, side in rules.sides.items() for v in side.window}
