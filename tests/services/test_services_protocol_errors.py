"""Simulators that violate the protocol get a typed error within the deadline, and the run continues."""

from __future__ import annotations

import dataclasses
import struct
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from sparring.pipeline.games.goal import Goal
from sparring.pipeline.messages.codec import FrameReader, to_bytes
from sparring.pipeline.messages.simulator import VERSION, Act, BehaviorReport, Decisions, Fault, Hello, Reset, Step
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from tests.services.services_graph import Graph, begin
from tests.services.services_helpers import balanced

SPECS = dict(Goal().behaviors())
HELLO = to_bytes(Hello(version=VERSION, name="faulty", behaviors=SPECS))


def decisions(**changes: Any) -> Decisions:
    """Returns decisions of two agents, with changes."""
    good = Decisions(
        agents=np.array([1, 2]),
        observations=(np.ones((2, 1), np.float32),),
        rewards=np.zeros(2, np.float32),
    )
    return dataclasses.replace(good, **changes)


def step(sequence: int = 0, behavior: str = "Goal?team=0", **changes: Any) -> bytes:
    """Returns a Step with changed decisions."""
    report = BehaviorReport(behavior=behavior, decisions=decisions(**changes))
    return to_bytes(Step(sequence=sequence, reports=(report,)))


def other_spec() -> dict[str, BehaviorSpec]:
    seen = ObservationSpec(name="goal", shape=(3,))
    return {"Goal?team=0": BehaviorSpec(observations=(seen,), actions=ActionSpec(continuous=1))}


def small_image() -> dict[str, BehaviorSpec]:
    seen = ObservationSpec(name="eye", shape=(3, 19, 40), kind="image")
    return {"Goal?team=0": BehaviorSpec(observations=(seen,), actions=ActionSpec(continuous=1))}


CONVERSATIONS: dict[str, tuple[bytes, bytes, str]] = {
    "garbage": (struct.pack("<II", 64, 40) + bytes(range(56)), b"", "malformed"),
    "ten gigabytes": (struct.pack("<II", 2**32 - 8, 100), b"", "too_large"),
    "a header of a gigabyte": (struct.pack("<II", 2**25, 2**24), b"", "too_large"),
    "another version": (to_bytes(Hello(version=99, name="x", behaviors=SPECS)), b"", "version"),
    "an unknown behavior": (
        to_bytes(Hello(version=1, name="x", behaviors={"Nope": SPECS["Goal?team=0"]})),
        b"",
        "unknown_behavior",
    ),
    "another spec": (to_bytes(Hello(version=1, name="x", behaviors=other_spec())), b"", "specs"),
    "an image that is too small": (to_bytes(Hello(version=1, name="x", behaviors=small_image())), b"", "specs"),
    "more steps than there can be": (
        to_bytes(Hello(version=1, name="x", behaviors=SPECS, process="p", steps={"Goal": 2**63 - 1})),
        b"",
        "malformed",
    ),
    "a step before hello": (step(), b"", "unexpected_message"),
    "an act of its own": (HELLO, to_bytes(Act(sequence=0, actions=())), "unexpected_message"),
    "duplicate agents": (HELLO, step(agents=np.array([1, 1])), "duplicate_agent"),
    "not a number": (HELLO, step(rewards=np.array([0, np.nan], np.float32)), "not_finite"),
    "a huge number": (HELLO, step(observations=(np.full((2, 1), 3.4e38, np.float32),)), "not_finite"),
    "a lying shape": (HELLO, step(observations=(np.ones((2, 5), np.float32),)), "shape"),
    "a skipped step": (HELLO, step(sequence=7), "sequence"),
    "a behavior it did not name": (HELLO, step(behavior="Other?team=0"), "unknown_behavior"),
    "silence in mid-handshake": (HELLO[:20], b"", "timeout"),
    "silence after the reset": (HELLO, b"", "timeout"),
}

REMEDIES = {"an unknown behavior": "write `Nope: {}` below `behaviors` of the configuration, or default_settings"}


async def converse(graph: Graph, first: bytes, second: bytes) -> Fault:
    """Sends `first`, and `second` after the Reset; returns the Fault that answers them."""
    assert graph.listener is not None
    stream, reader = graph.listener.connect(), FrameReader()
    async with stream:
        for at in range(0, len(first), 16):  # in small pieces, as a network may deliver them
            await stream.send(first[at : at + 16])
        while True:
            reader.feed(await stream.receive())
            while (message := reader.next()) is not None:
                if isinstance(message, Fault):
                    return message
                if isinstance(message, Reset) and second:
                    await stream.send(second)


@pytest.mark.anyio
async def test_faulty_simulator_receives_an_error_and_the_run_continues(tmp_path: Path) -> None:
    """One run outlives all faulty simulators, one after the other; those that are silent wait at the same time."""
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        graph = await begin(tasks, stack, tmp_path, [Goal(areas=4)], max_steps=600)
        await anyio.sleep(0.1)

        async def check(name: str) -> None:
            first, second, code = CONVERSATIONS[name]
            with anyio.fail_after(100):
                fault = await converse(graph, first, second)
            assert fault.code == code, name
            assert fault.got, name
            assert fault.expected, name
            assert fault.remedy, name
            assert fault.remedy.startswith(REMEDIES.get(name, "")), name

        async with anyio.create_task_group() as silent:
            for name in CONVERSATIONS:
                if name.startswith("silence"):
                    silent.start_soon(check, name)
                else:
                    await check(name)
        step_counts = await graph.finish()
        assert step_counts["trained"] >= 600
        assert step_counts["lost"] == 0
        assert balanced(step_counts), step_counts
        assert graph.counts[0] <= step_counts["produced"] <= graph.counts[0] + 1
        tasks.cancel_scope.cancel()
