"""The conversation with a player: who may say what and when, and what the answers are, byte by byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.unity.player_writer as writer
from sparring.pipeline.bridges.unity import RECORD_AGAIN, Unreadable
from sparring.pipeline.bridges.unity.conversation import (
    TRANSITIONS,
    PlayerConversation,
    PlayerIntroduction,
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


def refused(conversation: PlayerConversation, content: bytes, reason: str) -> Unreadable:
    """The refusal of a message, which only an end can answer."""
    with pytest.raises(Unreadable, match=reason) as raised:
        conversation.hear(content)
    assert raised.value.remedy != RECORD_AGAIN
    assert conversation.state == "parting"
    assert writer.answer(conversation.quit()).command == 2
    return raised.value


# ---------------------------------------------------------------- a whole conversation


def test_a_conversation_from_introduction_to_end() -> None:
    conversation = PlayerConversation()
    heard = conversation.hear(writer.introduction(capabilities=(1, 4, 7)))
    has = frozenset({"baseRLCapabilities", "hybridActions", "multiAgentGroups"})
    assert heard == PlayerMessage(
        introduction=PlayerIntroduction(name="Academy", version="1.5.0", package="4.0.0", capabilities=has)
    )
    answer = writer.answer(conversation.initialise(seed=-7, package="0.1.0", num_areas=3))
    assert answer.status == 200
    assert answer.initial is not None
    assert dict(writer.fields(answer.initial.pop(4))) == dict.fromkeys(range(1, 8), 1)
    assert answer.initial == {1: 2**64 - 7, 2: b"1.5.0", 3: b"0.1.0", 5: 3}
    assert conversation.hear(writer.READY) == PlayerMessage()
    answer = writer.answer(conversation.reset(b"told"))
    assert (answer.command, answer.side_channel, answer.actions) == (1, b"told", {})
    heard = conversation.hear(ONE)
    assert list(heard.behaviors) == [NAME]
    assert [report.behavior for report in heard.reports] == [NAME]
    assert heard.farewell is None
    answer = writer.answer(conversation.step([actions([3])], b"more"))
    assert (answer.command, answer.side_channel) == (0, b"more")
    assert answer.actions == {NAME: [writer.Act(continuous=[0.5])]}
    heard = conversation.hear(FAREWELL)
    assert heard == PlayerMessage(farewell="the game was closed")
    assert conversation.quit() == bytes.fromhex("0a0308c801 1a04 0a02 2002")
    assert conversation.state == "ended"


def test_answers_are_byte_by_byte_those_of_the_protocol(begun: Begin) -> None:
    conversation = begun()
    conversation.hear(ONE)
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
    conversation.hear(ONE)
    assert conversation.reset() == bytes.fromhex("0a0308c801 1a04 0a02 2001")


def test_a_player_may_say_farewell_after_it_was_told_to_end(begun: Begin) -> None:
    conversation = begun()
    conversation.hear(ONE)
    conversation.quit()
    assert conversation.hear(FAREWELL).farewell
    assert writer.answer(conversation.quit()).command == 2


def test_a_farewell_without_a_word_is_one(begun: Begin) -> None:
    assert begun().hear(writer.header(400)).farewell == ""


# ---------------------------------------------------------------- turns

SAYS: dict[str, Callable[[PlayerConversation], Any]] = {
    "introduction": lambda one: one.hear(writer.introduction()),
    "output": lambda one: one.hear(writer.READY),
    "farewell": lambda one: one.hear(FAREWELL),
    "initialisation": lambda one: one.initialise(seed=1, package="x"),
    "reset": lambda one: one.reset(),
    "step": lambda one: one.step([]),
    "quit": lambda one: one.quit(),
}


@settings(max_examples=200)
@given(st.lists(st.sampled_from(sorted(SAYS)), max_size=12))
def test_what_is_not_in_the_table_is_refused_and_changes_nothing(said: list[str]) -> None:
    """A word of the trainer out of turn is its own fault; one of the player ends the conversation."""
    conversation = PlayerConversation()
    for what in said:
        before = conversation.state
        after = TRANSITIONS.get((before, what))
        players_turn = any((before, word) in TRANSITIONS for word in ("introduction", "output", "farewell"))
        hears = what in ("introduction", "output", "farewell")
        if after is not None:
            SAYS[what](conversation)
            assert conversation.state == after
        elif hears and players_turn:
            with pytest.raises(Unreadable):
                SAYS[what](conversation)
            assert conversation.state == "parting"
        else:
            with pytest.raises(LocalProtocolError, match=before):
                SAYS[what](conversation)
            assert conversation.state == before


# ---------------------------------------------------------------- versions


@pytest.mark.parametrize("version", ["1.0.0", "1.5.0", "1.9.3", "1.2.0-preview", "1.0"])
def test_every_version_1_is_welcome(version: str) -> None:
    introduction = PlayerConversation().hear(writer.introduction(version)).introduction
    assert introduction is not None
    assert introduction.version == version


@pytest.mark.parametrize("version", ["0.15.0", "2.0.0", "API-14", "11.0.0", "1", "x"])
def test_another_version_is_refused_by_its_number_and_package(version: str) -> None:
    error = refused(PlayerConversation(), writer.introduction(version, "0.14"), f"'{version}'.*package '0.14'")
    assert "com.unity.ml-agents" in error.remedy


# ---------------------------------------------------------------- what cannot be used


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
def test_a_first_message_that_is_no_introduction_is_refused(content: bytes, reason: str) -> None:
    refused(PlayerConversation(), content, reason)


def test_agents_before_the_first_reset_are_refused() -> None:
    conversation = PlayerConversation()
    conversation.hear(writer.introduction())
    conversation.initialise(seed=1, package="x")
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
def test_a_message_that_can_not_be_used_is_refused(begun: Begin, content: bytes, reason: str) -> None:
    refused(begun(), content, reason)


def test_a_behavior_told_again_is_the_same_or_refused(begun: Begin) -> None:
    """What else its parameters say may change."""
    conversation = begun()
    conversation.hear(ONE)
    conversation.step([actions([3])])
    assert (
        conversation.hear(writer.output({}, [BRAIN + writer.integer(8, 0) + writer.text(20, "more")]))
        == PlayerMessage()
    )
    conversation.step([])
    error = refused(conversation, writer.output({}, [writer.brain(NAME, 2)]), "other actions than at first")
    assert "while it trains" in error.remedy


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_damaged_message_is_read_or_refused_and_nothing_else(data: st.DataObject) -> None:
    """Bytes changed, taken out or put in anywhere: no other exception."""
    conversation = PlayerConversation()
    for content, answer in (
        (writer.introduction(), lambda: conversation.initialise(seed=1, package="x")),
        (writer.READY, conversation.reset),
        (ONE, conversation.quit),
    ):
        damaged = bytearray(content)
        for _ in range(data.draw(st.integers(0, 2))):
            at = data.draw(st.integers(0, len(damaged) - 1)) if damaged else 0
            damaged[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
        try:
            heard = conversation.hear(bytes(damaged))
        except Unreadable:
            return
        if heard.farewell is not None:
            return
        answer()


# ---------------------------------------------------------------- actions


def test_behaviors_with_decisions_are_answered_and_no_others(begun: Begin) -> None:
    conversation = begun()
    both = {name: [writer.agent(SEEN, number=at)] for at, name in enumerate(("A?team=0", "B?team=0"))}
    conversation.hear(writer.output(both, [writer.brain(name, 1) for name in both]))
    for told in ([], [actions([0], behavior="A?team=0")], [actions([1]), actions([0], behavior="C?team=0")]):
        with pytest.raises(LocalProtocolError):
            conversation.step(told)
        assert conversation.state == "deciding"
    conversation.step([actions([1], 1.0), actions([0], behavior="A?team=0")])
    conversation.hear(writer.output({"A?team=0": both["A?team=0"]}))  # nothing of B
    with pytest.raises(LocalProtocolError):
        conversation.step([actions([0], behavior="A?team=0"), actions([1])])
    answer = writer.answer(conversation.step([actions([0], behavior="A?team=0")]))
    assert list(answer.actions) == ["A?team=0"]


def test_after_a_reset_no_decision_is_waited_for(begun: Begin) -> None:
    """What a reset cuts off ends without a row; an end that comes afterwards is left out."""
    conversation = begun()
    conversation.hear(ONE)
    conversation.reset()
    heard = conversation.hear(writer.output({NAME: [writer.agent(SEEN, number=3, done=True)]}))
    assert heard.reports == ()
    assert conversation.ends_without_decision == 1
    assert writer.answer(conversation.step([])).actions == {}
