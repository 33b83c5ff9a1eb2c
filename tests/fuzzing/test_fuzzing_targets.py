"""The fuzz targets pass a few inputs, reach the code that they are for, and can fail."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sparring.pipeline.errors import CodecError
from sparring.pipeline.messages import codec
from sparring.pipeline.messages.schema import TAGS
from sparring.pipeline.queues.wire import Grant
from sparring.pipeline.stepping import stepper
from tests.fuzzers import engine, protocol, services, simulator, unity
from tests.fuzzers.__main__ import TARGETS, load
from tests.fuzzers.target import Target, Violation


@pytest.mark.parametrize(
    ("name", "inputs"), [("simulator", 700), ("services", 400), ("protocol", 200), ("unity", 200), ("http2", 500)]
)
def test_a_target_finds_nothing_in_some_hundred_inputs(name: str, inputs: int) -> None:
    """The inputs are the same every time; `scripts/fuzz` feeds millions."""
    report = engine.search(load(name), inputs=inputs, seconds=60.0, seed=1)
    assert report.findings == {}
    assert report.inputs == inputs


def test_every_target_can_be_run() -> None:
    assert {"http2", "simulator", "services", "protocol", "unity"} == set(TARGETS)


def test_the_seeds_of_the_codec_are_one_message_of_every_record() -> None:
    read = set()
    for seed in simulator.seeds():
        if seed[0] != 1:  # two in a row
            read.add(type(codec.from_bytes(seed[1:])))
    assert read == set(TAGS.values())


def test_the_seeds_of_the_services_reach_every_end_and_fill_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = set()
    queued = set()

    class RecordingEnds(services.Ends):
        def receive(self, end: int, frames: Any) -> None:
            super().receive(end, frames)
            reached.add(end)
            queued.add(self._receiver.counts.queued_messages)

    monkeypatch.setattr(services, "Ends", RecordingEnds)
    for seed in services.seeds():
        services.one_input(seed)
    assert reached == {0, 1, 2, 3}
    assert queued == {0, 1}


def test_the_seeds_of_the_protocol_complete_steps_of_learners_and_of_ghosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "worlds", {})
    for seed in protocol.seeds()[::2]:
        protocol.one_input(seed)
    world, _ = protocol.worlds[False]
    assert world.completed["A"] > 10
    assert world.stepper.behaviors["B"].ghosts > 0
    assert world.stepper.matches.ended + world.stepper.matches.lost > 0


def test_the_seeds_of_a_unity_player_are_decoded_to_the_farewell(monkeypatch: pytest.MonkeyPatch) -> None:
    farewells = []

    class RecordingConversation(unity.PlayerConversation):
        def receive(self, content: bytes) -> Any:
            message = super().receive(content)
            farewells.append(message.kind == "farewell")
            return message

    monkeypatch.setattr(unity, "PlayerConversation", RecordingConversation)
    for seed in unity.seeds():
        farewells.clear()
        unity.one_input(seed)
        assert farewells == [False] * 5 + [True]


# ---------------------------------------------------------------- a test of the test


def test_a_reader_that_trusts_a_shape_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A codec that does not check claimed sizes fails within some thousand inputs."""

    def trusting(text: str, shape: tuple[int, ...], limits: Any) -> Any:
        del limits
        return codec._ArrayLayout(codec.DTYPES[text], shape, 0)

    monkeypatch.setattr(codec, "_layout", trusting)
    report = engine.search(simulator.TARGET, inputs=600, seconds=60.0)
    assert any("Error" in kind for kind in report.findings)


def test_a_stepper_that_ignores_disconnects_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "worlds", {})
    monkeypatch.setattr(stepper.Stepper, "disconnect", lambda *_: None)
    report = engine.search(protocol.TARGET, inputs=20, seconds=60.0)
    assert any("Violation" in kind for kind in report.findings)


def test_a_sender_that_acknowledges_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(self: Any, now: float, entry: Any) -> None:
        self.counts.held_messages -= 1
        self.counts.held_steps -= entry.steps
        acknowledge(self, now, entry)

    acknowledge = services.ReceiverState.acknowledge
    monkeypatch.setattr(services.ReceiverState, "acknowledge", twice)
    report = engine.search(services.TARGET, inputs=300, seconds=60.0)
    assert any("Violation" in kind for kind in report.findings)


def test_a_hang_and_a_growth_are_findings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An input beyond the time limit is interrupted, and kept with the other findings."""
    monkeypatch.setattr(engine, "HANG_S", 0.02)

    def one_input(data: bytes) -> None:
        end = time.process_time() + 10
        while data == b"slow" and time.process_time() < end:
            pass

    target = Target(unit="x", seeds=lambda: [b"slow", b"fast"], one_input=one_input, mutate=lambda *_: b"fast")
    report = engine.search(target, inputs=10, seconds=60.0, corpus=tmp_path)
    assert [*report.findings.values()] == [b"slow"]
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"slow"]
    assert report.longest_s < 5


def test_the_same_seed_feeds_the_same_inputs() -> None:
    fed: list[list[bytes]] = [[], []]
    for run in fed:
        one = Target(unit="x", seeds=simulator.seeds, one_input=run.append, mutate=simulator.mutate)
        engine.search(one, inputs=200, seconds=60.0, seed=5)
    assert fed[0] == fed[1]
    assert len(set(fed[0])) > 150


def test_a_record_that_encodes_differently_the_second_time_is_a_violation() -> None:
    with pytest.raises((Violation, CodecError)):
        simulator.check_round_trip(
            _UnstableGrant(receiver="r", echo=0, messages=0, steps=0, largest=0, received=0, acknowledged=0)
        )


class _UnstableGrant(Grant):
    """A record whose fields change between two reads."""

    _random = Random(0)

    def __getattribute__(self, name: str) -> Any:
        return _UnstableGrant._random.randrange(1000) if name == "steps" else super().__getattribute__(name)
