"""Summarizes a run: the content of `summary.json`, and the same figures for the live status."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Final, Literal

from sparring.pipeline.errors import FAILED, STALLED
from sparring.pipeline.files import Json
from sparring.pipeline.monitoring.intervals import step_counts
from sparring.pipeline.monitoring.metrics import highest, mean
from sparring.pipeline.monitoring.overview import STEP_COUNTS, Overview

Status = Literal["completed", "stopped", "failed", "stalled"]
STATUSES: Final[Mapping[Status, int]] = {"completed": 0, "stopped": 0, "failed": FAILED, "stalled": STALLED}
"""Exit status of each way in which a run can end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BehaviorSummary:
    """Holds the results of one behavior; None stands for an unknown value.

    Attributes:
        steps: steps trained in the lineage of the final weights.
        steps_per_s: steps trained per second while the run was active.
        updates: updates that the monitor has received; in the summary those in the lineage of the final weights.
        episodes: episodes ended.
        reward_mean_last100: mean return of the last 100 episodes.
        step_counts: steps by column: produced, trained, ghost, stale, lost, open.
        lag: mean and max policy lag of all rows trained.
        losses: lost steps by cause; empty while the run is under way.
        unaccounted: steps that simulators count beyond the produced ones; None before coordination has ended in order.
    """

    steps: int
    steps_per_s: float
    updates: int
    episodes: int
    reward_mean_last100: float | None
    step_counts: Mapping[str, int]
    lag: Mapping[str, float | None]
    losses: Mapping[str, int] = field(default_factory=dict)
    unaccounted: int | None = None

    @property
    def balanced(self) -> bool:
        """Returns whether produced is the sum of the other columns."""
        return self.step_counts["produced"] == sum(self.step_counts[column] for column in STEP_COUNTS[1:])


UNKNOWN: Final = BehaviorSummary(
    steps=0,
    steps_per_s=0.0,
    updates=0,
    episodes=0,
    reward_mean_last100=None,
    step_counts=dict.fromkeys(STEP_COUNTS, 0),
    lag={"mean": None, "max": None},
)
"""Results of a behavior of which the monitor has reported nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSummary:
    """Names the saved results of a behavior.

    Attributes:
        checkpoint: path of the checkpoint of the final weights, None if none was saved.
        weights_sha256: hash of these weights.
        self_play: ratings, and results against each opponent; None without self-play.
    """

    checkpoint: str | None = None
    weights_sha256: str | None = None
    self_play: Mapping[str, Json] | None = None


def summarize_behavior(overview: Overview, behavior: str, steps_per_s: float) -> BehaviorSummary:
    """Returns the results of a behavior so far.

    Args:
        overview: numbers of all services.
        behavior: behavior name.
        steps_per_s: rate of the behavior from `Pace.mean`.
    """
    numbers = overview.numbers.of(behavior)
    lag = numbers.histograms.get("lag")
    return BehaviorSummary(
        steps=overview.step(behavior),
        steps_per_s=round(steps_per_s, 3),
        updates=int(numbers.counters.get("updates", 0)),
        episodes=int(numbers.gauges.get("episodes", numbers.counters.get("episode_length.count", 0))),
        reward_mean_last100=numbers.gauges.get("reward_mean_last100"),
        step_counts=dict.fromkeys(STEP_COUNTS, 0) | step_counts(numbers.gauges),
        lag={"mean": mean(lag) if lag else None, "max": highest(lag) if lag else None},
    )


def from_status(status: Mapping[str, Json]) -> dict[str, BehaviorSummary]:
    """Returns the results of every behavior from the content of `status.json`.

    Raises:
        KeyError, TypeError: the content is malformed.
    """
    return {behavior: BehaviorSummary(**entry["figures"]) for behavior, entry in status["behaviors"].items()}


def summary(
    *,
    run_id: str,
    status: Status,
    wall_s: float,
    error: str | None,
    behaviors: Mapping[str, BehaviorSummary],
    kept: Mapping[str, CheckpointSummary],
) -> dict[str, Json]:
    """Returns the content of `summary.json`.

    Args:
        run_id: id of the run.
        status: way in which the run ended.
        wall_s: seconds that the run took.
        error: failure of the run, with the service that failed; None for a success.
        behaviors: results by behavior name.
        kept: saved results by behavior name; a missing name has none.

    Raises:
        ValueError: a failed or stalled run has no error.
    """
    if STATUSES[status] and not error:
        raise ValueError("got a failed run without an error; expected the service that failed, and how")
    return {
        "run_id": run_id,
        "status": status,
        "wall_s": round(wall_s, 3),
        "error": error,
        "behaviors": {
            name: asdict(one) | asdict(kept.get(name, CheckpointSummary())) for name, one in sorted(behaviors.items())
        },
    }
