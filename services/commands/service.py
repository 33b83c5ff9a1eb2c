"""`sparring service NAME --run DIR`: runs one service of a run, for the supervisor, systemd or a cluster."""

import argparse
import contextlib
import gc
import os
import secrets
import signal
import time
from functools import partial
from pathlib import Path
from typing import Final

import anyio

from sparring.pipeline.bridges.explain import described_with_place
from sparring.pipeline.errors import (
    DISK_FULL,
    FAILED,
    FOREIGN,
    UNUSABLE,
    DiskFull,
    Restartable,
    SettingsError,
    SparringError,
    described,
    first_failure,
)
from sparring.pipeline.messages.channels import ENDPOINTS
from sparring.pipeline.monitoring import logs
from sparring.pipeline.queues.interface import Subscription
from sparring.pipeline.queues.zmq import ZmqTransport
from sparring.services.process.encryption import service_key
from sparring.services.process.hosting import LOOP_OPTIONS, follow_signals
from sparring.services.process.runtime import METRICS_INTERVAL_S, SUPERVISOR, Context, Run, follow
from sparring.services.supervision.topology import ServicePlan, load_run, plan_of, usable_cores

_DIGITS: Final = 5
"""Of the number of a CPU core."""
_START_S: Final = 10.0
"""Seconds for the start of a run, in which all of its services have the same priority."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("name", help="stepping-0, assembly, coordination, learning-NAME or monitor")
    parser.add_argument("--run", type=Path, required=True, help="folder of a run that was prepared")
    parser.add_argument("--start", help="name of this incarnation (default: random)")
    parser.add_argument("--cores", type=_cores, default=(), help="CPU cores to run on, as 0,1 (default: all)")
    parser.add_argument("--first", action="store_true", help="the run has just begun: there is no earlier incarnation")


def _cores(text: str) -> tuple[int, ...]:
    """Reads the numbers of cores, as "0,1"."""
    words = text.split(",")
    if not all(word.isascii() and word.isdecimal() and len(word) <= _DIGITS for word in words):
        raise argparse.ArgumentTypeError(f"got {text!r:.80}; expected numbers of CPU cores, as 0,1")
    return tuple(map(int, words))


def _run_on(cores: tuple[int, ...]) -> None:
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise SettingsError(
            f"got --cores {','.join(map(str, cores))}, which cannot be used ({error.strerror}); expected some of "
            f"{','.join(map(str, usable_cores()))}; correct it"
        ) from None


def run(args: argparse.Namespace) -> int:
    """Runs the service until SIGTERM, SIGINT or SIGHUP.

    Raises:
        SparringError: the run's folder cannot be read, or the service cannot work.
    """
    directory = args.run.absolute()
    prepared, endpoints = load_run(directory)
    plan = plan_of(prepared, args.name)
    if args.cores:
        _run_on(args.cores)
    # Its process group is never in the foreground of a terminal, and `stty tostop` would stop it at its first line.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    if plan.threads:  # only these use torch
        from sparring.pipeline.networks.device import configure_torch

        configure_torch(plan.threads, prepared.settings.torch_settings.matmul_precision)
    bounds = prepared.settings.pipeline.logs
    incarnation = args.start or own_incarnation(plan.name)
    try:
        logs.configure(directory, prepared.id, plan.name, most_bytes=bounds.most_bytes, kept=bounds.kept)
        connected = ZmqTransport(endpoints, incarnation, secret=service_key(prepared))
        serve = partial(_serve, plan, prepared, connected, first=args.first)
        anyio.run(serve, backend_options=LOOP_OPTIONS)
    except FOREIGN as failure:  # sys.exit in a plug-in would otherwise leave no trace
        error = first_failure(failure)
        known = isinstance(error, SparringError)
        logs.get().error("failed", error=described(error), exc_info=None if known else failure)
        with contextlib.suppress(OSError):  # standard error may be a file on a full disk, and must not hide the status
            os.write(2, f"{described_with_place(error)}\n".encode(errors="replace"))  # whose last line is shown
        if isinstance(error, DiskFull):
            return DISK_FULL
        return UNUSABLE if known and not isinstance(error, Restartable) else FAILED
    return 0


def own_incarnation(name: str) -> str:
    """Names an incarnation where no supervisor does: its number is the time, so that later ones have higher numbers."""
    return f"{name}.{secrets.token_hex(4)}-{time.time_ns()}"


async def _serve(plan: ServicePlan, prepared: Run, connected: ZmqTransport, *, first: bool) -> None:
    stop = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow_signals, stop.set)
        tasks.start_soon(_give_way, plan.niceness)
        async with connected as transport:
            context = Context(
                run=prepared,
                service=plan.name,
                start=transport.start,
                first=first,
                transport=transport,
                stop=stop,
                log=logs.get(start=transport.start),
                clock=time.monotonic,
                reload=partial(_reload, prepared.directory, transport),
            )
            tasks.start_soon(_count_refusals, context, transport)
            if prepared.clustered:
                tasks.start_soon(follow, await transport.subscribe(SUPERVISOR, ENDPOINTS), partial(_move, transport))
            serve = plan.load()
            gc.collect()
            gc.freeze()  # imported modules stay, so that a full collection need not visit them again
            gc.set_threshold(50_000, 20, 50)  # hot loops make thousands of short-lived objects and no cycles
            await serve(context)
        tasks.cancel_scope.cancel()


async def _give_way(niceness: int) -> None:
    """Lowers the priority once the run has begun: its start waits for the slowest service."""
    await anyio.sleep(_START_S)
    _lower_priority(niceness)


def _lower_priority(niceness: int) -> None:
    """Lowers the priority of all threads."""
    try:
        threads = [int(one.name) for one in Path("/proc/self/task").iterdir()]
    except OSError:  # not Linux, where it is that of the process
        threads = [0]
    for thread in threads:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + niceness)


def _reload(directory: Path, transport: ZmqTransport) -> Run:
    """Loads the run as it is now, after which its further queues and topics can be opened."""
    run, endpoints = load_run(directory)
    transport.endpoints.update(endpoints)
    return run


def _move(transport: ZmqTransport, topics: Subscription) -> None:
    """Connects to where the other services listen now."""
    moved = topics.latest(ENDPOINTS)
    if moved is not None:
        transport.move(moved.addresses)


async def _count_refusals(context: Context, transport: ZmqTransport) -> None:
    """Publishes how many connections were refused."""
    while True:
        context.registry.reach("handshakes_refused", transport.refused)
        await anyio.sleep(METRICS_INTERVAL_S)
