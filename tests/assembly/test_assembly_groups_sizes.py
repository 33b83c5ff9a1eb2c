"""Messages of groups: their size and division, what a flush sends, and what the log holds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from sparring.pipeline.assembly.assembler import Assembler
from sparring.pipeline.assembly.log import StepLog
from sparring.pipeline.assembly.members import Sizes
from sparring.pipeline.errors import ServiceError
from sparring.pipeline.messages.codec import encode
from sparring.pipeline.messages.steps import ActionsChosen, AgentsStarted, BehaviorSteps, OutcomesReported
from tests.assembly.group_pair import GroupPair, play
from tests.assembly.group_script import GroupScript
from tests.assembly.group_world import GroupWorld, Kind

MANY = 10**6

# ---------------------------------------------------------------- sizes of messages


def test_a_group_of_the_largest_size_is_sent_and_a_larger_one_refused() -> None:
    """One timestep of a group cannot be divided."""
    letters = "a b c d e"
    script = GroupScript(largest=5).play("+a +b +c +d +e", letters)
    assert [len(line.split()) for line in script.summaries(script.assembler.ready_messages(), "A")] == [12]
    script = GroupScript(largest=4).play("+a +b +c +d +e", letters)
    with pytest.raises(ServiceError, match=r"got 5 steps of one group at once for A; expected at most 4; raise .*"):
        script.rest()


def test_steps_of_teammates_count_for_the_size() -> None:
    script = GroupScript(largest=4).play("+a +b +c +x +y", "a b c x y")
    with pytest.raises(ServiceError, match="got 5 steps of one group"):
        script.rest()
    script = GroupScript(largest=5).play("+a +b +c +x +y", "a b c x y")
    assert script.rest() == ["0: a1 b1 c1 x1 y1 | a2 b2 c2 x2 y2"]
    assert [message.behavior for message in script.messages] == ["A", "B"]


@pytest.mark.parametrize(("largest", "spans"), [(4, [1, 1, 1, 1]), (6, [2, 2]), (9, [3, 1]), (100, [4])])
def test_a_group_segment_closes_before_it_is_too_large(largest: int, spans: list[int]) -> None:
    """It closes at the last time at which one more is sure to fit; a flush closes the rest."""
    script = GroupScript(largest=largest).play("+a +b +x", *["a b x"] * 4)
    script.flush()

    records = [message.shared for message in script.messages if message.behavior == "A"]
    assert [span for shared in records if shared is not None for span in shared.spans.tolist()] == spans
    assert all(len(message.log_probs) <= largest for message in script.messages)


def test_members_that_have_ended_count_for_the_size() -> None:
    """The rows of `a` and `b` are in the segment until it closes."""
    script = GroupScript(largest=6).play("+a +b +c", "a b c", "a. b. c +d", "c d")
    script.flush()
    assert [len(message.log_probs) for message in script.messages] == [6, 2]


def test_a_message_holds_as_many_groups_as_fit_with_teammates() -> None:
    """Messages of seven steps hold two groups of two own steps and one of a teammate."""
    script = GroupScript(largest=7)
    groups = [("a", "b", "n"), ("c", "d", "o"), ("e", "f", "p"), ("g", "h", "q"), ("i", "j", "r")]
    script.play(" ".join(f"+{one}@{key}" for key, group in enumerate(groups, 1) for one in group))
    script.play(" ".join(one for group in groups for one in group))
    script.flush()
    assert [len(m.log_probs) for m in script.messages if m.behavior == "A"] == [4, 4, 2]
    assert [m.flush for m in script.messages if m.behavior == "A"] == [0, 0, 1]
    assert [m.flush for m in script.messages if m.behavior == "B"] == [0, 0, 0]


# ---------------------------------------------------------------- flushes


def test_a_flush_closes_exactly_the_groups_with_steps_of_the_name() -> None:
    """Steps of teammates and groups whose members have ended are included."""
    script = GroupScript().play("+a +x +b@2 +y@2 +z@3", "a x b. y z", "a x y z")
    closed = list(script.assembler.flush("A", 7))
    assert [(message.behavior, message.flush) for message in closed] == [("A", 7), ("B", 0)]
    assert sorted(script.summaries(closed[:1], "A")) == ["0 0: a1 x1 | a2 x2 | a3 x3", "0 0: b1 y1 | y2 | y3 b."]
    assert len(script.summaries(closed[1:], "B")) == 2
    assert (script.assembler.of("A").open_steps, script.assembler.of("B").open_steps) == (0, 2)
    assert script.flush("B") == ["0 0: z1 | z2 | z3"]


def test_a_flush_without_steps_is_answered() -> None:
    """It may come before the first step, twice in a row, or for an unknown name."""
    script = GroupScript()
    for serial, name in enumerate(["A", "B", "A"], 1):
        (message,) = script.assembler.flush(name, serial)
        assert (message.behavior, message.flush, len(message.log_probs)) == (name, serial, 0)
        encode(message)
    script.play("+a", "a")
    assert script.flush() == ["0: a1 | a2"]
    assert script.flush() == []
    assert [message.flush for message in script.messages] == [1, 1]


# ---------------------------------------------------------------- carried numbers


def test_sequences_are_windows_of_group_timesteps() -> None:
    """A member's sequence begins with its first decision in each window, and with each segment."""
    script = GroupScript(sequence=2).play("+a +b", "a", "a b", "a", "a", "a b", "a b")
    assert script.flush() == ["0 0 0 0 0 0: a1 b1 | a2 b1 | a3 b3 | a4 b3 | a5 b3 | a6 b6 | a7 b7"]
    (message,) = script.messages
    assert message.carried is not None
    numbers = [(int(number) // 100, int(number) % 100) for (number,) in message.carried.tolist()]
    assert [tick for tick, letter in numbers if letter == 0] == [1, 3, 5]
    assert [tick for tick, letter in numbers if letter == 1] == [1, 3, 6]
    assert len(numbers) == 6


def test_group_segments_without_memory_have_no_carried_column() -> None:
    script = GroupScript().play("+a", "a")
    script.flush()
    assert script.messages[0].carried is None


# ---------------------------------------------------------------- bytes


def bytes_per_step(group: int, ticks: int, *, agents: int = 64, names: tuple[str, ...] = ("A",)) -> dict[str, float]:
    """Returns the encoded bytes per step by name, for `agents` in groups of `group` that decide in every tick."""
    sizes = Sizes(horizon=16, message_steps=MANY, largest=MANY, sequence=0)
    assembler = Assembler("s.1", "a.1", lambda _: sizes, in_groups=lambda _: True)
    for tick in range(ticks):
        assembler.apply([_all_decide(name, tick, agents // len(names), group // len(names)) for name in names])
    sent, steps = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    for message in assembler.rest():
        sent[message.behavior] += sum(memoryview(frame).nbytes for frame in encode(message))
        steps[message.behavior] += len(message.log_probs)
    assert list(steps.values()) == [agents // len(names) * (ticks - 1)] * len(names)
    return {name: sent[name] / steps[name] for name in names}


def _all_decide(name: str, tick: int, n: int, group: int) -> BehaviorSteps:
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
    """Groups of 2, 8 and 32 members agree within 20 %, as teammates' actions are sent once per group."""
    for name in names:
        sizes = [bytes_per_step(group, 65, names=names)[name] for group in (2, 8, 32)]
        assert max(sizes) <= 1.2 * min(sizes), sizes


# ---------------------------------------------------------------- the log


def test_the_log_reuses_rows_although_ended_members_hold_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a long run the log moves needed rows to its front many times, and no segment changes."""
    kind = Kind(
        names=("A", "B"), groups=2, churn=0.1, moving=0.03, slow=2, losing=0.01, separate_losses=True, carried=(1, 0, 0)
    )
    sizes = {
        "A": Sizes(horizon=9, message_steps=150, largest=400, sequence=3),
        "B": Sizes(horizon=7, message_steps=200, largest=500),
    }
    pair, world = GroupPair(sizes), GroupWorld(random.Random(5), kind)
    held: list[tuple[bool, bool]] = []
    keep = StepLog.keep

    def recorded(log: StepLog, needed: Any, room: int) -> Any:
        (own,) = [one for one in pair.assembler.members.values() if one.log is log]
        held.append((any(len(segments.rows) for segments in own.departed), bool(own.unsent)))
        return keep(log, needed, room)

    monkeypatch.setattr(StepLog, "keep", recorded)
    play(pair, world, 300, 0.02)
    pair.finish()
    pair.compare()
    assert held.count((True, True)) >= 4
    for one in pair.assembler.members.values():
        assert one.received > 1200
        assert one.log.capacity <= 1024
