"""This module remembers which segments a learner has taken, to recognize those that are sent again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple

from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.state import StreamPosition, StreamPositions


class Deduplicator:
    """Counts segments, and separates new ones from those that coordination or stepping sends again after a restart.

    Attributes:
        steps: steps taken since this start, each once.
        duplicate: steps that had been taken before.
        latest: position of each source, including the positions restored from a checkpoint.
        restored: positions stored with the weights that were restored.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.duplicate = 0
        self.latest: StreamPositions = {}
        self.restored: StreamPositions = {}

    def is_new(self, segments: Segments) -> bool:
        """Returns whether the segments were not taken before, and counts them in either case."""
        latest, steps = self.latest.setdefault(segments.origin, {}), len(segments.log_probs)
        known = latest.get(segments.source)
        if known is not None and segments.sequence <= known.sequence:
            self.duplicate += steps
            return False
        latest[segments.source] = StreamPosition(
            sequence=segments.sequence, began=segments.began, steps=segments.handed_on
        )
        self.steps += steps
        return True

    def keep(self) -> dict[str, dict[str, list[int]]]:
        """Returns the position of each source as plain JSON values."""
        return {
            origin: {name: [*astuple(position)] for name, position in own.items()}
            for origin, own in self.latest.items()
        }

    def restore(self, kept: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
        """Resumes from the positions that `keep` returned."""
        positions = {
            origin: {
                name: StreamPosition(sequence=at, began=began, steps=steps) for name, (at, began, steps) in own.items()
            }
            for origin, own in kept.items()
        }
        self.restored = positions
        self.latest = {origin: {**own} for origin, own in positions.items()}
