"""Measures what bad writers cost the training: steps a second while one crashes, hangs, or writes 100,000 values a
second, over steps a second while it does nothing, in windows of one run that take turns.

    python scripts/bench/writers.py [--pairs 10] [--seconds 6]
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
from collections.abc import Mapping
from pathlib import Path

import yaml

BAR = 0.97
CALLS = """
import os, time
from pathlib import Path

BAD = Path(__file__).with_name("bad")

def crash(event):
    if BAD.exists():
        os.abort()

def hang(event):
    if BAD.exists():
        time.sleep(10_000)

def busy(event):
    with open(os.devnull, "w") as file:
        while BAD.exists():
            began = time.monotonic()
            for number in range(10_000):
                file.write(f"{number} {number / 7}\\n")
            time.sleep(max(0.0, began + 0.1 - time.monotonic()))
"""
CASES = ("crash", "hang", "busy")
CONFIG = {
    "behaviors": {
        "Balance": {
            "hyperparameters": {"batch_size": 128, "buffer_size": 512, "num_epoch": 3},
            "network_settings": {"hidden_units": 64, "num_layers": 2},
            "max_steps": 10**9,
            "summary_freq": 512,
        }
    },
    "simulators": [{"name": "balance", "areas": 16}],
}


class Run:
    """A run with a writer that is bad while a file exists."""

    def __init__(self, folder: Path, case: str) -> None:
        self.directory, self.bad = folder / case, folder / "bad"
        # A call that writes until the window ends is no hang.
        limits = {"timeout_s": 3.0 if case == "hang" else 1000.0, "failures": 1000}
        pipeline = {"export": False, "writer_limits": limits, "restarts": {"backoff_s": 0.5, "backoff_max_s": 0.5}}
        writers = {"tensorboard": False, "callbacks": {"functions": [f"bad_calls:{case}"]}}
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(CONFIG | {"writers": writers, "pipeline": pipeline}))
        (folder / "bad_calls.py").write_text(CALLS)
        self._log = folder / f"{case}.log"
        words = ["train", str(config), "--results-dir", str(folder), "--run-id", case, "--seed", "1"]
        with self._log.open("w") as log:
            self._process = subprocess.Popen([sys.executable, "-m", "sparring", *words], stdout=log, stderr=log)

    def progress(self) -> tuple[int, float]:
        """Returns the steps trained, and when that was."""
        assert self._process.poll() is None, self._log.read_text()
        try:
            status = json.loads((self.directory / "status.json").read_text())
            return int(status["behaviors"]["Balance"]["step"]), float(status["time_s"])
        except (OSError, ValueError, KeyError):
            return 0, 0.0

    def window(self, seconds: float, *, bad: bool) -> tuple[int, float]:
        """Returns the steps trained in a window, and its length."""
        self.bad.touch() if bad else self.bad.unlink(missing_ok=True)
        time.sleep(1.0)  # the writer looks every half second
        first, began = self.progress()
        time.sleep(seconds)
        last, ended = self.progress()
        return last - first, ended - began

    def end(self) -> Mapping[str, int]:
        """Ends the run; returns the counts of the writer."""
        counts: Mapping[str, int] = json.loads((self.directory / "status.json").read_text())["writers"]["callbacks"]
        self.bad.unlink(missing_ok=True)
        self._process.terminate()
        self._process.wait()
        return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--case", choices=CASES, nargs="*", default=CASES)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    worst = 1.0
    for case in args.case:
        with tempfile.TemporaryDirectory() as temporary:
            run = Run(Path(temporary), case)
            while run.progress()[0] < 10_000:  # a warm-up
                time.sleep(0.5)
            ratios, steps, times = [], {True: 0, False: 0}, {True: 0.0, False: 0.0}
            for pair in range(args.pairs):
                pair_rates = {}
                for bad in (True, False) if pair % 2 else (False, True):
                    trained, passed_s = run.window(args.seconds, bad=bad)
                    steps[bad] += trained
                    times[bad] += passed_s
                    pair_rates[bad] = trained / passed_s
                ratios.append(pair_rates[True] / pair_rates[False])
            counts = run.end()
        faulty, sound = (steps[kind] / times[kind] for kind in (True, False))
        worst = min(worst, faulty / sound)
        spread = f"pairs from {min(ratios):.3f} to {max(ratios):.3f}, median {statistics.median(ratios):.3f}"
        print(
            f"{case:6} {faulty:,.0f} / {sound:,.0f} steps a second = {faulty / sound:.3f} (bar {BAR}); {spread}; "
            f"{dict(counts)}"
        )
        sys.stdout.flush()
    return 0 if worst >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
