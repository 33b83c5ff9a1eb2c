"""Unity players through the whole pipeline: `python scripts/bench/unity.py [12] [64] [4x12] [beside] [--seconds 30]`.

A stand-in of a Unity player (real gRPC, the physics of `balance`: 8 numbers seen, 2 continuous actions) with the
settings of ML-Agents' own 3DBall. Prints, for each case, end-to-end agent-steps/s after warm-up; the players alone,
answered at once by a server without a policy; the learner alone on data in memory; and the ratio of the whole to the
smaller of the two.

12, 64: agents of one player; 4x12: four players of 12. The parts are measured while the whole is paused, as in
`end_to_end.py`.

beside: a player of 12 whose three fellows have failed, one crashed, one stalled, one after it sent NaN; its rate is
compared with that of a player in a run of its own. The two runs take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

import learner as learner_bench
from end_to_end import Whole

from tests.simulation.unity_null_trainer import executable, null_trainer

CASES = {"12": (1, 12), "64": (1, 64), "4x12": (4, 12)}
BEHAVIOR = "3DBall"
PORT = 5905
BESIDE = "beside"
STALL_S = 30.0


@contextlib.contextmanager
def running(folder: Path, count: int, port: int, build: Path) -> Iterator[Whole]:
    """Starts a run that learns, with players of its own."""
    folder.mkdir()
    options = {"path": str(build), "port": port, "no_graphics": True, "timeout_s": STALL_S}
    case = dataclasses.replace(learner_bench.CASES["a"], horizon=1000)
    with Whole(case, BEHAVIOR, {"name": "unity", "count": count, "options": options}, folder) as whole:
        yield whole


def failing(folder: Path, *options: str) -> Path:
    """Makes players of which 1 to 3 stall, send NaN and crash after some messages, and never connect again."""
    build = executable(folder, *options, name="failing")
    run = build.read_text().splitlines()[1]
    build.write_text(
        f"""#!/bin/sh
mkdir "{folder}/started-$SPARRING_NUMBER" || exec sleep 1000000
case "$SPARRING_NUMBER" in
  1) set -- "$@" --stall-after 2000;;
  2) set -- "$@" --nan-after 2000;;
  3) set -- "$@" --crash-after 2000;;
esac
{run}
"""
    )
    return build


def beside(seconds: float, turn_s: float) -> str:
    """Compares a player whose fellows fail with one that is alone; returns a line."""
    options = ("--game", "balance", "--areas", "12", "--behavior", BEHAVIOR)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        alone = stack.enter_context(running(folder / "alone", 1, PORT, executable(folder, *options)))
        alone.pause()
        left = stack.enter_context(running(folder / "left", 4, PORT + 10, failing(folder, *options)))
        while left.fresh()["services"]["stepping-0"]["simulators"] > 1:
            time.sleep(0.2)
        rates = {alone: 0.0, left: 0.0}
        turns = max(2, round(seconds / turn_s))
        left.pause()
        for _ in range(turns):
            for whole in rates:
                whole.resume()
                before = whole.fresh()
                time.sleep(turn_s)
                after = whole.fresh()
                whole.pause()
                one, two = (
                    look["behaviors"][BEHAVIOR]["figures"]["step_counts"]["produced"] for look in (before, after)
                )
                rates[whole] += (two - one) / (after["time_s"] - before["time_s"]) / turns
        alone.resume()
    return (
        f"beside: ratio {rates[left] / rates[alone]:.2f}  "
        f"beside three that failed {rates[left]:,.0f}/s  alone {rates[alone]:,.0f}/s"
    )


def compare(name: str, seconds: float, warm_s: float, turn_s: float) -> str:
    """Measures one case, whole and parts in turn; returns a line."""
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
    produced = (two["step_counts"]["produced"] - one["step_counts"]["produced"]) / span
    players_alone, learner_alone = statistics.mean(alone), case.buffer / statistics.mean(update_seconds)
    return (
        f"{name}: ratio {produced / min(players_alone, learner_alone):.2f}  "
        f"end to end {produced:,.0f}/s over {span:.0f} s  "
        f"players alone {players_alone:,.0f}/s  learner alone {learner_alone:,.0f}/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join((*CASES, BESIDE))} (default: all)")
    parser.add_argument("--seconds", type=float, default=30.0, help="that the whole runs, measured")
    parser.add_argument("--turn", type=float, default=3.0, help="seconds between two pauses")
    parser.add_argument("--warm", type=float, default=5.0)
    args = parser.parse_args()
    for name in args.cases or (*CASES, BESIDE):
        line = beside(args.seconds, args.turn) if name == BESIDE else compare(name, args.seconds, args.warm, args.turn)
        print(line, flush=True)


if __name__ == "__main__":
    main()
