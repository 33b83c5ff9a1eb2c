"""How large messages of groups are, how they are divided, what a cut sends, and what the log holds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from sparring.pipeline.assembly.assembler import Sizes
from sparring.pipeline.assembly.group_assembler import GroupAssembler
from sparring.pipeline.assembly.log import StepLog
from sparring.pipeline.errors import ServiceError
from sparring.pipeline.messages.codec import encode
from sparring.pipeline.messages.steps import ActionsChosen, AgentsStarted, BehaviorSteps, OutcomesReported
from tests.assembly.group_pair import GroupPair, play
from tests.assembly.group_story import Story
from tests.assembly.group_world import GroupWorld, Kind

MANY = 10**6

# ---------------------------------------------------------------- what fits into a message


def test_a_group_of_just_as_many_as_fit_is_sent_and_a_larger_one_refused() -> None:
    """One group time of a group cannot be divided."""
    letters = "a b c d e"
    story = Story(largest=5).tell("+a +b +c +d +e", letters)
    assert [len(line.split()) for line in story.told(story.assembler.ready_messages(), "A")] == [12]
    story = Story(largest=4).tell("+a +b +c +d +e", letters)
    with pytest.raises(ServiceError, match=r"got 5 steps of one group at once for A; expected at most 4; raise .*"):
        story.rest()


def test_mates_count_too() -> None:
    story = Story(largest=4).tell("+a +b +c +x +y", "a b c x y")
    with pytest.raises(ServiceError, match="got 5 steps of one group"):
        story.rest()
    story = Story(largest=5).tell("+a +b +c +x +y", "a b c x y")
    assert story.rest() == ["0: a1 b1 c1 x1 y1 | a2 b2 c2 x2 y2"]
    assert [message.behavior for message in story.messages] == ["A", "B"]


@pytest.mark.parametrize(("largest", "spans"), [(4, [1, 1, 1, 1]), (6, [2, 2]), (9, [3, 1]), (100, [4])])
def test_a_group_segment_closes_before_it_is_too_large(largest: int, spans: list[int]) -> None:
    """At the last time at which one more is sure to fit; what is left is closed by a cut."""
    story = Story(largest=largest).tell("+a +b +x", *["a b x"] * 4)
    story.flush()
    told = [message.shared for message in story.messages if message.behavior == "A"]
    assert [span for shared in told if shared is not None for span in shared.spans.tolist()] == spans
    assert all(len(message.log_probs) <= largest for message in story.messages)


def test_members_that_are_gone_take_room_too() -> None:
    """The rows of `a` and `b` are in the segment until it closes."""
    story = Story(largest=6).tell("+a +b +c", "a b c", "a. b. c +d", "c d")
    story.flush()
    assert [len(message.log_probs) for message in story.messages] == [6, 2]


def test_a_message_holds_as_many_groups_as_fit_own_steps_and_mates() -> None:
    """Groups of two own steps and one of a mate, in messages of seven: two groups each."""
    story = Story(largest=7)
    groups = [("a", "b", "n"), ("c", "d", "o"), ("e", "f", "p"), ("g", "h", "q"), ("i", "j", "r")]
    story.tell(" ".join(f"+{one}@{key}" for key, group in enumerate(groups, 1) for one in group))
    story.tell(" ".join(one for group in groups for one in group))
    story.flush()
    assert [len(m.log_probs) for m in story.messages if m.behavior == "A"] == [4, 4, 2]
    assert [m.flush for m in story.messages if m.behavior == "A"] == [0, 0, 1]
    assert [m.flush for m in story.messages if m.behavior == "B"] == [0, 0, 0]


# ---------------------------------------------------------------- cuts


def test_a_cut_closes_all_groups_in_which_the_name_has_steps_and_no_others() -> None:
    """Of mates too, and those of which its last member is gone; what else is finished leaves with them."""
    story = Story().tell("+a +x +b@2 +y@2 +z@3", "a x b. y z", "a x y z")
    closed = list(story.assembler.flush("A", 7))
    assert [(message.behavior, message.flush) for message in closed] == [("A", 7), ("B", 0)]
    assert sorted(story.told(closed[:1], "A")) == ["0 0: a1 x1 | a2 x2 | a3 x3", "0 0: b1 y1 | y2 | y3 b."]
    assert len(story.told(closed[1:], "B")) == 2
    assert (story.assembler.of("A").open_steps, story.assembler.of("B").open_steps) == (0, 2)
    assert story.flush("B") == ["0 0: z1 | z2 | z3"]


def test_a_cut_is_answered_where_there_is_nothing() -> None:
    """Before the first step, twice in a row, and for a name that nobody has heard of."""
    story = Story()
    for serial, name in enumerate(["A", "B", "A"], 1):
        (message,) = story.assembler.flush(name, serial)
        assert (message.behavior, message.flush, len(message.log_probs)) == (name, serial, 0)
        encode(message)
    story.tell("+a", "a")
    assert story.flush() == ["0: a1 | a2"]
    assert story.flush() == []
    assert [message.flush for message in story.messages] == [1, 1]


# ---------------------------------------------------------------- what was carried


def test_sequences_are_windows_of_group_time() -> None:
    """A slow member's begins with its first decision in each window; a segment begins one at any rate."""
    story = Story(sequence=2).tell("+a +b", "a", "a b", "a", "a", "a b", "a b")
    assert story.flush() == ["0 0 0 0 0 0: a1 b1 | a2 b1 | a3 b3 | a4 b3 | a5 b3 | a6 b6 | a7 b7"]
    (message,) = story.messages
    assert message.carried is not None
    numbers = [(int(number) // 100, int(number) % 100) for (number,) in message.carried.tolist()]
    assert [tick for tick, letter in numbers if letter == 0] == [1, 3, 5]
    assert [tick for tick, letter in numbers if letter == 1] == [1, 3, 6]
    assert len(numbers) == 6


def test_where_nothing_is_carried_there_is_no_such_column() -> None:
    story = Story().tell("+a", "a")
    story.flush()
    assert story.messages[0].carried is None


# ---------------------------------------------------------------- bytes


def wide(group: int, ticks: int, *, agents: int = 64, names: tuple[str, ...] = ("A",)) -> dict[str, float]:
    """Bytes on the wire for each step of `agents` that all decide in every tick, in groups of `group`, by name."""
    sizes = Sizes(horizon=16, message_steps=MANY, largest=MANY, sequence=0)
    assembler = GroupAssembler("s.1", "a.1", lambda _: sizes)
    for tick in range(ticks):
        assembler.apply([_everybody(name, tick, agents // len(names), group // len(names)) for name in names])
    sent, steps = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    for message in assembler.rest():
        sent[message.behavior] += sum(memoryview(frame).nbytes for frame in encode(message))
        steps[message.behavior] += len(message.log_probs)
    assert list(steps.values()) == [agents // len(names) * (ticks - 1)] * len(names)
    return {name: sent[name] / steps[name] for name in names}


def _everybody(name: str, tick: int, n: int, group: int) -> BehaviorSteps:
    slots: Any = np.arange(n, dtype=np.int32)
    keys = slots // group + 1
    joined = None
    if not tick:
        joined = AgentsStarted(
            slots=slots,
            agents=slots.astype(np.int64),
            groups=keys.astype(np.int64),
            teams=0 * slots,
            simulators=0 * slots,
            fresh=slots >= 0,
        )
    return BehaviorSteps(
        behavior=name,
        produced_before=n * max(0, tick - 1),
        ticks=np.array([tick]),
        completed=np.array([n if tick else 0]),
        rows=np.array([[0, 0, 0 if joined is None else n, n, n]], np.int32),
        joined=joined,
        reported=OutcomesReported(
            slots=slots,
            observations=(np.zeros((n, 8), np.float32),),
            rewards=np.ones(n, np.float32),
            group_rewards=None,
        ),
        acted=ActionsChosen(
            slots=None,
            log_probs=np.zeros(n, np.float32),
            versions=np.zeros(n, np.int64),
            continuous=np.zeros((n, 2), np.float32),
        ),
    )


@pytest.mark.parametrize("names", [("A",), ("A", "B")])
def test_bytes_of_a_step_do_not_grow_with_the_group(names: tuple[str, ...]) -> None:
    """Groups of 2, 8 and 32 members: what mates did is sent once for all of them, within 20 %."""
    for name in names:
        sizes = [wide(group, 65, names=names)[name] for group in (2, 8, 32)]
        assert max(sizes) <= 1.2 * min(sizes), sizes


# ---------------------------------------------------------------- the log


def test_rows_are_given_up_while_members_that_are_gone_and_unsent_pieces_hold_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a long run the log moves what is needed to its front, many times; nothing that is told changes by it."""
    kind = Kind(names=("A", "B"), groups=2, churn=0.1, moving=0.03, slow=2, losing=0.01, apart=True, carried=(1, 0, 0))
    sizes = {
        "A": Sizes(horizon=9, message_steps=150, largest=400, sequence=3),
        "B": Sizes(horizon=7, message_steps=200, largest=500),
    }
    pair, world = GroupPair(sizes), GroupWorld(random.Random(5), kind)
    held: list[tuple[bool, bool]] = []
    keep = StepLog.keep

    def watched(log: StepLog, needed: Any, room: int) -> Any:
        (block,) = [one.block for one in pair.assembler.members.values() if one.block.log is log]
        held.append((any(len(stays.rows) for stays in block.departed), bool(block.closed_stays)))
        return keep(log, needed, room)

    monkeypatch.setattr(StepLog, "keep", watched)
    play(pair, world, 300, 0.02)
    pair.finish()
    pair.compare()
    assert held.count((True, True)) >= 4
    for one in pair.assembler.members.values():
        assert one.received > 1200
        assert one.block.log.capacity <= 1024
