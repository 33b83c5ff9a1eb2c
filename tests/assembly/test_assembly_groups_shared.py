"""The last group reward before a member's end may be reported by the remaining members alone."""

from __future__ import annotations

import numpy as np
import pytest

from sparring.pipeline.assembly.assembler import Assembler
from sparring.pipeline.assembly.members import Sizes
from sparring.pipeline.messages.steps import ActionsChosen, AgentsEnded, AgentsStarted, BehaviorSteps, OutcomesReported


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def slots(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def assembler_after_end(
    shared_at_end: np.ndarray | None, shared_at_decision: float, first_decides_again: bool
) -> Assembler:
    """Returns an assembler after agents 1 and 2 decide, agent 1 ends as agent 2 decides again, and agent 2 ends.

    With `first_decides_again` agent 2 decides once more in between, and reports a group reward of 3.
    """
    decided = [slots(0, 1), slots(1), slots(1)] if first_decides_again else [slots(0, 1), slots(1)]
    shared = [floats(0, 0), floats(3), floats(shared_at_decision)]
    if not first_decides_again:
        del shared[1]
    ticks = len(decided) + 1
    rows = np.zeros((ticks, 5), np.int32)
    rows[:-1, 3] = rows[:-1, 4] = [len(who) for who in decided]
    rows[0, 2] = 2
    rows[-2:, 1] = 1
    completed = [0, *(len(who) for who in decided[1:]), 1]
    completed[-2] += 1
    n = sum(map(len, decided))
    part = BehaviorSteps(
        behavior="B",
        produced_before=0,
        ticks=np.arange(1, ticks + 1),
        completed=np.array(completed),
        rows=rows,
        ended=AgentsEnded(
            slots=slots(0, 1),
            observations=(np.zeros((2, 1), np.float32),),
            rewards=floats(0, 0),
            group_rewards=shared_at_end,
            interrupted=np.zeros(2, bool),
        ),
        joined=AgentsStarted(
            slots=slots(0, 1),
            agents=np.array([1, 2]),
            groups=np.array([7, 7]),
            teams=slots(0, 0),
            simulators=slots(0, 0),
            fresh=np.ones(2, bool),
        ),
        reported=OutcomesReported(
            slots=np.concatenate(decided),
            observations=(np.zeros((n, 1), np.float32),),
            rewards=np.zeros(n, np.float32),
            group_rewards=np.concatenate(shared),
        ),
        acted=ActionsChosen(
            slots=None,
            log_probs=np.zeros(n, np.float32),
            versions=np.ones(n, np.int64),
            discrete=np.zeros((n, 1), np.int32),
        ),
    )
    assembler = Assembler("s", "o", lambda _: Sizes(horizon=8, message_steps=1, largest=1000), in_groups=lambda _: True)
    assembler.apply([part])
    return assembler


@pytest.mark.parametrize(
    "shared_at_end", [floats(0, 0), None, floats(1, 0)], ids=["nothing", "no column", "reported too"]
)
def test_reports_of_remaining_members_count(shared_at_end: np.ndarray | None) -> None:
    (message,) = assembler_after_end(shared_at_end, 1.0, first_decides_again=False).rest()
    assert message.shared is not None
    assert message.shared.rewards.tolist() == [1, 0]
    assert message.episodes.group_returns.tolist() == [1]


@pytest.mark.parametrize("shared_at_end", [floats(0, 0), None], ids=["nothing", "no column"])
def test_an_ending_member_does_not_undo_reported_rewards(shared_at_end: np.ndarray | None) -> None:
    (message,) = assembler_after_end(shared_at_end, 1.0, first_decides_again=True).rest()
    assert message.shared is not None
    assert message.shared.rewards.tolist() == [3, 1, 0]
    assert message.episodes.group_returns.tolist() == [4]
