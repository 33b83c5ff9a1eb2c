"""The lessons of one run: when they change, and when a change is published.

Lessons are published after they are on disk, and before any step allowance that waits for them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sparring.pipeline.coordination.ghosts import Ghosts
from sparring.pipeline.coordination.ledger import StepLedger
from sparring.pipeline.coordination.lessons import Lesson, Lessons, WeightsUpdate
from sparring.pipeline.messages.channels import LESSONS
from sparring.pipeline.messages.state import EpisodeReturns, LearnerState
from sparring.pipeline.queues.interface import Publisher


class LessonPlan:
    """Decides lessons from episodes and learners, and publishes them.

    Args:
        curricula: lessons by parameter name; empty without lessons.
        ghosts: whose ratings may end a lesson; None without self-play.

    Attributes:
        max_steps: of each behavior, by name.
        published: serial of the published lessons; 0 without lessons.
    """

    def __init__(self, curricula: Mapping[str, Sequence[Lesson]], ghosts: Ghosts | None) -> None:
        self.max_steps: dict[str, int] = {}
        self.published = 0
        self._lessons = Lessons(curricula)
        self._some = bool(curricula)
        self._is_published = False
        self._ghosts = ghosts

    def count(self, behavior: str, episodes: EpisodeReturns) -> None:
        """Counts episodes of learning agents that ended."""
        self._lessons.ended(behavior, episodes)

    def learned(self, state: LearnerState, ledgers: Mapping[str, StepLedger]) -> Iterator[dict[str, Any]]:
        """Ends the lessons that a learner's new weights complete, and yields a log line for each."""
        if not (self._some and state.updates):  # a learner that only plays completes no lesson
            return
        name = state.behavior
        update = WeightsUpdate(
            version=state.version,
            progress=state.trained / self.max_steps[name],
            rating=None if self._ghosts is None else self._ghosts.rating(name),
            done=ledgers[name].done,
        )
        produced = {one: ledger.produced for one, ledger in ledgers.items()}
        for change in self._lessons.updated(name, update, produced):
            yield {
                "parameter": change.parameter,
                "lesson": change.lesson.name,
                "number": change.number,
                "value": change.lesson.value,
                "measure": round(change.measure, 6),
            }

    def publish(self, topic: Publisher, save: Callable[[], None]) -> None:
        """Publishes new lessons, once `save` has written them."""
        if self._some and not (self._is_published and self._lessons.serial == self.published):
            save()
            self._is_published, self.published = True, self._lessons.serial
            topic.publish(LESSONS, self._lessons.state)

    def gauges(self, behavior: str) -> Iterator[tuple[str, float]]:
        """Yields name and value of each gauge."""
        for parameter, number in self._lessons.numbers(behavior).items():
            yield f"lesson/{parameter}/{behavior}", number

    def to_plain(self) -> dict[str, Any] | None:
        """Returns all that a restart needs, as plain JSON values; None without lessons."""
        return self._lessons.to_plain() if self._some else None

    def restore(self, plain: Mapping[str, Any] | None) -> None:
        """Continues from what `to_plain` returned."""
        if plain is not None:
            self._lessons.restore(plain)
