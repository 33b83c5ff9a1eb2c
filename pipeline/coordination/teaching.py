"""What coordination holds of lessons: the rules, and what of them is published.

Lessons are published after they are on disk, and before any permit that waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sparring.pipeline.coordination.ghosts import Ghosts
from sparring.pipeline.coordination.lessons import Lesson, Lessons, WeightsUpdate
from sparring.pipeline.coordination.route import Route
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.state import LearnerState
from sparring.pipeline.queues.interface import Topic


class LessonPlan:
    """The lessons of one run.

    Args:
        curricula: by parameter name; none at all where there are no lessons.
        max_steps: of each behavior, by name.
        ghosts: self-play, if there is any.

    Attributes:
        on_learner_state: serial of what is published; 0 where there is nothing to tell.
    """

    def __init__(
        self, curricula: Mapping[str, Sequence[Lesson]], max_steps: Mapping[str, int], ghosts: Ghosts | None
    ) -> None:
        self.told = 0
        self._lessons = Lessons(curricula)
        self._some = bool(curricula)
        self._said = False
        self._max_steps = max_steps
        self._ghosts = ghosts

    def count(self, segments: Segments) -> None:
        """Counts the episodes that segments tell of."""
        self._lessons.ended(segments.behavior, segments.episodes)

    def learned(self, state: LearnerState, routes: Mapping[str, Route]) -> Iterator[dict[str, Any]]:
        """A learner may have published new weights, which may end lessons; yields a line of the log for each."""
        if not (self._some and state.updates):  # what only plays ends nothing
            return
        name = state.behavior
        update = WeightsUpdate(
            version=state.version,
            progress=state.trained / self._max_steps[name],
            rating=None if self._ghosts is None else self._ghosts.rating(name),
            done=routes[name].ledger.done,
        )
        produced = {one: route.ledger.produced for one, route in routes.items()}
        for change in self._lessons.updated(name, update, produced):
            yield {
                "parameter": change.parameter,
                "lesson": change.lesson.name,
                "number": change.number,
                "value": change.lesson.value,
                "measure": round(change.measure, 6),
            }

    def publish(self, topic: Topic, save: Callable[[], None]) -> None:
        """Publishes the lessons, where they are new, once `save` has written them."""
        if self._some and not (self._said and self._lessons.serial == self.told):
            save()
            self._said, self.told = True, self._lessons.serial
            topic.publish("lessons", self._lessons.state)

    def gauges(self, behavior: str) -> Iterator[tuple[str, float]]:
        """Names and values for the numbers of the service."""
        for parameter, number in self._lessons.numbers(behavior).items():
            yield f"lesson/{parameter}/{behavior}", number

    def to_plain(self) -> dict[str, Any] | None:
        """Everything a restart needs, as plain JSON values; None where there are no lessons."""
        return self._lessons.to_plain() if self._some else None

    def restore(self, plain: Mapping[str, Any] | None) -> None:
        """Goes on from what `to_plain` gave; None where nothing was written."""
        if plain is not None:
            self._lessons.restore(plain)
