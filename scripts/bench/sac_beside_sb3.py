"""SAC beside Stable-Baselines3's: `python scripts/bench/sac_beside_sb3.py [Pendulum-v1 ...] [--seeds 3] [--keep DIR]`.

Both trainers learn the same environments with the same hyperparameters and as many gradient steps, in turn: first one
seed of each environment, then the next. The environments record their episodes themselves. It prints the mean return of
20 episodes with the most likely actions at the end, the mean return of the last 100 episodes of training, and the CPU
time of training, of all processes: medians over the seeds, then each seed.

What no setting makes equal: this project acts by its new policy where Stable-Baselines3 acts uniformly, in the first
`first` steps; and it acts up to two batches of 32 steps behind its learner, in processes of their own, where
Stable-Baselines3 steps and learns in turn.

Needs `pip install 'sparring[mujoco]'`. Stable-Baselines3 has a Python environment of its own under ~/.cache/sparring.
Runs stay in `--keep`, and those that are complete there are not run again. Not part of CI: a run takes minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

sys.path.insert(0, str(Path(__file__).parent))

from peers import BENCH, OURS, ROOT, WINDOW, interpreter_of

PEER: Final = "sb3_sac"
SETTINGS: Final[dict[str, Any]] = {
    "steps": 300_000,
    "environments": 8,
    "first": 5_000,
    "steps_per_update": 4,
    "batch": 128,
    "replay": 410_000,
    "rate": 3e-4,
    "units": 128,
    "tau": 0.005,
    "discount": 0.99,
    "episodes": 20,
    "evaluation_seed": 1000,
}
CHANGES: Final[dict[str, dict[str, Any]]] = {
    "Pendulum-v1": {"steps": 20_000, "first": 1_000, "environments": 4, "rate": 1e-3},
    "HalfCheetah-v5": {},
    "Hopper-v5": {},
}
"""What differs by environment."""


def ours(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration of this project."""
    behavior = {
        "trainer_type": "sac",
        "hyperparameters": {
            "batch_size": settings["batch"],
            "buffer_size": settings["replay"],
            "learning_rate": settings["rate"],
            "buffer_init_steps": settings["first"],
            "tau": settings["tau"],
            "steps_per_update": settings["steps_per_update"],
        },
        "network_settings": {
            "hidden_units": settings["units"],
            "num_layers": 2,
            "activation": "relu",
            "initialization": "uniform",
        },
        "reward_signals": {"extrinsic": {"gamma": settings["discount"]}},
        "max_steps": settings["steps"],
        "summary_freq": 10_000,
    }
    options = {"env_id": "beside.environments:Recorded-v9", "behavior": "Game"}
    simulator = {"name": "gymnasium", "areas": settings["environments"], "options": options}
    return {"behaviors": {"Game": behavior}, "simulators": [simulator], "pipeline": {"export": False}}


def run(trainer: str, interpreter: Path, env_id: str, seed: int, keep: Path) -> dict[str, float]:
    """Trains and evaluates once, unless a complete run is there; returns its figures."""
    folder = keep / f"{env_id}-{trainer}-{seed}"
    done = folder / "figures.json"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        settings = {"env_id": env_id, **SETTINGS, **CHANGES[env_id]}
        if trainer == OURS:
            (folder / "config.yaml").write_text(yaml.safe_dump(ours(settings)))
            command = [str(interpreter), "-m", "sparring"]
            own = ["--run-id", "run", "--results-dir", str(folder), "--seed", str(seed)]
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            execute([*command, "train", str(folder / "config.yaml"), *own], env_id, folder, "record")
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            measured = ["--deterministic", "--episodes", str(settings["episodes"])]
            measured += ["--seed", str(settings["evaluation_seed"])]
            execute([*command, "evaluate", str(folder / "run"), *measured], env_id, folder, "evaluation")
            (found,) = folder.glob("run/**/evaluation.json")
            evaluated = json.loads(found.read_text())["behaviors"]["Game"]["reward"]["mean"]
            seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        else:
            command = [str(interpreter), "-m", f"beside.peer_{PEER}", json.dumps(settings), str(seed), str(folder)]
            execute(command, env_id, folder, "record")
            found = json.loads((folder / "evaluation.json").read_text())
            evaluated, seconds = statistics.fmean(found["returns"]), found["CPU s"]
        lines = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
        last = [line["reward"] for line in sorted(lines, key=lambda line: line["time"]) if "reward" in line][-WINDOW:]
        figures = {"evaluated": evaluated, "training": statistics.fmean(last), "CPU s": seconds}
        done.write_text(json.dumps(figures))
    return dict(json.loads(done.read_text()))


def execute(command: Sequence[str], env_id: str, folder: Path, name: str) -> None:
    """Runs a command whose environments record their episodes in `NAME.jsonl`; its log is `NAME.log`."""
    variables = {
        "PYTHONPATH": os.pathsep.join([str(BENCH), str(ROOT / "src")]),
        "PEERS_RECORD": str(folder / f"{name}.jsonl"),
        "PEERS_GAME": env_id,
        "OMP_NUM_THREADS": "1",
    }
    with (folder / f"{name}.log").open("w") as log:
        status = subprocess.run(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | variables, cwd=folder, check=False
        ).returncode
    if status:
        raise SystemExit(f"got exit status {status}; expected 0; {folder / f'{name}.log'} has the cause")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environments", nargs="*", choices=[*CHANGES, []], help="default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--keep", type=Path, default=Path("results/sac_beside_sb3"), metavar="DIR")
    parser.add_argument("--torch", default="torch", help="requirement of torch in its environment (%(default)s)")
    args = parser.parse_args()
    chosen, keep = args.environments or list(CHANGES), args.keep.absolute()
    trainers = {trainer: interpreter_of(trainer, args.torch) for trainer in (OURS, PEER)}
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for seed in range(1, args.seeds + 1):
        for env_id in chosen:
            for trainer in list(trainers) if seed % 2 else list(trainers)[::-1]:
                figures = run(trainer, trainers[trainer], env_id, seed, keep)
                found.setdefault((env_id, trainer), []).append(figures)
                print(f"{env_id} {trainer} seed {seed}: {shown([figures])}", flush=True)
    for (env_id, trainer), runs in found.items():
        print(f"{env_id:15} {trainer:9} {shown(runs)}")


def shown(runs: Sequence[Mapping[str, float]]) -> str:
    """Returns the medians of runs, and the runs."""
    parts = []
    for name in runs[0]:
        each = [one[name] for one in runs]
        parts.append(f"{name} {statistics.median(each):,.0f} ({', '.join(f'{value:,.0f}' for value in each)})")
    return "   ".join(parts)


if __name__ == "__main__":
    main()
