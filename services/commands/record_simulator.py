"""A single simulator: its process and its connection."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from sparring.pipeline.errors import ServiceError, SettingsError
from sparring.pipeline.queues.endpoints import is_open
from sparring.pipeline.settings import Settings
from sparring.services.process.encryption import exposed
from sparring.services.process.hosting import Process, ProcessHost
from sparring.services.supervision.topology import build

_GRACE_S: Final = 5.0
"""Seconds from the request to end until the process is killed."""
_LOOK_S: Final = 0.1
"""How often a process that has not connected is looked at."""


@dataclass
class LoneSimulator:
    """A simulator that was started here, or that connects by itself.

    Attributes:
        address: to which it connects.
        listener: bound to that address.
        process: None for a simulator that connects by itself.
    """

    address: str
    listener: socket.socket
    process: Process | None

    def end(self, timeout_s: float) -> str:
        """Returns how its process has ended; "" where it still runs after `timeout_s`, or was not started here."""
        how = None if self.process is None else self.process.join(timeout_s)
        return "in order" if how == "" else how or ""

    def accept(self, timeout_s: float | None) -> socket.socket:
        """Returns its connection, after which no other one is accepted.

        Raises:
            ServiceError: it ended before it connected, or did not connect in time.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        how = ""
        while not select.select([self.listener], [], [], 0.0 if how else _LOOK_S)[0]:
            if how or time.monotonic() > deadline:
                got = f"a simulator that ended before it connected ({how})" if how else "no connection in time"
                raise ServiceError(
                    f"got {got}; expected one at the address in $SPARRING_ADDRESS; read what the simulator prints, or "
                    "raise --timeout"
                )
            how = self.end(0)
        connected, _ = self.listener.accept()
        self.listener.close()
        return connected

    def close(self) -> None:
        """Ends the simulator."""
        self.listener.close()
        if self.process is not None:
            self.process.stop()
            if self.process.join(_GRACE_S) is None:
                self.process.kill()
                self.process.join()


@contextlib.contextmanager
def lone_simulator(settings: Settings, seed: int) -> Iterator[LoneSimulator]:
    """Starts the first simulator of a configuration, as the supervisor does; without one, waits for any to connect."""
    topology = build(settings.alone, run_id="record", directory=Path(), seed=seed)
    plan = next(iter(topology.simulators), None)
    address = next(iter(topology.run.addresses.values())) if plan is None else plan.environment["SPARRING_ADDRESS"]
    if is_open(address):
        raise SettingsError(
            f"got {address} for the simulator, which other machines can reach; expected loopback or unix:///PATH, "
            "because a recording is not encrypted; set pipeline.address to one"
        )
    if lines := exposed(topology.run.settings, insecure=False):
        raise SettingsError("\n".join(lines))
    listener = _listen(address)
    with contextlib.ExitStack() as stack:
        stack.callback(listener.close)
        process = None
        if plan is not None:
            host = ProcessHost(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sparring-"))))
            stack.callback(host.close)
            clear = {"SPARRING_KEYS": "", "SPARRING_NAME": ""}
            process = host.watched(plan.name, plan.command, {**plan.environment, **clear})
        simulator = LoneSimulator(address, listener, process)
        stack.callback(simulator.close)
        yield simulator


def _listen(address: str) -> socket.socket:
    parts = urlsplit(address)
    try:
        if parts.scheme == "unix":
            path = Path(parts.path)
            path.unlink(missing_ok=True)
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(1)
            return listener
        family = socket.AF_INET6 if ":" in (parts.hostname or "") else socket.AF_INET
        return socket.create_server((parts.hostname or "127.0.0.1", parts.port or 0), family=family, backlog=1)
    except OSError as error:
        raise SettingsError(
            f"got {address} for the simulator, which cannot be used ({error.strerror}); expected a free address; "
            "stop what uses it, or set pipeline.address to another"
        ) from error
