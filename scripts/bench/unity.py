"""Unity players through the whole pipeline: `python scripts/bench/unity.py [12] [64] [4x12] [--seconds 30]`.

A stand-in of a Unity player (real gRPC, the physics of `balance`: 8 numbers seen, 2 continuous actions) with the
settings of ML-Agents' own 3DBall. Prints, for each case, end-to-end agent-steps/s after warm-up; the players alone,
answered at once by a server that thinks nothing; the learner alone on data in memory; and the ratio of the whole to the
smaller of the two.

12, 64: agents of one player; 4x12: four players of 12. The parts are measured while the whole is paused, as in
`end_to_end.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "simulation"))

import learner as learner_bench
from end_to_end import Whole
from unity_null_trainer import executable, null_trainer

CASES = {"12": (1, 12), "64": (1, 64), "4x12": (4, 12)}
BEHAVIOR = "3DBall"
PORT = 5905


def compare(name: str, seconds: float, warm_s: float, turn_s: float) -> str:
    """One case, whole and parts in turn; one line."""
    players, areas = CASES[name]
    case = dataclasses.replace(learner_bench.CASES["a"], horizon=1000)
    options = ("--game", "balance", "--areas", str(areas), "--behavior", BEHAVIOR)
    learner = learner_bench.Alone(case)
    learner()
    alone: list[float] = []
    update_seconds: list[float] = []
    paused = 0.0
    with tempfile.TemporaryDirectory() as folder:
        build = executable(Path(folder), *options)
        simulator = {
            "name": "unity",
            "count": players,
            "options": {"path": str(build), "port": PORT, "no_graphics": True},
        }
        with Whole(case, BEHAVIOR, simulator, Path(folder)) as whole:
            time.sleep(warm_s)
            before = whole.fresh()
            for turn in range(round(seconds / turn_s)):
                time.sleep(turn_s / 2 if turn == 0 else turn_s)
                began = time.monotonic()
                whole.pause()
                alone.append(null_trainer(options, 1.0, players=players).agent_steps_per_s)
                update_seconds.append(learner())
                whole.resume()
                paused += time.monotonic() - began
            time.sleep(turn_s / 2)
            after = whole.fresh()
    span = after["time_s"] - before["time_s"] - paused
    one, two = (look["behaviors"][BEHAVIOR]["figures"] for look in (before, after))
    produced = (two["books"]["produced"] - one["books"]["produced"]) / span
    players_alone, learner_alone = statistics.mean(alone), case.buffer / statistics.mean(update_seconds)
    return (
        f"{name}: ratio {produced / min(players_alone, learner_alone):.2f}  "
        f"end to end {produced:,.0f}/s over {span:.0f} s  "
        f"players alone {players_alone:,.0f}/s  learner alone {learner_alone:,.0f}/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--seconds", type=float, default=30.0, help="that the whole runs, measured")
    parser.add_argument("--turn", type=float, default=3.0, help="seconds between two pauses")
    parser.add_argument("--warm", type=float, default=5.0)
    args = parser.parse_args()
    for name in args.cases or CASES:
        print(compare(name, args.seconds, args.warm, args.turn), flush=True)


if __name__ == "__main__":
    main()
