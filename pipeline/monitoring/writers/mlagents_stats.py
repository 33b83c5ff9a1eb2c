"""The part of ML-Agents' interface that packages with a `StatsWriter` use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from statistics import fmean, pstdev
from types import SimpleNamespace
from typing import Any

from sparring.pipeline.files import Json

__all__ = ["StatsAggregationMethod", "StatsPropertyType", "StatsSummary", "StatsWriter"]


class StatsAggregationMethod(Enum):
    """Says how the values of a statistic become one."""

    AVERAGE = 0
    MOST_RECENT = 1
    SUM = 2
    HISTOGRAM = 3


class StatsPropertyType(Enum):
    """Says what a property is about: the settings of a behavior, or that it plays against itself."""

    HYPERPARAMETERS = "hyperparameters"
    SELF_PLAY = "selfplay"


@dataclass(frozen=True)
class StatsSummary:
    """Summarizes the values of a statistic within an interval.

    Attributes:
        full_dist: the values; here their mean alone.
        aggregation_method: how they become one.
    """

    full_dist: Sequence[float]
    aggregation_method: StatsAggregationMethod

    @staticmethod
    def empty() -> "StatsSummary":
        """Returns a summary without values."""
        return StatsSummary([], StatsAggregationMethod.AVERAGE)

    @property
    def mean(self) -> float:
        """Returns the mean; 0 without values."""
        return fmean(self.full_dist) if self.full_dist else 0.0

    @property
    def std(self) -> float:
        """Returns the standard deviation; 0 without values."""
        return pstdev(self.full_dist) if self.full_dist else 0.0

    @property
    def num(self) -> int:
        """Returns the number of values."""
        return len(self.full_dist)

    @property
    def sum(self) -> float:
        """Returns the sum."""
        return float(sum(self.full_dist))

    @property
    def aggregated_value(self) -> float:
        """Returns the sum or the latest value where the method says so, else the mean."""
        if self.aggregation_method is StatsAggregationMethod.SUM:
            return self.sum
        if self.aggregation_method is StatsAggregationMethod.MOST_RECENT:
            return self.full_dist[-1] if self.full_dist else 0.0
        return self.mean


class StatsWriter:
    """Writes the statistics of a behavior, which ML-Agents calls a category."""

    def on_add_stat(
        self,
        category: str,
        key: str,
        value: float,
        aggregation: StatsAggregationMethod = StatsAggregationMethod.AVERAGE,
    ) -> None:
        """Is given single values by ML-Agents; here, only intervals are there to be written."""

    def write_stats(self, category: str, values: dict[str, StatsSummary], step: int) -> None:
        """Writes the statistics of an interval, by name."""
        raise NotImplementedError

    def add_property(self, category: str, property_type: StatsPropertyType, value: Any) -> None:
        """Is given the settings of a behavior (`HYPERPARAMETERS`), and whether it plays against itself."""


class RunOptions:
    """Holds the configuration of a run in attributes, as `options.checkpoint_settings.run_id`.

    Args:
        settings: the whole configuration.
        run_id: of the run.
    """

    def __init__(self, settings: Mapping[str, Json], run_id: str) -> None:
        kept = settings["checkpoint_settings"]
        write_path = str(Path(kept["results_dir"], run_id))
        own = {**kept, "run_id": run_id, "write_path": write_path, "run_logs_dir": str(Path(write_path, "run_logs"))}
        self._settings = {**settings, "checkpoint_settings": own}
        vars(self).update({name: _attributes(value) for name, value in self._settings.items() if name != "behaviors"})
        self.behaviors = {name: _attributes(one) for name, one in settings["behaviors"].items()}

    def as_dict(self) -> dict[str, Json]:
        """Returns the configuration as JSON data."""
        return self._settings


def _attributes(value: Json) -> Json:
    """Returns a mapping as an object with attributes."""
    return (
        SimpleNamespace(**{name: _attributes(one) for name, one in value.items()}) if isinstance(value, dict) else value
    )
