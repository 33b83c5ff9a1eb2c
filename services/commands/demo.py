"""`sparring demo info PATH...`: shows the content of recorded episodes."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, get_args

from sparring.pipeline.demonstrations.episodes import ActionsOf, DemoActions, RecordingError
from sparring.pipeline.demonstrations.library import describe, files_of, read_any
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.files import Json
from sparring.pipeline.monitoring.logs import printable
from sparring.services.commands.runs import add_json, print_json, spread

_MEANINGS: Final[dict[ActionsOf, str]] = {
    "previous": "the action beside an observation is that of the decision before",
    "own": "the action beside an observation is its own",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    what = parser.add_subparsers(dest="what", required=True, metavar="info")
    info = what.add_parser(
        "info", help="show specs, episodes, returns and lengths", description="Shows the content of files."
    )
    info.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="recordings, .demo files, or folders of them")
    info.add_argument(
        "--demo-actions",
        choices=get_args(DemoActions),
        default="auto",
        help="which action is beside an observation in .demo files: that of the decision before, or its own",
    )
    add_json(info)


def run(args: argparse.Namespace) -> int:
    """Shows the content of each file; returns 0.

    Raises:
        SettingsError: a path holds no recorded episodes, or a file cannot be read; nothing is shown.
    """
    try:
        files = [file for path in args.paths for file in files_of(path)]
        found = [{"file": str(file)} | describe(read_any(file, args.demo_actions)) for file in files]
    except RecordingError as error:
        raise SettingsError(str(error)) from error
    if args.json:
        print_json(found)
        return 0
    for one in found:
        lines = [one["file"], *(f"  {what:<13} {value}" for what, value in _rows(one))]
        sys.stdout.writelines(f"{printable(line)}\n" for line in lines)
    return 0


def _rows(one: Json) -> Iterator[tuple[str, str]]:
    yield "behavior", one["behavior"]
    for seen in one["observations"]:
        shape = " x ".join(map(str, seen["shape"]))
        yield "observation", f"{seen['name']}: {seen['kind']}, {shape}, {seen['dtype']}"
    actions = one["actions"]
    parts = [f"{actions['continuous']} continuous"] if actions["continuous"] else []
    parts += [f"branches of {', '.join(map(str, actions['discrete']))}"] if actions["discrete"] else []
    yield "actions", "; ".join(parts)
    if placed := one.get("demo_actions"):
        yield "demo_actions", f"{placed['actions']}: {_MEANINGS[placed['actions']]} ({placed['evidence']})"
    yield "episodes", str(one["episodes"])
    yield "steps", str(one["steps"])
    for what, name in (("returns", "return"), ("group_returns", "group return"), ("lengths", "length")):
        if what in one:
            yield name, spread(one[what])
    if "terminated" in one:
        yield "terminated", f"{one['terminated']:.0%} of the episodes"
