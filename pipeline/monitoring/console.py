"""Formats console lines about a run, and shows them as plain text or above progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from sparring.pipeline.monitoring.intervals import Interval, lessons

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def line(interval: Interval) -> str:
    """Returns the line of one interval of one behavior; lag is mean/highest.

    Balance  step 24,000  12.3k/s  reward 45.2 +- 12.1 (37 episodes)  updates 2  lag 1.0/1  kl 0.0081
    entropy 1.42  open 64 episodes, oldest 812 steps
    """
    parts = [interval.behavior, f"step {interval.step:,}", f"{rate(interval.steps_per_s)}/s", _reward(interval)]
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
    moving = interval.trained if interval.training else interval.produced
    return "  ".join(parts if moving else [*parts, *stuck])


def _reward(interval: Interval) -> str:
    if interval.reward is None:
        return "no episode ended"
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


class Display:
    """Shows lines, on a terminal above one progress bar per behavior, and nothing more once its stream was closed.

    Args:
        stream: stream to write to.
        clock: gives rising seconds.
        on_closed: called once, with the error, if the stream's reader has closed it.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float], on_closed: Callable[[OSError], None]) -> None:
        self._stream = stream
        self._on_closed = on_closed
        self._is_closed = False
        self._bars = _bars(stream, clock) if stream.isatty() else None
        self._tasks: dict[str, TaskID] = {}
        if self._bars is not None:
            self._bars.start()

    def line(self, text: str) -> None:
        """Shows one line permanently."""
        self._show(lambda: self._line(text))

    def progress(self, behavior: str, step: int, max_steps: int | None, steps_per_s: float) -> None:
        """Shows the progress of a behavior on a terminal until the next call."""
        if self._bars is None:
            return
        bars = self._bars
        if behavior not in self._tasks:
            self._tasks[behavior] = bars.add_task(behavior, rate="")
        task, text = self._tasks[behavior], f"{rate(steps_per_s)}/s"
        self._show(lambda: bars.update(task, completed=step, total=max_steps, rate=text, refresh=True))

    def close(self) -> None:
        """Restores the terminal; lines stay."""
        if self._bars is not None:
            self._show(self._bars.stop)

    def _line(self, text: str) -> None:
        if self._bars is not None:
            self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def _show(self, show: Callable[[], None]) -> None:
        if self._is_closed:
            return
        try:
            show()
        except OSError as error:
            self._is_closed = True
            self._on_closed(error)


def _bars(stream: TextIO, clock: Callable[[], float]) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(file=stream),
        auto_refresh=False,
        get_time=clock,
        transient=True,
    )
