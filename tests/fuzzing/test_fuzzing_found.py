"""What the search has found in the conversations with simulators, as the sequences that showed it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.messages.simulator import Step
from sparring.pipeline.stepping.stepper import Stepper
from tests.fuzzers import protocol
from tests.fuzzers.protocol import sequence

HELLO = ("_say_hello", bytes([1, 0]))
TWO_AGENTS = ("_say_step", bytes([0, 2, 0, 101, 102]))
WAKE = ("_wake", b"")
BYE = ("_dismiss", b"")
PING = ("_say_word", bytes([7, 0, 0, 0]))
LARGEST = ("_say_statistics", bytes([0, 1, 5, 1]))

FOUND = {
    "a Hello that crosses the trainer's Bye was told that Welcome is not allowed": [BYE, HELLO],
    "a Ping that crosses it, likewise": [HELLO, BYE, ("_say_word", bytes([3, 0, 0]))],
    "a Step after it from somebody who never said Hello ended the process": [BYE, TWO_AGENTS],
    "Behaviors likewise": [BYE, ("_say_behaviors", bytes([0, 0]))],
    "a statistic whose square no number can hold": [HELLO, LARGEST, WAKE],
    "two statistics whose sum no number can hold": [
        HELLO,
        *[("_say_statistics", bytes([1, 1, 5, 1])), WAKE] * 2,
    ],
    **{
        f"a simulator of number {number} ended the process with its first group": [
            ("_say_hello", bytes([1, protocol._NUMBERS.index(number)])),
            ("_say_step", bytes([0, 8 + 2, 0, 101, 102, 1, 1])),
            WAKE,
        ]
        for number in (2**31, 2**63 - 1, -1, 2**20 + 1)
    },
}


@pytest.fixture(autouse=True)
def _new_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_worlds", {})


@pytest.mark.parametrize("kind", [0, 3], ids=["overlap", "lockstep"])
@pytest.mark.parametrize("acts", FOUND.values(), ids=FOUND.keys())
def test_what_was_found_harms_nobody_any_more(acts: list[tuple[str, bytes]], kind: int) -> None:
    """No exception, the other simulator gets its actions, the books balance; twice, as it leaves nothing behind."""
    for _ in range(2):
        protocol.one_input(sequence(*acts, kind=kind))


def test_sums_of_what_simulators_tell_stay_finite() -> None:
    world = protocol.World(lockstep=False)
    for aggregation in (0, 1):
        simulator = world.enter()
        for name, needs in (HELLO, ("_say_statistics", bytes([aggregation, 1, 5, 1])), WAKE):
            protocol._ACTS[protocol._NUMBER_OF[name]](world, simulator, protocol.Cursor(needs))
        world.settle()
    counters = world.registry.snapshot(0.0).counters
    assert counters["metrics.not_finite"] == 2
    assert all(abs(value) < 1e300 for value in counters.values())


def test_a_step_out_of_turn_is_refused_and_changes_nothing() -> None:
    """Of a connection that is not there, or where the one before is not answered."""
    stepper = Stepper({})
    with pytest.raises(RemoteProtocolError, match="not connected") as unknown:
        stepper.receive(7, Step(sequence=0, reports=()), 0.0)
    with pytest.raises(RemoteProtocolError, match="not connected"):
        stepper.add_behaviors(7, {})
    stepper.connect(7, 0, {"A": protocol.SPEC})
    stepper.receive(7, Step(sequence=0, reports=()), 0.0)
    before: Any = stepper.connections[7].frame
    with pytest.raises(RemoteProtocolError, match="before the answer") as early:
        stepper.receive(7, Step(sequence=1, reports=()), 1.0)
    assert {unknown.value.code, early.value.code} == {"unexpected_message"}
    assert stepper.connections[7].frame is before
    assert stepper.connections[7].sequence == 1
    assert np.array_equal(before.arrivals, [])
