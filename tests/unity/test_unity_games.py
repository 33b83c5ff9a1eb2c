"""Messages of real games, with what is unusual in each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tests.unity.player_writer as writer
from sparring.pipeline.bridges.unity.conversation import PlayerConversation
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from tests.unity.player_writer import CHW, HWC
from tests.unity.protobuf_writer import NONE, VARIABLE

Begin = Callable[[], PlayerConversation]


def choose(report: BehaviorReport, spec: BehaviorSpec, rng: np.random.Generator) -> BehaviorActions:
    """Returns actions for the decisions of a report."""
    assert report.decisions is not None
    n = len(report.decisions.agents)
    return BehaviorActions(
        behavior=report.behavior,
        agents=report.decisions.agents,
        continuous=rng.uniform(-1, 1, (n, spec.actions.continuous)).astype(np.float32),
        discrete=rng.integers(0, spec.actions.discrete, (n, len(spec.actions.discrete))).astype(np.int32),
    )


# ---------------------------------------------------------------- SoccerTwos

TEAMS = ("SoccerTwos?team=0", "SoccerTwos?team=1")


def soccer(rng: np.random.Generator, team: int, *, done: bool, goal: float) -> tuple[list[Any], list[bytes]]:
    """Returns the observations of two players of one team, and their messages."""
    seen = [[rng.random(264, np.float32), rng.random(72, np.float32)] for _ in range(2)]
    sent = [
        writer.agent(
            [writer.vector(rays[0], name="PurpleRaysFront"), writer.vector(rays[1], name="PurpleRaysBack")],
            number=10 * team + at,
            reward=-0.001,
            done=done,
            group=team + 1,
            group_reward=goal,
        )
        for at, rays in enumerate(seen)
    ]
    return seen, sent


def test_a_goal_in_soccer_ends_all_episodes_and_begins_the_next_in_one_message(begun: Begin) -> None:
    """Two teams share a name; there are groups and group rewards, and ids survive the episode."""
    rng = np.random.default_rng(1)
    conversation = begun()
    first = {name: soccer(rng, team, done=False, goal=0.0) for team, name in enumerate(TEAMS)}
    brains = [writer.brain(name, branches=(3, 3, 3)) for name in TEAMS]
    received = conversation.receive(writer.output({name: sent for name, (_, sent) in first.items()}, brains))
    spec = BehaviorSpec(
        observations=(
            ObservationSpec(name="PurpleRaysFront", shape=(264,)),
            ObservationSpec(name="PurpleRaysBack", shape=(72,)),
        ),
        actions=ActionSpec(discrete=(3, 3, 3)),
    )
    assert received.behaviors == dict.fromkeys(TEAMS, spec)
    all_actions = [choose(report, spec, rng) for report in received.reports]
    answer = writer.answer(conversation.step(all_actions))
    for one in all_actions:
        assert [act.discrete for act in answer.actions[one.behavior]] == one.discrete.tolist()
    over = {name: soccer(rng, team, done=True, goal=1.0 - 2 * team) for team, name in enumerate(TEAMS)}
    restarted = {name: soccer(rng, team, done=False, goal=0.0) for team, name in enumerate(TEAMS)}
    mixed = {name: [*over[name][1], *restarted[name][1]] for name in TEAMS}
    received = conversation.receive(writer.output(mixed))
    assert received.behaviors == {}
    for team, (name, report) in enumerate(zip(TEAMS, received.reports, strict=True)):
        ids = [10 * team, 10 * team + 1]
        assert report.behavior == name
        assert report.ends is not None
        assert report.ends.agents.tolist() == ids
        assert report.ends.interrupted.tolist() == [False, False]
        assert report.ends.group_rewards is not None
        assert report.ends.group_rewards.tolist() == [1.0 - 2 * team] * 2
        assert report.ends.rewards.tolist() == np.full(2, -0.001, np.float32).tolist()
        assert report.decisions is not None
        assert report.decisions.agents.tolist() == ids
        assert report.decisions.group_rewards is None
        assert report.decisions.groups is not None
        assert report.decisions.groups.tolist() == [team + 1] * 2
        for at in range(2):
            np.testing.assert_array_equal(report.ends.observations[at], [rays[at] for rays in over[name][0]])
            np.testing.assert_array_equal(report.decisions.observations[at], [rays[at] for rays in restarted[name][0]])


# ---------------------------------------------------------------- Match3


@pytest.mark.parametrize("visual", [True, False])
def test_match3_boards_and_masks_are_read(begun: Begin, visual: bool) -> None:
    """Each agent has its own mask of 127 choices, a board as two PNG files or floats, and an interrupted episode."""
    rng = np.random.default_rng(2)
    conversation = begun()
    name = "Match3?team=0"
    for step in range(4):
        cells = rng.integers(0, 2, (3, 6, 9, 8), np.uint8) * np.uint8(255)
        special = rng.integers(0, 2, (3, 2, 9, 8), np.uint8) * np.uint8(255)
        masks = rng.random((3, 127)) < 0.9
        masks[:, 5] = False
        agents = [
            writer.agent(
                _boards(cells[at], special[at], visual),
                number=at,
                reward=0.25 * at,
                mask=masks[at].tolist(),
                done=step == 3 and at == 2,
                interrupted=step == 3 and at == 2,
            )
            for at in range(3)
        ]
        received = conversation.receive(
            writer.output({name: agents}, [writer.brain(name, branches=[127])] * (step == 0))
        )
        if step == 0:
            spec = received.behaviors[name]
            shapes = [(one.shape, one.dtype, one.kind) for one in spec.observations]
            dtype = "uint8" if visual else "float32"
            assert shapes == [((6, 9, 8), dtype, "image"), ((2, 9, 8), dtype, "image")]
        (report,) = received.reports
        assert report.decisions is not None
        remaining = slice(0, 2 if step == 3 else 3)
        assert report.decisions.masks is not None
        np.testing.assert_array_equal(report.decisions.masks, masks[remaining])
        scale = 1 if visual else 255
        np.testing.assert_array_equal(report.decisions.observations[0] * scale, cells[remaining])
        np.testing.assert_array_equal(report.decisions.observations[1] * scale, special[remaining])
        answer = writer.answer(conversation.step([choose(report, spec, rng)]))
        assert [len(one.discrete) for one in answer.actions[name]] == [1] * len(report.decisions.agents)
    assert report.ends is not None
    assert (report.ends.agents.tolist(), report.ends.interrupted.tolist()) == ([2], [True])


def _boards(cells: Any, special: Any, visual: bool) -> list[bytes]:
    boards = (("cells", cells), ("special", special))
    if visual:
        return [writer.packed(writer.as_pngs(board), board.shape, name=name) for name, board in boards]
    return [writer.floats((board / 255).astype(np.float32), CHW, name=name) for name, board in boards]


def test_a_grayscale_camera_is_the_mean_of_its_three_equal_channels(begun: Begin) -> None:
    """The channel mapping shows a stack of two."""
    image = np.random.default_rng(3).integers(0, 256, (2, 5, 4), np.uint8)
    both = writer.as_pngs(np.repeat(image, 3, axis=0))
    seen = [
        writer.packed(writer.as_pngs(np.repeat(image[:1], 3, axis=0)), [1, 5, 4], name="camera"),
        writer.packed(both, [2, 5, 4], name="stack", mapping=[0, 0, 0, 1, 1, 1]),
        writer.packed(both, [5, 4, 2], HWC, name="old stack", mapping=[0, 0, 0, 1, 1, 1]),
    ]
    received = begun().receive(writer.output({"B": [writer.agent(seen)]}, [writer.brain("B", 1)]))
    decisions = received.reports[0].decisions
    assert decisions is not None
    for column, wanted in zip(decisions.observations, (image[:1], image, image), strict=True):
        np.testing.assert_allclose(column[0], wanted / np.float32(255), rtol=1e-6)


# ---------------------------------------------------------------- Basic


def test_basic_has_a_new_agent_for_every_episode(begun: Begin) -> None:
    """The game reloads, so the end has the old id and the next decision a new one, in one message or two."""
    conversation = begun()
    name, seen = "Basic?team=0", [writer.vector([0.0] * 20, name="cell")]
    brains = [writer.brain(name, branches=[3])]
    ended, new = [], []
    for episode in range(6):
        begin = writer.agent(seen, number=-100 - episode, reward=0.01)
        if episode and episode % 2:  # the end has its own message
            received = conversation.receive(writer.output({name: [_end(seen, episode - 1)]}))
            assert [report.decisions for report in received.reports] == [None]
            ended += received.reports[0].ends.agents.tolist()  # type: ignore[union-attr]
            assert writer.answer(conversation.step([])).actions == {}
        last = [_end(seen, episode - 1)] if episode and episode % 2 == 0 else []
        received = conversation.receive(writer.output({name: [*last, begin]}, brains))
        (report,) = received.reports
        assert report.decisions is not None
        new += report.decisions.agents.tolist()
        ended += report.ends.agents.tolist() if report.ends else []
        conversation.step([choose(report, SPEC_OF_BASIC, np.random.default_rng(0))])
        brains = []
    assert new == [-100 - episode for episode in range(6)]
    assert ended == new[:-1]


SPEC_OF_BASIC = BehaviorSpec(
    observations=(ObservationSpec(name="cell", shape=(20,)),), actions=ActionSpec(discrete=(3,))
)


def _end(seen: list[bytes], episode: int) -> bytes:
    return writer.agent(seen, number=-100 - episode, reward=1.0, done=True)


# ---------------------------------------------------------------- other games


def test_lists_of_entities_and_goals_keep_their_kinds(begun: Begin) -> None:
    """Sorter has a buffer sensor padded with zeros, and GridWorld a goal signal."""
    entities = np.zeros((2, 20, 23), np.float32)
    entities[:, :7] = np.random.default_rng(4).random((2, 7, 23))
    agents = [
        writer.agent(
            [
                writer.floats(one, [VARIABLE, NONE], name="buffer"),
                writer.vector([0.0, 1.0], name="goal", goal=True),
                writer.vector([0.5], name="vector"),
            ],
            number=at,
        )
        for at, one in enumerate(entities)
    ]
    received = begun().receive(
        writer.output({"Sorter?team=0": agents}, [writer.brain("Sorter?team=0", branches=(3, 3))])
    )
    assert [(one.kind, one.shape) for one in received.behaviors["Sorter?team=0"].observations] == [
        ("entities", (20, 23)),
        ("goal", (2,)),
        ("vector", (1,)),
    ]
    assert received.reports[0].decisions is not None
    np.testing.assert_array_equal(received.reports[0].decisions.observations[0], entities)


def test_goals_that_are_not_vectors_are_reported(begun: Begin) -> None:
    """They are reported by name and kind with the first agents, and keep their other kind."""
    picture, entities = np.zeros((3, 4, 5), np.float32), np.zeros((6, 2), np.float32)
    agent = writer.agent(
        [
            writer.vector([0.0, 1.0], name="number", goal=True),
            writer.floats(picture, CHW, name="picture", goal=True),
            writer.floats(entities, [VARIABLE, NONE], name="list", goal=True),
            writer.floats(picture, CHW, name="camera"),
        ]
    )
    conversation = begun()
    received = conversation.receive(writer.output({"B": [agent]}, [writer.brain("B", 1)]))
    assert received.plain_goals == {"B": (("picture", "image"), ("list", "entities"))}
    kinds = [one.kind for one in received.behaviors["B"].observations]
    assert kinds == ["goal", "image", "entities", "image"]
    conversation.step([choose(received.reports[0], received.behaviors["B"], np.random.default_rng(0))])
    assert conversation.receive(writer.output({"B": [agent]})).plain_goals == {}


def test_behaviors_may_appear_late_and_their_agents_later(begun: Begin) -> None:
    """Parameters may precede agents; until then there is nothing to answer."""
    conversation = begun()
    seen = [writer.vector([1.0])]
    names = ("A?team=0", "B?team=3")
    received = conversation.receive(writer.output({}, [writer.brain(names[0], 1)]))
    assert (received.behaviors, received.reports) == ({}, ())
    assert writer.answer(conversation.step([])).actions == {}
    agents: dict[str, list[bytes]] = {names[0]: [writer.agent(seen)], names[1]: []}
    received = conversation.receive(writer.output(agents, [writer.brain(names[1], branches=[2])]))
    assert list(received.behaviors) == [names[0]]
    spec = received.behaviors[names[0]]
    conversation.step([choose(received.reports[0], spec, np.random.default_rng(0))])
    received = conversation.receive(writer.output({names[1]: [writer.agent(seen, number=1)], names[0]: []}))
    assert list(received.behaviors) == [names[1]]
    assert [report.behavior for report in received.reports] == [names[1]]
    answer = writer.answer(
        conversation.step([choose(received.reports[0], received.behaviors[names[1]], np.random.default_rng(0))])
    )
    assert list(answer.actions) == [names[1]]


@pytest.mark.parametrize("continuous", [True, False])
def test_a_player_of_version_1_0_gets_its_actions_as_floats(continuous: bool) -> None:
    """It has no action spec, capabilities or axes, so fields are deprecated ones and channels come last."""
    conversation = PlayerConversation()
    conversation.receive(writer.introduction("1.0.0", "1.0.0-preview", ()))
    conversation.initialize(seed=0)
    conversation.receive(writer.READY)
    conversation.reset()
    image = np.random.default_rng(5).random((4, 5, 3)).astype(np.float32)
    name = "Old?team=0"
    brain = writer.old_brain(name, [2] if continuous else [3, 2], continuous=continuous)
    agents = [writer.agent([writer.floats(image), writer.floats(np.ones(1, np.float32))], number=at) for at in range(2)]
    received = conversation.receive(writer.output({name: agents}, [brain]))
    spec = received.behaviors[name]
    assert spec.actions == (ActionSpec(continuous=2) if continuous else ActionSpec(discrete=(3, 2)))
    assert [one.shape for one in spec.observations] == [(3, 4, 5), (1,)]
    assert received.reports[0].decisions is not None
    np.testing.assert_array_equal(received.reports[0].decisions.observations[0], [image.transpose(2, 0, 1)] * 2)
    one = choose(received.reports[0], spec, np.random.default_rng(6))
    answer = writer.answer(conversation.step([one]))
    wanted = one.continuous.tolist() if continuous else one.discrete.astype(float).tolist()
    assert answer.actions == {name: [writer.Act(old=row) for row in wanted]}


def test_hybrid_actions_of_many_agents_have_the_order_of_the_message(begun: Begin) -> None:
    """Agents that are done are between those that decide, and get no action."""
    conversation = begun()
    name, seen = "Hybrid?team=0", [writer.vector([1.0])]
    order = [5, 1, 9, 3, 7]
    all_agents = [writer.agent(seen, number=number) for number in order]
    received = conversation.receive(writer.output({name: all_agents}, [writer.brain(name, 1, [4])]))
    spec, rng = received.behaviors[name], np.random.default_rng(7)
    conversation.step([choose(received.reports[0], spec, rng)])
    some = [writer.agent(seen, number=number, done=number in (1, 3)) for number in order]
    received = conversation.receive(writer.output({name: some}))
    one = choose(received.reports[0], spec, rng)
    assert one.agents.tolist() == [5, 9, 7]
    answer = writer.answer(conversation.step([one]))
    assert [act.continuous for act in answer.actions[name]] == one.continuous.tolist()
    assert [act.discrete for act in answer.actions[name]] == one.discrete.tolist()
