"""The rules, without I/O, of which lesson each curriculum of an environment parameter is in.

    lesson ends    when its measure is above its threshold, asked after each update of its behavior
    measure        reward: mean return of recent episodes that began in the lesson; progress: share of `max_steps`;
                   rating: of the learner

Lessons only advance, one at a time. Time is that of the weights: in lockstep no simulator plays during the question, so
the answer depends on nothing that is still in flight.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from sparring.pipeline.messages.state import EpisodeReturns, LessonsState

Measure = Literal["reward", "progress", "rating"]

RECENT: Final = 100
"""Episodes of a mean return, where a lesson has no least length."""
MOST_RECENT: Final = 1000
"""Most episodes of a mean return, because they are kept on disk."""
WEIGHT: Final = 0.75
"""Weight of a new measure in a smoothed one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Criterion:
    """The condition that ends a lesson.

    Attributes:
        measure: what is measured.
        behavior: name whose.
        threshold: the lesson is over above it.
        smoothed: the measure is averaged with its last value.
        episodes: that must have ended before.
        resets: all agents begin new episodes with the next lesson.
    """

    measure: Measure
    behavior: str
    threshold: float
    smoothed: bool = True
    episodes: int = 0
    resets: bool = False

    @property
    def recent(self) -> int:
        """Number of episodes of the mean return."""
        return min(self.episodes, MOST_RECENT) or RECENT


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
    criterion: Criterion | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsUpdate:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """The change of a parameter to its next lesson.

    Attributes:
        parameter: name.
        number: of the lesson, from 0.
        lesson: the lesson.
        measure: of the one before.
    """

    parameter: str
    number: int
    lesson: Lesson
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


class Lessons:
    """Decides the lessons of one run.

    Args:
        curricula: lessons by parameter name, at least one each; all but the last have a criterion.

    Attributes:
        serial: counts changes.
        resets: serial of the last that asks for new episodes.
    """

    def __init__(self, curricula: Mapping[str, Sequence[Lesson]]) -> None:
        self.serial = 0
        self.resets = 0
        self._curricula = {name: tuple(lessons) for name, lessons in curricula.items()}
        self._standings = {name: LessonProgress() for name in self._curricula}
        self._asked: dict[str, int] = {}  # version of each behavior for which it was last asked

    @property
    def state(self) -> LessonsState:
        """The state that stepping needs."""
        return LessonsState(
            serial=self.serial,
            numbers={name: one.number for name, one in self._standings.items()},
            since={name: one.since for name, one in self._standings.items()},
            resets=self.resets,
        )

    def numbers(self, behavior: str) -> dict[str, int]:
        """Returns the number of the present lesson of each parameter that depends on a behavior."""
        return {
            name: self._standings[name].number
            for name, lessons in self._curricula.items()
            if any(lesson.criterion is not None and lesson.criterion.behavior == behavior for lesson in lessons)
        }

    # ---------------------------------------------------------------- what arrives

    def ended(self, behavior: str, episodes: EpisodeReturns) -> None:
        """Counts episodes of learning agents that ended."""
        for name, standing in self._standings.items():
            criterion = self._criterion(name)
            if criterion is None or criterion.behavior != behavior or not len(episodes.lessons):
                continue
            found = episodes.returns[episodes.lessons >= standing.counted].tolist()
            standing.episodes += len(found)
            standing.returns = [*standing.returns, *found][-criterion.recent :]

    def updated(self, behavior: str, update: WeightsUpdate, produced: Mapping[str, int]) -> list[Change]:
        """Ends the lessons that an update of a behavior completes.

        Args:
            behavior: name.
            update: what came of it.
            produced: steps of each behavior so far, by name.
        """
        if update.version <= self._asked.get(behavior, 0):
            return []
        self._asked[behavior] = update.version
        found = {name: self._over(name, behavior, update) for name in self._standings}
        changes = [self._next(name, measure, produced) for name, measure in found.items() if measure is not None]
        if changes:
            self._count_anew(behavior)
        return changes

    # ---------------------------------------------------------------- inside

    def _criterion(self, name: str) -> Criterion | None:
        """Returns the criterion of the present lesson; None for the last one."""
        lessons, number = self._curricula[name], self._standings[name].number
        return lessons[number].criterion if number + 1 < len(lessons) else None

    def _over(self, name: str, behavior: str, update: WeightsUpdate) -> float | None:
        """Returns the measure of a lesson that ends; None where it continues."""
        criterion, standing = self._criterion(name), self._standings[name]
        if criterion is None or criterion.behavior != behavior or update.done <= standing.mark:
            return None
        if standing.episodes < criterion.episodes:
            return None
        measure = _measure(criterion, standing, update)
        return measure if measure is not None and measure > criterion.threshold else None

    def _next(self, name: str, measure: float, produced: Mapping[str, int]) -> Change:
        former = self._criterion(name)
        number = self._standings[name].number + 1
        self.serial += 1
        if former is not None and former.resets:
            self.resets = self.serial
        self._standings[name] = LessonProgress(number=number, since=self.serial, counted=self.serial)
        criterion = self._criterion(name)
        if criterion is not None and former is not None and criterion.behavior != former.behavior:
            self._standings[name].mark = produced.get(criterion.behavior, 0)
        return Change(parameter=name, number=number, lesson=self._curricula[name][number], measure=measure)

    def _count_anew(self, behavior: str) -> None:
        """Discards the returns of a behavior in other lessons, which do not measure the present ones."""
        for name, standing in self._standings.items():
            criterion = self._criterion(name)
            if criterion is not None and criterion.behavior == behavior:
                standing.counted, standing.episodes, standing.returns = self.serial, 0, []

    # ---------------------------------------------------------------- on disk

    def to_plain(self) -> dict[str, Any]:
        """Returns all that a restart needs, as plain JSON values."""
        return {
            "serial": self.serial,
            "resets": self.resets,
            "asked": self._asked,
            "standings": {name: asdict(standing) for name, standing in self._standings.items()},
        }

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Continues from what `to_plain` returned; a curriculum that is now shorter is in its last lesson."""
        self.serial, self.resets, self._asked = plain["serial"], plain["resets"], dict(plain["asked"])
        for name, saved in plain["standings"].items():
            if name in self._standings:
                last = len(self._curricula[name]) - 1
                self._standings[name] = LessonProgress(**{**saved, "number": min(saved["number"], last)})


def _measure(criterion: Criterion, standing: LessonProgress, update: WeightsUpdate) -> float | None:
    """Returns the present measure of a lesson; None before there is any.

    Smoothing begins with the first measure of the lesson: from 0 a lesson of negative returns would be over at once.
    """
    if criterion.measure == "progress":
        return update.progress
    if criterion.measure == "rating":
        return update.rating
    if not standing.returns:
        return None
    mean = sum(standing.returns) / len(standing.returns)
    if not criterion.smoothed:
        return mean
    last = mean if standing.smoothed is None else standing.smoothed
    standing.smoothed = WEIGHT * mean + (1 - WEIGHT) * last
    return standing.smoothed
