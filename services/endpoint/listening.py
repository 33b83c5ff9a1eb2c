"""Simulators connect to a listening socket, at a limited rate."""

import errno
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import anyio
from anyio.abc import Listener, SocketAttribute, SocketListener, TaskGroup

from sparring.pipeline.errors import ServiceError
from sparring.pipeline.queues.endpoints import refuse_used_path
from sparring.services.endpoint.sockets import SocketBytes
from sparring.services.endpoint.throttling import LeakyBucket

ACCEPTS_PER_S: Final = 500
"""Connections accepted per second: each costs the time of an action or two. Further ones wait in the system's queue,
without delay for connected simulators."""
_BURST_S: Final = 0.02
"""Seconds whose connections may be accepted at once after a pause: simultaneous handshakes delay each other."""
_PAUSE_S: Final = 0.1
"""Pause after a failed accept: most likely no file descriptors are left."""


def allow_descriptors(wanted: int) -> int:
    """Raises the limit of file descriptors towards `wanted`; returns how many the process may open."""
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = (soft, hard).count(resource.RLIM_INFINITY)
    if soft < wanted and not unlimited:
        soft = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if unlimited else soft


class PacedListener(Listener[SocketBytes]):
    """A PacedListener accepts connections at a limited rate and survives failures of single ones.

    Args:
        listeners: have opened the sockets, and close them.
        path: file of a Unix socket, removed at the end; None for other sockets.

    Attributes:
        failures: number of connections that could not be accepted.
        cause: of the last failure.
    """

    def __init__(self, *listeners: SocketListener, path: Path | None = None) -> None:
        self._listeners = listeners
        self._path = path
        self.failures = 0
        self.cause = ""

    async def serve(self, handler: Callable[[SocketBytes], Any], task_group: TaskGroup | None = None) -> None:
        """Starts `handler` for each connection, in `task_group` if given, until cancelled."""
        async with anyio.create_task_group() as tasks:
            for one in self._listeners:
                tasks.start_soon(self._serve, one, handler, task_group or tasks)

    async def _serve(self, one: SocketListener, handler: Callable[[SocketBytes], Any], tasks: TaskGroup) -> None:
        pace = LeakyBucket(ACCEPTS_PER_S, ACCEPTS_PER_S * _BURST_S, anyio.current_time())
        while True:
            try:
                stream = await self.accept(one)
            except anyio.ClosedResourceError:
                return
            except (OSError, anyio.BrokenResourceError) as error:
                self.failures, self.cause = self.failures + 1, repr(error.__cause__ or error)
                await anyio.sleep(_PAUSE_S)
                continue
            tasks.start_soon(handler, stream)
            await anyio.sleep(pace.take(1, anyio.current_time()))

    async def accept(self, one: SocketListener) -> SocketBytes:
        """Returns the next connection.

        Raises:
            OSError: it failed; a next one may succeed.
            ClosedResourceError: the socket is closed.
        """
        raw = one.extra(SocketAttribute.raw_socket)  # noqa: S610 (of a listener)
        while True:
            try:
                return SocketBytes(*raw.accept())
            except BlockingIOError:
                await anyio.wait_readable(raw)

    async def aclose(self) -> None:
        for one in self._listeners:
            await one.aclose()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        return self._listeners[0].extra_attributes


async def listen(address: str) -> Listener[SocketBytes]:
    """Listens on `tcp://HOST:PORT` or `unix:///PATH`.

    Raises:
        ServiceError: the address is in use or cannot be bound.
    """
    parts = urlsplit(address)
    try:
        if parts.scheme == "unix":
            path = Path(parts.path)
            refuse_used_path(path)  # anyio replaces the socket of a dead predecessor
            return PacedListener(await anyio.create_unix_listener(path, mode=0o600), path=path)
        several = await anyio.create_tcp_listener(
            local_host=parts.hostname, local_port=parts.port or 0, reuse_port=False
        )
        return PacedListener(*(one for one in several.listeners if isinstance(one, SocketListener)))
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be bound ({error})"
        raise ServiceError(
            f"got {address!r} for simulators, which {reason}; expected a free address; stop what uses it, or "
            "set pipeline.address to another (port 0 chooses one)"
        ) from error
