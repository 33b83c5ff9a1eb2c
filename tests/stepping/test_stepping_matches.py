"""Self-play as stepping sees it, case by case: who plays whom, who waits, what is told, what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import count
from typing import Any

import numpy as np
import pytest

from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.messages.matches import NOBODY, Matchup, MatchupAssignment, Results
from sparring.pipeline.messages.simulator import BehaviorReport, Decisions, Ends, Step
from sparring.pipeline.messages.state import StepAllowance
from sparring.pipeline.messages.steps import BehaviorSteps
from sparring.pipeline.stepping.stepper import Stepper
from tests.stepping.matches_world import LATEST, BehaviorIds, DrawReader, TaggedPolicy, name_of, observations
from tests.stepping.stepping_fakes import SPEC

MUCH = 10**9
ONE, TWO, THREE = "A?team=0", "A?team=1", "A?team=2"
PAIR: BehaviorIds = (ONE, TWO)
Row = tuple[str, float, int, float]


def first(number: int = 1, **ghosts: int) -> Matchup:
    """Team 0 learns; `A1=7` says that 7 plays for A?team=1."""
    return Matchup(
        number=number,
        team=0,
        ghosts={f"{behavior_id[0]}?team={behavior_id[1:]}": ghost for behavior_id, ghost in ghosts.items()},
    )


def second(number: int = 1, **ghosts: int) -> Matchup:
    """Team 1 learns."""
    return Matchup(number=number, team=1, ghosts=first(0, **ghosts).ghosts)


class Hand:
    """A stepper that is fed by hand.

    Args:
        matchups: of the first assignment; None is adopted without any.
        names: under self-play.
        behavior_ids: of the first simulator, which has number and key 0; none connects without any.
    """

    def __init__(
        self,
        *matchups: Matchup,
        names: Sequence[str] = ("A",),
        behavior_ids: BehaviorIds = PAIR,
        lockstep: bool = False,
        expected: int = 1,
    ) -> None:
        self.latest = {name: TaggedPolicy(LATEST) for name in ("A", "B")}
        self.ghosts: dict[tuple[str, int], TaggedPolicy] = {}
        self.stepper = Stepper(self.latest, self_play=names, ghosts=self.ghosts, lockstep=lockstep, expected=expected)
        self.parts: list[BehaviorSteps] = []
        self.matches: list[Results] = []
        self._sequences: dict[int, int] = {}
        self._numbers = count(1)
        self._serials = count(1)
        self._assignments = count(1)
        if behavior_ids:
            self.connect(0, behavior_ids)
        if matchups:
            self.assign(*matchups)

    def connect(self, key: int, behavior_ids: BehaviorIds = PAIR, number: int | None = None) -> None:
        self.stepper.connect(key, key if number is None else number, dict.fromkeys(behavior_ids, SPEC))
        self._sequences[key] = 0
        for name in {name_of(behavior_id) for behavior_id in behavior_ids}:
            self.grant(name)

    def grant(self, name: str, allowance: int = MUCH, assignment: int = 0) -> None:
        allowance = StepAllowance(serial=next(self._serials), steps=allowance, assignment=assignment)
        self.stepper.grant(name, allowance)

    def assign(self, *matchups: Matchup, release: bool = False) -> None:
        for matchup in matchups:
            for behavior_id, number in matchup.ghosts.items():
                self.ghosts.setdefault((name_of(behavior_id), number), TaggedPolicy(number))
        self.stepper.matches.assignment = MatchupAssignment(serial=next(self._assignments), matchups=matchups)
        if release:
            in_use = self.stepper.matches.in_use(self.stepper.behaviors)
            for key in [key for key in self.ghosts if key not in in_use]:
                del self.ghosts[key]

    def receive(self, key: int, *reports: BehaviorReport) -> None:
        self.stepper.receive(key, Step(sequence=self._sequences[key], reports=reports), 0.0)
        self._sequences[key] += 1

    def wake(self) -> dict[int, dict[str, list[int]]]:
        """Who acted for each agent, by connection and seat."""
        acts = self.stepper.wake(0.0).acts
        self.take()
        return {
            key: {one.behavior: one.continuous[:, 0].astype(int).tolist() for one in act.actions}
            for key, act, *_ in acts
        }

    def play(self, *reports: BehaviorReport, key: int = 0) -> dict[str, list[int]]:
        """A frame of one simulator, and who acted for each of its agents."""
        self.receive(key, *reports)
        return self.wake()[key]

    def take(self) -> None:
        parts = self.stepper.take_steps()
        self.parts += parts
        self.matches += [part.results for part in parts if part.results is not None]

    def report(
        self,
        behavior_id: str,
        agents: Sequence[int] = (),
        ends: Sequence[int] = (),
        *,
        matches: Sequence[int] | None = None,
        groups: Sequence[int] | None = None,
        rewards: Sequence[float] | None = None,
        shared: Sequence[float] | None = None,
        outcomes: Sequence[float] | None = None,
    ) -> BehaviorReport:
        """Decisions of `agents` with their `matches` and `groups`; `ends` with their `rewards` and `outcomes`."""
        decisions = Decisions(
            agents=np.array(agents, np.int64),
            observations=self._seen(len(agents)),
            rewards=np.zeros(len(agents), np.float32),
            groups=None if groups is None else np.array(groups, np.int64),
            matches=None if matches is None else np.array(matches, np.int64),
        )
        ended = Ends(
            agents=np.array(ends, np.int64),
            observations=self._seen(len(ends)),
            rewards=np.array([0.0] * len(ends) if rewards is None else rewards, np.float32),
            interrupted=np.zeros(len(ends), bool),
            group_rewards=None if shared is None else np.array(shared, np.float32),
            outcomes=None if outcomes is None else np.array(outcomes, np.float32),
        )
        return BehaviorReport(
            behavior=behavior_id, decisions=decisions if len(agents) else None, ends=ended if len(ends) else None
        )

    def _seen(self, n: int) -> tuple[Any, ...]:
        return observations([next(self._numbers) for _ in range(n)])

    @property
    def told(self) -> list[tuple[int, int, list[Row]]]:
        """Matches that ended: draw, simulator, rows."""
        out = []
        for results in self.matches:
            at = 0
            for matchup, simulator, behavior_ids in zip(
                results.matchups, results.simulators, results.row_counts, strict=True
            ):
                rows = [
                    (
                        results.names[results.who[row]],
                        float(results.scores[row]),
                        int(results.explicit[row]),
                        float(results.rewards[row]),
                    )
                    for row in range(at, at + int(behavior_ids))
                ]
                if rows:  # else there was no result
                    out.append((int(matchup), int(simulator), sorted(rows)))
                at += int(behavior_ids)
        return out


# ---------------------------------------------------------------- under which draw


def test_matches_of_a_simulator_that_names_them_take_the_draws_one_after_the_other() -> None:
    """Simulator n begins with draw n; each match that begins takes the next, at a frame or later."""
    hand = Hand(first(1, A1=7), first(2, A1=8), first(3, A1=9), behavior_ids=())
    hand.connect(1)
    players = []
    for agents, matches in (([1], [5]), ([1, 2], [5, 9]), ([1, 2, 3, 4], [5, 9, 6, 7])):
        players.append(
            hand.play(*(hand.report(behavior_id, agents, matches=matches) for behavior_id in PAIR), key=1)[TWO]
        )
    assert players == [[8], [8, 9], [8, 9, 7, 8]]
    again = [hand.report(behavior_id, [1, 2, 3, 4], [2], matches=[5, 1, 6, 7]) for behavior_id in PAIR]
    assert hand.play(*again, key=1)[TWO] == [8, 9, 7, 8]
    again = [hand.report(behavior_id, [1, 2, 3, 4], [1], matches=[2, 1, 6, 7]) for behavior_id in PAIR]
    assert hand.play(*again, key=1)[TWO] == [7, 9, 7, 8]


@pytest.mark.parametrize("said", ["groups", "nothing"])
def test_simulators_that_name_no_matches_take_the_draw_of_their_number(said: str) -> None:
    """All of one simulator meet the same draw, and two simulators play different ones at the same time."""
    hand = Hand(first(1, A1=7), first(2, A1=8), behavior_ids=())
    groups = [[3, 3], [4, 4]] if said == "groups" else [None, None]
    for key in range(4):
        hand.connect(key)
        hand.receive(key, *(hand.report(s, [1, 2], groups=g) for s, g in zip(PAIR, groups, strict=True)))
    assert hand.wake() == {key: {ONE: [LATEST, LATEST], TWO: [ghost, ghost]} for key, ghost in enumerate([7, 8, 7, 8])}
    assert len(hand.ghosts["A", 7].saw) == len(hand.ghosts["A", 8].saw) == len(hand.latest["A"].saw) == 1


def test_those_that_join_a_match_or_group_under_way_play_under_its_draw() -> None:
    """The assignment has changed meanwhile; a match that begins in the same frame takes the new one."""
    for matches in (True, False):
        hand = Hand(first(1, A1=7))

        def reports(
            agents: list[int], keys: list[int], hand: Hand = hand, matches: bool = matches
        ) -> list[BehaviorReport]:
            if matches:
                return [hand.report(behavior_id, agents, matches=keys) for behavior_id in PAIR]
            return [hand.report(ONE, agents, groups=keys), hand.report(TWO, agents, groups=[k + 10 for k in keys])]

        hand.play(*reports([1], [5]))
        hand.assign(first(2, A1=8))
        assert hand.play(*reports([1, 2, 3], [5, 5, 6])) == {ONE: [LATEST] * 3, TWO: [7, 7, 8]}


def test_an_agent_alone_takes_the_new_draw_with_its_next_episode_and_not_before() -> None:
    hand = Hand(first(1, A1=7))
    assert hand.play(hand.report(TWO, [1, 2])) == {TWO: [7, 7]}
    hand.assign(first(2, A1=8))
    assert hand.play(hand.report(TWO, [1, 2])) == {TWO: [7, 7]}
    assert hand.play(hand.report(TWO, [1, 2], [2])) == {TWO: [7, 8]}


def test_a_group_or_match_that_ends_and_begins_in_one_frame_begins_anew() -> None:
    """The same key says another match, once nobody of the former is left; while one is left it is the same."""
    hand = Hand(first(1, A1=7))
    hand.play(hand.report(TWO, [1, 2], groups=[4, 4]))
    hand.assign(first(2, A1=8))
    assert hand.play(hand.report(TWO, [1], [1], groups=[4])) == {TWO: [7]}
    assert hand.play(hand.report(TWO, [3], [1, 2], groups=[4])) == {TWO: [8]}


def test_the_assignment_counts_that_is_there_when_the_frame_is_taken_over() -> None:
    hand = Hand(first(1, A1=7))
    hand.receive(0, hand.report(TWO, [1]))
    hand.assign(first(2, A1=8))
    assert hand.wake() == {0: {TWO: [8]}}


# ---------------------------------------------------------------- what assembly is told


def test_slots_that_go_from_learners_to_ghosts_and_back_leave_no_trace() -> None:
    """One agent id and one slot, alternately learning and not: each life is told whole, or not at all."""
    hand, reader = Hand(first(1, A1=7)), DrawReader()
    hand.play(hand.report(ONE, [1]))
    for number in range(2, 8):
        hand.assign(*([second(number, A0=number)] if number % 2 == 0 else [first(number, A1=number)]))
        hand.play(hand.report(ONE, [1]))
        hand.play(hand.report(ONE, [1], [1]))
    for part in hand.parts:
        reader.read(part)
    assert set(reader.matchups.values()) == {1, 3, 5, 7}
    assert [len(life.steps) for life in reader.past] == [2, 2, 2]
    assert hand.stepper.behaviors["A"].table.taken == 1
    assert (hand.stepper.behaviors["A"].produced, hand.stepper.behaviors["A"].ghosts) == (6, 6)
    assert [part.ghosts for part in hand.parts][-1] == 6


def test_a_match_under_way_ends_under_its_old_roles() -> None:
    """Team 1 learns from now on; the match that team 0 learns in goes on to be learned from by team 0 alone."""
    hand, reader = Hand(first(1, A1=7)), DrawReader()
    hand.play(*(hand.report(behavior_id, [1], matches=[5]) for behavior_id in PAIR))
    hand.assign(second(2, A0=8))
    players = hand.play(*(hand.report(behavior_id, [1, 2], matches=[5, 6]) for behavior_id in PAIR))
    assert players == {ONE: [LATEST, 8], TWO: [7, LATEST]}
    hand.play(*(hand.report(behavior_id, [1, 2], [1, 2], matches=[7, 8], outcomes=[1, 0]) for behavior_id in PAIR))
    for part in hand.parts:
        reader.read(part)
    ended = [(life.team, reader.matchups[life.agent], len(life.steps)) for life in reader.past]
    assert sorted(ended) == [(0, 1, 2), (1, 2, 1)]
    assert [matchup for matchup, *_ in hand.told] == [1, 2]


def test_a_new_reader_hears_of_no_ghosts_and_of_the_draws_of_all_others() -> None:
    hand = Hand(first(1, A1=7))
    hand.play(*(hand.report(behavior_id, [1], matches=[5]) for behavior_id in PAIR))
    hand.assign(second(2, A0=8))
    hand.play(*(hand.report(behavior_id, [1, 2], matches=[5, 6]) for behavior_id in PAIR))
    hand.parts.clear()
    hand.stepper.rejoin()
    hand.wake()
    ((part),) = hand.parts
    assert part.joined is not None
    assert part.joined.matchups is not None
    assert sorted(zip(part.joined.teams.tolist(), part.joined.matchups.tolist(), strict=True)) == [(0, 1), (1, 2)]


def test_a_wake_up_of_ghosts_alone_tells_how_many_steps_there_were_and_nothing_else() -> None:
    hand = Hand(first(1, A1=7))
    hand.play(hand.report(TWO, [1, 2]))
    hand.parts.clear()
    hand.play(hand.report(TWO, [1, 2], [1]))
    hand.stepper.disconnect(0)
    hand.wake()
    assert hand.parts
    for part in hand.parts:
        rows = [part.lost, part.ended, part.joined, part.reported, part.acted, part.results]
        assert rows == [None] * 6
        assert (part.completed.sum(), part.rows.sum(), part.ghosts) == (0, 0, 2)
        assert {field.name for field in fields(part)} >= {"ghosts", "results"}


def test_a_name_that_is_not_under_self_play_is_as_before() -> None:
    """It needs no assignment, has no draws and no results, beside one that is."""
    hand = Hand(names=["A"], behavior_ids=("B",))
    assert hand.play(hand.report("B", [1, 2])) == {"B": [LATEST, LATEST]}
    hand.connect(1, ("B", ONE))
    hand.assign(first(1))
    hand.play(hand.report("B", [1], groups=[1]), hand.report(ONE, [1], groups=[1]), key=1)
    hand.play(hand.report("B", [1], [1], groups=[1]), hand.report(ONE, [1], [1], groups=[1]), key=1)
    parts = [part for part in hand.parts if part.behavior == "B"]
    assert parts
    assert all(part.joined is None or part.joined.matchups is None for part in parts)
    assert all(part.results is None and part.ghosts == 0 for part in parts)
    assert hand.told == [(1, 1, [(ONE, 0.5, 0, 0.0)])]


# ---------------------------------------------------------------- who waits


def test_an_agent_that_goes_on_to_another_match_without_an_end_is_refused() -> None:
    """A learner or a ghost; it may after its end, in the same frame too; nothing of the frame is used."""
    for behavior_id in PAIR:
        hand = Hand(first(1, A1=7))
        hand.play(hand.report(behavior_id, [1, 2], matches=[5, 5]))
        hand.play(hand.report(behavior_id, [1, 2], [1], matches=[6, 5]))
        with pytest.raises(RemoteProtocolError) as refused:
            hand.receive(0, hand.report(behavior_id, [1, 2], matches=[6, 6]))
        assert refused.value.code == "match"
        assert "agent 2" in str(refused.value)
        assert hand.wake() == {}


def test_whether_an_agent_is_refused_does_not_depend_on_who_had_its_slot_before() -> None:
    """It begins without a match and names one later: refused or not, but always alike."""
    refused = []
    for former in (None, [5], [6]):
        hand = Hand(first(1, A1=7))
        if former is not None:
            hand.play(hand.report(ONE, [1], matches=former))
            hand.play(hand.report(ONE, ends=[1]))
        hand.play(hand.report(ONE, [1]))
        try:
            hand.receive(0, hand.report(ONE, [1], matches=[6]))
        except RemoteProtocolError as error:
            refused.append(error.code)
        else:
            refused.append("")
    assert len(set(refused)) == 1, refused


def test_a_simulator_with_a_seat_that_nobody_is_assigned_to_waits_alone() -> None:
    hand = Hand(first(1, A1=7))
    hand.connect(1, (*PAIR, THREE))
    hand.receive(1, hand.report(ONE, [1]))
    hand.receive(0, hand.report(ONE, [1]))
    assert hand.wake() == {0: {ONE: [LATEST]}}
    assert hand.play(hand.report(ONE, [1])) == {ONE: [LATEST]}
    hand.assign(first(2, A1=7, A2=9))
    assert hand.wake() == {1: {ONE: [LATEST]}}


def test_before_the_first_assignment_all_wait() -> None:
    hand = Hand()
    hand.receive(0, hand.report(ONE, [1]))
    assert hand.wake() == {}
    assert hand.parts == []
    hand.assign(first(1, A1=7))
    assert hand.wake() == {0: {ONE: [LATEST]}}


def test_ghosts_need_no_permit_and_no_weights_of_the_learner() -> None:
    hand = Hand(first(1, A1=7))
    hand.grant("A", 0)
    del hand.latest["A"]
    for _ in range(3):
        assert hand.play(hand.report(TWO, [1, 2])) == {TWO: [7, 7]}
    state = hand.stepper.state()["A"]
    assert (state.steps, state.ghosts) == (0, 4)


def test_a_simulator_with_a_learner_at_its_budget_waits_as_a_whole() -> None:
    """Its ghosts too; another simulator whose agents are ghosts goes on."""
    hand = Hand(first(1, A1=7))
    hand.connect(1, (TWO,))
    hand.grant("A", 1)
    assert hand.play(*(hand.report(behavior_id, [1]) for behavior_id in PAIR)) == {ONE: [LATEST], TWO: [7]}
    hand.receive(0, *(hand.report(behavior_id, [1]) for behavior_id in PAIR))
    hand.receive(1, hand.report(TWO, [1]))
    assert hand.wake() == {1: {TWO: [7]}}
    state = hand.stepper.state()["A"]
    assert (state.steps, state.ghosts) == (1, 1)
    hand.grant("A", 2)
    assert hand.wake() == {0: {ONE: [LATEST], TWO: [7]}}


def test_steps_of_ghosts_do_not_use_the_budget_up() -> None:
    hand = Hand(first(1, A1=7))
    hand.grant("A", 2)
    for _ in range(2):
        assert hand.play(hand.report(ONE, [1]), hand.report(TWO, [1, 2, 3]))
    hand.receive(0, hand.report(ONE, [1]), hand.report(TWO, [1, 2, 3]))
    assert hand.wake() == {}
    assert hand.stepper.behaviors["A"].running == 0


def test_in_lockstep_a_permit_that_names_an_assignment_waits_for_it() -> None:
    """All wait, with what they have reported taken over; then the matches that begin take the new draws."""
    hand = Hand(first(1, A1=7), lockstep=True, expected=2)
    hand.connect(1)
    for key in (0, 1):
        hand.receive(key, *(hand.report(behavior_id, [1]) for behavior_id in PAIR))
    assert len(hand.wake()) == 2
    hand.grant("A", MUCH, assignment=2)
    for key in (0, 1):
        hand.receive(key, *(hand.report(behavior_id, [1]) for behavior_id in PAIR))
    assert hand.wake() == {}
    assert hand.stepper.behaviors["A"].produced == 2
    hand.assign(second(2, A0=8))
    assert hand.wake() == {key: {ONE: [LATEST], TWO: [7]} for key in (0, 1)}
    for key in (0, 1):
        hand.receive(key, *(hand.report(behavior_id, [1], [1]) for behavior_id in PAIR))
    assert hand.wake() == {key: {ONE: [8], TWO: [LATEST]} for key in (0, 1)}


# ---------------------------------------------------------------- results


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
def test_the_score_is_what_was_said_or_else_the_sign_of_the_final_reward(
    kind: str, rewards: list[float], shared: list[float] | None, outcomes: list[float] | None, row: Row
) -> None:
    hand = Hand(first(4, A1=7))
    keys: dict[str, Any] = {"ids": {"matches": [3]}, "group": {"groups": [3]}, "alone": {}}[kind]
    hand.play(hand.report(ONE, [1], **keys))
    hand.play(hand.report(ONE, ends=[1], rewards=rewards, shared=shared, outcomes=outcomes))
    others = [] if kind == "ids" else [(TWO, -1.0, 0, 0.0)]
    assert hand.told == [(4, 0, sorted([row, *others]))]


def test_rewards_before_the_end_do_not_count() -> None:
    hand = Hand(first(1, A1=7))
    hand.play(hand.report(ONE, [1]))
    earlier = hand.report(ONE, [1])
    assert earlier.decisions is not None
    earlier.decisions.rewards[:] = 10
    hand.play(earlier)
    hand.play(hand.report(ONE, ends=[1], rewards=[-1.0]))
    assert hand.told == [(1, 0, [(ONE, 0.0, 0, -1.0), (TWO, -1.0, 0, 0.0)])]


def test_a_groups_match_is_told_once_when_its_last_member_ends_with_the_mean_of_those_that_ended_last() -> None:
    hand = Hand(first(1, A1=7, A2=8), behavior_ids=(ONE, TWO, THREE))
    hand.play(hand.report(ONE, [1, 2, 3, 4], groups=[5, 5, 5, 5]))
    hand.play(hand.report(ONE, [2, 3], [1, 4], groups=[5, 5], rewards=[9, 9], shared=[9, 9]))
    assert hand.told == []
    assert hand.stepper.matches.ended == 0
    hand.play(hand.report(ONE, ends=[2, 3], rewards=[1, -2], shared=[0, 0]))
    assert hand.told == [(1, 0, [(ONE, 0.0, 0, -0.5), (TWO, -1.0, 0, 0.0), (THREE, -1.0, 0, 0.0)])]
    assert hand.stepper.matches.ended == 1
    assert hand.stepper.matches.under_way == 0


def test_two_agents_alone_are_two_matches() -> None:
    hand = Hand(first(1, A1=7))
    hand.play(*(hand.report(behavior_id, [1, 2]) for behavior_id in PAIR))
    hand.play(*(hand.report(behavior_id, ends=[1, 2], rewards=[1, -1]) for behavior_id in PAIR))
    nobody = (TWO, -1.0, 0, 0.0)
    assert hand.told == [(1, 0, [(ONE, 1.0, 0, 1.0), nobody]), (1, 0, [(ONE, 0.0, 0, -1.0), nobody])]
    assert len(set(hand.matches[0].numbers.tolist())) == 2


def test_a_match_that_is_named_is_told_with_all_its_seats_when_the_last_of_all_ends() -> None:
    """A seat's agents may have ended before; uneven teams; some say what came of it and others do not."""
    hand = Hand(first(1, A1=7, A2=8), behavior_ids=(ONE, TWO, THREE))
    hand.play(
        *(hand.report(behavior_id, [1, 2], matches=[5, 5]) for behavior_id in PAIR),
        hand.report(THREE, [1], matches=[5]),
    )
    hand.play(hand.report(ONE, ends=[1, 2], outcomes=[0.5, 0.5]), hand.report(TWO, [2], [1], matches=[5]))
    assert hand.told == []
    hand.play(hand.report(TWO, ends=[2], rewards=[3]), hand.report(THREE, [1], matches=[5]))
    assert hand.told == []
    hand.play(hand.report(THREE, ends=[1], rewards=[-2]))
    assert hand.told == [(1, 0, [(ONE, 0.5, 1, 0.0), (TWO, 1.0, 0, 3.0), (THREE, 0.0, 0, -2.0)])]


def test_a_result_is_handed_over_when_the_match_ends_whoever_is_the_last_to_end() -> None:
    """The learner's name has nothing else to tell: its last agent ended before the other name's."""
    hand = Hand(first(1, B1=7), names=["A", "B"], behavior_ids=(ONE, "B?team=1"))
    hand.play(hand.report(ONE, [1], matches=[5]), hand.report("B?team=1", [1], matches=[5]))
    hand.play(hand.report(ONE, ends=[1], rewards=[1]), hand.report("B?team=1", [1], matches=[5]))
    hand.play(hand.report("B?team=1", ends=[1], rewards=[-1]))
    assert hand.told == [(1, 0, [(ONE, 1.0, 0, 1.0), ("B?team=1", 0.0, 0, -1.0)])]
    (told,) = [part for part in hand.parts if part.results is not None]
    assert told.behavior == "A", "the name that learned in it"


def test_results_know_the_seats_of_earlier_ones_first() -> None:
    hand = Hand(first(1, A1=7, A2=8), behavior_ids=(ONE, THREE))
    hand.connect(1, (TWO, ONE))
    for key in (0, 1):
        hand.play(hand.report(ONE, [1]), key=key)
    for key in (0, 1):
        hand.play(hand.report(ONE, ends=[1]), key=key)
    earlier, later = hand.matches
    assert later.names[: len(earlier.names)] == earlier.names
    assert [sorted(behavior_id for behavior_id, *_ in rows) for *_, rows in hand.told] == [[ONE, THREE], [ONE, TWO]]


def test_nothing_is_told_of_a_match_of_ghosts_alone() -> None:
    hand = Hand(Matchup(number=1, team=5, ghosts={ONE: 7, TWO: 8}))
    hand.play(*(hand.report(behavior_id, [1, 2], matches=[5, 6]) for behavior_id in PAIR))
    hand.play(*(hand.report(behavior_id, ends=[1, 2], outcomes=[1, 1]) for behavior_id in PAIR))
    assert hand.told == []


def test_where_nobody_learns_each_match_is_told_once() -> None:
    """Of simulators that name matches, of groups and of agents alone: by the first team."""
    hand = Hand(Matchup(number=1, team=NOBODY, ghosts={ONE: 7, TWO: 8}), behavior_ids=())
    kinds: list[list[dict[str, Any]]] = [[{"matches": [5]}] * 2, [{"groups": [5]}, {"groups": [6]}], [{}, {}]]
    for key, keys in enumerate(kinds):
        hand.connect(key)
        reports = [hand.report(behavior_id, [1], **more) for behavior_id, more in zip(PAIR, keys, strict=True)]
        assert hand.play(*reports, key=key) == {ONE: [7], TWO: [8]}
        hand.play(hand.report(TWO, ends=[1], outcomes=[0]), hand.report(ONE, ends=[1], outcomes=[1]), key=key)
    unsaid = (TWO, -1.0, 0, 0.0)
    assert [rows for *_, rows in hand.told] == [
        [(ONE, 1.0, 1, 0.0), (TWO, 0.0, 1, 0.0)],
        [(ONE, 1.0, 1, 0.0), unsaid],
        [(ONE, 1.0, 1, 0.0), unsaid],
    ]


# ---------------------------------------------------------------- simulators that go away


@pytest.mark.parametrize("kind", ["ids", "group", "alone"])
def test_a_match_whose_simulator_goes_away_has_no_result_and_is_counted_once(kind: str) -> None:
    """One contest of two teams, told of as one match where it ends: it is one match where it is lost."""
    for leaves in (False, True):
        hand = Hand(first(1, A1=7))
        each = {"ids": ("matches", [3], [3]), "group": ("groups", [3], [4]), "alone": ("groups", None, None)}[kind]
        keys: list[dict[str, Any]] = [{str(each[0]): key} for key in each[1:]]
        hand.play(*(hand.report(behavior_id, [1], **more) for behavior_id, more in zip(PAIR, keys, strict=True)))
        if leaves:
            hand.stepper.disconnect(0)
            hand.wake()
        else:
            hand.play(*(hand.report(behavior_id, ends=[1], rewards=[1]) for behavior_id in PAIR))
        assert len(hand.told) == (not leaves)
        assert (hand.stepper.matches.ended, hand.stepper.matches.lost) == (not leaves, leaves)
        assert hand.stepper.matches.under_way == 0


@pytest.mark.parametrize("kind", ["ids", "group"])
def test_a_simulator_that_comes_back_before_its_former_link_is_closed_begins_matches_of_its_own(kind: str) -> None:
    """With the number and the match ids of the former one: they take the new draw, and end as any other."""
    hand = Hand(first(1, A1=7))
    key: dict[str, Any] = {"ids": {"matches": [3]}, "group": {"groups": [3]}}[kind]
    hand.play(hand.report(ONE, [1], **key))
    hand.assign(second(2, A0=8))
    hand.connect(5, number=0)
    assert hand.play(hand.report(ONE, [1], **key), key=5) == {ONE: [8]}
    hand.assign(first(3, A1=9))
    assert hand.play(hand.report(ONE, [2], [1], **key), key=5) == {ONE: [LATEST]}
    hand.play(hand.report(ONE, ends=[2], rewards=[1]), key=5)
    assert [matchup for matchup, *_ in hand.told] == [3]
    assert hand.stepper.matches.lost == 1


# ---------------------------------------------------------------- what is needed later


def test_a_ghost_of_a_match_under_way_is_in_use_while_its_seat_is_empty() -> None:
    """The seat's agents have ended, the match has not: who comes next plays under its draw."""
    hand = Hand(first(1, A1=7))
    hand.play(*(hand.report(behavior_id, [1], matches=[5]) for behavior_id in PAIR))
    hand.play(hand.report(ONE, [1], matches=[5]), hand.report(TWO, ends=[1]))
    hand.assign(first(2, A1=8), release=True)
    assert ("A", 7) in hand.ghosts
    assert hand.play(hand.report(TWO, [2], matches=[5])) == {TWO: [7]}


def test_ghosts_are_in_use_while_assigned_or_playing_and_then_no_more() -> None:
    hand = Hand(first(1, A1=7), first(2, A1=8))
    hand.play(hand.report(TWO, [1]))
    hand.assign(first(3, A1=9), release=True)
    assert set(hand.ghosts) == {("A", 7), ("A", 9)}
    hand.play(hand.report(TWO, [1], [1]))
    hand.assign(first(4, A1=9), release=True)
    assert set(hand.ghosts) == {("A", 9)}


def test_a_seat_that_is_new_in_a_match_under_way_stops_nobody_else() -> None:
    """The draw of the match does not say who plays it: the simulator alone may be refused, the others go on."""
    hand = Hand(first(1, A1=7))
    hand.connect(1)
    hand.play(hand.report(ONE, [1], matches=[5]))
    hand.stepper.add_behaviors(0, {THREE: SPEC})
    hand.assign(first(2, A1=8, A2=9))
    hand.receive(1, hand.report(TWO, [1], matches=[1]))
    try:
        hand.receive(0, hand.report(THREE, [1], matches=[5]))
    except RemoteProtocolError:
        hand.stepper.disconnect(0)
    assert hand.wake()[1] == {TWO: [8]}
