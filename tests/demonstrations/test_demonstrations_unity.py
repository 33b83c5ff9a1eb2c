"""ML-Agents' `.demo` files: what was recorded is what is read, and a file that is not whole is refused by name."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.demonstrations.demo_writer as writer
from sparring.pipeline.bridges.unity import messages as schema
from sparring.pipeline.demonstrations import episodes, unity
from sparring.pipeline.demonstrations.episodes import Recording, RecordingError
from sparring.pipeline.demonstrations.pairing import ActionsOf, Pairing
from sparring.pipeline.errors import install_command
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from tests.demonstrations.demo_writer import NONE, TRANSLATION, VARIABLE, Played

ACTIONS = ActionSpec(continuous=2, discrete=(3, 2))
SPEC = BehaviorSpec(observations=(ObservationSpec(name="obs_0", shape=(3,)),), actions=ACTIONS)
CHW, HWC = (NONE, TRANSLATION, TRANSLATION), (TRANSLATION, TRANSLATION, NONE)
OBSERVED = [writer.vector([1.0, 2.0])]
CHOSEN = writer.action([0.5])


def read(data: bytes, **more: Any) -> Recording:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "walker.demo"
        path.write_bytes(data)
        return unity.read(path, **more)


def refused(data: bytes, reason: str, **more: Any) -> RecordingError:
    """The refusal of a file; it names the file and gives the reason."""
    with pytest.raises(RecordingError, match=reason) as raised:
        read(data, **more)
    assert "walker.demo: " in raised.value.got
    assert raised.value.expected
    assert raised.value.remedy
    return raised.value


def played(rng: np.random.Generator, steps: int, **more: Any) -> Played:
    """An episode of random content."""
    return Played(
        observations=rng.normal(size=(steps + 1, 3)).astype(np.float32),
        continuous=rng.uniform(-1, 1, (steps, 2)).astype(np.float32),
        discrete=rng.integers(0, ACTIONS.discrete, (steps, 2)).astype(np.int32),
        rewards=rng.normal(size=steps).astype(np.float32),
        group_rewards=rng.normal(size=steps).astype(np.float32),
        **more,
    )


def check(found: Recording, expected: list[Played], team: int = 0) -> None:
    """Compares all columns with the episodes as they were played."""
    columns: dict[str, Any] = {
        "lengths": np.array([len(one.rewards) for one in expected], np.int32),
        "agents": np.array([one.agent for one in expected], np.int64),
        "teams": np.full(len(expected), team, np.int32),
        "simulators": np.zeros(len(expected), np.int32),
        "groups": np.array([one.group for one in expected], np.int64),
        "terminated": np.array([one.done and not one.cut for one in expected]),
        "observation.0": np.concatenate([one.observations[:-1] for one in expected]),
        "final_observation.0": np.stack([one.observations[-1] for one in expected]),
        "continuous": np.concatenate([one.continuous for one in expected]),
        "discrete": np.concatenate([one.discrete for one in expected]),
        "rewards": np.concatenate([one.rewards for one in expected]),
        "group_rewards": np.concatenate([one.group_rewards for one in expected]),
    }
    masks = [np.zeros((len(one.rewards), 5), np.bool_) if one.masks is None else one.masks for one in expected]
    if np.concatenate(masks).any():
        columns["masks"] = np.concatenate(masks)
    assert found.spec == SPEC
    assert set(found.columns) == set(columns)
    for name, column in columns.items():
        assert found.columns[name].dtype == column.dtype, name
        np.testing.assert_array_equal(found.columns[name], column, err_msg=name)


def demo_of(
    expected: list[Played], brain: bytes | None = None, *, closed: bool = True, actions: ActionsOf = "previous"
) -> bytes:
    brain = brain if brain is not None else writer.behavior("B?team=0", 2, (3, 2))
    return writer.demo(brain, [pair for one in expected for pair in one.pairs(actions)], closed=closed)


def actions_of(found: Recording) -> str:
    assert found.pairing is not None
    return found.pairing.actions


def two(observations: list[bytes], brain: bytes | None = None, act: bytes = CHOSEN) -> bytes:
    """A file of one step: two pairs of the same observations."""
    pairs = [writer.pair(observations), writer.pair(observations, act, done=True)]
    return writer.demo(brain if brain is not None else writer.behavior(continuous=1), pairs)


# What is read


def test_five_episodes_are_read_to_exactly_their_columns() -> None:
    """Hybrid actions, masks, groups, an end by a limit, and a last episode that the file's end cuts."""
    rng = np.random.default_rng(1)
    masked = rng.random((4, 5)) < 0.5
    expected = [
        played(rng, 3, agent=1),
        played(rng, 4, agent=2, cut=True, masks=masked, before=7.0),
        played(rng, 1, agent=3, group=9),
        played(rng, 6, agent=4),
        played(rng, 2, agent=5, done=False),
    ]
    found = read(demo_of(expected, writer.behavior("Walker?team=3", 2, (3, 2))))
    assert found.behavior == "Walker"
    check(found, expected, team=3)


FIXTURE = bytes.fromhex(
    # length 14 of the metadata
    "0e"
    "0801"  # 1 api_version: 1
    "120141"  # 2 demonstration_name: "A" (not read)
    "1802"  # 3 number_steps: 2
    "2001"  # 4 number_episodes: 1 (not read)
    "2d0000003f"  # 5 mean_reward: 0.5 (not read)
    "000000000000000000000000000000000000"  # nothing, up to byte 33
    # length 21 of the behavior's parameters
    "15"
    "3a08423f7465616d3d31"  # 7 brain_name: "B?team=1"
    "4001"  # 8 is_training: true (not read)
    "4a07"  # 9 action_spec, 7 bytes:
    "0801"  # . 1 num_continuous_actions: 1
    "1001"  # . 2 num_discrete_actions: 1
    "1a0103"  # . 3 discrete_branch_sizes: [3]
    # length 39 of the first pair
    "27"
    "0a23"  # 1 agent_info, 35 bytes:
    "3d0000003f"  # . 7 reward: 0.5, of no step
    "5007"  # . 10 id: 7
    "5a03000100"  # . 11 action_mask: [false, true, false]
    "6a15"  # . 13 observations, one of 21 bytes:
    "0a0102"  # . . 1 shape: [2]
    "220a0a080000803f000000c0"  # . . 4 float_data: 1 data: [1.0, -2.0]
    "320101"  # . . 6 dimension_properties: [1]
    "42016f"  # . . 8 name: "o"
    "1200"  # 2 action_info: empty, nothing was decided before
    # length 52 of the second pair
    "34"
    "0a27"  # 1 agent_info, 39 bytes:
    "3d0000803f"  # . 7 reward: 1.0
    "4001"  # . 8 done: true
    "5007"  # . 10 id: 7
    "6a15"  # . 13 observations, one of 21 bytes:
    "0a0102"  # . . 1 shape: [2]
    "220a0a080000803e00004040"  # . . 4 float_data: 1 data: [0.25, 3.0]
    "320101"  # . . 6 dimension_properties: [1]
    "42016f"  # . . 8 name: "o"
    "7002"  # . 14 group_id: 2
    "7d00000040"  # . 15 group_reward: 2.0
    "1209"  # 2 action_info, 9 bytes:
    "3204000040bf"  # . 6 continuous_actions: [-0.75]
    "3a0102"  # . 7 discrete_actions: [2]
    # the metadata again, without their length
    "08011201411802"
    "2001"
    "2d0000003f"
)


def test_a_file_assembled_by_hand_is_read_to_its_columns() -> None:
    found = read(FIXTURE)
    assert found.behavior == "B"
    assert found.spec == BehaviorSpec(
        observations=(ObservationSpec(name="o", shape=(2,)),), actions=ActionSpec(continuous=1, discrete=(3,))
    )
    plain = {name: column.tolist() for name, column in found.columns.items()}
    assert plain == {
        "lengths": [1],
        "agents": [7],
        "teams": [1],
        "simulators": [0],
        "groups": [2],
        "terminated": [True],
        "observation.0": [[1.0, -2.0]],
        "final_observation.0": [[0.25, 3.0]],
        "continuous": [[-0.75]],
        "discrete": [[2]],
        "masks": [[False, True, False]],
        "rewards": [1.0],
        "group_rewards": [2.0],
    }


EPISODES = st.lists(
    st.fixed_dictionaries(
        {
            "steps": st.integers(0, 5),
            "masked": st.booleans(),
            "cut": st.booleans(),
            "agent": st.integers(-5, 5),
            "group": st.integers(0, 3),
        }
    ),
    min_size=1,
    max_size=6,
)


GENERATIONS: st.SearchStrategy[ActionsOf] = st.sampled_from(("previous", "own"))


@settings(max_examples=60, deadline=None)
@given(
    shapes=EPISODES, seed=st.integers(0, 2**32 - 1), open_end=st.booleans(), closed=st.booleans(), actions=GENERATIONS
)
def test_any_episodes_come_back_and_go_through_our_own_format(
    shapes: list[dict[str, Any]], seed: int, open_end: bool, closed: bool, actions: ActionsOf
) -> None:
    """Both generations hold the same columns. Without a step, episodes are left out and files refused."""
    rng = np.random.default_rng(seed)
    expected = []
    for at, shape in enumerate(shapes):
        done = not (open_end and at == len(shapes) - 1)
        masks = rng.random((shape["steps"], 5)) < 0.3 if shape["masked"] else None
        more = {"masks": masks, "cut": shape["cut"] and done, "agent": shape["agent"], "group": shape["group"]}
        expected.append(played(rng, shape["steps"], done=done, **more))
    data, whole = demo_of(expected, closed=closed, actions=actions), [one for one in expected if len(one.rewards)]
    if not whole:
        refused(data, "no whole step")
        return
    found = read(data)
    assert actions_of(found) == actions
    check(found, whole)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "one.episodes.safetensors"
        path.write_bytes(episodes.encode(found))
        again = episodes.read(path)
    assert (again.behavior, again.spec) == (found.behavior, found.spec)
    check(again, whole)


def test_agents_that_share_a_file_keep_their_own_episodes() -> None:
    """Episodes are put together by the agent's id and stand in the order of their ends."""
    rng = np.random.default_rng(2)
    long, short, late = played(rng, 4, agent=1), played(rng, 2, agent=2), played(rng, 1, agent=2, done=False)
    a, b, c = long.pairs(), short.pairs(), late.pairs()
    mixed = [a[0], b[0], a[1], b[1], b[2], c[0], a[2], a[3], c[1], a[4]]
    check(read(writer.demo(writer.behavior("B", 2, (3, 2)), mixed)), [short, long, late])


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4), seed=st.integers(0, 2**32 - 1))
def test_an_agent_that_is_done_and_decides_begins_its_next_episode(lengths: list[int], seed: int) -> None:
    """In old files it is reset before it sees: the last observation of an episode stands for what followed it."""
    rng = np.random.default_rng(seed)
    expected = [played(rng, steps, masks=rng.random((steps, 5)) < 0.3) for steps in lengths]
    for one in expected[:-1]:
        one.observations[-1] = one.observations[-2]
    expected[-1].done = False
    found = read(writer.demo(writer.behavior("B", 2, (3, 2)), writer.reset_pairs(expected)))
    assert actions_of(found) == "own"
    check(found, expected)


NOTHING, ZERO = writer.action(), writer.action([0.0])


def one_number(*episodes: list[bytes]) -> bytes:
    """A file of these actions, whose episodes all but the last are done."""
    pairs = []
    for number, actions in enumerate(episodes):
        done = number < len(episodes) - 1
        last = len(actions) - 1
        pairs += [writer.pair(OBSERVED, act, done=done and at == last) for at, act in enumerate(actions)]
    return writer.demo(writer.behavior(continuous=1), pairs)


A, B, C = (writer.action([value]) for value in (0.25, 0.5, 0.75))


@pytest.mark.parametrize(
    ("episodes", "actions", "evidence"),
    [
        ([[A, B, NOTHING]], "own", "its last pair has no action"),
        ([[ZERO, B, NOTHING]], "own", "its last pair has no action"),
        ([[A, B], [NOTHING]], "own", "its last pair has no action"),
        ([[A, NOTHING], [A, NOTHING]], "own", "its last pair has no action"),
        ([[NOTHING, A]], "previous", "1 of 1 episodes begin with no action or zero"),
        ([[ZERO, A, B]], "previous", "1 of 1 "),
        ([[NOTHING, A], [NOTHING]], "previous", "2 of 2 "),
        ([[A, B], [ZERO, C]], "previous", "1 of 2 "),  # the recording began within an episode
        ([[ZERO, B], [B, C], [ZERO]], "previous", "2 of 3 "),  # what is left of the episode before
    ],
)
def test_the_generation_is_detected_from_the_pair_that_has_no_action(
    episodes: list[list[bytes]], actions: str, evidence: str
) -> None:
    found = read(one_number(*episodes)).pairing
    assert found is not None
    assert found.actions == actions
    assert found.evidence.startswith(evidence)


@pytest.mark.parametrize(
    ("episodes", "reason"),
    [
        ([[A, B, C]], "an action in its last pair, and 1 of 1 episodes that begin with a new one"),
        ([[ZERO, A], [B, C]], "1 of 2 episodes that begin with a new one"),
        ([[A, B], [B, C]], "1 of 2 episodes that begin with a new one"),
        ([[ZERO, NOTHING, B]], "no action in pair 1 of 3"),
        ([[A, NOTHING], [B, C]], "no action in pair 1 of 4"),
        ([[NOTHING, B, NOTHING]], "no action in pair 2 of 3"),
    ],
)
def test_a_file_of_neither_generation_is_refused(episodes: list[list[bytes]], reason: str) -> None:
    error = refused(one_number(*episodes), reason)
    assert "no action in its last pair" in error.expected
    assert "demo_actions beside demo_path to own or previous" in error.remedy


def test_the_setting_outweighs_all_evidence() -> None:
    neither, zero = one_number([A, B, C]), one_number([ZERO, B, C])
    for data, first in ((neither, 0.25), (zero, 0.0)):
        assert read(data, actions="own").columns["continuous"].tolist() == [[first], [0.5]]
        assert read(data, actions="previous").columns["continuous"].tolist() == [[0.5], [0.75]]
        assert read(data, actions="own").pairing == Pairing(actions="own", evidence="as demo_actions says")


def test_an_action_that_belongs_to_no_step_is_not_looked_at() -> None:
    """What a recorder leaves in an episode's first pair means nothing."""
    pairs = [writer.pair(OBSERVED, writer.action([math.nan] * 4)), writer.pair(OBSERVED, CHOSEN, done=True)]
    data = writer.demo(writer.behavior(continuous=1), pairs)
    assert read(data, actions="previous").columns["continuous"].tolist() == [[0.5]]


def test_a_file_that_names_no_behavior_gives_its_own_name() -> None:
    found = read(two(OBSERVED, writer.behavior("", 1)))
    assert found.behavior == "walker"
    assert found.columns["teams"].tolist() == [0]


def test_continuous_actions_beyond_the_range_are_clipped() -> None:
    found = read(two(OBSERVED, writer.behavior(continuous=3), writer.action([1.5, -1.0001, 0.25])))
    assert found.columns["continuous"].tolist() == [[1.0, -1.0, 0.25]]


def test_masks_that_forbid_nothing_are_absent() -> None:
    pairs = [writer.pair(OBSERVED, writer.action((), [at]), mask=[False, False], done=at == 1) for at in range(2)]
    assert "masks" not in read(writer.demo(writer.behavior(branches=[2]), pairs)).columns


@pytest.mark.parametrize(
    ("sizes", "continuous", "values", "expected"),
    [([2], True, [0.5, -0.5], ([[0.5, -0.5]], [[]])), ([3, 2], False, [2.0, 1.0], ([[]], [[2, 1]]))],
)
def test_old_files_with_one_list_of_actions_are_read(
    sizes: list[int], continuous: bool, values: list[float], expected: tuple[Any, Any]
) -> None:
    data = two(OBSERVED, writer.old_behavior("Old", sizes, continuous=continuous), writer.action(old=values))
    found = read(data)
    wanted = ActionSpec(continuous=2) if continuous else ActionSpec(discrete=(3, 2))
    assert (found.behavior, found.spec.actions) == ("Old", wanted)
    assert (found.columns["continuous"].tolist(), found.columns["discrete"].tolist()) == expected


def test_observations_have_the_kinds_and_names_of_their_sensors() -> None:
    """Names of the file, one of the place where there is none, and a number where one comes twice."""
    seen = [
        writer.vector([1.0], name="eye"),
        writer.vector([1.0, 2.0], name="eye", kind=1),
        writer.floats(range(6), [3, 2], [VARIABLE, NONE]),
        writer.floats(range(12), [2, 3, 2], CHW, name="map"),
    ]
    found = read(two(seen))
    assert found.spec.observations == (
        ObservationSpec(name="eye", shape=(1,)),
        ObservationSpec(name="eye_2", shape=(2,), kind="goal"),
        ObservationSpec(name="obs_2", shape=(3, 2), kind="entities"),
        ObservationSpec(name="map", shape=(2, 3, 2), kind="image"),
    )
    np.testing.assert_array_equal(found.columns["observation.2"][0], np.arange(6).reshape(3, 2))
    np.testing.assert_array_equal(found.columns["observation.3"][0], np.arange(12).reshape(2, 3, 2))


@pytest.mark.parametrize("axes", [HWC, (), (0, 0, 0)])
def test_images_with_their_channels_last_are_turned(axes: tuple[int, ...]) -> None:
    image = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    found = read(two([writer.floats(image.ravel().tolist(), image.shape, axes)]))
    assert found.spec.observations[0].shape == (2, 2, 3)
    np.testing.assert_array_equal(found.columns["final_observation.0"][0], image.transpose(2, 0, 1))


def pixels(channels: int) -> Any:
    return np.random.default_rng(channels).integers(0, 256, (channels, 4, 5), np.uint8)


def as_png(image: Any) -> bytes:
    """[channels, height, width] as PNG files of three channels, the last filled up with black."""
    filled = np.concatenate([image, np.zeros((-len(image) % 3, *image.shape[1:]), np.uint8)])
    return b"".join(writer.png(filled[at : at + 3].transpose(1, 2, 0)) for at in range(0, len(filled), 3))


@pytest.mark.parametrize("channels", [2, 3, 6, 7])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
def test_png_images_keep_their_bytes(channels: int, last: bool, mapped: bool) -> None:
    """One or several files, either place of the channels, with and without a mapping; what fills up is left out."""
    image = pixels(channels)
    shape, axes = ([4, 5, channels], HWC) if last else ([channels, 4, 5], CHW)
    mapping = [*range(channels), *[-1] * (-channels % 3)] if mapped else []
    found = read(two([writer.packed(as_png(image), shape, axes, mapping)]))
    assert found.spec.observations[0] == ObservationSpec(
        name="obs_0", shape=(channels, 4, 5), dtype="uint8", kind="image"
    )
    np.testing.assert_array_equal(found.columns["observation.0"][0], image)


def test_the_mapping_puts_channels_in_their_places() -> None:
    image = pixels(6)
    found = read(two([writer.packed(as_png(image), [3, 4, 5], CHW, [2, -1, 0, -1, 1, -1])]))
    np.testing.assert_array_equal(found.columns["observation.0"][0], image[[2, 4, 0]])


@pytest.mark.parametrize("mapping", [[], [0, 0, 0]])
def test_channels_that_are_averaged_are_floats(mapping: list[int]) -> None:
    """A grey image comes as three channels; their mean needs more than a byte."""
    image = pixels(3)
    found = read(two([writer.packed(as_png(image), [1, 4, 5], CHW, mapping)]))
    assert found.spec.observations[0].dtype == "float32"
    np.testing.assert_allclose(found.columns["observation.0"][0, 0], image.mean(axis=0) / 255, atol=1e-6)


def test_a_png_of_one_channel_stands_for_three_equal_ones() -> None:
    image = pixels(1)
    found = read(two([writer.packed(writer.png(image[0], "L"), [3, 4, 5], CHW)]))
    np.testing.assert_array_equal(found.columns["observation.0"][0], np.repeat(image, 3, axis=0))


def test_a_recorder_that_was_not_closed_leaves_a_file_that_is_read_to_its_end() -> None:
    expected = [played(np.random.default_rng(3), 4, agent=1), played(np.random.default_rng(4), 2, agent=2)]
    check(read(demo_of(expected, closed=False)), expected)


# What is refused


def test_a_file_cut_off_anywhere_is_refused() -> None:
    """Every byte: only without the second metadata, which say nothing new, is it still whole."""
    expected = [played(np.random.default_rng(5), 2)]
    data = demo_of(expected)
    whole = len(data) - len(writer.metadata(steps=3, episodes=1))
    for size in range(len(data)):
        if size == whole:
            check(read(data[:size]), expected)
        else:
            with pytest.raises(RecordingError, match=r"walker\.demo"):
                read(data[:size])


def test_an_unclosed_file_cut_off_between_two_pairs_is_read_as_fewer_steps() -> None:
    """Every byte: in the midst of a pair it is refused, as nothing says how much is missing between two of them."""
    one = played(np.random.default_rng(6), 3)
    data, pairs = demo_of([one], closed=False), [writer.delimited(pair) for pair in one.pairs()]
    borders = {len(data) - sum(map(len, pairs[steps + 1 :])): steps for steps in (1, 2, 3)}
    for size in range(len(data)):
        if size in borders:
            found = read(data[:size]).columns
            assert found["lengths"].tolist() == [borders[size]]
            assert not found["terminated"][0]
        else:
            with pytest.raises(RecordingError, match=r"walker\.demo"):
                read(data[:size])


def test_pairs_that_the_metadata_do_not_tell_of_are_refused() -> None:
    one = played(np.random.default_rng(7), 3)
    brain, pairs = writer.behavior("B", 2, (3, 2)), one.pairs()
    told = writer.delimited(writer.metadata(steps=3)).ljust(33, b"\0") + writer.delimited(brain)
    refused(told + b"".join(map(writer.delimited, pairs)), "bytes after the last of the 3 pairs")
    refused(told + b"".join(map(writer.delimited, pairs[:2])), "2 pairs of the 3 .*cut off")


def test_a_file_of_pairs_without_a_step_is_refused() -> None:
    brain = writer.behavior(continuous=1)
    refused(writer.demo(brain, []), "no step")
    refused(writer.demo(brain, [], closed=False), "no step")
    refused(writer.demo(brain, [writer.pair(OBSERVED, ZERO, done=True)] * 3), "no whole step in 3 pairs")


@pytest.mark.parametrize("version", [2, 15, -1])
def test_another_version_is_refused(version: int) -> None:
    refused(writer.demo(writer.behavior(continuous=1), [writer.pair(OBSERVED)], version=version), f"version {version} ")


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
    refused(data, reason)


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
def test_parameters_of_no_behavior_are_refused(brain: bytes, reason: str) -> None:
    refused(two(OBSERVED, brain), reason)


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
        ([writer.floats([1.0] * 8, [2, 2, 2], [NONE, NONE, NONE])], "do not tell height and width"),
        ([writer.packed(b"", [2], compression=1)], "with compression 1"),
        ([writer.packed(b"", [3, 4, 5], CHW, compression=7)], "with compression 7"),
        ([writer.packed(b"", [3, 4, 5], CHW)], "that is no PNG"),
        ([writer.packed(b"\x89PNG\r\n\x1a\n", [3, 4, 5], CHW)], "cut off"),
        ([writer.packed(as_png(pixels(3))[:-1], [3, 4, 5], CHW)], "cut off"),
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
def test_observations_that_can_not_be_read_are_refused(observations: list[bytes], reason: str) -> None:
    refused(two(observations), reason)


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
    refused(writer.demo(writer.behavior(continuous=1), pairs), f"{reason}.* in pair 1")


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
    refused(two(OBSERVED, writer.behavior(continuous=1, branches=[3]), act), reason, actions="previous")


@pytest.mark.parametrize("choice", [0.5, math.nan, math.inf, -1.0, 3.0])
def test_old_choices_that_are_no_index_are_refused(choice: float) -> None:
    refused(two(OBSERVED, writer.old_behavior("A", [3], continuous=False), writer.action(old=[choice])), "choices")


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
    refused(writer.demo(writer.behavior(continuous=1), pairs), reason)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.demo", tmp_path):
        with pytest.raises(RecordingError, match=path.name) as raised:
            unity.read(path)
        assert raised.value.remedy == "correct the path"


SAMPLES: list[Callable[[], bytes]] = [
    lambda: FIXTURE,
    lambda: two([writer.packed(as_png(pixels(6)), [6, 4, 5], CHW, [0, 1, 2, 3, 4, 5])]),
]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_and_nothing_else(data: st.DataObject) -> None:
    """Bytes changed, taken out or put in anywhere: no other exception, and columns that fit together."""
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


# What it is read with


@pytest.mark.parametrize("library", ["google.protobuf", "PIL"])
def test_a_missing_library_is_named_with_the_extra_that_brings_it(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = as_png(pixels(3))  # pillow writes it
    schema.messages.cache_clear()
    monkeypatch.setitem(sys.modules, library, None)
    name = {"google.protobuf": "protobuf", "PIL": "pillow"}[library]
    error = refused(two([writer.packed(data, [3, 4, 5], CHW)]), f"no library {name}")
    assert error.remedy == install_command("unity")
