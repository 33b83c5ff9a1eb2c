"""Numbers that a service publishes about itself, and how a reader understands them.

A `Registry` collects in one process. Its `snapshot` is a `Metrics` record for the service's board.
Counters and histograms only grow, from 0 at the service's start, so an interval is a difference and
a lost message loses nothing.

Names: `NAME` for the service, `NAME/Behavior` for one behavior. The mean of X is published as the two
counters `X.sum` and `X.count` (and `X.sumsq` where its spread is wanted): the mean over any interval
is the difference of the one over the difference of the other.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike

from sparring.pipeline.messages.metrics import Histogram, Metrics, Wait

LATENCY_BOUNDS: Final = tuple(round(10 ** (-5 + i / 20), 9) for i in range(141))
"""Seconds, 10 us to 100 s, 20 bounds for each factor of 10: a percentile is known to 12 %."""

LAG_BOUNDS: Final = tuple(float(lag) for lag in range(17))
"""Policy versions, 0 to 16: exact."""

ROW_BOUNDS: Final = tuple(float(2**power) for power in range(17))
"""Rows of a batch, 1 to 65,536, by factors of 2."""

NOT_FINITE: Final = "metrics.not_finite"
"""Counter of values left out because they were NaN or infinite, or too large to be added: one would spoil a sum for
good."""

SIMULATOR: Final = "simulator."
"""Begins the names of simulators' own numbers, which are no behavior's: `.sum` and `.count` of what is shown by its
mean, `.total` of what adds up; a gauge is the latest value."""

LARGEST: Final = 1e150
"""Magnitude below which numbers are added: their squares are still finite, and so are sums of many."""


def scoped(name: str, behavior: str = "") -> str:
    """`name/behavior`, or `name` alone where no behavior is given."""
    return f"{name}/{behavior}" if behavior else name


class Registry:
    """The numbers of one start of one service.

    A name has one writing thread; `snapshot` may be called from another.

    Args:
        service: as "learning-Ball".
        start: this start of it; a new one each time the process starts.
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
        """Sets counter `name` to a count that its owner has kept since the start."""
        self._counters[name] = value

    def gauge(self, name: str, value: float) -> None:
        """Sets gauge `name`. A value that is not finite is not published."""
        self._gauges[name] = value

    def histogram(self, name: str, bounds: Sequence[float]) -> None:
        """Registers histogram `name`.

        Args:
            name: registered once.
            bounds: rising upper bounds of its buckets; one more bucket takes what is above the last.

        Raises:
            ValueError: the bounds do not rise, or the name is taken with other bounds.
        """
        known = self._histograms.get(name)
        if known is not None:
            if known.bounds != tuple(bounds):
                raise ValueError(f"histogram {name!r} has {len(known.bounds)} other bounds; use another name")
            return
        self._histograms[name] = _Buckets(bounds)

    def observe(self, name: str, value: float) -> None:
        """Counts one value in histogram `name`, which must be registered."""
        if not math.isfinite(value):
            self._counters[NOT_FINITE] += 1
            return
        self._histograms[name].observe(value)

    def observe_many(self, name: str, values: ArrayLike) -> None:
        """Counts all values of an array of any shape in histogram `name`, which must be registered."""
        finite = self._finite(values)
        if finite.size:
            self._histograms[name].observe_many(finite)

    def observe_mean(self, name: str, value: float, count: int = 1, behavior: str = "") -> None:
        """Adds a mean to the counters `name.sum` and `name.count`.

        Args:
            name: of the value, as "Losses/Policy Loss".
            value: the mean of `count` values.
            count: how many values it is the mean of.
            behavior: name of the behavior, "" for the service's own.
        """
        total = float(value) * count
        if not -LARGEST < total < LARGEST:
            self._counters[NOT_FINITE] += count
            return
        self._counters[scoped(f"{name}.sum", behavior)] += total
        self._counters[scoped(f"{name}.count", behavior)] += count

    def observe_moments(self, name: str, values: ArrayLike, behavior: str = "") -> None:
        """Adds all values of an array to `name.sum`, `name.sumsq` and `name.count`, for mean and spread."""
        finite = self._finite(values)
        self._counters[scoped(f"{name}.sum", behavior)] += float(finite.sum())
        self._counters[scoped(f"{name}.sumsq", behavior)] += float(np.square(finite).sum())
        self._counters[scoped(f"{name}.count", behavior)] += finite.size

    def queue(self, name: str, *, messages: int, steps: int, capacity: int, waits: int, waited_s: float) -> None:
        """Publishes how full a queue end is.

        Args:
            name: of the queue.
            messages: held now.
            steps: agent-steps in them.
            capacity: most messages that it holds.
            waits: how often its user waited since the start.
            waited_s: seconds of all waits together.
        """
        self._gauges[f"queue.{name}.messages"] = messages
        self._gauges[f"queue.{name}.steps"] = steps
        self._gauges[f"queue.{name}.capacity"] = capacity
        self._counters[f"queue.{name}.waits"] = waits
        self._counters[f"queue.{name}.waited_s"] = waited_s

    def snapshot(self, time_s: float, waiting_for: str = "", waits: tuple[Wait, ...] = ()) -> Metrics:
        """Everything so far, as a record for the board.

        Args:
            time_s: seconds since the epoch.
            waiting_for: what the service waits for, "" while it works.
            waits: the same for each of its activities that waits.
        """
        self._sequence += 1
        self._gauges["rss_bytes"] = resident_bytes()
        return Metrics(
            service=self._service,
            start=self._start,
            sequence=self._sequence,
            time_s=time_s,
            counters={name: float(value) for name, value in dict(self._counters).items() if math.isfinite(value)},
            gauges={name: float(value) for name, value in dict(self._gauges).items() if math.isfinite(value)},
            histograms={name: buckets.snapshot() for name, buckets in dict(self._histograms).items()},
            waiting_for=waiting_for,
            waits=waits,
        )

    def _finite(self, values: ArrayLike) -> np.ndarray[Any, np.dtype[np.float64]]:
        array = np.asarray(values, np.float64).ravel()
        finite = np.abs(array) < LARGEST  # False for NaN
        if finite.all():
            return array
        self._counters[NOT_FINITE] += int(array.size - finite.sum())
        return array[finite]


class _Buckets:
    """A histogram that is being filled."""

    __slots__ = ("bounds", "counts", "edges", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(float(bound) for bound in bounds)
        if not self.bounds or any(low >= high for low, high in zip(self.bounds, self.bounds[1:], strict=False)):
            raise ValueError(f"got bounds {self.bounds}; expected at least one, each above the one before")
        self.edges = np.array(self.bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_many(self, values: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        added = np.bincount(np.searchsorted(self.edges, values), minlength=len(self.counts))
        self.counts = [old + new for old, new in zip(self.counts, added.tolist(), strict=True)]
        self.total += float(values.sum())

    def snapshot(self) -> Histogram:
        return Histogram(bounds=self.bounds, counts=tuple(self.counts), total=float(self.total))


# ---------------------------------------------------------------- reading histograms


def count(histogram: Histogram) -> int:
    """Number of values."""
    return sum(histogram.counts)


def mean(histogram: Histogram) -> float:
    """Exact mean of the values; NaN where there are none."""
    values = count(histogram)
    return histogram.total / values if values else math.nan


def highest(histogram: Histogram) -> float:
    """Upper bound of the highest bucket in use; the last bound + 1 where a value lies above all; NaN for none."""
    used = [index for index, number in enumerate(histogram.counts) if number]
    if not used:
        return math.nan
    return histogram.bounds[used[-1]] if used[-1] < len(histogram.bounds) else histogram.bounds[-1] + 1


def quantile(histogram: Histogram, q: float) -> float:
    """Estimate of the value that a share `q` of all values does not exceed; NaN where there are none.

    The bucket that holds it is known exactly; inside, values are taken to be spread evenly. The first
    bucket is taken to start at 0, or at its bound where that is not positive. Above the last bound the
    answer is that bound: "at least".

    Args:
        histogram: of the values.
        q: share, 0 to 1.
    """
    values = count(histogram)
    if not values:
        return math.nan
    target = q * values
    rank = max(1, math.ceil(target - 1e-9))
    reached = list(accumulate(histogram.counts))
    index = bisect_left(reached, rank)
    if index == len(histogram.bounds):
        return histogram.bounds[-1]
    number, upper = histogram.counts[index], histogram.bounds[index]
    lower = histogram.bounds[index - 1] if index else min(0.0, upper)
    return lower + (upper - lower) * min(1.0, max(0.0, (target - reached[index] + number) / number))


def added(one: Histogram, other: Histogram) -> Histogram:
    """Both together; the second alone where the bounds differ, as they cannot be combined."""
    if one.bounds != other.bounds:
        return other
    counts = tuple(a + b for a, b in zip(one.counts, other.counts, strict=True))
    return Histogram(bounds=one.bounds, counts=counts, total=one.total + other.total)


def since(now: Histogram, before: Histogram | None) -> Histogram:
    """What was counted between two states of one histogram; all of it where the bounds differ."""
    if before is None or before.bounds != now.bounds:
        return now
    counts = tuple(max(0, a - b) for a, b in zip(now.counts, before.counts, strict=True))
    return Histogram(bounds=now.bounds, counts=counts, total=now.total - before.total)


def mean_of(counters: Mapping[str, float], name: str) -> float | None:
    """Mean of the values that `name.sum` and `name.count` hold; None where there are none."""
    number = counters.get(f"{name}.count", 0.0)
    return counters.get(f"{name}.sum", 0.0) / number if number > 0 else None


def deviation_of(counters: Mapping[str, float], name: str) -> float | None:
    """Standard deviation (over n) of the values that `name.sum`, `.sumsq` and `.count` hold; None for none."""
    average = mean_of(counters, name)
    squares = counters.get(f"{name}.sumsq")
    if average is None or squares is None:
        return None
    return math.sqrt(max(0.0, squares / counters[f"{name}.count"] - average**2))


def resident_bytes() -> int:
    """Physical memory of this process in bytes; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
