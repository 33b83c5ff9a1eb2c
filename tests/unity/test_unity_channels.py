"""Side channels have the bytes that Unity writes and reads."""

from __future__ import annotations

import math
import struct
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.pipeline.bridges.unity import RECORD_AGAIN, UnreadableData, channels
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.messages.simulator import Sampler, Statistic

ENGINE = bytes.fromhex("2c3451e97e4fea11b238784f4387d1f7")
PARAMETERS = bytes.fromhex("1e894c530f81ea11a9d0822485860400")
STATISTICS = bytes.fromhex("b7f7d8a1c8cef950b78bd3e165a78520")
UNKNOWN = UUID("33221100-1111-2222-3333-444444444444").bytes_le


def message(channel: bytes, payload: bytes) -> bytes:
    return channel + struct.pack("<i", len(payload)) + payload


def statistic(name: bytes, value: float, aggregation: int) -> bytes:
    return message(STATISTICS, struct.pack("<i", len(name)) + name + struct.pack("<fi", value, aggregation))


def engine(resolution: tuple[int, int] = (84, 48), quality_level: int = 5) -> bytes:
    return channels.engine(
        resolution=resolution,
        quality_level=quality_level,
        time_scale=20.0,
        target_frame_rate=-1,
        capture_frame_rate=60,
    )


def sampled(kind: Any, values: list[float], seed: int = 0) -> bytes:
    return channels.parameters({"g": 1.0}, {"g": Sampler(kind=kind, values=tuple(values), seed=seed)})


def test_each_engine_setting_is_one_message() -> None:
    assert engine() == (
        ENGINE
        + bytes.fromhex("0c000000 00000000 54000000 30000000")
        + ENGINE
        + bytes.fromhex("08000000 01000000 05000000")
        + ENGINE
        + bytes.fromhex("08000000 02000000 0000a041")
        + ENGINE
        + bytes.fromhex("08000000 03000000 ffffffff")
        + ENGINE
        + bytes.fromhex("08000000 04000000 3c000000")
    )


def test_a_parameter_consists_of_its_name_and_a_float() -> None:
    payload = bytes.fromhex("04000000 6d617373 00000000 0000c03f")
    assert channels.parameters({"mass": 1.5}, {}) == PARAMETERS + bytes.fromhex("10000000") + payload


@pytest.mark.parametrize(
    ("kind", "values", "rest"),
    [
        ("uniform", [0.5, 2.0], "00000000 0000003f 00000040"),
        ("gaussian", [0.5, 2.0], "01000000 0000003f 00000040"),
        ("multirangeuniform", [0.5, 1.0, 2.0, 4.0], "02000000 04000000 0000003f 0000803f 00000040 00008040"),
    ],
)
def test_a_sampler_consists_of_its_name_seed_kind_and_numbers(kind: Any, values: list[float], rest: str) -> None:
    payload = bytes.fromhex("01000000 67 01000000 feffffff" + rest)
    assert sampled(kind, values, -2) == message(PARAMETERS, payload)


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda: channels.parameters({"größe": 1.0}, {}), "'größe'.*ASCII"),
        (lambda: channels.parameters({"mass": math.nan}, {}), "mass.*32 bits"),
        (lambda: channels.parameters({"mass": 1e300}, {}), "mass.*32 bits"),
        (lambda: engine(quality_level=2**31), "engine settings.*32 bits"),
        (lambda: engine(resolution=(84, -(2**40))), "engine settings.*32 bits"),
        (lambda: sampled("uniform", [1.0]), "'uniform'"),
        (lambda: sampled("multirangeuniform", []), "'multirangeuniform'"),
        (lambda: sampled("multirangeuniform", [1.0, 2.0, 3.0]), "'multirangeuniform'"),
        (lambda: sampled("triangular", [1.0, 2.0]), "'triangular'"),
        (lambda: sampled("uniform", [1.0, math.inf]), "sampler .*'g'.*32 bits"),
        (lambda: sampled("uniform", [1.0, 2.0], 2**31), "sampler .*'g'.*32 bits"),
    ],
)
def test_values_that_the_wire_format_cannot_hold_are_refused(write: Any, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        write()


def test_statistics_are_read_and_other_channels_skipped() -> None:
    data = (
        message(UNKNOWN, b"hello")
        + statistic(b"Goals", 1.5, 0)
        + message(ENGINE, b"")
        + b"".join(statistic(b"a/b", -2.0, aggregation) for aggregation in (1, 2, 3))
        + message(STATISTICS, struct.pack("<i1s", 1, b"n") + struct.pack("<fi", 3.0, 2) + b"newer")
    )
    assert [(one.name, one.value, one.aggregation) for one in channels.statistics(data)] == [
        ("Goals", 1.5, "average"),
        ("a/b", -2.0, "most_recent"),
        ("a/b", -2.0, "sum"),
        ("a/b", -2.0, "histogram"),
        ("n", 3.0, "sum"),
    ]
    assert channels.statistics(b"") == ()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (STATISTICS + b"\0\0\0", "19 bytes .* truncated"),
        (message(UNKNOWN, b"abc")[:-1], "length 3 with 2 bytes left"),
        (UNKNOWN + struct.pack("<i", -1), "length -1 with"),
        (message(STATISTICS, b"\0\0\0"), "3 bytes of a statistic"),
        (message(STATISTICS, struct.pack("<i", 0) + b"\0" * 7), "a statistic of 11 bytes with a name of 0"),
        (message(STATISTICS, struct.pack("<i", -5) + b"\0" * 8), "a name of -5"),
        (message(STATISTICS, struct.pack("<i", 2**31 - 1) + b"\0" * 8), "a name of 2147483647"),
        (statistic(b"x", math.nan, 0), "'x' of nan"),
        (statistic(b"x", -math.inf, 0), "'x' of -inf"),
        (statistic(b"x", 1.0, 4), "'x' with aggregation 4"),
        (statistic(b"x", 1.0, -1), "'x' with aggregation -1"),
    ],
)
def test_wrong_lengths_and_invalid_numbers_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(UnreadableData, match=reason) as raised:
        channels.statistics(statistic(b"good", 1.0, 0) + data)
    assert raised.value.remedy != RECORD_AGAIN


@given(st.lists(st.tuples(st.uuids(), st.binary(max_size=40))), st.data())
def test_joined_messages_are_split_as_they_were_joined(sent: list[tuple[UUID, bytes]], data: st.DataObject) -> None:
    """Truncation anywhere but between two messages is detected."""
    parts = [message(channel.bytes_le, payload) for channel, payload in sent]
    whole = b"".join(parts)
    assert list(channels.parse_messages(whole)) == sent
    at = data.draw(st.integers(0, len(whole)))
    ends = {sum(map(len, parts[:number])) for number in range(len(parts) + 1)}
    if at in ends:
        assert list(channels.parse_messages(whole[:at])) == sent[: sorted(ends).index(at)]
        return
    with pytest.raises(UnreadableData):
        list(channels.parse_messages(whole[:at]))


@given(st.binary(max_size=60))
def test_any_bytes_are_read_as_statistics_or_refused(data: bytes) -> None:
    for content in (data, message(STATISTICS, data)):
        try:
            found = channels.statistics(content)
        except UnreadableData:
            continue
        assert all(isinstance(one, Statistic) and math.isfinite(one.value) for one in found)
