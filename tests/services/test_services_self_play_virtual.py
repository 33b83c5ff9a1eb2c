"""Ghost self-play in the whole graph under a virtual clock: books, turns and matches, also after a crash."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from trio.testing import MockClock

from sparring.pipeline.games.duel import Duel
from sparring.pipeline.games.soccer import Soccer
from sparring.pipeline.messages.matches import MatchupAssignment
from sparring.pipeline.messages.state import LearnerState, PolicyWeights
from sparring.pipeline.simulation.game import Game
from tests.services.self_play_runs import (
    BUFFER,
    KINDS,
    MEETS,
    SELF_PLAY,
    STEPS,
    Play,
    Seen,
    begin,
    check_all,
    plain_settings,
    same_order,
    whole,
)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return ("trio", {"clock": MockClock(autojump_threshold=0)})


@pytest.fixture(autouse=True)
def one_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, and tasks that run in the same order each time: what fails here fails again."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    same_order(monkeypatch, 0)
    yield
    torch.set_num_threads(before)


def counted(play: Play, name: str) -> int:
    """Steps of a behavior that the simulators counted themselves, those of ghosts among them."""
    return sum(counts.get(name, 0) for counts in play.graph.counted.values())


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("symmetric", "overlap"),
        ("asymmetric", "overlap"),
        ("poca", "overlap"),
        ("soccer", "lockstep"),
        *(pytest.param(*slow, marks=pytest.mark.slow) for slow in (("soccer", "overlap"), ("poca", "lockstep"))),
    ],
)
async def test_books_balance_and_ghosts_are_counted_and_never_learned_from(
    tmp_path: Path, kind: str, mode: str
) -> None:
    """Teams take turns, opponents change, and no simulator is reset for it."""
    one = KINDS[kind]
    play = await whole(tmp_path, [one.game(), one.game()], plain_settings(one, mode=mode))
    for name, step_counts in check_all(play).items():
        assert STEPS <= step_counts["trained"] < STEPS + 2 * BUFFER
        assert step_counts["lost"] == 0
        assert step_counts["ghost"] > STEPS / 3
        assert step_counts["produced"] == counted(play, name)
    assert len(play.witness.teams) >= 3
    assert len({tuple(sorted(matchup.ghosts.items())) for matchup in play.witness.matchups.values()}) >= 4


# ---------------------------------------------------------------- crashes


def first_assigned() -> Seen:
    """Who plays whom has just been told for the first time."""
    return lambda _board, _key, record: isinstance(record, MatchupAssignment)


def team_changed() -> Seen:
    """The next team has just been told to learn."""
    teams: list[int] = []

    def seen(_board: str, _key: str, record: Any) -> bool:
        if isinstance(record, MatchupAssignment):
            teams.append(record.matchups[0].team)
        return len(set(teams)) > 1

    return seen


def snapshot_due() -> Seen:
    """Weights are out that will be kept and change the team, and nobody has heard of them."""
    return lambda topic, _key, record: (
        topic.startswith("policy-") and isinstance(record, PolicyWeights) and record.trained >= SELF_PLAY["team_change"]
    )


def late_in_an_update() -> Seen:
    """A learner has begun an update near its end."""
    return lambda _board, _key, record: (
        isinstance(record, LearnerState) and record.training > 0 and record.trained >= STEPS - 2 * BUFFER
    )


MOMENTS = {one.__name__: one for one in (first_assigned, team_changed, snapshot_due, late_in_an_update)}
PARTS = ["stepping-0", "assembly", "coordination", "learner", "link"]
QUICK = {
    ("symmetric", "coordination", "snapshot_due"),
    ("symmetric", "learner", "late_in_an_update"),
    ("asymmetric", "assembly", "snapshot_due"),
    ("asymmetric", "link", "team_changed"),
    ("poca", "stepping-0", "team_changed"),
    ("poca", "coordination", "team_changed"),
}
CRASHES = [
    pytest.param(*crash, id="-".join(crash), marks=[] if crash in QUICK else [pytest.mark.slow])
    for crash in itertools.product(("symmetric", "asymmetric", "poca"), PARTS, MOMENTS)
    if crash in QUICK or crash[0] == "asymmetric" or crash[2] in ("team_changed", "snapshot_due")
]


async def disturb(play: Play, part: str) -> None:
    if part == "link":
        play.graph.cut_off(0)
    else:
        await play.graph.kill(f"learning-{play.graph.names[-1]}" if part == "learner" else part)


async def disturbed(folder: Path, kind: str, part: str, moment: str, mode: str = "overlap") -> Play:
    """A run to its end, of which a part dies at a moment."""
    one = KINDS[kind]
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        play = await begin(tasks, stack, folder, [one.game(), one.game()], plain_settings(one, mode=mode))
        await play.witness.trap(MOMENTS[moment]()).wait()
        await disturb(play, part)
        await play.graph.finish()
        tasks.cancel_scope.cancel()
    return play


@pytest.mark.anyio
@pytest.mark.parametrize(("kind", "part", "moment"), CRASHES)
async def test_a_part_that_dies_leaves_balanced_books_and_one_history(
    tmp_path: Path, kind: str, part: str, moment: str
) -> None:
    """Nothing goes back, no match is rated twice, and who dies takes no more than was in flight."""
    play = await disturbed(tmp_path, kind, part, moment)
    for name, step_counts in check_all(play).items():
        assert step_counts["trained"] >= STEPS
        if part in ("coordination", "link"):
            assert step_counts["lost"] == 0
        elif part != "learner":
            assert step_counts["lost"] <= MEETS + 16
        if part != "stepping-0":
            assert step_counts["produced"] == counted(play, name)


@pytest.mark.anyio
@pytest.mark.slow
@pytest.mark.parametrize("part", ["coordination", "learner"])
@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
async def test_a_part_that_dies_in_lockstep_leaves_one_history(tmp_path: Path, kind: str, part: str) -> None:
    play = await disturbed(tmp_path, kind, part, "team_changed", "lockstep")
    for step_counts in check_all(play).values():
        assert step_counts["trained"] >= STEPS


# ---------------------------------------------------------------- who meets whom


@dataclass(frozen=True)
class Meeting:
    """A match of the table, and when it was played."""

    opponent: str
    began: float
    ended: float


def meetings(play: Play, number: int) -> list[Meeting]:
    """The matches of a simulator that plays one at a time, in which team 0 learned."""
    (name,) = play.graph.names
    lines = [line for line in play.table if line["simulator"] == number]
    times = play.games[number].episodes[f"{name}?team=0"]
    assert len(times) - len(lines) in (0, 1)  # the last one may have ended when nobody told of it any more
    return [
        Meeting(line["players"][f"{name}?team=1"], began, ended)
        for line, (began, ended) in zip(lines, times, strict=False)
    ]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("kind", "game"), [("symmetric", Duel), ("poca", lambda: Soccer(every=50))], ids=["ungrouped", "matches"]
)
async def test_two_simulators_play_different_opponents_at_the_same_moment(
    tmp_path: Path, kind: str, game: Callable[[], Game]
) -> None:
    """Matches that overlap in time have different ghosts in the match table, and each opponent was a snapshot."""
    rules = SELF_PLAY | {"play_against_latest_model_ratio": 0.0, "team_change": 10**6, "window": 10}
    play = await whole(tmp_path, [game(), game()], plain_settings(KINDS[kind], self_play=rules))
    check_all(play)
    first, second = (meetings(play, number) for number in range(2))
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
async def test_no_match_ever_meets_two_versions(tmp_path: Path, kind: str) -> None:
    """All segments of a life are played under one draw, that of the match in the table."""
    one = KINDS[kind]
    rules = SELF_PLAY | {"swap_steps": 16, "team_change": 64}
    play = await whole(tmp_path, [one.game(), one.game()], plain_settings(one, self_play=rules))
    check_all(play)
    agent_episodes: dict[tuple[str, int], set[int]] = {}
    for record in play.witness.received[f"updates:{one.names[0]}"]:
        if record.matchups is None:
            continue
        for agent, matchup in zip(record.agents.tolist(), record.matchups.tolist(), strict=True):
            agent_episodes.setdefault((record.source, agent), set()).add(matchup)
    assert len(agent_episodes) > 10
    assert all(len(matchups) == 1 for matchups in agent_episodes.values())
    assert len({matchup for matchups in agent_episodes.values() for matchup in matchups}) >= 6
