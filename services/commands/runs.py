"""Finds the folder of a run by its path or id."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from sparring.pipeline.errors import SettingsError

RESULTS: Final = Path("results")


def add_run(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Adds RUN, `run` or `runs` among the arguments, and --results-dir."""
    name, number = ("runs", "+") if several else ("run", None)
    parser.add_argument(name, nargs=number, metavar="RUN", help="folder of a run, or its id below --results-dir")
    parser.add_argument("--results-dir", type=Path, default=RESULTS, help="where runs are kept (default: %(default)s)")


def find(run: str | Path, results_dir: Path) -> Path:
    """Returns the folder of a run: the folder of this path, else that of this id among the results.

    Raises:
        SettingsError: neither exists.
    """
    for folder in (Path(run), results_dir / run):
        if folder.is_dir():
            return folder
    known = sorted(folder.name for folder in results_dir.iterdir() if folder.is_dir()) if results_dir.is_dir() else []
    raise SettingsError(
        f"got run {str(run)!r}; expected a folder, or one of the runs in {results_dir}: "
        f"{', '.join(known) or 'none yet'}; name one of these, or set --results-dir"
    )
