"""Fixtures of the monitor's tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from sparring.pipeline.monitoring.intervals import Interval
from tests.monitoring.monitoring_fakes import EPOCH_S, FakeRun, FakeTransport

RESULTS = {
    "reward": "Environment/Cumulative Reward",
    "episode_length": "Environment/Episode Length",
    "group_reward": "Environment/Group Cumulative Reward",
}


@pytest.fixture
def transport() -> FakeTransport:
    return FakeTransport()


@pytest.fixture
def fake_run() -> FakeRun:
    return FakeRun()


@pytest.fixture
def make_interval() -> Callable[..., Interval]:
    def make(**changes: Any) -> Interval:
        values: Mapping[str, Any] = {
            "behavior": "Balance", "time_s": EPOCH_S, "seconds": 2.0, "step": 24_000, "max_steps": 500_000,
            "trained": 24_600, "produced": 25_000, "updates": 2, "episodes": 37, "reward": 45.2,
            "reward_deviation": 12.1, "episode_length": 99.5, "group_reward": None, "lag_mean": 1.0, "lag_max": 1.0,
            "means": {"Policy/Entropy": 1.42}, "open_episodes": 64, "oldest": 812,
        }  # fmt: skip
        values = {**values, **changes}
        means = {name: values[key] for key, name in RESULTS.items() if values[key] is not None}
        return Interval(**{**values, "means": means | values["means"]})

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path
