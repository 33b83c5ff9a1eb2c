"""Makes the classes of the messages that `messages.proto` declares, when they are first needed.

They are in a pool of their own: another library of the process may define messages of the same names.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sparring.pipeline.bridges.unity import UnreadableData
from sparring.pipeline.errors import install_command

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool

Proto = Any
"""A message that `messages.proto` declares: its class is made at run time, so its fields have no static types."""

PACKAGE: Final = "communicator_objects"

_DECLARATION: Final = re.compile(r"\s*(?:message (\w+) {|(repeated )?(\w+) (\w+) = (\d+);|(}))")
_TYPES: Final = {"float": 2, "int32": 5, "bool": 8, "string": 9, "bytes": 12}  # FieldDescriptorProto.Type
_MESSAGE: Final = 11
_ONE, _MANY = 1, 3  # FieldDescriptorProto.Label


@cache
def message_class(name: str) -> type[Proto]:
    """Returns the class of a message, such as `UnityRLInputProto.ListAgentActionProto`.

    Raises:
        UnreadableData: protobuf is not installed.
    """
    try:
        from google.protobuf import message_factory
    except ImportError as error:
        raise UnreadableData("no library protobuf to read it with", install_command("unity")) from error
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))


@cache
def _pool() -> DescriptorPool:
    from google.protobuf import descriptor_pb2, descriptor_pool

    file = descriptor_pb2.FileDescriptorProto(name="messages.proto", package=PACKAGE, syntax="proto3")
    _declare(file, Path(__file__).with_suffix(".proto").read_text(encoding="utf-8"))
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


def _declare(file: FileDescriptorProto, text: str) -> None:
    """Adds the messages of a proto file of which each line opens a message, declares a field or closes a message."""
    inside: list[DescriptorProto] = []
    for line in text.splitlines():
        if (found := _DECLARATION.match(line)) is None:
            continue
        opened, repeated, kind, name, number, closed = found.groups()
        if opened:
            inside.append((inside[-1].nested_type if inside else file.message_type).add(name=opened))
        elif closed:
            inside.pop()
        else:
            field = inside[-1].field.add(name=name, number=int(number))
            field.label = _MANY if repeated else _ONE  # type: ignore[assignment]
            field.type = _TYPES.get(kind, _MESSAGE)  # type: ignore[assignment]
            if kind not in _TYPES:
                field.type_name = kind


def parsed(name: str, content: bytes, what: str) -> Proto:
    """Returns a message.

    Args:
        name: name of its class.
        content: encoded message.
        what: name of the message, for errors.

    Raises:
        UnreadableData: the bytes cannot be decoded, or protobuf is not installed.
    """
    message = message_class(name)()
    from google.protobuf.message import DecodeError  # it is installed: the class is one of its own

    try:
        message.ParseFromString(content)
    except (DecodeError, ValueError) as error:  # ValueError: a text that is no UTF-8, where protobuf is not compiled
        raise UnreadableData(f"{what} that cannot be decoded") from error
    return message
