"""The trainer's side of a conversation with one Unity player, without I/O.

The player calls, and each message of the trainer is the answer to the call that is open: so they take turns.

    player                                     trainer
    introduction: name, versions               initialisation: seed, versions, number of areas
    nothing: it is ready                       reset, once it is wanted
    output: agents, new behaviors              step with actions; or reset; or quit
    ...                                        ...
    farewell, in the place of any message      quit

`TRANSITIONS` is all of it. Bytes become a `PlayerMessage`, and what the trainer says becomes bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from sparring.pipeline.bridges.unity import RECORD_AGAIN, Unreadable
from sparring.pipeline.bridges.unity.channels import statistics
from sparring.pipeline.bridges.unity.columns import PlainGoals, PlayerBehavior
from sparring.pipeline.bridges.unity.messages import SCHEMA, messages, parsed
from sparring.pipeline.errors import LocalProtocolError
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport, Statistic
from sparring.pipeline.specs import BehaviorSpec

VERSION: Final = "1.5.0"
"""Of the communication, as it is spoken here."""

PACKAGE: Final = "1.1.0"
"""Version of ML-Agents' trainers whose behavior towards a game this is."""

CAPABILITIES: Final = tuple(SCHEMA["UnityRLCapabilitiesProto"])
"""All are told to the player, as it expects. What `trainingAnalytics` announces is never said (`channels.py`)."""

State = Literal["calling", "introduced", "initialised", "ready", "playing", "deciding", "parting", "ended"]
"""`introduced`, `ready`, `deciding` and `parting` wait for the trainer; the others for the player."""

TRANSITIONS: Final[dict[tuple[State, str], State]] = {
    ("calling", "introduction"): "introduced",
    ("introduced", "initialisation"): "initialised",
    ("initialised", "output"): "ready",
    ("ready", "reset"): "playing",
    ("playing", "output"): "deciding",
    ("deciding", "step"): "playing",
    ("deciding", "reset"): "playing",
    ("calling", "farewell"): "parting",
    ("initialised", "farewell"): "parting",
    ("playing", "farewell"): "parting",
    ("ended", "farewell"): "parting",
    ("introduced", "quit"): "ended",
    ("ready", "quit"): "ended",
    ("deciding", "quit"): "ended",
    ("parting", "quit"): "ended",
}
"""(state, what is said) -> next state. A message that is refused leads to `parting` too."""

_GOOD, _ENDS = 200, 400
_RESET, _QUIT = 1, 2
_PLAYERS_TURN: Final = ("calling", "initialised", "playing", "ended")
_MAJOR: Final = 1
_UPDATE: Final = "update the package com.unity.ml-agents in the game's project to 1.0 or later, and build it again"
_OWN_PROTOCOL: Final = "let nothing but a game with ML-Agents' package call here"
_RESTARTED: Final = "start the training again, and do not reload the game's Academy while it trains"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayerIntroduction:
    """Who plays.

    Attributes:
        name: of the game's Academy.
        version: of the communication, as `1.5.0`.
        package: version of ML-Agents' package in the game.
        capabilities: names of those that it has.
    """

    name: str
    version: str
    package: str
    capabilities: frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayerMessage:
    """What one message of the player says.

    Attributes:
        introduction: in the first message only.
        behaviors: spec of each behavior id that appears for the first time, by id.
        reports: of behaviors with agents that want a decision or ended.
        plain_goals: of new behaviors that have some, by id.
        statistics: the game's own numbers.
        farewell: why the player ends the conversation, as far as it says; None where it goes on.
    """

    introduction: PlayerIntroduction | None = None
    behaviors: dict[str, BehaviorSpec] = field(default_factory=dict)
    reports: tuple[BehaviorReport, ...] = ()
    plain_goals: dict[str, PlainGoals] = field(default_factory=dict)
    statistics: tuple[Statistic, ...] = ()
    farewell: str | None = None


class PlayerConversation:
    """The conversation with one start of one player.

    Attributes:
        state: where it stands.
    """

    def __init__(self) -> None:
        self.state: State = "calling"
        self._brains: dict[str, Any] = {}
        self._columns: dict[str, PlayerBehavior] = {}
        self._kinds = messages()

    @property
    def ends_without_decision(self) -> int:
        """Ends left out so far, because their agents had not decided since their last end."""
        return sum(columns.ends_without_decision for columns in self._columns.values())

    def hear(self, content: bytes) -> PlayerMessage:
        """What a message of the player says; answer it with one of the other methods.

        Raises:
            Unreadable: it is no message of a player, or none that may come now, or what it says does not fit together.
                Only `quit` may answer it.
            LocalProtocolError: the message before has not been answered.
        """
        if self.state not in _PLAYERS_TURN:
            raise _unexpected("a message of the player", self.state)
        try:
            said, heard = self._heard(parsed(self._kinds.exchanged, content, "a message"))
        except Unreadable as error:
            self.state = "parting"
            raise Unreadable(str(error), _OWN_PROTOCOL if error.remedy == RECORD_AGAIN else error.remedy) from error
        self.state = TRANSITIONS[self.state, said]
        return heard

    def initialise(self, *, seed: int, package: str, num_areas: int = 1) -> bytes:
        """Answers the introduction.

        Args:
            seed: of the player's random source, an int32.
            package: version of the trainer, for the game's log.
            num_areas: copies of the training area that the game is to make.

        Raises:
            LocalProtocolError: it is not the answer to what the player said.
        """
        message = self._answer("initialisation")
        initial = message.unity_input.rl_initialization_input
        initial.seed, initial.num_areas = seed, num_areas
        initial.communication_version, initial.package_version = VERSION, package
        for name in CAPABILITIES:
            setattr(initial.capabilities, name, True)
        return self._said("initialisation", message)

    def reset(self, side_channel: bytes = b"") -> bytes:
        """Tells the player to begin new episodes for all agents.

        Raises:
            LocalProtocolError: it is not the answer to what the player said.
        """
        message = self._answer("reset")
        message.unity_input.rl_input.command = _RESET
        message.unity_input.rl_input.side_channel = side_channel
        for columns in self._columns.values():
            columns.restart()
        return self._said("reset", message)

    def step(self, actions: Iterable[BehaviorActions], side_channel: bytes = b"") -> bytes:
        """Tells the player to go on with the actions.

        Args:
            actions: of each behavior with decisions in the last message, row by row.
            side_channel: what to tell beside them.

        Raises:
            LocalProtocolError: it is not the answer to what the player said, or not to all of it.
        """
        message = self._answer("step")
        told = message.unity_input.rl_input
        told.side_channel = side_channel
        waiting = {behavior for behavior, columns in self._columns.items() if columns.waiting.size}
        for one in actions:
            if one.behavior not in waiting:
                raise _answers_nobody(one.behavior, waiting)
            waiting.remove(one.behavior)
            told.agent_actions.add(key=one.behavior, value=self._columns[one.behavior].encode(one))
        if waiting:
            raise _answers_nobody("", waiting)
        return self._said("step", message)

    def quit(self) -> bytes:
        """Tells the player to end.

        Raises:
            LocalProtocolError: the player is not waiting for an answer.
        """
        message = self._answer("quit")
        message.unity_input.rl_input.command = _QUIT
        return self._said("quit", message)

    def _heard(self, message: Any) -> tuple[str, PlayerMessage]:
        """What kind of message it is, and what it says."""
        status = message.header.status
        if status == _ENDS:
            return "farewell", PlayerMessage(farewell=message.header.message)
        if status != _GOOD or self.state == "ended":
            raise Unreadable(f"a message of status {status} in state {self.state!r} of the conversation")
        introduction = message.unity_output.rl_initialization_output
        if self.state == "calling":
            return "introduction", PlayerMessage(introduction=_introduction(introduction))
        if introduction.communication_version:
            raise Unreadable("an introduction in the middle of the conversation", _RESTARTED)
        for brain in introduction.brain_parameters:
            self._meet(brain)
        return "output", self._output(message.unity_output.rl_output)

    def _answer(self, what: str) -> Any:
        """A message of the trainer, if this is the time for it."""
        if (self.state, what) not in TRANSITIONS:
            raise _unexpected(what, self.state)
        message: Any = self._kinds.exchanged()
        message.header.status = _GOOD
        return message

    def _said(self, what: str, message: Any) -> bytes:
        content: bytes = message.SerializeToString()
        self.state = TRANSITIONS[self.state, what]
        return content

    def _meet(self, brain: Any) -> None:
        """Notes what a behavior can do; its agents may appear later."""
        name = brain.brain_name
        if name in self._brains and _actions_told(self._brains[name]) != _actions_told(brain):
            remedy = "leave the actions of a behavior as they are while it trains"
            raise Unreadable(f"behavior {name!r} with other actions than at first", remedy)
        self._brains[name] = kept = self._kinds.brain()
        kept.CopyFrom(brain)  # without the message that it stands in

    def _output(self, output: Any) -> PlayerMessage:
        entries = output.agentInfos
        if entries and self.state == "initialised":
            raise Unreadable("agents before the first reset", _OWN_PROTOCOL)
        new: dict[str, BehaviorSpec] = {}
        reports = {}
        for entry in entries:
            if entry.key in reports:
                raise Unreadable(f"behavior {entry.key!r} twice in one message", _OWN_PROTOCOL)
            infos = entry.value.value
            if entry.key not in self._columns and infos:
                new[entry.key] = self._begin(entry.key, infos[0]).spec
            known = self._columns.get(entry.key)
            reports[entry.key] = known.report(infos) if known else None
        for name in self._columns.keys() - reports.keys():
            self._columns[name].report(())
        told = tuple(report for report in reports.values() if report is not None)
        plain = {name: goals for name in new if (goals := self._columns[name].plain_goals)}
        return PlayerMessage(behaviors=new, reports=told, plain_goals=plain, statistics=statistics(output.side_channel))

    def _begin(self, behavior: str, first: Any) -> PlayerBehavior:
        brain = self._brains.get(behavior)
        if brain is None:
            raise Unreadable(f"agents of behavior {behavior!r} before its parameters", _OWN_PROTOCOL)
        self._columns[behavior] = PlayerBehavior(behavior, brain, first)
        return self._columns[behavior]


def _introduction(told: Any) -> PlayerIntroduction:
    version = told.communication_version
    if not version:
        raise Unreadable("a first message that is no introduction", _OWN_PROTOCOL)
    found = re.match(r"([0-9]{1,9})\.([0-9]{1,9})", version)
    if not found or int(found[1]) != _MAJOR:
        package = told.package_version or "not told"
        raise Unreadable(f"version {version!r:.40} of the communication (package {package!r:.40}), not 1.x", _UPDATE)
    return PlayerIntroduction(
        name=told.name,
        version=version,
        package=told.package_version,
        capabilities=frozenset(name for name in CAPABILITIES if getattr(told.capabilities, name)),
    )


def _actions_told(brain: Any) -> tuple[Any, ...]:
    new = brain.action_spec
    old = tuple(brain.vector_action_size_deprecated), brain.vector_action_space_type_deprecated
    return new.num_continuous_actions, tuple(new.discrete_branch_sizes), *old


def _unexpected(what: str, state: State) -> LocalProtocolError:
    return LocalProtocolError(
        "unexpected_message",
        got=f"{what} in state {state!r} of the conversation with a Unity player",
        expected=f"one of {sorted(said for at, said in TRANSITIONS if at == state)}",
        remedy="take turns: one answer to each message",
    )


def _answers_nobody(behavior: str, waiting: set[str]) -> LocalProtocolError:
    return LocalProtocolError(
        "actions",
        got=f"actions of {behavior!r}" if behavior else "no more actions",
        expected=f"those of {sorted(waiting)}" if waiting else "no more",
        remedy="answer each behavior that has decisions once",
    )
