"""Curricula in the whole graph under a virtual clock."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from trio.testing import MockClock

from sparring.pipeline.games.balance import Balance
from sparring.pipeline.messages.state import LearnerState, LessonsState, RunState
from tests.services.lessons_runs import (
    LENGTH,
    Pupil,
    check_lessons_only_go_on,
    check_step_counts,
    curriculum,
    plain_settings,
    told,
)
from tests.services.self_play_runs import KINDS, SELF_PLAY, Play, Witness, begin, same_order, whole
from tests.services.self_play_runs import plain_settings as self_play_settings

STEPS = 1000


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


BY_REWARD = curriculum(
    (1.0, {"measure": "reward", "threshold": 5.5, "min_lesson_length": 20}),
    (2.0, {"measure": "reward", "threshold": 5.5, "min_lesson_length": 20}),
    (3.0, {"measure": "reward", "threshold": 5.5, "min_lesson_length": 20}),
    (4.0, None),
)
"""An episode of a pupil earns 6, where its level pays 1 for each decision."""


def levels(play: Play) -> list[list[float]]:
    """Levels of the episodes of each simulator, in the order in which they began."""
    return [pupil_of(play, number).levels for number in range(len(play.games))]


def pupil_of(play: Play, number: int) -> Pupil:
    """The game of a simulator."""
    game = play.games[number]._game
    assert isinstance(game, Pupil)
    return game


def never_fall(values: Sequence[float]) -> bool:
    return all(a <= b for a, b in itertools.pairwise(values))


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["overlap", "lockstep"])
async def test_lessons_advance_by_reward_and_no_simulator_is_reset_for_it(tmp_path: Path, mode: str) -> None:
    """A lesson has the episodes it needs of its own, and the third, which is not paid enough, is not passed."""
    pupils = [Pupil(pay={3.0: 0.5}) for _ in range(2)]
    play = await whole(tmp_path, pupils, plain_settings({"level": BY_REWARD}, mode=mode, max_steps=2000))
    check_step_counts(play)
    check_lessons_only_go_on(play)
    assert told(play)[-1].numbers == {"level": 2}
    assert [len(pupil.resets) for pupil in pupils] == [1, 1]
    for own in levels(play):
        assert set(own) == {1.0, 2.0, 3.0}
        assert never_fall(own)
    for level in (1.0, 2.0):
        assert sum(pupil.ended[level] for pupil in pupils) >= 20


@pytest.mark.anyio
async def test_episodes_that_began_in_the_lesson_before_do_not_count(tmp_path: Path) -> None:
    """Many of them are under way when it changes, and their mean would pass the next lesson, too."""
    pupils = [Pupil(pay={2.0: 0.1}) for _ in range(2)]
    criteria = {"measure": "reward", "threshold": 2.0, "min_lesson_length": 12}
    lessons = curriculum((1.0, criteria), (2.0, criteria), (3.0, None))
    play = await whole(tmp_path, pupils, plain_settings({"level": lessons}))
    assert told(play)[-1].numbers == {"level": 1}


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["overlap", "lockstep"])
async def test_lessons_advance_by_progress(tmp_path: Path, mode: str) -> None:
    """After the first update that leads beyond the share of `max_steps`."""
    lessons = curriculum(
        (1.0, {"measure": "progress", "threshold": 0.3}), (2.0, {"measure": "progress", "threshold": 0.6}), (3.0, None)
    )
    play = await whole(tmp_path, [Pupil()], plain_settings({"level": lessons}, mode=mode))
    check_step_counts(play)
    check_lessons_only_go_on(play)
    assert told(play)[-1].numbers == {"level": 2}
    trained, at = 0, {}
    for _, _, record in play.witness.said:
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
    """Above 1000 every learner is that begins with 1200, above 2000 none in this short time."""
    kind = KINDS["symmetric"]
    lessons = curriculum((1.0, {"measure": "rating", "threshold": threshold}), (2.0, None))
    plain = {**self_play_settings(kind, self_play=SELF_PLAY), "environment_parameters": {"level": lessons}}
    play = await whole(tmp_path, [kind.game(), kind.game()], plain)
    check_step_counts(play)
    assert told(play)[-1].numbers == {"level": reached}
    assert told(play)[0].numbers == {"level": 0}


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["overlap", "lockstep"])
@pytest.mark.parametrize("trainer", ["ppo", "poca"])
async def test_a_lesson_that_asks_for_it_resets_every_simulator_once(tmp_path: Path, mode: str, trainer: str) -> None:
    """Open segments close without statistics, every step stays in the books, and later lessons reset nobody."""
    pupils = [Pupil() for _ in range(3)]
    lessons = curriculum(
        (1.0, {"measure": "progress", "threshold": 0.3, "require_reset": True}),
        (2.0, {"measure": "progress", "threshold": 0.6}),
        (3.0, None),
    )
    play = await whole(tmp_path, pupils, plain_settings({"level": lessons}, mode=mode, trainer_type=trainer))
    step_counts = check_step_counts(play)
    check_lessons_only_go_on(play)
    assert step_counts["lost"] == 0
    assert step_counts["produced"] == sum(play.graph.counts.values())
    for pupil in pupils:
        assert [reset.level for reset in pupil.resets] == [1.0, 2.0]
        assert never_fall(pupil.levels)
        assert pupil.levels[-1] == 3.0
    run: RunState = play.graph.latest("coordination", "run")
    ended = sum(sum(pupil.ended.values()) for pupil in pupils)
    assert ended - 3 * 3 <= run.episodes["Goal"] <= ended  # the last may be open where the run ends
    received = play.witness.received["updates:Goal"]
    lengths = [length for segments in received for length in segments.episodes.lengths.tolist()]
    assert set(lengths) <= {LENGTH, LENGTH + 1, LENGTH + 2}  # whole ones only; the first of an area may be longer
    cut = [flag for segments in received for flag in segments.interrupted.tolist()]
    assert (mode == "overlap") <= sum(cut) <= 3 * 3  # what the reset breaks off; in lockstep all had just been cut


@pytest.mark.anyio
async def test_a_simulator_that_comes_later_gets_the_present_values(tmp_path: Path) -> None:
    """In its first Reset, number and sampler."""
    lessons = curriculum(
        (1.0, {"measure": "progress", "threshold": 0.2}),
        ({"sampler_type": "uniform", "sampler_parameters": {"min_value": 7, "max_value": 9}}, None),
    )
    first, late = Pupil(), Pupil()
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        witness = Witness()
        witness.install(stack.enter_context(pytest.MonkeyPatch.context()))
        changed = witness.trap(lambda _board, _key, record: isinstance(record, LessonsState) and record.serial == 1)
        play = await begin(tasks, stack, tmp_path, [first], plain_settings({"level": lessons}), witness=witness)
        await changed.wait()
        await anyio.sleep(0.1)
        tasks.start_soon(play.graph.simulate, 1, late)
        await play.graph.finish()
        tasks.cancel_scope.cancel()
    check_step_counts(play)
    assert len(first.resets) == len(late.resets) == 1
    assert first.levels[0] == 1.0
    assert all(7 <= level <= 9 for level in [*late.levels, *first.levels[-3:]])
    drawn = late.levels + [level for level in first.levels if level != 1.0]
    assert len(set(drawn)) == len(drawn), "each episode has a draw of its own, and each simulator a seed"


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
async def test_a_killed_service_loses_no_lesson(tmp_path: Path, part: str, mode: str) -> None:
    """It is killed just after the second lesson was told of; no episode begins in the first one again."""
    pupils = [Pupil(), Pupil()]
    lessons = curriculum(
        (1.0, {"measure": "progress", "threshold": 0.3, "require_reset": True}),
        (2.0, {"measure": "progress", "threshold": 0.6, "min_lesson_length": 5}),
        (3.0, None),
    )
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        witness = Witness()
        witness.install(stack.enter_context(pytest.MonkeyPatch.context()))
        changed = witness.trap(lambda _board, _key, record: isinstance(record, LessonsState) and record.serial == 1)
        plain = plain_settings({"level": lessons}, mode=mode)
        play = await begin(tasks, stack, tmp_path, pupils, plain, witness=witness)
        await changed.wait()
        await play.graph.kill(part)
        await play.graph.finish()
        tasks.cancel_scope.cancel()
    check_step_counts(play)
    check_lessons_only_go_on(play)
    assert told(play)[-1].numbers == {"level": 2}
    connections = 2 if part == "stepping-0" else 1
    for pupil in pupils:
        assert never_fall(pupil.levels)
        assert pupil.levels[-1] == 3.0
        assert connections <= len(pupil.resets) <= connections + 1
        assert pupil.resets[-1].level == 2.0


@pytest.mark.anyio
async def test_a_first_reset_waits_until_the_lessons_are_known(tmp_path: Path) -> None:
    """Stepping and coordination die together, and only stepping is back when the simulator is."""
    pupil = Pupil()
    lessons = curriculum((1.0, {"measure": "progress", "threshold": 0.3}), (2.0, None))
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        play = await begin(tasks, stack, tmp_path, [pupil], plain_settings({"level": lessons}, max_steps=2000))
        await play.graph.until("Goal", lambda state: state.trained > 1000)
        play.graph.scopes["coordination"].cancel()
        await play.graph.ended["coordination"].wait()
        await play.graph.kill("stepping-0")
        await anyio.sleep(1)
        assert len(pupil.resets) == 1
        play.graph.start("coordination")
        await play.graph.finish()
        tasks.cancel_scope.cancel()
    check_step_counts(play)
    assert [reset.level for reset in pupil.resets] == [1.0, 2.0]
    assert pupil.levels[-1] == 2.0


@pytest.mark.anyio
async def test_a_resumed_run_goes_on_in_its_lesson(tmp_path: Path) -> None:
    """The simulators are new, and their first Reset has the value of the lesson that the run had come to."""
    lessons = curriculum(
        (1.0, {"measure": "progress", "threshold": 0.1}),
        (2.0, {"measure": "progress", "threshold": 0.9}),
        (3.0, None),
    )
    plain = plain_settings({"level": lessons}, max_steps=3000)
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        play = await begin(tasks, stack, tmp_path, [Pupil()], plain)
        await play.graph.until("Goal", lambda state: state.trained > 700)
        for name in play.graph.services:
            play.graph.stops[name].set()
            await play.graph.ended[name].wait()
        tasks.cancel_scope.cancel()
    assert told(play)[-1].numbers == {"level": 1}
    again = Pupil()
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        witness = Witness("b")
        witness.install(stack.enter_context(pytest.MonkeyPatch.context()))
        play = await begin(tasks, stack, tmp_path, [again], plain, witness=witness, resumed=True)
        await play.graph.finish()
        tasks.cancel_scope.cancel()
    check_step_counts(play)
    assert again.resets[0].level == again.levels[0] == 2.0
    assert again.levels[-1] == 3.0
    assert [state.numbers["level"] for state in told(play)] == [1, 2]


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
async def test_lockstep_with_a_curriculum_repeats_itself_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Whatever the simulators' pace, and in whatever order tasks run that are ready together."""
    found = []
    plain = plain_settings({"gravity": GRAVITY}, names=("Balance",), mode="lockstep", max_steps=1500)
    for order, frame_s in enumerate((0.001, 0.03)):
        same_order(monkeypatch, order)
        games = [Balance(areas=4) for _ in range(count)]
        play = await whole(tmp_path_factory.mktemp("run"), games, plain, frame_s=frame_s)
        check_step_counts(play)
        check_lessons_only_go_on(play)
        resets = [game.resets for game in play.games]
        assert resets == [[2]] * count
        assert told(play)[-1].numbers == {"gravity": 2}
        found.append(play.graph.latest("learning-Balance", "state").weights_sha256)
    assert found[0] == found[1]
    still = plain_settings({"gravity": 2.0}, names=("Balance",), mode="lockstep", max_steps=1500)
    play = await whole(tmp_path_factory.mktemp("run"), [Balance(areas=4) for _ in range(count)], still)
    assert play.graph.latest("learning-Balance", "state").weights_sha256 != found[0]
