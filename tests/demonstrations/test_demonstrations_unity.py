"""ML-Agents' `.demo` files are read to exactly the columns that were recorded, in both generations."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.demonstrations.demo_writer as writer
from sparring.pipeline.demonstrations import episodes
from sparring.pipeline.demonstrations.episodes import ActionsOf, Pairing
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from tests.demonstrations.demo_reading import (
    CHOSEN,
    FIXTURE,
    OBSERVED,
    actions_of,
    assert_columns,
    demo_of,
    one_step,
    random_episode,
    read,
    refusal,
)


def test_five_episodes_are_read_to_exactly_their_columns() -> None:
    """They have hybrid actions, masks, groups, an interruption, and a last episode that the file truncates."""
    rng = np.random.default_rng(1)
    masked = rng.random((4, 5)) < 0.5
    expected = [
        random_episode(rng, 3, agent=1),
        random_episode(rng, 4, agent=2, interrupted=True, masks=masked, before=7.0),
        random_episode(rng, 1, agent=3, group=9),
        random_episode(rng, 6, agent=4),
        random_episode(rng, 2, agent=5, done=False),
    ]
    found = read(demo_of(expected, writer.behavior("Walker?team=3", 2, (3, 2))))
    assert found.behavior == "Walker"
    assert_columns(found, expected, team=3)


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
            "interrupted": st.booleans(),
            "agent": st.integers(-5, 5),
            "group": st.integers(0, 3),
        }
    ),
    min_size=1,
    max_size=6,
)


GENERATIONS: st.SearchStrategy[ActionsOf] = st.sampled_from(("previous", "own"))


@settings(max_examples=30, deadline=None)
@given(
    shapes=EPISODES, seed=st.integers(0, 2**32 - 1), open_end=st.booleans(), closed=st.booleans(), actions=GENERATIONS
)
def test_any_episodes_survive_reading_and_our_own_format(
    shapes: list[dict[str, Any]], seed: int, open_end: bool, closed: bool, actions: ActionsOf
) -> None:
    """Both generations give the same columns; episodes without steps are left out, files without steps refused."""
    rng = np.random.default_rng(seed)
    expected = []
    for at, shape in enumerate(shapes):
        done = not (open_end and at == len(shapes) - 1)
        masks = rng.random((shape["steps"], 5)) < 0.3 if shape["masked"] else None
        more = {
            "masks": masks,
            "interrupted": shape["interrupted"] and done,
            "agent": shape["agent"],
            "group": shape["group"],
        }
        expected.append(random_episode(rng, shape["steps"], done=done, **more))
    data, whole = (
        demo_of(expected, closed=closed, actions=actions),
        [episode for episode in expected if len(episode.rewards)],
    )
    if not whole:
        refusal(data, "no whole step")
        return
    found = read(data)
    assert actions_of(found) == actions
    assert_columns(found, whole)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "one.episodes.safetensors"
        path.write_bytes(episodes.encode(found))
        again = episodes.read(path)
    assert (again.behavior, again.spec) == (found.behavior, found.spec)
    assert_columns(again, whole)


def test_agents_that_share_a_file_keep_their_own_episodes() -> None:
    """Episodes are assembled by agent id and have the order of their ends."""
    rng = np.random.default_rng(2)
    long, short, late = (
        random_episode(rng, 4, agent=1),
        random_episode(rng, 2, agent=2),
        random_episode(rng, 1, agent=2, done=False),
    )
    a, b, c = long.pairs(), short.pairs(), late.pairs()
    mixed = [a[0], b[0], a[1], b[1], b[2], c[0], a[2], a[3], c[1], a[4]]
    assert_columns(read(writer.demo(writer.behavior("B", 2, (3, 2)), mixed)), [short, long, late])


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4), seed=st.integers(0, 2**32 - 1))
def test_a_pair_that_is_done_and_has_an_action_begins_the_next_episode(lengths: list[int], seed: int) -> None:
    """In old files agents reset before they observe, so the last observation stands for the final one."""
    rng = np.random.default_rng(seed)
    expected = [random_episode(rng, steps, masks=rng.random((steps, 5)) < 0.3) for steps in lengths]
    for episode in expected[:-1]:
        episode.observations[-1] = episode.observations[-2]
    expected[-1].done = False
    found = read(writer.demo(writer.behavior("B", 2, (3, 2)), writer.reset_pairs(expected)))
    assert actions_of(found) == "own"
    assert_columns(found, expected)


def test_a_file_of_a_recorder_that_was_not_closed_is_read_to_its_end() -> None:
    expected = [
        random_episode(np.random.default_rng(3), 4, agent=1),
        random_episode(np.random.default_rng(4), 2, agent=2),
    ]
    assert_columns(read(demo_of(expected, closed=False)), expected)


# ---------------------------------------------------------------- generations


NOTHING, ZERO = writer.action(), writer.action([0.0])


def actions_file(*episodes: list[bytes]) -> bytes:
    """Returns a file with the given actions, in which all episodes but the last are done."""
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
        ([[A, B], [ZERO, C]], "previous", "1 of 2 "),  # the recording began amid an episode
        ([[ZERO, B], [B, C], [ZERO]], "previous", "2 of 3 "),  # the rest of the episode before
    ],
)
def test_the_generation_is_detected_from_the_pair_that_has_no_action(
    episodes: list[list[bytes]], actions: str, evidence: str
) -> None:
    found = read(actions_file(*episodes)).pairing
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
    error = refusal(actions_file(*episodes), reason)
    assert "no action in its last pair" in error.expected
    assert "demo_actions beside demo_path to own or previous" in error.remedy


def test_the_setting_overrides_any_evidence() -> None:
    neither, zero = actions_file([A, B, C]), actions_file([ZERO, B, C])
    for data, first in ((neither, 0.25), (zero, 0.0)):
        assert read(data, actions="own").columns["continuous"].tolist() == [[first], [0.5]]
        assert read(data, actions="previous").columns["continuous"].tolist() == [[0.5], [0.75]]
        assert read(data, actions="own").pairing == Pairing(actions="own", evidence="set by demo_actions")


def test_an_action_that_belongs_to_no_step_is_ignored() -> None:
    """The action in the first pair of an episode has no meaning."""
    pairs = [writer.pair(OBSERVED, writer.action([math.nan] * 4)), writer.pair(OBSERVED, CHOSEN, done=True)]
    data = writer.demo(writer.behavior(continuous=1), pairs)
    assert read(data, actions="previous").columns["continuous"].tolist() == [[0.5]]


def test_a_file_that_names_no_behavior_is_named_by_its_file_name() -> None:
    found = read(one_step(OBSERVED, writer.behavior("", 1)))
    assert found.behavior == "walker"
    assert found.columns["teams"].tolist() == [0]


def test_continuous_actions_beyond_the_range_are_clipped() -> None:
    found = read(one_step(OBSERVED, writer.behavior(continuous=3), writer.action([1.5, -1.0001, 0.25])))
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
    data = one_step(OBSERVED, writer.old_behavior("Old", sizes, continuous=continuous), writer.action(old=values))
    found = read(data)
    wanted = ActionSpec(continuous=2) if continuous else ActionSpec(discrete=(3, 2))
    assert (found.behavior, found.spec.actions) == ("Old", wanted)
    assert (found.columns["continuous"].tolist(), found.columns["discrete"].tolist()) == expected
