"""Self-play, judged by matches: `python scripts/bench/judges.py [soccer] [tag] [scramble] [connect-four] [--seeds 1]`.

Trains each configuration, lets its checkpoints meet in a tournament, and prints the figures that its bar is about with
95 % intervals (Wilson). Exit status 1 if a bar is missed.

soccer        points per match of the final team: >= 0.8 against the untrained, >= 0.6 against itself at 10 %; its
              rating has risen.
tag           each side's final policy beats the other side's first more often than its own first did: intervals apart.
scramble      points of the final policy against untrained ones: > 0.65.
connect-four  points against uniformly random legal moves, half of the matches from each side: > 0.9.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.evaluation.ratings import wilson
from sparring.pipeline.evaluation.statistics import counted
from sparring.pipeline.games.registry import make
from sparring.pipeline.learning.checkpoints import load
from sparring.pipeline.messages.simulator import BehaviorActions
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.stepping.policies import NetworkPolicy
from sparring.services.commands.players import actor_of
from sparring.services.supervision.launch import checkpoints_of

ROOT: Final = Path(__file__).parents[2]
MATCHES: Final = 200
RANDOM_MATCHES: Final = 1000
RANDOM_AREAS: Final = 50


def sparring(*arguments: str) -> None:
    """Runs a command to its end."""
    subprocess.run([sys.executable, "-m", "sparring", *arguments], stdout=subprocess.DEVNULL, check=True)


def tournament(run: Path, *arguments: str) -> list[Mapping[str, Any]]:
    """Reads the matches of a tournament that count."""
    sparring("tournament", str(run), "--untrained", "--seed", "1", *arguments)
    (folder,) = run.glob("tournament-*")
    return counted(json.loads(line) for line in (folder / "matches.jsonl").read_text().splitlines())


def share(lines: Iterable[Mapping[str, Any]], behavior_id: str | None, one: str, other: str) -> tuple[float, int]:
    """Returns points of player `one` against `other`, with `behavior_id` or any, and the number of matches."""
    points, matches = 0.0, 0
    for line in lines:
        for at, player in line["players"].items():
            rivals = {rival for where, rival in line["players"].items() if where != at}
            if player == one and other in rivals and behavior_id in (None, at):
                points, matches = points + line["scores"][at], matches + 1
    return points, matches


def shown(name: str, found: tuple[float, int]) -> float:
    """Prints a share with its interval and returns it."""
    points, matches = found
    low, high = wilson(points, matches)
    print(f"  {name}: {points / matches:.3f} [{low:.3f}, {high:.3f}] of {matches}", flush=True)
    return points / matches


def soccer(run: Path) -> bool:
    """Runs the job of `scripts/demo`."""
    steps = [int(path.name.rpartition("-")[2]) for path in checkpoints_of(run, "Soccer")]
    lines = tournament(run, "--checkpoints", "2", "--matches", str(MATCHES))
    final, early = f"{run.name}@{steps[-1]}", f"{run.name}@{steps[0]}"  # the oldest is from a tenth of the run
    beats = shown("final against untrained", share(lines, None, final, "untrained")) >= 0.8
    grows = shown(f"final against {early}", share(lines, None, final, early)) >= 0.6
    ratings = [
        line["means"]["Self-play/ELO"]
        for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if line["type"] == "interval"
    ]
    print("  rating", " ".join(f"{rating:.0f}" for rating in ratings), flush=True)
    return beats and grows and ratings[-1] > ratings[0]


def tag(run: Path) -> bool:
    """Compares each side with its own first policy, against the other side's first policy."""
    lines = tournament(run, "--mirror", "--matches", str(2 * MATCHES))
    final = next(player for line in lines for player in line["players"].values() if player != "untrained")
    good = True
    for behavior_id in ("Chaser?team=0", "Runner?team=1"):
        before, after = (
            share(lines, behavior_id, "untrained", "untrained"),
            share(lines, behavior_id, final, "untrained"),
        )
        shown(f"{behavior_id} first against first", before)
        shown(f"{behavior_id} final against first", after)
        good &= wilson(*after)[0] > wilson(*before)[1]
    return good


def scramble(run: Path) -> bool:
    """Plays three teams against untrained ones."""
    lines = tournament(run, "--matches", str(MATCHES))
    final = next(player for line in lines for player in line["players"].values() if player != "untrained")
    return shown("final, among untrained", share(lines, None, final, "untrained")) > 0.65


def connect_four(run: Path) -> bool:
    """Plays against uniformly random legal moves, in this process."""
    weights = actor_of(load(checkpoints_of(run, "ConnectFour")[-1]))
    options = {"env_id": "pettingzoo.classic.connect_four_v3", "behavior": "ConnectFour"}
    spec = make("pettingzoo", 1, **options, teams="each").behaviors()["ConnectFour?team=0"]
    network = NetworkSettings.model_validate_json(weights.network)
    policy = NetworkPolicy(spec, network, np.random.default_rng(1))
    policy.load(weights)
    outcomes = [outcome for behavior_id in (0, 1) for outcome in against_random(policy, behavior_id, options)]
    return shown("against random", (sum(outcomes), len(outcomes))) > 0.9


def against_random(policy: NetworkPolicy, behavior_id: int, options: Mapping[str, Any]) -> list[float]:
    """Returns outcomes of a policy with one behavior id: those that began first, equally many of each area."""
    game = make("pettingzoo", RANDOM_AREAS, **options, teams="each", outcomes=True)
    random, mine = np.random.default_rng(behavior_id), f"ConnectFour?team={behavior_id}"
    each = RANDOM_MATCHES // 2 // RANDOM_AREAS
    found: dict[int, list[float]] = {area: [] for area in range(RANDOM_AREAS)}
    reports = game.reset({}, behavior_id)
    while min(map(len, found.values())) < each:
        actions = {}
        for report in reports:
            if report.decisions is None or report.decisions.masks is None:
                continue
            seen, masks = report.decisions.observations, report.decisions.masks
            chosen = policy.act(seen, masks).discrete if report.behavior == mine else legal(masks, random)
            actions[report.behavior] = BehaviorActions(
                behavior=report.behavior,
                agents=report.decisions.agents,
                continuous=np.zeros((len(chosen), 0), np.float32),
                discrete=chosen,
            )
        reports = game.step(actions)
        for report in reports:
            if report.behavior == mine and report.ends is not None:
                matches, outcomes = report.ends.matches, report.ends.outcomes
                assert matches is not None
                assert outcomes is not None
                for match, outcome in zip(matches.tolist(), outcomes.tolist(), strict=True):
                    found[match % RANDOM_AREAS].append(outcome)
    game.close()
    return [outcome for outcomes in found.values() for outcome in outcomes[:each]]


def legal(masks: NDArray[np.bool_], random: np.random.Generator) -> NDArray[np.int32]:
    """Samples one allowed choice for each row, uniformly: [n, 1]."""
    keys = np.where(masks, -1.0, random.random(masks.shape))
    chosen: NDArray[np.int32] = keys.argmax(1)[:, None].astype(np.int32)
    return chosen


JUDGES: dict[str, Callable[[Path], bool]] = {
    "soccer": soccer,
    "tag": tag,
    "scramble": scramble,
    "connect-four": connect_four,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", help=f"of {', '.join(JUDGES)} (default: all)")
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    missed = 0
    for name in args.tasks or JUDGES:
        for seed in range(1, args.seeds + 1):
            print(f"{name} seed {seed}", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                config = str(ROOT / "configs" / f"{name}.yaml")
                sparring("train", config, "--results-dir", folder, "--run-id", "run", "--seed", str(seed))
                met = JUDGES[name](Path(folder) / "run")
            print(f"  bar {'met' if met else 'MISSED'}", flush=True)
            missed += not met
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
