"""Collects the numbers that a service publishes about itself, and evaluates published ones.

A `Registry` collects in one process. Its `snapshot` is a `Metrics` record for the service's topic.
Counters and histograms only grow, from 0 at the start of the process, so an interval is a difference
and a lost message loses nothing.

Names: `NAME` for the service, `NAME/Behavior` for one behavior. Mean and spread of X are published as the
counters `X.sum`, `X.sumsq` and `X.count`: the mean over any interval is the difference of the first over the
difference of the last.
"""

import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import numpy as np
import psutil
from numpy.typing import ArrayLike, NDArray

from sparring.pipeline.messages.metrics import Histogram, Metrics, Wait

LATENCY_BOUNDS: Final = tuple(round(10 ** (-5 + i / 20), 9) for i in range(141))
"""Seconds, 10 us to 100 s, 20 bounds for each factor of 10: a percentile is known to 12 %."""

LAG_BOUNDS: Final = tuple(float(lag) for lag in range(17))
"""Policy versions, 0 to 16: exact."""

ROW_BOUNDS: Final = tuple(float(2**power) for power in range(17))
"""Rows of a batch, 1 to 65,536, by factors of 2."""

NOT_FINITE: Final = "metrics.not_finite"
"""Counter of values left out because they were NaN, infinite, or too large: one would spoil a sum permanently."""

SIMULATOR: Final = "simulator."
"""Prefix of simulators' own statistics, which belong to no behavior: `.sum` and `.count` for a mean, `.total` for a
sum; a gauge is the latest value."""

LARGEST: Final = 1e150
"""Magnitude below which numbers are added: their squares and the sums of many are still finite."""


class Registry:
    """Collects the numbers of one incarnation of a service.

    Each name has one writing thread; `snapshot` may be called from another.

    Args:
        service: name such as "learning-Ball".
        start: incarnation of the service.
    """

    def __init__(self, service: str, start: str) -> None:
        self._service = service
        self._start = start
        self._sequence = 0
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._gauges: dict[str, float] = {}
        self._histograms: dict[str, _Buckets] = {}

    def add(self, name: str, value: float = 1.0) -> None:
        """Adds `value` to counter `name`, unless that would spoil it."""
        number = float(value)
        if -LARGEST < number < LARGEST:
            self._counters[name] += number
        else:
            self._counters[NOT_FINITE] += 1

    def reach(self, name: str, value: float) -> None:
        """Sets counter `name` to a count that its owner has kept since the process started."""
        self._counters[name] = value

    def gauge(self, name: str, value: float) -> None:
        """Sets gauge `name`; a value that is not finite is not published."""
        self._gauges[name] = value

    def histogram(self, name: str, bounds: Sequence[float]) -> None:
        """Registers histogram `name`.

        Args:
            name: unique name.
            bounds: rising upper bounds of its buckets; one more bucket counts values above the last.

        Raises:
            ValueError: the bounds do not rise, or the name is taken with other bounds.
        """
        known = self._histograms.setdefault(name, _Buckets(bounds))
        if known.bounds != tuple(bounds):
            raise ValueError(f"histogram {name!r} has {len(known.bounds)} other bounds; use another name")

    def observe(self, name: str, value: float) -> None:
        """Counts one value in histogram `name`, which must be registered."""
        if math.isfinite(value):
            self._histograms[name].observe(value)
        else:
            self._counters[NOT_FINITE] += 1

    def observe_many(self, name: str, values: ArrayLike) -> None:
        """Counts all values of an array of any shape in histogram `name`, which must be registered."""
        self._histograms[name].observe_many(self._summable(values))

    def observe_moments(self, name: str, values: ArrayLike, behavior: str = "") -> None:
        """Adds all values of an array to `name.sum`, `name.sumsq` and `name.count`, for mean and spread."""
        finite = self._summable(values)
        end = f"/{behavior}" if behavior else ""
        for moment, value in (("sum", finite.sum()), ("sumsq", np.square(finite).sum()), ("count", finite.size)):
            self._counters[f"{name}.{moment}{end}"] += float(value)

    def queue(self, name: str, *, messages: int, steps: int, capacity: int, waits: int, waited_s: float) -> None:
        """Publishes the contents of a queue end.

        Args:
            name: name of the queue.
            messages: messages held now.
            steps: agent-steps in them.
            capacity: most messages that the end holds.
            waits: how often its user has waited so far.
            waited_s: seconds of all waits in total.
        """
        self._gauges[f"queue.{name}.messages"] = messages
        self._gauges[f"queue.{name}.steps"] = steps
        self._gauges[f"queue.{name}.capacity"] = capacity
        self._counters[f"queue.{name}.waits"] = waits
        self._counters[f"queue.{name}.waited_s"] = waited_s

    def snapshot(self, time_s: float, waiting_for: str = "", waits: tuple[Wait, ...] = ()) -> Metrics:
        """Returns all numbers so far as a record for the service's topic.

        Args:
            time_s: seconds since the epoch.
            waiting_for: what the service waits for, "" while it works.
            waits: wait of each activity that waits.
        """
        self._sequence += 1
        self._gauges["rss_bytes"], self._gauges["cpu_s"] = resources()
        return Metrics(
            service=self._service,
            start=self._start,
            sequence=self._sequence,
            time_s=time_s,
            counters=_finite(self._counters),
            gauges=_finite(self._gauges),
            histograms={
                name: Histogram(bounds=one.bounds, counts=tuple(one.counts), total=one.total)
                for name, one in self._histograms.copy().items()
            },
            waiting_for=waiting_for,
            waits=waits,
        )

    def _summable(self, values: ArrayLike) -> NDArray[np.float64]:
        array = np.asarray(values, np.float64).ravel()
        finite = np.abs(array) < LARGEST  # False for NaN
        if finite.all():
            return array
        self._counters[NOT_FINITE] += int(array.size - finite.sum())
        return array[finite]


class _Buckets:
    """Holds the buckets of a histogram that is being filled."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(float(bound) for bound in bounds)
        if not self.bounds or any(low >= high for low, high in zip(self.bounds, self.bounds[1:], strict=False)):
            raise ValueError(f"got bounds {self.bounds}; expected at least one, each above the one before")
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_many(self, values: NDArray[np.float64]) -> None:
        added = np.bincount(np.searchsorted(self.bounds, values), minlength=len(self.counts))
        self.counts = [old + new for old, new in zip(self.counts, added.tolist(), strict=True)]
        self.total += float(values.sum())


def _finite(values: dict[str, float]) -> dict[str, float]:
    """Returns the finite ones of numbers that another thread may be changing."""
    return {name: float(value) for name, value in values.copy().items() if math.isfinite(value)}


def resources() -> tuple[float, float]:
    """Returns the physical memory of this process in bytes, and its CPU time in seconds."""
    return psutil.Process().memory_info().rss, time.process_time()


# ---------------------------------------------------------------- reading histograms


def count(histogram: Histogram) -> int:
    """Returns the number of values."""
    return sum(histogram.counts)


def mean(histogram: Histogram) -> float | None:
    """Returns the exact mean of the values, None if there are none."""
    values = count(histogram)
    return histogram.total / values if values else None


def highest(histogram: Histogram) -> float | None:
    """Returns the upper bound of the highest bucket in use, None for no values.

    Above all bounds it is what the highest value is at least: the last bound + 1, or the mean of these values.
    """
    within = sum(bound * number for bound, number in zip(histogram.bounds, histogram.counts, strict=False))
    beyond = (histogram.total - within) / (histogram.counts[-1] or 1)
    bounds = (*histogram.bounds, max(histogram.bounds[-1] + 1, float(math.ceil(beyond))))
    return max((bound for bound, number in zip(bounds, histogram.counts, strict=True) if number), default=None)


def quantile(histogram: Histogram, q: float) -> float | None:
    """Returns the bound of the first bucket up to which a fraction `q` of all values lies, None if there are none.

    Above the last bound, that bound is returned.

    Args:
        histogram: histogram of the values.
        q: fraction, 0 to 1.
    """
    values = count(histogram)
    if not values:
        return None
    rank = max(1, math.ceil(q * values - 1e-9))
    index = bisect_left(list(accumulate(histogram.counts)), rank)
    return histogram.bounds[min(index, len(histogram.bounds) - 1)]


def added(one: Histogram, other: Histogram) -> Histogram:
    """Returns the sum of two histograms, or the second alone if their bounds differ."""
    if one.bounds != other.bounds:
        return other
    counts = tuple(a + b for a, b in zip(one.counts, other.counts, strict=True))
    return Histogram(bounds=one.bounds, counts=counts, total=one.total + other.total)


def since(now: Histogram, before: Histogram | None) -> Histogram:
    """Returns the values counted between two states of a histogram, or all of them if the bounds differ."""
    if before is None or before.bounds != now.bounds:
        return now
    counts = tuple(max(0, a - b) for a, b in zip(now.counts, before.counts, strict=True))
    return Histogram(bounds=now.bounds, counts=counts, total=now.total - before.total)
