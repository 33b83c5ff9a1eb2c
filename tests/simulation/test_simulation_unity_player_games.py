"""A minimal trainer checks the games of the player stand-in."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.simulation.unity_player_peer import Trainer, against
from tests.simulation.unity_player_teams import zoo_image


def floats(observation: Any) -> np.ndarray[Any, Any]:
    return np.array(observation.float_data.data, np.float32).reshape(observation.shape)


def pictures(data: bytes) -> list[np.ndarray[Any, Any]]:
    """Returns the pixels [height, width, 3] of each PNG file."""
    files = [b"\x89PNG" + part for part in data.split(b"\x89PNG")[1:]]
    return [np.asarray(Image.open(BytesIO(file))) for file in files]


@pytest.mark.parametrize("restart", ["same", "next"])
def test_goal_ends_and_restarts(restart: str, tmp_path: Path) -> None:
    """The goal earns 1.06 with a done entry; in the same or the next message the same id decides."""

    def act(number: int, infos: Any, rl_input: Any) -> None:
        for agent in infos["Goal?team=0"].value:
            if not agent.done:
                to = agent.observations[0].float_data.data[0]
                trainer.fill("Goal?team=0", rl_input.agent_actions["Goal?team=0"].value.add(), to, int(to > 0))

    trainer = Trainer(steps=8, act=act)
    assert against(trainer, tmp_path, "--discrete", "--areas", "2", "--restart", restart).code == 0
    flags = [[agent.done for agent in infos["Goal?team=0"].value] for infos in trainer.outputs]
    decide = [False, False]
    ending = [[True, True, *decide]] if restart == "same" else [[True, True], decide]
    assert flags == [*[decide] * 5, *ending, *[decide] * (4 - len(ending))]
    ended = trainer.outputs[5]["Goal?team=0"].value
    assert [agent.id for agent in ended[:2]] == [0, 1]
    assert [agent.reward for agent in ended[:2]] == pytest.approx([1.06] * 2)
    assert trainer.outputs[4]["Goal?team=0"].value[0].reward == pytest.approx(-0.01)
    assert not ended[0].max_step_reached


def test_balance_is_our_own_game_under_the_given_name(tmp_path: Path) -> None:
    """It has 8 floats and 2 continuous actions, and earns 0.1 a step and -1 for a fall."""

    def tilt(number: int, infos: Any, rl_input: Any) -> None:
        for agent in infos["3DBall?team=0"].value:
            if not agent.done:
                trainer.fill("3DBall?team=0", rl_input.agent_actions["3DBall?team=0"].value.add(), 1.0, 0)

    trainer = Trainer(steps=60, act=tilt)
    assert against(trainer, tmp_path, "--game", "balance", "--areas", "12", "--behavior", "3DBall").code == 0
    agents = [agent for infos in trainer.outputs for agent in infos["3DBall?team=0"].value]
    assert {tuple(agent.observations[0].shape) for agent in agents} == {(8,)}
    assert {round(agent.reward, 3) for agent in agents if agent.done} == {-1.0}
    assert {round(agent.reward, 3) for agent in agents if not agent.done} == {0.0, 0.1}


def kick(trainer: Trainer) -> Any:
    """Returns a function with which team 0 moves forward and team 1 stands."""

    def act(number: int, infos: Any, rl_input: Any) -> None:
        for key, agents in infos.items():
            for agent in agents.value:
                if not agent.done:
                    trainer.fill(key, rl_input.agent_actions[key].value.add(), 0.0, int(key.endswith("0")))

    return act


@pytest.mark.parametrize("restart", ["same", "next"])
def test_a_goal_ends_all_agents_of_the_pitch_in_one_message(restart: str, tmp_path: Path) -> None:
    """Two teams of two have their own groups; that of the scorers is rewarded, the other punished."""
    trainer = Trainer(steps=30)
    trainer.act = kick(trainer)
    assert against(trainer, tmp_path, "--game", "soccer", "--restart", restart).code == 0
    ended = [infos for infos in trainer.outputs if any(agent.done for agent in infos["SoccerTwos?team=0"].value)]
    ours, theirs = (ended[0][f"SoccerTwos?team={team}"].value for team in (0, 1))
    assert [agent.done for agent in [*ours, *theirs]] == (
        [True, True, False, False] if restart == "same" else [True] * 2
    ) * 2
    assert {agent.group_id for agent in ours} == {1}
    assert {agent.group_id for agent in theirs} == {2}
    assert [agent.id for agent in [*ours[:2], *theirs[:2]]] == [0, 1, 2, 3]
    assert 0 < ours[0].group_reward < 1
    assert (theirs[0].group_reward, ours[0].reward, ours[0].max_step_reached) == (-1, 0, False)
    assert [tuple(observation.shape) for observation in ours[0].observations] == [(264,), (72,)]
    assert list(trainer.specs["SoccerTwos?team=1"].action_spec.discrete_branch_sizes) == [3, 3, 3]


def test_a_pitch_at_the_time_limit_is_interrupted(tmp_path: Path) -> None:
    """All four agents end without a group reward."""
    trainer = Trainer(steps=4)
    against(trainer, tmp_path, "--game", "soccer", "--max-steps", "3")
    agents = [agent for team in (0, 1) for agent in trainer.outputs[3][f"SoccerTwos?team={team}"].value if agent.done]
    assert [(agent.max_step_reached, agent.group_reward) for agent in agents] == [(True, 0)] * 4


@pytest.mark.parametrize("images", ["png", "float"])
def test_match3_shows_its_board_and_forbids_moves(images: str, tmp_path: Path) -> None:
    """Cells are one-hot, in two concatenated files or in floats; forbidden moves are logged."""
    trainer = Trainer(steps=20)
    played = against(trainer, tmp_path, "--game", "match3", "--images", images, "--max-steps", "10")
    agent = trainer.outputs[0]["Match3?team=0"].value[0]
    cells, special = agent.observations
    assert (list(cells.shape), list(special.shape)) == ([6, 9, 8], [3, 9, 8])
    assert list(cells.dimension_properties) == [1, 2, 2]
    if images == "png":
        board = np.concatenate(pictures(cells.compressed_data), 2).transpose(2, 0, 1) // 255
        assert (cells.compression_type, len(pictures(special.compressed_data))) == (1, 1)
    else:
        board = floats(cells)
    assert board.shape == (6, 9, 8)
    assert (board.sum(0) == 1).all()
    masks = np.array([infos["Match3?team=0"].value[-1].action_mask for infos in trainer.outputs[:-1]])
    assert masks.shape == (20, 127)
    assert len(played.received("forbidden action")) == masks[:, 0].sum() > 0
    assert [trainer.outputs[10]["Match3?team=0"].value[0].max_step_reached] == [True]


def test_basic_gives_each_episode_a_new_id(tmp_path: Path) -> None:
    """Ids increase over episodes; the large goal earns 1 after seven steps to the right."""

    def right(number: int, infos: Any, rl_input: Any) -> None:
        trainer.fill("Basic?team=0", rl_input.agent_actions["Basic?team=0"].value.add(), 0.0, 2)

    trainer = Trainer(steps=14, act=right)
    assert against(trainer, tmp_path, "--game", "basic").code == 0
    ids = [[agent.id for agent in infos["Basic?team=0"].value] for infos in trainer.outputs]
    assert ids == [*[[0]] * 7, [0, 1], *[[1]] * 6, [1, 2]]
    assert trainer.outputs[7]["Basic?team=0"].value[0].reward == pytest.approx(0.99)


@pytest.mark.parametrize(("protocol", "layout"), [("1.5.0", "chw"), ("1.5.0", "hwc"), ("1.2.0", "chw")])
def test_the_zoo_sends_six_channels_in_swapped_files(protocol: str, layout: str, tmp_path: Path) -> None:
    """The mapping has the image channel of each file channel; the shape follows the layout."""
    trainer = Trainer(steps=1)
    against(trainer, tmp_path, "--game", "zoo", "--protocol", protocol, "--layout", layout)
    for number, agent in enumerate(trainer.outputs[0]["Zoo?team=0"].value):
        image = agent.observations[2]
        channels = np.concatenate(pictures(image.compressed_data), 2)
        back = channels[:, :, np.argsort(image.compressed_channel_mapping)].transpose(2, 0, 1)
        assert (back == zoo_image(np.array([number]), 0)[0]).all()
        hwc = layout == "hwc" or protocol != "1.5.0"
        assert list(image.shape) == ([6, 8, 6] if hwc else [6, 6, 8])
        properties = {("1.5.0", "chw"): [1, 2, 2], ("1.5.0", "hwc"): [2, 2, 1]}.get((protocol, layout), [])
        assert list(image.dimension_properties) == properties


def test_floats_of_an_image_follow_the_layout(tmp_path: Path) -> None:
    """Values are [height, width, channels] if the shape is."""
    trainer = Trainer(steps=1)
    against(trainer, tmp_path, "--game", "zoo", "--images", "float", "--layout", "hwc")
    image = floats(trainer.outputs[0]["Zoo?team=0"].value[1].observations[2])
    assert image == pytest.approx(zoo_image(np.array([1]), 0)[0].transpose(1, 2, 0) / 255)


def distinct_actions(trainer: Trainer) -> Any:
    """Returns a function that gives each agent its own actions: id / 10 and a choice that depends on the id."""

    def act(number: int, infos: Any, rl_input: Any) -> None:
        for key, agents in infos.items():
            for agent in agents.value:
                if not agent.done:
                    action = rl_input.agent_actions[key].value.add()
                    trainer.fill(key, action, agent.id / 10, 0)
                    if key == "Zoo?team=0":
                        action.discrete_actions[1] = agent.id % 3

    return act


def test_actions_reach_the_agents_they_are_for(tmp_path: Path) -> None:
    """Each agent observes its last actions and earns the first; members that end do not shift those of others."""
    trainer = Trainer(steps=13)
    trainer.act = distinct_actions(trainer)
    assert against(trainer, tmp_path, "--game", "zoo", "--areas", "2").code == 0
    deciding = []
    for number, infos in enumerate(trainer.outputs[:13]):
        for agent in infos["Zoo?team=0"].value:
            identity, age, first, second, code = agent.observations[0].float_data.data
            assert identity == agent.id
            assert age == (0 if number == 12 and not agent.done else number)
            acted = agent.id / 10 if age else 0.0
            assert (agent.reward, first, second) == pytest.approx((acted,) * 3)
            assert code == (agent.id % 3 if age else 0)
        deciding.append(sum(not agent.done for agent in infos["Zoo?team=0"].value))
    assert deciding == [6] * 4 + [4] * 4 + [2] * 4 + [6]


def test_the_zoo_has_groups_masks_entities_and_a_goal(tmp_path: Path) -> None:
    """Present agents get group rewards, masks exist only if an action is forbidden, and lists vary in size."""
    trainer = Trainer(steps=13)
    against(trainer, tmp_path, "--game", "zoo", "--areas", "2")
    zoo = [infos["Zoo?team=0"].value for infos in trainer.outputs]
    assert [agent.group_id for agent in zoo[0]] == [1, 1, 1, 2, 2, 2]
    assert [(agent.id, agent.done, agent.group_reward) for agent in zoo[4]][:3] == [
        (0, True, 0.5),
        (3, True, 0.5),
        (1, False, 0.5),
    ]
    assert [(agent.id, agent.group_reward, agent.max_step_reached) for agent in zoo[12] if agent.done] == [
        (2, 1, True),
        (5, 1, True),
    ]
    masks = [list(agent.action_mask) for agent in zoo[0]]
    assert masks[:3] == [[False, False, True, False, False], [], [False, False, False, False, True]]
    assert not any(agent.action_mask for agent in zoo[1])
    vector, entities, _, goal = zoo[1][2].observations
    assert list(entities.dimension_properties) == [4, 1]
    assert floats(entities).tolist() == [[2, 1, 1], [2, 1, 2], [2, 1, 3], [2, 1, 4]]
    assert (vector.name, goal.observation_type, floats(goal).tolist()) == ("VectorSensor_size5", 1, [1, 0])


def test_a_behavior_appears_late(tmp_path: Path) -> None:
    """An empty list comes first, then its agents with its parameters, once."""
    trainer = Trainer(steps=8)
    against(trainer, tmp_path, "--game", "zoo", "--late-after", "3")
    assert [len(infos["Late?team=0"].value) if "Late?team=0" in infos else None for infos in trainer.outputs] == [
        *[None] * 3,
        0,
        *[1] * 5,
    ]
    rl_input = [m.unity_output.rl_initialization_output.brain_parameters for m in trainer.messages]
    assert [[brain.brain_name for brain in brains] for brains in rl_input] == [
        *[[]] * 2,
        ["Zoo?team=0"],
        *[[]] * 3,
        ["Late?team=0"],
        *[[]] * 4,
    ]


def test_a_trainer_without_hybrid_actions_gets_the_old_form(tmp_path: Path) -> None:
    """Only features that both sides know are sent."""
    trainer = Trainer(missing=("hybridActions", "multiAgentGroups", "concatenatedPngObservations"))
    assert against(trainer, tmp_path, "--game", "zoo").code == 0
    assert list(trainer.specs["Zoo?team=0"].vector_action_size_deprecated) == [2, 3]
    agent = trainer.outputs[0]["Zoo?team=0"].value[0]
    assert agent.group_id == 0
    assert floats(agent.observations[2]) == pytest.approx(zoo_image(np.array([0]), 0)[0] / 255)
