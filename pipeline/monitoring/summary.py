"""Describes a run: `services.jsonl` over time, `status.json` now, and `summary.json` at its end."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Final, Literal

from pydantic import TypeAdapter

from sparring.pipeline.errors import FAILED, STALLED
from sparring.pipeline.files import Json
from sparring.pipeline.monitoring.intervals import REWARD_PER_STEP, Interval, lessons, step_counts
from sparring.pipeline.monitoring.metrics import count, highest, mean, quantile
from sparring.pipeline.monitoring.overview import STEP_COUNTS, Numbers, Overview, Totals
from sparring.pipeline.monitoring.progress import IDLE, PASSED

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
        unaccounted: steps that simulators count beyond the produced ones; None before coordination has ended in order,
            and where the last counts of a former session, or of a stepping process that died, are missing.
        checkpoint: path of the checkpoint of the final weights; None if none was saved, or the run is under way.
        weights_sha256: hash of these weights, likewise.
        self_play: ratings, and results against each opponent; None without self-play, or while the run is under way.
    """

    steps: int = 0
    steps_per_s: float = 0.0
    updates: int = 0
    episodes: int = 0
    reward_mean_last100: float | None = None
    step_counts: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(STEP_COUNTS, 0))
    lag: Mapping[str, float | None] = field(default_factory=lambda: {"mean": None, "max": None})
    losses: Mapping[str, int] = field(default_factory=dict)
    unaccounted: int | None = None
    checkpoint: str | None = None
    weights_sha256: str | None = None
    self_play: Mapping[str, Json] | None = None

    @property
    def produced(self) -> int:
        """Returns the steps produced, over all sessions."""
        return self.step_counts.get("produced", 0)

    @property
    def balanced(self) -> bool:
        """Returns whether produced is the sum of the other columns."""
        return self.produced == sum(self.step_counts[column] for column in STEP_COUNTS[1:])


_RESULTS: Final = TypeAdapter(dict[str, BehaviorSummary])


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
        LookupError, TypeError, ValueError, AttributeError: the content is malformed.
    """
    return _RESULTS.validate_python({behavior: entry["figures"] for behavior, entry in status["behaviors"].items()})


def from_summary(content: Mapping[str, Json]) -> dict[str, BehaviorSummary]:
    """Returns the results of every behavior from the content of `summary.json`. Raises as `from_status`."""
    return _RESULTS.validate_python(content["behaviors"])


def summary(
    *, run_id: str, status: Status, wall_s: float, error: str | None, behaviors: Mapping[str, BehaviorSummary]
) -> dict[str, Json]:
    """Returns the content of `summary.json`.

    Args:
        run_id: id of the run.
        status: way in which the run ended.
        wall_s: seconds that the run took.
        error: failure of the run, with the service that failed; None for a success.
        behaviors: results by behavior name.

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
        "behaviors": {name: asdict(one) for name, one in sorted(behaviors.items())},
    }


# ---------------------------------------------------------------- status


class CounterWindows:
    """Reports the changes of every service's numbers since its last report."""

    def __init__(self) -> None:
        self._starts: dict[str, tuple[float, Numbers]] = {}

    def report(self, service: str, totals: Totals, time_s: float) -> dict[str, Json]:
        """Returns the line of a service for `services.jsonl`, and begins its next window.

        Args:
            service: service name.
            totals: numbers of the service.
            time_s: seconds since the epoch.
        """
        begun_s, before = self._starts.get(service, (time_s, Numbers()))
        now = totals.numbers
        self._starts[service] = time_s, now
        changed = now.since(before)
        return {
            "type": "service",
            "service": service,
            "time_s": time_s,
            "seconds": max(0.0, time_s - begun_s),
            "waiting_for": totals.latest.waiting_for,
            "starts": totals.starts,
            "counters": {
                name: value for name, value in changed.counters.items() if value and not name.startswith("queue.")
            },
            "gauges": {name: value for name, value in changed.gauges.items() if not name.startswith("queue.")},
            "queues": queues(changed),
            "histograms": spreads(changed),
        }


def queues(numbers: Numbers) -> dict[str, dict[str, float]]:
    """Returns the queue ends of a service: messages, steps, capacity, waits and waited_s by queue name."""
    found: dict[str, dict[str, float]] = {}
    for name, value in (numbers.gauges | numbers.counters).items():
        if name.startswith("queue."):
            queue, _, field = name.removeprefix("queue.").rpartition(".")
            found.setdefault(queue, {})[field] = value
    return found


def watermarks(numbers: Numbers) -> dict[str, dict[str, float]]:
    """Returns what a service has passed on, by product: `count`, and `idle_s`, the seconds since the last."""
    counts = {name.removeprefix(PASSED): count for name, count in numbers.counters.items() if name.startswith(PASSED)}
    return {name: {"count": count, "idle_s": numbers.gauges.get(IDLE + name, 0.0)} for name, count in counts.items()}


def spreads(numbers: Numbers) -> dict[str, dict[str, float | None]]:
    """Summarizes each histogram by count, mean, p50, p99 and max, which are None if it is empty."""
    return {
        name: {
            "count": count(one),
            "mean": mean(one),
            "p50": quantile(one, 0.5),
            "p99": quantile(one, 0.99),
            "max": highest(one),
        }
        for name, one in numbers.histograms.items()
    }


def service_entry(
    totals: Totals, last: Mapping[str, Json] | None, heartbeat_age_s: float, age_s: float
) -> dict[str, Json]:
    """Returns the status of a service.

    Args:
        totals: numbers of the service.
        last: its last line for `services.jsonl`, with histograms of the recent past.
        heartbeat_age_s: seconds since the service last answered, infinite if it never did.
        age_s: seconds since its numbers arrived, likewise.
    """
    latest, numbers = totals.latest, totals.numbers
    return {
        "start": latest.start,
        "starts": totals.starts,
        "heartbeat_age_s": heartbeat_age_s,
        "age_s": age_s,
        "waiting_for": latest.waiting_for,
        "waits": [asdict(wait) for wait in latest.waits],
        "cpu_s": numbers.gauges.get("cpu_s", 0.0),
        "rss_bytes": int(numbers.gauges.get("rss_bytes", 0)),
        "simulators": int(numbers.gauges["simulators"]) if "simulators" in numbers.gauges else None,
        "queues": queues(numbers),
        "passed": watermarks(numbers),
        "histograms": last["histograms"] if last else spreads(numbers),
    }


def behavior_entry(now: Interval, last: Interval | None, one: BehaviorSummary, steps_per_s: float) -> dict[str, Json]:
    """Returns the status of a behavior.

    Args:
        now: present interval.
        last: interval before it.
        one: results so far.
        steps_per_s: steps produced per second in the recent past.
    """
    shown = now if now.reward is not None or last is None else last
    return {
        "step": now.step,
        "max_steps": now.max_steps,
        "steps_per_s": steps_per_s,
        **{name: getattr(shown, name) for name in _SHOWN},
        "reward_per_step": shown.means.get(REWARD_PER_STEP),
        "open_episodes": now.open_episodes,
        "oldest": now.oldest,
        **{name: int(now.gauges.get(name, 0)) for name in ("agents", "in_flight", "budget", "version")},
        "lessons": lessons(now),
        "figures": one,
    }


_SHOWN = ("reward", "reward_deviation", "episode_length", "lag_mean", "lag_max")
"""Statistics of an interval in the status of its behavior."""
