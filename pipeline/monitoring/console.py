"""Formats console lines about a run, and shows them as plain text or above progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TextIO

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
    if "Update/Approximate KL" in interval.means:
        parts.append(f"kl {short(interval.means['Update/Approximate KL'])}")
    if "Policy/Entropy" in interval.means:
        parts.append(f"entropy {short(interval.means['Policy/Entropy'])}")
    return "  ".join([*parts, *_self_play(interval.means), *_lessons(interval), _open(interval)])


def _self_play(means: Mapping[str, float]) -> Iterator[str]:
    """Yields the ratings of the learner and its possible opponents, and its recent win rate."""
    if "Self-play/ELO" in means:
        others, deviation = (means[f"Self-play/Opponents ELO{end}"] for end in ("", " Deviation"))
        yield f"elo {short(means['Self-play/ELO'])}, opponents {short(others)} +- {short(deviation)}"
    if "Self-play/Mu" in means:
        yield f"skill {short(means['Self-play/Mu'])} +- {short(means['Self-play/Sigma'])}"
    if "Self-play/Win Rate" in means:
        yield f"wins {means['Self-play/Win Rate']:.0%}"


def _lessons(interval: Interval) -> Iterator[str]:
    """Yields the number of the present lesson of each curriculum."""
    if numbers := lessons(interval):
        yield "lesson " + ", ".join(f"{name} {number}" for name, number in numbers.items())


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


class Display(Protocol):
    """Shows lines and progress."""

    def line(self, text: str) -> None:
        """Shows one line permanently."""

    def progress(self, behavior: str, step: int, max_steps: int | None, steps_per_s: float) -> None:
        """Shows the progress of a behavior until the next call."""

    def close(self) -> None:
        """Restores the terminal; lines stay."""


class PlainDisplay:
    """Shows lines only, in files and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def progress(self, behavior: str, step: int, max_steps: int | None, steps_per_s: float) -> None:
        """Does nothing: progress bars do not suit a file."""

    def close(self) -> None:
        self._stream.flush()


class TerminalDisplay:
    """Shows lines above one progress bar per behavior.

    Args:
        stream: terminal to write to.
        clock: gives rising seconds.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._progress = _bars(stream, clock)
        self._tasks: dict[str, TaskID] = {}
        self._progress.start()

    def line(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def progress(self, behavior: str, step: int, max_steps: int | None, steps_per_s: float) -> None:
        if behavior not in self._tasks:
            self._tasks[behavior] = self._progress.add_task(behavior, rate="")
        self._progress.update(
            self._tasks[behavior], completed=step, total=max_steps, rate=f"{rate(steps_per_s)}/s", refresh=True
        )

    def close(self) -> None:
        self._progress.stop()


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


class LastingDisplay:
    """Shows nothing more once its stream was closed, such as that of a terminal.

    Args:
        inner: display to write to.
        on_closed: called once, with the error.
    """

    def __init__(self, inner: Display, on_closed: Callable[[OSError], None]) -> None:
        self._inner: Display | None = inner
        self._on_closed = on_closed

    def line(self, text: str) -> None:
        self._show(lambda inner: inner.line(text))

    def progress(self, behavior: str, step: int, max_steps: int | None, steps_per_s: float) -> None:
        self._show(lambda inner: inner.progress(behavior, step, max_steps, steps_per_s))

    def close(self) -> None:
        self._show(lambda inner: inner.close())

    def _show(self, show: Callable[[Display], None]) -> None:
        if self._inner is None:
            return
        try:
            show(self._inner)
        except OSError as error:
            self._inner = None
            self._on_closed(error)


def display(stream: TextIO, clock: Callable[[], float], on_closed: Callable[[OSError], None]) -> Display:
    """Returns the display that suits `stream`: bars on a terminal, plain lines elsewhere.

    Args:
        stream: stream to write to.
        clock: gives rising seconds.
        on_closed: called once if the stream's reader has closed it.
    """
    return LastingDisplay(TerminalDisplay(stream, clock) if stream.isatty() else PlainDisplay(stream), on_closed)
