"""`sparring train CONFIG`: a whole run, from the configuration to its summary."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shlex
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

from sparring.pipeline.errors import ServiceError, SettingsError
from sparring.pipeline.monitoring import logs
from sparring.pipeline.monitoring.summary import STATUSES, Status
from sparring.pipeline.settings import Overrides, Settings, no_device, not_here, read, started_by_hand, without_effect
from sparring.services.commands.check import unreadable
from sparring.services.commands.players import copy_initial, write_opponents
from sparring.services.process.encryption import add_insecure, exposed, keys_missing, keys_unusable, unprotected
from sparring.services.process.runtime import Playback
from sparring.services.supervision.launch import checkpoints, launch, no_behavior_trained, play
from sparring.services.supervision.topology import build, load_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("config", type=Path, help="configuration file (YAML)")
    parser.add_argument("--run-id", help="name of the run (default: the configuration's name and the time)")
    parser.add_argument("--results-dir", help="where runs are kept (default: results)")
    parser.add_argument("--seed", type=int, help="seed of the run (default: random, and logged)")
    parser.add_argument("--max-steps", type=float, help="end every behavior after so many trained steps")
    parser.add_argument("--in-process", action="store_true", help="all services in one process, over memory queues")
    parser.add_argument("--inference", action="store_true", help="play the checkpoints of --run-id, learn nothing")
    parser.add_argument("--deterministic", action="store_true", help="act by the most likely action")
    parser.add_argument("--initialize-from", metavar="RUN", help="start with the weights of another run")
    parser.add_argument("--torch-device", help="what learners train on: cpu, cuda, cuda:N, mps (default: cpu)")
    parser.add_argument("--debug", action="store_true", help="without effect: logs/ hold everything anyway")
    parser.add_argument("--no-export", action="store_true", help="write no ONNX beside the checkpoints")
    add_insecure(parser)
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="continue the run in its folder")
    again.add_argument("--force", action="store_true", help="replace the run in its folder")
    _add_players(parser)


def _add_players(parser: argparse.ArgumentParser) -> None:
    """Adds the options of Unity players, with the names that `mlagents-learn` uses."""
    players = parser.add_argument_group("Unity players")
    players.add_argument("--env", metavar="PATH", help="build to launch (without one: wait for the editor's Play)")
    players.add_argument("--env-args", nargs=argparse.REMAINDER, help="all that follows is for the build")
    players.add_argument("--no-graphics", action="store_true", help="without a window")
    players.add_argument("--no-graphics-monitor", action="store_true", help="a window for the first one only")
    for name, kind, meaning in (
        ("--num-envs", int, "how many players"),
        ("--num-areas", int, "training areas in each"),
        ("--base-port", int, "port of the first one, the others count up (5005)"),
        ("--timeout-wait", int, "seconds to wait for one (60)"),
        ("--max-lifetime-restarts", int, "restarts of one in all, -1: no limit"),
        ("--restarts-rate-limit-n", int, "restarts of one within the period, -1: no limit"),
        ("--restarts-rate-limit-period-s", int, "that period"),
        ("--width", int, "pixels of the window"),
        ("--height", int, "pixels of the window"),
        ("--quality-level", int, "of rendering"),
        ("--time-scale", float, "factor of the game's clock (20)"),
        ("--target-frame-rate", int, "frames per second, -1: as many as possible"),
        ("--capture-frame-rate", int, "frames per second of the game's clock"),
    ):
        players.add_argument(name, type=kind, metavar="N", help=meaning)


def run(args: argparse.Namespace) -> int:
    """Trains and returns the exit status: 0 for a completed or stopped run, otherwise that of its failure.

    Raises:
        SettingsError: the configuration or an argument cannot be run.
    """
    loaded = read(args.config, _overrides(args))
    settings, kept = loaded.settings, loaded.settings.checkpoint_settings
    _refuse(settings, insecure=args.insecure)
    if kept.inference:
        notes = (*loaded.notices, *without_effect(settings), *started_by_hand(settings))
        return STATUSES[_infer(args, settings, notes)]
    run_id = kept.run_id or f"{args.config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    directory = _prepare(Path(kept.results_dir), run_id, resume=kept.resume, force=kept.force)
    seed = settings.seed if settings.seed >= 0 else _seed_of(directory)
    shutil.copyfile(args.config, directory / "config.yaml")
    added: tuple[str, ...] = ()
    if kept.resume:
        settings, added = _with_known(settings, directory)
    _write_used(directory, settings)
    initial = () if kept.resume else copy_initial(directory, settings)
    write_opponents(directory, settings)

    def prepare(grown: Settings, names: Sequence[str]) -> None:
        for line in () if kept.resume else copy_initial(directory, grown, names):
            logs.get().warning("settings", note=line, notice=True)
        write_opponents(directory, grown, names)
        _write_used(directory, grown)

    plan = partial(
        build,
        settings,
        run_id=run_id,
        directory=directory,
        seed=seed,
        resumed=kept.resume,
        insecure=args.insecure,
        added=added,
    )
    notes = (
        *loaded.notices,
        *unprotected(settings, insecure=args.insecure),
        *without_effect(settings),
        *initial,
        *started_by_hand(settings),
    )
    status = launch(settings, plan, notes, in_process=args.in_process, prepare=prepare)
    if status == "stopped":
        logs.get().info("go_on_with", command=going_on(args, run_id), notice=True)
    return STATUSES[status]


def _write_used(directory: Path, settings: Settings) -> None:
    (directory / "configuration.yaml").write_text(yaml.safe_dump(settings.used, sort_keys=False))


def _with_known(settings: Settings, directory: Path) -> tuple[Settings, tuple[str, ...]]:
    """Adds the behaviors that simulators have added to the run in a folder; returns the settings and their names."""
    if settings.unnamed is None:
        return settings, ()
    with contextlib.suppress(ServiceError):
        added = tuple(name for name in load_run(directory)[0].added if name not in settings.behaviors)
        return settings.naming(added), added
    return settings, ()


def _infer(args: argparse.Namespace, settings: Settings, notes: tuple[str, ...]) -> Status:
    """Plays the newest checkpoints of a run until the user stops it."""
    kept = settings.checkpoint_settings
    if kept.run_id is None or kept.force or args.max_steps is not None:
        how = "with --force" if kept.force else "with --max-steps" if kept.run_id is not None else "without --run-id"
        raise SettingsError(
            f"got --inference {how}; expected the run whose checkpoints are to be played; "
            "name it with --run-id, and leave --force and --max-steps out"
        )
    if args.initialize_from is not None:
        raise SettingsError(
            f"got --inference with --initialize-from {args.initialize_from}; expected the checkpoints of one run; "
            f"write --run-id {args.initialize_from} for those of that run, or leave it out"
        )
    trained = Path(kept.results_dir) / kept.run_id
    if kept.initialize_from is not None:
        notes += (f"checkpoint_settings.initialize_from: without effect, {trained} has checkpoints of its own",)
    settings, _ = _with_known(settings, trained.absolute())
    if not settings.behaviors:
        raise SettingsError(no_behavior_trained(trained))
    playing = Playback(checkpoints=checkpoints(trained, settings))
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
        deterministic=args.deterministic or None,
        sections={
            "env_settings": {"env_path": args.env, **_given(args, _ENVIRONMENT)},
            "engine_settings": {
                **_given(args, _ENGINE),
                "no_graphics": args.no_graphics or None,
                "no_graphics_monitor": args.no_graphics_monitor or None,
            },
            "checkpoint_settings": {"initialize_from": args.initialize_from},
            "torch_settings": {"device": args.torch_device},
            "pipeline": {"export": False if args.no_export else None},
        },
    )


_ENVIRONMENT: Final = (
    "env_args",
    "num_envs",
    "num_areas",
    "base_port",
    "timeout_wait",
    "max_lifetime_restarts",
    "restarts_rate_limit_n",
    "restarts_rate_limit_period_s",
)
_ENGINE: Final = ("width", "height", "quality_level", "time_scale", "target_frame_rate", "capture_frame_rate")


def _given(args: argparse.Namespace, keys: Sequence[str]) -> dict[str, Any]:
    return {key: getattr(args, key) for key in keys}


def _refuse(settings: Settings, *, insecure: bool) -> None:
    """Refuses settings that cannot run, before any process starts."""
    lines = [*not_here(settings), *unreadable(settings), *exposed(settings, insecure=insecure)]
    lines += [*keys_missing(settings), *keys_unusable(settings)]
    if not settings.checkpoint_settings.inference and (refused := no_device(settings)):
        lines.append(str(refused))
    if lines:
        listed = "\n  ".join(lines)
        raise SettingsError(f"got settings that cannot be run here:\n  {listed}\nexpected none; mend each")


def _prepare(results: Path, run_id: str, *, resume: bool, force: bool) -> Path:
    """Returns the folder of the run, which is new, emptied or kept."""
    directory = (results / run_id).absolute()
    exists = directory.exists() and any(directory.iterdir())
    if resume and not exists:
        there = ", ".join(sorted(path.parent.name for path in results.glob("*/run.json")))
        raise SettingsError(
            f"got --resume of {run_id!r}, which is no run in {results}; expected one of those that are there "
            f"({there or 'none'}); name it with --run-id"
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


def going_on(args: argparse.Namespace, run_id: str) -> str:
    """Returns the command that resumes a stopped run, with the arguments that still apply."""
    words = ["sparring", "train", str(args.config), "--run-id", run_id, "--resume"]
    for key, value in vars(args).items():
        option = f"--{key.replace('_', '-')}"
        if key in _NOT_AGAIN or value is None or value is False:
            continue
        words += [option] if value is True else [option, f"{value:.12g}" if isinstance(value, float) else str(value)]
    if args.env_args:
        words += ["--env-args", *args.env_args]
    return shlex.join(words)


_NOT_AGAIN: Final = {
    "command",
    "handler",
    "config",
    "run_id",
    "resume",
    "force",
    "initialize_from",
    "env_args",
}


def _seed_of(directory: Path) -> int:
    """Returns the seed of a resumed run, or a new one."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return int(json.loads((directory / "run.json").read_text())["seed"])
    return random.SystemRandom().randrange(2**31)
