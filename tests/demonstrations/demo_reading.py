"""Reads `.demo` files that tests write, and compares them with what they should hold."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tests.demonstrations.demo_writer as writer
from sparring.pipeline.demonstrations import unity
from sparring.pipeline.demonstrations.episodes import ActionsOf, Recording, RecordingError
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from tests.demonstrations.demo_writer import Episode
from tests.unity.protobuf_writer import NONE, TRANSLATION

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


def refusal(data: bytes, reason: str, **more: Any) -> RecordingError:
    """Returns the error with which a file is refused, which names the file and the reason."""
    with pytest.raises(RecordingError, match=reason) as raised:
        read(data, **more)
    assert "walker.demo: " in raised.value.got
    assert raised.value.expected
    assert raised.value.remedy
    return raised.value


def random_episode(rng: np.random.Generator, steps: int, **more: Any) -> Episode:
    """Returns an episode of random content."""
    return Episode(
        observations=rng.normal(size=(steps + 1, 3)).astype(np.float32),
        continuous=rng.uniform(-1, 1, (steps, 2)).astype(np.float32),
        discrete=rng.integers(0, ACTIONS.discrete, (steps, 2)).astype(np.int32),
        rewards=rng.normal(size=steps).astype(np.float32),
        group_rewards=rng.normal(size=steps).astype(np.float32),
        **more,
    )


def assert_columns(found: Recording, expected: list[Episode], team: int = 0) -> None:
    """Compares all columns with the expected episodes."""
    columns: dict[str, Any] = {
        "lengths": np.array([len(episode.rewards) for episode in expected], np.int32),
        "agents": np.array([episode.agent for episode in expected], np.int64),
        "teams": np.full(len(expected), team, np.int32),
        "simulators": np.zeros(len(expected), np.int32),
        "groups": np.array([episode.group for episode in expected], np.int64),
        "terminated": np.array([episode.done and not episode.interrupted for episode in expected]),
        "observation.0": np.concatenate([episode.observations[:-1] for episode in expected]),
        "final_observation.0": np.stack([episode.observations[-1] for episode in expected]),
        "continuous": np.concatenate([episode.continuous for episode in expected]),
        "discrete": np.concatenate([episode.discrete for episode in expected]),
        "rewards": np.concatenate([episode.rewards for episode in expected]),
        "group_rewards": np.concatenate([episode.group_rewards for episode in expected]),
    }
    masks = [
        np.zeros((len(episode.rewards), 5), np.bool_) if episode.masks is None else episode.masks
        for episode in expected
    ]
    if np.concatenate(masks).any():
        columns["masks"] = np.concatenate(masks)
    assert found.spec == SPEC
    assert set(found.columns) == set(columns)
    for name, column in columns.items():
        assert found.columns[name].dtype == column.dtype, name
        np.testing.assert_array_equal(found.columns[name], column, err_msg=name)


def demo_of(
    expected: list[Episode], brain: bytes | None = None, *, closed: bool = True, actions: ActionsOf = "previous"
) -> bytes:
    brain = brain if brain is not None else writer.behavior("B?team=0", 2, (3, 2))
    return writer.demo(brain, [pair for episode in expected for pair in episode.pairs(actions)], closed=closed)


def actions_of(found: Recording) -> str:
    assert found.pairing is not None
    return found.pairing.actions


def one_step(observations: list[bytes], brain: bytes | None = None, act: bytes = CHOSEN) -> bytes:
    """Returns a file of one step: two pairs with the same observations."""
    pairs = [writer.pair(observations), writer.pair(observations, act, done=True)]
    return writer.demo(brain if brain is not None else writer.behavior(continuous=1), pairs)


def pixels(channels: int) -> Any:
    return np.random.default_rng(channels).integers(0, 256, (channels, 4, 5), np.uint8)


def as_png(image: Any) -> bytes:
    """Returns an image [channels, height, width] as PNG files of three channels; the last is padded with black."""
    filled = np.concatenate([image, np.zeros((-len(image) % 3, *image.shape[1:]), np.uint8)])
    return b"".join(writer.png(filled[at : at + 3].transpose(1, 2, 0)) for at in range(0, len(filled), 3))


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
