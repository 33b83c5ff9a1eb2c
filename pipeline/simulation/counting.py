"""Counts steps as the books do: a decision that got an action, and its outcome that was sent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.messages.simulator import BehaviorReport
from sparring.pipeline.specs import BehaviorId


class StepCounter:
    """A simulator's own count of its steps, per behavior name.

    Agents that got an action are open until their next decision or end is sent.
    """

    def __init__(self) -> None:
        self.steps: dict[str, int] = {}
        self._open: defaultdict[str, bytes] = defaultdict(bytes)  # ids: a copy, for a game may reuse its arrays
        self._names: dict[str, str] = {}

    def sent(self, reports: Sequence[BehaviorReport]) -> None:
        """Counts the outcomes in a report that has been sent."""
        for report in reports:
            if waiting := self._open[report.behavior]:
                self._add(report.behavior, self._outcomes(report, waiting))

    def acted(self, behavior: str, agents: NDArray[np.int64]) -> None:
        """Notes that these agents got an action."""
        self._open[behavior] += agents.tobytes()

    def forget(self) -> None:
        """A reset or a new connection: outcomes of earlier actions will not be sent."""
        self._open.clear()

    def _outcomes(self, report: BehaviorReport, waiting: bytes) -> int:
        """How many open agents have a row in the report; they are no longer open."""
        decided = b"" if report.decisions is None else report.decisions.agents.tobytes()
        if decided == waiting:  # the usual case: everyone decides again, ended or not
            self._open[report.behavior] = b""
            return len(waiting) // 8
        ended = b"" if report.ends is None else report.ends.agents.tobytes()
        agents = np.frombuffer(waiting, np.int64)
        seen = np.isin(agents, np.frombuffer(decided + ended, np.int64))
        self._open[report.behavior] = agents[~seen].tobytes()
        return int(seen.sum())

    def _add(self, behavior: str, count: int) -> None:
        name = self._names.get(behavior)
        if name is None:
            name = self._names[behavior] = BehaviorId.parse(behavior).name
        self.steps[name] = self.steps.get(name, 0) + count
