"""This project beside Unity ML-Agents 1.1.0: `python scripts/bench/beside_mlagents.py [GAME ...] [--seeds 3]`.

Both trainers learn the same games over Unity's protocol, from the same configuration file with the same seed, in turn:
the one that begins changes from seed to seed. The player belongs to neither: it uses ML-Agents' own protobufs and
records each episode itself, so that the game measures both curves. A step is a decision of the team that learns.

balance  3DBall: its file, and a stand-in for its physics; 100 is the most. Prints the reward (moving mean of 12,000
         steps) at equal steps, steps and seconds to 90, and steps/s; medians over seeds, then each run.
balance_sac
         the same game, with ML-Agents' file for SAC.
push     two bodies push each other off a line: PPO with self-play. Prints steps/s, and the points of this project's
         policies against ML-Agents' (1 a win, 0.5 a draw) at each third of the steps: every seed against every seed,
         half of the matches from each side, actions sampled. Two 95 % intervals: Wilson's over matches, and a
         bootstrap over seeds of both sides, which is the wider one because runs differ by more than matches do.

ML-Agents gets an environment of its own (Python 3.10, some GB with torch), which later calls reuse. With `--keep DIR`
runs stay, and those that are complete there are not run again; `--ours KEY=VALUE` changes our copy of the file alone
(`--ours hyperparameters.beta=0.01`, `--ours pipeline.mode=lockstep`) and `--root DIR` trains with the sources of
another working tree. A variant has a name of its own (`--label`), so that ML-Agents' runs serve all of them.
`--both KEY=VALUE` changes the file of both trainers.

    python scripts/bench/beside_mlagents.py push --seeds 3 --keep runs
    python scripts/bench/beside_mlagents.py push --seeds 3 --keep runs --ours pipeline.mode=lockstep

Not part of CI: it downloads ML-Agents and takes some minutes per run.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

from beside import curves, environment, matches
from beside.games import GAMES
from beside.runs import BEHAVIORS, CHECKPOINTS, CONFIGS, MLAGENTS, ROOT, STEPS, Job, run

from sparring.pipeline.evaluation.ratings import wilson
from sparring.services.supervision.launch import checkpoints_of

WINDOW: Final = 12_000
"""Steps of the moving mean: the longest episodes of all 12 agents of balance."""
THRESHOLD: Final = {"balance": 90.0, "balance_sac": 90.0}
MATCHES: Final = 200
"""Matches of each pair of runs."""


def train(jobs: Mapping[str, Sequence[Job]], folder: Path, interpreter: Path) -> dict[str, list[Path]]:
    """Trains all runs, the trainers in turn; returns their folders by trainer."""
    places: dict[str, list[Path]] = {trainer: [] for trainer in jobs}
    for number, pair in enumerate(zip(*jobs.values(), strict=True)):
        for job in pair if number % 2 == 0 else pair[::-1]:
            print(f"{job.name} ...", flush=True)
            places[job.trainer].append(run(job, folder, interpreter))
    return places


def report_curves(game: str, steps: int, places: Mapping[str, Sequence[Path]]) -> None:
    """Prints the records of the games."""
    for trainer, folders in places.items():
        found = {folder.name: curves.read(folder / "record.jsonl", steps, WINDOW) for folder in folders}
        rates = [curve.steps_per_s() for curve in found.values()]
        print(f"{game} {trainer}: {statistics.median(rates):,.0f} steps/s ({', '.join(f'{r:,.0f}' for r in rates)})")
        if game in THRESHOLD:
            print(f"  median: {curve_line(list(found.values()), steps, THRESHOLD[game])}")
            for name, curve in found.items():
                print(f"  {name}: {curve_line([curve], steps, THRESHOLD[game])}", flush=True)


def curve_line(each: Sequence[curves.Curve], steps: int, threshold: float) -> str:
    """Returns medians over runs, at each tenth of the steps and to the threshold."""
    marks = [steps * tenth // 10 for tenth in range(1, 11)]
    means = "  ".join(f"{mark / 1000:g}k {statistics.median(one.at(mark) for one in each):.1f}" for mark in marks)
    reached, seconds = zip(*(one.reaches(threshold) for one in each), strict=True)
    to = f"{statistics.median(reached):,.0f} steps, {statistics.median(seconds):,.1f} s"
    return f"{means}; reward {threshold:g} after {to}"


def report_matches(game: str, steps: int, label: str, places: Mapping[str, Sequence[Path]], interpreter: Path) -> None:
    """Prints the points of our policies against ML-Agents' at equal steps."""
    for third in range(1, CHECKPOINTS + 1):
        mark = steps * third // CHECKPOINTS
        shares = meet(game, mark, places[label], places[MLAGENTS], interpreter)
        low, high = wilson(float(shares.sum()) * MATCHES, shares.size * MATCHES)
        least, most = matches.over_seeds(shares)
        each = " | ".join(" ".join(f"{share:.2f}" for share in row) for row in shares)
        print(
            f"{game} {label} against {MLAGENTS} at {mark:,} steps: {shares.mean():.3f} points per match of "
            f"{shares.size * MATCHES:,}, [{low:.3f}, {high:.3f}] over matches, [{least:.3f}, {most:.3f}] over seeds; "
            f"by our seeds: {each}",
            flush=True,
        )


def meet(game: str, mark: int, ours: Sequence[Path], others: Sequence[Path], interpreter: Path) -> NDArray[np.float64]:
    """Returns points per match after `mark` steps, [our runs, runs of ML-Agents]."""
    behavior, played = BEHAVIORS[game], GAMES[game](1, 0)
    own = [matches.nearest(checkpoints_of(folder / "results" / "run", behavior), mark) for folder in ours]
    policies = [matches.Ours(path, played, seed) for seed, path in enumerate(own)]
    shares = np.zeros((len(ours), len(others)))
    for column, folder in enumerate(others):
        paths = list((folder / "results" / "run" / behavior).glob(f"{behavior}-*.pt"))
        settings = yaml.safe_load((folder / "config.yaml").read_text())["behaviors"][behavior]
        network = settings["network_settings"]
        with matches.theirs(matches.nearest(paths, mark), played, network, interpreter, column) as other:
            for row, policy in enumerate(policies):
                seed = 1000 * row + 10 * column
                shares[row, column] = matches.points(game, (policy, other), MATCHES, seed) / MATCHES
    return shares


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("games", nargs="*", choices=[*GAMES, []], help="default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help=f"of a run (default: {STEPS})")
    parser.add_argument("--arenas", type=int, default=0, help="side by side (default: 12 of balance, 8 of push)")
    parser.add_argument("--environment", type=Path, default=environment.DEFAULT, help="of ML-Agents, made if need be")
    parser.add_argument("--python", default=environment.PYTHON, help="that makes it")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="runs stay here and are reused")
    parser.add_argument("--ours", action="append", default=[], metavar="KEY=VALUE", help="changes our copy of the file")
    parser.add_argument("--both", action="append", default=[], metavar="KEY=VALUE", help="changes the file of both")
    parser.add_argument("--root", type=Path, default=ROOT, help="sources of this project that train")
    parser.add_argument("--label", help="name of our variant (default: ours and the changes)")
    return parser.parse_args()


def read_changes(given: Sequence[str]) -> dict[str, Any]:
    """Parses `KEY=VALUE` arguments; returns values by dotted key."""
    return {key: yaml.safe_load(value) for key, _, value in (change.partition("=") for change in given)}


def shown_changes(start: str, changes: Mapping[str, Any]) -> str:
    """Makes a part of a folder's name."""
    return "+".join([start, *(f"{key.rpartition('.')[2]}={value}" for key, value in changes.items())])


def main() -> None:
    args = parsed()
    common, own = read_changes(args.both), read_changes(args.ours)
    variant = shown_changes(f"{args.arenas}" if args.arenas else "", common)
    label = args.label or shown_changes("ours", own)
    interpreter = environment.prepare(args.environment.absolute(), args.python)
    root, variants = args.root.absolute(), {label: common | own, MLAGENTS: common}
    with contextlib.ExitStack() as stack:
        folder = (args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))).absolute()
        for game in args.games or GAMES:
            steps, seeds = args.steps or STEPS[game], range(1, args.seeds + 1)
            same = partial(Job, game=game, variant=variant, steps=steps, root=root, arenas=args.arenas)
            jobs = {
                trainer: [same(trainer=trainer, seed=seed, overrides=changes) for seed in seeds]
                for trainer, changes in variants.items()
            }
            places = train(jobs, folder, interpreter)
            report_curves(game, steps, places)
            if "self_play" in CONFIGS[game]:
                report_matches(game, steps, label, places, interpreter)


if __name__ == "__main__":
    main()
