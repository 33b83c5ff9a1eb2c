"""Ends of lessons: examples, and properties of any history."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.pipeline.coordination.lessons import (
    MOST_RECENT,
    RECENT,
    Change,
    Lesson,
    Lessons,
    WeightsUpdate,
)
from sparring.pipeline.coordination.settings import CompletionCriteria, Measure
from sparring.pipeline.messages.state import EpisodeReturns
from tests.coordination.ledger_parts import through_json


def lesson(number: int, criterion: CompletionCriteria | None = None) -> Lesson:
    return Lesson(name=f"lesson{number}", value=str(number), criterion=criterion)


def criterion(
    measure: Measure = "reward",
    threshold: float = 1.0,
    *,
    behavior: str = "A",
    smoothed: bool = False,
    episodes: int = 0,
    resets: bool = False,
) -> CompletionCriteria:
    return CompletionCriteria(
        measure=measure,
        behavior=behavior,
        threshold=threshold,
        signal_smoothing=smoothed,
        min_lesson_length=episodes,
        require_reset=resets,
    )


def curriculum(*criteria: CompletionCriteria) -> tuple[Lesson, ...]:
    """Returns a lesson for each criterion, and a last one."""
    return *(lesson(number, one) for number, one in enumerate(criteria)), lesson(len(criteria))


def episodes(returns: Sequence[float], serial: int | Sequence[int] = 0) -> EpisodeReturns:
    """Returns episodes that began in the lessons of `serial`."""
    return EpisodeReturns(
        start="learning-A.5f3a-1",
        episodes=len(returns),
        returns=np.array(returns, np.float32),
        lessons=np.broadcast_to(np.array(serial, np.int64), len(returns)).copy(),
    )


class UpdatedLessons:
    """Lessons whose behaviors are updated in turn."""

    def __init__(self, **curricula: tuple[Lesson, ...]) -> None:
        self.lessons = Lessons(curricula)
        self.version = 0
        self.produced: dict[str, int] = {}

    def update(
        self, behavior: str = "A", *, progress: float = 0.0, rating: float | None = None, stale: bool = False
    ) -> list[Change]:
        """Publishes new weights, trained on all produced steps."""
        self.version += not stale
        if not stale:
            self.produced[behavior] = self.produced.get(behavior, 0) + 10
        done = self.produced.get(behavior, 0)
        update = WeightsUpdate(version=self.version, progress=progress, rating=rating, done=done)
        return self.lessons.updated(behavior, update, self.produced)

    def number(self, name: str = "x") -> int:
        return self.lessons.state.numbers[name]


def test_a_mean_return_above_the_threshold_ends_the_lesson_and_equal_to_it_does_not() -> None:
    trained = UpdatedLessons(x=curriculum(criterion(threshold=2.0)))
    trained.lessons.ended("A", episodes([1.0, 3.0]))
    assert trained.update() == []
    trained.lessons.ended("A", episodes([2.5]))
    (change,) = trained.update()
    assert (change.parameter, change.number, change.lesson) == ("x", 1, "lesson1")
    assert change.measure == pytest.approx(6.5 / 3)
    trained.lessons.ended("A", episodes([9.0], 1))
    assert trained.update() == [], "the last lesson has no end"


def test_without_episodes_there_is_no_mean_return() -> None:
    trained = UpdatedLessons(x=curriculum(criterion(threshold=-5.0)))
    assert trained.update() == []


def test_a_lesson_has_its_least_number_of_episodes_with_any_measure() -> None:
    for measure in ("reward", "progress", "rating"):
        trained = UpdatedLessons(x=curriculum(criterion(measure, 0.5, episodes=3)))  # type: ignore[arg-type]
        for count in (1, 2, 3):
            trained.lessons.ended("A", episodes([7.0]))
            assert len(trained.update(progress=0.9, rating=9.0)) == (count == 3), measure


def test_the_mean_covers_as_many_episodes_as_the_lesson_needs() -> None:
    trained = UpdatedLessons(x=curriculum(criterion(threshold=2.0, episodes=2)))
    trained.lessons.ended("A", episodes([0.0, 0.0, 0.0, 2.0, 2.5]))
    assert trained.update()[0].measure == 2.25


def test_the_mean_covers_100_episodes_by_default_and_1000_at_most() -> None:
    for least, recent in ((0, RECENT), (5000, MOST_RECENT)):
        trained = UpdatedLessons(x=curriculum(criterion(threshold=0.99, episodes=least)))
        trained.lessons.ended("A", episodes([-9.0] * 5000 + [1.0] * (recent - 1)))
        assert trained.update() == []
        trained.lessons.ended("A", episodes([1.0]))
        assert trained.update()[0].measure == 1.0


def test_smoothing_weighs_three_to_one_and_restarts_with_each_lesson() -> None:
    trained = UpdatedLessons(
        x=curriculum(criterion(threshold=-3.5, smoothed=True, episodes=1), criterion(smoothed=True))
    )
    trained.lessons.ended("A", episodes([-4.0]))
    assert trained.update() == [], "from 0 it would be -3"
    trained.lessons.ended("A", episodes([-2.0]))
    assert trained.update()[0].measure == 0.75 * -2.0 + 0.25 * -4.0
    trained.lessons.ended("A", episodes([1.5], 1))
    assert trained.update()[0].measure == 1.5


def test_progress_and_rating_are_not_smoothed() -> None:
    trained = UpdatedLessons(
        x=curriculum(criterion("progress", 0.5, smoothed=True), criterion("rating", 1250.0, smoothed=True))
    )
    assert trained.update(progress=0.5) == []
    assert trained.update(progress=0.51)[0].measure == 0.51
    assert trained.update(rating=None) == []
    assert trained.update(rating=1250.0) == []
    assert trained.update(rating=1250.5)[0].measure == 1250.5


def test_lessons_advance_by_one_with_each_update() -> None:
    trained = UpdatedLessons(x=curriculum(*[criterion("progress", 0.1)] * 3))
    for number in (1, 2, 3, 3):
        trained.update(progress=1.0)
        assert trained.number() == number
    assert trained.lessons.serial == 3


def test_the_same_weights_count_once() -> None:
    """The learner repeats its state."""
    trained = UpdatedLessons(x=curriculum(*[criterion("progress", 0.1)] * 2))
    assert trained.update(progress=1.0)
    assert trained.update(progress=1.0, stale=True) == []
    assert trained.number() == 1


def test_a_behavior_ends_only_lessons_that_measure_it() -> None:
    trained = UpdatedLessons(
        x=curriculum(criterion("progress", 0.1)), y=curriculum(criterion("progress", 0.1, behavior="B"))
    )
    trained.lessons.ended("B", episodes([1.0]))
    assert [change.parameter for change in trained.update("B", progress=1.0)] == ["y"]
    assert (trained.number("x"), trained.number("y")) == (0, 1)
    assert trained.lessons.numbers("A") == {"x": 0}
    assert trained.lessons.numbers("B") == {"y": 1}
    assert trained.lessons.numbers("C") == {}


def test_episodes_that_began_before_the_lesson_do_not_count() -> None:
    trained = UpdatedLessons(x=curriculum(criterion(episodes=1), criterion(episodes=2)))
    trained.lessons.ended("A", episodes([5.0]))
    assert trained.update()
    trained.lessons.ended("A", episodes([5.0] * 9, 0))
    assert trained.update() == []
    trained.lessons.ended("A", episodes([5.0, 5.0, 5.0], [0, 1, 1]))
    assert trained.update()


def test_a_change_restarts_the_other_lessons_of_its_behavior() -> None:
    """Earlier returns belong to another parameter."""
    trained = UpdatedLessons(x=curriculum(criterion(threshold=1.0)), y=curriculum(criterion(threshold=4.0, episodes=3)))
    trained.lessons.ended("A", episodes([2.0, 2.0]))
    assert [change.parameter for change in trained.update()] == ["x"]
    trained.lessons.ended("A", episodes([9.0, 9.0], [0, 1]))
    assert trained.update() == []
    trained.lessons.ended("A", episodes([9.0, 9.0], 1))
    assert [change.parameter for change in trained.update()] == ["y"]


def test_two_lessons_may_end_with_one_update() -> None:
    trained = UpdatedLessons(
        x=curriculum(criterion("progress", 0.1)), y=curriculum(criterion("progress", 0.2, resets=True))
    )
    assert [change.parameter for change in trained.update(progress=0.5)] == ["x", "y"]
    state = trained.lessons.state
    assert (state.serial, state.resets, state.since) == (2, 2, {"x": 1, "y": 2})


def test_the_lesson_that_ends_decides_whether_agents_are_reset() -> None:
    trained = UpdatedLessons(x=curriculum(criterion("progress", 0.1), criterion("progress", 0.1, resets=True)))
    resets = []
    for _ in range(3):
        trained.update(progress=1.0)
        resets.append(trained.lessons.state.resets)
    assert resets == [0, 2, 2]


@pytest.mark.parametrize("first", ["A", "B"])
def test_lessons_do_not_depend_on_the_order_of_two_updates(first: str) -> None:
    """In lockstep both behaviors have used all their steps, and either update may arrive first."""
    second = "B" if first == "A" else "A"
    trained = UpdatedLessons(
        x=curriculum(criterion("progress", 0.1, behavior="A"), criterion("progress", 0.1, behavior="B")),
        y=curriculum(criterion("progress", 0.1, behavior="B")),
    )
    trained.produced = {"A": 40, "B": 50}

    def update(behavior: str, version: int) -> None:
        one = WeightsUpdate(version=version, progress=0.5, rating=None, done=trained.produced[behavior])
        trained.lessons.updated(behavior, one, trained.produced)

    update(first, 2)
    update(second, 2)
    assert trained.lessons.state.numbers == {"x": 1, "y": 1}
    trained.produced["B"] += 10
    update("B", 3)
    assert trained.lessons.state.numbers == {"x": 2, "y": 1}


def test_a_shortened_curriculum_is_in_its_last_lesson() -> None:
    trained = UpdatedLessons(x=curriculum(*[criterion("progress", 0.1)] * 3))
    for _ in range(3):
        trained.update(progress=1.0)
    present = Lessons({"x": curriculum(criterion("progress", 0.1)), "new": curriculum(criterion())})
    shorter = present.continue_from(through_json(trained.lessons))
    assert shorter.state.numbers == {"x": 1, "new": 0}
    assert shorter.serial == 3


MEASURES: list[tuple[Measure, float]] = [("reward", -2), ("rating", -2), ("progress", 0)]
CRITERIA = st.one_of(
    st.builds(
        CompletionCriteria,
        measure=st.just(measure),
        behavior=st.sampled_from(["A", "B"]),
        threshold=st.floats(least, 1),
        signal_smoothing=st.booleans(),
        min_lesson_length=st.integers(0, 5),
        require_reset=st.booleans(),
    )
    for measure, least in MEASURES
)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("ended"), st.sampled_from(["A", "B"]), st.lists(st.floats(-3, 3), max_size=6)),
        st.tuples(st.just("updated"), st.sampled_from(["A", "B"]), st.floats(0, 1)),
        st.tuples(st.just("killed"), st.just(""), st.just(0.0)),
    ),
    max_size=60,
)


@given(st.lists(st.lists(CRITERIA, max_size=4), min_size=1, max_size=3), EVENTS)
def test_lessons_advance_by_one_and_a_restart_changes_nothing(
    criteria: list[list[CompletionCriteria]], events: list
) -> None:
    """Serials count every change, and a twin that is never restarted decides the same."""
    curricula = {f"p{number}": curriculum(*own) for number, own in enumerate(criteria)}
    lessons, twin = Lessons(curricula), Lessons(curricula)
    version = done = 0
    for kind, behavior, value in events:
        before = lessons.state
        if kind == "killed":
            lessons = Lessons(curricula).continue_from(through_json(lessons))
        elif kind == "ended":
            for one in (lessons, twin):
                one.ended(behavior, episodes(value, one.serial))
        else:
            version, done = version + 1, done + 10
            update = WeightsUpdate(version=version, progress=value, rating=3 * value, done=done)
            changes = lessons.updated(behavior, update, {"A": done, "B": done})
            assert changes == twin.updated(behavior, update, {"A": done, "B": done})
            for change in changes:
                ended = criteria[int(change.parameter[1:])][change.number - 1]
                assert ended.behavior == behavior
                assert change.measure > ended.threshold
                assert change.number == before.numbers[change.parameter] + 1
                assert lessons.state.since[change.parameter] > before.serial
            assert lessons.serial == before.serial + len(changes)
        after = lessons.state
        assert (after.resets > before.resets) == any(
            criteria[int(name[1:])][before.numbers[name]].require_reset
            for name in curricula
            if after.numbers[name] > before.numbers[name]
        )
        assert lessons == twin
