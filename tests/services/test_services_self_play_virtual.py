"""Ghost self-play in the whole graph under a virtual clock: its books, its turns and its matches, also after a crash."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from self_play_runs import BUFFER, KINDS, MEETS, SELF_PLAY, STEPS, Play, Seen, begin, check_all, plain_settings, whole
from trio.testing import MockClock

from pipeline.messages.matches import Assignment
from pipeline.messages.service import LearnerState, PolicyWeights


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return ("trio", {"clock": MockClock(autojump_threshold=0)})


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def counted(play: Play, name: str) -> int:
    """Steps of a behavior that the simulators counted themselves, those of ghosts among them."""
    return sum(counts.get(name, 0) for counts in play.graph.counted.values())


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["overlap", "lockstep"])
@pytest.mark.parametrize("kind", KINDS)
async def test_books_balance_and_ghosts_are_counted_and_never_learned_from(
    tmp_path: Path, kind: str, mode: str
) -> None:
    """Teams take turns, opponents change, and no simulator is reset for it."""
    one = KINDS[kind]
    play = await whole(tmp_path, [one.game(), one.game()], plain_settings(one, mode=mode))
    for name, books in check_all(play).items():
        assert STEPS <= books["trained"] < STEPS + 2 * BUFFER
        assert books["lost"] == 0
        assert books["ghost"] > STEPS / 3
        assert books["produced"] == counted(play, name)
    assert len(play.witness.teams) >= 3
    assert len({tuple(sorted(draw.ghosts.items())) for draw in play.witness.draws.values()}) >= 4


# ---------------------------------------------------------------- crashes


def first_assigned() -> Seen:
    """Who plays whom has just been told for the first time."""
    return lambda _board, _key, record: isinstance(record, Assignment)


def team_changed() -> Seen:
    """The next team has just been told to learn."""
    teams: list[int] = []

    def seen(_board: str, _key: str, record: Any) -> bool:
        if isinstance(record, Assignment):
            teams.append(record.draws[0].team)
        return len(set(teams)) > 1

    return seen


def snapshot_due() -> Seen:
    """Weights are out that will be kept and change the team, and nobody has heard of them."""
    return lambda board, _key, record: (
        board.startswith("policy-") and isinstance(record, PolicyWeights) and record.trained >= SELF_PLAY["team_change"]
    )


def late_in_an_update() -> Seen:
    """A learner has begun an update near its end."""
    return lambda _board, _key, record: (
        isinstance(record, LearnerState) and record.training > 0 and record.trained >= STEPS - 2 * BUFFER
    )


MOMENTS = {one.__name__: one for one in (first_assigned, team_changed, snapshot_due, late_in_an_update)}
PARTS = ["stepping-0", "assembly", "coordination", "learner", "link"]
QUICK = {("poca", "team_changed"), ("asymmetric", "snapshot_due"), ("symmetric", "late_in_an_update")}
CRASHES = [
    pytest.param(kind, part, moment, id=f"{kind}-{part}-{moment}", marks=[] if quick else [pytest.mark.slow])
    for kind in ("symmetric", "asymmetric", "poca")
    for moment in MOMENTS
    for part in PARTS
    for quick in [(kind, moment) in QUICK]
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
    for name, books in check_all(play).items():
        assert books["trained"] >= STEPS
        if part in ("coordination", "link"):
            assert books["lost"] == 0
        elif part != "learner":
            assert books["lost"] <= MEETS + 16
        if part != "stepping-0":
            assert books["produced"] == counted(play, name)


@pytest.mark.anyio
@pytest.mark.parametrize("part", ["coordination", "learner"])
@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
async def test_a_part_that_dies_in_lockstep_leaves_one_history(tmp_path: Path, kind: str, part: str) -> None:
    play = await disturbed(tmp_path, kind, part, "team_changed", "lockstep")
    for books in check_all(play).values():
        assert books["trained"] >= STEPS


# ---------------------------------------------------------------- who meets whom


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["symmetric", "soccer"])
async def test_two_simulators_play_different_opponents_at_the_same_moment(tmp_path: Path, kind: str) -> None:
    """Matches that overlap in time have different ghosts in the match table."""
    one = KINDS[kind]
    game = (lambda: one.game()) if kind == "symmetric" else None
    from pipeline.simulation.soccer import Soccer

    games = [game() if game else Soccer(areas=1, every=50) for _ in range(2)]
    rules = SELF_PLAY | {"play_against_latest_model_ratio": 0.0, "team_change": 10**6, "window": 10}
    play = await whole(tmp_path, games, plain_settings(one, self_play=rules))
    check_all(play)
    by_simulator = []
    for number, watched in enumerate(play.games):
        lines = [line for line in play.table if line["simulator"] == number]
        if kind == "symmetric":
            lines = []
        by_simulator.append([
            (line["players"]["Soccer?team=1"], *times) for line, times in zip(lines, watched.episodes, strict=False)
        ])
    assert any(
        one_opponent != other and begun < until and since < ended
        for one_opponent, begun, ended in by_simulator[0]
        for other, since, until in by_simulator[1]
    )
