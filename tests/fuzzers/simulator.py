"""Bytes from a simulator, into the frame reader and the codec: a record, or a CodecError.

An input is one byte of options and a stream. Options, by bits: 1 leave the lengths as they are (else they are put
right, so that a change inside does not stop at the first check), 2 small limits, 4 fed in three pieces, 8 one whole
message by itself. A record that came out is written and read again, and must be the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, Final

import sparring.pipeline.messages.segments  # noqa: F401  registers its records
from sparring.pipeline.errors import CodecError
from sparring.pipeline.messages import codec
from sparring.pipeline.messages.codec import PREFIX, SERVICES, SIMULATORS, FrameReader, Limits
from sparring.pipeline.messages.schema import TAGS
from tests.fuzzers import mutation
from tests.fuzzers.examples import example
from tests.fuzzers.target import Target, Violation

SMALL: Final = Limits(total=1024, header=512, arrays=8, ndim=3, items=64)
_AS_IS, _SMALL, _PIECES, _WHOLE = 1, 2, 4, 8


def one_input(data: bytes) -> None:
    """Reads an input as its first byte says."""
    options, stream = (data[0] if data else 0), data[1:]
    limits = SMALL if options & _SMALL else SIMULATORS
    if not options & _AS_IS and len(stream) >= PREFIX.size:
        _, header = PREFIX.unpack_from(stream)
        stream = PREFIX.pack(len(stream), min(header, len(stream) - PREFIX.size)) + stream[PREFIX.size :]
    try:
        if options & _WHOLE:
            again(codec.from_bytes(stream, limits))
            return
        reader = FrameReader(limits)
        third = len(stream) // 3 + 1
        for start in range(0, len(stream), third if options & _PIECES else max(1, len(stream))):
            reader.feed(stream[start : start + third] if options & _PIECES else stream)
            while (record := reader.next()) is not None:
                again(record)
            if reader.buffered > limits.total + len(stream):
                raise Violation(f"{reader.buffered} bytes held")
    except CodecError:
        return


def again(record: Any) -> None:
    """A record that was read can be written, and read as the same."""
    written = codec.to_bytes(record)
    read = codec.from_bytes(written, SERVICES)
    if type(read) is not type(record) or codec.to_bytes(read) != written:
        raise Violation(f"{record} is read again as {read}")


def seeds() -> list[bytes]:
    """Messages of every record, alone and after one another."""
    rng = Random(1)
    messages = [codec.to_bytes(example(cls, rng)) for _, cls in sorted(TAGS.items()) for _ in range(3)]
    pairs = [b"\x01" + one + other for one, other in zip(messages, messages[7:], strict=False)]
    return [*(bytes([8 * (i % 2)]) + one for i, one in enumerate(messages)), *pairs[::4]]


def mutate(data: bytes, rng: Random, others: Sequence[bytes]) -> bytes:
    """Changes bytes, or a value of the header, whose length is put right."""
    if len(data) < 1 + PREFIX.size or rng.random() < 0.5:
        return mutation.of_bytes(data, rng, others)
    _, size = PREFIX.unpack_from(data, 1)
    start = 1 + PREFIX.size
    header = mutation.of_header(data[start : start + size], rng)
    rest = data[start + size + -(PREFIX.size + size) % 8 :]
    body = header + bytes(-(PREFIX.size + len(header)) % 8) + rest
    return (data[:1] + PREFIX.pack(PREFIX.size + len(body), len(header)) + body)[: mutation.LONGEST]


TARGET: Final = Target(unit="stream", seeds=seeds, one_input=one_input, mutate=mutate)
