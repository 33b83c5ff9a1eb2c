"""Segments hold what agents carried to the first step of each sequence: here their id and decisions so far."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.assembly.assembler import Assembler
from sparring.pipeline.assembly.members import Sizes
from sparring.pipeline.assembly.ticks import count_alike
from sparring.pipeline.messages.codec import decode, encode
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.steps import ActionsChosen, AgentsEnded, AgentsStarted, BehaviorSteps, OutcomesReported
from tests.assembly.assembly_world import BehaviorTick, steps_of

MANY = 10**6


class ActingAgents:
    """Agents in slots 0, 1, ... that all decide and act in every tick.

    With `carrying` each agent carries its id and its count of decisions.
    """

    def __init__(self, agents: int, *, carrying: bool = True) -> None:
        self.agent_episodes = [0] * agents
        self.decisions = [0] * agents
        self.carrying = carrying
        self.produced = 0
        self.number = 0
        self._started = 0

    def tick(self, *ended: int, order: Iterable[int] | None = None, rejoin: bool = False) -> BehaviorTick:
        """Returns a tick in which agents of slots `ended` end and others begin there; rows have `order`."""
        self.number += 1
        slots = list(range(len(self.agent_episodes)) if order is None else order)
        fresh = list(ended) if self._started else slots
        completed, before = len(slots) if self._started else 0, self.produced
        self.produced += completed
        for slot in fresh:
            self._started += 1
            self.agent_episodes[slot], self.decisions[slot] = self._started, 0
        carried = np.array([[self.agent_episodes[slot], self.decisions[slot]] for slot in slots], np.float32)
        for slot in slots:
            self.decisions[slot] += 1
        return BehaviorTick(
            number=self.number,
            produced_before=before,
            completed=completed,
            lost=None,
            ended=self._ended(ended) if ended else None,
            joined=self._joined(slots if rejoin else fresh, fresh) if fresh or rejoin else None,
            reported=OutcomesReported(
                slots=np.array(slots, np.int32),
                observations=(carried[:, 1:],),
                rewards=np.zeros(len(slots), np.float32),
            ),
            acted=ActionsChosen(
                slots=np.array(slots, np.int32),
                log_probs=np.zeros(len(slots), np.float32),
                versions=np.zeros(len(slots), np.int64),
                continuous=carried,
                carried=carried if self.carrying else None,
            ),
        )

    def _ended(self, slots: tuple[int, ...]) -> AgentsEnded:
        n = len(slots)
        return AgentsEnded(
            slots=np.array(slots, np.int32),
            observations=(np.full((n, 1), -1, np.float32),),
            rewards=np.zeros(n, np.float32),
            interrupted=np.zeros(n, bool),
        )

    def _joined(self, slots: list[int], fresh: list[int]) -> AgentsStarted:
        n = len(slots)
        return AgentsStarted(
            slots=np.array(slots, np.int32),
            agents=np.array([self.agent_episodes[slot] for slot in slots], np.int64),
            groups=np.zeros(n, np.int64),
            teams=np.zeros(n, np.int32),
            simulators=np.zeros(n, np.int32),
            fresh=np.isin(slots, fresh),
        )


def assembler_of(horizon: int, sequence: int, largest: int = MANY) -> Assembler:
    sizes = Sizes(horizon=horizon, message_steps=min(MANY, largest), largest=largest, sequence=sequence)
    return Assembler("s.1", "a.1", lambda _: sizes, in_groups=lambda _: False)


def transmitted(messages: Iterable[Segments]) -> list[Segments]:
    return [decode([bytes(frame) for frame in encode(message)]) for message in messages]


def check(message: Segments, sequence: int) -> list[list[list[float]]]:
    """Returns what was carried to each sequence, by segment, and compares it with the actions, which hold the same."""
    assert message.carried is not None
    carried: list[list[float]] = message.carried.tolist()
    out, row = [], 0
    for length, episode in zip(message.lengths.tolist(), message.agents.tolist(), strict=True):
        expected = message.continuous[row : row + length : sequence].tolist()
        out.append([carried.pop(0) for _ in expected])
        assert out[-1] == expected
        assert {first for first, _ in expected} == {episode}
        row += length
    assert not carried
    return out


def alike(assembler: Assembler, part: BehaviorSteps, first: int) -> int:
    members = assembler.of("B")
    return count_alike(part, first, members.live, members.horizon)


def check_flush(assembler: Assembler, sequence: int) -> list[list[list[float]]]:
    (message,) = transmitted(assembler.flush("B", 1))
    return check(message, sequence)


def test_each_sequence_of_a_segment_has_one_carried_row() -> None:
    """Seven steps in sequences of three begin at 0, 3 and 6; the decision under way has no row."""
    acting, assembler = ActingAgents(1), assembler_of(horizon=100, sequence=3)
    for _ in range(8):
        assembler.apply([steps_of([acting.tick()])])
    assert check_flush(assembler, 3) == [[[1, 0], [1, 3], [1, 6]]]


def test_each_segment_begins_a_sequence() -> None:
    """A horizon or a flush also ends a sequence; the next segment holds what was carried to its first step."""
    acting, assembler = ActingAgents(1), assembler_of(horizon=5, sequence=3)
    for _ in range(9):
        assembler.apply([steps_of([acting.tick()])])
    assert check_flush(assembler, 3) == [[[1, 0], [1, 3]], [[1, 5]]]  # 5 steps and 3
    for _ in range(4):
        assembler.apply([steps_of([acting.tick()])])
    assert check_flush(assembler, 3) == [[[1, 8], [1, 11]]]


def test_an_agent_in_a_reused_slot_has_its_own_rows() -> None:
    """An agent that ends and one that begins in its slot share no row, not even in one tick."""
    acting, assembler = ActingAgents(2), assembler_of(horizon=100, sequence=2)
    for ended in ([], [], [], [1], [], []):
        assembler.apply([steps_of([acting.tick(*ended)])])
    assert check_flush(assembler, 2) == [[[2, 0], [2, 2]], [[1, 0], [1, 2], [1, 4]], [[3, 0]]]


def test_messages_hold_the_rows_of_their_own_segments() -> None:
    """Each message holds the rows of its own sequences, however small it is."""
    acting, assembler = ActingAgents(5), assembler_of(horizon=100, sequence=2, largest=4)
    for _ in range(9):
        assembler.apply([steps_of([acting.tick()])])
    messages = transmitted(assembler.flush("B", 1))
    assert len(messages) == 10
    assert [check(message, 2) for message in messages[:5]] == [
        [[[episode, 0], [episode, 2]]] for episode in range(1, 6)
    ]
    assert [check(message, 2) for message in messages[5:]] == [
        [[[episode, 4], [episode, 6]]] for episode in range(1, 6)
    ]


def test_a_new_assembler_begins_with_presently_carried_numbers() -> None:
    """After a restart of assembly the first sequence begins in the middle of an agent episode."""
    acting, assembler = ActingAgents(2), assembler_of(horizon=100, sequence=2)
    for _ in range(6):
        acting.tick()
    for rejoin in (True, False, False, False):
        assembler.apply([steps_of([acting.tick(rejoin=rejoin)])])
    assert check_flush(assembler, 2) == [[[1, 6], [1, 8]], [[2, 6], [2, 8]]]


def test_rows_stay_with_their_agents_while_the_log_is_reused() -> None:
    """Open and finished segments keep their rows while 3,000 rows pass through a log of a few hundred."""
    rng = random.Random(3)
    acting, assembler = ActingAgents(10), assembler_of(horizon=7, sequence=3, largest=40)
    kept = agent_episodes = 0
    for tick in range(300):
        order = rng.sample(range(10), 10)
        ended = rng.sample(range(10), 2) if tick and rng.random() < 0.3 else []
        assembler.apply([steps_of([acting.tick(*ended, order=order)])])
        for message in transmitted(assembler.ready_messages()):
            segments = check(message, 3)
            kept += sum(map(len, segments))
            agent_episodes += len(segments)
    assert assembler.of("B").log.capacity <= 512
    assert kept > 800
    assert agent_episodes > 400


@settings(max_examples=30, deadline=None)
@given(
    agents=st.integers(1, 20),
    horizon=st.integers(1, 12),
    sequence=st.integers(1, 8),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    data=st.data(),
)
def test_ticks_applied_together_leave_the_rows_of_single_ticks(
    agents: int, horizon: int, sequence: int, sizes: list[int], data: Any
) -> None:
    """Steps of the same agents have the same carried rows either way."""
    acting, (together, alone) = ActingAgents(agents), (assembler_of(horizon, sequence) for _ in range(2))
    fast = 0
    for size in sizes:
        ended = data.draw(st.sets(st.integers(0, agents - 1), max_size=2)) if acting.number else set()
        ticks = [acting.tick(*(ended if index == 0 else ())) for index in range(size)]
        part = steps_of(ticks)
        if size > 2:
            together.apply([steps_of(ticks[:1])])
            part = steps_of(ticks[1:])
            fast += alike(together, part, 0) > 1
        together.apply([part])
        for tick in ticks:
            alone.apply([steps_of([tick])])
    assert fast or horizon == 1 or max(sizes) <= 2
    (ours,), (theirs,) = together.flush("B", 1), alone.flush("B", 1)
    assert check(ours, sequence) == check(theirs, sequence)
    assert ours.carried is not None
    assert theirs.carried is not None
    assert ours.carried.tobytes() == theirs.carried.tobytes()


@pytest.mark.parametrize("sequence", [0, 1, 5])
def test_segments_without_memory_have_no_carried_column(sequence: int) -> None:
    """The column is None on both paths through the assembler, and after the codec."""
    acting, assembler = ActingAgents(3, carrying=False), assembler_of(horizon=4, sequence=sequence)
    assembler.apply([steps_of([acting.tick()])])
    part = steps_of([acting.tick() for _ in range(5)])
    assert alike(assembler, part, 0) > 1
    assembler.apply([part])
    assembler.apply([steps_of([acting.tick(1)])])
    messages = transmitted(assembler.flush("B", 1))
    assert [message.carried for message in messages] == [None] * len(messages)
    assert sum(len(message.log_probs) for message in messages) == 18


def test_a_message_without_segments_has_no_rows() -> None:
    """A message is empty before the first step, and after everything was sent."""
    acting, assembler = ActingAgents(2), assembler_of(horizon=4, sequence=2)
    assert assembler.announcement("B").carried is None
    for _ in range(3):
        assembler.apply([steps_of([acting.tick()])])
    check_flush(assembler, 2)
    (empty,) = transmitted(assembler.flush("B", 2))
    assert empty.carried is not None
    assert empty.carried.shape == (0, 2)
