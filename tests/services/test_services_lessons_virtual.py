"""Curricula in the whole graph under a virtual clock."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import pytest

from sparring.pipeline.games.balance import Balance
from sparring.pipeline.messages.state import LearnerState, LessonsState, RunState
from tests.services.lessons_runs import (
    LENGTH,
    LessonGame,
    check_lessons_only_advance,
    check_step_counts,
    curriculum,
    plain_settings,
    published_lessons,
)
from tests.services.self_play_runs import KINDS, SELF_PLAY, Play, Recorder, begin, fix_task_order, run_to_end
from tests.services.self_play_runs import plain_settings as self_play_settings

pytestmark = pytest.mark.usefixtures("fixed_order")

STEPS = 1000


BY_REWARD = curriculum(
    (1.0, {"measure": "reward", "threshold": 5.5, "min_lesson_length": 20}),
    (2.0, {"measure": "reward", "threshold": 5.5, "min_lesson_length": 20}),
    (3.0, {"measure": "reward", "threshold": 5.5, "min_lesson_length": 20}),
    (4.0, None),
)
"""The return of an episode is 6 where the reward of each decision is 1."""


def levels(play: Play) -> list[list[float]]:
    """Returns the levels of the episodes of each simulator, in the order of their beginnings."""
    return [game_of(play, number).levels for number in range(len(play.games))]


def game_of(play: Play, number: int) -> LessonGame:
    """Returns the game of a simulator."""
    game = play.games[number].game
    assert isinstance(game, LessonGame)
    return game


def second_lesson(_topic: str, _key: str, record: object) -> bool:
    """A condition of a recorder: coordination has published the second lesson."""
    return isinstance(record, LessonsState) and record.serial == 1


def never_fall(values: Sequence[float]) -> bool:
    return all(a <= b for a, b in itertools.pairwise(values))


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["overlap", "lockstep"])
async def test_lessons_advance_by_reward_without_resetting_simulators(tmp_path: Path, mode: str) -> None:
    """Each lesson counts its own episodes only; the third, whose reward is too low, is not completed."""
    games = [LessonGame(pay={3.0: 0.5}) for _ in range(2)]
    play = await run_to_end(tmp_path, games, plain_settings({"level": BY_REWARD}, mode=mode, max_steps=2000))
    check_step_counts(play)
    check_lessons_only_advance(play)
    assert published_lessons(play)[-1].numbers == {"level": 2}
    assert [len(game.resets) for game in games] == [1, 1]
    for own in levels(play):
        assert set(own) == {1.0, 2.0, 3.0}
        assert never_fall(own)
    for level in (1.0, 2.0):
        assert sum(game.ended[level] for game in games) >= 20


@pytest.mark.anyio
async def test_episodes_that_began_in_the_previous_lesson_do_not_count(tmp_path: Path) -> None:
    """Many episodes are under way when the lesson changes; their mean would complete the next lesson, too."""
    games = [LessonGame(pay={2.0: 0.1}) for _ in range(2)]
    criteria = {"measure": "reward", "threshold": 2.0, "min_lesson_length": 12}
    lessons = curriculum((1.0, criteria), (2.0, criteria), (3.0, None))
    play = await run_to_end(tmp_path, games, plain_settings({"level": lessons}))
    assert published_lessons(play)[-1].numbers == {"level": 1}


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["overlap", "lockstep"])
async def test_lessons_advance_by_progress(tmp_path: Path, mode: str) -> None:
    """A lesson ends at the first update beyond its share of `max_steps`."""
    lessons = curriculum(
        (1.0, {"measure": "progress", "threshold": 0.3}), (2.0, {"measure": "progress", "threshold": 0.6}), (3.0, None)
    )
    play = await run_to_end(tmp_path, [LessonGame()], plain_settings({"level": lessons}, mode=mode))
    check_step_counts(play)
    check_lessons_only_advance(play)
    assert published_lessons(play)[-1].numbers == {"level": 2}
    trained, at = 0, {}
    for _, _, record in play.recorder.published:
        if isinstance(record, LearnerState):
            trained = record.trained
        if isinstance(record, LessonsState):
            at.setdefault(record.numbers["level"], trained)
    assert at[0] == 0
    assert 300 < at[1] < 300 + 3 * 64
    assert 600 < at[2] < 600 + 3 * 64


@pytest.mark.anyio
@pytest.mark.parametrize(("threshold", "reached"), [(1000, 1), (2000, 0)])
async def test_lessons_advance_by_rating(tmp_path: Path, threshold: float, reached: int) -> None:
    """Ratings begin with 1200: above 1000 at once, and below 2000 for the whole of a short run."""
    kind = KINDS["symmetric"]
    lessons = curriculum((1.0, {"measure": "rating", "threshold": threshold}), (2.0, None))
    plain = {**self_play_settings(kind, self_play=SELF_PLAY), "environment_parameters": {"level": lessons}}
    play = await run_to_end(tmp_path, [kind.game(), kind.game()], plain)
    check_step_counts(play)
    assert published_lessons(play)[-1].numbers == {"level": reached}
    assert published_lessons(play)[0].numbers == {"level": 0}


@pytest.mark.anyio
@pytest.mark.parametrize(("mode", "trainer"), [("overlap", "poca"), ("lockstep", "ppo")])
async def test_lesson_with_require_reset_resets_every_simulator_once(tmp_path: Path, mode: str, trainer: str) -> None:
    """Open segments close without statistics, no step is lost, and later lessons reset no simulator."""
    games = [LessonGame() for _ in range(3)]
    lessons = curriculum(
        (1.0, {"measure": "progress", "threshold": 0.3, "require_reset": True}),
        (2.0, {"measure": "progress", "threshold": 0.6}),
        (3.0, None),
    )
    play = await run_to_end(tmp_path, games, plain_settings({"level": lessons}, mode=mode, trainer_type=trainer))
    step_counts = check_step_counts(play)
    check_lessons_only_advance(play)
    assert step_counts["lost"] == 0
    assert step_counts["produced"] == sum(play.graph.counts.values())
    for game in games:
        assert [reset.level for reset in game.resets] == [1.0, 2.0]
        assert never_fall(game.levels)
        assert game.levels[-1] == 3.0
    run: RunState = play.graph.latest("coordination", "run")
    ended = sum(sum(game.ended.values()) for game in games)
    assert ended - 3 * 3 <= run.episodes["Goal"] <= ended  # the last of each agent may be open at the end
    received = play.recorder.received["segments:Goal"]
    lengths = [length for segments in received for length in segments.episodes.lengths.tolist()]
    assert set(lengths) <= {LENGTH, LENGTH + 1, LENGTH + 2}  # complete ones only; the first of an agent may be longer
    interrupted = [flag for segments in received for flag in segments.interrupted.tolist()]
    assert (mode == "overlap") <= sum(interrupted) <= 3 * 3  # by the reset; in lockstep all had just been flushed


@pytest.mark.anyio
async def test_simulator_that_connects_later_gets_current_values(tmp_path: Path) -> None:
    """Its first Reset contains them, whether a number or a sampler."""
    lessons = curriculum(
        (1.0, {"measure": "progress", "threshold": 0.2}),
        ({"sampler_type": "uniform", "sampler_parameters": {"min_value": 7, "max_value": 9}}, None),
    )
    first, late = LessonGame(), LessonGame()
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        recorder = Recorder()
        recorder.install(stack.enter_context(pytest.MonkeyPatch.context()))
        changed = recorder.event_at(second_lesson)
        play = await begin(tasks, stack, tmp_path, [first], plain_settings({"level": lessons}), recorder=recorder)
        await changed.wait()
        await anyio.sleep(0.1)
        tasks.start_soon(play.graph.simulate, 1, late)
        await play.graph.finish()
        tasks.cancel_scope.cancel()
    check_step_counts(play)
    assert len(first.resets) == len(late.resets) == 1
    assert first.levels[0] == 1.0
    assert all(7 <= level <= 9 for level in [*late.levels, *first.levels[-3:]])
    sampled = late.levels + [level for level in first.levels if level != 1.0]
    assert len(set(sampled)) == len(sampled), "each episode has its own sample, and each simulator its own seed"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("part", "mode"),
    [
        ("coordination", "overlap"),
        ("coordination", "lockstep"),
        ("stepping-0", "overlap"),
        ("learning-Goal", "overlap"),
        pytest.param("stepping-0", "lockstep", marks=pytest.mark.slow),
        pytest.param("learning-Goal", "lockstep", marks=pytest.mark.slow),
        pytest.param("assembly", "overlap", marks=pytest.mark.slow),
        pytest.param("assembly", "lockstep", marks=pytest.mark.slow),
    ],
)
async def test_killed_service_loses_no_lesson(tmp_path: Path, part: str, mode: str) -> None:
    """It is killed just after the second lesson was published; no later episode begins in the first one."""
    games = [LessonGame(), LessonGame()]
    lessons = curriculum(
        (1.0, {"measure": "progress", "threshold": 0.3, "require_reset": True}),
        (2.0, {"measure": "progress", "threshold": 0.6, "min_lesson_length": 5}),
        (3.0, None),
    )
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        recorder = Recorder()
        recorder.install(stack.enter_context(pytest.MonkeyPatch.context()))
        changed = recorder.event_at(second_lesson)
        plain = plain_settings({"level": lessons}, mode=mode)
        play = await begin(tasks, stack, tmp_path, games, plain, recorder=recorder)
        await changed.wait()
        await play.graph.kill(part)
        await play.graph.finish()
        tasks.cancel_scope.cancel()
    check_step_counts(play)
    check_lessons_only_advance(play)
    assert published_lessons(play)[-1].numbers == {"level": 2}
    connections = 2 if part == "stepping-0" else 1
    for game in games:
        assert never_fall(game.levels)
        assert game.levels[-1] == 3.0
        assert connections <= len(game.resets) <= connections + 1
        assert game.resets[-1].level == 2.0


@pytest.mark.anyio
async def test_first_reset_waits_until_lessons_are_known(tmp_path: Path) -> None:
    """Stepping and coordination die together, and the simulator connects before coordination is back."""
    game = LessonGame()
    lessons = curriculum((1.0, {"measure": "progress", "threshold": 0.3}), (2.0, None))
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        play = await begin(tasks, stack, tmp_path, [game], plain_settings({"level": lessons}))
        await play.graph.until("Goal", lambda state: state.trained > 500)
        play.graph.scopes["coordination"].cancel()
        await play.graph.ended["coordination"].wait()
        await play.graph.kill("stepping-0")
        await anyio.sleep(1)
        assert len(game.resets) == 1
        play.graph.start("coordination")
        await play.graph.finish()
        tasks.cancel_scope.cancel()
    check_step_counts(play)
    assert [reset.level for reset in game.resets] == [1.0, 2.0]
    assert game.levels[-1] == 2.0


@pytest.mark.anyio
async def test_resumed_run_continues_in_its_lesson(tmp_path: Path) -> None:
    """The first Reset of the new simulators has the value of the lesson that the run had reached."""
    lessons = curriculum(
        (1.0, {"measure": "progress", "threshold": 0.1}),
        (2.0, {"measure": "progress", "threshold": 0.9}),
        (3.0, None),
    )
    plain = plain_settings({"level": lessons}, max_steps=1500)
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        play = await begin(tasks, stack, tmp_path, [LessonGame()], plain)
        await play.graph.until("Goal", lambda state: state.trained > 350)
        for name in play.graph.services:
            play.graph.stops[name].set()
            await play.graph.ended[name].wait()
        tasks.cancel_scope.cancel()
    assert published_lessons(play)[-1].numbers == {"level": 1}
    again = LessonGame()
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        recorder = Recorder("b")
        recorder.install(stack.enter_context(pytest.MonkeyPatch.context()))
        play = await begin(tasks, stack, tmp_path, [again], plain, recorder=recorder, resumed=True)
        await play.graph.finish()
        tasks.cancel_scope.cancel()
    check_step_counts(play)
    assert again.resets[0].level == again.levels[0] == 2.0
    assert again.levels[-1] == 3.0
    assert [state.numbers["level"] for state in published_lessons(play)] == [1, 2]


# ---------------------------------------------------------------- lockstep

GRAVITY = curriculum(
    (2.0, {"measure": "reward", "threshold": -1.0, "min_lesson_length": 4}),
    (
        {"sampler_type": "gaussian", "sampler_parameters": {"mean": 6, "st_dev": 1}},
        {"measure": "reward", "threshold": -1.0, "min_lesson_length": 4, "require_reset": True},
    ),
    ({"sampler_type": "multirangeuniform", "sampler_parameters": {"intervals": [[7, 8], [9, 11]]}}, None),
    behavior="Balance",
)


@pytest.mark.anyio
@pytest.mark.parametrize("count", [2])
async def test_lockstep_with_a_curriculum_repeats_itself_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Neither the pace of simulators nor the order of tasks that are ready together changes the weights."""
    found = []
    plain = plain_settings({"gravity": GRAVITY}, names=("Balance",), mode="lockstep", max_steps=1500)
    for order, frame_s in enumerate((0.001, 0.03)):
        fix_task_order(monkeypatch, order)
        games = [Balance(areas=4) for _ in range(count)]
        play = await run_to_end(tmp_path_factory.mktemp("run"), games, plain, frame_s=frame_s)
        check_step_counts(play)
        check_lessons_only_advance(play)
        resets = [game.resets for game in play.games]
        assert resets == [[2]] * count
        assert published_lessons(play)[-1].numbers == {"gravity": 2}
        found.append(play.graph.latest("learning-Balance", "state").weights_sha256)
    assert found[0] == found[1]
    still = plain_settings({"gravity": 2.0}, names=("Balance",), mode="lockstep", max_steps=1500)
    play = await run_to_end(tmp_path_factory.mktemp("run"), [Balance(areas=4) for _ in range(count)], still)
    assert play.graph.latest("learning-Balance", "state").weights_sha256 != found[0]
