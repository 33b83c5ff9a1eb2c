"""Frames from another service, into the ends of queues and topics and the rules behind them.

An input is up to 16 messages: a byte for the kind of end, a byte for the number of frames, and each frame after its
length in two bytes. Decoded messages go to the rules of that end, whose answers must be valid messages.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any, Final

import sparring.pipeline.messages.segments  # noqa: F401  registers its records
from sparring.pipeline.errors import CodecError, Empty
from sparring.pipeline.messages.channels import Topic
from sparring.pipeline.messages.codec import Buffer, decode
from sparring.pipeline.messages.schema import TAGS
from sparring.pipeline.messages.simulator import Ping
from sparring.pipeline.queues import wire as framing
from sparring.pipeline.queues.receiving import ReceiverState
from sparring.pipeline.queues.sending import SenderState
from sparring.pipeline.queues.topic import Publisher, Subscription
from sparring.pipeline.queues.wire import (
    DEFAULT_TIMING,
    Capacity,
    Data,
    Grant,
    Message,
    SenderHello,
    SubscriberStatus,
    TopicUpdate,
)
from tests.fuzzers import mutation
from tests.fuzzers.examples import example
from tests.fuzzers.target import Target, Violation

_LENGTH: Final = struct.Struct("<H")
_MOST: Final = 16
_CAPACITY: Final = Capacity(messages=4, steps=64, senders=2)
_ID: Final = "stepping-0.1#18a3bc~0"
_RECEIVER: Final = "assembly-0.1#1~0"


class Link:
    """Checks what an end of a topic sends."""

    pack = staticmethod(framing.pack)

    def send(self, message: Message, route: Hashable) -> None:
        """Checks that the other end can decode a message."""
        del route
        _read_back(message)

    def poll(self) -> None:
        """Delivers nothing: inputs arrive one by one."""

    def close(self) -> None:
        """Frees nothing."""


class Ends:
    """Holds one end of each kind."""

    def __init__(self) -> None:
        self._now = 0.0
        self._receiver = ReceiverState(_RECEIVER, object, _CAPACITY, DEFAULT_TIMING)
        self._sender = SenderState(_ID, DEFAULT_TIMING)
        self._publisher = Publisher("topic:stepping-0", "stepping-0.1#2~0", DEFAULT_TIMING, lambda: self._now)
        self._subscriber = Subscription("topic:stepping-0", _RECEIVER, DEFAULT_TIMING, lambda: self._now)
        for end in (self._publisher, self._subscriber):
            end.open(Link())
        self._publisher.publish(Topic("state", Ping), Ping())

    def receive(self, end: int, frames: list[Buffer]) -> None:
        """Delivers a message to one end, and checks what the ends answer."""
        self._now += 0.1
        message = framing.decode(frames)
        if end == 0 and isinstance(message, SenderHello | Data):
            self._at_receiver(message)
        elif end == 1 and isinstance(message, Grant):
            self._at_sender(message)
        elif end == 2 and isinstance(message, SubscriberStatus):
            self._publisher.received(message, "route")
            self._publisher.settle()
        elif end == 3 and isinstance(message, TopicUpdate):
            self._subscriber.received(message, None)
            self._subscriber.settle()

    def _at_receiver(self, message: SenderHello | Data) -> None:
        state = self._receiver
        if isinstance(message, Data):
            state.on_data(self._now, message, "route")
        else:
            state.on_hello(self._now, message, "route")
        state.tick(self._now)
        for _, grant in state.outgoing(self._now):
            _read_back(grant)
        held = state.counts
        if held.held_messages > _CAPACITY.messages or held.held_steps > _CAPACITY.steps:
            raise Violation(f"{held.held_messages} messages of {held.held_steps} steps held, with {_CAPACITY}")
        if min(held.held_messages, held.held_steps, held.queued_messages, held.queued_steps) < 0:
            raise Violation(f"counts below zero: {held}")
        if held.queued_messages > 2:
            state.acknowledge(self._now, state.take())

    def _at_sender(self, grant: Grant) -> None:
        state = self._sender
        state.on_grant(self._now, grant)
        if state.fits(1):
            state.put(1, framing.pack(Ping()))
        for message in state.outgoing(self._now):
            _read_back(message)

    def take_all(self) -> None:
        """Takes all waiting messages."""
        try:
            while True:
                self._receiver.acknowledge(self._now, self._receiver.take())
        except Empty:
            if self._receiver.counts.queued_messages or self._receiver.counts.held_messages:
                raise Violation("counted messages cannot be taken") from None


def _read_back(message: Message) -> None:
    """Checks that the other end can decode a message."""
    framing.decode([bytes(one) for one in framing.encode(message)])


def one_input(data: bytes) -> None:
    """Delivers every message of an input, after refused ones too."""
    ends = Ends()
    for end, frames in messages(data):
        with contextlib.suppress(CodecError):
            decode(frames)
        try:
            ends.receive(end, frames)
        except CodecError:
            continue
    ends.take_all()


def messages(data: bytes) -> Iterator[tuple[int, list[Buffer]]]:
    """Yields the messages of an input; the last frame may be shorter than its length."""
    at = 0
    for _ in range(_MOST):
        if at + 2 > len(data):
            return
        end, number = data[at] % 4, data[at + 1] % 32
        at += 2
        frames: list[Buffer] = []
        for _ in range(number):
            if at + _LENGTH.size > len(data):
                break
            (size,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size
            frames.append(data[at : at + size])
            at += size
        yield end, frames


def as_input(contents: Sequence[tuple[int, Sequence[Buffer]]]) -> bytes:
    """Returns the input with given messages."""
    out = b""
    for end, frames in contents:
        out += bytes([end, len(frames)]) + b"".join(_LENGTH.pack(len(one)) + bytes(one) for one in frames)
    return out


def seeds() -> list[bytes]:
    """Returns conversations of all ends, and every record in a message."""
    rng = Random(2)
    records = [framing.pack(example(cls, rng)) for _, cls in sorted(TAGS.items()) for _ in range(2)]
    hello = SenderHello(sender=_ID, serial=1, oldest=0, receiver=_RECEIVER)
    bye = replace(hello, leaving=True)
    inputs = [
        as_input(
            [(0, framing.encode(one)) for one in (hello, Data(sender=_ID, sequence=0, steps=3, payload=record), bye)]
        )
        for record in records
    ]
    grant: dict[str, Any] = {"messages": 4, "steps": 64, "largest": 16, "received": 0, "acknowledged": 0}
    statuses = [SubscriberStatus(serial=serial, publisher="", revision=0, answer=True) for serial in (1, 2, 3)]
    inputs += [
        as_input([(1, framing.encode(Grant(receiver=_RECEIVER, echo=1, **grant)))] * 2),
        as_input([(2, framing.encode(status)) for status in statuses]),
        as_input([(3, framing.encode(TopicUpdate(publisher="x.1#1~0", echo=1)))]),
    ]
    updates = [TopicUpdate(publisher="x.1#1~0", echo=1, revision=1, key="k", payload=one) for one in records]
    inputs += [as_input([(3, framing.encode(update))]) for update in updates]
    return [one for one in inputs if len(one) <= mutation.LONGEST]


def mutate(data: bytes, rng: Random, others: Sequence[bytes]) -> bytes:
    """Changes bytes, or a value in one frame, or the order of messages."""
    contents = [*messages(data)]
    if not contents or rng.random() < 0.4:
        return mutation.of_bytes(data, rng, others)
    at = rng.randrange(len(contents))
    _, frames = contents[at]
    kind = rng.randrange(6)
    if kind == 0:
        contents.insert(rng.randrange(len(contents) + 1), contents[at])
    elif kind == 1:
        contents[at] = rng.randrange(4), frames
    elif kind == 2 and others:
        contents += messages(rng.choice(others))
    elif frames:
        which = rng.randrange(len(frames))
        changed = mutation.of_header if kind < 5 else lambda one, rng: mutation.of_bytes(one, rng, ())
        frames[which] = changed(bytes(frames[which]), rng)
    return as_input([(end, [one[:65535] for one in frames]) for end, frames in contents[:_MOST]])[
        : 4 * mutation.LONGEST
    ]


TARGET: Final = Target(unit="messages", seeds=seeds, one_input=one_input, mutate=mutate)
