"""Where simulators connect: a listening socket, as an anyio listener of byte streams."""

from __future__ import annotations

import errno
from pathlib import Path
from urllib.parse import urlsplit

import anyio
from anyio.abc import Listener, SocketStream

from pipeline.errors import ServiceError


async def listen(address: str) -> Listener[SocketStream]:
    """Listens on `tcp://HOST:PORT` or `unix:///PATH`.

    Raises:
        ServiceError: the address is in use or can not be bound.
    """
    parts = urlsplit(address)
    try:
        if parts.scheme == "unix":
            path = Path(parts.path)
            path.unlink(missing_ok=True)  # noqa: ASYNC240 (one system call, before anything else runs)
            return await anyio.create_unix_listener(path, mode=0o600)
        return await anyio.create_tcp_listener(local_host=parts.hostname, local_port=parts.port or 0, reuse_port=False)
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        raise ServiceError(
            f"got {address!r} for simulators, which {'is in use' if in_use else f'can not be bound ({error})'}; "
            "expected a free address; stop what uses it, or set pipeline.address to another (port 0 chooses one)"
        ) from error
