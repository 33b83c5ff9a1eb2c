"""`sparring evaluate RUN`: measures a trained policy in episodes without learning."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sparring.pipeline.errors import BELOW, FAILED, SettingsError
from sparring.pipeline.evaluation.episodes import EPISODES_FILE, read_episodes
from sparring.pipeline.evaluation.statistics import CONFIDENCE, by_team, describe
from sparring.pipeline.files import write_atomically
from sparring.pipeline.monitoring.summary import STATUSES
from sparring.pipeline.settings import started_by_hand
from sparring.services.commands.runs import add_run, find
from sparring.services.process.encryption import add_insecure, unprotected
from sparring.services.process.runtime import Playback
from sparring.services.supervision.launch import checkpoints, play, trained_settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_run(parser)
    parser.add_argument("--episodes", type=int, default=100, help="episodes of each behavior (default: 100)")
    parser.add_argument(
        "--checkpoint",
        action="append",
        default=[],
        metavar="[BEHAVIOR=]NAME",
        help="name of a checkpoint's folder; repeat for several behaviors (default: the newest of each)",
    )
    parser.add_argument("--deterministic", action="store_true", help="act with the most likely actions")
    parser.add_argument("--seed", type=int, help="seed of simulators and sampling (default: random, and logged)")
    parser.add_argument("--record", action="store_true", help="keep the episodes in files")
    parser.add_argument("--at-least", type=float, help="exit with 4 if a behavior's mean reward is below this")
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="S", help="give up after S seconds (3600)")
    parser.add_argument("--in-process", action="store_true", help="all services in one process, over memory queues")
    add_insecure(parser)


def run(args: argparse.Namespace) -> int:
    """Plays episodes and prints their statistics.

    Returns:
        0 if all episodes were played and every mean reward is at least `--at-least`; 4 if one is below; 1 if the
        run failed or was stopped before its end.

    Raises:
        SettingsError: the run, a checkpoint or an argument is invalid.
    """
    if args.episodes < 1 or args.timeout <= 0:
        raise SettingsError(
            f"got --episodes {args.episodes} and --timeout {args.timeout:g}; "
            "expected at least 1, and more than 0 seconds; give other numbers"
        )
    trained = find(args.run, args.results_dir)
    settings = trained_settings(trained, deterministic=args.deterministic, insecure=args.insecure)
    playing = Playback(
        checkpoints=checkpoints(trained, settings, args.checkpoint),
        episodes=args.episodes,
        record=args.record,
        timeout_s=args.timeout,
    )
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    notes = (*unprotected(settings, insecure=args.insecure), *started_by_hand(settings))
    status, directory = play(trained, settings, playing, "evaluation", notes, seed=seed, in_process=args.in_process)
    found = _evaluation(directory, playing, status, seed)
    write_atomically(directory / "evaluation.json", json.dumps(found, indent=2).encode())
    sys.stdout.write("\n".join([*_lines(found), f"{directory / 'evaluation.json'}\n"]))
    return _exit_status(found, args.at_least)


def _evaluation(directory: Path, playing: Playback, status: str, seed: int) -> dict[str, Any]:
    """Returns the content of `evaluation.json`."""
    behaviors = {}
    for name, checkpoint in playing.checkpoints.items():
        columns = read_episodes(directory / name / EPISODES_FILE)
        found = describe(columns) if columns else {"episodes": 0}
        behaviors[name] = {"checkpoint": checkpoint, **found, "teams": by_team(columns) if columns else {}}
    complete = all(one["episodes"] >= playing.episodes for one in behaviors.values())
    return {
        "status": status,
        "complete": complete,
        "episodes": playing.episodes,
        "confidence": CONFIDENCE,
        "seed": seed,
        "behaviors": behaviors,
    }


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    percent = f"{CONFIDENCE:.0%}"
    for name, one in found["behaviors"].items():
        yield f"{name}  {one['episodes']} of {found['episodes']} episodes  {Path(one['checkpoint']).name}"
        for team, part in {"": one, **one["teams"]}.items():
            for what in ("reward", "group_reward", "length"):
                if what in part:
                    yield f"  {_named(team)}{what.replace('_', ' ')} {_spread(part[what], percent)}"
            for outcome, share in part.get("outcomes", {}).items():
                text = f"  {_named(team)}{outcome} {share['share']:.1%}"
                if share["interval"] is not None:
                    low, high = share["interval"]
                    text += f"  {percent} interval {low:.1%} to {high:.1%}"
                yield text


def _named(team: str) -> str:
    return f"team {team}: " if team else ""


def _spread(one: Mapping[str, Any], percent: str) -> str:
    text = f"{one['mean']:.4g}"
    if one["interval"] is not None:
        low, high = one["interval"]
        text += f"  {percent} interval {low:.4g} to {high:.4g}  deviation {one['deviation']:.3g}"
    return f"{text}  from {one['min']:.4g} to {one['max']:.4g}"


def _exit_status(found: Mapping[str, Any], at_least: float | None) -> int:
    if not found["complete"] or found["status"] != "completed":
        return STATUSES.get(found["status"], FAILED) or FAILED  # a run that the user stopped is not complete either
    means = [one["reward"]["mean"] for one in found["behaviors"].values()]
    return BELOW if at_least is not None and min(means) < at_least else 0
