"""Damaged, truncated and inconsistent `.demo` files are refused by name with a reason."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.demonstrations.demo_writer as writer
from sparring.pipeline.demonstrations import episodes, unity
from sparring.pipeline.demonstrations.episodes import RecordingError
from tests.demonstrations.demo_reading import (
    CHOSEN,
    CHW,
    FIXTURE,
    OBSERVED,
    as_png,
    assert_columns,
    demo_of,
    one_step,
    pixels,
    random_episode,
    read,
    refusal,
)
from tests.unity.protobuf_writer import NONE


def test_a_file_truncated_at_any_byte_is_refused() -> None:
    """Only without the second metadata, which add nothing, is it still whole."""
    expected = [random_episode(np.random.default_rng(5), 2)]
    data = demo_of(expected)
    whole = len(data) - len(writer.metadata(steps=3, episodes=1))
    for size in range(len(data)):
        if size == whole:
            assert_columns(read(data[:size]), expected)
        else:
            with pytest.raises(RecordingError, match=r"walker\.demo"):
                read(data[:size])


def test_an_unclosed_file_truncated_between_two_pairs_is_read_as_fewer_steps() -> None:
    """Truncated within a pair it is refused; between two pairs nothing shows that more is missing."""
    episode = random_episode(np.random.default_rng(6), 3)
    data, pairs = demo_of([episode], closed=False), [writer.delimited(pair) for pair in episode.pairs()]
    borders = {len(data) - sum(map(len, pairs[steps + 1 :])): steps for steps in (1, 2, 3)}
    for size in range(len(data)):
        if size in borders:
            found = read(data[:size]).columns
            assert found["lengths"].tolist() == [borders[size]]
            assert not found["terminated"][0]
        else:
            with pytest.raises(RecordingError, match=r"walker\.demo"):
                read(data[:size])


def test_another_number_of_pairs_than_in_the_metadata_is_refused() -> None:
    episode = random_episode(np.random.default_rng(7), 3)
    brain, pairs = writer.behavior("B", 2, (3, 2)), episode.pairs()
    head = writer.delimited(writer.metadata(steps=3)).ljust(33, b"\0") + writer.delimited(brain)
    refusal(head + b"".join(map(writer.delimited, pairs)), "bytes after the last of the 3 pairs")
    refusal(head + b"".join(map(writer.delimited, pairs[:2])), "2 pairs of the 3 .*truncated")


def test_a_file_of_pairs_without_a_step_is_refused() -> None:
    brain = writer.behavior(continuous=1)
    refusal(writer.demo(brain, []), "no step")
    refusal(writer.demo(brain, [], closed=False), "no step")
    zero = writer.pair(OBSERVED, writer.action([0.0]), done=True)
    refusal(writer.demo(brain, [zero] * 3), "no whole step in 3 pairs")


@pytest.mark.parametrize("version", [2, 15, -1])
def test_another_version_is_refused(version: int) -> None:
    refusal(writer.demo(writer.behavior(continuous=1), [writer.pair(OBSERVED)], version=version), f"version {version} ")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "an empty file"),
        (b"\0" * 33, "end of the file"),
        (b"\0" * 100, "negative|no step|without actions"),
        (b"\xff" * 100, "no length before metadata"),
        (b"no demonstration at all, but a text that is long enough", "bytes of metadata|decoded"),
        (writer.delimited(b"\x08\x01" + writer.text(2, "x" * 40)) + b"\0" * 50, "45 bytes of metadata"),
        (writer.delimited(b"\xff\xff") + b"\0" * 50, "metadata that cannot be decoded"),
        (writer.delimited(writer.integer(1, 1) + writer.integer(3, -5)).ljust(33, b"\0") + b"\0", "metadata of -5"),
        (writer.demo(b"\x4a\xff", []), "parameters of the behavior that cannot be decoded"),
        (writer.demo(writer.behavior(continuous=1), [b"\x0a\xff"]), "pair 0 that cannot be decoded"),
    ],
)
def test_garbage_is_refused(data: bytes, reason: str) -> None:
    refusal(data, reason)


@pytest.mark.parametrize(
    ("brain", "reason"),
    [
        (writer.behavior("A?team=x", 1), "A.team=x"),
        (writer.behavior("A"), "without actions"),
        (writer.behavior(continuous=-1), "-1 continuous"),
        (writer.behavior(branches=[2, -3]), r"branches \(2, -3\)"),
        (writer.block(9, writer.integer(2, 2) + writer.integers(3, [3])), r"2 discrete actions with branches \(3,\)"),
        (writer.old_behavior("A", [], continuous=True), r"continuous actions of sizes \(\)"),
        (writer.old_behavior("A", [1, 2], continuous=True), r"continuous actions of sizes \(1, 2\)"),
        (writer.old_behavior("A", [0], continuous=False), r"branches \(0,\)"),
    ],
)
def test_invalid_parameters_of_a_behavior_are_refused(brain: bytes, reason: str) -> None:
    refusal(one_step(OBSERVED, brain), reason)


@pytest.mark.parametrize(
    ("observations", "reason"),
    [
        ([], "without observations"),
        ([writer.vector([], shape=[])], r"shape \(\)"),
        ([writer.vector([], shape=[0])], r"shape \(0,\)"),
        ([writer.vector([1.0], shape=[-1])], r"shape \(-1,\)"),
        ([writer.vector([1.0], shape=[2])], r"1 numbers for observation 'obs_0' of shape \(2,\)"),
        ([writer.floats([1.0], [2**31 - 1] * 3, CHW)], "1 numbers for observation"),
        ([writer.vector([math.nan])], "NaN or infinity in observation 'obs_0' in pair 0"),
        ([writer.vector([math.inf], name="eye")], "NaN or infinity in observation 'eye'"),
        ([writer.floats([1.0] * 4, [2, 2], [NONE, NONE])], "no vector, image or entity list"),
        ([writer.floats([1.0] * 4, [1, 1, 2, 2])], "no vector, image or entity list"),
        ([writer.floats([1.0] * 4, [2, 2], [NONE])], "1 properties of the axes"),
        ([writer.floats([1.0] * 8, [2, 2, 2], [NONE, NONE, NONE])], "do not separate height and width"),
        ([writer.packed(b"", [2], compression=1)], "with compression 1"),
        ([writer.packed(b"", [3, 4, 5], CHW, compression=7)], "with compression 7"),
        ([writer.packed(b"", [3, 4, 5], CHW)], "that is no PNG"),
        ([writer.packed(b"\x89PNG\r\n\x1a\n", [3, 4, 5], CHW)], "truncated"),
        ([writer.packed(as_png(pixels(3))[:-1], [3, 4, 5], CHW)], "truncated"),
        ([writer.packed(as_png(pixels(3))[:60] + as_png(pixels(3))[-12:], [3, 4, 5], CHW)], "PNG"),
        ([writer.packed(as_png(pixels(3)), [3, 5, 4], CHW)], "5 x 4 pixels for image 'obs_0' of 4 x 5"),
        ([writer.packed(as_png(pixels(3)), [6, 4, 5], CHW)], "3 channels of PNG files for 6"),
        ([writer.packed(as_png(pixels(3)), [2, 4, 5], CHW, [0, 1])], "3 channels of PNG files for 2"),
        ([writer.packed(as_png(pixels(3)), [2, 4, 5], CHW, [0, 2, -1])], "channel mapping"),
        ([writer.packed(as_png(pixels(3)), [0, 4, 5], CHW, [0, 0, 0])], r"shape \(0, 4, 5\)"),
        ([writer.packed(as_png(pixels(3)), [3, 2**15, 2**15], CHW)], "more than"),
        ([writer.packed(writer.png(np.zeros((4, 5, 4), np.uint8), "RGBA"), [3, 4, 5], CHW)], "mode RGBA"),
    ],
)
def test_unreadable_observations_are_refused(observations: list[bytes], reason: str) -> None:
    refusal(one_step(observations), reason)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ([writer.vector([1.0, 2.0, 3.0])], "at first"),
        ([writer.vector([1.0, 2.0], name="eye")], "at first"),
        ([writer.vector([1.0, 2.0], kind=1)], "at first"),
        (OBSERVED * 2, "2 observations where there were 1"),
        ([], "0 observations where there were 1"),
    ],
)
def test_observations_that_change_between_steps_are_refused(other: list[bytes], reason: str) -> None:
    pairs = [writer.pair(OBSERVED, CHOSEN), writer.pair(other, CHOSEN, done=True)]
    refusal(writer.demo(writer.behavior(continuous=1), pairs), f"{reason}.* in pair 1")


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (writer.action(), "0 continuous and 0 discrete actions in pair 1 for 1 and 1"),
        (writer.action([0.5]), "1 continuous and 0 discrete"),
        (writer.action([0.5, 0.5], [1]), "2 continuous and 1 discrete"),
        (writer.action(old=[0.5, 1.0]), "2 continuous and 0 discrete"),
        (writer.action([math.nan], [1]), "continuous actions .*nan.* in pair 1"),
        (writer.action([-math.inf], [1]), "continuous actions .*inf.* in pair 1"),
        (writer.action([0.5], [3]), r"choices \[3\] in pair 1 for branches \(3,\)"),
        (writer.action([0.5], [-1]), r"choices \[-1\]"),
    ],
)
def test_actions_that_do_not_fit_are_refused(act: bytes, reason: str) -> None:
    refusal(one_step(OBSERVED, writer.behavior(continuous=1, branches=[3]), act), reason, actions="previous")


@pytest.mark.parametrize("choice", [0.5, math.nan, math.inf, -1.0, 3.0])
def test_old_choices_that_are_not_an_index_are_refused(choice: float) -> None:
    refusal(one_step(OBSERVED, writer.old_behavior("A", [3], continuous=False), writer.action(old=[choice])), "choices")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"reward": math.nan}, "rewards nan and 0.0 of the group in pair 0"),
        ({"group_reward": math.inf}, "rewards 0.0 and inf of the group in pair 0"),
        ({"mask": [True, False]}, "a mask of 2 in pair 0"),
    ],
)
def test_rewards_and_masks_that_do_not_fit_are_refused(more: dict[str, Any], reason: str) -> None:
    pairs = [writer.pair(OBSERVED, CHOSEN, **more), writer.pair(OBSERVED, CHOSEN, done=True)]
    refusal(writer.demo(writer.behavior(continuous=1), pairs), reason)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.demo", tmp_path):
        with pytest.raises(RecordingError, match=path.name) as raised:
            unity.read(path)
        assert raised.value.remedy == "correct the path"


SAMPLES: list[Callable[[], bytes]] = [
    lambda: FIXTURE,
    lambda: one_step([writer.packed(as_png(pixels(6)), [6, 4, 5], CHW, [0, 1, 2, 3, 4, 5])]),
]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_either_read_or_refused(data: st.DataObject) -> None:
    """Changed, removed or inserted bytes raise no other exception and give consistent columns."""
    content = bytearray(data.draw(st.sampled_from(SAMPLES))())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    try:
        found = read(bytes(content))
    except RecordingError:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "one.episodes.safetensors"
        path.write_bytes(episodes.encode(found))
        episodes.read(path)
