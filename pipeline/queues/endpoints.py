"""Opens and names the addresses that receivers and publishers listen on.

A Unix socket is opened here and passed to ZeroMQ. ZeroMQ by itself would take over the path of a
running listener, and delete the file some time after closing, possibly that of its successor.
"""

import errno
import ipaddress
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from sparring.pipeline.errors import QueueError
from sparring.pipeline.files import temporary_folder

LONGEST_PATH = 107
"""Bytes in the path of a Unix socket: the kernel's limit."""
_LOCK = "sockets.lock"


def endpoint_of(endpoints: Mapping[str, str], name: str) -> str:
    """Returns the address of a queue or topic.

    Raises:
        QueueError: there is none of that name.
    """
    if name not in endpoints:
        raise QueueError(f"got {name!r}; expected one of {sorted(endpoints)}; add it to the topology")
    return endpoints[name]


def ipc_path(endpoint: str) -> Path | None:
    """Returns the path of a Unix socket endpoint, None for any other."""
    scheme, _, path = endpoint.partition("://")
    return Path(path) if scheme == "ipc" else None


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach a host's sockets; "localhost" is the only name that counts."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def is_tcp(address: str) -> bool:
    """Returns whether an address has the form `tcp://HOST:PORT`."""
    with suppress(ValueError):  # of a port that is no number, or above 65535, or a name that cannot be one of a host
        parts = urlsplit(address)
        is_named = bool((parts.hostname or "").encode("idna"))
        return parts.scheme == "tcp" and is_named and parts.port is not None and not parts.path
    return False


def is_open(endpoint: str) -> bool:
    """Returns whether other machines can connect to an endpoint."""
    parts = urlsplit(endpoint)
    return parts.scheme == "tcp" and not is_loopback(parts.hostname or "")


def listen(path: Path) -> socket.socket:
    """Returns a socket that listens at a path, for its owner only, replacing the file of a dead predecessor.

    Raises:
        QueueError: another process listens there, or the path cannot hold a socket.
    """
    if len(bytes(path)) > LONGEST_PATH:
        raise QueueError(
            f"got endpoint ipc://{path} of {len(bytes(path))} bytes; expected a path of at most {LONGEST_PATH}; "
            "choose a shorter folder, such as one in the folder for temporary files"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _bind(listener, path)
        path.chmod(0o600)
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise unavailable(f"ipc://{path}", error.errno, error.strerror) from error
    return listener


def unavailable(endpoint: str, code: int | None, reason: object) -> QueueError:
    """Returns an error that explains why an endpoint cannot be listened at or connected to."""
    if code == errno.EADDRINUSE:
        return QueueError(
            f"got endpoint {endpoint}, where another process listens; expected a free one; "
            "stop that process (an earlier run that still exists?) or configure another endpoint"
        )
    return QueueError(
        f"got endpoint {endpoint}: {reason}; expected an address this machine can use; "
        "correct the endpoint, or make its folder writable"
    )


def peer_address(descriptor: int) -> str:
    """Returns the address at the other end of a connection, "unknown" if it no longer exists."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            return str(connection.getpeername()[0])
    except (OSError, IndexError):
        return "unknown"


def refuse_used_path(path: Path) -> None:
    """Refuses a path at which a socket would replace a file of another kind, or the socket of a living process.

    Raises:
        OSError: with EADDRINUSE.
    """
    if path.is_symlink() or (path.exists() and _answers(path)):
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), str(path))


def remove_abandoned(path: Path) -> None:
    """Removes the socket of a process that was killed; nothing else, and none at which another process listens."""
    with suppress(OSError):
        if path.is_socket() and not path.is_symlink() and not _answers(path):
            path.unlink()


def socket_folder() -> AbstractContextManager[Path]:
    """Makes a private folder of a short path for Unix sockets, and removes those that killed processes have left."""
    return private_folder("sparring-", _remove)


@contextmanager
def private_folder(prefix: str, remove: Callable[[Path], None]) -> Iterator[Path]:
    """Makes a temporary folder for this process alone, and removes those that killed processes have left.

    Args:
        prefix: of its name; one prefix does not begin with another.
        remove: removes such a folder.
    """
    import fcntl  # not on Windows

    remove_left(prefix, remove)
    folder, owner = Path(tempfile.mkdtemp(prefix=prefix)), os.getpid()
    unlocked = folder / "unlocked"
    with unlocked.open("xb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        unlocked.rename(folder / _LOCK)  # the others see it locked only
        try:
            yield folder
        finally:
            with suppress(OSError):
                if os.getpid() == owner:  # and not a process that was forked meanwhile
                    remove(folder)


def remove_left(prefix: str, remove: Callable[[Path], None]) -> None:
    """Removes the private folders that killed processes have left. Args: as of `private_folder`."""
    import fcntl  # not on Windows

    for lock in temporary_folder().glob(f"{prefix}*/{_LOCK}"):
        with suppress(OSError), lock.open("rb+") as file:
            if lock.lstat().st_uid == os.geteuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives
                remove(lock.parent)


def _remove(folder: Path) -> None:
    """Removes a folder of sockets, unless it holds other files."""
    for path in folder.iterdir():
        if path.is_socket() or path.name == _LOCK:
            path.unlink()
    folder.rmdir()


def _bind(listener: socket.socket, path: Path) -> None:
    try:
        listener.bind(str(path))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        refuse_used_path(path)
        with suppress(FileNotFoundError):
            path.unlink()
        listener.bind(str(path))


def _answers(path: Path) -> bool:
    """Returns whether a process listens at a path."""
    if not path.is_socket():
        return True  # a file of another kind must not be removed
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) not in (errno.ECONNREFUSED, errno.ENOENT)
