"""What several commands do alike: their common options, and finding a run by its path or id."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sparring.pipeline.errors import SettingsError, install_command
from sparring.pipeline.files import Json, regular

if TYPE_CHECKING:  # a page needs no settings, which take memory
    from sparring.pipeline.settings import Settings
    from sparring.services.cluster.places import Cluster

RESULTS: Final = Path("results")
_MOST: Final = 1e9
"""No longer time can be waited for everywhere."""


def natural(text: str) -> int:
    """Returns the value of an option for a seed or a number of steps: 0 or more, and below 2^31."""
    if not text.isdecimal() or int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a number from 0 to {2**31 - 1}")
    return int(text)


def add_run(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Adds RUN, `run` or `runs` among the arguments, and --results-dir."""
    name, number = ("runs", "+") if several else ("run", None)
    parser.add_argument(name, nargs=number, metavar="RUN", help="folder of a run, or its id below --results-dir")
    add_results(parser)


def add_results(parser: argparse.ArgumentParser) -> None:
    """Adds --results-dir, for commands that find runs by their ids."""
    parser.add_argument("--results-dir", type=Path, default=RESULTS, help="where runs are kept (default: %(default)s)")


def add_playing(parser: argparse.ArgumentParser) -> None:
    """Adds the options of commands that play checkpoints."""
    parser.add_argument("--deterministic", action="store_true", help="act with the most likely actions")
    parser.add_argument("--seed", type=natural, help="seed of simulators and sampling (default: random, and logged)")
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="S", help="give up after S seconds (3600)")
    add_in_process(parser)
    add_insecure(parser)


def add_config(parser: argparse.ArgumentParser) -> None:
    """Adds CONFIG and --set."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="configuration file (YAML)")
    add_assigned(parser)


def add_assigned(parser: argparse.ArgumentParser) -> None:
    """Adds --set."""
    meaning = "in place of what the file says, such as behaviors.Ball.hyperparameters.beta=0.01; repeat"
    parser.add_argument("--set", dest="assigned", action="append", default=[], metavar="KEY=VALUE", help=meaning)


def add_in_process(parser: argparse.ArgumentParser) -> None:
    """Adds --in-process."""
    parser.add_argument("--in-process", action="store_true", help="all services in one process, over memory queues")


def add_insecure(parser: argparse.ArgumentParser) -> None:
    """Adds --insecure."""
    parser.add_argument("--insecure", action="store_true", help="listen without keys where others can connect")


def add_ray(parser: argparse.ArgumentParser) -> None:
    """Adds --ray."""
    which = "on a Ray cluster: the one at ADDRESS, or that which RAY_ADDRESS names, else one of this machine alone"
    parser.add_argument("--ray", nargs="?", const="", metavar="ADDRESS", help=which)


def connect(address: str, settings: Settings) -> AbstractContextManager[Cluster]:
    """Connects to a Ray cluster, as `services/cluster/joining.py` describes.

    Raises:
        SettingsError: Ray is not installed.
    """
    try:
        from sparring.services.cluster.joining import connected
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise SettingsError(
            f"got --ray without Ray; expected its package; install it with `{install_command('ray')}`"
        ) from None
    return connected(address, settings)


def not_on_a_cluster(settings: Settings, *, in_process: bool) -> Iterator[str]:
    """Yields what a cluster cannot run, a line for each."""
    if in_process:
        yield "got --in-process with --ray; expected one of the two; leave one out"
    if settings.checkpoint_settings.inference:
        yield "got --inference with --ray; expected training; play the checkpoints on one machine"
    if settings.pipeline.placement.stepping.per == "node" and settings.overlap == 0:
        yield "got placement.stepping.per: node in lockstep, which has one stepping process; leave one of the two out"
    if settings.pipeline.transport == "ipc" or settings.pipeline.address.startswith("unix:"):
        yield "got Unix sockets with --ray; expected TCP between nodes; leave transport and a unix: address out"


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds --json."""
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def print_json(value: Json) -> None:
    """Prints a value as JSON."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def spread(one: Json, name: str = "mean") -> str:
    """Formats the mean of some values, which `name` names, their deviation and their range."""
    deviation = "" if one["deviation"] is None else f", deviation {one['deviation']:.3g}"
    return f"{name} {one['mean']:.4g}{deviation}, from {one['min']:.4g} to {one['max']:.4g}"


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """Refuses numbers that are not above 0, or larger than a time can be; one that was not given is not checked.

    Raises:
        SettingsError: a number is beyond these.
    """
    for name in names:
        value = getattr(args, name)
        if value is not None and not 0 < value <= _MOST:
            got = f"{value:g}" if abs(value) < 1e300 else f"{value!s:.20}"  # a whole number may be beyond floats
            raise SettingsError(f"got --{name} {got}; expected more than 0, and at most {_MOST:g}; give another")


def finished(directory: Path, settings: Settings) -> str:
    """Returns that a run has completed all that its settings ask for, in words; "" where it can go on.

    A run that was stopped or killed goes on even if it has trained enough: it writes its summary and its last models.

    Args:
        directory: of the run.
        settings: those with which it would go on.
    """
    try:
        summary = json.loads(regular(directory / "summary.json").read_bytes())
        trained = {name: int(one["steps"]) for name, one in summary["behaviors"].items()}
        completed = summary["status"] == "completed"
    except Exception:  # it has not ended, or was damaged
        return ""
    goals = {name: one.max_steps for name, one in settings.behaviors.items()}
    if settings.unnamed is not None:
        goals = dict.fromkeys(trained, settings.unnamed.max_steps) | goals
    if not completed or not goals or any(trained.get(name, -1) < goal for name, goal in goals.items()):
        return ""
    steps = ", ".join(f"{name} {trained[name]:,} of {goal:,} steps" for name, goal in goals.items())
    return f"{directory.name} has completed: {steps}; nothing was changed; to go on, raise max_steps (--max-steps)"


def find(run: str | Path, results_dir: Path) -> Path:
    """Returns the folder of a run: the folder of this path, else that of this id among the results.

    Raises:
        SettingsError: neither exists.
    """
    for folder in (Path(run), results_dir / run):
        with suppress(OSError):  # no folder can have this name, for example
            if folder.is_dir():
                return folder
    known: list[str] = []
    with suppress(OSError):
        known = sorted(folder.name for folder in results_dir.iterdir() if folder.is_dir())
    raise SettingsError(
        f"got run {str(run)!r}; expected a folder, or one of the runs in {results_dir}: "
        f"{', '.join(known) or 'none yet'}; name one of these, or set --results-dir"
    )
