"""Learning team and opponents: compared with a slow twin over random histories, and in known cases."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.coordination.self_play_world import (
    FAR,
    LAYOUTS,
    Event,
    EventSource,
    Layout,
    SelfPlayTwin,
    apply,
    behavior_id,
    ghosts_by_place,
    histories,
    learn,
    make,
    matchups,
    one_settings,
    started_rules,
)


class RulesAndTwin:
    """Feeds the rules and their twin with the same messages."""

    def __init__(
        self, layout: Layout, own: Sequence[Mapping[str, Any]], ends: Sequence[int], *, lockstep: bool, seed: int
    ) -> None:
        per_name = {name: dict(own[at]) for at, name in enumerate(layout)}
        end = {name: ends[at] for at, name in enumerate(layout)}
        self.layout = layout
        self.twin = SelfPlayTwin(layout, per_name, end, lockstep=lockstep)
        self.rules = make(layout, max_steps=end, seed=seed, lockstep=lockstep, per_name=per_name)
        self.source = EventSource(layout, end)
        self.sampled: dict[str, tuple[int, list[int]]] = {}
        for name, teams in layout.items():
            self.rules.set_teams(name, teams)
        for name in layout:
            apply(self.rules, ("weights", name, 1, 0))
            self.twin.apply(("weights", name, 1, 0))
        self.check()

    def receive(self, event: Event) -> None:
        message = self.source.message_of(event)
        apply(self.rules, message)
        self.twin.apply(message)
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
        """Checks that ghosts stay until a change is due, and are then sampled from the candidates."""
        now = [sampled.ghosts[one] for sampled in matchups(self.rules)]
        stamp = self.twin.stamps[one]
        if self.sampled.get(one, (0, []))[0] == stamp:
            assert now == self.sampled[one][1]
        else:
            assert set(now) <= self.twin.candidates(one)
        self.sampled[one] = (stamp, now)


ENDS = st.sampled_from([FAR, 60, 150])


@settings(max_examples=125)
@given(
    layout=st.sampled_from(LAYOUTS),
    own=st.lists(one_settings(), min_size=3, max_size=3),
    ends=st.lists(ENDS, min_size=3, max_size=3),
    lockstep=st.booleans(),
    seed=st.integers(0, 2**31),
    history=histories(),
)
def test_rules_agree_with_their_slow_twin(
    layout: Layout,
    own: list[dict[str, Any]],
    ends: list[int],
    lockstep: bool,
    seed: int,
    history: list[Event],
) -> None:
    """Learning team, windows and changes are the twin's, and matchups stay fixed between changes."""
    pair = RulesAndTwin(layout, own, ends, lockstep=lockstep, seed=seed)
    for event in history:
        pair.receive(event)


@settings(max_examples=30)
@given(own=one_settings(), history=histories(), lockstep=st.booleans())
def test_names_of_one_team_learn_together(own: dict[str, Any], history: list[Event], lockstep: bool) -> None:
    """The team of keeper and striker changes when either has learned for its turn."""
    pair = RulesAndTwin({"K": (0,), "S": (0,), "O": (1,)}, [own] * 3, [FAR] * 3, lockstep=lockstep, seed=3)
    for event in history:
        pair.receive(event)
        assert set(pair.rules.learning) == ({"K", "S"} if pair.rules.team == 0 else {"O"})


@settings(max_examples=50)
@given(layout=st.sampled_from(LAYOUTS), history=histories(("weights", "ghosts")), lockstep=st.booleans())
def test_an_assignment_gets_a_new_serial_exactly_when_it_changes(
    layout: Layout, history: list[Event], lockstep: bool
) -> None:
    """Serials rise by one, and each matchup number keeps its team and ghosts for ever."""
    rules = started_rules(layout, lockstep=lockstep, save_steps=20, swap_steps=30, team_change=50)
    source = EventSource(layout, dict.fromkeys(layout, FAR))
    known: dict[int, tuple[int, dict[str, int]]] = {}
    serial, former = 1, matchups(rules)
    for event in history:
        apply(rules, source.message_of(event))
        assert rules.assignment is not None
        changed = [one.number for one in former] != [one.number for one in matchups(rules)]
        assert rules.assignment.serial == serial + changed
        serial, former = rules.assignment.serial, matchups(rules)
        for one in former:
            assert known.setdefault(one.number, (one.team, dict(one.ghosts))) == (one.team, dict(one.ghosts))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_team_has_its_turn(layout: Layout) -> None:
    """Teams rotate through a queue, each for `team_change` learner steps, however names share the teams."""
    rules = started_rules(layout, save_steps=10, team_change=100)
    order = sorted(team for teams in layout.values() for team in teams)
    teams = []
    for _ in range(3 * len(order)):
        teams.append(rules.team)
        for _ in range(4):
            learn(rules, rules.learning[0], 25)
    assert teams == order * 3


def test_the_turn_of_a_team_is_counted_in_its_own_learner_steps() -> None:
    """Weights that an idle learner still publishes do not affect the other's turn."""
    rules = started_rules({"A": (0,), "B": (1,)}, save_steps=10, team_change=100)
    learn(rules, "A", 99)
    learn(rules, "B", 500)
    assert rules.team == 0
    learn(rules, "A", 1)
    assert rules.team == 1


def test_a_team_whose_learner_is_done_is_skipped() -> None:
    """One of three names ends early, and the others continue to take turns."""
    rules = started_rules({"A": (0,), "B": (1,), "C": (2,)}, max_steps={"A": FAR, "B": 100, "C": FAR}, team_change=100)
    teams = []
    for _ in range(7):
        teams.append(rules.team)
        learn(rules, rules.learning[0], 100)
    assert teams == [0, 1, 2, 0, 2, 0, 2]


def test_a_turn_ends_when_its_learner_is_done() -> None:
    """No team waits for `team_change` steps that a finished learner cannot make."""
    rules = started_rules({"A": (0,), "B": (1,)}, max_steps={"A": 50, "B": FAR}, team_change=1000)
    learn(rules, "A", 50)
    assert rules.team == 1
    for _ in range(5):
        learn(rules, "B", 1000)
        assert rules.team == 1


def test_a_learner_restored_from_a_checkpoint_neither_stalls_nor_counts_twice() -> None:
    """`trained` falls while the version rises; only later learner steps count."""
    rules = started_rules({"A": (0,), "B": (1,)}, save_steps=40, team_change=100)
    rules.weights("A", 2, 60)
    rules.weights("A", 3, 20)  # restored from a checkpoint
    assert rules.team == 0
    assert rules.sides["A"].window == [1, 2]
    rules.weights("A", 4, 59)
    assert rules.team == 0
    rules.weights("A", 5, 60)
    assert (rules.team, rules.sides["A"].window) == (1, [1, 2, 5])


@settings(max_examples=30)
@given(history=histories(("weights", "back", "ghosts")), layout=st.sampled_from(LAYOUTS))
def test_after_any_history_an_unfinished_team_learns(history: list[Event], layout: Layout) -> None:
    """The learning team is never a finished one while another is unfinished."""
    rules = started_rules(layout, max_steps=120, save_steps=10, team_change=40)
    source = EventSource(layout, dict.fromkeys(layout, 120))
    for event in history:
        apply(rules, source.message_of(event))
        if not all(side.done for side in rules.sides.values()):
            assert not all(rules.sides[name].done for name in rules.learning)


# ---------------------------------------------------------------- orders of messages


def states_after(orders: Any, messages: Sequence[tuple[str, Any]]) -> list[tuple[int | None, Any]]:
    """Returns team and ghosts for each order of the same messages, directly and after a common history."""
    found = []
    for order in orders:
        rules = make({"A": (), "B": ()}, seed=5, save_steps=10, swap_steps=5, team_change=60, max_steps=10_000)
        for at in order:
            kind, what = messages[at]
            getattr(rules, kind)(*what)
        first = (rules.team, ghosts_by_place(rules))
        for step in range(12):
            learn(rules, rules.learning[0], 15)
            rules.ghosts("A", 4 * step)
            rules.ghosts("B", 6 * step)
        found.append((rules.team, (first, ghosts_by_place(rules))))
    return found


def test_matchups_do_not_depend_on_the_order_of_teams_and_weights() -> None:
    """Two simulators report teams in turn, and weights arrive before, between or after."""
    messages: list[tuple[str, Any]] = [
        ("set_teams", ("A", (1,))),
        ("set_teams", ("A", (0,))),
        ("set_teams", ("B", (2,))),
        ("weights", ("A", 1, 0)),
        ("weights", ("B", 1, 0)),
    ]
    found = states_after(itertools.permutations(range(5)), messages)
    assert all(one == found[0] for one in found)
    assert found[0][1][0][0] == 0


def test_the_first_learning_team_does_not_depend_on_the_order_of_messages() -> None:
    """Steps of restored checkpoints do not count for the first turn.

    A run whose `coordination.json` was removed, as its error message suggests, continues like this.
    """
    messages: list[tuple[str, Any]] = [
        ("set_teams", ("A", (0,))),
        ("set_teams", ("B", (1,))),
        ("weights", ("A", 7, 500)),
        ("weights", ("B", 9, 400)),
    ]
    found = states_after(itertools.permutations(range(4)), messages)
    assert all(one == found[0] for one in found)


def team_after(order: Sequence[str]) -> int | None:
    rules = make({"A": (0,), "B": (1,)}, max_steps=100, team_change=1000)
    messages = {
        "teams A": lambda: rules.set_teams("A", (0,)),
        "teams B": lambda: rules.set_teams("B", (1,)),
        "weights A": lambda: rules.weights("A", 3, 100),
        "weights B": lambda: rules.weights("B", 1, 0),
    }
    for one in order:
        messages[one]()
    return rules.team


def test_a_learner_that_is_done_at_the_start_is_skipped() -> None:
    """It will publish nothing that could end its turn, in any order of messages."""
    orders = itertools.permutations(["teams A", "teams B", "weights A", "weights B"])
    assert [order for order in orders if team_after(order) != 1] == []


def test_no_assignment_is_made_before_all_names_are_known() -> None:
    """An opponent without published weights cannot play."""
    rules = make({"A": (0,), "B": (1,)})
    rules.set_teams("A", (0,))
    rules.set_teams("B", (1,))
    rules.weights("A", 1, 0)
    assert rules.assignment is None
    rules.weights("B", 1, 0)
    assert ghosts_by_place(rules) == [(0, {behavior_id("B", 1): 1})] * 4


def test_a_late_team_joins_the_queue() -> None:
    """Ghosts play it at once, other ghosts stay, and it gets its turn."""
    rules = started_rules({"A": (0, 1)}, team_change=100, save_steps=10, play_against_latest_model_ratio=0.0)
    learn(rules, "A", 100)
    before = ghosts_by_place(rules)
    rules.set_teams("A", (0, 1, 2))
    after = ghosts_by_place(rules)
    assert [ghosts[behavior_id("A", 0)] for _, ghosts in after] == [ghosts[behavior_id("A", 0)] for _, ghosts in before]
    assert all(behavior_id("A", 2) in ghosts for _, ghosts in after)
    teams = []
    for _ in range(6):
        teams.append(rules.team)
        learn(rules, "A", 100)
    assert set(teams) == {0, 1, 2}
    assert teams[:3] == teams[3:]
