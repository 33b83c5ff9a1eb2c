"""Joins a Ray cluster, or starts one on this machine, and plans a run there."""

import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import ray
import ray.autoscaler.sdk

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.settings import Settings
from sparring.services.cluster.agent import address_of
from sparring.services.cluster.calls import CALL_S, CLOSE_S, LOOK_S, alive, bounded, first_line
from sparring.services.cluster.placement import described, lacking, stepping_processes, total, units_of
from sparring.services.cluster.places import SMALLEST, Cluster
from sparring.services.process.lifeline import end_strays

_JOIN_S: Final = 300.0
"""Seconds for Ray to start, or to connect to a cluster."""


@contextmanager
def connected(address: str | None, settings: Settings) -> Iterator[Cluster]:
    """Connects to a cluster, and plans the run there.

    Args:
        address: of its head, as "10.0.0.1:6379"; "" or None for that which the environment names (`RAY_ADDRESS`), or
            else for a cluster of this machine alone that ends with the run.
        settings: of the run.

    Raises:
        SettingsError: no cluster answers there, or something has no room on any node.
    """
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if address.startswith("ray://"):
        raise SettingsError(
            f"got --ray {address}; expected an address of the cluster itself, because the run must be started on one "
            "of its nodes; run it there, for example by `ray job submit`, with --ray auto"
        )
    _refuse_silence(address)
    for name in ("ray", "ray._private.worker"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what matters of it is told in terms of the run
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    if address == "local":
        wanted = total(unit.bundle for unit in units_of(settings, settings.pipeline.stepping_processes))
        cores = max(os.cpu_count() or 1, math.floor(wanted.get("CPU", 0)) + 1)  # room for learners that are added
        options |= {"num_cpus": cores, "include_dashboard": False}
    cluster, left = None, threading.Event()
    try:
        _join(address, options, left)
        cluster = _planned(settings, "127.0.0.1" if address == "local" else "")
        yield cluster
    finally:
        if cluster is not None:
            bounded(cluster.close)
        if settings.pipeline.placement.wait_s:
            bounded(lambda: ray.autoscaler.sdk.request_resources(bundles=[]))
        bounded(ray.shutdown)
        left.set()


def _join(address: str, options: Mapping[str, Any], left: threading.Event) -> None:
    """Connects this process to a cluster, in a thread.

    In the main one Ray would handle SIGTERM, by an exception that its own code swallows at times. The thread lives
    until `left` is set, because the processes that Ray starts end with it.

    Raises:
        SettingsError: no cluster can be used there.
    """
    failures: list[BaseException] = [TimeoutError(f"no answer in {_JOIN_S:g} s")]
    joined = threading.Event()

    def join() -> None:
        try:
            ray.init(address, **options)
            failures.clear()
        except (Exception, SystemExit) as error:
            failures[:] = [error]
        joined.set()
        left.wait()

    deadline = time.monotonic() + _JOIN_S
    threading.Thread(target=join, daemon=True).start()
    try:
        while not joined.wait(LOOK_S / 10) and time.monotonic() < deadline:
            _keep_handler()
    except KeyboardInterrupt:
        if not joined.wait(CLOSE_S):  # Ray holds a lock for as long, for which the exit of the interpreter would wait
            threading.excepthook = lambda _: None  # of Ray's threads, whose head is ended
            end_strays((), CLOSE_S)
            os._exit(128 + signal.SIGINT)
        raise
    _keep_handler()
    if failures:
        raise SettingsError(
            f"got --ray {address}, where no cluster can be used ({first_line(failures[0])}); expected one with the "
            "same versions of Ray and Python; start it with `ray start --head`, or correct the address"
        ) from failures[0]


def _keep_handler() -> None:
    """Installs Python's handler of SIGTERM again, in place of one that a library of Ray has installed below it."""
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def _refuse_silence(address: str) -> None:
    """Raises a SettingsError where nothing listens at an address: Ray would try for minutes."""
    from ray._private.utils import read_ray_address  # what `auto` means

    where = read_ray_address() if address == "auto" else address
    host, _, port = (where or "").rpartition(":")
    if address == "local" or (address == "auto" and not host):  # Ray says itself that there is none
        return
    try:
        if not port.isdecimal():
            raise OSError("no port")
        socket.create_connection((host.strip("[]"), int(port)), timeout=CALL_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise SettingsError(
            f"got --ray {address}, where no cluster answers ({why}); expected HOST:PORT of a head; start it with "
            "`ray start --head`, or correct the address"
        ) from error


def _planned(settings: Settings, node_address: str) -> Cluster:
    """Plans the run on the cluster, for whose growth it waits up to `pipeline.placement.wait_s`."""
    placement = settings.pipeline.placement
    deadline = time.monotonic() + placement.wait_s
    while True:
        nodes = {node["NodeManagerAddress"] + " " + node["NodeID"][:6]: node["Resources"] for node in alive()}
        count = stepping_processes(settings, list(nodes.values()))
        units = units_of(settings, count)
        if not (left := lacking(units, list(nodes.values()))):
            break
        if time.monotonic() >= deadline:
            needs = "; ".join(f"{unit.name} needs {described(unit.bundle)}" for unit in left)
            has = "; ".join(f"{name}: {described(amounts)}" for name, amounts in nodes.items()) or "no node"
            raise SettingsError(
                f"got a cluster without room for {', '.join(unit.name for unit in left)} ({needs}); expected nodes "
                f"with it beside all else; it has {has}; add nodes, lower pipeline.placement, or let "
                "pipeline.placement.wait_s give an autoscaler time"
            )
        # It counts until another request, which `connected` makes at the end.
        ray.autoscaler.sdk.request_resources(bundles=[dict(unit.bundle) or SMALLEST for unit in units])
        time.sleep(1.0)
    pipeline = settings.pipeline.model_copy(update={"stepping_processes": count})
    address = address_of(settings.pipeline.interface, node_address or str(ray.util.get_node_ip_address()))
    return Cluster(settings.model_copy(update={"pipeline": pipeline}), address, units, node_address)
