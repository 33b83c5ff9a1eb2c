"""`sparring train CONFIG`: a whole run, from the configuration to its summary."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import shutil
import sys
import time
from pathlib import Path

import anyio

from pipeline import logs
from pipeline.errors import SettingsError
from pipeline.hosting import ProcessHost
from pipeline.monitoring.summary import Status
from pipeline.settings import Overrides, Settings, not_here, read, unsupported, without_effect
from services.hosts import Processes, Tasks
from services.supervisor import Supervisor
from services.topology import Topology, build, sockets_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("config", type=Path, help="configuration file (YAML)")
    parser.add_argument("--run-id", help="name of the run (default: the configuration's name and the time)")
    parser.add_argument("--results-dir", help="where runs are kept (default: results)")
    parser.add_argument("--seed", type=int, help="seed of the run (default: drawn, and logged)")
    parser.add_argument("--max-steps", type=float, help="end every behavior after so many trained steps")
    parser.add_argument("--in-process", action="store_true", help="all services in one process, over memory queues")
    parser.add_argument("--inference", action="store_true", help="act with a checkpoint, without learning")
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
    run_id = kept.run_id or f"{args.config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    directory = _prepare(Path(kept.results_dir), run_id, resume=kept.resume, force=kept.force)
    seed = settings.seed if settings.seed >= 0 else _seed_of(directory)
    sockets = None if args.in_process else sockets_folder(settings)
    try:
        topology = build(settings, run_id=run_id, directory=directory, seed=seed, resumed=kept.resume, sockets=sockets)
        topology.save()
        shutil.copyfile(args.config, directory / "config.yaml")
        logs.configure(directory, run_id, "supervisor", console=True)
        for line in (*loaded.notices, *without_effect(settings)):
            logs.get().warning("settings", note=line, notice=True)
        logs.get().info("seed", seed=seed, notice=True)
        status = anyio.run(_supervise, topology, args.in_process, backend_options=_loop_options())
    finally:
        if sockets is not None:
            shutil.rmtree(sockets, ignore_errors=True)
    if status == "stopped":
        name = f"--results-dir {kept.results_dir} --run-id {run_id}"
        logs.get().info("go_on_with", command=f"sparring train {args.config} {name} --resume", notice=True)
    return 1 if status == "failed" else 0


async def _supervise(topology: Topology, in_process: bool) -> Status:
    processes = ProcessHost(topology.run.directory / "logs")
    try:
        if in_process:
            return await _as_tasks(topology, processes)
        from pipeline.queues.zmq import ZmqTransport

        async with ZmqTransport(topology.endpoints, f"supervisor.{secrets.token_hex(3)}") as transport:
            return await Supervisor(topology, Processes(topology, processes), processes, transport).supervise()
    finally:
        processes.close()


async def _as_tasks(topology: Topology, processes: ProcessHost) -> Status:
    from pipeline.queues.memory import MemoryHub, MemoryTransport

    hub = MemoryHub()
    async with anyio.create_task_group() as tasks:
        host = Tasks(topology, tasks, lambda start: MemoryTransport(hub, start=start))
        async with MemoryTransport(hub, start=f"supervisor.{secrets.token_hex(3)}") as transport:
            status = await Supervisor(topology, host, processes, transport).supervise()
    return status


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
    if settings.checkpoint_settings.inference:
        lines.append("--inference: acting without learning")
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


def _loop_options() -> dict[str, bool]:
    return {"use_uvloop": os.name == "posix" and sys.implementation.name == "cpython"}
