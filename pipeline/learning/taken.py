"""What a learner has taken of the segments that came, so that what is sent again is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple

from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.state import Mark, Marks


class Deduplicator:
    """Counts segments, and tells new ones from those that a restart of coordination or of the learner sends again.

    Attributes:
        steps: taken since this start, each once.
        duplicate: steps that had been taken before.
        latest: how far all has been taken, by those too whose weights were restored.
        restored: how far that was when these weights were kept.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.duplicate = 0
        self.latest: Marks = {}
        self.restored: Marks = {}

    def is_new(self, segments: Segments) -> bool:
        """Whether they were not taken before; counts them either way."""
        latest, steps = self.latest.setdefault(segments.origin, {}), len(segments.log_probs)
        known = latest.get(segments.source)
        if known is not None and segments.sequence <= known.sequence:
            self.duplicate += steps
            return False
        latest[segments.source] = Mark(sequence=segments.sequence, began=segments.began, steps=segments.handed_on)
        self.steps += steps
        return True

    def keep(self) -> dict[str, dict[str, list[int]]]:
        """How far all has been taken, as plain JSON values."""
        return {origin: {name: [*astuple(mark)] for name, mark in own.items()} for origin, own in self.latest.items()}

    def restore(self, kept: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
        """Goes on from what `keep` gave."""
        marks = {
            origin: {name: Mark(sequence=at, began=began, steps=steps) for name, (at, began, steps) in own.items()}
            for origin, own in kept.items()
        }
        self.restored = marks
        self.latest = {origin: {**own} for origin, own in marks.items()}
