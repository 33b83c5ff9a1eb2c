"""Imitation and curiosity, judged by learning: `python scripts/bench/imitation.py [goal] [balance] [key-door] ...`.

goal      20 episodes of a trained expert are recorded; GAIL alone, and VAIL alone, then have to come within 10 % of the
          expert's mean return. GAIL with cloning has to pass 0.9 within 500 steps, continuous and discrete.
balance   as goal, GAIL and VAIL alone.
key-door  PPO alone fails (below 0.05), with curiosity, and with RND, it solves the game (0.9 of the episodes, in three
          intervals in a row); with 20 demonstrations of its expert (GAIL and cloning) at least three times sooner.
key-door-sac   GAIL alone, from 5 demonstrations: SAC solves the game at least three times sooner than PPO.

Prints the reward of every interval. Exit status 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from sparring.pipeline.demonstrations.library import files_of, read_any

ROOT: Final = Path(__file__).parents[2]
EPISODES: Final = "20"
SOLVED: Final = 0.9


def sparring(*arguments: str) -> None:
    """Runs a command to its end."""
    subprocess.run([sys.executable, "-m", "sparring", *arguments], stdout=subprocess.DEVNULL, check=True)


def configuration(name: str) -> dict[str, Any]:
    """Reads one of `configs/` as plain values."""
    return dict(yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text()))


def curve(folder: Path, plain: Mapping[str, Any], seed: int) -> list[tuple[int, float]]:
    """Returns steps and mean reward of each interval of a run in which episodes ended."""
    (folder / "config.yaml").write_text(yaml.safe_dump(dict(plain)))
    run = ["--results-dir", str(folder), "--run-id", "run", "--seed", str(seed), "--force"]
    sparring("train", str(folder / "config.yaml"), *run)
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    found = [(line["step"], line["reward"]) for line in lines if line["type"] == "interval"]
    return [(step, reward) for step, reward in found if reward is not None]


def shown(what: str, seed: int, found: list[tuple[int, float]]) -> None:
    """Prints a curve."""
    print(f"  {what} seed {seed}:", " ".join(f"{reward:.2f}" for _, reward in found), flush=True)


def expert(folder: Path, plain: Mapping[str, Any], *arguments: str) -> float:
    """Records episodes into `demos` and returns their mean return."""
    (folder / "expert.yaml").write_text(yaml.safe_dump(dict(plain)))
    where = ["--out", str(folder / "demos"), "--episodes", EPISODES, "--seed", "1", "--force"]
    sparring("record", str(folder / "expert.yaml"), *where, *arguments)
    (file,) = files_of(folder / "demos")
    columns = read_any(file).columns
    return float(columns["rewards"].sum() / len(columns["lengths"]))


def trained_expert(folder: Path, plain: Mapping[str, Any]) -> float:
    """Records as `expert`, by a policy that is trained first."""
    curve(folder, plain, seed=1)
    return expert(folder, plain, "--policy", str(folder / "run"))


def learning_from(folder: Path, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration with the demonstrations of `folder`."""
    changed = copy.deepcopy(dict(plain))
    for behavior in changed["behaviors"].values():
        for part in (behavior["reward_signals"].get("gail"), behavior.get("behavioral_cloning")):
            if part is not None:
                part["demo_path"] = str(folder / "demos")
    return changed


def imitated(folder: Path, name: str, plain: Mapping[str, Any], seeds: range) -> Iterator[bool]:
    """Compares GAIL and VAIL alone with the expert."""
    best = trained_expert(folder, configuration(name))
    print(f"  expert {best:.3f}", flush=True)
    (behavior,) = plain["behaviors"]
    for vail in (False, True):
        changed = learning_from(folder, plain)
        changed["behaviors"][behavior]["reward_signals"]["gail"]["use_vail"] = vail
        for seed in seeds:
            found = curve(folder, changed, seed)
            shown("vail" if vail else "gail", seed, found)
            yield abs(found[-1][1] - best) <= 0.1 * abs(best)


def goal(folder: Path, seeds: range) -> Iterator[bool]:
    """Runs the goal game."""
    yield from imitated(folder, "goal", configuration("goal-gail"), seeds)
    network = {"hidden_units": 32, "num_layers": 1}
    for discrete in (False, True):
        options = {"name": "goal", "areas": 8, "options": {"discrete": discrete}}
        trained_expert(folder, {**configuration("goal"), "simulators": [options]})
        behavior = {
            "hyperparameters": {"batch_size": 16, "buffer_size": 64, "learning_rate": 5e-3},
            "network_settings": network,
            "reward_signals": {"gail": {"demo_path": "", "network_settings": network}},
            "behavioral_cloning": {"demo_path": "", "steps": 1000},
            "max_steps": 500,
            "summary_freq": 100,
        }
        alone = {**options, "areas": 1}
        plain = {"behaviors": {"Goal": behavior}, "simulators": [alone], "pipeline": {"mode": "lockstep"}}
        for seed in seeds:
            found = curve(folder, learning_from(folder, plain), seed)
            shown(f"gail with cloning, {'discrete' if discrete else 'continuous'},", seed, found)
            yield found[-1][1] > 0.9


def balance(folder: Path, seeds: range) -> Iterator[bool]:
    """Runs the ball on a plate."""
    yield from imitated(folder, "balance", configuration("balance-gail"), seeds)


def solved_at(found: list[tuple[int, float]]) -> float:
    """Returns the steps until the game is solved, in three intervals in a row: in some only a few episodes end."""
    rows = zip(found, found[1:], found[2:], strict=False)
    return next((three[-1][0] for three in rows if min(reward for _, reward in three) >= SOLVED), float("inf"))


def key_door(folder: Path, seeds: range) -> Iterator[bool]:
    """Runs the game of sparse reward."""
    plain = configuration("key-door-rnd")
    expert(folder, plain, "--script", "expert")
    alone = copy.deepcopy(plain)
    del alone["behaviors"]["KeyDoor"]["reward_signals"]["rnd"]
    times: dict[str, list[float]] = {}
    for what in ("alone", "curiosity", "rnd", "demonstrations"):
        for seed in seeds:
            chosen = alone if what == "alone" else learning_from(folder, configuration(f"key-door-{what}"))
            found = curve(folder, chosen, seed)
            shown(what, seed, found[:: max(1, len(found) // 20)])
            times.setdefault(what, []).append(solved_at(found))
            yield max(reward for _, reward in found) < 0.05 if what == "alone" else times[what][-1] < float("inf")
    print("  solved at", times, flush=True)
    yield 3 * max(times["demonstrations"]) <= min(*times["curiosity"], *times["rnd"])


def key_door_sac(folder: Path, seeds: range) -> Iterator[bool]:
    """Compares GAIL from a replay with GAIL from the newest steps alone."""
    plain, on_policy = configuration("key-door-sac"), configuration("key-door-demonstrations")
    expert(folder, plain, "--script", "expert", "--episodes", "5")
    behavior = on_policy["behaviors"]["KeyDoor"]
    del behavior["behavioral_cloning"], behavior["reward_signals"]["extrinsic"]
    behavior["reward_signals"]["gail"] |= {"strength": 1.0, "gradient_penalty": 1.0}
    times: dict[str, list[float]] = {}
    for what, chosen in (("sac", plain), ("ppo", on_policy)):
        for seed in seeds:
            found = curve(folder, learning_from(folder, chosen), seed)
            shown(what, seed, found)
            times.setdefault(what, []).append(solved_at(found))
    print("  solved at", times, flush=True)
    yield 3 * max(times["sac"]) <= min(times["ppo"])


TASKS: Final[dict[str, Callable[[Path, range], Iterator[bool]]]] = {
    "goal": goal,
    "balance": balance,
    "key-door": key_door,
    "key-door-sac": key_door_sac,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", help=f"of {', '.join(TASKS)} (default: all)")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    missed = 0
    for name in args.tasks or TASKS:
        print(name, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            met = list(TASKS[name](Path(folder), range(1, args.seeds + 1)))
        print(f"  bars met: {sum(met)} of {len(met)}", flush=True)
        missed += len(met) - sum(met)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
