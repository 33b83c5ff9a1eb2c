"""A small disk that can be filled and a network whose link can go down. Both need Linux and root."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

_NUMBERS = itertools.count()


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise OSError(
            f"got {done.stderr.strip()!r} from {' '.join(command)}; expected exit status 0; try as root on Linux"
        )
    return done.stdout


def destroy(port: int) -> int:
    """Resets all TCP connections to a port of this machine and returns how many there were.

    Raises:
        OSError: the user lacks the permission, or the system lacks the tool.
    """
    found = _run("ss", "--no-header", "--tcp", "--kill", "state", "established", f"( dport = :{port} )")
    return len(found.splitlines())


class SmallDisk:
    """A small file system in memory.

    Args:
        path: mount point.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def fill(self) -> None:
        """Fills it to the last byte."""
        with contextlib.suppress(OSError), self._ballast.open("ab", buffering=0) as file:
            for size in (2**16, 2**12, 1):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)):
                        pass

    def free(self) -> None:
        """Frees the space again."""
        self._ballast.unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(path: Path, megabytes: int) -> Iterator[SmallDisk]:
    """Mounts a small file system.

    Raises:
        OSError: the user lacks the permission, or the system lacks the tool.
    """
    path.mkdir(parents=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(path))
    try:
        yield SmallDisk(path)
    finally:
        _run("umount", "--lazy", str(path))


class Network:
    """A network namespace with one link to ours.

    Attributes:
        host: our address on the link.
        prefix: arguments that run a command inside the namespace.
    """

    def __init__(self, number: int) -> None:
        self._name = f"faults{number}"
        self._link = f"fault{number}"
        self._inner = f"{self._link}n"
        third = number % 250
        self.host = f"10.213.{third}.1"
        self._inner_address = f"10.213.{third}.2"
        self.prefix = ("ip", "netns", "exec", self._name)

    def open(self) -> None:
        """Creates the namespace and its link; raises OSError without the permission."""
        _run("ip", "netns", "add", self._name)
        _run("ip", "link", "add", self._link, "type", "veth", "peer", "name", self._inner)
        _run("ip", "link", "set", self._inner, "netns", self._name)
        _run("ip", "address", "add", f"{self.host}/30", "dev", self._link)
        _run("ip", "link", "set", self._link, "up")
        _run(*self.prefix, "ip", "address", "add", f"{self._inner_address}/30", "dev", self._inner)
        self.up()
        self.up("lo")

    def down(self, device: str = "") -> None:
        """Takes the link, or another device of the namespace, down; neither side gets a notice."""
        _run(*self.prefix, "ip", "link", "set", device or self._inner, "down")

    def up(self, device: str = "") -> None:
        """Takes the link or device up again."""
        _run(*self.prefix, "ip", "link", "set", device or self._inner, "up")

    def close(self) -> None:
        """Removes link and namespace."""
        for command in (("link", "del", self._link), ("netns", "del", self._name)):
            with contextlib.suppress(OSError):
                _run("ip", *command)


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """Creates a network namespace and removes it afterwards.

    Raises:
        OSError: the user lacks the permission, or the system lacks the tool.
    """
    made = Network(os.getpid() * 16 % 60_000 + next(_NUMBERS) % 16)
    try:
        made.open()
        yield made
    finally:
        made.close()
