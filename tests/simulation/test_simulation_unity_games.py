"""Every game of the player stand-in reaches the trainer through the bridge, row by row."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest

from sparring.pipeline.bridges.player import PlayerFailed
from sparring.pipeline.bridges.unity.game import Unity
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport, Decisions, Ends
from sparring.pipeline.specs import ActionSpec
from tests.simulation.simulation_helpers import check_report
from tests.simulation.unity_bridge import LONG_S, Bridges, Frame, FrameChecker, play, random_allowed, step
from tests.simulation.unity_player_teams import zoo_image

ONE = {"Goal?team=0": ("float32 1", ActionSpec(continuous=1))}
RAYS = ("float32 264", "float32 72", ActionSpec(discrete=(3, 3, 3)))
BASIC = {"Basic?team=0": ("float32 20", ActionSpec(discrete=(3,)))}
ZOO = {
    "Zoo?team=0": ("float32 5", "float32 4x3", "uint8 6x6x8", "float32 2", ActionSpec(continuous=2, discrete=(2, 3))),
    "Late?team=0": ("float32 2", ActionSpec(discrete=(2,))),
}
FLOATS = ZOO | {"Zoo?team=0": (*ZOO["Zoo?team=0"][:2], "float32 6x6x8", *ZOO["Zoo?team=0"][3:])}
GAMES: Final[dict[str, Any]] = {
    "--areas 3": ONE,
    "--areas 8 --discrete --actions 2": {"Goal?team=0": ("float32 1", ActionSpec(discrete=(2, 2)))},
    "--areas 3 --restart next": ONE,
    "--areas 2 --protocol 1.0.0": ONE,
    "--areas 2 --protocol 1.0.0 --discrete": {"Goal?team=0": ("float32 1", ActionSpec(discrete=(2,)))},
    "--game balance --areas 12": {"Balance?team=0": ("float32 8", ActionSpec(continuous=2))},
    "--game soccer --areas 2 --max-steps 30": dict.fromkeys(("SoccerTwos?team=0", "SoccerTwos?team=1"), RAYS),
    "--game soccer --areas 2 --max-steps 30 --restart next": dict.fromkeys(
        ("SoccerTwos?team=0", "SoccerTwos?team=1"), RAYS
    ),
    "--game match3 --areas 2 --max-steps 20": {
        "Match3?team=0": ("uint8 6x9x8", "uint8 3x9x8", ActionSpec(discrete=(127,)))
    },
    "--game match3 --areas 2 --max-steps 20 --images float": {
        "Match3?team=0": ("float32 6x9x8", "float32 3x9x8", ActionSpec(discrete=(127,)))
    },
    "--game basic --areas 3 --max-steps 15": BASIC,
    "--game basic --areas 3 --max-steps 15 --restart next": BASIC,
    "--game zoo --areas 2": ZOO,
    "--game zoo --areas 2 --restart next --late-after 60": ZOO,
    "--game zoo --areas 2 --layout hwc": ZOO,
    "--game zoo --areas 2 --images float": FLOATS,
    "--game zoo --areas 2 --images float --layout hwc": FLOATS,
    "--game match3 --areas 2 --max-steps 20 --protocol 1.0.0": {  # at most three channels fit into a file
        "Match3?team=0": ("float32 6x9x8", "uint8 3x9x8", ActionSpec(discrete=(127,)))
    },
    "--game soccer --areas 2 --max-steps 30 --protocol 1.3.0": dict.fromkeys(
        ("SoccerTwos?team=0", "SoccerTwos?team=1"), RAYS
    ),
}


def kinds(unity: Unity) -> dict[str, tuple[Any, ...]]:
    """Returns a short form of the behaviors' observations and actions."""
    return {
        name: (*(f"{one.dtype} {'x'.join(map(str, one.shape))}" for one in spec.observations), spec.actions)
        for name, spec in unity.behaviors().items()
    }


@pytest.mark.parametrize("options", GAMES)
def test_every_game_follows_the_rules_of_our_own_protocol(options: str, bridges: Bridges) -> None:
    """Random play with a reset gives valid shapes, ids, ends, rewards and actions, and exit status 0."""
    unity, player = bridges.played(*options.split())
    checker = FrameChecker(unity)
    for seed in (1, 2):
        frames = play(unity, 60, random_allowed(seed))
        checker.read(frames)
        for frame in frames:
            for report in frame:
                check_report(report, dict(unity.behaviors()))
    unity.close()
    player.join(LONG_S)
    assert kinds(unity) == GAMES[options]
    assert (checker.watch.findings, checker.watch.ended > 2) == ({}, True)
    assert (player.played.code, player.played.received("forbidden action")) == (0, [])
    assert len(player.played.received("reset")) == 2
    assert "quit: status 400" in player.played.log


def test_a_list_of_entities_without_dimension_properties_is_refused(bridges: Bridges) -> None:
    """Messages before 1.5 have no dimension properties, so such players have no lists of entities."""
    unity, player = bridges.played("--game", "zoo", "--protocol", "1.4.0")
    with pytest.raises(PlayerFailed, match=r"observation 'obs_1' of shape \(4, 3\) .* of Zoo\?team=0"):
        unity.reset({}, 7)
    unity.close()
    player.join(LONG_S)
    assert player.played.code == 0


def ended(frames: list[Frame]) -> list[BehaviorReport]:
    return [report for frame in frames for report in frame if report.ends is not None]


def check_zoo_observations(rows: Decisions | Ends) -> int:
    """Checks all observations row by row and returns the agents' age."""
    numbers, entities, image, goal = rows.observations
    (age,) = {int(one) for one in numbers[:, 1]}
    assert numbers[:, 0].tolist() == rows.agents.tolist()
    scale = np.float32(1 if image.dtype == np.uint8 else 255)
    assert np.array_equal((image * scale).round(), zoo_image(rows.agents, age))
    there = np.arange(4) < (1 + (rows.agents + age) % 4)[:, None]
    assert np.array_equal(entities[:, :, 2], there * np.arange(1, 5))
    assert np.array_equal(goal, np.eye(2)[rows.agents % 2])
    return age


def check_zoo_decisions(rows: Decisions, age: int) -> None:
    """Checks groups and masks."""
    assert rows.groups is not None
    assert np.array_equal(rows.groups, rows.agents // 3 + 1)
    masked = [(int(agent), 2 + int(agent) % 3) for agent in rows.agents if agent % 2 == age % 2 == 0]
    assert (rows.masks is not None) == bool(masked)
    if rows.masks is not None:
        assert [(int(rows.agents[row]), int(choice)) for row, choice in np.argwhere(rows.masks)] == masked


def check_zoo_ends(rows: Ends, age: int, episodes: int, last: dict[int, float]) -> None:
    """Checks which agents end, how, and with which rewards."""
    assert (rows.agents % 3 == age // 4 - 1).all()
    assert rows.interrupted.tolist() == [age == 12 and episodes % 2 == 0] * rows.agents.size
    assert np.allclose(rows.rewards, [last[agent] for agent in rows.agents.tolist()])
    assert rows.group_rewards is not None
    assert set(rows.group_rewards.tolist()) == {1.0 if age == 12 else 0.5}


@pytest.mark.parametrize("options", [options for options in GAMES if "zoo" in options])
def test_every_feature_arrives_in_the_row_of_its_agent(options: str, bridges: Bridges) -> None:
    """Features are images in either layout, entities, goals, masks, groups, rewards and interruptions."""
    unity, _ = bridges.played(*options.split())
    last: dict[int, float] = {}
    choose, episodes = random_allowed(3), 0

    def act(unity: Unity, report: BehaviorReport) -> BehaviorActions:
        chosen = choose(unity, report)
        if report.behavior == "Zoo?team=0":
            last.update(zip(chosen.agents.tolist(), chosen.continuous[:, 0].tolist(), strict=True))
        return chosen

    frame = unity.reset({}, 7)
    for _ in range(40):
        for report in frame:
            if report.behavior == "Zoo?team=0" and report.ends is not None:
                age = check_zoo_observations(report.ends)
                check_zoo_ends(report.ends, age, episodes, last)
                episodes += age == 12
            if report.behavior == "Zoo?team=0" and report.decisions is not None:
                check_zoo_decisions(report.decisions, check_zoo_observations(report.decisions))
        frame = step(unity, frame, act)
    assert episodes >= 2


def test_a_behavior_may_appear_late(bridges: Bridges) -> None:
    """It is known with its first agent, and its decisions are answered from then on."""
    unity, player = bridges.played("--game", "zoo", "--late-after", "9")
    frame, frames_seen = unity.reset({}, 7), []
    for _ in range(20):
        frames_seen.append("Late?team=0" in {report.behavior for report in frame})
        assert frames_seen[-1] == ("Late?team=0" in unity.behaviors())
        frame = step(unity, frame)
    assert frames_seen == sorted(frames_seen)
    assert 9 <= frames_seen.index(True) <= 12
    unity.close()
    player.join(LONG_S)
    assert player.played.code == 0


@pytest.mark.parametrize("restart", ["same", "next"])
def test_all_agents_of_a_pitch_end_together(restart: str, bridges: Bridges) -> None:
    """A goal rewards one team's group and punishes the other's, and the time limit interrupts all four agents."""
    unity, _ = bridges.played("--game", "soccer", "--areas", "3", "--max-steps", "25", "--restart", restart)

    def forward(unity: Unity, report: BehaviorReport) -> BehaviorActions:
        """Team 0 moves forward on the first pitch; all others act at random."""
        actions = random_allowed(len(frames_seen))(unity, report)
        actions.discrete[:2, 0] = 1 if report.behavior.endswith("0") else 0
        return actions

    frames_seen: list[Frame] = [unity.reset({}, 7)]
    for _ in range(60):
        frames_seen.append(step(unity, frames_seen[-1], forward))
    with_ends = [frame for frame in frames_seen if any(report.ends is not None for report in frame)]
    assert len(with_ends) >= 2
    scored = 0
    for frame in with_ends:
        first, second = sorted(frame, key=lambda report: report.behavior)
        assert first.ends is not None
        assert second.ends is not None
        assert first.ends.agents.size == second.ends.agents.size
        assert np.array_equal(first.ends.interrupted, second.ends.interrupted)
        for row in (~first.ends.interrupted).nonzero()[0]:
            assert first.ends.group_rewards is not None
            assert second.ends.group_rewards is not None
            pair = sorted((first.ends.group_rewards[row], second.ends.group_rewards[row]))
            assert pair[0] == -1
            assert 0 <= pair[1] < 1
            scored += 1
        for one in (first, second):
            assert (one.decisions is None) == (restart == "next")
    assert scored >= 2
    groups = [set(report.decisions.groups.tolist()) for report in frames_seen[0]]  # type: ignore[union-attr]
    assert not groups[0] & groups[1]


def test_ids_are_not_reused_if_the_game_gives_new_ones(bridges: Bridges) -> None:
    unity, _ = bridges.played("--game", "basic", "--areas", "3", "--max-steps", "12")
    ended_ids: set[int] = set()
    for report in [report for frame in play(unity, 120, random_allowed()) for report in frame]:
        if report.ends is not None:
            ended_ids |= set(report.ends.agents.tolist())
        assert report.decisions is not None
        assert not ended_ids & set(report.decisions.agents.tolist())
    assert len(ended_ids) > 20


def test_match3_has_masks_and_interruptions(bridges: Bridges) -> None:
    """About three quarters of 127 moves are forbidden, never all; each episode ends by a limit."""
    unity, _ = bridges.played("--game", "match3", "--areas", "4", "--max-steps", "10", "--images", "float")
    frames = play(unity, 30, random_allowed())
    masks = np.concatenate([frame[0].decisions.masks for frame in frames])  # type: ignore[union-attr]
    assert masks.shape == (31 * 4, 127)
    assert 0.7 < masks.mean() < 0.8
    assert not masks.all(1).any()
    assert [report.ends.interrupted.all() for report in ended(frames) if report.ends is not None] == [True] * 3
