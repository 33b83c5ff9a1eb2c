"""Self-play in stepping: which matchup each match takes, and which steps assembly receives."""

from __future__ import annotations

import pytest

from sparring.pipeline.messages.simulator import BehaviorReport
from tests.stepping.matches_by_hand import ONE, PAIR, TWO, SteppedMatches, first, second
from tests.stepping.matches_scene import MatchupReader
from tests.stepping.matches_simulator import LATEST

# ---------------------------------------------------------------- the matchup of a match


def test_named_matches_take_the_matchups_in_turn() -> None:
    """Simulator n begins with matchup n; each further match takes the next one."""
    stepped = SteppedMatches(first(1, A1=7), first(2, A1=8), first(3, A1=9), behavior_ids=())
    stepped.connect(1)
    players = []
    for agents, matches in (([1], [5]), ([1, 2], [5, 9]), ([1, 2, 3, 4], [5, 9, 6, 7])):
        players.append(
            stepped.play(*(stepped.report(behavior_id, agents, matches=matches) for behavior_id in PAIR), key=1)[TWO]
        )
    assert players == [[8], [8, 9], [8, 9, 7, 8]]
    again = [stepped.report(behavior_id, [1, 2, 3, 4], [2], matches=[5, 1, 6, 7]) for behavior_id in PAIR]
    assert stepped.play(*again, key=1)[TWO] == [8, 9, 7, 8]
    again = [stepped.report(behavior_id, [1, 2, 3, 4], [1], matches=[2, 1, 6, 7]) for behavior_id in PAIR]
    assert stepped.play(*again, key=1)[TWO] == [7, 9, 7, 8]


@pytest.mark.parametrize("named", ["groups", "nothing"])
def test_unnamed_matches_take_the_matchup_of_their_simulators_number(named: str) -> None:
    """All agents of one simulator play under one matchup, and two simulators play different ones at once."""
    stepped = SteppedMatches(first(1, A1=7), first(2, A1=8), behavior_ids=())
    groups = [[3, 3], [4, 4]] if named == "groups" else [None, None]
    for key in range(4):
        stepped.connect(key)
        stepped.receive(key, *(stepped.report(s, [1, 2], groups=g) for s, g in zip(PAIR, groups, strict=True)))
    assert stepped.tick() == {
        key: {ONE: [LATEST, LATEST], TWO: [ghost, ghost]} for key, ghost in enumerate([7, 8, 7, 8])
    }
    assert (
        len(stepped.ghosts["A", 7].passes) == len(stepped.ghosts["A", 8].passes) == len(stepped.latest["A"].passes) == 1
    )


def test_agents_that_join_a_match_under_way_play_under_its_matchup() -> None:
    """A match that begins in the same frame takes the new assignment."""
    for matches in (True, False):
        stepped = SteppedMatches(first(1, A1=7))

        def reports(
            agents: list[int], keys: list[int], stepped: SteppedMatches = stepped, matches: bool = matches
        ) -> list[BehaviorReport]:
            if matches:
                return [stepped.report(behavior_id, agents, matches=keys) for behavior_id in PAIR]
            return [
                stepped.report(ONE, agents, groups=keys),
                stepped.report(TWO, agents, groups=[k + 10 for k in keys]),
            ]

        stepped.play(*reports([1], [5]))
        stepped.assign(first(2, A1=8))
        assert stepped.play(*reports([1, 2, 3], [5, 5, 6])) == {ONE: [LATEST] * 3, TWO: [7, 7, 8]}


def test_an_agent_alone_takes_the_new_matchup_with_its_next_episode() -> None:
    stepped = SteppedMatches(first(1, A1=7))
    assert stepped.play(stepped.report(TWO, [1, 2])) == {TWO: [7, 7]}
    stepped.assign(first(2, A1=8))
    assert stepped.play(stepped.report(TWO, [1, 2])) == {TWO: [7, 7]}
    assert stepped.play(stepped.report(TWO, [1, 2], [2])) == {TWO: [7, 8]}


def test_a_group_that_ends_and_begins_in_one_frame_takes_the_new_matchup() -> None:
    """A key names the same match while any of its agents remains, and a new one afterwards."""
    stepped = SteppedMatches(first(1, A1=7))
    stepped.play(stepped.report(TWO, [1, 2], groups=[4, 4]))
    stepped.assign(first(2, A1=8))
    assert stepped.play(stepped.report(TWO, [1], [1], groups=[4])) == {TWO: [7]}
    assert stepped.play(stepped.report(TWO, [3], [1, 2], groups=[4])) == {TWO: [8]}


def test_a_frame_takes_the_assignment_of_the_tick_that_takes_it_over() -> None:
    stepped = SteppedMatches(first(1, A1=7))
    stepped.receive(0, stepped.report(TWO, [1]))
    stepped.assign(first(2, A1=8))
    assert stepped.tick() == {0: {TWO: [8]}}


# ---------------------------------------------------------------- steps that assembly receives


def test_slots_that_alternate_between_learners_and_ghosts_leave_no_trace() -> None:
    """Each episode of one agent id in one slot is reported whole, or not at all."""
    stepped, reader = SteppedMatches(first(1, A1=7)), MatchupReader()
    stepped.play(stepped.report(ONE, [1]))
    for number in range(2, 8):
        stepped.assign(*([second(number, A0=number)] if number % 2 == 0 else [first(number, A1=number)]))
        stepped.play(stepped.report(ONE, [1]))
        stepped.play(stepped.report(ONE, [1], [1]))
    for part in stepped.parts:
        reader.read(part)
    assert set(reader.matchups.values()) == {1, 3, 5, 7}
    assert [len(episode.steps) for episode in reader.past] == [2, 2, 2]
    assert stepped.stepper.behaviors["A"].table.taken == 1
    assert (stepped.stepper.behaviors["A"].produced, stepped.stepper.behaviors["A"].ghosts) == (6, 6)
    assert stepped.stepper.state()["A"].ghosts == 6


def test_a_match_under_way_keeps_its_learning_team() -> None:
    """Team 1 learns in new matches only; team 0 alone learns from the match under way."""
    stepped, reader = SteppedMatches(first(1, A1=7)), MatchupReader()
    stepped.play(*(stepped.report(behavior_id, [1], matches=[5]) for behavior_id in PAIR))
    stepped.assign(second(2, A0=8))
    players = stepped.play(*(stepped.report(behavior_id, [1, 2], matches=[5, 6]) for behavior_id in PAIR))
    assert players == {ONE: [LATEST, 8], TWO: [7, LATEST]}
    stepped.play(
        *(stepped.report(behavior_id, [1, 2], [1, 2], matches=[7, 8], outcomes=[1, 0]) for behavior_id in PAIR)
    )
    for part in stepped.parts:
        reader.read(part)
    ended = [(episode.team, reader.matchups[episode.agent], len(episode.steps)) for episode in reader.past]
    assert sorted(ended) == [(0, 1, 2), (1, 2, 1)]
    assert [matchup for matchup, *_ in stepped.results] == [1, 2]


def test_a_new_reader_receives_the_matchups_of_learning_agents_only() -> None:
    stepped = SteppedMatches(first(1, A1=7))
    stepped.play(*(stepped.report(behavior_id, [1], matches=[5]) for behavior_id in PAIR))
    stepped.assign(second(2, A0=8))
    stepped.play(*(stepped.report(behavior_id, [1, 2], matches=[5, 6]) for behavior_id in PAIR))
    stepped.parts.clear()
    stepped.stepper.reintroduce_agents()
    stepped.tick()
    ((part),) = stepped.parts
    assert part.joined is not None
    assert part.joined.matchups is not None
    assert sorted(zip(part.joined.teams.tolist(), part.joined.matchups.tolist(), strict=True)) == [(0, 1), (1, 2)]


def test_a_tick_of_ghosts_alone_reports_their_count_of_steps_only() -> None:
    stepped = SteppedMatches(first(1, A1=7))
    stepped.play(stepped.report(TWO, [1, 2]))
    stepped.parts.clear()
    stepped.play(stepped.report(TWO, [1, 2], [1]))
    stepped.stepper.disconnect(0)
    stepped.tick()
    assert stepped.parts
    for part in stepped.parts:
        assert [part.lost, part.ended, part.joined, part.reported, part.acted] == [None] * 5
        assert (part.completed.sum(), part.rows.sum()) == (0, 0)
    assert stepped.stepper.state()["A"].ghosts == 2


def test_a_name_without_self_play_has_no_matchups_and_no_results() -> None:
    """It needs no assignment either, beside a name under self-play."""
    stepped = SteppedMatches(names=["A"], behavior_ids=("B",))
    assert stepped.play(stepped.report("B", [1, 2])) == {"B": [LATEST, LATEST]}
    stepped.connect(1, ("B", ONE))
    stepped.assign(first(1))
    stepped.play(stepped.report("B", [1], groups=[1]), stepped.report(ONE, [1], groups=[1]), key=1)
    stepped.play(stepped.report("B", [1], [1], groups=[1]), stepped.report(ONE, [1], [1], groups=[1]), key=1)
    parts = [part for part in stepped.parts if part.behavior == "B"]
    assert parts
    assert all(part.joined is None or part.joined.matchups is None for part in parts)
    assert stepped.stepper.state()["B"].ghosts == 0
    assert stepped.results == [(1, 1, [(ONE, 0.5, 0, 0.0)])]
