"""The numbers of all services of a run in one place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from sparring.pipeline.messages.metrics import Histogram, Metrics
from sparring.pipeline.monitoring.metrics import SIMULATOR, added
from sparring.pipeline.monitoring.totals import Totals

T = TypeVar("T")

STEP_COUNTS: Final = ("produced", "trained", "ghost", "stale", "lost", "open")
"""Columns of the books, in their order: the first is the sum of the others."""

_HIGHEST_COUNTS: Final = ("episode_oldest",)  # gauges of several services that do not add up
_MARKS: Final = ("steps/", "trained/", "books.produced/", "max_steps/")  # names that tell of a behavior


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """Numbers of one behavior and of simulators, or of all services, by name.

    Attributes:
        counters: sums over services and starts.
        gauges: sums over services of their present values; `episode_oldest` is the highest of them.
        histograms: sums over services and starts.
    """

    counters: Mapping[str, float]
    gauges: Mapping[str, float]
    histograms: Mapping[str, Histogram]


class Overview:
    """The numbers of all services, over all their starts.

    Args:
        services: names of those that are expected to publish.
        training: False where the run only acts: a behavior's progress is then counted in steps
            produced instead of steps trained.
    """

    def __init__(self, services: Iterable[str] = (), *, training: bool = True) -> None:
        self.services: dict[str, Totals] = {service: Totals() for service in services}
        self.training = training
        self._steps: dict[str, int] = {}
        self._together: Numbers | None = None

    def update(self, metrics: Metrics) -> bool:
        """Takes a record in; False where it is no newer than what is known."""
        fresh = self.services.setdefault(metrics.service, Totals()).update(metrics)
        if fresh:
            self._together = None
        return fresh

    def behaviors(self) -> list[str]:
        """Names of all behaviors that some service has counted, sorted."""
        numbers = self._all()
        names = [*numbers.counters, *numbers.gauges]
        return sorted({name.removeprefix(mark) for name in names for mark in _MARKS if name.startswith(mark)})

    def of(self, behavior: str) -> Numbers:
        """The numbers of one behavior, by name without the behavior, and what simulators tell of themselves."""
        numbers, end = self._all(), f"/{behavior}"
        return Numbers(
            counters=_ending(numbers.counters, end),
            gauges=_ending(numbers.gauges, end),
            histograms=_ending(numbers.histograms, end),
        )

    def trained(self, behavior: str) -> int:
        """Steps the run has worked through over all starts, what a crash rolled back included; never falls."""
        return int(self._all().counters.get(f"{'trained' if self.training else 'steps'}/{behavior}", 0))

    def step(self, behavior: str) -> int:
        """Steps in the lineage of the current weights: falls where a crash rolled updates back."""
        numbers = self._all()
        if self.training:  # the learner's own word, which came with its other counts, before coordination's
            for gauge in (f"step/{behavior}", f"books.trained/{behavior}"):
                if gauge in numbers.gauges:
                    self._steps[behavior] = int(numbers.gauges[gauge])
                    break
        return self._steps.get(behavior, self.trained(behavior))

    def state(self) -> dict[str, Any]:
        """Everything as plain values for JSON."""
        return {service: totals.state() for service, totals in self.services.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned.

        Raises:
            KeyError, TypeError, ValueError: it is something else; nothing has changed.
        """
        restored = {service: Totals.restored(totals) for service, totals in state.items()}
        self.services |= restored
        self._together = None

    def _all(self) -> Numbers:
        if self._together is None:
            self._together = _together(self.services.values())
        return self._together


def _together(services: Iterable[Totals]) -> Numbers:
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
