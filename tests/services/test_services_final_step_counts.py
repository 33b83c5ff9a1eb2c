"""Step counts at the end of a run."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from sparring.pipeline.messages.state import StepCounts
from sparring.services.supervision.outcome import final_counts

STEP_COUNTS = StepCounts(produced=100, trained=60, ghost=5, stale=3, lost=2, open=30)
HELD = {"assembly": 8, "coordination": 2, "learning-A": 10}


@pytest.mark.parametrize(
    ("produced", "died", "then"),
    [
        (90, {}, {"open": 20}),
        (100, {}, {"open": 20}),  # an imbalance stays visible
        (100, {"stepping-0": True}, {"open": 20, "lost": 12}),
        (85, {"coordination": False}, {"open": 20, "produced": 90}),
        (90, {"coordination": False}, {"open": 20}),
        (90, {"assembly": True}, {"open": 12, "lost": 10}),  # the steps that it held are lost
        (88, {"assembly": True}, {"open": 12, "lost": 8}),  # it held fewer steps than it last reported
    ],
)
def test_steps_that_no_stage_holds_count_as_lost_with_the_dead_service(
    produced: int, died: dict[str, bool], then: dict[str, int]
) -> None:
    assert final_counts(replace(STEP_COUNTS, produced=produced), HELD, died) == {
        **asdict(STEP_COUNTS),
        "produced": produced,
        **then,
    }
