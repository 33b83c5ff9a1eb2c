"""Damaged messages give a record or a typed error, within the memory of their declared size."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparring.pipeline.messages.segments  # noqa: F401  registers its records
from sparring.pipeline.errors import CodecError, LimitExceeded
from sparring.pipeline.messages.codec import (
    PREFIX,
    SERVICES,
    SIMULATORS,
    FrameReader,
    Limits,
    decode,
    encode,
    from_bytes,
    to_bytes,
)
from sparring.pipeline.messages.schema import TAGS, tag_of
from sparring.pipeline.queues.wire import parse_id
from tests.fuzzers.examples import example

SMALL = Limits(total=2048, header=1024, arrays=8, ndim=3, items=64)
PER_BYTE = 100
"""Most bytes of Python objects per byte of a header: an empty map and its place in a list."""
BESIDE = 64 * 2**10
"""Bytes of the reader itself, and of the error and its traceback."""

RECORDS = [example(cls, Random(number)) for number, (_, cls) in enumerate(sorted(TAGS.items()))]

Damage = Callable[[bytearray], bytearray]


def flipped(at: float, bit: int) -> Damage:
    def damage(data: bytearray) -> bytearray:
        if data:
            data[int(at * (len(data) - 1))] ^= 1 << bit
        return data

    return damage


def spliced(at: float, removed: int, inserted: bytes) -> Damage:
    def damage(data: bytearray) -> bytearray:
        start = int(at * len(data))
        data[start : start + removed] = inserted
        return data

    return damage


def truncated(at: float) -> Damage:
    return lambda data: data[: int(at * len(data))]


PLACES = st.floats(0, 1)
DAMAGE = st.one_of(
    st.builds(flipped, PLACES, st.integers(0, 7)),
    st.builds(truncated, PLACES),
    st.builds(spliced, PLACES, st.integers(0, 8), st.binary(max_size=8)),
    st.builds(spliced, PLACES, st.integers(0, 400), st.sampled_from(RECORDS).map(to_bytes)),
)


def with_valid_lengths(data: bytes) -> bytes:
    """Returns data with consistent lengths, so that its content is read."""
    if len(data) < PREFIX.size:
        return data
    header = min(PREFIX.unpack_from(data)[1], len(data) - PREFIX.size)
    return PREFIX.pack(len(data), header) + data[PREFIX.size :]


@settings(max_examples=60)
@given(st.sampled_from(RECORDS), st.lists(DAMAGE, max_size=3), st.booleans(), st.sampled_from([SIMULATORS, SMALL]))
def test_a_damaged_stream_gives_records_that_can_be_written_or_a_typed_error(
    record: Any, damages: list[Damage], fix_lengths: bool, limits: Limits
) -> None:
    data = bytearray(to_bytes(record))
    for damage in damages:
        data = damage(data)
    reader, stream = FrameReader(limits), with_valid_lengths(bytes(data)) if fix_lengths else bytes(data)
    reader.feed(stream)
    for decoded in read_all(reader):
        assert tag_of(decoded) in TAGS
        assert to_bytes(from_bytes(to_bytes(decoded), SERVICES)) == to_bytes(decoded)
    assert reader.buffered <= len(stream)


def read_all(reader: FrameReader) -> list[Any]:
    """Returns the records up to the end or the first error."""
    found: list[Any] = []
    with suppress(CodecError):
        while (decoded := reader.next()) is not None:
            found.append(decoded)
    return found


@settings(max_examples=50)
@given(st.sampled_from(RECORDS), st.integers(0, 20), st.lists(DAMAGE, min_size=1, max_size=2))
def test_damaged_frames_give_a_record_or_a_typed_error(record: Any, which: int, damages: list[Damage]) -> None:
    frames = [bytes(frame) for frame in encode(record)]
    for damage in damages:
        frames[which % len(frames)] = bytes(damage(bytearray(frames[which % len(frames)])))
    try:
        decoded = decode(frames)
    except CodecError:
        return
    assert type(decoded) in TAGS.values()


@settings(max_examples=12)
@given(
    st.lists(
        st.sampled_from([b"\x80", b"\x90", b"\xc0", b"\x91", b"\xdc\x03\xe8", b"\xdd\0\0\xff\xff", b"\xa1a"]),
        min_size=1,
    ),
    st.integers(1, 600),
)
def test_memory_of_a_header_is_bounded_by_its_size(values: list[bytes], times: int) -> None:
    """Claimed lengths of nested lists and of many maps allocate nothing."""
    header = b"\xdd" + (65536).to_bytes(4, "big") + b"".join(values) * times
    message = with_valid_lengths(PREFIX.pack(0, len(header)) + header)
    gc.collect()
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            from_bytes(message)
        assert tracemalloc.get_traced_memory()[1] < PER_BYTE * len(header) + BESIDE
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------- findings of the search


def framed(header: bytes, payload: bytes = b"") -> bytes:
    padding = bytes(-(PREFIX.size + len(header)) % 8)
    body = header + padding + payload
    return PREFIX.pack(PREFIX.size + len(body), len(header)) + body


def ping(number: Any = 0, arrays: Any = ()) -> bytes:
    return framed(msgpack.packb({"type": "ping", "body": {"number": number}, "arrays": list(arrays)}))


def nested(field: bytes, depth: int = 1015) -> bytes:
    """Returns a Ping with nested lists as the value of a field of its header."""
    plain = {b"type": b"\xa4ping", b"body": b"\x81\xa6number\x00", b"arrays": b"\x90"}
    bomb = b"\x91" * depth + b"\xc0"
    values = {**plain, field: bomb} if field in plain else {**plain, b"body": b"\x81\xa6number" + bomb}
    return framed(b"\x83" + b"".join(msgpack.packb(key.decode()) + value for key, value in values.items()))


@pytest.mark.parametrize("dtype", ["<f4", "|u1", "<i8"])
def test_an_empty_array_with_impossible_other_dimensions_is_too_large(dtype: str) -> None:
    """numpy refuses it with its own exception, although the array is empty."""
    with pytest.raises(LimitExceeded, match="bytes in an array"):
        from_bytes(ping(arrays=[[dtype, [0, 2**26, 2**26, 2**26]]]))


def test_an_empty_array_of_usual_dimensions_is_accepted() -> None:
    assert from_bytes(ping(arrays=[["<f4", [0, 3, 84, 84]], ["|u1", [5, 0, 3]]])) is not None


@pytest.mark.parametrize("field", [b"type", b"number", b"arrays"])
def test_an_invalid_nested_value_is_named_without_its_content(field: bytes) -> None:
    """The text of a value a thousand levels deep is more than Python's recursion limit allows."""
    with pytest.raises(CodecError) as caught:
        from_bytes(nested(field))
    assert "..." in str(caught.value)


@pytest.mark.parametrize("size", [3000, 60_000, 240_000])
def test_nested_lists_with_large_claims_are_refused_before_allocation(size: int) -> None:
    """Each claim is less than the header, all together are 80 MiB and more."""
    claim = b"\xdc" + min(size, 60_000).to_bytes(2, "big")
    bomb = framed(claim * 900 + bytes(size))
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            from_bytes(bomb)
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "bad",
    [
        framed(msgpack.packb({f"k{number}": 0 for number in range(20_000)})),
        ping("x" * 60_000),
        ping([0] * 60_000),
        ping({str(number): number for number in range(10_000)}),
        framed(msgpack.packb({"type": "x" * 60_000, "body": {}, "arrays": []})),
        ping(arrays=[["<f4" * 20_000, [1]]]),
        ping(arrays=[["<f4", ["1"] * 60_000]]),
    ],
)
def test_an_error_is_short_for_any_length_of_its_subject(bad: bytes) -> None:
    """It is logged, and sent to the simulator, which accepts 65,536 characters at most."""
    with pytest.raises(CodecError) as caught:
        from_bytes(bad)
    assert len(str(caught.value)) < 4000


def test_an_id_of_many_digits_is_read_in_time() -> None:
    """A pattern that restarts at each digit takes quadratic time: ten minutes for these."""
    with pytest.raises(ValueError, match="invalid literal"):
        parse_id(f"stepping.{'1' * 400_000}x#")
    assert parse_id("stepping-0.5f3a-12#18a3bc~0").order == (12, 0x18A3BC)
