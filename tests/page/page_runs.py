"""Folders of runs, as their monitors write them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from sparring.pipeline.monitoring.intervals import Interval


def interval(step: int, behavior: str = "Walk", **values: Any) -> dict[str, Any]:
    """A line of `metrics.jsonl`, of a behavior that trains 100 steps each second."""
    line = Interval(
        behavior=behavior,
        time_s=1e9 + step / 100,
        seconds=1.0,
        step=step,
        max_steps=10_000,
        trained=100,
        produced=100,
        updates=1,
        episodes=4,
        reward=float(step % 700),
        reward_deviation=2.0,
        episode_length=10.0,
        group_reward=None,
        lag_mean=0.5,
        lag_max=1.0,
        means={"Policy/Entropy": 1.5},
        open_episodes=1,
        oldest=3,
    ).plain()
    return {**line, **values}


def write_run(folder: Path, lines: list[dict[str, Any]], *, is_running: bool = True, **status: Any) -> Path:
    """A run with these lines; its status says that it runs."""
    (folder / "logs").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    last = {line["behavior"]: {"step": line["step"], "max_steps": 10_000, "steps_per_s": 100.0} for line in lines}
    content = {"run_id": folder.name, "time_s": time.time(), "ended": not is_running, "behaviors": last, "services": {}}
    (folder / "status.json").write_text(json.dumps(content | status))
    return folder
