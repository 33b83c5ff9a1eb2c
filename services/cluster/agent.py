"""An agent owns one part of a run on a node of a cluster: a service process or a simulator.

It is a plain object that Ray makes an actor (`services/cluster/host.py`). Its arguments and results are text, numbers,
bytes, and dicts of them. It keeps the part in a folder of its own, which ends with it. Where it hears nothing from the
run for `SILENT_S`, it ends the part: the run has most likely started another incarnation elsewhere.
"""

import os
import shutil
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import psutil

import sparring
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.files import regular, write_atomically
from sparring.pipeline.monitoring.files import full, trim
from sparring.pipeline.queues.endpoints import private_folder
from sparring.pipeline.security import KEY_FILE
from sparring.services.process.hosting import SPARRING, Process, ProcessHost
from sparring.services.supervision.ports import Ports

SILENT_S: Final = 20.0
"""Seconds without a call after which the part is ended; the run gives up later (`LOST_S` of the host)."""
POLL_S: Final = 0.5
CHUNK: Final = 64 * 2**10
"""Bytes that one call reads or writes at most.

Ray keeps larger arguments and answers (above 100 KB) in the object store of the node, and ends a process at once that
uses the store of a dead raylet: the driver would not survive the head's.
"""


def address_of(interface: str | None, otherwise: str) -> str:
    """Returns the IP address of a network interface of this machine.

    Args:
        interface: its name, as "eth1"; None for none.
        otherwise: is returned where there is none.

    Raises:
        SettingsError: this machine has no such interface, or it has no IP address.
    """
    if interface is None:
        return otherwise
    there = psutil.net_if_addrs()
    families = sorted(there.get(interface, ()), key=lambda one: one.family)  # IPv4 before IPv6
    found = [one.address for one in families if one.family.name in ("AF_INET", "AF_INET6")]
    if not found:
        raise SettingsError(
            f"got pipeline.interface {interface!r}; expected one with an IP address of this machine, which has "
            f"{', '.join(there)}; correct it"
        )
    return found[0]


class Agent:
    """An agent of one part.

    Args:
        part: name, as "learning-Ball".
        node_address: IP address at which the other nodes reach this one; "" for that which Ray uses.
        interface: network interface whose address counts instead; None for none.
    """

    def __init__(self, part: str, node_address: str = "", interface: str | None = None) -> None:
        self._part = part
        self._kept = ExitStack()
        self._folder = self._kept.enter_context(private_folder("sparring_part-", shutil.rmtree))
        self._address = address_of(interface, node_address or _own_address())
        self._ports = Ports()
        self._processes = ProcessHost(self._folder / "logs")
        self._process: Process | None = None
        self._bounds = 16_000_000, 3
        self._is_closing = False
        self._heard_at = time.monotonic()
        threading.Thread(target=self._watch, name="run", daemon=True).start()

    def describe(self) -> dict[str, str]:
        """Returns the node's address, the folder of the part, and versions."""
        self._heard_at = time.monotonic()
        python = ".".join(map(str, sys.version_info[:2]))
        return {
            "address": self._address,
            "folder": str(self._folder),
            "node": _own_node(),
            "python": python,
            "version": sparring.__version__,
        }

    def reserve(self, port: int, *, here: bool) -> int:
        """Reserves a port, and returns its number.

        Args:
            port: the wanted one; 0, or one that is not free, for any.
            here: at the loopback address, for simulators on this node.
        """
        self._heard_at = time.monotonic()
        address = "127.0.0.1" if here else self._address
        try:
            return self._ports.find(address, port)
        except SettingsError:
            return self._ports.find(address)

    def write(self, name: str, content: bytes, *, more: bool) -> None:
        """Begins a file in the folder of the part, or continues it where there is `more`."""
        self._heard_at = time.monotonic()
        path = self._within(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with regular(path).open("ab" if more else "wb") as file:
            file.write(content)

    def start(
        self, command: list[str], environment: dict[str, str], bounds: tuple[int, int], *, watched: bool, key: str
    ) -> int:
        """Starts an incarnation of the part, and returns its process id.

        Args:
            command: program and arguments; `sparring` is that of this node.
            environment: variables in addition to those of this process.
            bounds: bytes of a file of output, and number of rotated ones.
            watched: a watcher ends it with this process, because it is a simulator.
            key: CURVE key of the run; "" for none.

        Raises:
            OSError: the program cannot be started, or the disk is full.
        """
        self._heard_at = time.monotonic()
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._bounds = bounds
        if key:
            write_atomically(self._folder / KEY_FILE, key.encode(), mode=0o600)
        start = self._processes.watched if watched else self._processes.start
        own = [*SPARRING, *command[1:]] if command[0] == "sparring" else command
        self._process = start(self._part, own, environment)
        return self._process.pid

    def poll(self, wait_s: float = POLL_S) -> dict[str, Any]:
        """Waits a moment for the end of the part; returns how it is, and the size and time of each of its files."""
        self._heard_at = time.monotonic()
        assert self._process is not None, "the part was started"
        failure = self._process.join(wait_s)
        state = {
            "ended": failure is not None,
            "failure": failure or "",
            "hopeless": self._process.hopeless,
            "cpu_s": self._process.cpu_s or 0.0,
            "files": self._listing(),
        }
        if self._is_closing:  # some files may be gone already
            raise ChildProcessError(f"{self._part} was ended, because nothing was heard of its run")
        return state

    def read(self, name: str, offset: int) -> bytes:
        """Returns up to `CHUNK` bytes of a file from an offset on; none where the file is gone."""
        self._heard_at = time.monotonic()
        try:
            with regular(self._within(name)).open("rb") as file:
                file.seek(offset)
                return file.read(CHUNK)
        except FileNotFoundError:
            return b""

    def stop(self) -> None:
        """Asks the part to end in order."""
        if self._process is not None:
            self._process.stop()

    def kill(self) -> None:
        """Ends the part at once."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Ends the part and removes its folder."""
        self._is_closing = True
        self.kill()
        if self._process is not None:
            self._process.join(POLL_S)
        self._processes.close()
        self._ports.close()
        self._kept.close()

    # ---------------------------------------------------------------- inside

    def _within(self, name: str) -> Path:
        path = (self._folder / name).resolve()
        assert path.is_relative_to(self._folder.resolve()), f"{name} is outside the folder of the part"
        return path

    def _listing(self) -> dict[str, list[int]]:
        found = {}
        for path in self._folder.rglob("*"):
            name = path.relative_to(self._folder)
            if path.name == KEY_FILE or any(one.startswith(".") for one in name.parts):  # not complete yet
                continue
            try:
                if path.is_file():
                    status = path.stat()
                    found[name.as_posix()] = [status.st_size, status.st_mtime_ns]
            except FileNotFoundError:  # removed meanwhile
                continue
        return found

    def _watch(self) -> None:
        while True:
            time.sleep(1.0)
            if self._process is None or self._process.process.returncode is not None:
                continue  # an agent without a part ends with its run
            if time.monotonic() - self._heard_at > SILENT_S:
                self.close()
                os._exit(1)
            for path in (*self._folder.glob("logs/*.stderr"), *self._folder.glob("run_logs/*.log")):
                if full(path, self._bounds[0]):
                    with suppress(OSError):
                        trim(path, *self._bounds)


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _own_node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""
