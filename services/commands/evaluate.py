"""`sparring evaluate RUN`: measures a trained policy in episodes without learning."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sparring.pipeline.errors import BELOW, FAILED, SettingsError
from sparring.pipeline.evaluation.ratings import CONFIDENCE
from sparring.pipeline.files import Json, write_atomically
from sparring.pipeline.monitoring.summary import STATUSES
from sparring.services.commands.runs import add_playing, add_run, check_positive, find

if TYPE_CHECKING:
    from sparring.pipeline.settings import Settings
    from sparring.services.process.runtime import Playback


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
    parser.add_argument("--record", action="store_true", help="keep the episodes in files")
    parser.add_argument("--video", type=Path, metavar="FILE", help="write what the environment renders as a GIF")
    parser.add_argument("--at-least", type=float, help="exit with 4 if a behavior's mean reward is below this")
    add_playing(parser)


def run(args: argparse.Namespace) -> int:
    """Plays episodes and prints their statistics.

    Returns:
        0 if all episodes were played and every mean reward is at least `--at-least`; 4 if one is below; 1 if the
        run failed or was stopped before its end.

    Raises:
        SettingsError: the run, a checkpoint or an argument is invalid.
    """
    check_positive(args, "episodes", "timeout")
    if args.at_least is not None and not math.isfinite(args.at_least):
        raise SettingsError(f"got --at-least {args.at_least:g}; expected a finite number; give another")
    trained = find(args.run, args.results_dir)  # before the imports, which take seconds
    from sparring.services.process.runtime import Playback
    from sparring.services.supervision.launch import checkpoints, play, trained_settings

    settings = trained_settings(trained, deterministic=args.deterministic, insecure=args.insecure)
    before = None
    if args.video is not None:
        settings, before = _rendered(settings, args.video), _changed_ns(args.video)
    playing = Playback(
        checkpoints=checkpoints(trained, settings, args.checkpoint),
        episodes=args.episodes,
        record=args.record,
        timeout_s=args.timeout,
    )
    status, directory, seed = play(
        trained, settings, playing, "evaluation", seed=args.seed, in_process=args.in_process, insecure=args.insecure
    )
    found = _evaluation(directory, playing, status, seed)
    write_atomically(directory / "evaluation.json", json.dumps(found, indent=2).encode())
    files = [str(directory / "evaluation.json")]
    if args.video is not None:
        log = directory / "logs" / "simulator-0.stderr"
        is_written = _changed_ns(args.video) != before
        files.append(str(args.video) if is_written else f"warning: {args.video} was not written; {log} may say why")
    ending = _exit_status(found, args.at_least)
    below = [f"  a mean reward is below --at-least {args.at_least:g}"] if ending == BELOW else []
    sys.stdout.write("".join(f"{line}\n" for line in [*_lines(found), *below, *files]))
    return ending


def _changed_ns(file: Path) -> int | None:
    """Returns when a file was changed; None where there is none."""
    return file.stat().st_mtime_ns if file.exists() else None


def _rendered(settings: Settings, file: Path) -> Settings:
    """Returns the settings with a video of the first simulator.

    Raises:
        SettingsError: its environment does not render, or the file is no GIF or has no folder.
    """
    first, *others = settings.launched or (None,)
    if first is None or first.name not in ("gymnasium", "pettingzoo") or file.suffix.lower() != ".gif":
        what = "no simulator of its own" if first is None else first.name or "a command"
        raise SettingsError(
            f"got --video {file} of a run with {what}; expected a file .gif of a Gymnasium or PettingZoo environment; "
            "correct what differs, or record the window of the game with another program"
        )
    if not file.absolute().parent.is_dir():
        raise SettingsError(f"got --video {file}; expected a folder that exists; make {file.absolute().parent}")
    if file.is_dir():
        raise SettingsError(f"got --video {file}, which is a folder; expected the name of a file; choose another")
    first = first.model_copy(update={"options": {**first.options, "video": str(file.absolute())}})
    return settings.model_copy(update={"simulators": (first, *others)})


def _evaluation(directory: Path, playing: Playback, status: str, seed: int) -> Json:
    """Returns the content of `evaluation.json`."""
    from sparring.pipeline.evaluation.episodes import EPISODES_FILE, read_episodes
    from sparring.pipeline.evaluation.statistics import by_team, describe

    behaviors = {}
    for name, checkpoint in playing.checkpoints.items():
        columns = read_episodes(directory / name / EPISODES_FILE)
        found = describe(columns) if columns else {"episodes": 0}
        behaviors[name] = {"checkpoint": checkpoint, **found, "teams": by_team(columns) if columns else {}}
    return {
        "status": status,
        "complete": all(one["episodes"] >= playing.episodes for one in behaviors.values()),
        "episodes": playing.episodes,
        "confidence": CONFIDENCE,
        "seed": seed,
        "behaviors": behaviors,
    }


def _lines(found: Json) -> Iterator[str]:
    for name, one in found["behaviors"].items():
        yield f"{name}  {one['episodes']} of {found['episodes']} episodes  {Path(one['checkpoint']).name}"
        for team, part in {"": one, **one["teams"]}.items():
            of_team = f"  team {team} ({part['episodes']} of them): " if team else "  "
            for what in ("reward", "group_reward", "length"):
                if (values := part.get(what)) is not None:
                    deviation = "" if values["interval"] is None else f"  deviation {values['deviation']:.3g}"
                    spread = f"{_interval(values, 'mean', '.4g')}{deviation}"
                    yield f"{of_team}{what.replace('_', ' ')} {spread}  from {values['min']:.4g} to {values['max']:.4g}"
            for outcome, share in part.get("outcomes", {}).items():
                yield f"{of_team}{outcome} {_interval(share, 'share', '.1%')}"
        if one["episodes"] > 1 and one["reward"]["interval"] is None:
            yield "  no confidence intervals, because the members of a group depend on each other"


def _interval(one: Json, key: str, form: str) -> str:
    """Formats a value with its confidence interval, where there is one."""
    if one["interval"] is None:
        return f"{one[key]:{form}}"
    low, high = one["interval"]
    return f"{one[key]:{form}}  {CONFIDENCE:.0%} interval {low:{form}} to {high:{form}}"


def _exit_status(found: Json, at_least: float | None) -> int:
    if not found["complete"] or found["status"] != "completed":
        return STATUSES.get(found["status"], FAILED) or FAILED  # a run that the user stopped is not complete either
    means = [one["reward"]["mean"] for one in found["behaviors"].values()]
    return BELOW if at_least is not None and min(means) < at_least else 0
