"""The books of a run at its end."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from sparring.pipeline.messages.state import StepCounts
from sparring.services.supervision.outcome import closed

STEP_COUNTS = StepCounts(produced=100, trained=60, ghost=5, stale=3, lost=2, open=30)
HELD = {"assembly": 8, "coordination": 2, "learning-A": 10}


@pytest.mark.parametrize(
    ("produced", "died", "then"),
    [
        (90, {}, {"open": 20}),
        (100, {}, {"open": 20}),  # they do not balance, and that is to be seen
        (100, {"stepping-0": True}, {"open": 20, "lost": 12}),
        (85, {"coordination": False}, {"open": 20, "produced": 90}),
        (90, {"coordination": False}, {"open": 20}),
        (90, {"assembly": True}, {"open": 12, "lost": 10}),  # what it held is nowhere any more
        (88, {"assembly": True}, {"open": 12, "lost": 8}),  # nor had it all that it said, when it died
    ],
)
def test_what_is_in_no_place_was_lost_with_what_died(
    produced: int, died: dict[str, bool], then: dict[str, int]
) -> None:
    assert closed(replace(STEP_COUNTS, produced=produced), HELD, died) == {
        **asdict(STEP_COUNTS),
        "produced": produced,
        **then,
    }
