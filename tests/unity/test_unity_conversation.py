"""The conversation with a player: which side may send what and when, and the bytes of each answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.unity.player_writer as writer
from sparring.pipeline.bridges.unity import RECORD_AGAIN, UnreadableData
from sparring.pipeline.bridges.unity.conversation import (
    TRANSITIONS,
    PlayerConversation,
    PlayerMessage,
)
from sparring.pipeline.errors import LocalProtocolError
from sparring.pipeline.messages.simulator import BehaviorActions

Begin = Callable[[], PlayerConversation]

NAME = "B?team=0"
SEEN = [writer.vector([1.0, 2.0])]
BRAIN = writer.brain(NAME, continuous=1)
ONE = writer.output({NAME: [writer.agent(SEEN, number=3)]}, [BRAIN])
FAREWELL = writer.header(400, "the game was closed")


def actions(agents: list[int], value: float = 0.5, behavior: str = NAME) -> BehaviorActions:
    n = len(agents)
    return BehaviorActions(
        behavior=behavior,
        agents=np.array(agents, np.int64),
        continuous=np.full((n, 1), value, np.float32),
        discrete=np.zeros((n, 0), np.int32),
    )


def refused(conversation: PlayerConversation, content: bytes, reason: str) -> UnreadableData:
    """Returns the error for a message, after which the conversation can only end."""
    with pytest.raises(UnreadableData, match=reason) as raised:
        conversation.receive(content)
    assert raised.value.remedy != RECORD_AGAIN
    assert conversation.state == "parting"
    assert writer.answer(conversation.quit()).command == 2
    return raised.value


# ---------------------------------------------------------------- a whole conversation


def test_a_conversation_from_introduction_to_end() -> None:
    conversation = PlayerConversation()
    received = conversation.receive(writer.introduction(capabilities=(1, 4, 7)))
    assert received == PlayerMessage(kind="introduction")
    answer = writer.answer(conversation.initialize(seed=-7, num_areas=3))
    assert answer.status == 200
    assert answer.initial is not None
    assert dict(writer.fields(answer.initial.pop(4))) == dict.fromkeys(range(1, 8), 1)
    assert answer.initial == {1: 2**64 - 7, 2: b"1.5.0", 3: b"1.1.0", 5: 3}
    assert conversation.receive(writer.READY) == PlayerMessage(kind="ready")
    answer = writer.answer(conversation.reset(b"side"))
    assert (answer.command, answer.side_channel, answer.actions) == (1, b"side", {})
    received = conversation.receive(ONE)
    assert list(received.behaviors) == [NAME]
    assert [report.behavior for report in received.reports] == [NAME]
    assert received.kind == "output"
    answer = writer.answer(conversation.step([actions([3])], b"more"))
    assert (answer.command, answer.side_channel) == (0, b"more")
    assert answer.actions == {NAME: [writer.Act(continuous=[0.5])]}
    received = conversation.receive(FAREWELL)
    assert received == PlayerMessage(kind="farewell", farewell="the game was closed")
    assert conversation.quit() == bytes.fromhex("0a03089003 1a04 0a02 2002")  # status 400, as ML-Agents sends it
    assert conversation.state == "ended"


def test_answers_have_exactly_the_bytes_of_the_protocol(begun: Begin) -> None:
    conversation = begun()
    conversation.receive(ONE)
    assert conversation.step([actions([3])]) == bytes.fromhex(
        "0a0308c801"  # 1 header: 1 status: 200
        "1a18"  # 3 unity_input, 24 bytes:
        "0a16"  # . 1 rl_input, 22 bytes:
        "0a14"  # . . 1 agent_actions, an entry of 20 bytes:
        "0a08423f7465616d3d30"  # . . . 1 key: "B?team=0"
        "1208"  # . . . 2 value, 8 bytes:
        "0a06"  # . . . . 1 value, an agent of 6 bytes:
        "32040000003f"  # . . . . . 6 continuous_actions: [0.5]
    )
    conversation.receive(ONE)
    assert conversation.reset() == bytes.fromhex("0a0308c801 1a04 0a02 2001")


def test_a_player_may_send_its_farewell_after_quit(begun: Begin) -> None:
    conversation = begun()
    conversation.receive(ONE)
    conversation.quit()
    assert conversation.receive(FAREWELL).kind == "farewell"
    assert writer.answer(conversation.quit()).command == 2


def test_a_farewell_may_have_no_text(begun: Begin) -> None:
    assert begun().receive(writer.header(400)) == PlayerMessage(kind="farewell")


# ---------------------------------------------------------------- turns

EVENTS: dict[str, Callable[[PlayerConversation], Any]] = {
    "introduction": lambda conversation: conversation.receive(writer.introduction()),
    "output": lambda conversation: conversation.receive(writer.READY),
    "farewell": lambda conversation: conversation.receive(FAREWELL),
    "initialization": lambda conversation: conversation.initialize(seed=1),
    "reset": lambda conversation: conversation.reset(),
    "step": lambda conversation: conversation.step([]),
    "quit": lambda conversation: conversation.quit(),
}


PLAYERS = ("introduction", "ready", "output", "farewell")


@settings(max_examples=100)
@given(st.lists(st.sampled_from(sorted(EVENTS)), max_size=12))
def test_a_message_that_is_not_in_the_table_is_refused_and_changes_nothing(events: list[str]) -> None:
    """A message of the trainer out of turn is its own error; one of the player ends the conversation."""
    conversation = PlayerConversation()
    for what in events:
        before = conversation.state
        named = "ready" if (before, what) == ("initialized", "output") else what
        after = TRANSITIONS.get((before, named))
        players_turn = any((before, event) in TRANSITIONS for event in PLAYERS)
        is_players = named in PLAYERS
        if after is not None:
            EVENTS[what](conversation)
            assert conversation.state == after
        elif is_players and players_turn:
            with pytest.raises(UnreadableData):
                EVENTS[what](conversation)
            assert conversation.state == "parting"
        else:
            with pytest.raises(LocalProtocolError, match=before):
                EVENTS[what](conversation)
            assert conversation.state == before


# ---------------------------------------------------------------- versions


@pytest.mark.parametrize("version", ["1.0.0", "1.5.0", "1.9.3", "1.2.0-preview", "1.0"])
def test_every_version_1_is_accepted(version: str) -> None:
    assert PlayerConversation().receive(writer.introduction(version)).kind == "introduction"


@pytest.mark.parametrize("version", ["0.15.0", "2.0.0", "API-14", "11.0.0", "1", "x"])
def test_another_version_is_refused_by_its_number_and_package(version: str) -> None:
    error = refused(PlayerConversation(), writer.introduction(version, "0.14"), f"'{version}'.*package '0.14'")
    assert "com.unity.ml-agents" in error.remedy


# ---------------------------------------------------------------- unusable messages


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "status 0"),
        (b"GET / HTTP/1.1", "cannot be decoded"),
        (writer.header(500), "status 500"),
        (writer.READY, "no introduction"),
        (ONE, "no introduction"),
    ],
)
def test_a_first_message_other_than_an_introduction_is_refused(content: bytes, reason: str) -> None:
    refused(PlayerConversation(), content, reason)


def test_agents_before_the_first_reset_are_refused() -> None:
    conversation = PlayerConversation()
    conversation.receive(writer.introduction())
    conversation.initialize(seed=1)
    refused(conversation, ONE, "before the first reset")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (writer.introduction(), "introduction in the middle"),
        (writer.output({NAME: [writer.agent(SEEN)]}), "agents of behavior 'B.team=0' before its parameters"),
        (writer.output({"": [writer.agent(SEEN)]}, [writer.brain("", 1)]), "behavior id ''"),
        (ONE + writer.output({NAME: [writer.agent(SEEN)]})[5:], "twice in one message"),
        (writer.output({NAME: [writer.agent([])]}, [BRAIN]), "without observations"),
        (writer.output({NAME: [b"\xff"]}, [BRAIN]), "cannot be decoded"),
        (writer.output(side_channel=b"cut"), "side channel"),
    ],
)
def test_an_unusable_message_is_refused(begun: Begin, content: bytes, reason: str) -> None:
    refused(begun(), content, reason)


def test_a_repeated_behavior_must_have_the_same_spec(begun: Begin) -> None:
    """Other parameters of it may change."""
    conversation = begun()
    conversation.receive(ONE)
    conversation.step([actions([3])])
    assert conversation.receive(
        writer.output({}, [BRAIN + writer.integer(8, 0) + writer.text(20, "more")])
    ) == PlayerMessage(kind="output")
    conversation.step([])
    error = refused(conversation, writer.output({}, [writer.brain(NAME, 2)]), "other actions than at first")
    assert "while it trains" in error.remedy


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_damaged_message_is_either_read_or_refused(data: st.DataObject) -> None:
    """Changed, removed or inserted bytes raise no other exception."""
    conversation = PlayerConversation()
    for content, answer in (
        (writer.introduction(), lambda: conversation.initialize(seed=1)),
        (writer.READY, conversation.reset),
        (ONE, conversation.quit),
    ):
        damaged = bytearray(content)
        for _ in range(data.draw(st.integers(0, 2))):
            at = data.draw(st.integers(0, len(damaged) - 1)) if damaged else 0
            damaged[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
        try:
            received = conversation.receive(bytes(damaged))
        except UnreadableData:
            return
        if received.kind == "farewell":
            return
        answer()


# ---------------------------------------------------------------- actions


def test_behaviors_with_decisions_are_answered_and_no_others(begun: Begin) -> None:
    conversation = begun()
    both = {name: [writer.agent(SEEN, number=at)] for at, name in enumerate(("A?team=0", "B?team=0"))}
    conversation.receive(writer.output(both, [writer.brain(name, 1) for name in both]))
    for given_actions in ([], [actions([0], behavior="A?team=0")], [actions([1]), actions([0], behavior="C?team=0")]):
        with pytest.raises(LocalProtocolError):
            conversation.step(given_actions)
        assert conversation.state == "deciding"
    conversation.step([actions([1], 1.0), actions([0], behavior="A?team=0")])
    conversation.receive(writer.output({"A?team=0": both["A?team=0"]}))  # no agents of B
    with pytest.raises(LocalProtocolError):
        conversation.step([actions([0], behavior="A?team=0"), actions([1])])
    answer = writer.answer(conversation.step([actions([0], behavior="A?team=0")]))
    assert list(answer.actions) == ["A?team=0"]


def test_after_a_reset_no_agent_waits_for_a_decision(begun: Begin) -> None:
    """Episodes that a reset truncates end without a row; a later end is left out."""
    conversation = begun()
    conversation.receive(ONE)
    conversation.reset()
    received = conversation.receive(writer.output({NAME: [writer.agent(SEEN, number=3, done=True)]}))
    assert received.reports == ()
    assert writer.answer(conversation.step([])).actions == {}
