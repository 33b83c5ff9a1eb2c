"""Bytes from a simulator through frame reader and codec give a record or a CodecError.

An input is one byte of options and a stream. Options, by bits: 1 keep the lengths (else they are corrected, so that a
change inside passes the first check), 2 small limits, 4 feed three pieces, 8 decode one whole message. Each decoded
record is encoded and decoded again, and must give the same bytes.
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
    """Decodes an input with the options of its first byte."""
    options, stream = (data[0] if data else 0), data[1:]
    limits = SMALL if options & _SMALL else SIMULATORS
    if not options & _AS_IS and len(stream) >= PREFIX.size:
        _, header = PREFIX.unpack_from(stream)
        stream = PREFIX.pack(len(stream), min(header, len(stream) - PREFIX.size)) + stream[PREFIX.size :]
    try:
        if options & _WHOLE:
            check_round_trip(codec.from_bytes(stream, limits))
            return
        reader = FrameReader(limits)
        third = len(stream) // 3 + 1
        for start in range(0, len(stream), third if options & _PIECES else max(1, len(stream))):
            reader.feed(stream[start : start + third] if options & _PIECES else stream)
            while (record := reader.next()) is not None:
                check_round_trip(record)
            if reader.buffered > limits.total + len(stream):
                raise Violation(f"{reader.buffered} bytes held")
    except CodecError:
        return


def check_round_trip(record: Any) -> None:
    """Checks that a decoded record can be encoded, and decoded to the same."""
    written = codec.to_bytes(record)
    decoded = codec.from_bytes(written, SERVICES)
    if type(decoded) is not type(record) or codec.to_bytes(decoded) != written:
        raise Violation(f"{record} is decoded again as {decoded}")


def seeds() -> list[bytes]:
    """Returns messages of every record, alone and in pairs."""
    rng = Random(1)
    messages = [codec.to_bytes(example(cls, rng)) for _, cls in sorted(TAGS.items()) for _ in range(3)]
    pairs = [b"\x01" + one + other for one, other in zip(messages, messages[7:], strict=False)]
    return [*(bytes([8 * (i % 2)]) + one for i, one in enumerate(messages)), *pairs[::4]]


def mutate(data: bytes, rng: Random, others: Sequence[bytes]) -> bytes:
    """Changes bytes, or a value of the header, whose length is then corrected."""
    if len(data) < 1 + PREFIX.size or rng.random() < 0.5:
        return mutation.of_bytes(data, rng, others)
    _, size = PREFIX.unpack_from(data, 1)
    start = 1 + PREFIX.size
    header = mutation.of_header(data[start : start + size], rng)
    rest = data[start + size + -(PREFIX.size + size) % 8 :]
    body = header + bytes(-(PREFIX.size + len(header)) % 8) + rest
    return (data[:1] + PREFIX.pack(PREFIX.size + len(body), len(header)) + body)[: mutation.LONGEST]


TARGET: Final = Target(unit="stream", seeds=seeds, one_input=one_input, mutate=mutate)
