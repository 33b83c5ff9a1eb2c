"""Represents the trainer's side of a conversation with one Unity player, without I/O.

The player calls, and each message of the trainer is the answer to the open call: so they take turns.

    player                                     trainer
    introduction: name, versions               initialization: seed, versions, number of areas
    ready: nothing else                        reset, once it is wanted
    output: agents, new behaviors              step with actions; or reset; or quit
    ...                                        ...
    farewell, in place of any message          quit

`TRANSITIONS` lists all of it. Received bytes become a `PlayerMessage`, and answers become bytes.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from sparring.pipeline.bridges.unity import RECORD_AGAIN, UnreadableData
from sparring.pipeline.bridges.unity.channels import statistics
from sparring.pipeline.bridges.unity.columns import PlainGoals, PlayerBehavior
from sparring.pipeline.bridges.unity.messages import Proto, message_class, parsed
from sparring.pipeline.errors import LocalProtocolError
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport, Statistic
from sparring.pipeline.specs import BehaviorSpec

VERSION: Final = "1.5.0"
"""Version of the communication that is implemented here."""

PACKAGE: Final = "1.1.0"
"""Version of ML-Agents' trainers whose behavior towards games is implemented here."""

State = Literal["calling", "introduced", "initialized", "ready", "playing", "deciding", "parting", "ended"]

_PLAYERS_TURN: Final[tuple[State, ...]] = ("calling", "initialized", "playing", "ended")
_TRAINERS_TURN: Final[tuple[State, ...]] = ("introduced", "ready", "deciding", "parting")

TRANSITIONS: Final[dict[tuple[State, str], State]] = {
    ("calling", "introduction"): "introduced",
    ("introduced", "initialization"): "initialized",
    ("initialized", "ready"): "ready",
    ("ready", "reset"): "playing",
    ("playing", "output"): "deciding",
    ("deciding", "step"): "playing",
    ("deciding", "reset"): "playing",
    **{(state, "farewell"): "parting" for state in _PLAYERS_TURN},
    **{(state, "quit"): "ended" for state in _TRAINERS_TURN},
}
"""(state, message) -> next state. A message that is rejected leads to `parting` too."""

_GOOD, _ENDS = 200, 400
"""Statuses of a message; the trainer's `quit` has the second one, too."""
_COMMANDS: Final = {"step": 0, "reset": 1, "quit": 2}
_UPDATE: Final = "update the package com.unity.ml-agents in the game's project to 1.0 or later, and build it again"
_OWN_PROTOCOL: Final = "let only games with ML-Agents' package connect here"
_RESTARTED: Final = "restart the training, and do not reload the game's Academy while it trains"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayerMessage:
    """Holds the content of one message of the player.

    Attributes:
        kind: which message it is, as in `TRANSITIONS`.
        behaviors: spec of each behavior id that appears for the first time, by id.
        reports: of behaviors with agents that want a decision or ended.
        plain_goals: goal signals of new behaviors, by id.
        statistics: the game's own statistics.
        farewell: the player's reason to end the conversation, may be "".
    """

    kind: Literal["introduction", "ready", "output", "farewell"]
    behaviors: dict[str, BehaviorSpec] = field(default_factory=dict)
    reports: tuple[BehaviorReport, ...] = ()
    plain_goals: dict[str, PlainGoals] = field(default_factory=dict)
    statistics: tuple[Statistic, ...] = ()
    farewell: str = ""


class PlayerConversation:
    """Represents the conversation with one start of one player.

    Attributes:
        state: current state.
    """

    def __init__(self) -> None:
        self.state: State = "calling"
        self._brains: dict[str, Proto] = {}
        self._columns: dict[str, PlayerBehavior] = {}

    def receive(self, content: bytes) -> PlayerMessage:
        """Returns the content of a message of the player, which another method must answer.

        Raises:
            UnreadableData: the bytes are no message of a player, the message is out of turn, or its content is
                inconsistent. Only `quit` may answer it.
            LocalProtocolError: the previous message has no answer yet.
        """
        if self.state not in _PLAYERS_TURN:
            raise _unexpected("a message of the player", self.state)
        try:
            received = self._parse(parsed("UnityMessageProto", content, "a message"))
        except UnreadableData as error:
            self.state = "parting"
            raise UnreadableData(str(error), _OWN_PROTOCOL if error.remedy == RECORD_AGAIN else error.remedy) from error
        self.state = TRANSITIONS[self.state, received.kind]
        return received

    def initialize(self, *, seed: int, num_areas: int = 1) -> bytes:
        """Answers the introduction.

        Args:
            seed: seed of the player's random source, an int32.
            num_areas: copies of the training area for the game to make.

        Raises:
            LocalProtocolError: it does not answer the player's message.
        """
        message = self._answer("initialization")
        initial = message.unity_input.rl_initialization_input
        initial.seed, initial.num_areas = seed, num_areas
        initial.communication_version, initial.package_version = VERSION, PACKAGE
        for name in initial.capabilities.DESCRIPTOR.fields_by_name:  # messages of `trainingAnalytics` are optional
            setattr(initial.capabilities, name, True)
        return self._encode("initialization", message)

    def reset(self, side_channel: bytes = b"") -> bytes:
        """Returns the order to begin new episodes for all agents.

        Raises:
            LocalProtocolError: it does not answer the player's message.
        """
        message = self._answer("reset", side_channel)
        for columns in self._columns.values():
            columns.restart()
        return self._encode("reset", message)

    def step(self, actions: Iterable[BehaviorActions], side_channel: bytes = b"") -> bytes:
        """Returns the order to continue with the actions.

        Args:
            actions: of each behavior with decisions in the last message, row by row.
            side_channel: messages of side channels.

        Raises:
            LocalProtocolError: it does not answer the player's message, or answers only a part.
        """
        message = self._answer("step", side_channel)
        waiting = {behavior for behavior, columns in self._columns.items() if columns.waiting.size}
        for one in actions:
            if one.behavior not in waiting:
                raise _wrong_actions(one.behavior, waiting)
            waiting.remove(one.behavior)
            encoded = self._columns[one.behavior].encode(one)
            message.unity_input.rl_input.agent_actions.add(key=one.behavior, value=encoded)
        if waiting:
            raise _wrong_actions("", waiting)
        return self._encode("step", message)

    def quit(self) -> bytes:
        """Returns the order to end.

        Raises:
            LocalProtocolError: the player is not waiting for an answer.
        """
        return self._encode("quit", self._answer("quit"))

    def _parse(self, message: Proto) -> PlayerMessage:
        """Returns the content of a message."""
        status = message.header.status
        if status == _ENDS:
            return PlayerMessage(kind="farewell", farewell=message.header.message)
        if status != _GOOD or self.state == "ended":
            raise UnreadableData(f"a message of status {status} in state {self.state!r} of the conversation")
        introduction = message.unity_output.rl_initialization_output
        if self.state == "calling":
            _check_version(introduction)
            return PlayerMessage(kind="introduction")
        if introduction.communication_version:
            raise UnreadableData("an introduction in the middle of the conversation", _RESTARTED)
        for brain in introduction.brain_parameters:
            self._register(brain)
        return self._output(message.unity_output.rl_output)

    def _answer(self, what: str, side_channel: bytes = b"") -> Proto:
        """Returns a message of the trainer if the state allows it."""
        if (self.state, what) not in TRANSITIONS:
            raise _unexpected(what, self.state)
        message = message_class("UnityMessageProto")()
        message.header.status = _ENDS if what == "quit" else _GOOD
        if what != "initialization":
            order = message.unity_input.rl_input
            order.command, order.side_channel = _COMMANDS[what], side_channel
        return message

    def _encode(self, what: str, message: Proto) -> bytes:
        content: bytes = message.SerializeToString()
        self.state = TRANSITIONS[self.state, what]
        return content

    def _register(self, brain: Proto) -> None:
        """Registers a behavior's parameters; its agents may appear later."""
        name = brain.brain_name
        if name in self._brains and _actions_of(self._brains[name]) != _actions_of(brain):
            remedy = "do not change the actions of a behavior while it trains"
            raise UnreadableData(f"behavior {name!r} with other actions than at first", remedy)
        self._brains[name] = type(brain).FromString(brain.SerializeToString())  # so that its message can be freed

    def _output(self, output: Proto) -> PlayerMessage:
        entries = output.agentInfos
        if entries and self.state == "initialized":
            raise UnreadableData("agents before the first reset", _OWN_PROTOCOL)
        new: dict[str, BehaviorSpec] = {}
        reports = {}
        for entry in entries:
            name, infos = entry.key, entry.value.value
            if name in reports:
                raise UnreadableData(f"behavior {name!r} twice in one message", _OWN_PROTOCOL)
            if name not in self._columns and infos:
                if name not in self._brains:
                    raise UnreadableData(f"agents of behavior {name!r} before its parameters", _OWN_PROTOCOL)
                self._columns[name] = PlayerBehavior(name, self._brains[name], infos[0])
                new[name] = self._columns[name].spec
            known = self._columns.get(name)
            reports[name] = known.report(infos) if known else None
        for name in self._columns.keys() - reports.keys():
            self._columns[name].report(())
        filled = tuple(report for report in reports.values() if report is not None)
        plain = {name: goals for name in new if (goals := self._columns[name].plain_goals)}
        return PlayerMessage(
            kind="ready" if self.state == "initialized" else "output",
            behaviors=new,
            reports=filled,
            plain_goals=plain,
            statistics=statistics(output.side_channel),
        )


def _check_version(introduction: Proto) -> None:
    version = introduction.communication_version
    if not version:
        raise UnreadableData("a first message that is no introduction", _OWN_PROTOCOL)
    if not re.match(r"1\.[0-9]", version):
        package = introduction.package_version or "unknown"
        got = f"version {version!r:.40} of the communication (package {package!r:.40}), not 1.x"
        raise UnreadableData(got, _UPDATE)


def _actions_of(brain: Proto) -> tuple[object, ...]:
    new = brain.action_spec
    old = tuple(brain.vector_action_size_deprecated), brain.vector_action_space_type_deprecated
    return new.num_continuous_actions, tuple(new.discrete_branch_sizes), *old


def _unexpected(what: str, state: State) -> LocalProtocolError:
    return LocalProtocolError(
        "unexpected_message",
        got=f"{what} in state {state!r} of the conversation with a Unity player",
        expected=f"one of {sorted(kind for at, kind in TRANSITIONS if at == state)}",
        remedy="take turns: one answer to each message",
    )


def _wrong_actions(behavior: str, waiting: set[str]) -> LocalProtocolError:
    return LocalProtocolError(
        "actions",
        got=f"actions of {behavior!r}" if behavior else "no more actions",
        expected=f"those of {sorted(waiting)}" if waiting else "no more",
        remedy="answer each behavior that has decisions once",
    )
