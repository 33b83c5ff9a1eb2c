"""Injects each fault of the design's table into real runs and judges the results.

    scripts/faults [--rows WORDS ...] [--mode overlap|lockstep] [--times 5] [--seconds 12] [--parallel 2]

Real processes train the built-in simulator `balance` in runs of about 20 s, with recovery checkpoints every 5 s. Each
run suffers the fault of its row at a time that its seed chooses. Afterwards these must hold: the run completed, or
ended as the row expects; step accounting balances; only what the row allows is lost, and an incident reports each lost
step; no simulator counts more steps than step accounting; only the expected process failed; a learner resumed from its
newest checkpoint; versions only rose; the last checkpoint can be read; no process is left.

Prints a line per row and mode: runs, runs that passed, steps lost, seconds until training resumed. Exits with status 1
if any run failed, and keeps and names its folder. The rows of disks and networks need Linux and root.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from tests.faults.rows import ROWS, Bench, Outcome
from tests.faults.trial import Violation

MODES = ("overlap", "lockstep")


@dataclass
class RowResults:
    """The results of one row in one mode."""

    row: str
    mode: str
    outcomes: list[Outcome] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        runs = len(self.outcomes) + len(self.violations)
        lost = [outcome.lost for outcome in self.outcomes]
        recoveries = [outcome.recovery_s for outcome in self.outcomes if outcome.recovery_s is not None]
        return (
            f"{self.row:<38} {self.mode:<9} {runs:>4} {len(self.outcomes):>6} "
            f"{_range(lost, '{:d}'):>12} {_range(recoveries, '{:.1f}'):>12}"
        )


HEAD = f"{'row':<38} {'mode':<9} {'runs':>4} {'passed':>6} {'lost steps':>12} {'seconds':>12}"


def _range(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} - {high}"


def chosen(words: Sequence[str]) -> list[str]:
    """Returns the rows that contain one of the words, in the order of the words; all rows if there are no words."""
    return list(dict.fromkeys(row for word in words or [""] for row in ROWS if word in row))


def attempt(row: str, mode: str, number: int, seconds: float, root: Path) -> tuple[str, str, Outcome | str]:
    """Runs a row once and returns its outcome, or what it violated."""
    folder = root / f"{row.replace(' ', '-').replace(',', '')}-{mode}-{number}"
    folder.mkdir(parents=True)
    began = time.monotonic()
    try:
        outcome: Outcome | str = ROWS[row](Bench(folder, mode, seconds, seed=number))
    except Violation as error:
        outcome = f"{error}\n    kept: {folder}"
    except Exception:
        outcome = f"{traceback.format_exc()}\n    kept: {folder}"
    result = outcome if isinstance(outcome, str) else "ok"
    print(
        f"{time.strftime('%H:%M:%S')} {row} / {mode} {number}: {time.monotonic() - began:.0f} s, {result}", flush=True
    )
    if not isinstance(outcome, str):
        shutil.rmtree(folder)
    return row, mode, outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=[], metavar="WORDS", help="only rows that contain any of these")
    parser.add_argument("--mode", choices=MODES, help="only this mode")
    parser.add_argument("--times", type=int, default=5, help="runs of each row in each mode (%(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=12.0, help="training time of a run without its fault (%(default)g)"
    )
    parser.add_argument("--parallel", type=int, default=2, help="runs at once (%(default)s)")
    parser.add_argument("--list", action="store_true", help="print the rows and exit")
    args = parser.parse_args()
    rows, modes = chosen(args.rows), [args.mode] if args.mode else MODES
    if args.list or not rows:
        print("\n".join(ROWS))
        return 0 if rows else 2
    root = Path(tempfile.mkdtemp(prefix="faults-"))
    lines = {(row, mode): RowResults(row, mode) for row, mode in product(rows, modes)}
    with ThreadPoolExecutor(args.parallel) as pool:
        every = product(range(1, args.times + 1), rows, modes)
        started = [pool.submit(attempt, row, mode, number, args.seconds, root) for number, row, mode in every]
        for future in started:
            row, mode, outcome = future.result()
            line = lines[row, mode]
            (line.violations if isinstance(outcome, str) else line.outcomes).append(outcome)  # type: ignore[arg-type]
    print("", HEAD, *lines.values(), sep="\n")
    violated = [line for line in lines.values() if line.violations]
    if not violated:
        shutil.rmtree(root)
    return 1 if violated else 0


if __name__ == "__main__":
    sys.exit(main())
