#!/usr/bin/env python3
"""Prints the weights' hash of one short lockstep run of every algorithm: a refactoring must change none of them.

    scripts/bench/lockstep.py                        this clone
    scripts/bench/lockstep.py --against ../before    another checkout beside it; exits non-zero where a hash differs

A run takes one seed, in one process, so that the hashes of one machine can be compared, and only those: another CPU or
another version of PyTorch may round in another way.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
MEMORY = {"sequence_length": 16, "memory_size": 64}
STEPS = {
    "goal": 12_000,
    "goals-mixed": 2_000,
    "rooms": 12_000,
    "rooms-memory": 8_000,
    "balance-memory": 12_000,
    "key-door-curiosity": 12_000,
    "key-door-rnd": 12_000,
    "key-door-demonstrations": 12_000,
    "soccer": 30_000,
    "tag": 12_000,
    "spread-groups": 8_000,
}
QUICK_SELF_PLAY = {"save_steps": 2000, "team_change": 6000, "swap_steps": 1000}


def document(name: str) -> dict[str, Any]:
    """Returns the configuration of a case: the example's own, in lockstep, with memory where the name says so."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "configs" / f"{name.removesuffix('-memory')}.yaml").read_text())
    config.setdefault("pipeline", {})["mode"] = "lockstep"
    for behavior in config["behaviors"].values():
        if "self_play" in behavior:
            behavior["self_play"].update(QUICK_SELF_PLAY)
        if "hyperparameters" in behavior:
            behavior["hyperparameters"]["buffer_size"] = min(behavior["hyperparameters"]["buffer_size"], 2048)
        if name.endswith("-memory"):
            behavior["network_settings"]["memory"] = MEMORY
    return config


def sparring(tree: Path, folder: Path, *arguments: str) -> None:
    """Runs a command of the checkout `tree` in `folder`.

    Raises:
        SystemExit: the command fails; its output is printed.
    """
    command = [sys.executable, "-P", "-m", "sparring", *arguments]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": str(tree / "src")}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} of {tree} fails:\n{done.stdout}{done.stderr}")


def weights(tree: Path, name: str) -> str:
    """Returns the hash of the final weights of every behavior of a case, with its steps."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        file = folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(document(name)))
        if "demonstrations" in name:
            sparring(tree, folder, "record", file.name, "--script", "expert", "--seed", "1", "--out", "demos/key-door")
        sparring(
            tree, folder, "train", file.name, "--in-process", "--no-export", "--seed", "1",
            "--max-steps", str(STEPS[name]), "--run-id", "run", "--results-dir", "results",
        )  # fmt: skip
        behaviors = json.loads((folder / "results" / "run" / "summary.json").read_text())["behaviors"]
    return " ".join(f"{one['weights_sha256'][:16]}@{one['steps']}" for one in behaviors.values())


def main() -> int:
    """Prints a line for each case; returns 1 where the two checkouts differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(STEPS), help=f"of {', '.join(STEPS)}; all unless given")
    parser.add_argument("--against", type=Path, help="the folder of another checkout")
    arguments = parser.parse_args()
    different = 0
    for name in arguments.cases:
        here = weights(ROOT, name)
        there = here if arguments.against is None else weights(arguments.against.resolve(), name)
        different += here != there
        print(f"{name:24} {here}{'' if here == there else f'   differs: {there}'}", flush=True)
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
