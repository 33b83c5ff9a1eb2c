"""The table of messages equals the documented one, and number arrays that it reads as bytes are the same bytes."""

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

FIELD = re.compile(r"\s*((?:repeated )?)(\w+) (\w+) = (\d+);(?:\s*//.*\b(packed|encoded)\b)?")


def documented() -> dict[str, schema.Fields]:
    """Returns `messages.proto` in the form of the table; its comments say which fields are declared as bytes."""
    text = (Path(schema.__file__).parent / "messages.proto").read_text()
    enums = set(re.findall(r"enum (\w+)", text))
    found: dict[str, schema.Fields] = {}
    inside: list[str] = []
    for line in text.splitlines():
        if opened := re.match(r"\s*(message|enum|oneof) (\w+) {", line):
            inside.append(opened[2] if opened[1] == "message" else "")
            found.update({".".join(inside): {}} if opened[1] == "message" else {})
        elif line.strip() == "}":
            inside.pop()
        elif declared := FIELD.match(line):
            repeated, kind, name, number, unread = declared.groups()
            kind = "int32" if kind in enums else kind
            if unread == "packed":
                assert repeated, line
                repeated = ""
            kind = f"{unread} {kind}" if unread else kind
            found[".".join(name for name in inside if name)][name] = (int(number), repeated + kind)
    return found


def test_the_table_of_messages_equals_the_documentation() -> None:
    """Names, numbers and types are equal; the documentation calls a nested message by its own name."""
    own = {
        message: {name: (number, re.sub(r"\w+\.(\w+)$", r"\1", kind)) for name, (number, kind) in declared.items()}
        for message, declared in schema.SCHEMA.items()
    }
    assert documented() == own


@settings(max_examples=50, deadline=None)
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
    kinds = schema.messages()
    masked = other(mask=flags).SerializeToString()
    pair = schema.parsed(kinds.pair, writer.block(1, masked), "a pair")
    assert pair.agent_info.action_mask == bytes(flags)
    assert pair.SerializeToString() == writer.block(1, masked)
    data = other(numbers=numbers).SerializeToString()
    one = schema.parsed(kinds.observation, writer.block(4, data), "an observation")
    assert one.float_data.data == np.array(numbers, "<f4").tobytes()
    assert one.SerializeToString() == writer.block(4, data)


def test_bytes_that_are_not_a_message_are_refused() -> None:
    for content in (b"\xff", b"\x0a\x05\x08", writer.block(1, writer.block(2, b"\xff\xfe"))):
        with pytest.raises(UnreadableData, match="something that cannot be decoded"):
            schema.parsed(schema.messages().exchanged, content, "something")
