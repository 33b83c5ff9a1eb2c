"""Combines the numbers of all services of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from sparring.pipeline.messages.metrics import Histogram, Metrics
from sparring.pipeline.monitoring.metrics import SIMULATOR, added
from sparring.pipeline.monitoring.totals import Totals

T = TypeVar("T")

STEP_COUNTS: Final = ("produced", "trained", "ghost", "stale", "lost", "open")
"""Columns of the step accounting: the first is the sum of the others."""

_HIGHEST_COUNTS: Final = ("episode_oldest",)  # gauges of several services that do not add up
_PREFIXES: Final = ("steps/", "trained/", "step_counts.produced/", "max_steps/")  # of numbers that every behavior has


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """Holds the numbers of one behavior and of simulators, or of all services, by name.

    Attributes:
        counters: sums over services and incarnations.
        gauges: sums over services of the present values; `episode_oldest` is the highest value.
        histograms: sums over services and incarnations.
    """

    counters: Mapping[str, float]
    gauges: Mapping[str, float]
    histograms: Mapping[str, Histogram]


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
        self._combined: Numbers | None = None

    def expect(self, services: Iterable[str]) -> None:
        """Expects further services to publish."""
        self.services = {service: Totals() for service in services} | self.services

    def update(self, metrics: Metrics) -> bool:
        """Adds a record; returns False if it is not newer than the known one."""
        fresh = self.services.setdefault(metrics.service, Totals()).update(metrics)
        if fresh:
            self._combined = None
        return fresh

    def behaviors(self) -> list[str]:
        """Returns the names of all behaviors that any service has counted, sorted."""
        numbers = self._all()
        names = [*numbers.counters, *numbers.gauges]
        return sorted({name.removeprefix(first) for name in names for first in _PREFIXES if name.startswith(first)})

    def of(self, behavior: str) -> Numbers:
        """Returns the numbers of one behavior, by name without the behavior, and simulators' own statistics."""
        numbers, end = self._all(), f"/{behavior}"
        return Numbers(
            counters=_ending(numbers.counters, end),
            gauges=_ending(numbers.gauges, end),
            histograms=_ending(numbers.histograms, end),
        )

    def trained(self, behavior: str) -> int:
        """Returns the steps trained by all incarnations, including those that a crash rolled back; never falls."""
        return int(self._all().counters.get(f"{'trained' if self.training else 'steps'}/{behavior}", 0))

    def step(self, behavior: str) -> int:
        """Returns the steps in the lineage of the current weights, which falls when a crash rolls updates back."""
        numbers = self._all()
        if self.training:  # the learner's gauge, which is consistent with its other numbers, before coordination's
            for gauge in (f"step/{behavior}", f"step_counts.trained/{behavior}"):
                if gauge in numbers.gauges:
                    self._steps[behavior] = int(numbers.gauges[gauge])
                    break
        return self._steps.get(behavior, self.trained(behavior))

    def state(self) -> dict[str, Any]:
        """Returns the state as plain values for JSON."""
        return {service: totals.state() for service, totals in self.services.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from what `state` returned.

        Raises:
            KeyError, TypeError, ValueError: the state is malformed; nothing has changed.
        """
        restored = {service: Totals.restored(totals) for service, totals in state.items()}
        self.services |= restored
        self._combined = None

    def _all(self) -> Numbers:
        if self._combined is None:
            self._combined = _combine(self.services.values())
        return self._combined


def _combine(services: Iterable[Totals]) -> Numbers:
    counters: dict[str, float] = {}
    gauges: dict[str, float] = {}
    histograms: dict[str, Histogram] = {}
    for totals in services:
        for name, value in totals.counters().items():
            counters[name] = counters.get(name, 0.0) + value
        for name, value in totals.gauges().items():
            if name.startswith(_HIGHEST_COUNTS):
                gauges[name] = max(gauges.get(name, value), value)
            else:
                gauges[name] = gauges.get(name, 0.0) + value
        for name, histogram in totals.histograms().items():
            histograms[name] = added(histograms[name], histogram) if name in histograms else histogram
    return Numbers(counters=counters, gauges=gauges, histograms=histograms)


def _ending(values: Mapping[str, T], end: str) -> dict[str, T]:
    own = {name: value for name, value in values.items() if name.startswith(SIMULATOR)}
    return {name.removesuffix(end): value for name, value in values.items() if name.endswith(end)} | own
