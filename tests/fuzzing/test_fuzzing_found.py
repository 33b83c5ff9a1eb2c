"""Findings of the fuzzer in conversations with simulators, as the sequences that showed them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.messages.simulator import Step
from sparring.pipeline.stepping.stepper import Stepper
from tests.fuzzers import protocol
from tests.fuzzers.protocol import sequence

HELLO = ("_send_hello", bytes([1, 0]))
TWO_AGENTS = ("_send_step", bytes([0, 2, 0, 101, 102]))
TICK = ("_tick", b"")
BYE = ("_dismiss", b"")
PING = ("_send_record", bytes([7, 0, 0, 0]))
LARGEST = ("_send_statistics", bytes([0, 1, 5, 1]))

FOUND = {
    "a Hello that crosses the trainer's Bye received a fault about Welcome": [BYE, HELLO],
    "a Ping that crosses it received one too": [HELLO, BYE, ("_send_record", bytes([3, 0, 0]))],
    "a Step after it without a Hello ended the process": [BYE, TWO_AGENTS],
    "Behaviors after it without a Hello ended the process": [BYE, ("_send_behaviors", bytes([0, 0]))],
    "a statistic whose square no number can hold": [HELLO, LARGEST, TICK],
    "two statistics whose sum no number can hold": [
        HELLO,
        *[("_send_statistics", bytes([1, 1, 5, 1])), TICK] * 2,
    ],
    **{
        f"a simulator of number {number} ended the process with its first group": [
            ("_send_hello", bytes([1, protocol.NUMBERS.index(number)])),
            ("_send_step", bytes([0, 8 + 2, 0, 101, 102, 1, 1])),
            TICK,
        ]
        for number in (2**31, 2**63 - 1, -1, 2**20 + 1)
    },
}


@pytest.fixture(autouse=True)
def _new_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "worlds", {})


@pytest.mark.parametrize("kind", [0, 3], ids=["overlap", "lockstep"])
@pytest.mark.parametrize("acts", FOUND.values(), ids=FOUND.keys())
def test_past_findings_are_handled(acts: list[tuple[str, bytes]], kind: int) -> None:
    """The reference simulator gets its actions, step counts balance, and a second run in the same world agrees."""
    for _ in range(2):
        protocol.one_input(sequence(*acts, kind=kind))


def test_sums_of_simulators_statistics_stay_finite() -> None:
    world = protocol.World(lockstep=False)
    for aggregation in (0, 1):
        simulator = world.connect()
        for name, needs in (HELLO, ("_send_statistics", bytes([aggregation, 1, 5, 1])), TICK):
            protocol.ACTS[protocol.NUMBER_OF[name]](world, simulator, protocol.Cursor(needs))
        world.settle()
    counters = world.registry.snapshot(0.0).counters
    assert counters["metrics.not_finite"] == 2
    assert all(abs(value) < 1e300 for value in counters.values())


def test_a_step_out_of_turn_is_refused_and_changes_nothing() -> None:
    """Its connection may be unknown, or may still wait for an answer."""
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
