"""Runs a topology to its end: a training run, or a run that plays checkpoints."""

import contextlib
import dataclasses
import os
import random
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import anyio

from sparring.pipeline.errors import FAILED, SettingsError, SparringError
from sparring.pipeline.files import copy_folder, write_atomically
from sparring.pipeline.learning.checkpoints import Checkpoint, CheckpointFolder, load
from sparring.pipeline.monitoring import logs
from sparring.pipeline.monitoring.summary import STATUSES, Status
from sparring.pipeline.queues.endpoints import remove_abandoned, remove_left
from sparring.pipeline.security import KEY_FILE
from sparring.pipeline.settings import Settings, not_here, started_by_hand
from sparring.services.process import forking
from sparring.services.process.encryption import exposed, service_key, unprotected
from sparring.services.process.hosting import LOOP_OPTIONS, ProcessHost
from sparring.services.process.lifeline import adopt_orphans
from sparring.services.process.runtime import MEETING, Playback
from sparring.services.supervision.hosts import Host, HostElsewhere, Processes, Tasks
from sparring.services.supervision.ports import Ports, open_ports
from sparring.services.supervision.supervisor import Grow, Supervisor
from sparring.services.supervision.topology import Topology, build, load_run

_LEAST_FILES: Final = 64


def new_seed() -> int:
    """Returns a random seed for a run."""
    return random.SystemRandom().randrange(2**31)


def launch(
    topology: Topology,
    ports: Ports,
    notes: Sequence[str] = (),
    *,
    in_process: bool,
    prepare: Callable[[Settings, Sequence[str]], Sequence[str]] = lambda *_: (),
    cluster: HostElsewhere | None = None,
) -> Status:
    """Runs a run to its end.

    Args:
        topology: of the run.
        ports: reserves the ports of further behaviors.
        notes: for the user, printed first; those on access without keys and on games to start follow.
        in_process: all services run as tasks of this process.
        prepare: puts into the run's folder what further behaviors need, given the settings with them, and their names;
            returns notes for the user.
        cluster: where it runs; None for this machine.
    """
    run, settings = topology.run, topology.run.settings
    _check_limit_of_files()
    topology.save()
    bounds = settings.pipeline.logs
    logs.configure(run.directory, run.id, "supervisor", console=True, most_bytes=bounds.most_bytes, kept=bounds.kept)
    _show([*notes, *unprotected(settings, insecure=run.insecure), *started_by_hand(settings)])
    logs.get().info("seed", seed=run.seed, notice=True)

    def grow(before: Topology, names: Sequence[str]) -> Topology:
        after = before.with_behaviors(names, ports)
        _show(prepare(after.run.settings, names))
        after.save()
        return after

    serve = _as_tasks if in_process else partial(_as_processes, cluster=cluster)
    return anyio.run(_supervise, topology, grow, serve, backend_options=LOOP_OPTIONS)


def _check_limit_of_files() -> None:
    """Raises SettingsError where this process may open too few files for a run."""
    if sys.platform == "win32":
        return
    import resource

    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= most < _LEAST_FILES:  # it is negative where there is none
        raise SettingsError(
            f"got a limit of {most} open files; expected at least {_LEAST_FILES}; raise it (`ulimit -n {_LEAST_FILES}`)"
        )


def _show(notes: Sequence[str]) -> None:
    for note in notes:
        logs.get().warning("settings", note=note, notice=True)


def play(
    trained: Path,
    settings: Settings,
    playing: Playback,
    kind: str,
    notes: Sequence[str] = (),
    prepare: Callable[[Path], None] = lambda _: None,
    *,
    seed: int | None,
    in_process: bool,
    insecure: bool,
) -> tuple[Status, Path, int]:
    """Plays checkpoints in a folder of its own, below that of the run that trained them.

    They are copied there first, because a run that still trains removes old ones.

    Args:
        trained: folder of the run that trained them.
        settings: of that run.
        playing: what to play.
        kind: first word of the new folder's name.
        notes: for the user, printed first.
        prepare: puts further files into the new folder.
        seed: of simulators and sampling; None for a random one.
        in_process: all services run as tasks of this process.
        insecure: other machines may reach the simulators' endpoint without keys.

    Returns:
        The status of the run, the new folder, and the seed.

    Raises:
        SettingsError: an address or port is not free, or a checkpoint is damaged.
    """
    trained, seed = trained.absolute(), new_seed() if seed is None else seed
    directory = trained / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    copies = {name: f"{directory}/checkpoints/{name}/{Path(path).name}" for name, path in playing.checkpoints.items()}
    own, run_id = dataclasses.replace(playing, checkpoints=copies), f"{trained.name}-{directory.name}"
    with open_ports(settings, in_process=in_process) as ports:
        topology = build(  # before the folder, so that no folder is made where a port is not free
            settings, ports, run_id=run_id, directory=directory, seed=seed, playing=own, insecure=insecure
        )
        (directory / "logs").mkdir(parents=True)
        try:
            for name, path in playing.checkpoints.items():
                copy_folder(Path(path), Path(copies[name]))
                load(Path(copies[name]))
            prepare(directory)
        except BaseException as error:  # an interrupt, too
            shutil.rmtree(directory)
            if isinstance(error, (OSError, SparringError)):
                if gone := [path for path in playing.checkpoints.values() if not Path(path).exists()]:
                    expected = "it to stay while it is copied, but a run that still trains removes old ones"
                    raise SettingsError(f"got no {gone[0]} any more; expected {expected}; try again") from error
                raise SettingsError(f"got checkpoints of {trained}, which cannot be played: {error}") from error
            raise
        return launch(topology, ports, notes, in_process=in_process), directory, seed


def trained_settings(directory: Path, *, deterministic: bool, insecure: bool) -> Settings:
    """Returns the settings that the run in a folder was trained with, changed to one stepping process for playing.

    Args:
        directory: of the run.
        deterministic: act with the most likely actions.
        insecure: other machines may reach the simulators' endpoint without keys; `--insecure` of training is not kept.

    Raises:
        SettingsError: there is no run, a program of its simulators is missing, or it would be reachable without keys.
    """
    settings = load_run(directory.absolute())[0].settings
    behaviors = dict(settings.behaviors)
    if not behaviors:
        raise SettingsError(no_behavior_trained(directory))
    if deterministic:
        for name, one in behaviors.items():
            network = one.network_settings.model_copy(update={"deterministic": True})
            behaviors[name] = one.model_copy(update={"network_settings": network})
    if missing := not_here(settings):
        raise SettingsError("got " + "; ".join(missing))
    pipeline = settings.pipeline.model_copy(update={"stepping_processes": 1})  # it numbers episodes in their order
    played = settings.model_copy(update={"behaviors": behaviors, "pipeline": pipeline})
    if lines := exposed(played, insecure=insecure):
        raise SettingsError("\n".join(lines))
    return played


def no_behavior_trained(directory: Path) -> str:
    """Returns the error message for a run in which neither the configuration nor a simulator has named a behavior."""
    return (
        f"got {directory}, in which no behavior was trained; expected a run whose simulators or configuration have "
        "named one; train it first, or name another"
    )


def checkpoints(directory: Path, settings: Settings, names: Sequence[str] = ()) -> dict[str, str]:
    """Returns the folder of one checkpoint of each behavior.

    Args:
        directory: of the run that has trained.
        settings: of that run.
        names: of the checkpoints' folders: `BEHAVIOR=NAME`, or `NAME` for all other behaviors; by default the newest.

    Raises:
        SettingsError: a behavior has no checkpoint, or none of this name; or a name is for no behavior.
    """
    asked = dict(name.split("=", 1) for name in names if "=" in name)
    general = next((name for name in names if "=" not in name), None)
    if unknown := sorted(asked.keys() - settings.behaviors.keys()):
        raise SettingsError(f"got --checkpoint for {unknown}; expected one of {list(settings.behaviors)}; correct it")
    found = {}
    for behavior in settings.behaviors:
        there = {path.name: path for path in checkpoints_of(directory, behavior)}
        name = asked.get(behavior, general) or next(reversed(there))
        if name not in there:
            raise SettingsError(
                f"got no checkpoint {name} of {behavior} in {directory}; expected one of {', '.join(there)}; "
                "correct --checkpoint"
            )
        found[behavior] = str(there[name])
    return found


def checkpoints_of(directory: Path, behavior: str) -> list[Path]:
    """Returns the checkpoints of a behavior in the folder of a run, the oldest first.

    Raises:
        SettingsError: there is none.
    """
    paths = CheckpointFolder(directory.absolute(), behavior).newest_first()[::-1]
    if not paths:
        raise SettingsError(
            f"got no checkpoint of {behavior} in {directory}; expected a run that has trained it; train it first, or "
            "name another"
        )
    return paths


def load_player(path: Path) -> Checkpoint:
    """Loads a checkpoint that is to play.

    Raises:
        SettingsError: it is damaged, or does not exist.
    """
    try:
        return load(path)
    except (OSError, SparringError) as error:
        raise SettingsError(f"got the checkpoint {path}, which cannot be played: {error}") from error


async def _supervise(
    topology: Topology, grow: Grow, serve: Callable[[Topology, Grow, ProcessHost], Awaitable[Status]]
) -> Status:
    processes = ProcessHost(topology.run.directory / "logs")
    try:
        return await serve(topology, grow, processes)
    finally:
        _ignore_signals()
        processes.close()
        forking.end()
        for address in topology.run.addresses.values():
            if address.startswith("unix:"):
                remove_abandoned(Path(address.removeprefix("unix://")))
        if topology.run.settings.pipeline.ranks > 1:
            remove_left(MEETING, shutil.rmtree)


def _ignore_signals() -> None:
    """Lets no signal end this process any more: the run has its status."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)


async def _as_processes(
    topology: Topology, grow: Grow, processes: ProcessHost, *, cluster: HostElsewhere | None = None
) -> Status:
    from sparring.pipeline.queues.zmq import ZmqTransport, new_secret

    incarnation, key = f"supervisor.{secrets.token_hex(3)}", topology.run.directory / KEY_FILE
    if any(endpoint.startswith("tcp:") for endpoint in topology.endpoints.values()):
        write_atomically(key, new_secret().encode(), mode=0o600)
    try:
        async with (
            ZmqTransport(topology.endpoints, incarnation, secret=service_key(topology.run)) as transport,
            anyio.create_task_group() as tasks,
        ):
            host: Host = Processes(topology, processes)
            if cluster is not None:
                host = await cluster.host(topology, Processes(topology, processes), transport, tasks)

            def grow_and_connect(before: Topology, names: Sequence[str]) -> Topology:
                after = grow(before, names)
                transport.endpoints.update(after.endpoints)
                return after

            supervisor = Supervisor(host, transport, grow_and_connect)
            if cluster is not None:
                tasks.start_soon(cluster.watch, supervisor.active.fail)
            status = await supervisor.supervise()
            _ignore_signals()
            tasks.cancel_scope.cancel()
        return status
    finally:
        with contextlib.suppress(OSError):  # a folder that cannot be written; `write_summary` has said so
            key.unlink(missing_ok=True)


async def _as_tasks(topology: Topology, grow: Grow, processes: ProcessHost) -> Status:
    from sparring.pipeline.queues.memory import MemoryHub, MemoryTransport

    adopt_orphans()  # of a simulator's watcher that was killed: they end with this process
    hub = MemoryHub()
    async with anyio.create_task_group() as tasks:
        host = Tasks(
            topology,
            Processes(topology, processes, forks=False),
            tasks,
            lambda start: MemoryTransport(hub, start=start),
        )
        async with MemoryTransport(hub, start=f"supervisor.{secrets.token_hex(3)}") as transport:
            status = await Supervisor(host, transport, grow).supervise()
            _ignore_signals()
        if hanging := host.hanging:  # the interpreter would wait for their threads forever
            logs.get().error("services_hung", services=hanging, notice=True)
            logs.close()
            os._exit(STATUSES[status] or FAILED)
    return status
