"""Breaks every part of real runs in every way of the design's table, and judges what came of it.

    scripts/faults [--rows WORDS ...] [--mode overlap|lockstep] [--times 5] [--seconds 12] [--beside 2]

Real processes train the built-in simulator `balance` in runs of about 20 s, with recovery checkpoints every 5 s. At a
moment drawn by its seed each run meets the fault of its row. Afterwards must hold: it completed, or ended as the row
says; the books balance; nothing but what the row allows is lost, each step told by an incident; no simulator counts
more than the books; only the part that was meant has failed; a learner went on from its newest checkpoint; versions
only rose; the last checkpoint can be read; no process is left.

Prints a line per row and mode: runs, those that did as the row says, steps lost, seconds until training went on.
Exit status 1 if any did not; its folder is kept and named. The rows of disks and networks need Linux and root.
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
class Line:
    """What came of one row in one mode."""

    row: str
    mode: str
    outcomes: list[Outcome] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        runs = len(self.outcomes) + len(self.violations)
        lost = [outcome.lost for outcome in self.outcomes]
        took = [outcome.recovery_s for outcome in self.outcomes if outcome.recovery_s is not None]
        return (
            f"{self.row:<38} {self.mode:<9} {runs:>4} {len(self.outcomes):>5} "
            f"{_range(lost, '{:d}'):>12} {_range(took, '{:.1f}'):>12}"
        )


HEAD = f"{'row':<38} {'mode':<9} {'runs':>4} {'as it':>5} {'lost steps':>12} {'seconds':>12}"


def _range(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} - {high}"


def chosen(words: Sequence[str]) -> list[str]:
    """Rows that contain one of the words, in the order of these; all without any."""
    return list(dict.fromkeys(row for word in words or [""] for row in ROWS if word in row))


def attempt(row: str, mode: str, number: int, seconds: float, root: Path) -> tuple[str, str, Outcome | str]:
    """Tries a row once: what came of it, or what it violated."""
    folder = root / f"{row.replace(' ', '-').replace(',', '')}-{mode}-{number}"
    folder.mkdir(parents=True)
    began = time.monotonic()
    try:
        outcome: Outcome | str = ROWS[row](Bench(folder, mode, seconds, seed=number))
    except Violation as error:
        outcome = f"{error}\n    kept: {folder}"
    except Exception:
        outcome = f"{traceback.format_exc()}\n    kept: {folder}"
    said = outcome if isinstance(outcome, str) else "ok"
    print(f"{time.strftime('%H:%M:%S')} {row} / {mode} {number}: {time.monotonic() - began:.0f} s, {said}", flush=True)
    if not isinstance(outcome, str):
        shutil.rmtree(folder)
    return row, mode, outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=[], metavar="WORDS", help="only rows that contain any of these")
    parser.add_argument("--mode", choices=MODES, help="only this one")
    parser.add_argument("--times", type=int, default=5, help="each row in each mode (%(default)s)")
    parser.add_argument("--seconds", type=float, default=12.0, help="that a run trains without its fault (%(default)g)")
    parser.add_argument("--beside", type=int, default=2, help="runs at once (%(default)s)")
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    args = parser.parse_args()
    rows, modes = chosen(args.rows), [args.mode] if args.mode else MODES
    if args.list or not rows:
        print("\n".join(ROWS))
        return 0 if rows else 2
    root = Path(tempfile.mkdtemp(prefix="faults-"))
    lines = {(row, mode): Line(row, mode) for row, mode in product(rows, modes)}
    with ThreadPoolExecutor(args.beside) as pool:
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
