"""What a group gets in the report in which a member ends may be heard by those alone that go on."""

from __future__ import annotations

import numpy as np
import pytest

from sparring.pipeline.assembly.assembler import Sizes
from sparring.pipeline.assembly.group_assembler import GroupAssembler
from sparring.pipeline.messages.steps import ActionsChosen, AgentsEnded, AgentsStarted, BehaviorSteps, OutcomesReported


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def slots(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def assembled(heard_at_end: np.ndarray | None, heard_at_decision: float, first_decides_again: bool) -> GroupAssembler:
    """Agents 1 and 2 of a group decide; agent 1 ends while agent 2 decides again, and then ends.

    With `first_decides_again` agent 2 has decided once more since agent 1 did, and the group had got 3 by then.
    """
    decided = [slots(0, 1), slots(1), slots(1)] if first_decides_again else [slots(0, 1), slots(1)]
    heard = [floats(0, 0), floats(3), floats(heard_at_decision)]
    if not first_decides_again:
        del heard[1]
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
            group_rewards=heard_at_end,
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
            group_rewards=np.concatenate(heard),
        ),
        acted=ActionsChosen(
            slots=None,
            log_probs=np.zeros(n, np.float32),
            versions=np.ones(n, np.int64),
            discrete=np.zeros((n, 1), np.int32),
        ),
    )
    assembler = GroupAssembler("s", "o", lambda _: Sizes(horizon=8, message_steps=1, largest=1000))
    assembler.apply([part])
    return assembler


@pytest.mark.parametrize("heard_at_end", [floats(0, 0), None, floats(1, 0)], ids=["nothing", "no column", "it too"])
def test_those_that_go_on_are_believed(heard_at_end: np.ndarray | None) -> None:
    (message,) = assembled(heard_at_end, 1.0, first_decides_again=False).rest()
    assert message.shared is not None
    assert message.shared.rewards.tolist() == [1, 0]
    assert message.episodes.group_returns.tolist() == [1]


@pytest.mark.parametrize("heard_at_end", [floats(0, 0), None], ids=["nothing", "no column"])
def test_who_ends_takes_nothing_back_that_others_have_heard_of(heard_at_end: np.ndarray | None) -> None:
    (message,) = assembled(heard_at_end, 1.0, first_decides_again=True).rest()
    assert message.shared is not None
    assert message.shared.rewards.tolist() == [3, 1, 0]
    assert message.episodes.group_returns.tolist() == [4]
