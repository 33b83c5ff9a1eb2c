#!/usr/bin/env python3
"""CPU time of every process of a real run, per agent-step: `python scripts/bench/cost.py [CASE ...] [--seconds 15]`.

A case is one of the names below, or AGENTSxSIMULATORS such as 12x4: so many agents of `balance` in so many simulators,
trained with PPO (128x2, batch 64, buffer 12,000, one epoch). For each it prints, per agent-step, the CPU microseconds
of each process, user and system; of simulators and stepping also per frame; and the learner's busy share: the part of
its time that it updates, `update_s / (update_s + wait_s)`, which is wall time over wall time.

CPU times depend less than steps per second on what else the machine does, but processes that take turns on a core cost
each other their caches: compare in turns, in one sitting. `PYTHONPATH=../before/src` measures another checkout.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from live_run import LiveRun

PICTURES: Final = (sys.executable, str(Path(__file__).parent / "pictures.py"), "--agents", "16")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run to measure.

    Attributes:
        game: simulator as the configuration names it, without `count` and `areas`.
        agents: of each simulator.
        areas: of each simulator; None where the game has none.
        simulators: their number.
        batch: `batch_size`.
        buffer: `buffer_size`.
        stepping: stepping processes.
        assembly: `per stepping` for an assembly beside each of them.
        behavior: name of the behavior.
        trainer: its `trainer_type`.
        network: its network.
    """

    game: Mapping[str, Any] = field(default_factory=lambda: {"name": "balance"})
    agents: int = 12
    areas: int | None = 12
    simulators: int = 1
    batch: int = 64
    buffer: int = 12_000
    stepping: int = 1
    assembly: str = "one"
    behavior: str = "Balance"
    trainer: str = "ppo"
    network: Mapping[str, Any] = field(
        default_factory=lambda: {"normalize": True, "hidden_units": 128, "num_layers": 2}
    )


def balance(agents: int, simulators: int = 1, **settings: Any) -> Case:
    """Returns a case of `balance`."""
    return Case(agents=agents, areas=agents, simulators=simulators, **settings)


def crowd(members: int) -> Case:
    """Returns a case of MA-POCA, with 64 agents in groups."""
    game = {"name": "crowd", "options": {"members": members}}
    network = {"hidden_units": 64, "num_layers": 2}
    areas = 64 // members
    return Case(
        game=game, agents=64, areas=areas, batch=256, buffer=2048, behavior="Crowd", trainer="poca", network=network
    )


CASES: Final = {
    **{f"{agents}x1": balance(agents) for agents in (1, 12, 64, 512)},
    **{f"{agents}x{simulators}": balance(agents, simulators) for agents, simulators in ((1, 4), (1, 16), (12, 4))},
    "batch-256": balance(64, batch=256),
    "batch-4096": balance(64, batch=4096, buffer=65_536),
    "stepping-2": balance(12, 4, stepping=2),
    "wide": balance(32, 2, batch=4096, buffer=65_536, stepping=2, assembly="per stepping"),
    "images": Case(
        game={"command": PICTURES},
        agents=16,
        areas=None,
        buffer=512,
        behavior="Pictures",
        network={"vis_encode_type": "nature_cnn", "hidden_units": 128, "num_layers": 1},
    ),
    "groups-of-2": crowd(2),
    "groups-of-8": crowd(8),
}


def case_of(name: str) -> Case:
    """Returns a case by its name, or AGENTSxSIMULATORS."""
    if name in CASES:
        return CASES[name]
    if found := re.fullmatch(r"(\d+)(?:x(\d+))?", name):
        return balance(int(found[1]), int(found[2] or 1))
    raise SystemExit(f"got case {name!r}; expected one of {', '.join(CASES)}, or AGENTSxSIMULATORS")


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


def measure(name: str, case: Case, seconds: float) -> str:
    """Measures one run; returns a row of a table."""
    areas = {} if case.areas is None else {"areas": case.areas}
    games = [{**case.game, **areas, "count": case.simulators}]
    pipeline = {"export": False, "stepping_processes": case.stepping, "assembly": case.assembly}
    learner, settings = (
        f"learning-{case.behavior}",
        (case.buffer, case.batch, case.network, case.behavior, case.trainer),
    )
    with tempfile.TemporaryDirectory() as folder:
        with LiveRun(Path(folder), games, pipeline, *settings) as run:
            run.wait(2)
            written = len(run.lines(learner))
            while len(run.lines(learner)) == written:
                time.sleep(0.2)
            steps, before, began = run.newly_produced(), used(run), time.monotonic()
            time.sleep(seconds)
            steps, after, took = run.newly_produced() - steps, used(run), time.monotonic() - began
        updating, waiting = (run.lines(learner)[-1]["counters"].get(name, 0.0) for name in ("update_s", "wait_s"))
    each = {part: (after[part] - before[part]) / steps * 1e6 for part in after}
    costs = [f"{each[part]:.1f}" for part in PARTS]
    frames = [f"{each[part] * case.agents:.0f}" for part in ("simulators", "stepping")]
    share = f"{updating / (updating + waiting):.0%}" if updating + waiting else "-"
    return f"| {' | '.join([name, f'{steps / took:,.0f}', *costs, *frames, share])} |"


PARTS: Final = ("simulators", "stepping", "assembly", "coordination", "learning", "monitor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=f"{', '.join(CASES)}, or AGENTSxSIMULATORS")
    parser.add_argument("--seconds", type=float, default=15.0, help="that each run is measured")
    args = parser.parse_args()
    heads = ["case", "steps/s", *(f"{part} us/step" for part in PARTS)]
    heads += ["simulators us/frame", "stepping us/frame", "learner busy"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
    for name in args.cases:
        print(measure(name, case_of(name), args.seconds), flush=True)


if __name__ == "__main__":
    main()
