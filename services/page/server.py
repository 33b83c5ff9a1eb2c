"""Answers a browser: static files, and what the files of runs say. It only reads, and nothing of a run waits for it.

| | |
|---|---|
| consumes | the files of runs, which their monitors and services write |
| produces | answers to GET; a stream of the present state while a page is open |
| waits for | requests; the next second |
| unblocked by | a browser |
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import quote

import anyio
import anyio.to_thread
import numpy as np
import uvicorn
from numpy.typing import NDArray
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from sparring.pipeline.files import Json
from sparring.pipeline.monitoring.files import to_json
from sparring.services.page.history import NotFound, find
from sparring.services.page.runs import Runs, load
from sparring.services.page.table import Axis

T = TypeVar("T")

ASSETS: Final = Path(__file__).parent / "assets"
_TICK_S: Final = 1.0
"""Seconds between two looks at the state of a run; services publish theirs about as often."""
_LIST_TICKS: Final = 2
"""Ticks between two looks at the list of all runs."""
_LIST_SHARE: Final = 0.02
"""Share of the time that looks at the list may take: a folder with thousands of runs is looked at less often."""
_READ_S: Final = 0.5
"""Seconds for which an answer may read a long run that has not been read: others wait meanwhile."""
_SLOW_S: Final = 30.0
"""Seconds after which a browser that does not take what is sent to it loses its connection."""
_SILENT_S: Final = 10.0
"""Seconds after which a connection without a request ends: it is one of those that there may be."""
_COOKIE: Final = "sparring_page"
_MOST_POINTS: Final = 4000
_MOST_CONNECTIONS: Final = 100
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


class Guard:
    """A Guard answers 421 to requests for another host, and 401 to those without the token.

    A page from anywhere can let its name point to this machine (DNS rebinding); its requests name that host.

    Args:
        app: answers all others.
        hosts: names for which it answers, beside the address at which a request arrives.
        token: that a request must show, in the cookie that the printed address sets or as a bearer; "" for none.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], token: str) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or passes it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await self._answer(scope)(scope, receive, send_guarded)

    def _answer(self, scope: Scope) -> ASGIApp:
        host = _host_of(Headers(scope=scope).get("host", ""))
        if host not in self._hosts and host != (scope.get("server") or ("",))[0]:
            return PlainTextResponse(f"got another host than {', '.join(sorted(self._hosts))}; see --host\n", 421)
        if not self._token:
            return self._app
        request = Request(scope)
        if request.url.path == "/" and self._knows(request.query_params.get("token", "")):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(_COOKIE, self._token, httponly=True, secure=True, samesite="strict")
            return answer
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._knows(request.cookies.get(_COOKIE, "")) or self._knows(bearer):
            return self._app
        return PlainTextResponse("got no token; expected the address that `sparring page` prints\n", 401)

    def _knows(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self._token.encode())


def _host_of(header: str) -> str:
    """Returns the name in a Host header, without the port."""
    name = header.lower()
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]


def page_token(token: str) -> str:
    """Returns the token of the page for a folder of keys: who has it can read the page, and connect no simulator."""
    return hmac.new(token.encode(), b"page", sha256).hexdigest()


class Page:
    """A Page answers requests about the runs below a folder.

    Args:
        runs: that it shows.
    """

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._one_reader = anyio.CapacityLimiter(1)  # the tables are not for two threads
        self._one_lister = anyio.CapacityLimiter(1)  # a long run that is read does not hold up the list
        self._listing = anyio.Lock()
        self._listed: tuple[float, dict[str, bytes]] = (-math.inf, {})  # with the time until which it holds

    def app(self, hosts: Collection[str], token: str = "") -> Starlette:
        """Returns the application."""
        routes = [
            Route("/", lambda _: FileResponse(ASSETS / "index.html")),
            Route("/api/events", self.events),
            Route("/api/run", self.run),
            Route("/api/league", self.league),
            Route("/api/replays", self.replays),
            Route("/api/replay", self.replay),
            Route("/api/series", self.series),
            Route("/api/csv", self.csv),
            Mount("/assets", StaticFiles(directory=ASSETS)),
        ]
        return Starlette(routes=routes, middleware=[Middleware(Guard, hosts=hosts, token=token)])

    async def _answer(self, read: Callable[[], Response]) -> Response:
        """Returns the answer that `read` makes in a thread; 404 for what does not exist, 422 for damaged files."""
        try:
            return await anyio.to_thread.run_sync(read, limiter=self._one_reader)
        except NotFound as error:
            return PlainTextResponse(f"{error}\n", 404)
        except Exception as error:  # whatever the files of a run hold, the page goes on
            return PlainTextResponse(f"got files of a run that cannot be read ({error!r:.200})\n", 422)

    # ---------------------------------------------------------------- what it answers

    async def run(self, request: Request) -> Response:
        """Describes a run."""
        return await self._answer(lambda: _json(self._runs.describe(request.query_params.get("run", ""))))

    async def league(self, request: Request) -> Response:
        """Describes the matches of a run."""
        return await self._answer(lambda: _json(self._runs.league(request.query_params.get("run", ""))))

    async def replays(self, request: Request) -> Response:
        """Lists the recorded matches of a run."""
        return await self._answer(lambda: _json(self._runs.replays(request.query_params.get("run", ""))))

    async def replay(self, request: Request) -> Response:
        """Returns a recorded match, or a video."""

        def read() -> Response:
            path = self._runs.replay(request.query_params.get("run", ""), request.query_params.get("name", ""))
            kind = "image/gif" if path.suffix == ".gif" else "text/plain"
            return Response(path.read_bytes(), media_type=kind)

        return await self._answer(read)

    async def series(self, request: Request) -> Response:
        """Returns columns of a behavior, merged to about as many rows as are asked for; `encoded` says how.

        Of a long run these are samples at first. Each question for the `whole` reads on; a comparison does without it.
        """
        asked = request.query_params
        axis: Axis = "time" if asked.get("axis") == "time" else "step"
        try:
            begin, end = float(asked.get("begin", -math.inf)), float(asked.get("end", math.inf))
            points = max(2, min(_MOST_POINTS, int(asked.get("points", 600))))
        except ValueError as error:
            return PlainTextResponse(f"got {error!s:.200}; expected numbers\n", 400)

        def read() -> Response:
            history = self._runs.history(asked.get("run", ""), _READ_S if "whole" in asked else 0.0)
            known = find(history.tables, asked.get("behavior", "")).columns
            names = [name for name in asked.getlist("name") if name in known] if "name" in asked else list(known)
            rows = history.query(asked.get("behavior", ""), names, axis, begin, end, points)
            content = encoded(names, rows.axes, rows.values, is_whole=history.is_whole)
            return Response(content, media_type="application/octet-stream")

        return await self._answer(read)

    async def csv(self, request: Request) -> Response:
        """Returns all that a behavior has written, as CSV."""
        run, behavior = (request.query_params.get(name, "") for name in ("run", "behavior"))

        def read() -> Response:
            history = self._runs.history(run, math.inf)
            find(history.tables, behavior)  # before the answer begins
            lines = history.csv(behavior)
            name = quote(f"{run}-{behavior}.csv".replace("/", "-"), errors="replace")
            disposition = f"attachment; filename*=UTF-8''{name}"
            return StreamingResponse(lines, media_type="text/csv", headers={"Content-Disposition": disposition})

        return await self._answer(read)

    async def events(self, request: Request) -> Response:
        """Streams the list of runs, of which later only the changed ones follow, and the state of one run."""
        run = request.query_params.get("run")

        async def stream() -> AsyncIterator[dict[str, str]]:
            sent: dict[str, bytes] = {}
            tick, status = 0, b""
            while True:
                if tick % _LIST_TICKS == 0:
                    listed = await self._list()
                    names = listed.keys() | sent.keys()
                    changed = [_pair(name, listed.get(name)) for name in names if listed.get(name) != sent.get(name)]
                    if changed or not tick:
                        yield {"event": "runs", "data": "{" + ",".join(changed) + "}"}
                    sent = listed
                if run is not None and status != (status := await self._look(partial(self._status, run))):
                    yield {"event": "status", "data": status.decode()}
                tick += 1
                await anyio.sleep(_TICK_S)

        return EventSourceResponse(stream())

    async def _look(self, read: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(read, limiter=self._one_lister)

    async def _list(self) -> dict[str, bytes]:
        """Returns the encoded entry of each run; pages that are open at the same time share one look."""
        async with self._listing:
            begin = anyio.current_time()
            if begin >= self._listed[0]:
                listed = await self._look(self._runs.overview)
                now = anyio.current_time()
                self._listed = now + max(_TICK_S * _LIST_TICKS / 2, (now - begin) / _LIST_SHARE), listed
            return self._listed[1]

    def _status(self, run: str) -> bytes:
        try:
            folder = self._runs.folder(run)
            return to_json({**load(folder / "status.json"), "processes": load(folder / "processes.json")})
        except NotFound:  # it was removed
            return b"{}"


def encoded(
    names: Iterable[str], axes: NDArray[np.float64], values: NDArray[np.float32], *, is_whole: bool = True
) -> bytes:
    """Returns rows for a browser, in little-endian order.

    The length of what follows (4 bytes), JSON with `names`, `rows` and `isWhole`, padded to a multiple of 8; steps,
    then times (64 bits each); for each name the means, the lowest and the highest values (32 bits each).
    """
    head = to_json({"names": list(names), "rows": len(axes), "isWhole": is_whole})
    head += b" " * (-(len(head) + 4) % 8)
    columns = np.ascontiguousarray(values.transpose(1, 2, 0), "<f4")
    return struct.pack("<I", len(head)) + head + np.ascontiguousarray(axes.T, "<f8").tobytes() + columns.tobytes()


def _pair(name: str, entry: bytes | None) -> str:
    return f"{json.dumps(name)}:{'null' if entry is None else entry.decode()}"


def _json(content: Json) -> Response:
    return Response(to_json(content), media_type="application/json")


def listening(host: str, port: int | None, usual: int) -> socket.socket:
    """Returns a socket that listens; without a port at the usual one, or at a free one where that is in use.

    Raises:
        OSError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, usual if port is None else port), family=family)
    except OSError:
        if port is not None:
            raise
        return socket.create_server((host, 0), family=family)


class Connection(H11Protocol):
    """A Connection ends where no request follows, or no one takes the answer: it is one of those that there may be."""

    on_lost: Callable[[], object] = staticmethod(lambda: None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Makes room for another connection."""
        super().connection_lost(exc)
        self.on_lost()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Waits for the first request."""
        super().connection_made(transport)
        self._expect_request()

    def pause_writing(self) -> None:
        """Waits for the browser to take what was sent."""
        super().pause_writing()
        self._slow = self.loop.call_later(_SLOW_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Goes on."""
        super().resume_writing()
        self._slow.cancel()

    def on_response_complete(self) -> None:
        """Waits for the next request."""
        super().on_response_complete()
        self._expect_request()

    def _expect_request(self) -> None:
        self.loop.call_later(_SILENT_S, self._end_unless_asked, self.cycle)

    def _end_unless_asked(self, last: RequestResponseCycle) -> None:
        if self.cycle is last:
            self.transport.abort()


class Server(uvicorn.Server):
    """Accepts as many connections as there may be at a time; the system lets the others wait.

    uvicorn accepts all, which takes the last file descriptor, and a handshake of TLS may take a minute.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to accept connections."""
        assert sockets
        (listener,) = sockets
        listener.setblocking(False)
        self.servers, self.started = [], True
        self._opening: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept(listener, asyncio.Semaphore(_MOST_CONNECTIONS)))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts no more, and ends the connections."""
        for task in (self._accepting, *self._opening):
            task.cancel()
        await super().shutdown(sockets)

    async def _accept(self, listener: socket.socket, places: asyncio.Semaphore) -> None:
        while True:
            await places.acquire()
            try:
                accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError:  # its browser has gone, or the process may open no more files
                places.release()
                await asyncio.sleep(_TICK_S)
                continue
            task = asyncio.create_task(self._open(accepted, places))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, accepted: socket.socket, places: asyncio.Semaphore) -> None:
        connection = Connection(self.config, self.server_state, {})
        connection.on_lost = places.release
        handshake_s = _SILENT_S if self.config.ssl else None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, accepted, ssl=self.config.ssl, ssl_handshake_timeout=handshake_s
            )
        except OSError:  # no handshake of TLS, so the connection was never made
            places.release()


def server_of(page: Page, hosts: Collection[str], token: str, tls: ssl.SSLContext | None) -> Server:
    """Returns what answers requests; arguments as of `serve`."""
    config = uvicorn.Config(
        page.app(hosts, token),
        lifespan="off",
        ws="none",
        loop="asyncio",
        log_level="error",  # bytes that are no request would fill the console
        access_log=False,  # it would hold the token
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=1,
    )
    config.load()
    config.ssl = tls
    return Server(config)


def serve(page: Page, listener: socket.socket, hosts: Collection[str], token: str, tls: ssl.SSLContext | None) -> None:
    """Answers requests until a signal ends this process.

    Args:
        page: that answers.
        listener: socket, which is closed at the end.
        hosts: names for which it answers.
        token: that a browser must show; "" for none.
        tls: context of the connections; None for plain HTTP.
    """
    server_of(page, hosts, token, tls).run([listener])
