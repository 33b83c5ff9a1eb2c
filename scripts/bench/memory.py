"""Does memory grow during a run? `python scripts/bench/memory.py [--minutes 10] [--from 3]`.

Runs 64 `balance` agents against a learner that never ends, takes the unique memory of every process
every 5 s, and compares the median of the minute at `--from` with that of the last minute. The bar: less
than 2 % or 8 MB more, whichever is more. Exit status 1 where a process misses it.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import psutil

CONFIG = """
behaviors:
  Balance:
    hyperparameters: {batch_size: 64, buffer_size: 12000, num_epoch: 3}
    network_settings: {normalize: true, hidden_units: 128, num_layers: 2}
    max_steps: 1000000000
    time_horizon: 64
    summary_freq: 100000
simulators:
  - {name: balance, areas: 64}
"""


def name_of(process: psutil.Process) -> str:
    """Names a process of the run, from its command line."""
    words = " ".join(process.cmdline()).split()  # a forked process has its title in one word
    if "sparring.services.process.watcher" in words:
        return "watcher"
    for mark in ("service", "simulator", "train"):
        if mark in words:
            return " ".join(words[words.index(mark) : words.index(mark) + 2]).replace("service ", "")
    return words[0]


def sample(root: psutil.Process) -> dict[str, int]:
    """Returns the unique bytes of every process of the run."""
    found = {}
    for process in [root, *root.children(recursive=True)]:
        try:
            found[name_of(process)] = process.memory_full_info().uss
        except psutil.NoSuchProcess:
            continue
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--from", dest="begin", type=float, default=3.0)
    args = parser.parse_args()
    early: dict[str, list[int]] = defaultdict(list)
    late: dict[str, list[int]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "memory.yaml"
        config.write_text(CONFIG)
        command = [sys.executable, "-m", "sparring", "train", str(config), "--results-dir", folder, "--run-id", "run"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            root, began = psutil.Process(process.pid), time.monotonic()
            while (minutes := (time.monotonic() - began) / 60) < args.minutes:
                taken = sample(root)
                for window, start in ((early, args.begin), (late, args.minutes - 1)):
                    if start <= minutes < start + 1:
                        for name, size in taken.items():
                            window[name].append(size)
                time.sleep(5)
            process.send_signal(signal.SIGINT)
            process.wait(60)
    return report(early, late)


def report(early: dict[str, list[int]], late: dict[str, list[int]]) -> int:
    """Prints a line for each process; returns 1 where one has grown."""
    missed = 0
    for name in sorted(early):
        before, after = statistics.median(early[name]), statistics.median(late[name])
        grown = after - before
        fine = grown < max(0.02 * before, 8e6)
        missed += not fine
        verdict = "" if fine else "GREW"
        print(f"{name:24} {before / 1e6:8.1f} MB -> {after / 1e6:8.1f} MB  {grown / 1e6:+6.1f} MB  {verdict}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
