"""JSON of a Godot game is read to columns, and actions are written, for any space."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.pipeline.bridges.godot.spaces import (
    UnreadableMessage,
    column,
    flags,
    numbers,
    one_hot,
    pixels,
    read_policies,
)
from sparring.pipeline.messages.simulator import BehaviorActions

FLOATS = st.floats(-1e30, 1e30, allow_subnormal=False) | st.integers(-(2**40), 2**40)
SIZES = st.integers(1, 5)
SPACE = {"obs": {"size": [2], "space": "box"}}
MOVE = {"move": {"size": 1, "action_type": "continuous"}}


@given(st.data(), SIZES, SIZES)
def test_numbers_are_read_as_rows_in_order(data: st.DataObject, agents: int, size: int) -> None:
    """Only precision beyond float32 is lost; lists may be nested as the size is."""
    values = data.draw(st.lists(st.lists(FLOATS, min_size=size, max_size=size), min_size=agents, max_size=agents))
    rows = numbers(values, size)
    assert (rows.shape, rows.dtype) == ((agents, size), np.float32)
    assert rows.tolist() == [[float(np.float32(one)) for one in row] for row in values]
    assert np.array_equal(rows, numbers([[row] for row in values], size))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5))
def test_a_choice_is_one_hot(chosen: list[int]) -> None:
    """It may be a float, as computed numbers are."""
    rows = one_hot([float(one) for one in chosen], 7)
    assert rows.argmax(1).tolist() == chosen
    assert (rows.sum(1) == 1).all()


@given(st.data(), SIZES, SIZES, SIZES, st.integers(1, 3))
def test_images_keep_every_byte(data: st.DataObject, height: int, width: int, channels: int, agents: int) -> None:
    """Value [agent, channel, row, place] is byte (row x width + place) x channels + channel of the agent's text."""
    size = height * width * channels
    texts = data.draw(st.lists(st.binary(min_size=size, max_size=size), min_size=agents, max_size=agents))
    space = pixels([text.hex() for text in texts], height, width, channels)
    assert space.shape == (agents, channels, height, width)
    for at in np.ndindex(*space.shape):
        agent, channel, row, place = at
        assert space[at] == texts[agent][(row * width + place) * channels + channel]


@pytest.mark.parametrize(
    ("read", "values", "expected"),
    [
        (lambda values: one_hot(values, 3), [0, 3], "agent 8's x: 3 where a whole number from 0 to 2 was expected"),
        (lambda values: one_hot(values, 3), [0, 0.5], "agent 8's x: 0.5 where"),
        (lambda values: one_hot(values, 3), [0, -1], "agent 8's x: -1 where"),
        (lambda values: one_hot(values, 3), [0, 10**30], "agent 8's x: .* where numbers were expected"),
        (lambda values: pixels(values, 1, 1, 3), ["0000ff", "0000f"], "agent 8's x: '0000f' where 6 hexadecimal"),
        (lambda values: pixels(values, 1, 1, 3), ["0000ff", "0000fg"], "agent 8's x: non-hexadecimal"),
        (lambda values: pixels(values, 1, 1, 3), ["0000ff", "00  ff"], "agent 8's x: "),
        (lambda values: pixels(values, 1, 1, 3), ["0000ff", [0, 0, 255]], r"agent 8's x: \[0, 0, 255\] where"),
        (lambda values: numbers(values, 2), [[1, 2], [1]], "agent 8's x: 1 numbers where 2 were expected"),
        (lambda values: numbers(values, 1), [True, "1"], "agent 8's x: '1' where numbers"),
        (flags, [True, 2], "agent 8's x: 2 where true or false"),
        (flags, [0, 1.0], "agent 8's x: 1.0 where true or false"),
    ],
)
def test_an_invalid_value_is_reported_with_its_agent(read: Any, values: list[Any], expected: str) -> None:
    with pytest.raises(UnreadableMessage, match=expected):
        column([7, 8], values, read, "x")


def test_values_of_different_sizes_are_refused() -> None:
    """Each is valid alone, but they cannot form a column."""
    with pytest.raises(UnreadableMessage, match="another form for some agents"):
        column([0, 1], [[1, 2], [[1], [2]]], lambda values: numbers(values, 2), "x")


HEADS = st.lists(st.tuples(st.sampled_from(["continuous", "discrete"]), SIZES), min_size=1, max_size=6)


@given(HEADS, st.integers(1, 4), st.randoms(use_true_random=False))
def test_each_head_gets_its_own_actions(heads: list[tuple[str, int]], agents: int, random: Any) -> None:
    """In the order of the game, continuous heads form the continuous actions and discrete heads the branches."""
    space = {f"head{at}": {"size": size, "action_type": kind} for at, (kind, size) in enumerate(heads)}
    (policy,) = read_policies({"n_agents": agents, "observation_space": SPACE, "action_space": space}, None)
    actions = policy.spec.actions
    assert actions.continuous == sum(size for kind, size in heads if kind == "continuous")
    assert actions.discrete == tuple(size for kind, size in heads if kind == "discrete")
    act = BehaviorActions(
        behavior=policy.behavior,
        agents=policy.agents,
        continuous=np.array([[random.random() for _ in range(actions.continuous)] for _ in range(agents)], np.float32),
        discrete=np.array([[random.randrange(size) for size in actions.discrete] for _ in range(agents)], np.int32),
    )
    commands = json.loads(json.dumps(policy.commands(act)))
    for row, command in enumerate(commands):
        assert list(command) == list(space)
        moves = [move for key, head in space.items() if head["action_type"] == "continuous" for move in command[key]]
        assert moves == act.continuous[row].tolist()
        chosen = [command[key] for key, head in space.items() if head["action_type"] == "discrete"]
        assert chosen == act.discrete[row].tolist()


@pytest.mark.parametrize(
    ("size", "shape"),
    [
        ([3, 36, 48], (3, 36, 48)),
        ([36, 36, 3], (3, 36, 36)),
        ([48, 36, 4], (4, 36, 48)),
        ([16, 10, 10], (16, 10, 10)),
        ([10, 10, 16], (16, 10, 10)),
        ([1.0, 8.0, 8.0], (1, 8, 8)),
    ],
)
def test_the_size_of_an_image_is_read_in_either_order(size: list[float], shape: tuple[int, ...]) -> None:
    """It is [channels, height, width], or [width, height, channels] in older versions."""
    space = {"camera_2d": {"size": size, "space": "box"}}
    (policy,) = read_policies({"n_agents": 1, "observation_space": space, "action_space": MOVE}, None)
    (spec,) = policy.spec.observations
    assert (spec.shape, spec.kind, spec.dtype) == (shape, "image", "uint8")


def test_a_name_with_2d_is_a_vector_unless_its_size_is_that_of_an_image() -> None:
    """Only three numbers are the size of an image; others are the sizes of vectors."""
    space = {"goal_2d": {"size": [2], "space": "box"}, "grid": {"size": [2, 3, 4], "space": "box"}}
    (policy,) = read_policies({"n_agents": 1, "observation_space": space, "action_space": MOVE}, None)
    assert [(one.shape, one.kind) for one in policy.spec.observations] == [((2,), "vector"), ((24,), "vector")]


def test_policy_names_may_contain_a_team() -> None:
    """`Name?team=N` is a behavior id here as well, so teams of one name play against each other."""
    info = {"n_agents": 3, "observation_space": SPACE, "action_space": MOVE}
    info["agent_policy_names"] = ["Keeper", "Striker?team=1", "Striker?team=0"]
    behaviors = [(policy.behavior, policy.agents.tolist()) for policy in read_policies(info, None)]
    assert behaviors == [("Keeper?team=0", [0]), ("Striker?team=1", [1]), ("Striker?team=0", [2])]
