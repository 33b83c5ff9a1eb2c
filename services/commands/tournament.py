"""`sparring tournament RUN [RUN ...]`: lets trained policies play against each other, without learning."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sparring.pipeline.coordination.ghosts import MATCHES_FILE
from sparring.pipeline.errors import FAILED, SettingsError
from sparring.pipeline.evaluation.statistics import TournamentTable, counted, heat_map, standings
from sparring.pipeline.files import write_atomically
from sparring.pipeline.monitoring.files import read_lines
from sparring.pipeline.monitoring.summary import STATUSES
from sparring.pipeline.settings.conflicts import of_one_team
from sparring.pipeline.specs import read_spec
from sparring.services.commands.runs import add_playing, add_run, check_positive, find

if TYPE_CHECKING:
    from sparring.pipeline.messages.state import PolicyWeights
    from sparring.pipeline.settings import Settings

FILE = "tournament.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_run(parser, several=True)
    parser.add_argument(
        "--checkpoints", type=int, default=1, metavar="N", help="of each run, evenly spread (1: newest)"
    )
    parser.add_argument("--untrained", action="store_true", help="a player with the first run's initial weights")
    parser.add_argument("--mirror", action="store_true", help="each player also plays against itself")
    parser.add_argument("--matches", type=int, default=100, help="matches of each pair (default: 100)")
    add_playing(parser)


def run(args: argparse.Namespace) -> int:
    """Plays a tournament on the first run's simulators and prints its table.

    Returns:
        0 if every match was played; 1 if the run failed or was stopped before its end.

    Raises:
        SettingsError: a run, a checkpoint or an argument is invalid.
    """
    check_positive(args, "matches", "checkpoints", "timeout")
    runs = [find(run, args.results_dir) for run in args.runs]  # before the imports, which take seconds
    from sparring.services.commands.players import write
    from sparring.services.process.runtime import Playback
    from sparring.services.supervision.launch import play, trained_settings

    settings = trained_settings(runs[0], deterministic=args.deterministic, insecure=args.insecure)
    if what := of_one_team(settings):
        raise SettingsError(
            f"got a tournament in {what}, whose agents are all in team 0; expected two teams or more, which play "
            "against each other; measure its policies with sparring evaluate"
        )
    players = list(_players(runs, settings, args.checkpoints, untrained=args.untrained))
    if len(players) + args.mirror < 2:
        raise SettingsError(
            f"got a single player, {players[0][0]}; expected two; name another run, --untrained, or --checkpoints 2 "
            "of a run whose behaviors have two checkpoints each"
        )
    playing = Playback(
        checkpoints={},
        players=[label for label, _ in players],
        matches=args.matches,
        mirror=args.mirror,
        timeout_s=args.timeout,
    )
    made = partial(write, players=[weights for _, weights in players])
    how = {"in_process": args.in_process, "insecure": args.insecure}
    status, directory, seed = play(runs[0], settings, playing, "tournament", prepare=made, seed=args.seed, **how)
    matches = directory / MATCHES_FILE
    lines = counted([*read_lines(matches)] if matches.exists() else [])
    found = standings(playing.players, lines)
    fewest = found.fewest(mirror=args.mirror)
    complete = status == "completed" and fewest >= args.matches
    content = {"status": status, "complete": complete, "matches": len(lines), "seed": seed, **found.plain()}
    write_atomically(directory / FILE, json.dumps(content, indent=2).encode())
    write_atomically(directory / "tournament.png", heat_map(found, f"{runs[0].name}: {len(lines)} matches"))
    _show(found)
    if not complete:
        sys.stdout.write(f"{fewest} of {args.matches} matches of each pair\n")
    sys.stdout.write(f"{directory / FILE}\n")
    return 0 if complete else STATUSES[status] or FAILED  # a run that the user stopped is not complete


# ---------------------------------------------------------------- players


def _players(
    runs: Sequence[Path], settings: Settings, count: int, *, untrained: bool
) -> Iterator[tuple[str, dict[str, PolicyWeights]]]:
    """Yields evenly spread checkpoints of each run, the oldest first, and before them an untrained player if wanted.

    A player is a label, and the weights by behavior name.
    """
    from sparring.services.commands.players import actor_of
    from sparring.services.supervision.launch import checkpoints_of, load_player

    if untrained:
        yield "untrained", _untrained(runs[0], settings)
    for directory in runs:  # behaviors with different numbers of checkpoints are spread separately
        known = {name: checkpoints_of(directory, name) for name in settings.behaviors}
        few = min(count, *map(len, known.values()))
        for at in range(few) if few > 1 else (1,):
            places = {name: round(at * (len(paths) - 1) / max(1, few - 1)) for name, paths in known.items()}
            chosen = {name: load_player(paths[places[name]]) for name, paths in known.items()}
            steps = max(checkpoint.trained for checkpoint in chosen.values())
            yield f"{directory.absolute().name}@{steps}", {name: actor_of(one) for name, one in chosen.items()}


def _untrained(directory: Path, settings: Settings) -> dict[str, PolicyWeights]:
    """Returns the weights that a run began with."""
    from sparring.pipeline.learning.learner import Learner
    from sparring.services.supervision.launch import checkpoints_of, load_player
    from sparring.services.supervision.topology import load_run

    seed = load_run(directory.absolute())[0].seed
    weights = {}
    for name, behavior in settings.behaviors.items():
        spec = read_spec(load_player(checkpoints_of(directory, name)[-1]).description["spec"])
        weights[name] = Learner(name, spec, behavior, seed, learns=False).weights()
    return weights


# ---------------------------------------------------------------- results


def _show(found: TournamentTable) -> None:
    """Prints a table, the strongest player first; the columns with points per match are numbered by opponent."""
    order = found.order()
    rows = [["", "player", "rating", *(f"{place}" for place in range(1, len(order) + 1))]]
    for place, one in enumerate(order, 1):
        shares = ["" if not found.matches[one, other] else f"{found.shares[one, other]:.2f}" for other in order]
        rating = f"{found.ratings[one]:+.0f} +- {found.margins[one]:.0f}"
        rows.append([f"{place}", found.players[one], rating, *shares])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        sys.stdout.write(f"{'  '.join(cells).rstrip()}\n")
