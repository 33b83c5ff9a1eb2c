"""Agents that are inconsistent with each other or with their behavior's spec are refused by name."""

from __future__ import annotations

import math

import numpy as np
import pytest

import tests.unity.player_writer as writer
from sparring.pipeline.bridges.unity import RECORD_AGAIN, UnreadableData
from sparring.pipeline.bridges.unity.columns import PlayerBehavior
from sparring.pipeline.bridges.unity.messages import parsed
from sparring.pipeline.errors import LocalProtocolError
from sparring.pipeline.messages.simulator import BehaviorActions
from tests.unity.protobuf_writer import NONE, VARIABLE
from tests.unity.unity_agents import NAME, columns, infos

SEEN = [writer.vector([1.0, 2.0], name="eye")]
GOOD = writer.agent(SEEN, number=4)


def refused(agents: list[bytes], reason: str, brain: bytes | None = None) -> UnreadableData:
    """Returns the error for agents of which the first is valid; its remedy concerns a game."""
    made = columns(agents, brain)
    with pytest.raises(UnreadableData, match=reason) as raised:
        made.report(infos(agents))
    assert NAME in str(raised.value)
    assert raised.value.remedy
    assert raised.value.remedy != RECORD_AGAIN
    return raised.value


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused_by_agent_and_place(bad: float) -> None:
    bad_agent = writer.agent([writer.vector([1.0, bad], name="eye")], number=9)
    for done in (False, True):
        reward = writer.agent(SEEN, number=9, reward=bad, done=done)
        shared = writer.agent(SEEN, number=9, group_reward=bad, done=done)
        assert "divides by zero" in refused([GOOD, bad_agent], "NaN or infinity in observation 'eye' of agent 9").remedy
        assert "divides by zero" in refused([GOOD, reward], "NaN or infinity as reward of agent 9").remedy
        assert "divides by zero" in refused([GOOD, shared], "NaN or infinity as group reward of agent 9").remedy


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        ([], "0 observations of agent 9"),
        (SEEN * 2, "2 observations of agent 9"),
        ([writer.vector([1.0, 2.0], name="ear")], "'eye' with fields .*'ear'.* of agent 9"),
        ([writer.vector([1.0, 2.0, 3.0], name="eye")], "'eye' with fields .*at first .* of agent 9"),
        ([writer.vector([1.0, 2.0], name="eye", goal=True)], "'eye' with fields .* of agent 9"),
        (
            [writer.floats(np.zeros((1, 2), np.float32), (VARIABLE, NONE), name="eye")],
            "'eye' with fields .* of agent 9",
        ),
        ([writer.packed(b"", [2], [NONE], name="eye")], "'eye' with fields .* of agent 9"),
        ([writer.integers(1, [2]) + writer.integers(6, [NONE]) + writer.text(8, "eye")], "0 numbers for .* of agent 9"),
        ([SEEN[0].replace(b"\x22\x0a\x0a\x08", b"\x22\x09\x0a\x07")[:-1]], "cannot be decoded of agent 9"),
        ([b"\x0a\xff"], "observation 'eye' that cannot be decoded of agent 9"),
    ],
)
def test_sensors_that_change_are_refused(seen: list[bytes], reason: str) -> None:
    """They may change between agents or between messages."""
    bad = writer.agent(seen, number=9)
    assert "sensors" in refused([GOOD, bad], reason).remedy
    made = columns([GOOD])
    assert made.report(infos([GOOD])) is not None
    with pytest.raises(UnreadableData, match=reason):
        made.report(infos([bad]))


def test_another_shape_with_as_many_numbers_is_refused() -> None:
    """Three entities of four numbers and four of three have as many bytes."""
    three, four = (writer.floats(np.zeros(shape, np.float32), [VARIABLE, NONE]) for shape in ((3, 4), (4, 3)))
    assert len(three) == len(four)
    refused([writer.agent([three]), writer.agent([four], number=9)], "'obs_0' with fields .* of agent 9")


def test_truncated_numbers_are_refused() -> None:
    """They have seven of eight bytes, in a complete message."""
    data = writer.block(4, writer.block(1, bytes(7)))
    short = writer.integers(1, [2]) + data + writer.integers(6, [NONE]) + writer.text(8, "eye")
    refused([GOOD, writer.agent([short], number=9)], "1.75 numbers for observation 'eye' of shape .* of agent 9")


@pytest.mark.parametrize(
    ("pngs", "reason"),
    [
        (b"", "no PNG"),
        (writer.as_pngs(np.zeros((3, 4, 5), np.uint8))[:-1], "truncated"),
        (writer.as_pngs(np.zeros((3, 5, 4), np.uint8)), "4 x 5 pixels"),
    ],
)
def test_unreadable_images_are_refused(pngs: bytes, reason: str) -> None:
    good = writer.packed(writer.as_pngs(np.zeros((3, 4, 5), np.uint8)), [3, 4, 5], name="eye")
    bad = writer.packed(pngs, [3, 4, 5], name="eye")
    refused([writer.agent([good]), writer.agent([bad], number=9)], f"{reason}.* of agent 9")


@pytest.mark.parametrize(("mask", "size"), [([True], 1), ([True] * 4, 4), ([False] * 2, 2)])
def test_a_mask_of_another_size_is_refused(mask: list[bool], size: int) -> None:
    """This concerns agents that decide; the mask of an agent that is done is ignored."""
    brain = writer.brain(branches=[2, 3])
    bad = writer.agent(SEEN, number=9, mask=mask)
    error = refused([GOOD, bad], f"a mask of {size} choices of agent 9 of .*, which has 5", brain)
    assert "action spec" in error.remedy
    made = columns([GOOD], brain)
    assert made.report(infos([GOOD, writer.agent(SEEN, number=9, mask=mask, done=True)])) is not None


def test_an_agent_that_requests_two_decisions_at_once_is_refused() -> None:
    error = refused([GOOD, writer.agent(SEEN, number=5), GOOD], "agent 4 of .* twice")
    assert "one decision" in error.remedy


@pytest.mark.parametrize(
    ("brain", "seen", "reason"),
    [
        (writer.brain(), SEEN, "without actions"),
        (writer.brain(branches=[3, 0]), SEEN, r"branches \(3, 0\)"),
        (writer.brain(continuous=-1), SEEN, "-1 continuous"),
        (writer.block(9, writer.integer(2, 2)), SEEN, "2 discrete actions with branches"),
        (writer.old_brain(NAME, [1, 2], continuous=True), SEEN, "continuous actions of sizes"),
        (writer.brain(continuous=1), [], "without observations"),
        (writer.brain(continuous=1), [writer.floats(np.zeros((2, 2), np.float32), [NONE, NONE])], "no vector"),
        (writer.brain(continuous=1), [writer.floats(np.zeros((2, 0), np.float32), [VARIABLE, NONE])], r"\(2, 0\)"),
        (writer.brain(continuous=1), [b"\x0a\xff"], "observation 0 that cannot be decoded"),
    ],
)
def test_a_behavior_without_a_possible_network_is_refused(brain: bytes, seen: list[bytes], reason: str) -> None:
    with pytest.raises(UnreadableData, match=reason) as raised:
        columns([writer.agent(seen)], brain)
    assert NAME in str(raised.value)
    assert "sensors and actions" in raised.value.remedy


@pytest.mark.parametrize("name", ["", "B?team=-1", "B?team=x", "B?team=99999999999"])
def test_an_invalid_behavior_name_is_refused(name: str) -> None:
    brain = parsed("BrainParametersProto", writer.brain(continuous=1), "a behavior")
    with pytest.raises(UnreadableData, match="behavior id"):
        PlayerBehavior(name, brain, infos([GOOD])[0])


def test_actions_of_other_agents_are_refused() -> None:
    made = columns([GOOD])
    made.report(infos([GOOD, writer.agent(SEEN, number=5)]))
    for agents in ([4], [5, 4], [4, 5, 6]):
        n = len(agents)
        actions = BehaviorActions(
            behavior=NAME,
            agents=np.array(agents, np.int64),
            continuous=np.zeros((n, 1), np.float32),
            discrete=np.zeros((n, 0), np.int32),
        )
        with pytest.raises(LocalProtocolError, match="row by row"):
            made.encode(actions)


def test_actions_take_no_memory_before_their_receiver_has_accepted_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spec of a hundred bytes may claim so many that no machine has the memory."""
    monkeypatch.setattr(f"{PlayerBehavior.__module__}.ActionWriter", lambda *_, **__: pytest.fail("made too early"))
    made = columns([GOOD], writer.brain(NAME, continuous=2**31 - 1))
    assert made.spec.actions.continuous == 2**31 - 1
    assert made.report(infos([GOOD])) is not None


@pytest.mark.parametrize("mapping", [(), (0, 1, 2)])
def test_channels_take_no_memory_where_their_files_cannot_hold_them(mapping: tuple[int, ...]) -> None:
    pngs = writer.as_pngs(np.zeros((3, 1, 1), np.uint8))
    shape = [1, 1, 2**31 - 1]
    with pytest.raises(UnreadableData, match=f"'eye' of {shape[2]} channels, where its PNG files hold at most"):
        columns([writer.agent([writer.packed(pngs, shape, writer.HWC, mapping=mapping, name="eye")])])
