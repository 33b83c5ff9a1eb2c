"""The trainer's side in tests of the player stand-in: messages of the real types, and a scripted server."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.unknown_fields import UnknownFieldSet

from tests.simulation import unity_player

_TYPES: Final = """
UnityMessageProto: HeaderProto header 1, UnityOutputProto unity_output 2, UnityInputProto unity_input 3
HeaderProto: int32 status 1, string message 2
UnityOutputProto: UnityRLOutputProto rl_output 1, UnityRLInitializationOutputProto rl_initialization_output 2
UnityInputProto: UnityRLInputProto rl_input 1, UnityRLInitializationInputProto rl_initialization_input 2
UnityRLInitializationOutputProto: string name 1, string communication_version 2, string log_path 3,
 BrainParametersProto* brain_parameters 5, string package_version 7, UnityRLCapabilitiesProto capabilities 8
UnityRLInitializationInputProto: int32 seed 1, string communication_version 2, string package_version 3,
 UnityRLCapabilitiesProto capabilities 4, int32 num_areas 5
UnityRLCapabilitiesProto: bool baseRLCapabilities 1, bool concatenatedPngObservations 2,
 bool compressedChannelMapping 3, bool hybridActions 4, bool trainingAnalytics 5, bool variableLengthObservation 6,
 bool multiAgentGroups 7
BrainParametersProto: int32* vector_action_size_deprecated 3, string* vector_action_descriptions_deprecated 5,
 int32 vector_action_space_type_deprecated 6, string brain_name 7, bool is_training 8, ActionSpecProto action_spec 9
ActionSpecProto: int32 num_continuous_actions 1, int32 num_discrete_actions 2, int32* discrete_branch_sizes 3,
 string* action_descriptions 4
UnityRLInputProto: map.ListAgentActionProto agent_actions 1, int32 command 4, bytes side_channel 5
ListAgentActionProto: AgentActionProto* value 1
AgentActionProto: float* vector_actions_deprecated 1, float value 4, float* continuous_actions 6,
 int32* discrete_actions 7
UnityRLOutputProto: map.ListAgentInfoProto agentInfos 2, bytes side_channel 3
ListAgentInfoProto: AgentInfoProto* value 1
AgentInfoProto: float reward 7, bool done 8, bool max_step_reached 9, int32 id 10, bool* action_mask 11,
 ObservationProto* observations 13, int32 group_id 14, float group_reward 15
ObservationProto: int32* shape 1, int32 compression_type 2, bytes compressed_data 3, FloatData float_data 4,
 int32* compressed_channel_mapping 5, int32* dimension_properties 6, int32 observation_type 7, string name 8
FloatData: float* data 1
"""
_PACKAGE: Final = "communicator_objects"
STEP, RESET, QUIT = range(3)


def _add(message: descriptor_pb2.DescriptorProto, kind: str, name: str, number: int, full: str) -> None:
    made = message.field.add(name=name, number=number)
    made.label = made.LABEL_REPEATED if kind.endswith("*") or kind.startswith("map.") else made.LABEL_OPTIONAL
    kind = kind.removesuffix("*")
    if kind.startswith("map."):
        entry = message.nested_type.add(name="".join(part[0].upper() + part[1:] for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        _add(entry, "string", "key", 1, full)
        _add(entry, kind.removeprefix("map."), "value", 2, full)
        made.type, made.type_name = made.TYPE_MESSAGE, f".{_PACKAGE}.{full}.{entry.name}"
    elif kind[0].isupper():
        made.type, made.type_name = made.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    else:
        made.type = made.Type.Value(f"TYPE_{kind.upper()}")


def _message_classes(*names: str) -> list[Any]:
    file = descriptor_pb2.FileDescriptorProto(name="communicator.proto", package=_PACKAGE, syntax="proto3")
    for line in _TYPES.strip().replace(",\n", ",").splitlines():
        name, _, fields = line.partition(": ")
        message = file.message_type.add(name=name)
        for text in fields.split(","):
            kind, field_name, number = text.split()
            _add(message, kind, field_name, int(number), name)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return [message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in names]


Message: Any
AgentAction: Any
Message, AgentAction = _message_classes("UnityMessageProto", "AgentActionProto")


def unknown(message: Any) -> int:
    """Returns the number of fields, at any depth, that the types do not define."""
    count = len(UnknownFieldSet(message))
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None:
            continue
        if descriptor.message_type.GetOptions().map_entry:
            count += sum(unknown(part) for part in value.values())
        else:
            count += sum(unknown(part) for part in (value if descriptor.is_repeated else [value]))
    return count


def side_channel(identity: Any, *parts: bytes) -> bytes:
    """Returns one message of a side channel."""
    payload = b"".join(parts)
    return bytes(identity.bytes_le) + struct.pack("<i", len(payload)) + payload


def string(text: str) -> bytes:
    """Returns a string in the format of side channels."""
    return struct.pack("<i", len(text)) + text.encode("ascii")


Act = Callable[[int, Any, Any], None]


@dataclass
class Trainer:
    """Answers a player with initialization, reset, `steps` steps and quit.

    Attributes:
        act: function of the number of a message with agents, its agentInfos and the answer's rl_input, which it fills.
        missing: capabilities that the trainer lacks.
        side: side channel bytes of the reset.
        quit_with: command at the end, or 400 for that status.
        calls: received bytes; `messages` holds them parsed.
    """

    steps: int = 5
    act: Act | None = None
    missing: tuple[str, ...] = ()
    side: bytes = b""
    quit_with: int = QUIT
    seed: int = 7
    areas: int = 1
    version: str = "1.5.0"
    specs: dict[str, Any] = field(default_factory=dict)
    calls: list[bytes] = field(default_factory=list)
    messages: list[Any] = field(default_factory=list)

    @property
    def outputs(self) -> list[Any]:
        """Returns the agents of each message that has some, by behavior."""
        return [m.unity_output.rl_output.agentInfos for m in self.messages if m.unity_output.HasField("rl_output")]

    def answer(self, data: bytes, context: Any) -> bytes:
        """Answers one message."""
        del context
        self.calls.append(data)
        self.messages.append(message := Message.FromString(data))
        for brain in message.unity_output.rl_initialization_output.brain_parameters:
            self.specs[brain.brain_name] = brain
        reply = Message()
        reply.header.status = 200
        if len(self.calls) == 1:
            self._initialize(reply.unity_input.rl_initialization_input)
        elif len(self.calls) == 2:
            reply.unity_input.rl_input.command = RESET
            reply.unity_input.rl_input.side_channel = self.side
        elif len(self.calls) - 2 > self.steps:
            self._quit(reply)
        else:
            reply.unity_input.rl_input.SetInParent()
            (self.act or self.zeros)(len(self.calls) - 2, self.outputs[-1], reply.unity_input.rl_input)
        return bytes(reply.SerializeToString())

    def _initialize(self, initialization: Any) -> None:
        initialization.seed, initialization.num_areas = self.seed, self.areas
        initialization.communication_version, initialization.package_version = self.version, "1.1.0"
        for capability in initialization.capabilities.DESCRIPTOR.fields:
            setattr(initialization.capabilities, capability.name, capability.name not in self.missing)

    def _quit(self, reply: Any) -> None:
        if self.quit_with == QUIT:
            reply.unity_input.rl_input.command = QUIT
        else:
            reply.header.status = self.quit_with

    def zeros(self, number: int, infos: Any, rl_input: Any) -> None:
        """Fills in zero for every action."""
        del number
        for key, agents in infos.items():
            for agent in agents.value:
                if not agent.done:
                    self.fill(key, rl_input.agent_actions[key].value.add(), 0.0, 0)

    def fill(self, key: str, action: Any, continuous: float, discrete: int) -> None:
        """Sets all actions of a kind to the same number, in the form that the player reads."""
        brain = self.specs[key]
        if brain.HasField("action_spec"):
            action.continuous_actions[:] = [continuous] * brain.action_spec.num_continuous_actions
            action.discrete_actions[:] = [discrete] * brain.action_spec.num_discrete_actions
        elif brain.vector_action_space_type_deprecated:
            action.vector_actions_deprecated[:] = [continuous] * brain.vector_action_size_deprecated[0]
        else:
            action.vector_actions_deprecated[:] = [discrete] * len(brain.vector_action_size_deprecated)


@contextmanager
def serving(answer: Callable[[bytes, Any], bytes], port: int = 0) -> Iterator[tuple[int, Any]]:
    """Yields the port and the server."""
    handler: Any = grpc.unary_unary_rpc_method_handler(answer)
    service = grpc.method_handlers_generic_handler(f"{_PACKAGE}.UnityToExternalProto", {"Exchange": handler})
    server = grpc.server(ThreadPoolExecutor(1), handlers=[service], options=[("grpc.so_reuseport", 0)])
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    assert bound
    server.start()
    try:
        yield bound, server
    finally:
        server.stop(None).wait()


@dataclass(frozen=True)
class Played:
    code: int
    events: list[dict[str, Any]]
    log: str

    def received(self, kind: str) -> list[dict[str, Any]]:
        """Returns the logged events of one kind, without the kind."""
        return [{k: v for k, v in event.items() if k != "event"} for event in self.events if event["event"] == kind]


def play(folder: Path, port: int, *options: str) -> Played:
    """Runs a player in this thread until it ends."""
    log, events = folder / "player.log", folder / "events.jsonl"
    unity = ["-nographics", "-batchmode", "--mlagents-port", str(port), "-logFile", str(log)]
    code = unity_player.main([*options, "--events", str(events), *unity])
    return Played(code, [json.loads(line) for line in events.read_text().splitlines()], log.read_text())


def against(trainer: Trainer, folder: Path, *options: str) -> Played:
    """Runs a player against a trainer until it ends."""
    with serving(trainer.answer) as (port, _):
        return play(folder, port, *options)


class Background(threading.Thread):
    """A player in its own thread; after `join`, `played` holds its result."""

    def __init__(self, folder: Path, port: int, *options: str) -> None:
        super().__init__()
        self._arguments = folder, port, options
        self.start()

    def run(self) -> None:
        folder, port, options = self._arguments
        self.played = play(folder, port, *options)
