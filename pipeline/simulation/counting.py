"""Counts steps as step accounting does: a decision that got an action, with its outcome once it is sent."""

import secrets
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.messages.simulator import BehaviorReport
from sparring.pipeline.specs import BehaviorId


class StepCounter:
    """Counts a simulator's own steps by behavior name.

    An agent that got an action is open until its next decision or end is sent.

    Attributes:
        steps: by behavior name.
        process: random text that names these counts.
    """

    def __init__(self) -> None:
        self.process = secrets.token_hex(8)
        self.steps: Counter[str] = Counter()
        self._open: defaultdict[str, bytes] = defaultdict(bytes)  # copies of ids, because a game may reuse its arrays

    def count_report(self, reports: Sequence[BehaviorReport]) -> None:
        """Counts the outcomes in reports that have been sent."""
        for report in reports:
            if waiting := self._open[report.behavior]:
                self.steps[_name_of(report.behavior)] += self._outcomes(report, waiting)

    def add_open(self, behavior: str, agents: NDArray[np.int64]) -> None:
        """Marks agents as open because they got an action."""
        self._open[behavior] += agents.tobytes()

    def discard_open(self) -> None:
        """Discards all open agents: after a reset or on a new connection their outcomes will not be sent."""
        self._open.clear()

    def _outcomes(self, report: BehaviorReport, waiting: bytes) -> int:
        """Returns how many open agents have a row in the report, and closes them."""
        decided = b"" if report.decisions is None else report.decisions.agents.tobytes()
        if decided == waiting:  # the usual case: all agents decide again, ended or not
            self._open[report.behavior] = b""
            return len(waiting) // 8
        ended = b"" if report.ends is None else report.ends.agents.tobytes()
        agents = np.frombuffer(waiting, np.int64)
        seen = np.isin(agents, np.frombuffer(decided + ended, np.int64))
        self._open[report.behavior] = agents[~seen].tobytes()
        return int(seen.sum())


@cache
def _name_of(behavior: str) -> str:
    return BehaviorId.parse(behavior).name
