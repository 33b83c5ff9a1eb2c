"""The conversation table for all states, both roles and all messages."""

from __future__ import annotations

from itertools import product
from typing import Any, get_args

import pytest

from sparring.pipeline.errors import LocalProtocolError, RemoteProtocolError
from sparring.pipeline.messages.conversation import (
    STATES,
    TRANSITIONS,
    Conversation,
    Role,
    State,
    allowed,
    diagram,
    next_state,
)
from sparring.pipeline.messages.schema import tag_of
from sparring.pipeline.messages.simulator import (
    Act,
    Adopted,
    Behaviors,
    Bye,
    Fault,
    Hello,
    Ping,
    Pong,
    Progress,
    Reset,
    SimulatorMessage,
    Step,
    Welcome,
)

MESSAGES: dict[str, Any] = {
    tag_of(message): message
    for message in (
        Hello(version=1, name="x", behaviors={}),
        Welcome(version=1, connection=0, heartbeat_s=1.0, timeout_s=5.0),
        Adopted(version=1, connection=0, heartbeat_s=1.0, timeout_s=5.0, port=1),
        Progress(phase="stepping"),
        Behaviors(behaviors={}),
        Reset(),
        Step(sequence=0, reports=()),
        Act(sequence=0, actions=()),
        Ping(),
        Pong(),
        Bye(),
        Fault(code="internal", got="", expected="", remedy=""),
    )
}
ROLES: tuple[Role, ...] = get_args(Role)
CASES = list(product(STATES, ROLES, MESSAGES))


def expected(state: State, speaker: Role, tag: str) -> State | None:
    """Returns the next state as the document describes it."""
    if state == "closed":
        return None
    if tag == "fault" or (tag == "bye" and speaker == "simulator"):
        return "closed"
    if state == "parting":
        crossing = ("hello", "behaviors", "step", "ping", "pong")
        return "parting" if speaker == "simulator" and tag in crossing else None
    if tag == "bye":
        return "parting"
    if tag in ("ping", "pong"):
        return state if state != "greeting" else None
    return {
        ("greeting", "simulator", "hello"): "introduced",
        ("introduced", "trainer", "welcome"): "welcomed",
        ("introduced", "trainer", "adopted"): "adopted",
        ("adopted", "trainer", "progress"): "adopted",
        ("welcomed", "trainer", "reset"): "simulating",
        ("simulating", "simulator", "behaviors"): "simulating",
        ("simulating", "simulator", "step"): "deciding",
        ("deciding", "trainer", "act"): "simulating",
        ("deciding", "trainer", "reset"): "simulating",
    }.get((state, speaker, tag))  # type: ignore[return-value]


def test_every_message_of_the_protocol_is_examined() -> None:
    assert {tag_of(cls) for cls in get_args(SimulatorMessage)} == set(MESSAGES)
    assert set(STATES) == set(get_args(State))


@pytest.mark.parametrize(("state", "speaker", "tag"), CASES)
def test_both_sides_follow_the_table_and_name_a_violation(state: State, speaker: Role, tag: str) -> None:
    following = expected(state, speaker, tag)
    assert next_state(state, speaker, tag) == following
    assert (tag in allowed(state, speaker)) == (following is not None)
    for role in ROLES:
        conversation = Conversation(role)
        conversation.state = state
        send = conversation.sending if role == speaker else conversation.received
        if following is not None:
            send(MESSAGES[tag])
            assert conversation.state == following
            continue
        with pytest.raises(LocalProtocolError if role == speaker else RemoteProtocolError) as caught:
            send(MESSAGES[tag])
        error = caught.value
        assert error.code == "unexpected_message"
        assert all(word in error.got for word in (tag, speaker, state))
        assert str(allowed(state, speaker)) in error.expected
        assert conversation.state == state


def test_both_ends_agree_on_the_state_through_a_whole_conversation() -> None:
    ends = {role: Conversation(role) for role in ROLES}
    script: list[tuple[Role, str]] = [
        ("simulator", "hello"), ("trainer", "ping"), ("simulator", "pong"), ("trainer", "welcome"),
        ("trainer", "reset"), ("simulator", "behaviors"), ("simulator", "step"), ("simulator", "ping"),
        ("trainer", "act"), ("simulator", "step"), ("trainer", "reset"), ("simulator", "step"), ("trainer", "bye"),
        ("simulator", "bye"),
    ]  # fmt: skip
    for speaker, tag in script:
        for role, end in ends.items():
            (end.sending if role == speaker else end.received)(MESSAGES[tag])
        assert len({end.state for end in ends.values()}) == 1
    assert ends["trainer"].state == "closed"


def test_the_diagram_has_every_transition_once() -> None:
    lines = [line.strip() for line in diagram().splitlines()]
    assert lines[0] == "stateDiagram-v2"
    for (state, role, tag), after in TRANSITIONS.items():
        assert lines.count(f"{state} --> {after}: {role} {tag}") == 1
    assert len(lines) == 4 + len(TRANSITIONS) + 2 * (len(STATES) - 2) + 1
