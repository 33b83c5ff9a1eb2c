"""Measures the rates of a behavior over the last seconds and over the run."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

WINDOW_S: Final = 10.0
"""Seconds of the recent rate."""

_LONGEST_TICK_S: Final = 5.0  # a longer pause between two samples does not count as active time


class Pace:
    """Measures the rates of one behavior from samples of its cumulative counts, about one per second."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()
        self._active_s = 0.0

    def look(self, clock_s: float, produced: int) -> None:
        """Adds a sample.

        Args:
            clock_s: rising seconds.
            produced: steps produced so far.
        """
        if self._samples and produced:
            self._active_s += min(clock_s - self._samples[-1][0], _LONGEST_TICK_S)
        self._samples.append((clock_s, produced))
        while len(self._samples) > 2 and self._samples[1][0] <= clock_s - WINDOW_S:
            self._samples.popleft()

    @property
    def recent(self) -> float:
        """Returns the steps produced per second in the last `WINDOW_S` seconds."""
        if len(self._samples) < 2:
            return 0.0
        (begun_s, before), (ended_s, after) = self._samples[0], self._samples[-1]
        return max(0, after - before) / (ended_s - begun_s) if ended_s > begun_s else 0.0

    def mean(self, trained: int) -> float:
        """Returns the steps trained per second since the first step was produced, without pauses of the run."""
        return trained / self._active_s if self._active_s > 0 else 0.0

    def state(self) -> dict[str, Any]:
        """Returns the state that outlives the process, as plain values for JSON."""
        return {"active_s": self._active_s}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Pace:
        """Returns a pace that continues from `state`."""
        pace = cls()
        pace._active_s = float(state["active_s"])
        return pace
