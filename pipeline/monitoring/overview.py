"""Adds the numbers of all services over all their incarnations, so that a restart never makes a number fall."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from sparring.pipeline.messages.metrics import Histogram, Metrics
from sparring.pipeline.monitoring.metrics import SIMULATOR, added, since

T = TypeVar("T")

STEP_COUNTS: Final = ("produced", "trained", "ghost", "stale", "lost", "open")
"""Columns of the step accounting: the first is the sum of the others."""

_HIGHEST_COUNTS: Final = ("episode_oldest",)  # gauges of several services that do not add up
_PREFIXES: Final = ("steps/", "trained/", "step_counts.produced/", "max_steps/")  # of numbers that every behavior has
_INCARNATIONS_KEPT: Final = 256  # the restart budget of a service is far below this


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """Holds numbers by name: of a service, of all services, or of one behavior and of simulators.

    Attributes:
        counters: sums over services and incarnations.
        gauges: sums over services of the present values; `episode_oldest` is the highest value.
        histograms: sums over services and incarnations.
    """

    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)

    def since(self, start: Numbers) -> Numbers:
        """Returns what was counted after `start`, and the present gauges."""
        return Numbers(
            counters={name: value - start.counters.get(name, 0.0) for name, value in self.counters.items()},
            gauges=self.gauges,
            histograms={name: since(one, start.histograms.get(name)) for name, one in self.histograms.items()},
        )

    def of(self, behavior: str) -> Numbers:
        """Returns the numbers of one behavior, by name without the behavior, and simulators' own statistics."""
        return Numbers(
            counters=_of(behavior, self.counters),
            gauges=_of(behavior, self.gauges),
            histograms=_of(behavior, self.histograms),
        )

    def mean(self, name: str) -> float | None:
        """Returns the mean of the values in `name.sum` and `name.count`, None if there are none."""
        number = self.counters.get(f"{name}.count", 0.0)
        return self.counters.get(f"{name}.sum", 0.0) / number if number > 0 else None

    def deviation(self, name: str) -> float | None:
        """Returns the standard deviation (over n) of the values in `name.sum`, `.sumsq` and `.count`, None for none."""
        mean, squares = self.mean(name), self.counters.get(f"{name}.sumsq")
        if mean is None or squares is None:
            return None
        return math.sqrt(max(0.0, squares / self.counters[f"{name}.count"] - mean**2))


def _of(behavior: str, values: dict[str, T]) -> dict[str, T]:
    end = f"/{behavior}"
    own = {name: value for name, value in values.items() if name.startswith(SIMULATOR)}
    return {name.removesuffix(end): value for name, value in values.items() if name.endswith(end)} | own


def combined(parts: Iterable[Numbers | Metrics]) -> Numbers:
    """Returns the sums of numbers by name."""
    total = Numbers()
    for part in parts:
        for name, value in part.counters.items():
            total.counters[name] = total.counters.get(name, 0.0) + value
        for name, value in part.gauges.items():
            known = total.gauges.get(name, 0.0)
            total.gauges[name] = max(known, value) if name.startswith(_HIGHEST_COUNTS) else known + value
        for name, histogram in part.histograms.items():
            before = total.histograms.get(name)
            total.histograms[name] = histogram if before is None else added(before, histogram)
    return total


_NOTHING: Final = Metrics(service="", start="", sequence=0, time_s=0.0)


@dataclass(slots=True)
class Totals:
    """Adds the numbers of one service over all its incarnations: counters and histograms never fall.

    Attributes:
        closed: earlier incarnations, whose sums are `past`.
        latest: newest record of the present incarnation; its `start` is "" before the first record.
    """

    closed: list[str] = field(default_factory=list)
    past: Numbers = field(default_factory=Numbers)
    latest: Metrics = _NOTHING

    @property
    def starts(self) -> int:
        """Returns the number of incarnations seen so far."""
        return len(self.closed) + bool(self.latest.start)

    @property
    def numbers(self) -> Numbers:
        """Returns the counters and histograms of all incarnations, and the gauges of the present one."""
        return combined([self.past, self.latest])

    def update(self, metrics: Metrics) -> bool:
        """Adds a record; returns False if it is not newer than the known one."""
        known, same = self.latest, metrics.start == self.latest.start
        if metrics.start in self.closed or (same and metrics.sequence <= known.sequence):
            return False
        if known.start and not same:
            self.past = replace(self.numbers, gauges={})
            self.closed = [*self.closed, known.start][-_INCARNATIONS_KEPT:]
        self.latest = metrics
        return True


class Overview:
    """Adds the numbers of all services over all their incarnations.

    Args:
        services: names of the services that are expected to publish.
        training: False if the run only acts: a behavior's progress is then counted in steps produced
            instead of steps trained.
    """

    def __init__(self, services: Iterable[str] = (), *, training: bool = True) -> None:
        self.services: dict[str, Totals] = {service: Totals() for service in services}
        self.training = training
        self._steps: dict[str, int] = {}
        self._numbers: Numbers | None = None

    def expect(self, services: Iterable[str]) -> None:
        """Expects further services to publish."""
        self.services = {service: Totals() for service in services} | self.services

    def update(self, metrics: Metrics) -> bool:
        """Adds a record; returns False if it is not newer than the known one."""
        fresh = self.services.setdefault(metrics.service, Totals()).update(metrics)
        if fresh:
            self._numbers = None
        return fresh

    def restore(self, services: dict[str, Totals]) -> None:
        """Continues from the totals of an earlier monitor of this run."""
        self.services |= services
        self._numbers = None

    @property
    def numbers(self) -> Numbers:
        """Returns the sums over all services."""
        if self._numbers is None:
            self._numbers = combined(totals.numbers for totals in self.services.values())
        return self._numbers

    def behaviors(self) -> list[str]:
        """Returns the names of all behaviors that any service has counted, sorted."""
        names = [*self.numbers.counters, *self.numbers.gauges]
        return sorted({name.removeprefix(first) for name in names for first in _PREFIXES if name.startswith(first)})

    def trained(self, behavior: str) -> int:
        """Returns the steps trained by all incarnations, including those that a crash rolled back; never falls."""
        return int(self.numbers.counters.get(f"{'trained' if self.training else 'steps'}/{behavior}", 0))

    def step(self, behavior: str) -> int:
        """Returns the steps in the lineage of the current weights, which falls when a crash rolls updates back."""
        if self.training:  # the learner's gauge, which is consistent with its other numbers, before coordination's
            for gauge in (f"step/{behavior}", f"step_counts.trained/{behavior}"):
                if gauge in self.numbers.gauges:
                    self._steps[behavior] = int(self.numbers.gauges[gauge])
                    break
        return self._steps.get(behavior, self.trained(behavior))
