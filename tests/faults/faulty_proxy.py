"""A TCP proxy on loopback that injects faults: delays, silence, resets, truncated messages and half-closed streams."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

RECEIVE = 2**16


class _ProxiedConnection:
    """One connection, from a simulator to the trainer."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.near = near  # to the simulator
        self.far = far  # to the trainer
        self.truncate = False
        self.closed: set[asyncio.StreamWriter] = set()  # their stream was ended

    def end(self, to: asyncio.StreamWriter) -> None:
        """Ends the stream to one side; what still arrives for it is silently lost."""
        self.closed.add(to)
        to.write_eof()


class FaultyProxy:
    """Forwards connections and injects faults, which the thread that made it requests.

    Args:
        upstream: returns host and port to forward to; called for each connection.
        host: address to listen on.

    Attributes:
        late: number of delayed bytes.
    """

    def __init__(self, upstream: Callable[[], tuple[str, int]], host: str = "127.0.0.1") -> None:
        self._upstream = upstream
        self._pairs: set[_ProxiedConnection] = set()
        self._passing = asyncio.Event()
        self._delay_s = 0.0
        self.late = 0
        self._refusing = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._socket = socket.create_server((host, 0))
        self.address = f"tcp://{host}:{self._socket.getsockname()[1]}"
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- faults

    def delay(self, seconds: float) -> None:
        """Delays everything by `seconds`."""
        self._call(self._set_delay, seconds)

    def silence(self, *, on: bool) -> None:
        """Holds everything back without closing a connection; off releases what was held."""
        self._call(self._passing.clear if on else self._passing.set)

    def refuse(self, *, on: bool) -> None:
        """Resets new connections at once."""
        self._call(self._set_refusing, on)

    def reset(self) -> None:
        """Resets every connection."""
        self._call(self._each, _reset)

    def reset_within_message(self) -> None:
        """Resets every connection after half of the next data from its simulator."""
        self._call(self._each, _truncate)

    def close_to_trainer(self) -> None:
        """Ends the stream to the trainer only."""
        self._call(self._each, lambda pair: pair.end(pair.far))

    def close_to_simulator(self) -> None:
        """Ends the stream to the simulator only."""
        self._call(self._each, lambda pair: pair.end(pair.near))

    def close(self) -> None:
        """Ends the proxy.

        Raises:
            RuntimeError: the proxy does not end; its connections and its loop would stay open.
        """
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(10)
        if self._thread.is_alive():
            raise RuntimeError("the proxy did not end within 10 s")

    # ---------------------------------------------------------------- inside

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._serve())

    def _call(self, act: Callable[..., Any], *args: Any) -> None:
        done: Future[None] = Future()

        def run() -> None:
            try:
                act(*args)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._loop.call_soon_threadsafe(run)
        done.result(10)

    def _set_delay(self, seconds: float) -> None:
        self._delay_s = seconds

    def _set_refusing(self, on: bool) -> None:
        self._refusing = on

    def _each(self, act: Callable[[_ProxiedConnection], Any]) -> None:
        affected = 0
        for pair in list(self._pairs):
            with contextlib.suppress(OSError, RuntimeError):  # it is just closing
                act(pair)
                affected += 1
        if not affected:
            raise RuntimeError("there was no connection for the fault")

    async def _serve(self) -> None:
        self._passing.set()
        server = await asyncio.start_server(self._connected, sock=self._socket)
        async with server:
            await self._stopped.wait()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(OSError):
                await self._forward(reader, writer)
        except asyncio.CancelledError:
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            return
        there, far = await asyncio.open_connection(*self._upstream())
        for end in (writer, far):
            end.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pair = _ProxiedConnection(writer, far)
        self._pairs.add(pair)
        try:
            await asyncio.gather(self._pump(pair, reader, far), self._pump(pair, there, writer))
        finally:
            self._pairs.discard(pair)
            far.transport.abort()

    async def _pump(self, pair: _ProxiedConnection, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(RECEIVE):
            if not self._passing.is_set():
                self.late += len(data)
                await self._passing.wait()
            if self._delay_s:
                self.late += len(data)
                await asyncio.sleep(self._delay_s)
            if pair.truncate and sink is pair.far:
                sink.write(data[: len(data) // 2])
                await asyncio.sleep(0.05)
                _reset(pair)
                return
            if sink in pair.closed:
                continue
            sink.write(data)
            await sink.drain()
        await self._passing.wait()
        if sink in pair.closed:
            return
        with contextlib.suppress(OSError, RuntimeError):
            sink.write_eof()


def _truncate(pair: _ProxiedConnection) -> None:
    pair.truncate = True


def _reset(pair: _ProxiedConnection) -> None:
    """Closes both ends so that the peers see a reset, not an end."""
    for end in (pair.near, pair.far):
        end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.transport.abort()
