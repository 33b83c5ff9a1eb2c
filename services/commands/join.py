"""Runs this machine's part of a run on several machines: `sparring join ADDRESS --host NAME`.

consumes       HostRun and HostOrders from the topic "supervisor"; the state of the learners here, for their exports
produces       processes; HostState on its topic
waits for      the run, then orders
unblocked by   the main machine

The main machine is where `sparring train` runs: it decides on all starts and restarts. When its heartbeats are missing
for a few seconds, this machine ends whatever it runs and waits for the main machine again. The exit status is 0 at the
end of the run, 1 where the run has failed or did not begin in time, and 2 for bad input.
"""

import argparse
import os
import secrets
import sys
import tempfile
import time
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import urlsplit

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from sparring.pipeline.errors import ServiceError, SettingsError
from sparring.pipeline.files import write_atomically
from sparring.pipeline.messages.channels import HOST_RUN, HOST_STATE, orders_topic
from sparring.pipeline.messages.hosts import HostRun, PartOrder
from sparring.pipeline.monitoring import logs
from sparring.pipeline.queues.interface import Subscription, Transport
from sparring.pipeline.queues.zmq import ZmqTransport
from sparring.pipeline.security import secret_key
from sparring.pipeline.settings import no_device
from sparring.services.process.encryption import KEYS_VARIABLE, service_key
from sparring.services.process.hosting import LOOP_OPTIONS, HostedService, ProcessHost, follow_signals
from sparring.services.process.machines import SILENT_S, OrderExecutor
from sparring.services.process.runtime import SUPERVISOR
from sparring.services.supervision.exports import Exports
from sparring.services.supervision.hosts import Plan, Processes
from sparring.services.supervision.topology import RUN_FILE, Topology, load_run, load_topology, origin_of

_LOOK_S: Final = 0.25
_EXPORT_S: Final = 60.0
_TOPIC_PACE_S: Final = 0.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("address", metavar="ADDRESS", help="of the main machine: tcp://HOST:PORT, pipeline.port there")
    parser.add_argument("--host", required=True, metavar="NAME", help="of this machine in pipeline.hosts")
    parser.add_argument("--keys", type=Path, metavar="DIR", help=f"folder of keys (${KEYS_VARIABLE})")
    parser.add_argument("--results-dir", type=Path, default=Path("results"), help="where runs are kept (%(default)s)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="how long to wait for the run (600)")


def run(args: argparse.Namespace) -> int:
    """Takes part in a run to its end.

    Raises:
        SettingsError: an argument, the keys or the run are invalid.
    """
    if args.keys is not None:  # the processes started here inherit it
        os.environ[KEYS_VARIABLE] = str(args.keys.absolute())
    keys = Path(os.environ[KEYS_VARIABLE]) if os.environ.get(KEYS_VARIABLE) else None
    _check(args.address, keys)
    while True:
        deadline = time.monotonic() + args.timeout
        status = anyio.run(_take_part, args, keys, deadline, backend_options=LOOP_OPTIONS)
        if status is not None:
            return status


def _check(address: str, keys: Path | None) -> None:
    try:
        parts = urlsplit(address)
        fine = parts.scheme == "tcp" and bool(parts.hostname) and parts.port is not None
    except ValueError:
        fine = False
    if not fine:
        raise SettingsError(
            f"got {address!r}; expected tcp://HOST:PORT of the main machine; `sparring train` prints it"
        )
    if keys is None:
        raise SettingsError(
            f"got {address} without keys: a program that answers there could start others here; expected keys; name "
            "their folder with --keys"
        )


async def _take_part(args: argparse.Namespace, keys: Path | None, deadline: float) -> int | None:
    """Serves one session of a run; returns its exit status, or None where the main machine was lost."""
    session = f"host-{args.host}.{secrets.token_hex(4)}"
    found = await _wait_for_run(args, keys, session, deadline)
    directory = prepare(args.results_dir.absolute(), args.host, found)
    topology = load_topology(directory, args.host)
    learns = topology.run.playing is None
    if learns and (refused := await to_thread.run_sync(no_device, topology.run.settings, args.host)):
        raise refused
    logs.configure(directory, topology.run.id, f"supervisor-{args.host}", console=True)
    logs.get().info("joined", folder=str(directory), host=args.host, session=session, notice=True)
    processes = ProcessHost(directory / "logs")
    try:
        async with ZmqTransport(topology.endpoints, session, secret=service_key(topology.run)) as transport:
            return await HostSession(topology, processes, session).serve(transport)
    finally:
        processes.close()  # whatever still runs ends


async def _wait_for_run(args: argparse.Namespace, keys: Path | None, session: str, deadline: float) -> HostRun:
    """Waits until the main machine sends the run.

    Raises:
        ServiceError: it has not done so in time.
    """
    endpoints = {f"topic:{SUPERVISOR}": args.address}
    secret = None if keys is None else secret_key(keys)
    sys.stdout.write(f"waiting for the run at {args.address}\n")
    sys.stdout.flush()
    with anyio.move_on_after(deadline - time.monotonic()):
        async with ZmqTransport(endpoints, session, secret=secret) as transport:
            supervisor = await transport.subscribe(SUPERVISOR)
            while True:
                await supervisor.changed()
                found = supervisor.latest(HOST_RUN)
                if found is not None:
                    return found
    raise ServiceError(
        f"got nothing from {args.address} for {args.timeout:g} s; expected a run whose pipeline.hosts name "
        f"{args.host!r}; start `sparring train` there, or correct the address"
    )


def prepare(results: Path, host: str, found: HostRun) -> Path:
    """Makes the run's folder on this machine, with the files that the main one has sent.

    Args:
        results: folder of runs.
        host: this machine.
        found: files of the run.

    Raises:
        SettingsError: another run is in it, or the run does not know this host.
    """
    content = found.content.tobytes()
    results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=results, prefix=".joining-") as name:
        (Path(name) / RUN_FILE).write_bytes(content)
        run, origin = load_run(Path(name))[0], origin_of(Path(name))
    if host not in run.hosts:
        raise SettingsError(f"got the host {host!r}; expected one of {', '.join(run.hosts)}; correct --host")
    directory = results / run.id
    if directory.parent != results:
        raise SettingsError(f"got the run id {run.id!r}; expected one without /; choose another with --run-id")
    if directory.exists() and any(directory.iterdir()) and origin_of(directory) != origin:
        raise SettingsError(
            f"got {directory}, which holds another run; expected a new folder, or that of this run; remove it, or "
            "choose another with --results-dir"
        )
    directory.mkdir(mode=0o700, exist_ok=True)
    (directory / "logs").mkdir(exist_ok=True)
    for name, octets in {**found.files, RUN_FILE: found.content}.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise SettingsError(f"got a file for {path}; expected one within the run's folder; use one version")
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, octets.tobytes())
    return directory


class HostSession:
    """One session of this machine in a run.

    Args:
        topology: of the run.
        processes: starts what runs here.
        session: name of the session.
    """

    def __init__(self, topology: Topology, processes: ProcessHost, session: str) -> None:
        self._topology = topology
        self._processes = Processes(topology, processes)
        self._session = session
        self._log = logs.get()
        self._learners: dict[str, Subscription] = {}  # on this machine
        self._exports = Exports(topology, self._learners, self._log)

    async def serve(self, transport: Transport) -> int | None:
        """Executes orders until the run is over; returns its exit status, or None where the main machine was lost."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow_signals, partial(_end, tasks))
            topic = await transport.publisher(f"host-{self._topology.host}")
            supervisor = await transport.subscribe(SUPERVISOR)
            executor = OrderExecutor(self._session, self._start, partial(topic.publish, HOST_STATE), tasks)
            for name in (f"learning-{behavior}" for behavior in self._topology.run.learners):
                if self._topology.place(name) == self._topology.host:
                    self._learners[name] = await transport.subscribe(name, pace=_TOPIC_PACE_S)
            tasks.start_soon(self._exports.run)
            status = await self.follow(supervisor, executor)
            if status is not None:
                await self._exports.finish(_EXPORT_S)
            tasks.cancel_scope.cancel()
            return status
        return 1  # a signal

    async def follow(self, supervisor: Subscription, executor: OrderExecutor) -> int | None:
        """Passes orders on until the run is over; returns its exit status, or None where the main machine was lost."""
        began, leader = time.monotonic(), ""
        while not executor.over:
            with anyio.move_on_after(_LOOK_S):
                await supervisor.changed()
            leader = leader or supervisor.publisher
            if supervisor.publisher != leader:  # it restarted so quickly that no heartbeat was missed
                self._log.warning("main_machine_restarted", notice=True)
                return None
            orders = supervisor.latest(orders_topic(self._topology.host))
            if orders is not None:
                executor.follow(orders)
            silent_s = min(supervisor.heartbeat_age, time.monotonic() - began)
            if silent_s > SILENT_S:
                self._log.warning("main_machine_lost", seconds=round(silent_s, 1), notice=True)
                return None
        self._log.info("run_ended", status=executor.over, notice=True)
        return 1 if executor.over == "failed" else 0

    def _start(self, name: str, order: PartOrder) -> HostedService:
        """Starts a service or simulator."""
        plans: tuple[Plan, ...] = (*self._topology.services, *self._topology.simulators)
        plan = next(plan for plan in plans if plan.name == name)
        hosted = self._processes.start_here(plan, order.start, first=order.first)
        self._log.info("started", part=name, start=order.number, pid=hosted.pid)
        return hosted


def _end(tasks: TaskGroup) -> None:
    logs.get().info("stopping", cause="signal", notice=True)
    tasks.cancel_scope.cancel()
