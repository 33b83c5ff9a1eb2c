"""Formats console lines about a run, and shows them above the progress of its behaviors."""

import logging
from collections.abc import Iterator, Mapping, Sequence

from sparring.pipeline.monitoring.intervals import REWARD_PER_STEP, Interval, lessons
from sparring.pipeline.monitoring.logs import PROGRESS, printable


def line(interval: Interval) -> str:
    """Returns the line of one interval of one behavior; lag is mean/highest.

    Balance  step 24,000 of 500,000  12.3k/s  ETA 39 s  reward 45.2 +- 12.1 (37 episodes)  updates 2  lag 1.0/1
    kl 0.0081  entropy 1.42  open 64 episodes, oldest 812 steps
    """
    parts = [*_position(interval, interval.steps_per_s), _reward(interval)]
    if interval.group_reward is not None:
        parts.append(f"group reward {short(interval.group_reward)}")
    if interval.training:
        parts.append(f"updates {interval.updates}")
    if interval.lag_mean is not None and interval.lag_max is not None:
        parts.append(f"lag {interval.lag_mean:.1f}/{interval.lag_max:.0f}")
    for name, mean in (("kl", "Update/Approximate KL"), ("entropy", "Policy/Entropy")):
        if mean in interval.means:
            parts.append(f"{name} {short(interval.means[mean])}")
    parts += _self_play(interval.means)
    if numbers := lessons(interval):
        parts.append("lesson " + ", ".join(f"{name} {number}" for name, number in numbers.items()))
    return "  ".join([*parts, _open(interval)])


def _self_play(means: Mapping[str, float]) -> Iterator[str]:
    """Yields the ratings of the learner and its possible opponents, and its recent win rate."""
    if "Self-play/ELO" in means:
        others, deviation = (means[f"Self-play/Opponents ELO{end}"] for end in ("", " Deviation"))
        yield f"elo {short(means['Self-play/ELO'])}, opponents {short(others)} +- {short(deviation)}"
    if "Self-play/Mu" in means:
        yield f"skill {short(means['Self-play/Mu'])} +- {short(means['Self-play/Sigma'])}"
    if "Self-play/Win Rate" in means:
        yield f"wins {means['Self-play/Win Rate']:.0%}"


def _position(interval: Interval, steps_per_s: float) -> Iterator[str]:
    """Yields behavior, step, rate, and the time until `max_steps` at that rate."""
    yield interval.behavior
    yield f"step {interval.step:,}" + (f" of {interval.max_steps:,}" if interval.max_steps else "")
    yield f"{rate(steps_per_s)}/s"
    remaining = (interval.max_steps or 0) - interval.step
    if remaining > 0 and steps_per_s > 0:
        yield f"ETA {duration(remaining / steps_per_s)}"


def progress(interval: Interval, steps_per_s: float) -> str:
    """Returns the progress of a behavior: its step and the time until its end at a rate."""
    return "  ".join(_position(interval, steps_per_s))


def meanwhile(interval: Interval, stuck: Sequence[str]) -> str:
    """Returns the line of an interval that has not ended after a long time.

    Args:
        interval: the interval so far.
        stuck: waits and stalls of services; shown if nothing was trained.
    """
    goal = f" of {interval.max_steps:,}" if interval.max_steps else ""
    learned = f"+{interval.trained:,} trained and " if interval.training else ""
    moved = f"{learned}+{interval.produced:,} produced in {interval.seconds:.0f} s"
    parts = [interval.behavior, f"step {interval.step:,}{goal}", moved, _reward(interval), _open(interval)]
    return "  ".join(parts if interval.steps_per_s else [*parts, *stuck])


def _reward(interval: Interval) -> str:
    if interval.reward is None:
        per_step = interval.means.get(REWARD_PER_STEP)
        return "no episode ended" + ("" if per_step is None else f", reward per step {short(per_step)}")
    spread = "" if interval.reward_deviation is None else f" +- {short(interval.reward_deviation)}"
    return f"reward {short(interval.reward)}{spread} ({_counted(interval.episodes, 'episode')})"


def _open(interval: Interval) -> str:
    return f"open {_counted(interval.open_episodes, 'episode')}, oldest {_counted(interval.oldest, 'step')}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def short(value: float) -> str:
    """Formats a number with three digits or more: 45.2, 0.00123, 12,345."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def rate(value: float) -> str:
    """Formats a number per second: 850, 12.3k, 1.20M."""
    if value >= 999_950:
        return f"{value / 1e6:.2f}M"
    return f"{value / 1e3:.1f}k" if value >= 999.5 else f"{value:.0f}"


def duration(seconds: float) -> str:
    """Formats a time with its two largest units: 39 s, 5 min 10 s, 3 h 20 min, 2 d 4 h."""
    rest = round(seconds)
    units = {"d": rest // 86_400, "h": rest // 3_600 % 24, "min": rest // 60 % 60, "s": rest % 60}
    large = next((place for place, number in enumerate(units.values()) if number), 0)
    shown = [f"{number} {name}" for name, number in [*units.items()][large : large + 2] if number]
    return " ".join(shown) or "0 s"


class Display:
    """Shows lines, and on a terminal the progress of all behaviors in one further line, until the next one.

    Args:
        handler: writes lines to the console, and may drop them; shows progress where it can be removed again.
    """

    def __init__(self, handler: logging.Handler) -> None:
        self._handler = handler

    def line(self, text: str) -> None:
        """Shows one line permanently."""
        self._emit(logging.INFO, text)

    def progress(self, behaviors: Sequence[str]) -> None:
        """Shows the progress of each behavior on a terminal."""
        self._emit(PROGRESS, "   ".join(behaviors))

    def close(self) -> None:
        """Removes the progress; lines stay."""
        self.progress(())
        self._handler.close()

    def _emit(self, level: int, text: str) -> None:
        self._handler.handle(logging.makeLogRecord({"levelno": level, "msg": printable(text)}))
