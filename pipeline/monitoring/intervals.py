"""Divides the run of each behavior into intervals between two summaries, and measures its rates.

An interval ends when the trained steps pass a multiple of `summary_freq`. Services publish about once
a second, so a fast run may pass several multiples at once, which then form one interval.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Final

from sparring.pipeline.files import Json
from sparring.pipeline.monitoring.metrics import SIMULATOR, highest, mean
from sparring.pipeline.monitoring.overview import STEP_COUNTS, Numbers, Overview
from sparring.pipeline.monitoring.progress import IDLE

REWARD_PER_STEP: Final = "Environment/Reward per Step"
NAMES: Final = {
    "episode_return": "Environment/Cumulative Reward",
    "episode_length": "Environment/Episode Length",
    "group_return": "Environment/Group Cumulative Reward",
    "step_reward": REWARD_PER_STEP,
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

SUMMARY_FREQ: Final = 50_000
"""Steps of an interval of a behavior that only simulators have named."""

LONGEST_GAP_S: Final = 60.0  # a longer gap between two monitors is a pause of the run, not part of an interval

WINDOW_S: Final = 10.0
"""Seconds of the recent rate."""

_LONGEST_TICK_S: Final = 5.0  # a longer pause between two samples does not count as active time


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

    def plain(self) -> dict[str, Json]:
        """Returns the line for `metrics.jsonl`."""
        return {"type": "interval", **asdict(self), "steps_per_s": self.steps_per_s}


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalStart:
    """Holds the state of a behavior at the beginning of an interval."""

    step: int
    time_s: float
    numbers: Numbers = field(default_factory=Numbers)


class Intervals:
    """Tracks the intervals of every behavior.

    Attributes:
        starts: beginning of the present interval by behavior.

    Args:
        overview: numbers of all services, updated by the caller.
        frequencies: `summary_freq` by behavior, in steps; `SUMMARY_FREQ` for others. The caller may replace it.
        max_steps: step at which the run ends, by behavior, until the learner has published it; likewise.
    """

    def __init__(self, overview: Overview, frequencies: Mapping[str, int], max_steps: Mapping[str, int]) -> None:
        self.starts: dict[str, IntervalStart] = {}
        self._overview = overview
        self.frequencies = frequencies
        self.max_steps = max_steps

    def track(self, behavior: str, time_s: float) -> None:
        """Follows a behavior; must be called whenever its numbers may have changed.

        The first interval starts at the first step that the services have counted. An interval that began
        at a step which a crash has rolled back now begins at the step of the restored weights.
        """
        step, start = self._overview.step(behavior), self.starts.get(behavior)
        if start is None:
            begun = max(0, step - self._overview.trained(behavior))
            self.starts[behavior] = IntervalStart(step=begun, time_s=time_s)
        elif step < start.step:
            self.starts[behavior] = replace(start, step=step)

    def due(self, behavior: str) -> bool:
        """Returns whether the steps have passed a multiple of `summary_freq` since the interval began."""
        step, begun = self._overview.step(behavior), self.starts[behavior].step
        frequency = max(1, self.frequencies.get(behavior, SUMMARY_FREQ))
        return step // frequency > begun // frequency and self.progressed(behavior)

    def progressed(self, behavior: str) -> bool:
        """Returns whether any step was trained since the interval began."""
        name = "trained" if self._overview.training else "steps"
        return self._overview.trained(behavior) > self.starts[behavior].numbers.counters.get(name, 0.0)

    def close(self, behavior: str, time_s: float) -> Interval:
        """Ends the interval, begins the next, and returns the ended one."""
        interval, numbers = self.peek(behavior, time_s), self._overview.numbers.of(behavior)
        self.starts[behavior] = IntervalStart(step=interval.step, time_s=time_s, numbers=numbers)
        return interval

    def peek(self, behavior: str, time_s: float) -> Interval:
        """Returns the interval as if it ended now."""
        start = self.starts[behavior]
        numbers = self._overview.numbers.of(behavior).since(start.numbers)
        counters, gauges, lag = numbers.counters, numbers.gauges, numbers.histograms.get("lag")
        means = _means(numbers)
        return Interval(
            behavior=behavior,
            time_s=time_s,
            seconds=max(0.0, time_s - start.time_s),
            step=self._overview.step(behavior),
            max_steps=int(gauges["max_steps"]) if "max_steps" in gauges else self.max_steps.get(behavior),
            trained=int(counters.get("trained", 0)),
            produced=int(counters.get("steps", 0)),
            updates=int(counters.get("updates", 0)),
            episodes=int(counters.get("episode_return.count", 0)),
            reward=numbers.mean("episode_return"),
            reward_deviation=numbers.deviation("episode_return"),
            episode_length=numbers.mean("episode_length"),
            group_reward=numbers.mean("group_return"),
            lag_mean=mean(lag) if lag else None,
            lag_max=highest(lag) if lag else None,
            means=_statistics(means, gauges),
            gauges={name: value for name, value in gauges.items() if not name.startswith(_NO_GAUGES)},
            simulators=_simulator_statistics(means, numbers),
            open_episodes=int(gauges.get("episodes_open", 0)),
            oldest=int(gauges.get("episode_oldest", 0)),
            step_counts=step_counts(gauges),
            training=self._overview.training,
        )

    def restore(self, starts: Mapping[str, IntervalStart], gap_s: float) -> None:
        """Continues the intervals of an earlier monitor of this run.

        Args:
            starts: their beginnings.
            gap_s: seconds since then; a long gap is left out of the interval's length.
        """
        pause = gap_s if gap_s > LONGEST_GAP_S else 0.0
        self.starts |= {behavior: replace(start, time_s=start.time_s + pause) for behavior, start in starts.items()}


def step_counts(gauges: Mapping[str, float]) -> dict[str, int]:
    """Returns the step accounting of a behavior from its gauges."""
    return {column: int(gauges[f"step_counts.{column}"]) for column in STEP_COUNTS if f"step_counts.{column}" in gauges}


def _means(numbers: Numbers) -> dict[str, float]:
    """Returns the mean of every statistic that has values."""
    names = (name.removesuffix(".sum") for name in numbers.counters if name.endswith(".sum"))
    return {name: mean for name in names if (mean := numbers.mean(name)) is not None}


def _statistics(means: Mapping[str, float], gauges: Mapping[str, float]) -> dict[str, float]:
    """Returns the means, ratings and lesson numbers by the names that users of ML-Agents know."""
    found = {NAMES.get(name, name): value for name, value in means.items() if not name.startswith(SIMULATOR)}
    found |= {name: gauges[gauge] for gauge, name in GAUGES.items() if gauge in gauges}
    lessons = {name: value for name, value in gauges.items() if name.startswith(LESSON)}
    return found | {LESSON_NUMBER + name.removeprefix(LESSON): value for name, value in lessons.items()}


def _simulator_statistics(means: Mapping[str, float], numbers: Numbers) -> dict[str, float]:
    """Returns the simulators' own statistics: means and sums over the interval, and latest values."""
    sums = {name.removesuffix(".total"): value for name, value in numbers.counters.items() if name.endswith(".total")}
    found = {**numbers.gauges, **sums, **means}
    return {name.removeprefix(SIMULATOR): value for name, value in found.items() if name.startswith(SIMULATOR)}


def lessons(interval: Interval) -> dict[str, int]:
    """Returns the number of the present lesson of each parameter that the behavior is measured for."""
    numbers = {name: value for name, value in interval.means.items() if name.startswith(LESSON_NUMBER)}
    return {name.removeprefix(LESSON_NUMBER): int(value) for name, value in numbers.items()}


class Pace:
    """Measures the rates of one behavior from samples of its cumulative counts, about one per second.

    Attributes:
        active_s: seconds since the first step was produced, without pauses of the run.
    """

    def __init__(self, active_s: float = 0.0) -> None:
        self.active_s = active_s
        self._samples: deque[tuple[float, int]] = deque()

    def look(self, clock_s: float, produced: int) -> None:
        """Adds a sample.

        Args:
            clock_s: rising seconds.
            produced: steps produced so far.
        """
        if self._samples and produced:
            self.active_s += min(clock_s - self._samples[-1][0], _LONGEST_TICK_S)
        self._samples.append((clock_s, produced))
        while len(self._samples) > 2 and self._samples[1][0] <= clock_s - WINDOW_S:
            self._samples.popleft()

    @property
    def recent(self) -> float:
        """Returns the steps produced per second in the last `WINDOW_S` seconds."""
        if not self._samples:
            return 0.0
        (begun_s, before), (ended_s, after) = self._samples[0], self._samples[-1]
        return max(0, after - before) / (ended_s - begun_s) if ended_s > begun_s else 0.0

    def mean(self, trained: int) -> float:
        """Returns the steps trained per active second."""
        return trained / self.active_s if self.active_s > 0 else 0.0
