"""Makes the classes of the messages of `messages.proto` from a table when they are first needed.

They are in a pool of their own: another library of the process may define messages of the same names.

Three kinds of field are declared as `bytes`, which is the same on the wire: a number, a length, and that many bytes. So
a column of many agents is read or written at once, and none of its numbers becomes a Python object.

    packed float, packed bool   a repeated number, which proto3 packs: the bytes of the array
    encoded X                   a message X (or several) that stays encoded: the bytes of each

The price: a writer that does not pack repeated numbers, which proto3 allows and none of Unity's packages does, is not
understood.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from sparring.pipeline.bridges.unity import UnreadableData
from sparring.pipeline.errors import install_command

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import DescriptorProto
    from google.protobuf.message import Message

PACKAGE: Final = "communicator_objects"

Fields = dict[str, tuple[int, str]]

SCHEMA: Final[dict[str, Fields]] = {
    "UnityMessageProto": {
        "header": (1, "HeaderProto"),
        "unity_output": (2, "UnityOutputProto"),
        "unity_input": (3, "UnityInputProto"),
    },
    "HeaderProto": {"status": (1, "int32"), "message": (2, "string")},
    "UnityOutputProto": {
        "rl_output": (1, "UnityRLOutputProto"),
        "rl_initialization_output": (2, "UnityRLInitializationOutputProto"),
    },
    "UnityInputProto": {
        "rl_input": (1, "UnityRLInputProto"),
        "rl_initialization_input": (2, "UnityRLInitializationInputProto"),
    },
    "UnityRLCapabilitiesProto": {
        "baseRLCapabilities": (1, "bool"),
        "concatenatedPngObservations": (2, "bool"),
        "compressedChannelMapping": (3, "bool"),
        "hybridActions": (4, "bool"),
        "trainingAnalytics": (5, "bool"),
        "variableLengthObservation": (6, "bool"),
        "multiAgentGroups": (7, "bool"),
    },
    "UnityRLInitializationOutputProto": {
        "name": (1, "string"),
        "communication_version": (2, "string"),
        "brain_parameters": (5, "repeated BrainParametersProto"),
        "package_version": (7, "string"),
        "capabilities": (8, "UnityRLCapabilitiesProto"),
    },
    "UnityRLInitializationInputProto": {
        "seed": (1, "int32"),
        "communication_version": (2, "string"),
        "package_version": (3, "string"),
        "capabilities": (4, "UnityRLCapabilitiesProto"),
        "num_areas": (5, "int32"),
    },
    "UnityRLOutputProto": {
        "agentInfos": (2, "repeated UnityRLOutputProto.AgentInfosEntry"),
        "side_channel": (3, "bytes"),
    },
    "UnityRLOutputProto.AgentInfosEntry": {
        "key": (1, "string"),
        "value": (2, "UnityRLOutputProto.ListAgentInfoProto"),
    },
    "UnityRLOutputProto.ListAgentInfoProto": {"value": (1, "repeated AgentInfoProto")},
    "UnityRLInputProto": {
        "agent_actions": (1, "repeated UnityRLInputProto.AgentActionsEntry"),
        "command": (4, "int32"),
        "side_channel": (5, "bytes"),
    },
    "UnityRLInputProto.AgentActionsEntry": {
        "key": (1, "string"),
        "value": (2, "encoded UnityRLInputProto.ListAgentActionProto"),
    },
    "UnityRLInputProto.ListAgentActionProto": {"value": (1, "repeated AgentActionProto")},
    "BrainParametersProto": {
        "vector_action_size_deprecated": (3, "repeated int32"),
        "vector_action_space_type_deprecated": (6, "int32"),
        "brain_name": (7, "string"),
        "action_spec": (9, "ActionSpecProto"),
    },
    "ActionSpecProto": {
        "num_continuous_actions": (1, "int32"),
        "num_discrete_actions": (2, "int32"),
        "discrete_branch_sizes": (3, "repeated int32"),
    },
    "AgentInfoProto": {
        "reward": (7, "float"),
        "done": (8, "bool"),
        "max_step_reached": (9, "bool"),
        "id": (10, "int32"),
        "action_mask": (11, "packed bool"),
        "observations": (13, "repeated encoded ObservationProto"),
        "group_id": (14, "int32"),
        "group_reward": (15, "float"),
    },
    "AgentActionProto": {
        "vector_actions_deprecated": (1, "packed float"),
        "continuous_actions": (6, "packed float"),
        "discrete_actions": (7, "repeated int32"),
    },
    "ObservationProto": {
        "shape": (1, "repeated int32"),
        "compression_type": (2, "int32"),
        "compressed_data": (3, "bytes"),
        "float_data": (4, "ObservationProto.FloatData"),
        "compressed_channel_mapping": (5, "repeated int32"),
        "dimension_properties": (6, "repeated int32"),
        "observation_type": (7, "int32"),
        "name": (8, "string"),
    },
    "ObservationProto.FloatData": {"data": (1, "packed float")},
    "DemonstrationMetaProto": {"api_version": (1, "int32"), "number_steps": (3, "int32")},
    "AgentInfoActionPairProto": {"agent_info": (1, "AgentInfoProto"), "action_info": (2, "AgentActionProto")},
    "TrainingEnvironmentInitialized": {
        "mlagents_version": (1, "string"),
        "mlagents_envs_version": (2, "string"),
        "python_version": (3, "string"),
        "torch_version": (4, "string"),
        "torch_device_type": (5, "string"),
        "num_envs": (6, "int32"),
        "num_environment_parameters": (7, "int32"),
    },
    "TrainingBehaviorInitialized": {
        "behavior_name": (1, "string"),
        "trainer_type": (2, "string"),
        "extrinsic_reward_enabled": (3, "bool"),
        "gail_reward_enabled": (4, "bool"),
        "curiosity_reward_enabled": (5, "bool"),
        "rnd_reward_enabled": (6, "bool"),
        "behavioral_cloning_enabled": (7, "bool"),
        "recurrent_enabled": (8, "bool"),
        "visual_encoder": (9, "string"),
        "num_network_layers": (10, "int32"),
        "num_network_hidden_units": (11, "int32"),
        "trainer_threaded": (12, "bool"),
        "self_play_enabled": (13, "bool"),
        "curriculum_enabled": (14, "bool"),
    },
}
"""Fields of each message: number and type. An enum is declared as int32, which is the same on the wire."""

_KINDS: Final = {"float": 2, "int32": 5, "bool": 8, "string": 9, "bytes": 12}  # FieldDescriptorProto.Type
_UNREAD: Final = ("packed ", "encoded ")
_MESSAGE: Final = 11
_ONE, _MANY = 1, 3  # FieldDescriptorProto.Label


@dataclass(frozen=True, kw_only=True, slots=True)
class Messages:
    """Holds the classes of the messages that are top-level, or in a field that stays encoded.

    Attributes:
        exchanged: UnityMessageProto, the message between a player and a trainer.
        meta: DemonstrationMetaProto.
        brain: BrainParametersProto.
        pair: AgentInfoActionPairProto.
        observation: ObservationProto.
        actions: ListAgentActionProto.
        environment_initialized: TrainingEnvironmentInitialized.
        behavior_initialized: TrainingBehaviorInitialized.
    """

    exchanged: type[Message]
    meta: type[Message]
    brain: type[Message]
    pair: type[Message]
    observation: type[Message]
    actions: type[Message]
    environment_initialized: type[Message]
    behavior_initialized: type[Message]


@cache
def messages() -> Messages:
    """Returns the classes.

    Raises:
        UnreadableData: protobuf is not installed.
    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as error:
        raise UnreadableData("no library protobuf to read it with", install_command("unity")) from error
    file = descriptor_pb2.FileDescriptorProto(name="messages.proto", package=PACKAGE, syntax="proto3")
    made: dict[str, DescriptorProto] = {}
    for name, fields in SCHEMA.items():
        outer, _, inner = name.rpartition(".")
        made[name] = (made[outer].nested_type if outer else file.message_type).add(name=inner)
        _fill(made[name], fields)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())

    def made_class(name: str) -> Any:
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))

    return Messages(
        exchanged=made_class("UnityMessageProto"),
        meta=made_class("DemonstrationMetaProto"),
        brain=made_class("BrainParametersProto"),
        pair=made_class("AgentInfoActionPairProto"),
        observation=made_class("ObservationProto"),
        actions=made_class("UnityRLInputProto.ListAgentActionProto"),
        environment_initialized=made_class("TrainingEnvironmentInitialized"),
        behavior_initialized=made_class("TrainingBehaviorInitialized"),
    )


def _fill(message: DescriptorProto, fields: Fields) -> None:
    for name, (number, declared) in fields.items():
        kind = declared.removeprefix("repeated ")
        field = message.field.add(name=name, number=number)
        field.label = _MANY if kind != declared else _ONE  # type: ignore[assignment]
        kind = "bytes" if kind.startswith(_UNREAD) else kind
        field.type = _KINDS.get(kind, _MESSAGE)  # type: ignore[assignment]
        if kind not in _KINDS:
            field.type_name = f".{PACKAGE}.{kind}"


def parsed(kind: type[Message], content: bytes, what: str) -> Any:
    """Returns the message of a class.

    Args:
        kind: the class.
        content: encoded message.
        what: name of the message, for errors.

    Raises:
        UnreadableData: the bytes cannot be decoded.
    """
    message = kind()
    try:
        message.ParseFromString(content)
    except _refusals() as error:  # evaluated only for an error
        raise UnreadableData(f"{what} that cannot be decoded") from error
    return message


def _refusals() -> tuple[type[Exception], ...]:
    from google.protobuf.message import DecodeError

    return DecodeError, ValueError  # a text that is no UTF-8, where protobuf is not compiled
