"""Sweeps of the goal game, and runs of theirs without processes."""

from __future__ import annotations

import textwrap
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.monitoring.events import Event
from sparring.services.api.runs import RunFailed, RunResult
from sparring.services.sweeps.space import Sweep, read_sweep

RATE = "behaviors.Goal.hyperparameters.learning_rate"
BATCH = "behaviors.Goal.hyperparameters.batch_size"
LAYERS = "behaviors.Goal.network_settings.num_layers"

CONFIG = """
behaviors:
  Goal:
    hyperparameters: {batch_size: 16, buffer_size: 64, learning_rate: 5.0e-3}
    network_settings: {hidden_units: 32, num_layers: 1}
    max_steps: 2000
    summary_freq: 100
simulators: [{name: goal}]
pipeline: {mode: lockstep}
"""
SPACE = f"space: {{{RATE}: {{low: 1e-5, high: 1e-2, log: true}}}}\n"


def read(folder: Path, space: str, config: str = CONFIG, assigned: tuple[str, ...] = ()) -> Sweep:
    """Returns a sweep of two texts."""
    (folder / "config.yaml").write_text(config)
    (folder / "space.yaml").write_text(textwrap.dedent(space))
    return read_sweep(folder / "config.yaml", folder / "space.yaml", assigned)


def problems(folder: Path, space: str, config: str = CONFIG) -> list[str]:
    """Returns why a space is refused, each from its line on."""
    try:
        read(folder, space, config)
    except SettingsError as error:
        return [line.removeprefix(f"{folder / 'space.yaml'}:") for line in str(error).splitlines()[1:]]
    raise AssertionError("the space is not refused")


def interval(step: int, reward: float | None, *, episodes: int = 10, elo: float | None = None) -> dict[str, Any]:
    means = {} if elo is None else {"Self-play/ELO": elo}
    line = {"behavior": "Goal", "step": step, "reward": reward, "group_reward": None}
    return {**line, "episodes": episodes, "means": means}


@dataclass
class FakeRun:
    """A run whose intervals have the rewards that a test wants; it may fail, or wait until it is stopped."""

    folder: Path
    rewards: list[float | None]
    interval_steps: int = 500
    first: int = 0
    error: str = ""
    waits: bool = False
    is_stopped: bool = False
    step: int = 0

    async def __aiter__(self) -> AsyncIterator[Event]:
        for number, reward in enumerate(self.rewards, 1):
            await anyio.sleep(1.0)
            if not self.is_stopped:
                self.step = self.first + number * self.interval_steps
                yield Event("interval", interval(self.step, reward))
        while self.waits and not self.is_stopped:  # noqa: ASYNC110 (a run has no event to wait for either)
            await anyio.sleep(1.0)
        yield Event("end", {})

    def stop(self) -> None:
        self.is_stopped = True

    def wait(self) -> RunResult:
        status = "failed" if self.error else "stopped" if self.is_stopped else "completed"
        result = RunResult(self.folder, status, self.error, {"Goal": {"steps": self.step}})
        if self.error:
            raise RunFailed(result, "")
        return result


@dataclass
class FakeRuns:
    """Starts fake runs, and remembers them."""

    make: Callable[[Path, Mapping[str, Any]], FakeRun]
    started: list[tuple[str, dict[str, Any], int, bool]] = field(default_factory=list)

    def __call__(self, folder: Path, values: Mapping[str, Any], seed: int, *, resume: bool = False) -> FakeRun:
        self.started.append((folder.name, dict(values), seed, resume))
        return self.make(folder, values)
