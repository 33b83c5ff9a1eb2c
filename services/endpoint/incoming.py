"""A simulator's bytes are handled in the callback of its socket, where that can be read directly.

A frame that waits for a task to be scheduled costs its simulator a tenth of its time. Streams that carry TLS, or run in
virtual time, are read by the task.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import anyio
from anyio.abc import ByteStream

from sparring.services.endpoint.outgoing import second_handle

RECEIVE: Final = 256 * 1024
"""Most bytes of one read: asyncio's own, so that no stream keeps a rest that direct reading would miss."""
_SPACE: Final = memoryview(bytearray(RECEIVE))
"""Shared by all simulators, because bytes are copied or handled before the next are received."""
Take = Callable[[bytes | memoryview], bool]
"""Handles received bytes before it returns; returns whether more may be received at once."""


class Incoming:
    """Incoming is the receiving half of a stream; `close` ends direct reading, not the stream.

    Args:
        stream: no other task reads from it.
    """

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._direct = second_handle(stream)

    async def read(self, take: Take) -> None:
        """Passes what arrives to `take`, until that wants no more for now.

        Raises:
            EndOfStream, BrokenResourceError: the other side has disconnected.
            Exception: what `take` has raised.
        """
        if self._direct is None:
            while take(await self._stream.receive(RECEIVE)):
                pass
            return
        loop, enough = asyncio.get_running_loop(), asyncio.Event()
        failures: list[Exception] = []

        def readable() -> None:
            try:
                if enough.is_set() or self._take_one(take):
                    return
            except Exception as error:  # the event loop would only log it
                failures.append(error)
            enough.set()

        loop.add_reader(self._direct, readable)
        try:
            await enough.wait()
        finally:
            loop.remove_reader(self._direct)
        if failures:
            raise failures[0]

    def close(self) -> None:
        """Closes the second handle."""
        if self._direct is not None:
            self._direct.close()

    def _take_one(self, take: Take) -> bool:
        assert self._direct is not None
        try:
            size = self._direct.recv_into(_SPACE)
        except BlockingIOError:
            return True
        except OSError as error:
            raise anyio.BrokenResourceError from error
        if not size:
            raise anyio.EndOfStream
        return take(_SPACE[:size])
