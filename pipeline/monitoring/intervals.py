"""Divides the run of each behavior into intervals between two summaries.

An interval ends when the trained steps pass a multiple of `summary_freq`. Services publish about once
a second, so a fast run may pass several multiples at once, which then form one interval.
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
"""Names of assembly's counters, as users of ML-Agents know them."""

GAUGES: Final = {
    "elo": "Self-play/ELO",
    "opponents.elo": "Self-play/Opponents ELO",
    "opponents.elo_deviation": "Self-play/Opponents ELO Deviation",
    "mu": "Self-play/Mu",
    "sigma": "Self-play/Sigma",
}
"""Names of coordination's gauges under self-play, likewise."""

LESSON: Final = "lesson/"
"""Prefix of coordination's gauges for the lesson number of each environment parameter."""
LESSON_NUMBER: Final = "Environment/Lesson Number/"
"""Prefix of the same numbers, as users of ML-Agents know it."""

_NO_GAUGES: Final = ("step_counts.", LESSON, IDLE, SIMULATOR)

LONGEST_GAP_S: Final = 60.0  # a longer gap between two monitors is a pause of the run, not part of an interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Holds the numbers of one behavior between two summaries; None stands for an unknown value.

    Attributes:
        behavior: behavior name.
        time_s: end of the interval, seconds since the epoch.
        seconds: length of the interval.
        step: steps in the lineage of the current weights at the end.
        max_steps: step at which the run ends.
        trained: steps trained in the interval; `produced` those completed by simulators.
        updates: updates published.
        episodes: episodes ended.
        reward: mean return of these episodes, with standard deviation `reward_deviation`.
        episode_length: mean length of these episodes in steps.
        group_reward: mean return of the groups that ended.
        lag_mean: mean policy lag of the rows trained, `lag_max` the highest.
        lag: rows trained by policy lag, the last entry for all higher lags.
        means: mean of every published statistic, by its name.
        gauges: present values, by name.
        simulators: simulators' own statistics by name: means and sums over the interval, or latest values.
        open_episodes: open episodes at the end, the oldest of them `oldest` steps old.
        step_counts: steps by column of the step accounting, as far as coordination has published them.
        training: False if the run only acts: `step` then counts steps produced.
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
        """Returns the steps trained per second, or produced if the run only acts."""
        steps = self.trained if self.training else self.produced
        return steps / self.seconds if self.seconds > 0 else 0.0

    def plain(self) -> dict[str, Any]:
        """Returns the line for `metrics.jsonl`."""
        return {"type": "interval", **asdict(self), "steps_per_s": self.steps_per_s}


@dataclass(frozen=True, kw_only=True, slots=True)
class _IntervalStart:
    """Holds the state of a behavior at the beginning of an interval."""

    step: int
    time_s: float
    counters: Mapping[str, float]
    lag: Histogram | None


class Intervals:
    """Tracks the intervals of every behavior.

    Args:
        overview: numbers of all services, updated by the caller.
        frequencies: `summary_freq` by behavior, in steps.
        default: `summary_freq` of other behaviors.
        max_steps: step at which the run ends, by behavior, until the learner has published it.
    """

    def __init__(
        self, overview: Overview, frequencies: Mapping[str, int], default: int, max_steps: Mapping[str, int]
    ) -> None:
        self._overview = overview
        self._frequencies = frequencies
        self._default = default
        self._max_steps = max_steps
        self._starts: dict[str, _IntervalStart] = {}

    def adopt(self, frequencies: Mapping[str, int], max_steps: Mapping[str, int]) -> None:
        """Takes over `summary_freq` and the last step of all behaviors, after further ones were added."""
        self._frequencies, self._max_steps = frequencies, max_steps

    def track(self, behavior: str, time_s: float) -> None:
        """Follows a behavior; must be called whenever its numbers may have changed.

        The first interval starts at the first step that the services have counted. An interval that began
        at a step which a crash has rolled back now begins at the step of the restored weights.
        """
        step, start = self._overview.step(behavior), self._starts.get(behavior)
        if start is None:
            begun = max(0, step - self._overview.trained(behavior))
            self._starts[behavior] = _IntervalStart(step=begun, time_s=time_s, counters={}, lag=None)
        elif step < start.step:
            self._starts[behavior] = replace(start, step=step)

    def due(self, behavior: str) -> bool:
        """Returns whether the steps have passed a multiple of `summary_freq` since the interval began."""
        step, begun = self._overview.step(behavior), self._starts[behavior].step
        frequency = max(1, self._frequencies.get(behavior, self._default))
        return step // frequency > begun // frequency and self.progressed(behavior)

    def progressed(self, behavior: str) -> bool:
        """Returns whether any step was trained since the interval began."""
        counters = self._overview.of(behavior).counters
        name = "trained" if self._overview.training else "steps"
        return counters.get(name, 0.0) > self._starts[behavior].counters.get(name, 0.0)

    def peek(self, behavior: str, time_s: float) -> Interval:
        """Returns the interval as if it ended now."""
        step, start = self._overview.step(behavior), self._starts[behavior]
        numbers = self._overview.of(behavior)
        interval = _interval(behavior, time_s, step, numbers, start, training=self._overview.training)
        known = interval.max_steps is not None
        return interval if known else replace(interval, max_steps=self._max_steps.get(behavior))

    def close(self, behavior: str, time_s: float) -> Interval:
        """Ends the interval, begins the next, and returns the ended one."""
        interval, numbers = self.peek(behavior, time_s), self._overview.of(behavior)
        lag = numbers.histograms.get("lag")
        self._starts[behavior] = _IntervalStart(step=interval.step, time_s=time_s, counters=numbers.counters, lag=lag)
        return interval

    def state(self) -> dict[str, Any]:
        """Returns the beginnings of the intervals as plain values for JSON."""
        return {
            behavior: {
                "step": start.step,
                "time_s": start.time_s,
                "counters": dict(start.counters),
                "lag": None if start.lag is None else plain(start.lag),
            }
            for behavior, start in self._starts.items()
        }

    def restore(self, state: Mapping[str, Any], gap_s: float) -> None:
        """Continues from what `state` returned.

        Args:
            state: state of an earlier monitor of this run.
            gap_s: seconds since then; a long gap is left out of the interval's length.

        Raises:
            KeyError, TypeError, ValueError: the state is malformed; nothing has changed.
        """
        pause = gap_s if gap_s > LONGEST_GAP_S else 0.0
        self._starts |= {
            behavior: _IntervalStart(
                step=int(start["step"]),
                time_s=float(start["time_s"]) + pause,
                counters={name: float(value) for name, value in start["counters"].items()},
                lag=None if start["lag"] is None else from_plain(start["lag"]),
            )
            for behavior, start in state.items()
        }


def _interval(
    behavior: str, time_s: float, step: int, numbers: Numbers, start: _IntervalStart, *, training: bool
) -> Interval:
    counted = {name: value - start.counters.get(name, 0.0) for name, value in numbers.counters.items()}
    lag = since(numbers.histograms["lag"], start.lag) if "lag" in numbers.histograms else None
    gauges = numbers.gauges
    return Interval(
        behavior=behavior,
        time_s=time_s,
        seconds=max(0.0, time_s - start.time_s),
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
        simulators=_simulator_statistics(counted, gauges),
        open_episodes=int(gauges.get("episodes_open", 0)),
        oldest=int(gauges.get("episode_oldest", 0)),
        step_counts=step_counts(gauges),
        training=training,
    )


def step_counts(gauges: Mapping[str, float]) -> dict[str, int]:
    """Returns the step accounting of a behavior from its gauges."""
    return {column: int(gauges[f"step_counts.{column}"]) for column in STEP_COUNTS if f"step_counts.{column}" in gauges}


def _means(counted: Mapping[str, float]) -> dict[str, float]:
    names = (name.removesuffix(".sum") for name in counted if name.endswith(".sum") and not name.startswith(SIMULATOR))
    found = {NAMES.get(name, name): mean_of(counted, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _simulator_statistics(counted: Mapping[str, float], gauges: Mapping[str, float]) -> dict[str, float]:
    """Returns the simulators' own statistics."""
    found = {name: value for name, value in gauges.items() if name.startswith(SIMULATOR)}
    for name, value in counted.items():
        if name.startswith(SIMULATOR) and name.endswith(".total"):
            found[name.removesuffix(".total")] = value
        elif name.startswith(SIMULATOR) and name.endswith(".sum"):
            average = mean_of(counted, base := name.removesuffix(".sum"))
            found |= {} if average is None else {base: average}
    return {name.removeprefix(SIMULATOR): value for name, value in found.items()}


def _present(gauges: Mapping[str, float]) -> dict[str, float]:
    """Returns the gauges that are shown among the statistics."""
    found = {name: gauges[gauge] for gauge, name in GAUGES.items() if gauge in gauges}
    numbers = [name for name in gauges if name.startswith(LESSON)]
    return found | {LESSON_NUMBER + name.removeprefix(LESSON): gauges[name] for name in numbers}


def lessons(interval: Interval) -> dict[str, int]:
    """Returns the number of the present lesson of each parameter that the behavior is measured for."""
    numbers = {name: value for name, value in interval.means.items() if name.startswith(LESSON_NUMBER)}
    return {name.removeprefix(LESSON_NUMBER): int(value) for name, value in numbers.items()}


def _rows(lag: Histogram) -> dict[str, int]:
    labels = [*(f"{bound:g}" for bound in lag.bounds), f">{lag.bounds[-1]:g}"]
    return {label: rows for label, rows in zip(labels, lag.counts, strict=True) if rows}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
