"""Messages of a Unity player in a conversation: each is decoded, or refused as UnreadableData.

An input is up to 8 messages, each after its length in two bytes. Decoded messages are answered.
"""

from __future__ import annotations

import contextlib
import io
import struct
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, Final

import numpy as np
from PIL import Image

from sparring.pipeline.bridges.unity import UnreadableData
from sparring.pipeline.bridges.unity.conversation import PlayerConversation, PlayerMessage
from sparring.pipeline.bridges.unity.messages import Proto, message_class
from sparring.pipeline.errors import ExplainedError
from sparring.pipeline.messages.simulator import BehaviorActions
from sparring.pipeline.specs import SpecError
from sparring.pipeline.stepping.validation import check_report
from tests.fuzzers import mutation
from tests.fuzzers.target import Target

_LENGTH: Final = struct.Struct("<H")
_MOST: Final = 8
_NAME: Final = "B?team=0"


def one_input(data: bytes) -> None:
    """Feeds a conversation."""
    conversation, specs = PlayerConversation(), {}
    for content in split(data):
        try:
            message = conversation.receive(content)
        except (UnreadableData, SpecError):
            conversation.quit()
            return
        specs.update(message.behaviors)
        if message.kind == "farewell":
            conversation.quit()
            return
        if conversation.state == "introduced":
            conversation.initialize(seed=1)
        elif conversation.state == "ready":
            conversation.reset()
        else:
            conversation.step([*_answers(message, specs)])


def _answers(message: PlayerMessage, specs: Any) -> Iterator[BehaviorActions]:
    """Yields zeros for every decision; rows that do not fit their spec are refused by `check_report`."""
    for report in message.reports:
        actions = specs[report.behavior].actions
        with contextlib.suppress(ExplainedError):
            check_report(report, specs[report.behavior])
        if report.decisions is not None and len(report.decisions.agents):
            n = len(report.decisions.agents)
            yield BehaviorActions(
                behavior=report.behavior,
                agents=report.decisions.agents,
                continuous=np.zeros((n, actions.continuous), np.float32),
                discrete=np.zeros((n, len(actions.discrete)), np.int32),
            )


def split(data: bytes) -> Iterator[bytes]:
    """Yields the messages of an input; the last may be shorter than its length."""
    at = 0
    for _ in range(_MOST):
        if at + _LENGTH.size > len(data):
            return
        (size,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        yield data[at : at + size]
        at += size


def join(received: Sequence[bytes]) -> bytes:
    """Returns the input with given messages."""
    return b"".join(_LENGTH.pack(len(one[:65535])) + one[:65535] for one in received[:_MOST])


def seeds() -> list[bytes]:
    """Returns games with numbers, with an image as floats or PNG, and agents that decide and end."""
    begin = _message()
    begin.unity_output.rl_initialization_output.communication_version = "1.5.0"
    begin.unity_output.rl_initialization_output.name = "Academy"
    found = []
    for kind in ("vector", "floats", "png"):
        first, second, end = (_output(kind, agents, done) for agents, done in ((2, 0), (2, 1), (1, 0)))
        brain = first.unity_output.rl_initialization_output.brain_parameters.add(brain_name=_NAME)
        brain.action_spec.num_continuous_actions = 1
        brain.action_spec.discrete_branch_sizes.append(3)
        brain.action_spec.num_discrete_actions = 1
        found.append(join([one.SerializeToString() for one in (begin, _message(), first, second, end, _message(400))]))
    return found


def _message(status: int = 200) -> Proto:
    message = message_class("UnityMessageProto")()
    message.header.status = status
    return message


def _output(kind: str, agents: int, done: int) -> Proto:
    message = _message()
    entry = message.unity_output.rl_output.agentInfos.add(key=_NAME)
    for number in range(agents):
        info = entry.value.value.add(id=number + 1, reward=0.5, done=number < done)
        info.action_mask = bytes([0, 1, 0])
        info.observations.append(_seen(kind).SerializeToString())
    return message


def _seen(kind: str) -> Proto:
    seen = message_class("ObservationProto")()
    seen.shape.extend([3] if kind == "vector" else [3, 2, 2])
    seen.dimension_properties.extend([1] if kind == "vector" else [1, 2, 2])
    if kind == "png":
        out = io.BytesIO()
        Image.new("RGB", (2, 2)).save(out, "PNG")
        seen.compression_type, seen.compressed_data = 1, out.getvalue()
    else:
        seen.float_data.data = bytes(4 * (3 if kind == "vector" else 12))
    return seen


def mutate(data: bytes, rng: Random, others: Sequence[bytes]) -> bytes:
    """Changes bytes of one message, or the order of messages."""
    received = [*split(data)]
    if not received or rng.random() < 0.2:
        return mutation.of_bytes(data, rng, others)
    at = rng.randrange(len(received))
    if rng.random() < 0.2:
        received.insert(rng.randrange(len(received) + 1), received.pop(at))
    else:
        received[at] = mutation.of_bytes(received[at], rng, [*split(rng.choice(others))] if others else ())
    return join(received)


TARGET: Final = Target(unit="conversation", seeds=seeds, one_input=one_input, mutate=mutate)
