"""Messages of Unity's communicator as the player stand-in reads and writes them.

Packed lists of numbers are declared as `bytes`: both are the same on the wire, and numpy reads bytes directly. A map is
declared as a list of entries, which it is on the wire.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

METHOD: Final = "/communicator_objects.UnityToExternalProto/Exchange"
OK: Final = 200
CLOSED: Final = 400
STEP, RESET, QUIT = range(3)
DISCRETE, CONTINUOUS = range(2)

CAPABILITIES: Final = (
    "baseRLCapabilities",
    "concatenatedPngObservations",
    "compressedChannelMapping",
    "hybridActions",
    "trainingAnalytics",
    "variableLengthObservation",
    "multiAgentGroups",
)

_TABLE: Final[dict[str, tuple[str, ...]]] = {
    "Message": ("1 header Header", "2 unity_output Output", "3 unity_input Input"),
    "Header": ("1 status int32", "2 message string"),
    "Output": ("1 rl_output bytes", "2 rl_initialization_output InitializationOutput"),
    "Input": ("1 rl_input RLInput", "2 rl_initialization_input InitializationInput"),
    "InitializationOutput": (
        "1 name string",
        "2 communication_version string",
        "5 brain_parameters BrainParameters*",
        "7 package_version string",
        "8 capabilities Capabilities",
    ),
    "InitializationInput": (
        "1 seed int32",
        "2 communication_version string",
        "3 package_version string",
        "4 capabilities Capabilities",
        "5 num_areas int32",
    ),
    "Capabilities": tuple(f"{number} {name} bool" for number, name in enumerate(CAPABILITIES, 1)),
    "BrainParameters": (
        "3 vector_action_size_deprecated bytes",
        "6 vector_action_space_type_deprecated int32",
        "7 brain_name string",
        "8 is_training bool",
        "9 action_spec ActionSpec",
    ),
    "ActionSpec": ("1 num_continuous_actions int32", "2 num_discrete_actions int32", "3 discrete_branch_sizes bytes"),
    "RLInput": ("1 agent_actions ActionsOfBehavior*", "4 command int32", "5 side_channel bytes"),
    "ActionsOfBehavior": ("1 behavior string", "2 list ActionList"),
    "ActionList": ("1 value AgentAction*",),
    "AgentAction": (
        "1 vector_actions_deprecated bytes",
        "6 continuous_actions bytes",
        "7 discrete_actions bytes",
    ),
}


def _field(text: str, table: Mapping[str, Sequence[str]], package: str) -> descriptor_pb2.FieldDescriptorProto:
    number, name, kind = text.split()
    made = descriptor_pb2.FieldDescriptorProto(name=name, number=int(number))
    made.label = made.LABEL_REPEATED if kind.endswith("*") else made.LABEL_OPTIONAL
    kind = kind.removesuffix("*")
    if kind in table:
        made.type, made.type_name = made.TYPE_MESSAGE, f".{package}.{kind}"
    else:
        made.type = made.Type.Value(f"TYPE_{kind.upper()}")
    return made


def classes(table: Mapping[str, Sequence[str]], package: str) -> dict[str, Any]:
    """Returns message classes for a table of names and fields, each "number name type" with * for a list."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    for name, fields in table.items():
        file.message_type.add(name=name).field.extend(_field(text, table, package) for text in fields)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in table}


_CLASSES: Final = classes(_TABLE, "unity_player")
Message: Any = _CLASSES["Message"]
InitializationOutput: Any = _CLASSES["InitializationOutput"]
BrainParameters: Any = _CLASSES["BrainParameters"]


def varint(value: int) -> bytes:
    """Returns a number as bytes, least significant seven bits first.

    Args:
        value: 0 or more.
    """
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def packed(values: tuple[int, ...]) -> bytes:
    """Returns a packed list of int32; negative numbers take ten bytes."""
    return b"".join(varint(value % (1 << 64)) for value in values)


def unpacked(data: bytes) -> list[int]:
    """Returns the int32 values of a packed list."""
    values, value, shift = [], 0, 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            values.append(value - (1 << 64) if value >> 63 else value)
            value = shift = 0
    return values


def chunk(number: int, payload: bytes) -> bytes:
    """Returns a field that holds bytes, text or a message."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload
