"""`sparring train CONFIG`: a whole run, from the configuration to its summary."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import time
from functools import partial
from pathlib import Path

from pipeline import logs
from pipeline.errors import SettingsError
from pipeline.monitoring.summary import Status
from pipeline.runtime import Playing
from pipeline.settings import Overrides, Settings, not_here, read, unsupported, without_effect
from services.launch import checkpoints, launch, play
from services.players import write_opponents
from services.topology import build


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("config", type=Path, help="configuration file (YAML)")
    parser.add_argument("--run-id", help="name of the run (default: the configuration's name and the time)")
    parser.add_argument("--results-dir", help="where runs are kept (default: results)")
    parser.add_argument("--seed", type=int, help="seed of the run (default: drawn, and logged)")
    parser.add_argument("--max-steps", type=float, help="end every behavior after so many trained steps")
    parser.add_argument("--in-process", action="store_true", help="all services in one process, over memory queues")
    parser.add_argument("--inference", action="store_true", help="play the checkpoints of --run-id, learn nothing")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="go on from what is in the run's folder")
    again.add_argument("--force", action="store_true", help="remove what is in the run's folder")


def run(args: argparse.Namespace) -> int:
    """Trains; returns the exit status: 0 at the end or a stop by the user, 1 for a failed run, 2 for bad input.

    Raises:
        SettingsError: the configuration or an argument can not be run.
    """
    loaded = read(args.config, _overrides(args))
    settings, kept = loaded.settings, loaded.settings.checkpoint_settings
    _refuse(settings)
    if kept.inference:
        notes = (*loaded.notices, *without_effect(settings))
        return 1 if _infer(args, settings, notes) == "failed" else 0
    run_id = kept.run_id or f"{args.config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    directory = _prepare(Path(kept.results_dir), run_id, resume=kept.resume, force=kept.force)
    seed = settings.seed if settings.seed >= 0 else _seed_of(directory)
    shutil.copyfile(args.config, directory / "config.yaml")
    write_opponents(directory, settings)
    plan = partial(build, settings, run_id=run_id, directory=directory, seed=seed, resumed=kept.resume)
    notes = (*loaded.notices, *without_effect(settings))
    status = launch(settings, plan, notes, in_process=args.in_process)
    if status == "stopped":
        name = f"--results-dir {kept.results_dir} --run-id {run_id}"
        logs.get().info("go_on_with", command=f"sparring train {args.config} {name} --resume", notice=True)
    return 1 if status == "failed" else 0


def _infer(args: argparse.Namespace, settings: Settings, notes: tuple[str, ...]) -> Status:
    """Plays the newest checkpoints of a run until the user ends it."""
    kept = settings.checkpoint_settings
    if kept.run_id is None or kept.force or args.max_steps is not None:
        how = "with --force" if kept.force else "with --max-steps" if kept.run_id is not None else "without --run-id"
        raise SettingsError(
            f"got --inference {how}; expected the run whose checkpoints are to be played; "
            "name it with --run-id, and leave --force and --max-steps out"
        )
    trained = Path(kept.results_dir) / kept.run_id
    playing = Playing(checkpoints=checkpoints(trained, settings))
    seed = settings.seed if settings.seed >= 0 else random.SystemRandom().randrange(2**31)
    return play(trained, settings, playing, "inference", notes, seed=seed, in_process=args.in_process)[0]


def _overrides(args: argparse.Namespace) -> Overrides:
    return Overrides(
        max_steps=None if args.max_steps is None else int(args.max_steps),
        seed=args.seed,
        run_id=args.run_id,
        results_dir=args.results_dir,
        resume=args.resume or None,
        force=args.force or None,
        inference=args.inference or None,
    )


def _refuse(settings: Settings) -> None:
    """Refuses what can not be run, before anything is started."""
    lines = [*unsupported(settings), *not_here(settings)]
    if lines:
        listed = "\n  ".join(lines)
        raise SettingsError(f"got settings that can not be run here:\n  {listed}\nexpected none; remove them")


def _prepare(results: Path, run_id: str, *, resume: bool, force: bool) -> Path:
    """The run's folder, new, emptied or kept."""
    directory = (results / run_id).absolute()
    exists = directory.exists() and any(directory.iterdir())
    if resume and not exists:
        there = sorted(path.parent.name for path in results.glob("*/run.json"))
        raise SettingsError(
            f"got --resume for {directory}, which is not there; expected one of {there or 'no'} runs in {results}; "
            "name it with --run-id"
        )
    if exists and not (resume or force):
        raise SettingsError(
            f"got run id {run_id!r}, which exists in {results}; expected a new one; "
            "choose another with --run-id, go on with --resume, or remove it with --force"
        )
    if exists and force:
        shutil.rmtree(directory)
    if resume:
        (directory / "summary.json").unlink(missing_ok=True)
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    return directory


def _seed_of(directory: Path) -> int:
    """The seed of a resumed run, or a new one."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return int(json.loads((directory / "run.json").read_text())["seed"])
    return random.SystemRandom().randrange(2**31)
