"""Self-play with ghosts in the whole graph under a virtual clock: step counts, turns and matches, with crashes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from sparring.pipeline.games.soccer import Soccer
from sparring.pipeline.learning.checkpoints import CheckpointFolder
from sparring.pipeline.messages.matches import MatchupAssignment
from sparring.pipeline.messages.state import LearnerState, PolicyWeights
from sparring.pipeline.simulation.game import Game
from tests.games.duel import Duel
from tests.services.self_play_checks import check_all
from tests.services.self_play_runs import (
    BUFFER,
    IN_FLIGHT,
    KINDS,
    SELF_PLAY,
    STEPS,
    Condition,
    Play,
    begin,
    plain_settings,
    run_to_end,
)

pytestmark = pytest.mark.usefixtures("fixed_order")


def counted(play: Play, name: str) -> int:
    """Returns the number of steps of a behavior that the simulators counted, including those of ghosts."""
    return sum(counts.get(name, 0) for counts in play.graph.counted.values())


@pytest.mark.anyio
async def test_sac_plays_against_its_ghosts_and_stores_no_step_of_theirs(tmp_path: Path) -> None:
    hyper = {"batch_size": 16, "buffer_size": 2000, "steps_per_update": 16, "save_replay_buffer": True}
    kind = KINDS["symmetric"]
    settings = plain_settings(kind, trainer_type="sac", hyperparameters=hyper)
    play = await run_to_end(tmp_path, [kind.game(), kind.game()], settings)
    counts = check_all(play)["Goal"]
    assert counts["trained"] >= STEPS
    assert counts["ghost"] > STEPS / 3
    last = CheckpointFolder(tmp_path, "Goal").load_latest()
    assert last.optimizer["replay.counters"][1] == counts["trained"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("symmetric", "overlap"),
        ("poca", "overlap"),
        ("soccer", "lockstep"),
        *(pytest.param(*slow, marks=pytest.mark.slow) for slow in (("soccer", "overlap"), ("poca", "lockstep"))),
    ],
)
async def test_step_counts_balance_and_ghosts_are_never_trained_on(tmp_path: Path, kind: str, mode: str) -> None:
    """Teams take turns and opponents change without a reset of any simulator."""
    one = KINDS[kind]
    play = await run_to_end(tmp_path, [one.game(), one.game()], plain_settings(one, mode=mode))
    for name, step_counts in check_all(play).items():
        assert STEPS <= step_counts["trained"] < STEPS + 2 * BUFFER
        assert step_counts["lost"] == 0
        assert step_counts["ghost"] > STEPS / 3
        assert step_counts["produced"] == counted(play, name)
    assert len(play.recorder.teams) >= 3
    assert len({tuple(sorted(matchup.ghosts.items())) for matchup in play.recorder.matchups.values()}) >= 4


# ---------------------------------------------------------------- crashes


def first_assigned() -> Condition:
    """Returns the condition that the first assignment is published."""
    return lambda _topic, _key, record: isinstance(record, MatchupAssignment)


def team_changed() -> Condition:
    """Returns the condition that the next team learns."""
    teams: list[int] = []

    def seen(_topic: str, _key: str, record: Any) -> bool:
        if isinstance(record, MatchupAssignment):
            teams.append(record.matchups[0].team)
        return len(set(teams)) > 1

    return seen


def snapshot_due() -> Condition:
    """Returns the condition that weights are published that will be saved and will change the team."""
    return lambda topic, _key, record: (
        topic.startswith("policy-") and isinstance(record, PolicyWeights) and record.trained >= SELF_PLAY["team_change"]
    )


def late_in_an_update() -> Condition:
    """Returns the condition that a learner has begun an update near its end."""
    return lambda _topic, _key, record: (
        isinstance(record, LearnerState) and record.training > 0 and record.trained >= STEPS - 2 * BUFFER
    )


CONDITIONS = {one.__name__: one for one in (first_assigned, team_changed, snapshot_due, late_in_an_update)}
PARTS = ["stepping-0", "assembly", "coordination", "learner", "link"]
QUICK = {
    ("symmetric", "coordination", "snapshot_due"),
    ("symmetric", "learner", "late_in_an_update"),
    ("asymmetric", "assembly", "snapshot_due"),
    ("asymmetric", "link", "team_changed"),
    ("poca", "stepping-0", "team_changed"),
    ("poca", "coordination", "team_changed"),
}
KINDS_IN_TURN = ("asymmetric", "symmetric", "poca")
PAIRWISE = {
    (KINDS_IN_TURN[(part + condition) % 3], PARTS[part], name)
    for part in range(len(PARTS))
    for condition, name in enumerate(CONDITIONS)
}
"""Every pair of a part and a condition, in which every kind meets every part and every condition."""
CRASHES = [
    pytest.param(*crash, id="-".join(crash), marks=[] if crash in QUICK else [pytest.mark.slow])
    for crash in itertools.product(KINDS_IN_TURN, PARTS, CONDITIONS)
    if crash in QUICK | PAIRWISE
]


async def break_part(play: Play, part: str) -> None:
    if part == "link":
        play.graph.disconnect(0)
    else:
        await play.graph.kill(f"learning-{play.graph.names[-1]}" if part == "learner" else part)


async def run_with_failure(folder: Path, kind: str, part: str, condition: str, mode: str = "overlap") -> Play:
    """Runs a graph to its end; a part fails as soon as a condition holds."""
    one = KINDS[kind]
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        play = await begin(tasks, stack, folder, [one.game(), one.game()], plain_settings(one, mode=mode))
        await play.recorder.event_at(CONDITIONS[condition]()).wait()
        await break_part(play, part)
        await play.graph.finish()
        tasks.cancel_scope.cancel()
    return play


@pytest.mark.anyio
@pytest.mark.parametrize(("kind", "part", "condition"), CRASHES)
async def test_failed_part_leaves_balanced_step_counts_and_one_history(
    tmp_path: Path, kind: str, part: str, condition: str
) -> None:
    """Numbers only rise, no match is rated twice, and at most the steps in flight are lost."""
    play = await run_with_failure(tmp_path, kind, part, condition)
    for name, step_counts in check_all(play).items():
        assert step_counts["trained"] >= STEPS
        if part in ("coordination", "link"):
            assert step_counts["lost"] == 0
        elif part != "learner":
            assert step_counts["lost"] <= IN_FLIGHT + 16
        if part != "stepping-0":
            assert step_counts["produced"] == counted(play, name)


@pytest.mark.anyio
@pytest.mark.slow
@pytest.mark.parametrize("part", ["coordination", "learner"])
@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
async def test_failed_part_in_lockstep_leaves_one_history(tmp_path: Path, kind: str, part: str) -> None:
    play = await run_with_failure(tmp_path, kind, part, "team_changed", "lockstep")
    for step_counts in check_all(play).values():
        assert step_counts["trained"] >= STEPS


# ---------------------------------------------------------------- opponents


@dataclass(frozen=True)
class TimedMatch:
    """A match of the table, with its begin and end in virtual seconds."""

    opponent: str
    began: float
    ended: float


def timed_matches(play: Play, number: int) -> list[TimedMatch]:
    """Returns the matches of a simulator that plays one at a time, in which team 0 learned."""
    (name,) = play.graph.names
    lines = [line for line in play.table if line["simulator"] == number]
    times = play.games[number].episodes[f"{name}?team=0"]
    assert len(times) - len(lines) in (0, 1)  # the last match may have ended after the last report
    return [
        TimedMatch(line["players"][f"{name}?team=1"], began, ended)
        for line, (began, ended) in zip(lines, times, strict=False)
    ]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("kind", "game"), [("symmetric", Duel), ("poca", lambda: Soccer(every=50))], ids=["ungrouped", "matches"]
)
async def test_two_simulators_play_different_opponents_at_the_same_time(
    tmp_path: Path, kind: str, game: Callable[[], Game]
) -> None:
    """Matches that overlap in time have different ghosts, and every opponent is a snapshot."""
    rules = SELF_PLAY | {"play_against_latest_model_ratio": 0.0, "team_change": 10**6, "window": 10}
    play = await run_to_end(tmp_path, [game(), game()], plain_settings(KINDS[kind], self_play=rules))
    check_all(play)
    first, second = (timed_matches(play, number) for number in range(2))
    overlapping = [
        (one.opponent, other.opponent)
        for one in first
        for other in second
        if one.began < other.ended and other.began < one.ended
    ]
    assert any(one != other for one, other in overlapping)
    assert len({opponent for pair in overlapping for opponent in pair}) >= 3


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["symmetric", pytest.param("poca", marks=pytest.mark.slow)])
async def test_no_match_has_two_versions_of_an_opponent(tmp_path: Path, kind: str) -> None:
    """All segments of an agent episode have the same matchup."""
    one = KINDS[kind]
    rules = SELF_PLAY | {"swap_steps": 16, "team_change": 64}
    play = await run_to_end(tmp_path, [one.game(), one.game()], plain_settings(one, self_play=rules))
    check_all(play)
    matchups_of_agents: dict[tuple[str, int], set[int]] = {}
    for record in play.recorder.received[f"segments:{one.names[0]}"]:
        if record.matchups is None:
            continue
        for agent, matchup in zip(record.agents.tolist(), record.matchups.tolist(), strict=True):
            matchups_of_agents.setdefault((record.source, agent), set()).add(matchup)
    assert len(matchups_of_agents) > 10
    assert all(len(matchups) == 1 for matchups in matchups_of_agents.values())
    assert len({matchup for matchups in matchups_of_agents.values() for matchup in matchups}) >= 6
