"""When lessons end: examples, and what holds whatever happens."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.pipeline.coordination.lessons import (
    MOST_RECENT,
    RECENT,
    Change,
    Criterion,
    Lesson,
    Lessons,
    Measure,
    WeightsUpdate,
)
from sparring.pipeline.messages.segments import Episodes


def lesson(number: int, criterion: Criterion | None = None) -> Lesson:
    return Lesson(name=f"lesson{number}", value=str(number), criterion=criterion)


def criterion(
    measure: Measure = "reward",
    threshold: float = 1.0,
    *,
    behavior: str = "A",
    smoothed: bool = False,
    episodes: int = 0,
    resets: bool = False,
) -> Criterion:
    return Criterion(
        measure=measure, behavior=behavior, threshold=threshold, smoothed=smoothed, episodes=episodes, resets=resets
    )


def curriculum(*criteria: Criterion) -> list[Lesson]:
    """A lesson for each, and a last one."""
    return [*(lesson(number, one) for number, one in enumerate(criteria)), lesson(len(criteria))]


def episodes(returns: Sequence[float], serial: int | Sequence[int] = 0) -> Episodes:
    """Episodes that began in the lessons of `serial`."""
    n = len(returns)
    return Episodes(
        returns=np.array(returns, np.float32),
        lengths=np.ones(n, np.int32),
        group_returns=np.zeros(0, np.float32),
        teams=np.zeros(n, np.int32),
        outcomes=np.full(n, -1, np.float32),
        lessons=np.broadcast_to(np.array(serial, np.int64), n).copy(),
    )


class School:
    """Lessons whose behaviors are updated one after the other."""

    def __init__(self, **curricula: list[Lesson]) -> None:
        self.lessons = Lessons(curricula)
        self.version = 0
        self.produced: dict[str, int] = {}

    def update(
        self, behavior: str = "A", *, progress: float = 0.0, rating: float | None = None, stale: bool = False
    ) -> list[Change]:
        """New weights made of all that was produced."""
        self.version += not stale
        if not stale:
            self.produced[behavior] = self.produced.get(behavior, 0) + 10
        done = self.produced.get(behavior, 0)
        update = WeightsUpdate(version=self.version, progress=progress, rating=rating, done=done)
        return self.lessons.updated(behavior, update, self.produced)

    def number(self, name: str = "x") -> int:
        return self.lessons.state.numbers[name]


def test_a_mean_return_above_the_threshold_ends_the_lesson_and_equal_to_it_does_not() -> None:
    school = School(x=curriculum(criterion(threshold=2.0)))
    school.lessons.ended("A", episodes([1.0, 3.0]))
    assert school.update() == []
    school.lessons.ended("A", episodes([2.5]))
    (change,) = school.update()
    assert (change.parameter, change.number, change.lesson.name) == ("x", 1, "lesson1")
    assert change.measure == pytest.approx(6.5 / 3)
    school.lessons.ended("A", episodes([9.0], 1))
    assert school.update() == [], "the last lesson has no end"


def test_without_episodes_there_is_no_mean_return() -> None:
    school = School(x=curriculum(criterion(threshold=-5.0)))
    assert school.update() == []


def test_a_lesson_has_its_least_number_of_episodes_whatever_is_measured() -> None:
    for measure in ("reward", "progress", "rating"):
        school = School(x=curriculum(criterion(measure, 0.5, episodes=3)))  # type: ignore[arg-type]
        for count in (1, 2, 3):
            school.lessons.ended("A", episodes([7.0]))
            assert len(school.update(progress=0.9, rating=9.0)) == (count == 3), measure


def test_the_mean_is_of_the_last_episodes_as_many_as_the_lesson_needs() -> None:
    school = School(x=curriculum(criterion(threshold=2.0, episodes=2)))
    school.lessons.ended("A", episodes([0.0, 0.0, 0.0, 2.0, 2.5]))
    assert school.update()[0].measure == 2.25


def test_the_mean_is_of_up_to_a_hundred_where_it_needs_none_and_of_a_thousand_at_most() -> None:
    for least, recent in ((0, RECENT), (5000, MOST_RECENT)):
        school = School(x=curriculum(criterion(threshold=0.99, episodes=least)))
        school.lessons.ended("A", episodes([-9.0] * 5000 + [1.0] * (recent - 1)))
        assert school.update() == []
        school.lessons.ended("A", episodes([1.0]))
        assert school.update()[0].measure == 1.0


def test_smoothing_weighs_three_to_one_and_begins_with_the_first_measure_of_each_lesson() -> None:
    school = School(x=curriculum(criterion(threshold=-3.5, smoothed=True, episodes=1), criterion(smoothed=True)))
    school.lessons.ended("A", episodes([-4.0]))
    assert school.update() == [], "from 0 it would be -3"
    school.lessons.ended("A", episodes([-2.0]))
    assert school.update()[0].measure == 0.75 * -2.0 + 0.25 * -4.0
    school.lessons.ended("A", episodes([1.5], 1))
    assert school.update()[0].measure == 1.5


def test_progress_and_rating_are_taken_as_they_are() -> None:
    school = School(x=curriculum(criterion("progress", 0.5, smoothed=True), criterion("rating", 1250.0, smoothed=True)))
    assert school.update(progress=0.5) == []
    assert school.update(progress=0.51)[0].measure == 0.51
    assert school.update(rating=None) == []
    assert school.update(rating=1250.0) == []
    assert school.update(rating=1250.5)[0].measure == 1250.5


def test_lessons_advance_by_one_with_each_update() -> None:
    school = School(x=curriculum(*[criterion("progress", 0.1)] * 3))
    for number in (1, 2, 3, 3):
        school.update(progress=1.0)
        assert school.number() == number
    assert school.lessons.serial == 3


def test_the_same_weights_are_asked_for_once() -> None:
    """The learner says several times where it stands."""
    school = School(x=curriculum(*[criterion("progress", 0.1)] * 2))
    assert school.update(progress=1.0)
    assert school.update(progress=1.0, stale=True) == []
    assert school.number() == 1


def test_a_behavior_ends_only_lessons_that_measure_it() -> None:
    school = School(x=curriculum(criterion("progress", 0.1)), y=curriculum(criterion("progress", 0.1, behavior="B")))
    school.lessons.ended("B", episodes([1.0]))
    assert [change.parameter for change in school.update("B", progress=1.0)] == ["y"]
    assert (school.number("x"), school.number("y")) == (0, 1)
    assert school.lessons.numbers("A") == {"x": 0}
    assert school.lessons.numbers("B") == {"y": 1}
    assert school.lessons.numbers("C") == {}


def test_episodes_that_began_before_the_lesson_do_not_count() -> None:
    school = School(x=curriculum(criterion(episodes=1), criterion(episodes=2)))
    school.lessons.ended("A", episodes([5.0]))
    assert school.update()
    school.lessons.ended("A", episodes([5.0] * 9, 0))
    assert school.update() == []
    school.lessons.ended("A", episodes([5.0, 5.0, 5.0], [0, 1, 1]))
    assert school.update()


def test_a_change_lets_the_other_lessons_of_its_behavior_count_anew() -> None:
    """What it earned was earned under another parameter."""
    school = School(x=curriculum(criterion(threshold=1.0)), y=curriculum(criterion(threshold=4.0, episodes=3)))
    school.lessons.ended("A", episodes([2.0, 2.0]))
    assert [change.parameter for change in school.update()] == ["x"]
    school.lessons.ended("A", episodes([9.0, 9.0], [0, 1]))
    assert school.update() == []
    school.lessons.ended("A", episodes([9.0, 9.0], 1))
    assert [change.parameter for change in school.update()] == ["y"]


def test_two_lessons_may_end_with_one_update() -> None:
    school = School(x=curriculum(criterion("progress", 0.1)), y=curriculum(criterion("progress", 0.2, resets=True)))
    assert [change.parameter for change in school.update(progress=0.5)] == ["x", "y"]
    state = school.lessons.state
    assert (state.serial, state.resets, state.since) == (2, 2, {"x": 1, "y": 2})


def test_the_lesson_that_ends_says_whether_all_begin_anew() -> None:
    school = School(x=curriculum(criterion("progress", 0.1), criterion("progress", 0.1, resets=True)))
    resets = []
    for _ in range(3):
        school.update(progress=1.0)
        resets.append(school.lessons.state.resets)
    assert resets == [0, 2, 2]


@pytest.mark.parametrize("first", ["A", "B"])
def test_the_order_in_which_two_behaviors_are_heard_of_decides_nothing(first: str) -> None:
    """In lockstep both have used all they had; which of the two updates is heard of first is chance."""
    second = "B" if first == "A" else "A"
    school = School(
        x=curriculum(criterion("progress", 0.1, behavior="A"), criterion("progress", 0.1, behavior="B")),
        y=curriculum(criterion("progress", 0.1, behavior="B")),
    )
    school.produced = {"A": 40, "B": 50}

    def update(behavior: str, version: int) -> None:
        one = WeightsUpdate(version=version, progress=0.5, rating=None, done=school.produced[behavior])
        school.lessons.updated(behavior, one, school.produced)

    update(first, 2)
    update(second, 2)
    assert school.lessons.state.numbers == {"x": 1, "y": 1}
    school.produced["B"] += 10
    update("B", 3)
    assert school.lessons.state.numbers == {"x": 2, "y": 1}


def test_a_curriculum_that_is_shorter_now_is_in_its_last_lesson() -> None:
    school = School(x=curriculum(*[criterion("progress", 0.1)] * 3))
    for _ in range(3):
        school.update(progress=1.0)
    shorter = Lessons({"x": curriculum(criterion("progress", 0.1)), "new": curriculum(criterion())})
    shorter.restore(json.loads(json.dumps(school.lessons.to_plain())))
    assert shorter.state.numbers == {"x": 1, "new": 0}
    assert shorter.serial == 3


CRITERIA = st.builds(
    Criterion,
    measure=st.sampled_from(["reward", "progress", "rating"]),
    behavior=st.sampled_from(["A", "B"]),
    threshold=st.floats(-2, 2),
    smoothed=st.booleans(),
    episodes=st.integers(0, 5),
    resets=st.booleans(),
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
def test_lessons_only_go_on_by_one_and_a_restart_changes_nothing(criteria: list[list[Criterion]], events: list) -> None:
    """Serials count every change; a lesson has had its episodes; a twin that is never restarted decides the same."""
    curricula = {f"p{number}": curriculum(*own) for number, own in enumerate(criteria)}
    lessons, twin = Lessons(curricula), Lessons(curricula)
    version = done = 0
    for kind, behavior, value in events:
        before = lessons.state
        if kind == "killed":
            saved = json.loads(json.dumps(lessons.to_plain()))
            lessons = Lessons(curricula)
            lessons.restore(saved)
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
            criteria[int(name[1:])][before.numbers[name]].resets
            for name in curricula
            if after.numbers[name] > before.numbers[name]
        )
        assert json.dumps(lessons.to_plain()) == json.dumps(twin.to_plain())
