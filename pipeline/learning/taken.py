"""What a learner has taken of the segments that came, so that what is sent again is known."""

from __future__ import annotations

from pipeline.messages.service import Segments


class Taken:
    """Counts segments, and tells new ones from those that a restart of coordination sends again.

    Attributes:
        steps: taken, each once.
        duplicate: steps that had been taken before.
        latest: by start of assembly, by start of stepping, sequence of the last message taken.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.duplicate = 0
        self.latest: dict[str, dict[str, int]] = {}

    def is_new(self, segments: Segments) -> bool:
        """Whether they were not taken before; counts them either way."""
        latest, steps = self.latest.setdefault(segments.origin, {}), len(segments.log_probs)
        if segments.sequence <= latest.get(segments.source, 0):
            self.duplicate += steps
            return False
        latest[segments.source] = segments.sequence
        self.steps += steps
        return True
