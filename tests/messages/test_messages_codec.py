"""The codec keeps every record, and refuses everything else."""

from __future__ import annotations

import dataclasses
import math
import tracemalloc
import types
import typing
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import sparring.pipeline.messages.segments  # noqa: F401  registers its records
from sparring.pipeline.errors import CodecError, LimitExceeded
from sparring.pipeline.messages import codec
from sparring.pipeline.messages.codec import (
    PREFIX,
    SIMULATORS,
    FrameReader,
    FrameWriter,
    Limits,
    decode,
    encode,
    from_bytes,
    to_bytes,
)
from sparring.pipeline.messages.schema import TAGS, Columns, record, tag_of
from sparring.pipeline.messages.simulator import Act, BehaviorActions, Ends, Fault, Hello, Ping, Reset, Step, Welcome
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SPECS = st.builds(
    BehaviorSpec,
    observations=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(
        lambda sizes: tuple(ObservationSpec(name=f"o{i}", shape=(size,)) for i, size in enumerate(sizes))
    ),
    actions=st.builds(ActionSpec, continuous=st.integers(1, 4), discrete=st.tuples(st.integers(1, 5))),
)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Generates values that an annotation allows."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        columns = next(one for one in hint.__metadata__ if isinstance(one, Columns))
        ndim = {} if columns.ndim is None else {"min_dims": columns.ndim, "max_dims": columns.ndim}
        shapes = (
            hnp.array_shapes(min_side=0, max_side=4, **ndim)
            if ndim
            else hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
        )
        return st.sampled_from(columns.dtypes).flatmap(lambda dtype: hnp.arrays(np.dtype(dtype), shapes))
    if hint is BehaviorSpec:
        return SPECS
    if dataclasses.is_dataclass(hint):
        return records(typing.cast("type[Any]", hint))
    if origin in (types.UnionType, typing.Union):
        return st.none() | values(next(arg for arg in args if arg is not type(None)))
    if origin is tuple:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(TEXT, values(args[1]), max_size=3)
    if origin is typing.Literal:
        return st.sampled_from(args)
    plain = {bool: st.booleans(), int: st.integers(-(2**63), 2**63 - 1), str: TEXT}
    return plain.get(hint, st.floats(allow_nan=False, allow_infinity=False))


def records(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Generates records of one class."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return st.fixed_dictionaries({name: values(hint) for name, hint in hints.items()}).map(lambda kw: cls(**kw))


def plain(value: Any) -> Any:
    """Returns a record as nested tuples that compare by value, arrays by dtype, shape and bytes."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if dataclasses.is_dataclass(value):
        return type(value), tuple(plain(getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return value


@pytest.mark.parametrize("tag", sorted(TAGS))
def test_every_record_survives_frames_and_stream_unchanged(tag: str) -> None:
    @settings(max_examples=12, deadline=None)
    @given(records(TAGS[tag]))
    def check(value: Any) -> None:
        assert plain(decode(encode(value))) == plain(value)
        assert plain(from_bytes(to_bytes(value))) == plain(value)
        assert len(to_bytes(value)) % 8 == 0

    check()


@settings(max_examples=25, deadline=None)
@given(st.lists(records(BehaviorActions) | records(Ping) | records(Ends), max_size=4), st.data())
def test_a_stream_split_anywhere_gives_the_same_messages(sent: list[Any], data: st.DataObject) -> None:
    stream = b"".join(map(to_bytes, sent))
    boundaries = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader, got = FrameReader(), []
    for start, end in zip([0, *boundaries], [*boundaries, len(stream)], strict=True):
        reader.feed(stream[start:end])
        while (message := reader.next()) is not None:
            got.append(message)
    assert list(map(plain, got)) == list(map(plain, sent))
    assert reader.buffered == 0


SEQUENCES = st.sampled_from([0, 1, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**63 - 1, -1])


def reversed_columns(value: Any) -> Any:
    """Returns a record of the same shapes whose arrays have their rows in reverse order."""
    if isinstance(value, np.ndarray):
        return value[::-1] if value.ndim else value
    if isinstance(value, tuple):
        return tuple(map(reversed_columns, value))
    if not hasattr(value, "__record_tag__"):
        return value
    return dataclasses.replace(
        value, **{field.name: reversed_columns(getattr(value, field.name)) for field in dataclasses.fields(value)}
    )


@settings(max_examples=50, deadline=None)
@given(st.lists(records(Step) | records(Act), min_size=1, max_size=2), st.data())
def test_a_message_that_recurs_is_read_and_written_as_if_it_were_the_first(
    kinds: list[Any], data: st.DataObject
) -> None:
    """Agents appear, vanish and change their order, and columns their shape, at any place among equal Steps."""
    reader, writer = FrameReader(), FrameWriter()
    kinds += [Act(sequence=0, actions=(), parameters={"sequence": 1.0, "\xa8sequence": 0.0})]
    for kind in data.draw(st.lists(st.sampled_from(kinds), min_size=4, max_size=10)):
        rows = data.draw(st.sampled_from([kind, reversed_columns(kind)]))
        sent = dataclasses.replace(rows, sequence=data.draw(SEQUENCES))
        written = writer.to_bytes(sent)
        assert written == to_bytes(sent)
        reader.feed(written)
        assert plain(reader.next()) == plain(sent)


def test_a_record_that_recurs_is_not_packed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = FrameWriter()
    for sequence in (7, 8):
        writer.to_bytes(dataclasses.replace(ACT, sequence=sequence))
    expected = to_bytes(dataclasses.replace(ACT, sequence=300))
    monkeypatch.delattr(codec, "encode")
    assert writer.to_bytes(dataclasses.replace(ACT, sequence=300)) == expected
    with pytest.raises(NameError):
        writer.to_bytes(Ping())


def steady_reader() -> FrameReader:
    """Returns a reader that has read the same Act several times."""
    reader = FrameReader()
    for sequence in (7, 8):
        reader.feed(to_bytes(dataclasses.replace(ACT, sequence=sequence)))
        assert reader.next() is not None
    return reader


def test_a_header_that_recurs_is_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = steady_reader()
    monkeypatch.delattr(codec, "unpack")
    for sequence in (9, 300, 2**40):
        reader.feed(to_bytes(dataclasses.replace(ACT, sequence=sequence)))
        assert reader.next().sequence == sequence
    reader.feed(to_bytes(Ping()))
    with pytest.raises(NameError):
        reader.next()


@pytest.mark.parametrize("name", ["sequence", "\xa8sequence", "sequence\0"])
@pytest.mark.parametrize("first", ["sequence", "actions"])
def test_the_number_is_found_in_headers_of_any_order(name: str, first: str) -> None:
    """Programs in other languages write fields in an order of their own, and may name a behavior as a field."""
    reader, row = FrameReader(), [["<i8", [1]], ["<f4", [1, 1]], ["<i4", [1, 1]]]
    for sequence in (*range(5), 300):
        fields = {"sequence": sequence, "actions": [entry(behavior=name)], "parameters": {name: 1.0}}
        body = {first: fields.pop(first), **fields}
        reader.feed(message({"body": body, "arrays": row, "type": "act"}, bytes(24)))
        act = reader.next()
        assert (act.sequence, act.actions[0].behavior, act.parameters) == (sequence, name, {name: 1.0})
    for _ in range(3):
        reader.feed(to_bytes(Reset(parameters={name: 1.0})))
        assert reader.next().parameters == {name: 1.0}


def test_of_a_number_that_is_there_twice_the_last_counts_however_often_it_recurs() -> None:
    reader = FrameReader()
    for sequence in range(5):
        packed = msgpack.packb(parts("act", {"sequence": sequence, "SEQUENCE": 1, "actions": []}))
        reader.feed(message(packed.replace(b"SEQUENCE", b"sequence")))
        assert reader.next().sequence == 1


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_reader_that_knows_a_header_judges_damage_as_a_new_one_does(data: st.DataObject) -> None:
    changed = bytearray(to_bytes(dataclasses.replace(ACT, sequence=data.draw(SEQUENCES))))
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, min(len(changed) - 1, 200)))] = data.draw(st.integers(0, 255))

    def judge(reader: FrameReader) -> Any:
        reader.feed(bytes(changed))
        try:
            return plain(reader.next())
        except CodecError as error:
            return str(error)

    assert judge(steady_reader()) == judge(FrameReader())


def test_one_byte_at_a_time_gives_the_same_messages() -> None:
    sent = [ACT, Ping(number=3), ACT]
    reader, got = FrameReader(), []
    for byte in b"".join(map(to_bytes, sent)):
        reader.feed(bytes([byte]))
        if (message := reader.next()) is not None:
            got.append(message)
    assert list(map(plain, got)) == list(map(plain, sent))


def test_decoded_arrays_are_read_only_views_of_the_received_bytes() -> None:
    message = to_bytes(ACT)
    array = from_bytes(message).actions[0].continuous
    assert not array.flags.writeable
    assert np.shares_memory(array, np.frombuffer(message, np.uint8))
    frames = [bytes(frame) for frame in encode(ACT)]
    assert np.shares_memory(decode(frames).actions[0].continuous, np.frombuffer(frames[2], np.uint8))


def test_arrays_in_a_stream_start_at_multiples_of_eight() -> None:
    message = to_bytes(ACT)
    start = np.frombuffer(message, np.uint8).ctypes.data
    actions = from_bytes(message).actions[0]
    for array in (actions.agents, actions.continuous, actions.discrete):
        assert (array.ctypes.data - start) % 8 == 0


# ---------------------------------------------------------------- refused messages

ACT = Act(
    sequence=1,
    actions=(
        BehaviorActions(
            behavior="Ball?team=0",
            agents=np.arange(3, dtype=np.int64),
            continuous=np.ones((3, 2), np.float32),
            discrete=np.zeros((3, 1), np.int32),
        ),
    ),
)


def message(header: Any, payload: bytes = b"") -> bytes:
    """Returns a message in stream form with any header."""
    packed = header if isinstance(header, bytes) else msgpack.packb(header)
    padding = bytes(-(PREFIX.size + len(packed)) % 8)
    total = PREFIX.size + len(packed) + len(padding) + len(payload)
    return PREFIX.pack(total, len(packed)) + packed + padding + payload


def parts(tag: str = "ping", body: Any = None, arrays: Any = ()) -> dict[str, Any]:
    return {"type": tag, "body": {} if body is None else body, "arrays": list(arrays)}


def entry(**changes: Any) -> dict[str, Any]:
    fields = {"behavior": "B", "agents": 0, "continuous": 1, "discrete": 2, **changes}
    return {name: value for name, value in fields.items() if value is not None}


GOOD = [["<i8", [1]], ["<f4", [1, 1]], ["<i4", [1, 1]]]
MALFORMED = {
    "unknown tag": message(parts("teleport")),
    "tag that is no text": message({"type": 7, "body": {}, "arrays": []}),
    "unknown field": message(parts(body={"number": 1, "colour": 2})),
    "field name that is no text": message(parts(body={7: 1})),
    "missing field": message(parts("welcome", {"version": 1, "connection": 1, "heartbeat_s": 1.0})),
    "body that is no map": message(parts(body=[1])),
    "no body": message({"type": "ping", "arrays": []}),
    "additional header entry": message({**parts(), "extra": 1}),
    "header that is no map": message([1, 2]),
    "header that is no MessagePack": message(b"\xc1\xc1\xc1"),
    "header with bytes after it": message(msgpack.packb(parts()) + b"\x00"),
    "truncated header": message(msgpack.packb(parts())[:-3]),
    "extension type": message(msgpack.packb({**parts(), "body": {"number": msgpack.ExtType(5, b"x")}})),
    "timestamp": message(msgpack.packb({**parts(), "body": {"number": msgpack.Timestamp(1)}})),
    "text that is no UTF-8": message(msgpack.packb(parts(body={"number": 1})).replace(b"number", b"num\xff\xfeb")),
    "int where bool": message(parts("fault", {"code": 1, "got": "", "expected": "", "remedy": ""})),
    "bool where int": message(parts(body={"number": True})),
    "float where int": message(parts(body={"number": 1.0})),
    "text where int": message(parts(body={"number": "1"})),
    "nan": message(parts("welcome", {"version": 1, "connection": 1, "heartbeat_s": math.nan, "timeout_s": 1.0})),
    "infinity": message(parts("reset", {"parameters": {"gravity": math.inf}})),
    "nil where not optional": message(parts(body={"number": None})),
    "map with keys that are no text": message(parts("reset", {"parameters": {1: 1.0}})),
    "list where map": message(parts("reset", {"parameters": [1.0]})),
    "map where list": message(parts("act", {"sequence": 0, "actions": {}})),
    "choice that is none": message(
        parts("statistic", {"name": "a", "value": 1.0, "aggregation": "median"}),
    ),
    "arrays that are no list": message({"type": "ping", "body": {}, "arrays": {}}),
    "array description of three": message(parts(arrays=[["<f4", [1], 0]]), bytes(8)),
    "array description that is text": message(parts(arrays=["<f4"]), bytes(8)),
    "unknown dtype": message(parts(arrays=[["<f8", [1]]]), bytes(8)),
    "object dtype": message(parts(arrays=[["|O", [1]]]), bytes(8)),
    "big-endian dtype": message(parts(arrays=[[">f4", [2]]]), bytes(8)),
    "negative size": message(parts(arrays=[["<f4", [-1]]]), bytes(8)),
    "size that is a float": message(parts(arrays=[["<f4", [1.0]]]), bytes(8)),
    "size that is true": message(parts(arrays=[["<f4", [True]]]), bytes(8)),
    "shape of more than is there": message(parts(arrays=[["<f4", [100]]]), bytes(8)),
    "shape of less than is there": message(parts(arrays=[["<f4", [1]]]), bytes(24)),
    "array that is nowhere": message(parts(arrays=[["<f4", [2]]])),
    "bytes after the last array": message(parts(), bytes(8)),
    "index beyond the arrays": message(parts("actions", entry(discrete=3), GOOD), bytes(24)),
    "negative index": message(parts("actions", entry(discrete=-1), GOOD), bytes(24)),
    "index that is true": message(parts("actions", entry(agents=True), GOOD), bytes(24)),
    "array of a wrong dtype": message(parts("actions", entry(discrete=1), GOOD), bytes(24)),
    "array of a wrong rank": message(parts("actions", entry(), [GOOD[0], ["<f4", [1]], GOOD[2]]), bytes(24)),
    "missing array field": message(parts("actions", entry(discrete=None), GOOD), bytes(24)),
    "spec that refuses its values": message(
        parts(
            "behaviors",
            {"behaviors": {"B": {"observations": [{"name": "o", "shape": [0]}], "actions": {"continuous": 1}}}},
        )
    ),
    "empty header": PREFIX.pack(8, 0),
    "header longer than the message": PREFIX.pack(16, 100) + bytes(8),
    "total below the prefix": PREFIX.pack(4, 1) + bytes(8),
}
TOO_LARGE = {
    "10 GB in one array": message(parts(arrays=[["<f4", [2_500_000_000]]]), bytes(8)),
    "10 GB by several dimensions": message(parts(arrays=[["<f4", [50_000, 50_000]]]), bytes(8)),
    "more than 64 bits of bytes": message(parts(arrays=[["<i8", [2**26] * 8]]), bytes(8)),
    "a prefix of 4 GB": PREFIX.pack(2**32 - 1, 100),
    "a header of 4 GB": PREFIX.pack(1000, 2**32 - 1),
    "too many arrays": message(parts(arrays=[["<f4", [0]]] * 1025)),
    "too many dimensions": message(parts(arrays=[["<f4", [1] * 9]]), bytes(8)),
}
BOMBS = {
    "nested lists": message(b"\x91" * 200_000),
    "nested maps": message(b"\x81\xa1a" * 60_000),
    "list that claims 4 billion": message(b"\xdd\xff\xff\xff\xff"),
    "map that claims 4 billion": message(b"\xdf\xff\xff\xff\xff"),
    "text that claims 4 GB": message(b"\xdb\xff\xff\xff\xff"),
    "bytes that claim 4 GB": message(b"\xc6\xff\xff\xff\xff"),
    "extension that claims 4 GB": message(b"\xc9\xff\xff\xff\xff\x01"),
    "list of lists that claim": message(b"\xdc\xff\xff" * 1000),
}


@pytest.mark.parametrize("bad", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_messages_are_refused_in_three_parts(bad: bytes) -> None:
    with pytest.raises(CodecError) as caught:
        from_bytes(bad)
    assert caught.value.got
    assert caught.value.expected
    assert caught.value.remedy


@pytest.mark.parametrize("bad", [*TOO_LARGE.values(), *BOMBS.values()], ids=[*TOO_LARGE, *BOMBS])
def test_claims_over_the_limits_are_refused_before_anything_is_allocated(bad: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            from_bytes(bad)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("bad", TOO_LARGE.values(), ids=TOO_LARGE.keys())
def test_claims_over_the_limits_name_the_limit(bad: bytes) -> None:
    with pytest.raises(LimitExceeded, match="at most"):
        from_bytes(bad)


def test_a_reader_refuses_a_long_message_at_its_prefix() -> None:
    reader = FrameReader(Limits(total=1000))
    reader.feed(PREFIX.pack(1001, 10))
    with pytest.raises(LimitExceeded):
        reader.next()


@pytest.mark.parametrize("bad", [*MALFORMED.values(), *BOMBS.values()], ids=[*MALFORMED, *BOMBS])
def test_malformed_messages_are_refused_one_byte_at_a_time_as_well(bad: bytes) -> None:
    reader = FrameReader()
    with pytest.raises(CodecError):  # noqa: PT012  the byte at which it is refused does not matter
        for start in range(0, len(bad), 1 if len(bad) < 1000 else 997):
            reader.feed(bad[start : start + (1 if len(bad) < 1000 else 997)])
            assert reader.next() is None


@pytest.mark.parametrize("size", range(len(to_bytes(ACT))))
def test_a_truncated_message_never_becomes_a_record(size: int) -> None:
    truncated = to_bytes(ACT)[:size]
    with pytest.raises(CodecError):
        from_bytes(truncated)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(to_bytes(ACT)) - 1), st.integers(0, 255))
def test_a_changed_byte_gives_a_record_or_a_typed_error(position: int, byte: int) -> None:
    changed = bytearray(to_bytes(ACT))
    changed[position] = byte
    try:
        result = from_bytes(changed)
    except CodecError:
        return
    assert tag_of(result) in TAGS


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_any_header_gives_a_record_or_a_typed_error(header: bytes) -> None:
    try:
        found = from_bytes(message(header) if header else PREFIX.pack(8, 0))
    except CodecError:
        return
    assert tag_of(found) in TAGS


def test_frames_must_match_their_description_in_number_and_size() -> None:
    frames = encode(ACT)
    for wrong in (
        [],
        frames[:-1],
        [*frames, b""],
        [*frames[:-1], b"1234"],
        [*frames[:-1], bytes(frames[-1]) + b"1234"],
    ):
        with pytest.raises(CodecError):
            decode(wrong)
    with pytest.raises(LimitExceeded):
        decode(frames, Limits(total=10))
    with pytest.raises(LimitExceeded):
        decode(frames, Limits(header=10))


def test_a_wrong_column_is_refused_by_the_encoder() -> None:
    for wrong in (np.zeros(1, np.float64), np.zeros((1, 1), np.float32), [0.0], np.zeros(1, ">f4")):
        agents, interrupted = np.zeros(1, np.int64), np.zeros(1, np.bool_)
        ends = Ends(agents=agents, observations=(), rewards=wrong, interrupted=interrupted)
        with pytest.raises(CodecError, match="convert"):
            encode(ends)


def test_columns_that_are_not_contiguous_are_sent_in_c_order() -> None:
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    sent = BehaviorActions(
        behavior="B", agents=np.arange(6, dtype=np.int64)[::2], continuous=matrix.T, discrete=np.zeros((4, 0), np.int32)
    )
    got = from_bytes(to_bytes(sent))
    np.testing.assert_array_equal(got.continuous, matrix.T)
    np.testing.assert_array_equal(got.agents, [0, 2, 4])


def test_broken_text_of_a_game_is_told_in_its_fault() -> None:
    """Its error may quote bytes that are no text."""
    fault = Fault(code="internal", got="a\udcffb", expected="", remedy="")
    assert from_bytes(to_bytes(fault)).got == "a\\udcffb"


def test_missing_fields_get_defaults_and_integers_are_valid_floats() -> None:
    assert from_bytes(message(parts("reset"))) is not None
    assert from_bytes(message(parts("reset"))).seed is None
    assert from_bytes(message(parts("reset", {"parameters": {"gravity": 9}}))).parameters == {"gravity": 9.0}
    assert from_bytes(message(parts("hello", {"version": 1, "name": "x", "behaviors": {}}))).steps == {}


def test_simulators_get_tighter_limits_than_services() -> None:
    assert codec.SERVICES.total > SIMULATORS.total
    assert codec.SERVICES.header > SIMULATORS.header
    assert codec.SERVICES.arrays > SIMULATORS.arrays


def test_a_tag_cannot_be_used_twice() -> None:
    with pytest.raises(ValueError, match="taken by Ping"):
        record("ping")(type("Other", (), {}))


def test_records_are_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Ping().number = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        Ping(1)  # type: ignore[misc]
    assert {Hello, Welcome, Reset} <= set(TAGS.values())
