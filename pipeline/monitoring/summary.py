"""What a run came to: the figures of `summary.json`, and of the live status before it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from sparring.pipeline.errors import FAILED, STALLED
from sparring.pipeline.monitoring.intervals import step_counts
from sparring.pipeline.monitoring.metrics import highest, mean
from sparring.pipeline.monitoring.overview import STEP_COUNTS, Overview

Status = Literal["completed", "stopped", "failed", "stalled"]
STATUSES: Final[Mapping[Status, int]] = {"completed": 0, "stopped": 0, "failed": FAILED, "stalled": STALLED}
"""How a run can end, and the exit status that says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BehaviorSummary:
    """What one behavior came to. None where there is nothing to tell.

    Attributes:
        steps: trained, in the lineage of the final weights.
        steps_per_s: trained per second while the run was active.
        updates: published, as far as the monitor heard; in the summary those in the lineage of the final weights.
        episodes: ended.
        reward_mean_last100: mean return of the last 100 of them.
        step_counts: steps by column: produced, trained, ghost, stale, lost, open.
        lag_mean: mean policy lag of all rows trained, `lag_max` the highest.
    """

    steps: int
    steps_per_s: float
    updates: int
    episodes: int
    reward_mean_last100: float | None
    step_counts: Mapping[str, int]
    lag_mean: float | None
    lag_max: float | None

    @property
    def balanced(self) -> bool:
        """Whether produced is the sum of the other columns."""
        return self.step_counts["produced"] == sum(self.step_counts[column] for column in STEP_COUNTS[1:])


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSummary:
    """What is kept of a behavior.

    Attributes:
        checkpoint: of its final weights, as text; None where none was saved.
        weights_sha256: of these weights.
        self_play: ratings, and how it fared against each opponent; None without self-play.
    """

    checkpoint: str | None = None
    weights_sha256: str | None = None
    self_play: Mapping[str, Any] | None = None


def figures(overview: Overview, behavior: str, steps_per_s: float) -> BehaviorSummary:
    """What a behavior has come to so far.

    Args:
        overview: the numbers of all services.
        behavior: name.
        steps_per_s: its rate, as `Pace.mean` tells it.
    """
    numbers = overview.of(behavior)
    lag = numbers.histograms.get("lag")
    ended = numbers.gauges.get("episodes", numbers.counters.get("episode_length.count", 0))
    return BehaviorSummary(
        steps=overview.step(behavior),
        steps_per_s=steps_per_s,
        updates=int(numbers.counters.get("updates", 0)),
        episodes=int(ended),
        reward_mean_last100=numbers.gauges.get("reward_mean_last100"),
        step_counts=dict.fromkeys(STEP_COUNTS, 0) | step_counts(numbers.gauges),
        lag_mean=_told(mean(lag)) if lag else None,
        lag_max=_told(highest(lag)) if lag else None,
    )


def from_status(status: Mapping[str, Any]) -> dict[str, BehaviorSummary]:
    """The figures of every behavior out of the content of `status.json`.

    Raises:
        KeyError, TypeError: it is something else.
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
) -> dict[str, Any]:
    """The content of `summary.json`.

    Args:
        run_id: of the run.
        status: how it ended.
        wall_s: seconds it took.
        error: what went wrong, with the service that failed; None where nothing did.
        behaviors: figures by behavior name.
        kept: checkpoint and hash by behavior name; a missing one counts as nothing kept.

    Raises:
        ValueError: `status` is not one of `STATUSES`, or a failed or stalled run comes without its error.
    """
    if status not in STATUSES:
        raise ValueError(f"got status {status!r}; expected one of {list(STATUSES)}")
    if STATUSES[status] and not error:
        raise ValueError("got a failed run without an error; say which service failed and how")
    return {
        "run_id": run_id,
        "status": status,
        "wall_s": round(wall_s, 3),
        "error": error,
        "behaviors": {
            name: _entry(one, kept.get(name, CheckpointSummary())) for name, one in sorted(behaviors.items())
        },
    }


def _entry(one: BehaviorSummary, kept: CheckpointSummary) -> dict[str, Any]:
    return {
        "steps": one.steps,
        "steps_per_s": round(one.steps_per_s, 3),
        "updates": one.updates,
        "episodes": one.episodes,
        "reward_mean_last100": _told(one.reward_mean_last100),
        "step_counts": {column: one.step_counts[column] for column in STEP_COUNTS},
        "lag": {"mean": _told(one.lag_mean), "max": _told(one.lag_max)},
        **asdict(kept),
    }


def _told(value: float | None) -> float | None:
    """JSON has no NaN: nothing to tell."""
    return value if value is not None and math.isfinite(value) else None
