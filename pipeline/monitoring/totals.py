"""Adds the numbers of a service over its incarnations, so that a restart never makes a number fall."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from sparring.pipeline.messages.metrics import Histogram, Metrics
from sparring.pipeline.monitoring.metrics import added

_INCARNATIONS_KEPT: Final = 256  # the restart budget of a service is far below this


class Totals:
    """Adds the numbers of one service over all its incarnations: counters and histograms never fall."""

    def __init__(self) -> None:
        self.latest: Metrics | None = None
        self._closed: list[str] = []
        self._counters: dict[str, float] = {}
        self._histograms: dict[str, Histogram] = {}

    @property
    def starts(self) -> int:
        """Returns the number of incarnations seen so far."""
        return len(self._closed) + (self.latest is not None)

    def update(self, metrics: Metrics) -> bool:
        """Adds a record; returns False if it is not newer than the known one."""
        latest = self.latest
        if metrics.start in self._closed:
            return False
        if latest is not None and latest.start == metrics.start and latest.sequence >= metrics.sequence:
            return False
        if latest is not None and latest.start != metrics.start:
            self._counters, self._histograms = self.counters(), self.histograms()
            self._closed = [*self._closed, latest.start][-_INCARNATIONS_KEPT:]
        self.latest = metrics
        return True

    def counters(self) -> dict[str, float]:
        """Returns every counter by name."""
        return _summed((self._counters, self.latest.counters if self.latest else {}))

    def gauges(self) -> dict[str, float]:
        """Returns every gauge of the present incarnation by name."""
        return dict(self.latest.gauges) if self.latest else {}

    def histograms(self) -> dict[str, Histogram]:
        """Returns every histogram by name."""
        sums = dict(self._histograms)
        for name, histogram in (self.latest.histograms if self.latest else {}).items():
            sums[name] = added(sums[name], histogram) if name in sums else histogram
        return sums

    def state(self) -> dict[str, Any]:
        """Returns the state as plain values for JSON."""
        return {
            "closed": self._closed,
            "counters": self._counters,
            "histograms": {name: plain(histogram) for name, histogram in self._histograms.items()},
            "latest": None if self.latest is None else _plain_metrics(self.latest),
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Totals:
        """Returns totals that continue from `state`.

        Raises:
            KeyError, TypeError, ValueError: the state is malformed.
        """
        totals = cls()
        totals._closed = [str(start) for start in state["closed"]]
        totals._counters = {name: float(value) for name, value in state["counters"].items()}
        totals._histograms = {name: from_plain(histogram) for name, histogram in state["histograms"].items()}
        if state["latest"] is not None:
            histograms = {name: from_plain(value) for name, value in state["latest"]["histograms"].items()}
            totals.latest = Metrics(**{**state["latest"], "histograms": histograms})
        return totals


def _summed(maps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for one in maps:
        for name, value in one.items():
            total[name] = total.get(name, 0.0) + value
    return total


def plain(histogram: Histogram) -> dict[str, Any]:
    """Returns a histogram as plain values for JSON."""
    return {"bounds": list(histogram.bounds), "counts": list(histogram.counts), "total": histogram.total}


def from_plain(value: Mapping[str, Any]) -> Histogram:
    """Returns the histogram that `plain` converted."""
    bounds, counts = tuple(map(float, value["bounds"])), tuple(map(int, value["counts"]))
    if len(counts) != len(bounds) + 1:
        raise ValueError(f"got {len(counts)} counts for {len(bounds)} bounds; expected one more than bounds")
    return Histogram(bounds=bounds, counts=counts, total=float(value["total"]))


def _plain_metrics(metrics: Metrics) -> dict[str, Any]:
    return {
        "service": metrics.service,
        "start": metrics.start,
        "sequence": metrics.sequence,
        "time_s": metrics.time_s,
        "counters": metrics.counters,
        "gauges": metrics.gauges,
        "histograms": {name: plain(histogram) for name, histogram in metrics.histograms.items()},
        "waiting_for": metrics.waiting_for,
    }
