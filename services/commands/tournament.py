"""`sparring tournament RUN [RUN ...]`: lets trained policies play against each other, without learning."""

from __future__ import annotations

import argparse
import json
import random
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sparring.pipeline.coordination.ghosts import MATCHES_FILE
from sparring.pipeline.errors import FAILED, SettingsError
from sparring.pipeline.evaluation.standings import TournamentTable, counted, heat_map, standings
from sparring.pipeline.files import write_atomically
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.messages.state import PolicyWeights
from sparring.pipeline.monitoring.summary import STATUSES
from sparring.pipeline.settings import Settings, started_by_hand
from sparring.pipeline.specs import read_spec
from sparring.services.commands.players import actor_of, checkpoints_of, load_player, write
from sparring.services.commands.runs import add_run, find
from sparring.services.process.encryption import add_insecure, unprotected
from sparring.services.process.runtime import Playback
from sparring.services.supervision.launch import launch, trained_settings
from sparring.services.supervision.ports import Ports
from sparring.services.supervision.topology import Topology, build, load_run

FILE = "tournament.json"
_ACTOR = "actor."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_run(parser, several=True)
    parser.add_argument(
        "--checkpoints",
        type=int,
        default=1,
        metavar="N",
        help="checkpoints of each run: 1 the newest, more spread evenly from the oldest to the newest (default: 1)",
    )
    parser.add_argument(
        "--untrained", action="store_true", help="a player with the weights that the first run began with"
    )
    parser.add_argument("--mirror", action="store_true", help="each player also plays against itself")
    parser.add_argument("--matches", type=int, default=100, help="matches of each pair (default: 100)")
    parser.add_argument("--deterministic", action="store_true", help="act with the most likely actions")
    parser.add_argument("--seed", type=int, help="seed of simulators and sampling (default: random, and logged)")
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="S", help="give up after S seconds (3600)")
    parser.add_argument("--in-process", action="store_true", help="all services in one process, over memory queues")
    add_insecure(parser)


@dataclass(frozen=True, slots=True)
class Contestant:
    """A player of the tournament.

    Attributes:
        label: its name.
        weights: by behavior name.
    """

    label: str
    weights: dict[str, PolicyWeights]


def run(args: argparse.Namespace) -> int:
    """Plays a tournament on the first run's simulators and prints its table.

    Returns:
        0 if every match was played; 1 if the run failed or was stopped before its end.

    Raises:
        SettingsError: a run, a checkpoint or an argument is invalid.
    """
    if args.matches < 1 or args.checkpoints < 1 or args.timeout <= 0:
        raise SettingsError(
            f"got --matches {args.matches}, --checkpoints {args.checkpoints} and --timeout {args.timeout:g}; "
            "expected at least 1, 1 and more than 0 seconds; give other numbers"
        )
    runs = [find(run, args.results_dir) for run in args.runs]
    settings = trained_settings(runs[0], deterministic=args.deterministic, insecure=args.insecure)
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    players = list(_players(runs, settings, args.checkpoints, untrained=args.untrained))
    if len(players) + args.mirror < 2:
        raise SettingsError(
            "got a single player; expected two at least; name another run, or add --untrained or --checkpoints 2"
        )
    playing = Playback(
        checkpoints={},
        players=[player.label for player in players],
        matches=args.matches,
        mirror=args.mirror,
        timeout_s=args.timeout,
    )
    directory = runs[0].absolute() / f"tournament-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"

    def plan(sockets: Path | None, ports: Ports) -> Topology:
        """Builds the topology before the folder, so that no folder is made where a port is not free."""
        run_id = f"{runs[0].absolute().name}-{directory.name}"
        topology = build(settings, sockets, ports, run_id=run_id, directory=directory, seed=seed, playing=playing)
        (directory / "logs").mkdir(parents=True)
        write(directory, [player.weights for player in players])
        return topology

    notes = (*unprotected(settings, insecure=args.insecure), *started_by_hand(settings))
    status = launch(settings, plan, notes, in_process=args.in_process)
    lines = counted(_read(directory / MATCHES_FILE))
    found = standings(playing.players, lines)
    content = {"status": status, "matches": len(lines), "seed": seed, **found.plain()}
    write_atomically(directory / FILE, json.dumps(content, indent=2).encode())
    write_atomically(directory / "tournament.png", heat_map(found, f"{runs[0].name}: {len(lines)} matches"))
    _show(found)
    sys.stdout.write(f"{directory / FILE}\n")
    return 0 if status == "completed" else STATUSES[status] or FAILED  # a run that the user stopped is not complete


# ---------------------------------------------------------------- players


def _players(runs: Sequence[Path], settings: Settings, count: int, *, untrained: bool) -> Iterator[Contestant]:
    """Yields checkpoints of all runs, the oldest first, and before them an untrained player if `untrained` is set."""
    found = [player for directory in runs for player in _of_run(directory, settings, count)]
    if untrained:
        yield _untrained(runs[0], settings)
    yield from found


def _of_run(directory: Path, settings: Settings, count: int) -> Iterator[Contestant]:
    """Yields evenly spread checkpoints of one run; behaviors with different numbers of them are spread separately."""
    known = {name: checkpoints_of(directory, name) for name in settings.behaviors}
    few = min(count, *map(len, known.values()))
    for at in range(few):
        chosen = {}
        for name, paths in known.items():
            place = len(paths) - 1 if few == 1 else round(at * (len(paths) - 1) / (few - 1))
            chosen[name] = load_player(paths[place])
        steps = max(checkpoint.trained for checkpoint in chosen.values())
        weights = {name: actor_of(checkpoint) for name, checkpoint in chosen.items()}
        yield Contestant(f"{directory.absolute().name}@{steps}", weights)


def _untrained(directory: Path, settings: Settings) -> Contestant:
    """Returns a player with the weights that a run began with."""
    seed = load_run(directory.absolute())[0].seed
    weights = {}
    for name, behavior in settings.behaviors.items():
        spec = read_spec(load_player(checkpoints_of(directory, name)[-1]).description["spec"])
        weights[name] = Learner(name, spec, behavior, seed, learns=False).weights()
    return Contestant("untrained", weights)


# ---------------------------------------------------------------- results


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _show(found: TournamentTable) -> None:
    """Prints a table, the strongest player first; the columns with points per match are numbered by opponent."""
    table = Table()
    table.add_column("", justify="right")
    table.add_column("player", overflow="fold")
    table.add_column("rating", justify="right", no_wrap=True)
    order = found.order()
    for place in range(1, len(order) + 1):
        table.add_column(f"{place}", justify="right", no_wrap=True)
    for place, one in enumerate(order, 1):
        shares = ["" if not found.matches[one, other] else f"{found.shares[one, other]:.2f}" for other in order]
        rating = f"{found.ratings[one]:+.0f} +- {found.margins[one]:.0f}"
        table.add_row(f"{place}", found.players[one], rating, *shares)
    Console(file=sys.stdout).print(table)
