"""How fast a behavior goes: over the last seconds, and over the run."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

WINDOW_S: Final = 10.0
"""Seconds of the recent rate."""

_LONGEST_TICK_S: Final = 5.0  # a longer pause between two looks is not time the run was active


class Pace:
    """Rates of one behavior, from looks at its cumulative counts about once a second."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int]] = deque()
        self._active_s = 0.0

    def look(self, clock_s: float, produced: int) -> None:
        """Notes what has been produced.

        Args:
            clock_s: seconds, rising.
            produced: steps, cumulative.
        """
        if self._looks and produced:
            self._active_s += min(clock_s - self._looks[-1][0], _LONGEST_TICK_S)
        self._looks.append((clock_s, produced))
        while len(self._looks) > 2 and self._looks[1][0] <= clock_s - WINDOW_S:
            self._looks.popleft()

    @property
    def recent(self) -> float:
        """Steps produced per second in the last `WINDOW_S` seconds."""
        if len(self._looks) < 2:
            return 0.0
        (begun_s, before), (ended_s, after) = self._looks[0], self._looks[-1]
        return max(0, after - before) / (ended_s - begun_s) if ended_s > begun_s else 0.0

    def mean(self, trained: int) -> float:
        """Steps trained per second since the first step was produced, pauses of the run left out."""
        return trained / self._active_s if self._active_s > 0 else 0.0

    def state(self) -> dict[str, Any]:
        """Everything that outlives the process, as plain values for JSON."""
        return {"active_s": self._active_s}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Pace:
        """A pace that goes on from `state`."""
        pace = cls()
        pace._active_s = float(state["active_s"])
        return pace
