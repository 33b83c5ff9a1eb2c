#!/usr/bin/env python3
"""CPU time of every process of a real run, per agent-step: `python scripts/bench/cost.py [1 12 64] [--simulators 4]`.

For each number of agents it trains `balance` with PPO (128x2, batch 64, buffer 12,000, one epoch) and prints, per
agent-step, the CPU microseconds of each process, user and system; of simulators and stepping also per frame. They
depend less than steps per second on what else the machine does, but processes that take turns on a core cost each
other their caches: compare in turns, in one sitting. `PYTHONPATH=../before/src` measures another checkout.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from live_run import LiveRun


def used(run: LiveRun) -> dict[str, float]:
    """Returns the CPU seconds of each kind of process so far; a launched simulator is a child of what watches it."""
    pids = {line["part"]: line["pid"] for line in run.log("supervisor") if line["event"] == "started"}
    seconds: dict[str, float] = {}
    for part, pid in pids.items():
        kind = "simulators" if part.startswith("simulator") else part.partition("-")[0]
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            times = process.cpu_times()
            seconds[kind] = seconds.get(kind, 0.0) + times.user + times.system
    return seconds


def measure(agents: int, simulators: int, seconds: float) -> str:
    """Measures one run; returns a line."""
    network: dict[str, Any] = {"normalize": True, "hidden_units": 128, "num_layers": 2}
    games = [{"name": "balance", "count": simulators, "areas": agents}]
    with (
        tempfile.TemporaryDirectory() as folder,
        LiveRun(Path(folder), games, {"export": False}, buffer=12_000, batch=64, network=network) as run,
    ):
        run.wait(2)
        steps, before, began = run.newly_produced(), used(run), time.monotonic()
        time.sleep(seconds)
        steps, after, took = run.newly_produced() - steps, used(run), time.monotonic() - began
    each = {part: (after[part] - before[part]) / steps * 1e6 for part in after}
    frames = " ".join(f"{part} {each[part] * agents:.0f}" for part in ("simulators", "stepping"))
    line = " ".join(f"{part} {cost:.1f}" for part, cost in each.items())
    return f"{agents} agents x {simulators}: us per frame: {frames}; us per step: {line}; {steps / took:,.0f} steps/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agents", nargs="*", type=int, default=[1, 12, 64], help="agents of each simulator (1 12 64)")
    parser.add_argument("--simulators", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=15.0, help="that each run is measured")
    args = parser.parse_args()
    for agents in args.agents:
        print(measure(agents, args.simulators, args.seconds), flush=True)


if __name__ == "__main__":
    main()
