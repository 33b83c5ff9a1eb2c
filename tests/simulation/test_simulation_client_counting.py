"""The simulator's own step count equals that of a slow twin."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sparring.pipeline.messages.simulator import BehaviorReport
from sparring.pipeline.simulation.counting import StepCounter
from sparring.pipeline.simulation.game import decisions, ends

AGENTS = st.lists(st.integers(0, 5), unique=True)
FRAMES = st.lists(st.tuples(st.sampled_from(["act", "reset"]), st.tuples(AGENTS, AGENTS), st.tuples(AGENTS, AGENTS)))
BEHAVIORS = ("A?team=0", "A?team=1")


def report(behavior: str, decided: list[int], ended: list[int]) -> BehaviorReport:
    return BehaviorReport(
        behavior=behavior,
        decisions=decisions(decided, np.zeros((len(decided), 1))) if decided else None,
        ends=ends(ended, np.zeros((len(ended), 1))) if ended else None,
    )


@given(FRAMES)
def test_a_step_is_a_decision_with_an_action_whose_outcome_was_sent(frames: list) -> None:
    """It counts once per open agent with a row in a report, for any order of decisions, ends and resets."""
    counter, waiting, expected = StepCounter(), set(), 0
    for answer, *rows in frames:
        reports = [report(key, *columns) for key, columns in zip(BEHAVIORS, rows, strict=True)]
        counter.count_report(reports)
        for key, (decided, ended) in zip(BEHAVIORS, rows, strict=True):
            reported = {(key, agent) for agent in (*decided, *ended)}
            expected += len(waiting & reported)
            waiting -= reported
        if answer == "reset":
            counter.discard_open()
            waiting = set()
            continue
        for key, (decided, _) in zip(BEHAVIORS, rows, strict=True):
            counter.add_open(key, np.array(decided, np.int64))
            waiting |= {(key, agent) for agent in decided}
    assert counter.steps.get("A", 0) == expected


def test_a_game_may_reuse_its_arrays_of_ids() -> None:
    """The counter copies the ids that got an action."""
    counter, ids = StepCounter(), np.array([1, 2])
    counter.add_open("A?team=0", ids)
    ids[:] = 7
    counter.count_report([report("A?team=0", [1], [2])])
    assert counter.steps == {"A": 2}
