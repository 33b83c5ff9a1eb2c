"""Describes the present state of a run: the content of `status.json`, and the lines of `services.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sparring.pipeline.messages.metrics import Histogram
from sparring.pipeline.monitoring.intervals import Interval, lessons
from sparring.pipeline.monitoring.metrics import count, highest, mean, quantile, since
from sparring.pipeline.monitoring.progress import IDLE, PASSED
from sparring.pipeline.monitoring.summary import BehaviorSummary
from sparring.pipeline.monitoring.totals import Totals


@dataclass(frozen=True, kw_only=True, slots=True)
class _WindowStart:
    time_s: float
    counters: Mapping[str, float]
    histograms: Mapping[str, Histogram]


class CounterWindows:
    """Reports the changes of every service's numbers since its last report."""

    def __init__(self) -> None:
        self._starts: dict[str, _WindowStart] = {}

    def report(self, service: str, totals: Totals, time_s: float) -> dict[str, Any]:
        """Returns the line of a service for `services.jsonl`, and begins its next window.

        Args:
            service: service name.
            totals: numbers of the service.
            time_s: seconds since the epoch.
        """
        start = self._starts.get(service, _WindowStart(time_s=time_s, counters={}, histograms={}))
        counters, histograms = totals.counters(), totals.histograms()
        self._starts[service] = _WindowStart(time_s=time_s, counters=counters, histograms=histograms)
        changed = {name: value - start.counters.get(name, 0.0) for name, value in counters.items()}
        return {
            "type": "service",
            "service": service,
            "time_s": time_s,
            "seconds": max(0.0, time_s - start.time_s),
            "waiting_for": totals.latest.waiting_for if totals.latest else "",
            "starts": totals.starts,
            "counters": {name: value for name, value in changed.items() if value and not name.startswith("queue.")},
            "gauges": {name: value for name, value in totals.gauges().items() if not name.startswith("queue.")},
            "queues": queues(changed, totals.gauges()),
            "histograms": {
                name: spread(since(value, start.histograms.get(name))) for name, value in histograms.items()
            },
        }


def queues(counters: Mapping[str, float], gauges: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Returns the queue ends of a service: messages, steps, capacity, waits and waited_s by queue name."""
    found: dict[str, dict[str, float]] = {}
    for name, value in [*gauges.items(), *counters.items()]:
        if name.startswith("queue."):
            queue, _, field = name.removeprefix("queue.").rpartition(".")
            found.setdefault(queue, {})[field] = value
    return found


def watermarks(counters: Mapping[str, float], gauges: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Returns what a service has passed on, by product: `count`, and `idle_s`, the seconds since the last."""
    counts = {name.removeprefix(PASSED): count for name, count in counters.items() if name.startswith(PASSED)}
    return {name: {"count": count, "idle_s": gauges.get(IDLE + name, 0.0)} for name, count in counts.items()}


def spread(histogram: Histogram) -> dict[str, float | None]:
    """Summarizes a histogram by count, mean, p50, p99 and max, which are None if it is empty."""
    values = {
        "mean": mean(histogram),
        "p50": quantile(histogram, 0.5),
        "p99": quantile(histogram, 0.99),
        "max": highest(histogram),
    }
    return {"count": count(histogram), **{k: v if math.isfinite(v) else None for k, v in values.items()}}


def service_entry(
    totals: Totals, last: Mapping[str, Any] | None, heartbeat_age_s: float, age_s: float
) -> dict[str, Any]:
    """Returns the status of a service.

    Args:
        totals: numbers of the service.
        last: its last line for `services.jsonl`, with histograms of the recent past.
        heartbeat_age_s: seconds since the service last answered.
        age_s: seconds since its numbers arrived.
    """
    latest, gauges = totals.latest, totals.gauges()
    recent = last["histograms"] if last else {name: spread(one) for name, one in totals.histograms().items()}
    return {
        "start": latest.start if latest else "",
        "starts": totals.starts,
        "heartbeat_age_s": heartbeat_age_s if math.isfinite(heartbeat_age_s) else None,
        "age_s": age_s if math.isfinite(age_s) else None,
        "waiting_for": latest.waiting_for if latest else "",
        "rss_bytes": int(gauges.get("rss_bytes", 0)),
        "simulators": int(gauges["simulators"]) if "simulators" in gauges else None,
        "queues": queues(totals.counters(), gauges),
        "passed": watermarks(totals.counters(), gauges),
        "histograms": recent,
    }


def behavior_entry(now: Interval, last: Interval | None, one: BehaviorSummary, steps_per_s: float) -> dict[str, Any]:
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
        "reward": shown.reward,
        "reward_deviation": shown.reward_deviation,
        "episode_length": shown.episode_length,
        "lag_mean": shown.lag_mean,
        "lag_max": shown.lag_max,
        "agents": int(now.gauges.get("agents", 0)),
        "open_episodes": now.open_episodes,
        "oldest": now.oldest,
        "in_flight": int(now.gauges.get("in_flight", 0)),
        "budget": int(now.gauges.get("budget", 0)),
        "version": int(now.gauges.get("version", 0)),
        "lessons": lessons(now),
        "figures": asdict(one),
    }
