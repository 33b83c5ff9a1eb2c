"""`sparring train CONFIG`: a whole run, from the configuration to its summary."""

import argparse
import contextlib
import errno
import fcntl
import os
import secrets
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import yaml

from sparring.pipeline.errors import NOTICE, SettingsError
from sparring.pipeline.files import Json, put, regular, remove, write_atomically
from sparring.pipeline.monitoring import logs
from sparring.pipeline.monitoring.summary import STATUSES, Status
from sparring.pipeline.settings import Settings, no_device, not_here, read, without_effect
from sparring.pipeline.settings.document import LARGEST_INTEGER
from sparring.pipeline.settings.load import option
from sparring.services.commands.check import unreadable
from sparring.services.commands.page import page_beside
from sparring.services.commands.players import check_networks, copy_initial, write_opponents
from sparring.services.commands.runs import (
    add_config,
    add_in_process,
    add_insecure,
    add_ray,
    connect,
    finished,
    not_on_a_cluster,
)
from sparring.services.process.encryption import exposed, keys_folder, keys_missing, keys_unusable, long_paths
from sparring.services.process.hosting import ending_signals, interrupting
from sparring.services.process.runtime import Playback, Run
from sparring.services.supervision.launch import checkpoints, launch, new_seed, no_behavior_trained, play
from sparring.services.supervision.ports import open_ports
from sparring.services.supervision.topology import build, load_run


def whole_number(text: str) -> int:
    """Reads a whole number, which may be written as 5e6.

    Raises:
        ValueError: it is none.
    """
    number = float(text)
    if not number.is_integer() or abs(number) > LARGEST_INTEGER:  # infinity and what is no number are none either
        raise ValueError(f"got {text}; expected a whole number")
    return int(number)


_LOCK_FILE: Final = "lock"
_NO_LOCKS: Final = errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP
_REPLACED: Final = ".replaced"
"""Folder of the run that one with --force is about to replace."""

Option = tuple[str, Callable[[str], Json] | bool, str]

_RUN: Final[Sequence[Option]] = (
    ("checkpoint_settings.run_id", str, "name of the run (default: the configuration's name and the time)"),
    ("checkpoint_settings.results_dir", str, "where runs are kept (default: results)"),
    ("env_settings.seed", whole_number, "seed of the run (default: random, and logged)"),
    ("behaviors.*.max_steps", whole_number, "end every behavior after so many trained steps"),
    ("checkpoint_settings.inference", True, "play the checkpoints of --run-id, learn nothing"),
    ("behaviors.*.network_settings.deterministic", True, "act by the most likely action"),
    ("checkpoint_settings.initialize_from", str, "start with the weights of another run"),
    ("torch_settings.device", str, "what learners train on: cpu, cuda, cuda:N, mps (default: cpu)"),
    ("pipeline.export", False, "write no ONNX beside the checkpoints"),
    ("pipeline.metrics_address", str, "answer Prometheus there: tcp://127.0.0.1:9400"),
)
_AGAIN: Final[Sequence[Option]] = (
    ("checkpoint_settings.resume", True, "continue the run in its folder"),
    ("checkpoint_settings.force", True, "replace the run in its folder"),
)
_PLAYERS: Final[Sequence[Option]] = (
    ("env_settings.env_path", str, "build to launch (without one: wait for the editor's Play)"),
    ("engine_settings.no_graphics", True, "without a window"),
    ("engine_settings.no_graphics_monitor", True, "a window for the first one only"),
    ("env_settings.num_envs", whole_number, "how many players"),
    ("env_settings.num_areas", whole_number, "training areas in each"),
    ("env_settings.base_port", whole_number, "port of the first one, the others count up (5005)"),
    ("env_settings.timeout_wait", whole_number, "seconds to wait for one (60)"),
    ("env_settings.max_lifetime_restarts", whole_number, "restarts of one in all, -1: no limit"),
    ("env_settings.restarts_rate_limit_n", whole_number, "restarts of one within the period, -1: no limit"),
    ("env_settings.restarts_rate_limit_period_s", whole_number, "that period"),
    ("engine_settings.width", whole_number, "pixels of the window"),
    ("engine_settings.height", whole_number, "pixels of the window"),
    ("engine_settings.quality_level", whole_number, "of rendering"),
    ("engine_settings.time_scale", float, "factor of the game's clock (20)"),
    ("engine_settings.target_frame_rate", whole_number, "frames per second, -1: as many as possible"),
    ("engine_settings.capture_frame_rate", whole_number, "frames per second of the game's clock"),
)
"""Options in place of a setting: the key of `Overrides`; the type, or what the flag sets; the help."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_config(parser)
    _add_overrides(parser, _RUN)
    parser.add_argument("--debug", action="store_true", help="without effect: logs/ hold everything anyway")
    add_in_process(parser)
    add_insecure(parser)
    add_ray(parser)
    shown = "show the run in a browser, as `sparring page` does, at 127.0.0.1:6100 or this address"
    parser.add_argument("--page", nargs="?", const="", metavar="HOST[:PORT]", help=shown)
    meaning = "learn from recorded steps alone, without a simulator (bc, and sac with its section offline)"
    parser.add_argument("--offline", action="store_true", help=meaning)
    parser.add_argument("--until-eof", action="store_true", help="stop in order when the standard input ends")
    _add_overrides(parser.add_mutually_exclusive_group(), _AGAIN)
    players = parser.add_argument_group("Unity players", "with the names that mlagents-learn uses")
    _add_overrides(players, _PLAYERS)
    given = "all that follows is for the build"
    players.add_argument("--env-args", dest="env_settings.env_args", nargs=argparse.REMAINDER, help=given)


def _add_overrides(group: argparse._ActionsContainer, rows: Sequence[Option]) -> None:
    for path, kind, meaning in rows:
        key = path.rpartition(".")[2]
        if isinstance(kind, bool):
            group.add_argument(option(key), dest=path, action="store_const", const=kind, help=meaning)
        else:
            group.add_argument(option(key), dest=path, type=kind, metavar=key.upper(), help=meaning)


def run(args: argparse.Namespace) -> int:
    """Trains and returns the exit status: 0 for a completed or stopped run, otherwise that of its failure.

    Raises:
        SettingsError: the configuration or an argument cannot be run.
    """
    if args.until_eof:
        threading.Thread(target=_stop_at_eof, name="standard input", daemon=True).start()
    loaded = read(args.config, _overrides(args), args.assigned)
    settings, kept = loaded.settings, loaded.settings.checkpoint_settings
    _refuse(settings, insecure=args.insecure, in_process=args.in_process, clustered=args.ray is not None)
    if args.offline:
        _refuse_offline(args, settings)
    notes = [*loaded.notices, *without_effect(settings)]
    if kept.inference:
        return STATUSES[_infer(args, settings, notes)]
    if kept.resume and kept.run_id is None:
        raise SettingsError(
            f"got --resume without --run-id; expected the id of {_runs_in(Path(kept.results_dir))}; add it"
        )
    run_id = kept.run_id or f"{args.config.stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    directory = run_folder(Path(kept.results_dir), run_id, resume=kept.resume, force=kept.force)
    with locked(directory):
        if kept.resume:
            _refuse_other_behaviors(args.config, directory, settings)
        if kept.resume and args.offline and (directory / "coordination.json").exists():
            raise SettingsError(
                f"got --offline with --resume of {directory}, whose steps simulators have produced; expected a run "
                f"that began offline; begin one with --run-id, and --initialize-from {run_id} for its weights"
            )
        if kept.resume and (end := finished(directory, settings)):
            sys.stdout.write(f"{end}\n")
            return 0
        try:
            status = _train(args, settings, notes, run_id, directory)
        except SettingsError:  # as where a port is in use
            if not kept.resume:
                _undo(directory)
            raise
    if status == "stopped" and any(directory.glob("*/*-*/state.json")):  # there is a checkpoint
        logs.get().info("go_on_with", command=going_on(args, run_id), notice=True)
    return STATUSES[status]


def _train(args: argparse.Namespace, settings: Settings, notes: list[str], run_id: str, directory: Path) -> Status:
    """Prepares the folder of a run, which this process has locked, and trains."""
    kept = settings.checkpoint_settings
    if kept.force:
        _set_aside(directory)
    (directory / "logs").mkdir(exist_ok=True)
    former = _former(directory) if kept.resume else None
    seed = settings.seed if settings.seed >= 0 else new_seed() if former is None else former.seed
    settings, added = _with_known(settings, former)
    if kept.resume:
        check_networks(directory, settings, settings.behaviors)
    # The copy of the former session goes on, and a pipe is read: configuration.yaml has its content.
    with contextlib.suppress(shutil.SameFileError, shutil.SpecialFileError):
        shutil.copyfile(args.config, directory / "config.yaml")

    def prepare(grown: Settings, names: Collection[str]) -> tuple[str, ...]:
        """Puts into the run's folder what some of its behaviors need; returns notes for the user."""
        initial = () if kept.resume else copy_initial(directory, grown, names)
        write_opponents(directory, grown, names)
        used = yaml.safe_dump(grown.used, sort_keys=False)
        write_atomically(directory / "configuration.yaml", used.encode(), durable=False)
        return initial

    notes += prepare(settings, settings.behaviors)
    if args.offline:
        from sparring.services.commands import offline  # loads PyTorch, which the processes of other runs load

        (directory / "summary.json").unlink(missing_ok=True)
        topology = build(settings, run_id=run_id, directory=directory, seed=seed, resumed=kept.resume)
        shutil.rmtree(directory / _REPLACED, ignore_errors=True)
        return offline.train(topology, notes)
    with ExitStack() as stack:
        if args.ray is None:
            cluster, ports = None, stack.enter_context(open_ports(settings, in_process=args.in_process))
        else:
            with ending_signals(interrupting()):  # so that the processes of a cluster that begins with it end, too
                cluster = stack.enter_context(connect(args.ray, settings))
                settings, ports = cluster.settings, stack.enter_context(cluster.place_all())
        topology = build(
            *(settings, ports),
            run_id=run_id,
            directory=directory,
            seed=seed,
            resumed=kept.resume,
            insecure=args.insecure,
            added=added,
            clustered=cluster is not None,
        )
        stack.enter_context(page_beside(args.page, directory, keys_folder(settings)))
        shutil.rmtree(directory / _REPLACED, ignore_errors=True)
        return launch(topology, ports, notes, in_process=args.in_process, prepare=prepare, cluster=cluster)


def _former(directory: Path) -> Run | None:
    """Returns the run in a folder; None where it holds none that can be read."""
    with contextlib.suppress(SettingsError):
        return load_run(directory)[0]
    return None


def _with_known(settings: Settings, former: Run | None) -> tuple[Settings, tuple[str, ...]]:
    """Adds the behaviors that simulators have added to the former run; returns the settings and their names."""
    if settings.unnamed is None or former is None:
        return settings, ()
    added = tuple(name for name in former.added if name not in settings.behaviors)
    return settings.naming(added), added


def _refuse_other_behaviors(config: Path, directory: Path, settings: Settings) -> None:
    """Refuses to go on with a run that has trained behaviors, none of which the configuration has."""
    trained = {path.parents[1].name for path in directory.glob("*/*-*/state.json")}
    own = _with_known(settings, _former(directory))[0].behaviors.keys()
    if trained and own and trained.isdisjoint(own):
        raise SettingsError(
            f"got --resume of {directory}, whose run has {', '.join(sorted(trained))}, with {config}, which has "
            f"{', '.join(own)}; expected at least one behavior in both; name the run of this file with --run-id, or "
            "correct the names"
        )


def _infer(args: argparse.Namespace, settings: Settings, notes: list[str]) -> Status:
    """Plays the newest checkpoints of a run until the user stops it."""
    kept = settings.checkpoint_settings
    if kept.run_id is None or kept.force or vars(args)["behaviors.*.max_steps"] is not None:
        how = "with --force" if kept.force else "with --max-steps" if kept.run_id is not None else "without --run-id"
        raise SettingsError(
            f"got --inference {how}; expected the run whose checkpoints are to be played; "
            "name it with --run-id, and leave --force and --max-steps out"
        )
    if (other := vars(args)["checkpoint_settings.initialize_from"]) is not None:
        raise SettingsError(
            f"got --inference with --initialize-from {other}; expected the checkpoints of one run; "
            f"write --run-id {other} for those of that run, or leave it out"
        )
    trained = Path(kept.results_dir) / kept.run_id
    if kept.initialize_from is not None:
        notes.append(f"checkpoint_settings.initialize_from: without effect, {trained} has checkpoints of its own")
    settings, _ = _with_known(settings, _former(trained.absolute()))
    if not settings.behaviors:
        raise SettingsError(no_behavior_trained(trained))
    playing = Playback(checkpoints=checkpoints(trained, settings))
    seed = settings.seed if settings.seed >= 0 else None
    with page_beside(args.page, trained.absolute(), keys_folder(settings)):
        place = {"in_process": args.in_process, "insecure": args.insecure}
        return play(trained, settings, playing, "inference", notes, seed=seed, **place)[0]


def _stop_at_eof() -> None:
    """Stops this process in order when whoever started it has ended, or has closed its standard input."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _overrides(args: argparse.Namespace) -> dict[str, Json]:
    return {path: value for path, value in vars(args).items() if "." in path}


def _refuse(settings: Settings, *, insecure: bool, in_process: bool, clustered: bool) -> None:
    """Refuses settings that cannot run, before any process starts; what nodes of a cluster lack shows there."""
    lines = [*exposed(settings, insecure=insecure), *keys_missing(settings), *keys_unusable(settings)]
    if in_process and settings.pipeline.ranks > 1:
        what = "got --in-process with pipeline.ranks; expected ranks 1, because a learner's ranks are processes"
        lines.append(f"{what}; leave one of the two out")
    if clustered:
        lines += not_on_a_cluster(settings, in_process=in_process)
    else:
        lines += [*not_here(settings), *unreadable(settings), *long_paths(settings, in_process=in_process)]
        if not settings.checkpoint_settings.inference and (refused := no_device(settings)):
            lines.append(str(refused))
    if lines:
        listed = "\n  ".join(lines)
        raise SettingsError(f"got settings that cannot be run here:\n  {listed}\nexpected none; mend each")


def _refuse_offline(args: argparse.Namespace, settings: Settings) -> None:
    """Refuses what cannot be trained without a simulator."""
    problems = [] if settings.behaviors else ["got --offline without behaviors; expected one at least; name it"]
    if args.ray is not None or settings.checkpoint_settings.inference:
        problems.append("got --offline with --ray or --inference; expected training on this machine; leave one out")
    for name, behavior in settings.behaviors.items():
        try:
            behavior.hyperparameters.recordings(behavior)
        except ValueError as error:
            problems.append(f"behaviors.{name}: {error}")
    if problems:
        raise SettingsError("\n".join(problems))


def _runs_in(results: Path) -> str:
    there = ", ".join(sorted(path.parent.name for path in results.glob("*/run.json")))
    return f"a run in {results} ({there or 'there is none'})"


def run_folder(results: Path, run_id: str, *, resume: bool, force: bool) -> Path:
    """Returns the folder of the run, which exists afterwards.

    Raises:
        SettingsError: the folder holds a run that is not to be continued or replaced, or none to continue.
    """
    directory = (results / run_id).absolute()
    exists = directory.exists() and any(path.name != _LOCK_FILE for path in directory.iterdir())
    if resume and not exists:
        expected = f"the id of {_runs_in(results)}"
        raise SettingsError(f"got --resume of {run_id!r}; expected {expected}; name it with --run-id")
    if exists and not (resume or force):
        raise SettingsError(
            f"got run id {run_id!r}, which exists in {results}; expected a new one; "
            "choose another with --run-id, go on with --resume, or remove it with --force"
        )
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"got the folder {directory}, which cannot be made ({error.strerror}); expected one that can be written; "
            "choose another with --results-dir, or make room on the disk"
        ) from error
    return directory


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Holds the lock of a run's folder, which the system releases when the process ends in whatever way.

    Some network disks have no locks, so that the user is told to start no other run there.

    Raises:
        SettingsError: another process holds it.
    """
    with regular(directory / _LOCK_FILE).open("a+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise SettingsError(
                f"got {directory}, which the process {file.read().decode() or 'of another run'} is writing; expected a "
                "run that has ended; stop that process and wait for its end, or choose another --run-id"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            refused = f"is on a disk without locks ({error.strerror})"
            sys.stderr.write(f"{NOTICE}{directory} {refused}; start no other run in it while this one runs\n")
        file.truncate(0)
        put(file, str(os.getpid()).encode())
        yield


def empty(directory: Path) -> None:
    """Removes all that the folder of a run holds, except its lock and what was set aside."""
    for path in directory.iterdir():
        if path.name not in (_LOCK_FILE, _REPLACED):
            remove(path)


def _set_aside(directory: Path) -> None:
    """Moves a run that is to be replaced into a folder within its own, until the new one begins."""
    aside, former = directory / _REPLACED, [path for path in directory.iterdir() if path.name != _LOCK_FILE]
    if aside in former:  # of a start that was killed
        remove(aside)
        former.remove(aside)
    aside.mkdir()
    for path in former:
        path.rename(aside / path.name)


def _undo(directory: Path) -> None:
    """Removes a run that has not begun, and puts the one back that it was to replace."""
    if (directory / "run.json").exists():
        return
    empty(directory)
    aside = directory / _REPLACED
    for path in aside.iterdir() if aside.exists() else ():
        path.rename(directory / path.name)
    shutil.rmtree(aside, ignore_errors=True)
    if not any(path.name != _LOCK_FILE for path in directory.iterdir()):
        shutil.rmtree(directory)


def going_on(args: argparse.Namespace, run_id: str) -> str:
    """Returns the command that resumes a stopped run, with the arguments that still apply.

    A program that has started it has its configuration, of which the file here may be a passing copy.
    """
    if args.until_eof:
        results = vars(args)["checkpoint_settings.results_dir"]
        where = "" if results is None else f", results_dir={results!r}"
        return f"sparring.train(CONFIG, run_id={run_id!r}{where}, resume=True), with the same further arguments"
    words = ["sparring", "train", str(args.config), "--run-id", run_id, "--resume"]
    for path, value in vars(args).items():
        if path in _NOT_AGAIN or value is None or (value is False and path != "pipeline.export"):
            continue
        if path == "assigned":
            words += [word for one in value for word in ("--set", one)]
            continue
        words.append(option(path.rpartition(".")[2]))
        if isinstance(value, list):  # --env-args, which is the last option
            words += value
        elif not isinstance(value, bool):
            words.append(f"{value:.12g}" if isinstance(value, float) else str(value))
    return shlex.join(words)


_NOT_AGAIN: Final = {
    *("command", "handler", "config", "until_eof"),
    *(f"checkpoint_settings.{key}" for key in ("run_id", "resume", "force", "initialize_from")),
}
