"""The steps that simulators count themselves, over all incarnations of stepping."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sparring.pipeline.messages.state import SimulatorSteps, SteppingState


class SimulatorTotals:
    """Compares what simulators' processes count with what stepping reports of them.

    A process that connects again says how many steps it has reported in all. What is beyond the last report of stepping
    was in the memory of an incarnation that died, or on a connection that broke.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, SimulatorSteps]] = {}  # by process: stepping's incarnation, and its report
        self._first: dict[str, dict[str, int]] = {}  # by process: what it had reported to earlier runs
        self._unnamed: dict[str, dict[str, int]] = {}  # steps of processes without a name, by stepping's incarnation

    def on_stepping_state(self, state: SteppingState) -> Counter[str]:
        """Takes over the steps of simulators; returns by behavior those that no report of stepping has counted."""
        found: Counter[str] = Counter()
        for process, steps in state.processes.items():
            if not process:
                self._unnamed[state.source] = dict(steps.completed)
                continue
            source, known = self._known.get(process, ("", None))
            first = self._first.setdefault(process, dict(steps.before))
            for name, before in steps.before.items():
                if known is None:
                    continue
                counted = known.before.get(name, first.setdefault(name, 0))
                if source != state.source:
                    counted += known.completed.get(name, 0)
                found[name] += before - counted
            self._known[process] = state.source, steps
        return found

    def total(self, behavior: str) -> int:
        """Returns the steps of a behavior that simulators have reported in this run."""
        named = 0
        for process, (_, steps) in self._known.items():
            counted = steps.before.get(behavior, 0) + steps.completed.get(behavior, 0)
            named += steps.total.get(behavior, counted) - self._first[process].get(behavior, 0)
        return named + sum(steps.get(behavior, 0) for steps in self._unnamed.values())

    def to_plain(self) -> dict[str, Any]:
        """Returns all that a restart needs, as plain JSON values."""
        known = {process: [source, asdict(steps)] for process, (source, steps) in self._known.items()}
        return {"known": known, "first": self._first, "unnamed": self._unnamed}

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Continues from what `to_plain` returned."""
        self._known = {
            process: (source, SimulatorSteps(**steps)) for process, (source, steps) in plain["known"].items()
        }
        self._first = {process: dict(steps) for process, steps in plain["first"].items()}
        self._unnamed = {source: dict(steps) for source, steps in plain["unnamed"].items()}
