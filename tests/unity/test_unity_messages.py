"""Messages have the fields of their declaration, and number arrays that are read as bytes are the same bytes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.unity.player_writer as writer
from sparring.pipeline.bridges.unity import UnreadableData
from sparring.pipeline.bridges.unity import messages as schema


def test_every_line_of_the_declaration_is_understood() -> None:
    """A field that is declared otherwise than the others would be skipped."""
    text = (Path(schema.__file__).parent / "messages.proto").read_text()
    file = schema.message_class("UnityMessageProto").DESCRIPTOR.file
    messages = [*file.message_types_by_name.values()]
    messages += [inner for message in messages for inner in message.nested_types]
    assert len(messages) == len(re.findall(r"^ *message \w+ {", text, re.MULTILINE))
    assert sum(len(message.fields) for message in messages) == len(re.findall(r" = \d+;", text))


@settings(max_examples=25, deadline=None)
@given(
    numbers=st.lists(st.floats(width=32, allow_nan=False), max_size=40),
    flags=st.lists(st.booleans(), max_size=140),
)
def test_packed_numbers_are_the_bytes_of_their_array(numbers: list[float], flags: list[bool]) -> None:
    """Protobuf writes repeated numbers, which are read as bytes and written back unchanged."""
    file = descriptor_pb2.FileDescriptorProto(name="other.proto", package="other", syntax="proto3")
    message = file.message_type.add(name="AgentInfoProto")
    field = descriptor_pb2.FieldDescriptorProto
    message.field.add(name="mask", number=11, label=field.LABEL_REPEATED, type=field.TYPE_BOOL)
    message.field.add(name="numbers", number=1, label=field.LABEL_REPEATED, type=field.TYPE_FLOAT)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    other = message_factory.GetMessageClass(pool.FindMessageTypeByName("other.AgentInfoProto"))
    masked = other(mask=flags).SerializeToString()
    pair = schema.parsed("AgentInfoActionPairProto", writer.block(1, masked), "a pair")
    assert pair.agent_info.action_mask == bytes(flags)
    assert pair.SerializeToString() == writer.block(1, masked)
    data = other(numbers=numbers).SerializeToString()
    one = schema.parsed("ObservationProto", writer.block(4, data), "an observation")
    assert one.float_data.data == np.array(numbers, "<f4").tobytes()
    assert one.SerializeToString() == writer.block(4, data)


def test_bytes_that_are_not_a_message_are_refused() -> None:
    for content in (b"\xff", b"\x0a\x05\x08", writer.block(1, writer.block(2, b"\xff\xfe"))):
        with pytest.raises(UnreadableData, match="something that cannot be decoded"):
            schema.parsed("UnityMessageProto", content, "something")
