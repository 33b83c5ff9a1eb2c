"""Ledgers, learner states and stream positions for tests of single rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sparring.pipeline.coordination.ledger import StepLedger
from sparring.pipeline.messages.state import LearnerState, StreamPosition


def new_ledger(buffer_size: int = 100, overlap: int = 1, processes: int = 1) -> StepLedger:
    return StepLedger(buffer_size=buffer_size, overlap=overlap, processes=processes)


def state(incarnation: int = 1, **changed: Any) -> LearnerState:
    """Returns a learner's state with consistent `taken`; only a later incarnation restores `trained` steps."""
    terms = ("training", "buffered", "stale", *(("trained",) if incarnation == 1 else ()))
    changed.setdefault("taken", sum(changed.get(term, 0) for term in terms))
    return replace(
        LearnerState(behavior="B", start=f"learning-B.{incarnation}", version=1, updates=0, trained=0), **changed
    )


def positions(origin: str, sequence: int, steps: int, began: int = 0) -> dict[str, dict[str, StreamPosition]]:
    return {origin: {"s.1": StreamPosition(sequence=sequence, began=began, steps=steps)}}
