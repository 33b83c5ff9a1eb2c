"""What a learner has taken, and what is known of it after a crash."""

from __future__ import annotations

import json
from dataclasses import replace

from sparring.pipeline.learning.taken import Deduplicator
from sparring.pipeline.messages.segments import Segments
from tests.learning.learning_helpers import segments


def message(sequence: int, handed_on: int, origin: str = "assembly.1") -> Segments:
    """Of two steps."""
    return replace(segments([2]), sequence=sequence, handed_on=handed_on, origin=origin, began=5)


def test_what_comes_again_is_a_duplicate_whatever_lies_between() -> None:
    taken = Deduplicator()
    assert [taken.is_new(message(number, 2 * number)) for number in (1, 2, 1, 2, 4)] == [True, True, False, False, True]
    assert (taken.steps, taken.duplicate) == (6, 4)
    assert taken.keep() == {"assembly.1": {"stepping-0.1": [4, 5, 8]}}


def test_a_learner_knows_again_what_its_restored_weights_hold() -> None:
    """Coordination died too, and has everything sent again that it had not written down."""
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
    assert (restored.sequence, restored.began, restored.steps) == (2, 5, 4), "what it was restored with does not move"
