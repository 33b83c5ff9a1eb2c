"""What agents carried to the first step of each sequence, where that can be read: whose life, and decisions so far."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.assembly.assembler import Assembler, Sizes
from sparring.pipeline.messages.codec import decode, encode
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.steps import ActionsChosen, AgentsEnded, AgentsStarted, OutcomesReported
from tests.assembly.assembly_world import BehaviorTick, told

MANY = 10**6


class Crew:
    """Agents in slots 0, 1, ... that all decide and act in every tick.

    Each carries the number of its life and its decisions so far.

    Args:
        agents: how many.
        carrying: whether they carry anything.
    """

    def __init__(self, agents: int, *, carrying: bool = True) -> None:
        self.agent_episodes = [0] * agents
        self.decisions = [0] * agents
        self.carrying = carrying
        self.produced = 0
        self.number = 0
        self._born = 0

    def wake(self, *ended: int, order: Iterable[int] | None = None, rejoin: bool = False) -> BehaviorTick:
        """A tick in which the lives in slots `ended` end and others begin there; rows come in `order`."""
        self.number += 1
        slots = list(range(len(self.agent_episodes)) if order is None else order)
        fresh = list(ended) if self._born else slots
        completed, before = len(slots) if self._born else 0, self.produced
        self.produced += completed
        for slot in fresh:
            self._born += 1
            self.agent_episodes[slot], self.decisions[slot] = self._born, 0
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


def made(horizon: int, sequence: int, largest: int = MANY) -> Assembler:
    return Assembler(
        "B", "s.1", "a.1", Sizes(horizon=horizon, message_steps=min(MANY, largest), largest=largest, sequence=sequence)
    )


def over_the_wire(messages: Iterable[Segments]) -> list[Segments]:
    return [decode([bytes(frame) for frame in encode(message)]) for message in messages]


def check(message: Segments, sequence: int) -> list[list[list[float]]]:
    """What was carried to each sequence, segment by segment; compared with the rows, which hold the same by the way."""
    assert message.carried is not None
    carried: list[list[float]] = message.carried.tolist()
    out, row = [], 0
    for length, life in zip(message.lengths.tolist(), message.agents.tolist(), strict=True):
        expected = message.continuous[row : row + length : sequence].tolist()
        out.append([carried.pop(0) for _ in expected])
        assert out[-1] == expected
        assert {first for first, _ in expected} == {life}
        row += length
    assert not carried
    return out


def one_cut(assembler: Assembler, sequence: int) -> list[list[list[float]]]:
    (message,) = over_the_wire(assembler.flush(1))
    return check(message, sequence)


def test_a_row_for_the_first_step_of_a_segment_and_every_few_from_there() -> None:
    """Seven steps in sequences of three begin at 0, 3 and 6, and the decision under way is not one of them."""
    crew, assembler = Crew(1), made(horizon=100, sequence=3)
    for _ in range(8):
        assembler.apply(told([crew.wake()]))
    assert one_cut(assembler, 3) == [[[1, 0], [1, 3], [1, 6]]]


def test_sequences_begin_anew_with_each_segment() -> None:
    """A horizon or a cut ends a sequence too; what was carried to the next segment's first step comes with that."""
    crew, assembler = Crew(1), made(horizon=5, sequence=3)
    for _ in range(9):
        assembler.apply(told([crew.wake()]))
    assert one_cut(assembler, 3) == [[[1, 0], [1, 3]], [[1, 5]]]  # 5 steps and 3
    for _ in range(4):
        assembler.apply(told([crew.wake()]))
    assert one_cut(assembler, 3) == [[[1, 8], [1, 11]]]


def test_a_life_that_begins_in_a_used_slot_begins_with_its_own() -> None:
    """An agent that ends and one that begins in its slot share no row, in one tick either."""
    crew, assembler = Crew(2), made(horizon=100, sequence=2)
    for ended in ([], [], [], [1], [], []):
        assembler.apply(told([crew.wake(*ended)]))
    assert one_cut(assembler, 2) == [[[2, 0], [2, 2]], [[1, 0], [1, 2], [1, 4]], [[3, 0]]]


def test_messages_bring_what_belongs_to_their_own_segments() -> None:
    """However small messages are, each holds the rows of just its sequences."""
    crew, assembler = Crew(5), made(horizon=100, sequence=2, largest=4)
    for _ in range(9):
        assembler.apply(told([crew.wake()]))
    messages = over_the_wire(assembler.flush(1))
    assert len(messages) == 10
    assert [check(message, 2) for message in messages[:5]] == [[[[life, 0], [life, 2]]] for life in range(1, 6)]
    assert [check(message, 2) for message in messages[5:]] == [[[[life, 4], [life, 6]]] for life in range(1, 6)]


def test_a_new_assembler_begins_with_what_agents_carry_by_then() -> None:
    """After a restart of assembly, agents go on: the first sequence is theirs from the middle of a life."""
    crew, assembler = Crew(2), made(horizon=100, sequence=2)
    for _ in range(6):
        crew.wake()
    for again in (True, False, False, False):
        assembler.apply(told([crew.wake(rejoin=again)]))
    assert one_cut(assembler, 2) == [[[1, 6], [1, 8]], [[2, 6], [2, 8]]]


def test_rows_stay_with_their_agents_while_the_log_is_given_up_many_times() -> None:
    """Over 3,000 rows in a log of a few hundred, open and finished segments keep what was carried to them."""
    rng = random.Random(3)
    crew, assembler = Crew(10), made(horizon=7, sequence=3, largest=40)
    kept = agent_episodes = 0
    for tick in range(300):
        order = rng.sample(range(10), 10)
        ended = rng.sample(range(10), 2) if tick and rng.random() < 0.3 else []
        assembler.apply(told([crew.wake(*ended, order=order)]))
        for message in over_the_wire(assembler.ready_messages()):
            segments = check(message, 3)
            kept += sum(map(len, segments))
            agent_episodes += len(segments)
    assert assembler.block.log.capacity <= 512
    assert kept > 800
    assert agent_episodes > 400


@settings(max_examples=60, deadline=None)
@given(
    agents=st.integers(1, 20),
    horizon=st.integers(1, 12),
    sequence=st.integers(1, 8),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    data=st.data(),
)
def test_wake_ups_that_are_alike_leave_what_one_by_one_leaves(
    agents: int, horizon: int, sequence: int, sizes: list[int], data: Any
) -> None:
    """Taken together or alone, steps of the same agents have the same rows carried to their sequences."""
    crew, (together, alone) = Crew(agents), (made(horizon, sequence) for _ in range(2))
    fast = 0
    for size in sizes:
        ended = data.draw(st.sets(st.integers(0, agents - 1), max_size=2)) if crew.number else set()
        ticks = [crew.wake(*(ended if index == 0 else ())) for index in range(size)]
        part = told(ticks)
        if size > 2:
            together.apply(told(ticks[:1]))
            part = told(ticks[1:])
            fast += together.alike(part, 0) > 1
        together.apply(part)
        for tick in ticks:
            alone.apply(told([tick]))
    assert fast or horizon == 1 or max(sizes) <= 2
    (ours,), (theirs,) = together.flush(1), alone.flush(1)
    assert check(ours, sequence) == check(theirs, sequence)
    assert ours.carried is not None
    assert theirs.carried is not None
    assert ours.carried.tobytes() == theirs.carried.tobytes()


@pytest.mark.parametrize("sequence", [0, 1, 5])
def test_where_nothing_is_carried_segments_have_no_such_column(sequence: int) -> None:
    """None, by either way through the assembler and over the wire."""
    crew, assembler = Crew(3, carrying=False), made(horizon=4, sequence=sequence)
    assembler.apply(told([crew.wake()]))
    part = told([crew.wake() for _ in range(5)])
    assert assembler.alike(part, 0) > 1
    assembler.apply(part)
    assembler.apply(told([crew.wake(1)]))
    messages = over_the_wire(assembler.flush(1))
    assert [message.carried for message in messages] == [None] * len(messages)
    assert sum(len(message.log_probs) for message in messages) == 18


def test_a_message_without_segments_has_no_rows() -> None:
    """Empty messages carry none: before the first step, and after everything was sent."""
    crew, assembler = Crew(2), made(horizon=4, sequence=2)
    assert assembler.greeting().carried is None
    for _ in range(3):
        assembler.apply(told([crew.wake()]))
    one_cut(assembler, 2)
    (empty,) = over_the_wire(assembler.flush(2))
    assert empty.carried is not None
    assert empty.carried.shape == (0, 2)
