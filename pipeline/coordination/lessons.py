"""The rules, without I/O, of which lesson each curriculum of an environment parameter is in.

    lesson ends    when its measure is above its threshold, asked after each update of its behavior
    measure        reward: mean return of recent episodes that began in the lesson; progress: share of `max_steps`;
                   rating: of the learner

Lessons only advance, one at a time. Time is that of the weights: in lockstep no simulator plays during the question, so
the answer depends on nothing that is still in flight.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Self

from sparring.pipeline.coordination.settings import CompletionCriteria
from sparring.pipeline.messages.state import EpisodeReturns, LessonsState

RECENT: Final = 100
"""Episodes of a mean return, where a lesson has no least length."""
MOST_RECENT: Final = 1000
"""Most episodes of a mean return, because they are kept on disk."""
WEIGHT: Final = 0.75
"""Weight of a new measure in a smoothed one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """One lesson of a curriculum.

    Attributes:
        name: for logs.
        value: of the parameter, for logs.
        criterion: when it is over; None for the last.
    """

    name: str
    value: str
    criterion: CompletionCriteria | None = None


class WeightsUpdate(NamedTuple):
    """What new weights of a behavior change for its lessons.

    Attributes:
        version: of these.
        progress: steps trained as a share of `max_steps`.
        rating: of the learner; None without self-play.
        done: steps of the behavior that are no longer in flight.
    """

    version: int
    progress: float
    rating: float | None
    done: int


class Change(NamedTuple):
    """The change of a parameter to its next lesson, as it is logged.

    Attributes:
        parameter: name.
        lesson: name of the lesson.
        number: of the lesson, from 0.
        value: of the parameter.
        measure: of the lesson before.
    """

    parameter: str
    lesson: str
    number: int
    value: str
    measure: float


@dataclass(slots=True)
class LessonProgress:
    """The progress of one curriculum.

    Attributes:
        number: of its lesson.
        since: serial of the change that this began with.
        counted: serial of the lessons from which on episodes count.
        mark: steps its behavior had produced when the lesson began: no update made of these alone ends it.
        episodes: that began and ended since.
        returns: of the latest.
        smoothed: the measure when it was last taken; None before.
    """

    number: int = 0
    since: int = 0
    counted: int = 0
    mark: int = 0
    episodes: int = 0
    returns: list[float] = field(default_factory=list)
    smoothed: float | None = None


@dataclass(slots=True)
class Lessons:
    """Decides the lessons of one run; it is saved as it is.

    Attributes:
        curricula: lessons by parameter name, at least one each; all but the last have a criterion.
        serial: counts changes.
        resets: serial of the last that asks for new episodes.
        progress: by parameter name.
        asked: version of each behavior for which it was last asked.
    """

    curricula: dict[str, tuple[Lesson, ...]] = field(default_factory=dict)
    serial: int = 0
    resets: int = 0
    progress: dict[str, LessonProgress] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.curricula:
            self.progress.setdefault(name, LessonProgress())

    @property
    def state(self) -> LessonsState:
        """The state that stepping needs."""
        numbers = {name: one.number for name, one in self.progress.items()}
        since = {name: one.since for name, one in self.progress.items()}
        return LessonsState(serial=self.serial, numbers=numbers, since=since, resets=self.resets)

    def numbers(self, behavior: str) -> dict[str, int]:
        """Returns the number of the present lesson of each parameter that depends on a behavior."""
        return {
            name: self.progress[name].number
            for name, lessons in self.curricula.items()
            if any(lesson.criterion is not None and lesson.criterion.behavior == behavior for lesson in lessons)
        }

    def continue_from(self, saved: Self) -> Self:
        """Returns the saved lessons in these curricula; one that is now shorter is in its last lesson."""
        progress = {
            name: replace(one, number=min(one.number, len(self.curricula[name]) - 1))
            for name, one in saved.progress.items()
            if name in self.curricula
        }
        return replace(saved, curricula=self.curricula, progress=progress)

    # ---------------------------------------------------------------- what arrives

    def ended(self, behavior: str, episodes: EpisodeReturns) -> None:
        """Counts episodes of learning agents that ended."""
        for name, criterion in self._measuring(behavior).items():
            if len(episodes.lessons):
                progress = self.progress[name]
                found = episodes.returns[episodes.lessons >= progress.counted].tolist()
                progress.episodes += len(found)
                recent = min(criterion.min_lesson_length, MOST_RECENT) or RECENT
                progress.returns = [*progress.returns, *found][-recent:]

    def updated(self, behavior: str, update: WeightsUpdate, produced: Mapping[str, int]) -> list[Change]:
        """Ends the lessons that an update of a behavior completes.

        Args:
            behavior: name.
            update: what came of it.
            produced: steps of each behavior so far, by name.
        """
        if update.version <= self.asked.get(behavior, 0):
            return []
        self.asked[behavior] = update.version
        measuring = self._measuring(behavior)
        found = {name: _measure(criterion, self.progress[name], update) for name, criterion in measuring.items()}
        changes = [
            self._next(name, measuring[name], measure, produced)
            for name, measure in found.items()
            if measure is not None and measure > measuring[name].threshold
        ]
        if changes:
            for name in self._measuring(behavior):  # returns in other lessons do not measure the present ones
                progress = self.progress[name]
                progress.counted, progress.episodes, progress.returns = self.serial, 0, []
        return changes

    # ---------------------------------------------------------------- inside

    def _measuring(self, behavior: str) -> dict[str, CompletionCriteria]:
        """Returns the criterion of each present lesson that measures a behavior; the last lessons have none."""
        found = {}
        for name, lessons in self.curricula.items():
            number = self.progress[name].number
            criterion = lessons[number].criterion if number + 1 < len(lessons) else None
            if criterion is not None and criterion.behavior == behavior:
                found[name] = criterion
        return found

    def _next(self, name: str, former: CompletionCriteria, measure: float, produced: Mapping[str, int]) -> Change:
        """Changes a parameter to the lesson after the one that `former` ends."""
        number = self.progress[name].number + 1
        lesson = self.curricula[name][number]
        self.serial += 1
        if former.require_reset:
            self.resets = self.serial
        self.progress[name] = LessonProgress(number=number, since=self.serial, counted=self.serial)
        if lesson.criterion is not None and lesson.criterion.behavior != former.behavior:
            self.progress[name].mark = produced.get(lesson.criterion.behavior, 0)
        return Change(parameter=name, lesson=lesson.name, number=number, value=lesson.value, measure=measure)


def _measure(criterion: CompletionCriteria, progress: LessonProgress, update: WeightsUpdate) -> float | None:
    """Returns the present measure of a lesson; None before there is any, or while the lesson may not end.

    Smoothing begins with the first measure of the lesson: from 0 a lesson of negative returns would be over at once.
    """
    if update.done <= progress.mark or progress.episodes < criterion.min_lesson_length:
        return None
    if criterion.measure == "progress":
        return update.progress
    if criterion.measure == "rating":
        return update.rating
    if not progress.returns:
        return None
    mean = sum(progress.returns) / len(progress.returns)
    if not criterion.signal_smoothing:
        return mean
    last = mean if progress.smoothed is None else progress.smoothed
    progress.smoothed = WEIGHT * mean + (1 - WEIGHT) * last
    return progress.smoothed
