"""Describes the present state of a run: the content of `status.json`, and the lines of `services.jsonl`."""

from collections.abc import Mapping

from sparring.pipeline.files import Json
from sparring.pipeline.monitoring.intervals import REWARD_PER_STEP, Interval, lessons
from sparring.pipeline.monitoring.metrics import count, highest, mean, quantile
from sparring.pipeline.monitoring.overview import Numbers, Totals
from sparring.pipeline.monitoring.progress import IDLE, PASSED
from sparring.pipeline.monitoring.summary import BehaviorSummary


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
            "waiting_for": totals.latest.waiting_for if totals.latest else "",
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
        "start": latest.start if latest else "",
        "starts": totals.starts,
        "heartbeat_age_s": heartbeat_age_s,
        "age_s": age_s,
        "waiting_for": latest.waiting_for if latest else "",
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
