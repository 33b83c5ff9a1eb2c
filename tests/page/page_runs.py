"""Folders of runs, as their monitors write them."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

from sparring.pipeline.monitoring.intervals import Interval
from sparring.pipeline.simulation.replays import write_replay


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


def write_league(folder: Path) -> Path:
    """A run of self-play under way, with all that the views show: matches, a tournament, a replay, a video, a lag."""
    means = [{"Self-play/Win Rate": 0.5 + step / 1e4, "Self-play/ELO": 1200.0 + step} for step in range(100, 1000, 100)]
    lines = [interval(100 * at, means=one, simulators={"Goals": 1.0}) for at, one in enumerate(means, 1)]
    queue = {"messages": 3.0, "capacity": 64.0}
    wait = {"what": "steps", "sources": ["stepping-0"], "since_s": 1.0}
    histogram = {"bounds": [0.0, 1.0], "counts": [3, 4, 0], "total": 5.0}
    service = {"start": "a", "starts": 1, "heartbeat_age_s": 0.1, "cpu_s": 1.0, "rss_bytes": 2**27, "simulators": 2}
    spread = {"count": 3, "p50": 0.001, "p99": 0.002}
    services = {
        "stepping-0": service | {"queues": {"steps.out": queue}, "passed": {"steps/Walk": {"count": 100}}},
        "assembly": service | {"queues": {"steps": queue}, "waits": [wait], "waiting_for": "steps"},
        "learning-Walk": service | {"histograms": {"update_s": spread}},
        "coordination": service,
    }
    counts = {"produced": 900, "trained": 400, "ghost": 400, "stale": 10, "lost": 10, "open": 80}
    behavior = {"step": 900, "max_steps": 1000, "steps_per_s": 100.0, "agents": 8, "in_flight": 80, "budget": 100}
    behaviors = {"Walk": behavior | {"figures": {"step_counts": counts}}}
    write_run(folder, lines, services=services, behaviors=behaviors, writers={"tensorboard": {"delivered": 3}})
    latest = {"histograms": {"lag/Walk": histogram}}
    files: dict[str, Any] = {
        "processes.json": {"simulator-0": 0.4, "simulator-1": 0.5, "monitor": 0.01},
        "monitor.json": {"services": {"learning-Walk": {"past": {}, "latest": latest}}},
        "coordination.json": {"self_play": {"rules": {"sides": {"Walk": {"settings": {"elo_k": 16}}}}}},
        "tournament-1/tournament.json": {
            "players": [
                {"player": "new", "rating": 50, "interval": [40, 60], "against": {"old": {"share": 0.7, "matches": 9}}},
                {"player": "old", "rating": -50, "interval": [-60, -40], "against": {}},
            ]
        },
        "Walk/snapshots/000000001.safetensors": {},
        "logs/supervisor.jsonl": {"event": "started", "start": 2, "part": "assembly", "timestamp": "2001-09-09T01:47"},
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content) + "\n")
    with (folder / "matches.jsonl").open("w") as file:
        for at in range(200):
            score = {"Walk?team=0": at % 3 / 2, "Walk?team=1": 1 - at % 3 / 2}
            players = {"Walk?team=0": "Walk", "Walk?team=1": f"Walk@{1 + at // 70}"}
            line = {"match": at, "players": players, "scores": score, "steps": {"Walk": 5 * at}}
            file.write(json.dumps(line) + "\n")
    scene = {"field": [-4, -4, 4, 4], "frame_s": 0.1, "moving": [{"radius": 0.3, "team": team} for team in (0, 1)]}
    frames = [json.dumps([[0.1 * at, 1, 0], [1, 0.1 * at, 0], {"score": [0, at // 20]}]) for at in range(21)]
    write_replay(folder / "replays", scene, frames, {"0": 0, "1": 1}, 1e9 + 5)
    (folder / "play.gif").write_bytes(base64.b64decode(_GIF))
    return folder


_GIF = "R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"
