"""Results of matches as stepping reports them: scores, rewards, and matches that are lost."""

from __future__ import annotations

from typing import Any

import pytest

from sparring.pipeline.messages.matches import NO_TEAM, Matchup
from tests.stepping.matches_by_hand import ONE, PAIR, THREE, TWO, Row, SteppedMatches, first, second
from tests.stepping.matches_simulator import LATEST

# ---------------------------------------------------------------- scores and rewards


@pytest.mark.parametrize(
    ("rewards", "shared", "outcomes", "row"),
    [
        ([1.0], None, None, (ONE, 1.0, 0, 1.0)),
        ([-1.0], None, None, (ONE, 0.0, 0, -1.0)),
        ([0.0], None, None, (ONE, 0.5, 0, 0.0)),
        ([-1.0], [1.5], None, (ONE, 1.0, 0, 0.5)),
        ([-1.0], [1.0], None, (ONE, 0.5, 0, 0.0)),
        ([-1.0], [-1.0], [1.0], (ONE, 1.0, 1, -2.0)),
        ([5.0], None, [0.5], (ONE, 0.5, 1, 5.0)),
        ([5.0], None, [0.0], (ONE, 0.0, 1, 5.0)),
    ],
)
@pytest.mark.parametrize("kind", ["ids", "group", "alone"])
def test_the_score_is_the_stated_outcome_or_the_sign_of_the_final_reward(
    kind: str, rewards: list[float], shared: list[float] | None, outcomes: list[float] | None, row: Row
) -> None:
    stepped = SteppedMatches(first(4, A1=7))
    keys: dict[str, Any] = {"ids": {"matches": [3]}, "group": {"groups": [3]}, "alone": {}}[kind]
    stepped.play(stepped.report(ONE, [1], **keys))
    stepped.play(stepped.report(ONE, ends=[1], rewards=rewards, shared=shared, outcomes=outcomes))
    others = [] if kind == "ids" else [(TWO, -1.0, 0, 0.0)]
    assert stepped.results == [(4, 0, sorted([row, *others]))]


def test_rewards_before_the_end_do_not_count() -> None:
    stepped = SteppedMatches(first(1, A1=7))
    stepped.play(stepped.report(ONE, [1]))
    earlier = stepped.report(ONE, [1])
    assert earlier.decisions is not None
    earlier.decisions.rewards[:] = 10
    stepped.play(earlier)
    stepped.play(stepped.report(ONE, ends=[1], rewards=[-1.0]))
    assert stepped.results == [(1, 0, [(ONE, 0.0, 0, -1.0), (TWO, -1.0, 0, 0.0)])]


def test_a_groups_match_reports_the_mean_of_the_members_that_end_last() -> None:
    stepped = SteppedMatches(first(1, A1=7, A2=8), behavior_ids=(ONE, TWO, THREE))
    stepped.play(stepped.report(ONE, [1, 2, 3, 4], groups=[5, 5, 5, 5]))
    stepped.play(stepped.report(ONE, [2, 3], [1, 4], groups=[5, 5], rewards=[9, 9], shared=[9, 9]))
    assert stepped.results == []
    assert stepped.stepper.matches.ended == 0
    stepped.play(stepped.report(ONE, ends=[2, 3], rewards=[1, -2], shared=[0, 0]))
    assert stepped.results == [(1, 0, [(ONE, 0.0, 0, -0.5), (TWO, -1.0, 0, 0.0), (THREE, -1.0, 0, 0.0)])]
    assert stepped.stepper.matches.ended == 1
    assert stepped.stepper.matches.under_way == 0


def test_two_agents_alone_are_two_matches() -> None:
    stepped = SteppedMatches(first(1, A1=7))
    stepped.play(*(stepped.report(behavior_id, [1, 2]) for behavior_id in PAIR))
    stepped.play(*(stepped.report(behavior_id, ends=[1, 2], rewards=[1, -1]) for behavior_id in PAIR))
    no_agents = (TWO, -1.0, 0, 0.0)
    assert stepped.results == [(1, 0, [(ONE, 1.0, 0, 1.0), no_agents]), (1, 0, [(ONE, 0.0, 0, -1.0), no_agents])]
    assert len(set(stepped.matches[0].numbers.tolist())) == 2


def test_a_named_match_reports_all_its_behaviors_when_its_last_agent_ends() -> None:
    """Teams may be uneven, may end early, and may state their outcome or not."""
    stepped = SteppedMatches(first(1, A1=7, A2=8), behavior_ids=(ONE, TWO, THREE))
    stepped.play(
        *(stepped.report(behavior_id, [1, 2], matches=[5, 5]) for behavior_id in PAIR),
        stepped.report(THREE, [1], matches=[5]),
    )
    stepped.play(stepped.report(ONE, ends=[1, 2], outcomes=[0.5, 0.5]), stepped.report(TWO, [2], [1], matches=[5]))
    assert stepped.results == []
    stepped.play(stepped.report(TWO, ends=[2], rewards=[3]), stepped.report(THREE, [1], matches=[5]))
    assert stepped.results == []
    stepped.play(stepped.report(THREE, ends=[1], rewards=[-2]))
    assert stepped.results == [(1, 0, [(ONE, 0.5, 1, 0.0), (TWO, 1.0, 0, 3.0), (THREE, 0.0, 0, -2.0)])]


def test_a_result_leaves_when_the_match_ends_whichever_agent_ends_last() -> None:
    """The learning name has no other rows: its last agent ended before the other name's."""
    stepped = SteppedMatches(first(1, B1=7), names=["A", "B"], behavior_ids=(ONE, "B?team=1"))
    stepped.play(stepped.report(ONE, [1], matches=[5]), stepped.report("B?team=1", [1], matches=[5]))
    stepped.play(stepped.report(ONE, ends=[1], rewards=[1]), stepped.report("B?team=1", [1], matches=[5]))
    stepped.play(stepped.report("B?team=1", ends=[1], rewards=[-1]))
    assert stepped.results == [(1, 0, [(ONE, 1.0, 0, 1.0), ("B?team=1", 0.0, 0, -1.0)])]
    (result,) = stepped.matches
    assert result.behavior == "A", "the name that learned"


def test_results_keep_the_order_of_behavior_ids_of_earlier_results() -> None:
    stepped = SteppedMatches(first(1, A1=7, A2=8), behavior_ids=(ONE, THREE))
    stepped.connect(1, (TWO, ONE))
    for key in (0, 1):
        stepped.play(stepped.report(ONE, [1]), key=key)
    for key in (0, 1):
        stepped.play(stepped.report(ONE, ends=[1]), key=key)
    earlier, later = stepped.matches
    assert later.names[: len(earlier.names)] == earlier.names
    assert [sorted(behavior_id for behavior_id, *_ in rows) for *_, rows in stepped.results] == [
        [ONE, THREE],
        [ONE, TWO],
    ]


def test_a_match_of_ghosts_alone_reports_no_result() -> None:
    stepped = SteppedMatches(Matchup(number=1, team=5, ghosts={ONE: 7, TWO: 8}))
    stepped.play(*(stepped.report(behavior_id, [1, 2], matches=[5, 6]) for behavior_id in PAIR))
    stepped.play(*(stepped.report(behavior_id, ends=[1, 2], outcomes=[1, 1]) for behavior_id in PAIR))
    assert stepped.results == []


def test_each_match_without_learners_is_reported_once() -> None:
    """The first team reports named matches, matches of groups and matches of single agents."""
    stepped = SteppedMatches(Matchup(number=1, team=NO_TEAM, ghosts={ONE: 7, TWO: 8}), behavior_ids=())
    kinds: list[list[dict[str, Any]]] = [[{"matches": [5]}] * 2, [{"groups": [5]}, {"groups": [6]}], [{}, {}]]
    for key, keys in enumerate(kinds):
        stepped.connect(key)
        reports = [stepped.report(behavior_id, [1], **more) for behavior_id, more in zip(PAIR, keys, strict=True)]
        assert stepped.play(*reports, key=key) == {ONE: [7], TWO: [8]}
        stepped.play(stepped.report(TWO, ends=[1], outcomes=[0]), stepped.report(ONE, ends=[1], outcomes=[1]), key=key)
    unknown = (TWO, -1.0, 0, 0.0)
    assert [rows for *_, rows in stepped.results] == [
        [(ONE, 1.0, 1, 0.0), (TWO, 0.0, 1, 0.0)],
        [(ONE, 1.0, 1, 0.0), unknown],
        [(ONE, 1.0, 1, 0.0), unknown],
    ]


# ---------------------------------------------------------------- disconnected simulators


@pytest.mark.parametrize("kind", ["ids", "group", "alone"])
def test_a_match_of_a_disconnected_simulator_counts_as_lost_once(kind: str) -> None:
    """A contest of two teams counts as one match, whether it ends or is lost."""
    for leaves in (False, True):
        stepped = SteppedMatches(first(1, A1=7))
        each = {"ids": ("matches", [3], [3]), "group": ("groups", [3], [4]), "alone": ("groups", None, None)}[kind]
        keys: list[dict[str, Any]] = [{str(each[0]): key} for key in each[1:]]
        stepped.play(*(stepped.report(behavior_id, [1], **more) for behavior_id, more in zip(PAIR, keys, strict=True)))
        if leaves:
            stepped.stepper.disconnect(0)
            stepped.tick()
        else:
            stepped.play(*(stepped.report(behavior_id, ends=[1], rewards=[1]) for behavior_id in PAIR))
        assert len(stepped.results) == (not leaves)
        assert (stepped.stepper.matches.ended, stepped.stepper.matches.lost) == (not leaves, leaves)
        assert stepped.stepper.matches.under_way == 0


@pytest.mark.parametrize("kind", ["ids", "group"])
def test_a_simulator_that_reconnects_early_begins_matches_of_its_own(kind: str) -> None:
    """Matches with the number and ids of the former connection take the new matchup, and end as any other."""
    stepped = SteppedMatches(first(1, A1=7))
    key: dict[str, Any] = {"ids": {"matches": [3]}, "group": {"groups": [3]}}[kind]
    stepped.play(stepped.report(ONE, [1], **key))
    stepped.assign(second(2, A0=8))
    stepped.connect(5, number=0)
    assert stepped.play(stepped.report(ONE, [1], **key), key=5) == {ONE: [8]}
    stepped.assign(first(3, A1=9))
    assert stepped.play(stepped.report(ONE, [2], [1], **key), key=5) == {ONE: [LATEST]}
    stepped.play(stepped.report(ONE, ends=[2], rewards=[1]), key=5)
    assert [matchup for matchup, *_ in stepped.results] == [3]
    assert stepped.stepper.matches.lost == 1
