"""Ledgers and the states of learners for tests of single rules."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter

from sparring.pipeline.coordination.ledger import StepLedger
from sparring.pipeline.messages.state import LearnerState, ProducedSteps

FIRST, SECOND, THIRD = (f"stepping-0.5f3a-{incarnation}" for incarnation in (1, 2, 3))
OTHER = "stepping-1.5f3a-1"
T = TypeVar("T")


@cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)


def through_json(state: T) -> T:
    """Returns what a state is after it was saved and read again."""
    adapter = _adapter(type(state))
    return adapter.validate_json(adapter.dump_json(state))


def new_ledger(buffer_size: int = 100, overlap: int = 1, processes: int = 1) -> StepLedger:
    return StepLedger(least_update_steps=buffer_size, overlap=overlap, processes=processes)


def produced(steps: int, serial: int = 0, allowance: int = 0, agents: int = 4, *, ghosts: int = 0) -> ProducedSteps:
    """Returns the state that a source publishes."""
    return ProducedSteps(steps=steps, serial=serial, allowance=allowance, agents=agents, waiting=0, ghosts=ghosts)


def state(incarnation: int = 1, *, reached: dict[str, int] | None = None, **changed: Any) -> LearnerState:
    """Returns a learner's state; all that it counts is of the first source, unless `reached` says otherwise."""
    terms = sum(changed.get(term, 0) for term in ("trained", "training", "buffered", "stale", "ghost"))
    terms += sum(changed.get("lost", {}).values())
    own = {FIRST: terms} if reached is None else reached
    assert sum(own.values()) == terms, "a learner counts each step that reached it once"
    plain = {"version": 1, "updates": 0, "trained": 0} | changed
    return LearnerState(behavior="B", start=f"learning-B.5f3a-{incarnation}", reached=own, **plain)


def terms(ledger: StepLedger) -> tuple[int, int, int, int, int, int]:
    """Returns the step counts, which balance: produced, trained, ghost, stale, lost, open."""
    counts = ledger.step_counts()
    assert counts.produced == counts.trained + counts.ghost + counts.stale + counts.lost + counts.open
    return counts.produced, counts.trained, counts.ghost, counts.stale, counts.lost, counts.open
