"""What happened to a behavior between two summaries.

An interval ends when the trained steps pass a multiple of `summary_freq`. Services publish about once
a second, so that a fast run may pass several multiples at once: they are one interval then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from sparring.pipeline.messages.metrics import Histogram
from sparring.pipeline.monitoring.metrics import SIMULATOR, deviation_of, highest, mean, mean_of, since
from sparring.pipeline.monitoring.overview import STEP_COUNTS, Numbers, Overview
from sparring.pipeline.monitoring.progress import IDLE
from sparring.pipeline.monitoring.totals import from_plain, plain

NAMES: Final = {
    "episode_return": "Environment/Cumulative Reward",
    "episode_length": "Environment/Episode Length",
    "group_return": "Environment/Group Cumulative Reward",
}
"""Counters of assembly, by the name that users of ML-Agents know."""

GAUGES: Final = {
    "elo": "Self-play/ELO",
    "opponents.elo": "Self-play/Opponents ELO",
    "opponents.elo_deviation": "Self-play/Opponents ELO Deviation",
    "mu": "Self-play/Mu",
    "sigma": "Self-play/Sigma",
}
"""Gauges of coordination under self-play, likewise."""

LESSON: Final = "lesson/"
"""Begins gauges of coordination, a parameter's name after it: number of the lesson of its curriculum."""
LESSON_NUMBER: Final = "Environment/Lesson Number/"
"""Likewise, as users of ML-Agents know it."""

_NO_GAUGES: Final = ("books.", LESSON, IDLE, SIMULATOR)

LONGEST_GAP_S: Final = 60.0  # a longer one in the monitor's own life is a pause of the run, not part of an interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """One behavior between two summaries. None: nothing to tell.

    Attributes:
        behavior: name.
        time_s: its end, seconds since the epoch.
        seconds: its length.
        step: steps in the lineage of the current weights at its end.
        max_steps: where the run ends.
        trained: steps trained in it; `produced` steps completed by simulators.
        updates: published in it.
        episodes: ended in it.
        reward: mean return of these, with standard deviation `reward_deviation`.
        episode_length: their mean length in steps.
        group_reward: mean return of the groups that ended in it.
        lag_mean: mean policy lag of the rows trained in it, `lag_max` the highest.
        lag: rows trained in it by policy lag, the last one for all above.
        means: mean over the interval of every published statistic, by its name.
        gauges: present values, by name.
        simulators: their own numbers by the names that they give them: means and sums over the interval, latest values.
        open_episodes: under way at its end, the oldest of them `oldest` steps old.
        step_counts: steps by column of the books, as far as coordination has published them.
        training: False where the run only acts: `step` then counts steps produced.
    """

    behavior: str
    time_s: float
    seconds: float
    step: int
    max_steps: int | None
    trained: int
    produced: int
    updates: int
    episodes: int
    reward: float | None
    reward_deviation: float | None
    episode_length: float | None
    group_reward: float | None
    lag_mean: float | None
    lag_max: float | None
    lag: Mapping[str, int] = field(default_factory=dict)
    means: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)
    simulators: Mapping[str, float] = field(default_factory=dict)
    open_episodes: int
    oldest: int
    step_counts: Mapping[str, int] = field(default_factory=dict)
    training: bool = True

    @property
    def steps_per_s(self) -> float:
        """Steps trained per second; produced, where the run only acts."""
        steps = self.trained if self.training else self.produced
        return steps / self.seconds if self.seconds > 0 else 0.0

    def plain(self) -> dict[str, Any]:
        """The line for `metrics.jsonl`."""
        return {"type": "interval", **asdict(self), "steps_per_s": self.steps_per_s}


@dataclass(frozen=True, kw_only=True, slots=True)
class _IntervalStart:
    """Where an interval began."""

    step: int
    time_s: float
    counters: Mapping[str, float]
    lag: Histogram | None


class Intervals:
    """Cuts the run of every behavior into intervals.

    Args:
        overview: the numbers, kept up to date by the caller.
        frequencies: `summary_freq` by behavior, in steps.
        default: for behaviors that are not among them.
        max_steps: where the run ends, by behavior, until the learner has said it.
    """

    def __init__(
        self, overview: Overview, frequencies: Mapping[str, int], default: int, max_steps: Mapping[str, int]
    ) -> None:
        self._overview = overview
        self._frequencies = frequencies
        self._default = default
        self._max_steps = max_steps
        self._marks: dict[str, _IntervalStart] = {}

    def track(self, behavior: str, time_s: float) -> None:
        """Follows a behavior: to be called whenever its numbers may have changed.

        The first interval starts at the beginning of what the services have counted. One that began
        at a step which a crash has rolled back now begins where the weights went back to.
        """
        step, mark = self._overview.step(behavior), self._marks.get(behavior)
        if mark is None:
            begun = max(0, step - self._overview.trained(behavior))
            self._marks[behavior] = _IntervalStart(step=begun, time_s=time_s, counters={}, lag=None)
        elif step < mark.step:
            self._marks[behavior] = replace(mark, step=step)

    def due(self, behavior: str) -> bool:
        """Whether the steps have passed a multiple of `summary_freq` since the interval began."""
        step, begun = self._overview.step(behavior), self._marks[behavior].step
        frequency = max(1, self._frequencies.get(behavior, self._default))
        return step // frequency > begun // frequency and self.progressed(behavior)

    def progressed(self, behavior: str) -> bool:
        """Whether anything was trained since the interval began."""
        counters = self._overview.of(behavior).counters
        name = "trained" if self._overview.training else "steps"
        return counters.get(name, 0.0) > self._marks[behavior].counters.get(name, 0.0)

    def peek(self, behavior: str, time_s: float) -> Interval:
        """The interval as it would be if it ended now."""
        step, mark = self._overview.step(behavior), self._marks[behavior]
        numbers = self._overview.of(behavior)
        interval = _interval(behavior, time_s, step, numbers, mark, training=self._overview.training)
        known = interval.max_steps is not None
        return interval if known else replace(interval, max_steps=self._max_steps.get(behavior))

    def close(self, behavior: str, time_s: float) -> Interval:
        """Ends the interval and begins the next."""
        interval, numbers = self.peek(behavior, time_s), self._overview.of(behavior)
        lag = numbers.histograms.get("lag")
        self._marks[behavior] = _IntervalStart(step=interval.step, time_s=time_s, counters=numbers.counters, lag=lag)
        return interval

    def state(self) -> dict[str, Any]:
        """Where the intervals began, as plain values for JSON."""
        return {
            behavior: {
                "step": mark.step,
                "time_s": mark.time_s,
                "counters": dict(mark.counters),
                "lag": None if mark.lag is None else plain(mark.lag),
            }
            for behavior, mark in self._marks.items()
        }

    def restore(self, state: Mapping[str, Any], gap_s: float) -> None:
        """Goes on from what `state` returned.

        Args:
            state: of an earlier monitor of this run.
            gap_s: seconds since then; a long one is left out of the interval's length.

        Raises:
            KeyError, TypeError, ValueError: it is something else; nothing has changed.
        """
        pause = gap_s if gap_s > LONGEST_GAP_S else 0.0
        self._marks |= {
            behavior: _IntervalStart(
                step=int(mark["step"]),
                time_s=float(mark["time_s"]) + pause,
                counters={name: float(value) for name, value in mark["counters"].items()},
                lag=None if mark["lag"] is None else from_plain(mark["lag"]),
            )
            for behavior, mark in state.items()
        }


def _interval(
    behavior: str, time_s: float, step: int, numbers: Numbers, mark: _IntervalStart, *, training: bool
) -> Interval:
    counted = {name: value - mark.counters.get(name, 0.0) for name, value in numbers.counters.items()}
    lag = since(numbers.histograms["lag"], mark.lag) if "lag" in numbers.histograms else None
    gauges = numbers.gauges
    return Interval(
        behavior=behavior,
        time_s=time_s,
        seconds=max(0.0, time_s - mark.time_s),
        step=step,
        max_steps=int(gauges["max_steps"]) if "max_steps" in gauges else None,
        trained=int(counted.get("trained", 0)),
        produced=int(counted.get("steps", 0)),
        updates=int(counted.get("updates", 0)),
        episodes=int(counted.get("episode_return.count", 0)),
        reward=mean_of(counted, "episode_return"),
        reward_deviation=deviation_of(counted, "episode_return"),
        episode_length=mean_of(counted, "episode_length"),
        group_reward=mean_of(counted, "group_return"),
        lag_mean=_finite(mean(lag)) if lag else None,
        lag_max=_finite(highest(lag)) if lag else None,
        lag=_rows(lag) if lag else {},
        means=_means(counted) | _present(gauges),
        gauges={name: value for name, value in gauges.items() if not name.startswith(_NO_GAUGES)},
        simulators=_own(counted, gauges),
        open_episodes=int(gauges.get("episodes_open", 0)),
        oldest=int(gauges.get("episode_oldest", 0)),
        step_counts=step_counts(gauges),
        training=training,
    )


def step_counts(gauges: Mapping[str, float]) -> dict[str, int]:
    """The books of a behavior out of its gauges."""
    return {column: int(gauges[f"books.{column}"]) for column in STEP_COUNTS if f"books.{column}" in gauges}


def _means(counted: Mapping[str, float]) -> dict[str, float]:
    names = (name.removesuffix(".sum") for name in counted if name.endswith(".sum") and not name.startswith(SIMULATOR))
    found = {NAMES.get(name, name): mean_of(counted, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _own(counted: Mapping[str, float], gauges: Mapping[str, float]) -> dict[str, float]:
    """What simulators tell of themselves."""
    found = {name: value for name, value in gauges.items() if name.startswith(SIMULATOR)}
    for name, value in counted.items():
        if name.startswith(SIMULATOR) and name.endswith(".total"):
            found[name.removesuffix(".total")] = value
        elif name.startswith(SIMULATOR) and name.endswith(".sum"):
            average = mean_of(counted, base := name.removesuffix(".sum"))
            found |= {} if average is None else {base: average}
    return {name.removeprefix(SIMULATOR): value for name, value in found.items()}


def _present(gauges: Mapping[str, float]) -> dict[str, float]:
    """Gauges that are shown among the statistics."""
    found = {name: gauges[gauge] for gauge, name in GAUGES.items() if gauge in gauges}
    taught = [name for name in gauges if name.startswith(LESSON)]
    return found | {LESSON_NUMBER + name.removeprefix(LESSON): gauges[name] for name in taught}


def lessons(interval: Interval) -> dict[str, int]:
    """Number of the present lesson of each parameter that the behavior is measured for."""
    numbers = {name: value for name, value in interval.means.items() if name.startswith(LESSON_NUMBER)}
    return {name.removeprefix(LESSON_NUMBER): int(value) for name, value in numbers.items()}


def _rows(lag: Histogram) -> dict[str, int]:
    labels = [*(f"{bound:g}" for bound in lag.bounds), f">{lag.bounds[-1]:g}"]
    return {label: rows for label, rows in zip(labels, lag.counts, strict=True) if rows}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
