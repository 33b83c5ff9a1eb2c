"""This project beside other trainers: `python scripts/bench/peers.py [cartpole] [single] [balance] [catch]`.

All trainers learn the same games with the settings of `beside/settings.py` in eight environments (`single`: in one), in
turn within one sitting: this project, Stable-Baselines3, Sample Factory, a script of one file in CleanRL's style, and
ML-Agents. The environments record their episodes themselves, so that the same clock measures all. It prints, for each
game and trainer, the steps per second from the first step to the last, the seconds from the first step, and from the
command, until the mean return of 100 episodes reaches the threshold (medians over the seeds, with minimum and maximum).

    cartpole  CartPole-v1: 475 counts as solved
    single    the same with one agent in one process
    balance   a ball on a plate, two continuous actions: 90 of 100
    catch     images of 40 x 40 pixels, three choices: 0.9 of 1

Each trainer has a Python environment of its own under ~/.cache/sparring, which later calls reuse. Sample Factory and
this project run several processes; the others use one. Networks are as near as the settings of each allow: two hidden
layers; for images, the encoder that each takes by default for small ones.

`PEERS_SHARE=0.05` shortens all runs, for a trial.

Not part of CI: it downloads some GB and takes minutes per run. The machine has to be quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

sys.path.insert(0, str(Path(__file__).parent))

from beside import environment
from beside.settings import GAMES, Settings

BENCH: Final = Path(__file__).parent
ROOT: Final = BENCH.parents[1]
CACHE: Final = Path.home() / ".cache" / "sparring"
WINDOW: Final = 100
OURS: Final = "sparring"
PACKAGES: Final = {
    "sb3": ("gymnasium", "stable-baselines3"),
    "sb3_sac": ("gymnasium[mujoco]", "stable-baselines3"),
    "script": ("gymnasium",),
    "sample_factory": ("gymnasium<1.0", "numpy<2", "sample-factory"),
}
"""What each trainer's environment needs beside torch."""
TRAINERS: Final = (OURS, "sb3", "script", "sample_factory", "mlagents")


def interpreter_of(trainer: str, torch: str) -> Path:
    """Returns the interpreter of a trainer's environment, which is made where it is missing."""
    if trainer == OURS:
        return Path(sys.executable)
    if trainer == "mlagents":
        interpreter = environment.prepare(environment.DEFAULT, environment.PYTHON)
        subprocess.run([str(interpreter), "-m", "pip", "install", "--quiet", "gymnasium<1.0"], check=True)
        return interpreter
    folder = CACHE / f"peer-{trainer}"
    interpreter, done = folder / "bin" / "python", folder / "installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(interpreter), "-m", "pip", "install", "--quiet", torch, *PACKAGES[trainer]], check=True)
        done.touch()
    return interpreter


def command(trainer: str, interpreter: Path, game: str, seed: int, folder: Path) -> list[str]:
    """Returns the command line of a run, and writes the configuration that it needs."""
    settings = GAMES[game]
    if trainer in PACKAGES:
        return [str(interpreter), "-m", f"beside.peer_{trainer}", game, str(seed), str(folder)]
    behavior = ours(settings)
    config, results = folder / "config.yaml", ["--run-id", "run", "--results-dir", str(folder), "--seed", str(seed)]
    if trainer == OURS:
        behavior["network_settings"]["vis_encode_type"] = "nature_cnn"
        options = {"env_id": f"beside.environments:{settings.environment}", "behavior": "Game"}
        simulator = {"name": "gymnasium", "areas": settings.environments, "options": options}
        document = {"behaviors": {"Game": behavior}, "simulators": [simulator], "pipeline": {"export": False}}
        config.write_text(yaml.safe_dump(document))
        return [str(interpreter), "-m", "sparring", "train", str(config), *results]
    behavior["network_settings"]["vis_encode_type"] = "nature_cnn"
    config.write_text(yaml.safe_dump({"behaviors": {"Game": behavior}}))
    return [str(interpreter), "-m", "beside.peer_mlagents", str(config), *results]


def ours(settings: Settings) -> dict[str, Any]:
    """Returns the settings in ML-Agents' words, which this project shares."""
    return {
        "trainer_type": "ppo",
        "hyperparameters": {
            "batch_size": settings.batch,
            "buffer_size": settings.environments * settings.horizon,
            "learning_rate": settings.rate,
            "learning_rate_schedule": "constant",
            "beta": settings.entropy,
            "beta_schedule": "constant",
            "epsilon": 0.2,
            "epsilon_schedule": "constant",
            "lambd": settings.trace,
            "num_epoch": settings.epochs,
        },
        "network_settings": {"hidden_units": settings.units, "num_layers": 1 if settings.images else 2},
        "reward_signals": {"extrinsic": {"gamma": settings.discount, "strength": 1.0}},
        "max_steps": settings.steps,
        "time_horizon": settings.horizon,
        "summary_freq": 10_000,
    }


def run(trainer: str, interpreter: Path, game: str, seed: int) -> dict[str, float]:
    """Trains once; returns the figures of its record."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        record, log = folder / "record.jsonl", folder / "log.txt"
        paths = [str(BENCH), *([str(ROOT / "src")] if trainer == OURS else [])]
        variables = {"PYTHONPATH": os.pathsep.join(paths), "PEERS_RECORD": str(record), "PEERS_GAME": game}
        began = time.monotonic()
        with log.open("w") as output:
            words = command(trainer, interpreter, game, seed, folder)
            ended = subprocess.run(
                words, stdout=output, stderr=subprocess.STDOUT, env=os.environ | variables, cwd=folder, check=False
            )
        if ended.returncode:
            tail = "".join(log.read_text().splitlines(keepends=True)[-20:])
            raise SystemExit(f"got exit status {ended.returncode} of {trainer} on {game}; expected 0; it ends:\n{tail}")
        return figures([json.loads(line) for line in record.read_text().splitlines()], GAMES[game].threshold, began)


def figures(lines: Sequence[Mapping[str, float]], threshold: float, began: float) -> dict[str, float]:
    """Returns steps per second, and seconds to the threshold from the first step and from the command."""
    lines = sorted(lines, key=lambda line: line["time"])
    first, episodes = lines[0]["time"], [line for line in lines if "reward" in line]
    rate = sum(line["length"] for line in episodes) / (episodes[-1]["time"] - first)
    reached = float("inf")
    for stop in range(WINDOW, len(episodes) + 1):
        if statistics.fmean(line["reward"] for line in episodes[stop - WINDOW : stop]) >= threshold:
            reached = episodes[stop - 1]["time"]
            break
    last = statistics.fmean(line["reward"] for line in episodes[-WINDOW:])
    return {
        "steps/s": rate,
        "learned after s": reached - first,
        "and after the command s": reached - began,
        "end": last,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("games", nargs="*", choices=[*GAMES, []], help="default: all")
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--torch", default="torch", help="requirement of torch in their environments (%(default)s)")
    args = parser.parse_args()
    interpreters = {trainer: interpreter_of(trainer, args.torch) for trainer in args.trainers}
    for game in args.games or GAMES:
        found: dict[str, list[dict[str, float]]] = {trainer: [] for trainer in args.trainers}
        for seed in range(1, args.seeds + 1):
            for trainer in args.trainers if seed % 2 else args.trainers[::-1]:
                found[trainer].append(run(trainer, interpreters[trainer], game, seed))
        for trainer, runs in found.items():
            shown = (spread([one[name] for one in runs], name) for name in runs[0])
            print(f"{game:9} {trainer:15} {'   '.join(shown)}", flush=True)


def spread(values: Sequence[float], name: str) -> str:
    digits = 2 if name == "end" else 1 if "s" in name.split() else 0
    low, middle, high = (f"{one:,.{digits}f}" for one in (min(values), statistics.median(values), max(values)))
    return f"{name} {middle} ({low} to {high})"


if __name__ == "__main__":
    main()
