"""Addresses that a receiver or publisher listens on.

A Unix socket is opened here and handed to ZeroMQ: by itself it takes the path of whoever listens
there, and removes the file some time after it was closed, maybe that of its successor.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from sparring.pipeline.errors import QueueError

LONGEST_PATH = 107
"""Bytes of a Unix socket's path, a limit of the kernel."""


def ipc_path(endpoint: str) -> Path | None:
    """The path of a Unix socket endpoint, None for any other."""
    scheme, _, path = endpoint.partition("://")
    return Path(path) if scheme == "ipc" else None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host's sockets; of names only "localhost" is known to be so."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_open(endpoint: str) -> bool:
    """Whether other machines can connect to an endpoint."""
    parts = urlsplit(endpoint)
    return parts.scheme == "tcp" and not is_loopback(parts.hostname or "")


def listen(path: Path) -> socket.socket:
    """A socket that listens at a path. The file of a dead predecessor is replaced.

    Raises:
        QueueError: somebody listens there, or there can be no socket there.
    """
    if len(bytes(path)) > LONGEST_PATH:
        raise QueueError(
            f"got endpoint ipc://{path} of {len(bytes(path))} bytes; expected a path of at most {LONGEST_PATH}; "
            "choose a shorter folder, such as one in the folder for temporary files"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _bind(listener, path)
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise unavailable(f"ipc://{path}", error.errno, error.strerror) from error
    except BaseException:
        listener.close()
        raise
    return listener


def unavailable(endpoint: str, code: int | None, reason: object) -> QueueError:
    """The failure to listen at or connect to an endpoint, explained."""
    if code == errno.EADDRINUSE:
        return QueueError(
            f"got endpoint {endpoint}, where another process listens; expected a free one; "
            "stop that process (an earlier run that still lives?) or configure another endpoint"
        )
    return QueueError(
        f"got endpoint {endpoint}: {reason}; expected an address this machine can use; "
        "correct the endpoint, or make its folder writable"
    )


def _bind(listener: socket.socket, path: Path) -> None:
    try:
        listener.bind(str(path))
    except OSError as error:
        if error.errno != errno.EADDRINUSE or _answers(path):
            raise
        with suppress(FileNotFoundError):
            path.unlink()
        listener.bind(str(path))


def _answers(path: Path) -> bool:
    """Whether somebody listens at a path."""
    if not path.is_socket():
        return True  # a file of another kind is not ours to remove
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True
