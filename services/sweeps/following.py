"""Starts and follows the runs of a sweep."""

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, Literal, Protocol

from sparring.pipeline.files import Json
from sparring.pipeline.monitoring.events import Event
from sparring.services.api.runs import RunResult

POINTS: Final = 20
"""A trial is compared with others at so many points, evenly spread over its steps."""


class FollowedRun(Protocol):
    """What a sweep needs of a run: `sparring.services.api.runs.Run` has it."""

    folder: Path

    def __aiter__(self) -> AsyncIterator[Event]: ...

    def stop(self) -> None: ...

    def wait(self) -> RunResult: ...


class Starter(Protocol):
    """Starts a run of a sweep."""

    def __call__(self, folder: Path, values: Mapping[str, Json], seed: int, *, resume: bool = False) -> FollowedRun:
        """Returns the run.

        Args:
            folder: of the run, whose parent folder exists.
            values: in place of what the configuration says, by dotted key.
            seed: of the run.
            resume: go on with the run that is there.
        """


class Progress:
    """Measures the objective of a run from its intervals.

    Args:
        objective: what is measured.
        window: the number of intervals whose mean counts. That of rewards weighs each by its episodes.
        steps: length of the run.

    Attributes:
        step: steps trained so far.
        value: the objective now; None until an episode has ended, or a rating is known.
    """

    def __init__(self, objective: Literal["reward", "rating"], window: int, steps: int) -> None:
        self._measure = _rating if objective == "rating" else _reward
        self._steps = steps
        self._last: deque[tuple[float, float]] = deque(maxlen=window)
        self._point = 0
        self.step = 0
        self.value: float | None = None

    def add(self, interval: Mapping[str, Json]) -> Iterator[int]:
        """Adds a line of `metrics.jsonl`; yields the points that the run has passed with the present value."""
        self.step = interval["step"]
        if (found := self._measure(interval)) is not None:
            self._last.append(found)
            self.value = sum(value * weight for value, weight in self._last) / sum(weight for _, weight in self._last)
        point = min(POINTS, self.step * POINTS // self._steps)
        if self.value is not None:
            yield from range(self._point + 1, point + 1)
            self._point = max(self._point, point)


def _reward(interval: Mapping[str, Json]) -> tuple[float, float] | None:
    """Returns the mean return of an interval, that of the group included, and the number of episodes."""
    returns = [one for one in (interval["reward"], interval["group_reward"]) if one is not None]
    return (sum(returns), max(1, interval["episodes"])) if returns else None


def _rating(interval: Mapping[str, Json]) -> tuple[float, float] | None:
    means = interval["means"]
    value = means.get("Self-play/ELO", means.get("Self-play/Mu"))
    return None if value is None else (value, 1.0)


async def follow(run: FollowedRun, behavior: str, on_interval: Callable[[Mapping[str, Json]], bool]) -> RunResult:
    """Follows a run to its end, and stops it in order once `on_interval` returns True for one of its intervals.

    Raises:
        SettingsError: it cannot be run.
        RunFailed: it has neither completed nor been stopped.
    """
    async for event in run:
        if event.kind == "interval" and event.values["behavior"] == behavior and on_interval(event.values):
            run.stop()
    return run.wait()
