"""A learner trains each segment once, even after a crash."""

from __future__ import annotations

import json
from dataclasses import replace

from sparring.pipeline.learning.deduplicator import Deduplicator
from sparring.pipeline.messages.segments import Segments
from tests.learning.learning_helpers import segments


def message(sequence: int, handed_on: int, origin: str = "assembly.1") -> Segments:
    """Returns a record of two steps."""
    return replace(segments([2]), sequence=sequence, handed_on=handed_on, origin=origin, began=5)


def test_redelivered_segments_are_duplicates() -> None:
    deduplicator = Deduplicator()
    assert [deduplicator.is_new(message(number, 2 * number)) for number in (1, 2, 1, 2, 4)] == [
        True,
        True,
        False,
        False,
        True,
    ]
    assert (deduplicator.steps, deduplicator.duplicate) == (6, 4)
    assert deduplicator.keep() == {"assembly.1": {"stepping-0.1": [4, 5, 8]}}


def test_restored_learner_recognizes_segments_of_its_weights() -> None:
    """Coordination crashed too, and everything it had not saved is delivered again."""
    first = Deduplicator()
    for number in (1, 2):
        first.is_new(message(number, 2 * number))
    second = Deduplicator()
    second.restore(json.loads(json.dumps(first.keep())))
    assert (second.steps, second.keep()) == (0, first.keep())
    assert not second.is_new(message(2, 4))
    assert second.is_new(message(3, 6))
    assert second.is_new(message(1, 2, origin="assembly.2"))
    assert (second.steps, second.duplicate) == (4, 2)
    (restored,) = second.restored["assembly.1"].values()
    assert (restored.sequence, restored.began, restored.steps) == (2, 5, 4), "the restored state does not change"
