"""The endpoint for simulators alone: acceptor, conversations and a stepper that never acts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import structlog
from anyio.abc import ByteStream, SocketAttribute, TaskGroup

from sparring.pipeline.games.goal import Goal
from sparring.pipeline.messages.codec import FrameReader, to_bytes
from sparring.pipeline.messages.simulator import (
    VERSION,
    BehaviorReport,
    Decisions,
    Fault,
    Hello,
    Reset,
    Statistic,
    Step,
    Welcome,
)
from sparring.pipeline.monitoring.metrics import LATENCY_BOUNDS, Registry
from sparring.pipeline.settings import parse_settings
from sparring.pipeline.stepping.settings import SteppingSettings
from sparring.pipeline.stepping.stepper import Stepper
from sparring.services.endpoint.admission import ConnectionAcceptor, Credentials
from sparring.services.endpoint.peers import DefaultBehaviors, ServerContext
from sparring.services.endpoint.simulators import Simulators
from sparring.services.endpoint.websocket import upgrade_from

SPECS = dict(Goal().behaviors())


def hello(**values: Any) -> Hello:
    """Returns the Hello of a simulator that hosts the game "Goal"."""
    return Hello(**{"version": VERSION, "name": "visitor", "behaviors": SPECS, **values})


def goal_step(agents: int = 2, sequence: int = 0, statistics: tuple[Statistic, ...] = ()) -> Step:
    """Returns a Step of `agents` agents of "Goal"."""
    rows = Decisions(
        agents=np.arange(agents),
        observations=(np.ones((agents, 1), np.float32),),
        rewards=np.zeros(agents, np.float32),
    )
    report = BehaviorReport(behavior="Goal?team=0", decisions=rows)
    return Step(sequence=sequence, reports=(report,), statistics=statistics)


class End(ByteStream):
    """One end of an in-memory connection, which can appear to come from any address and buffers few messages."""

    def __init__(self, send: Any, receive: Any, host: str = "") -> None:
        self._send, self._receive, self._host = send, receive, host

    @property
    def extra_attributes(self) -> Any:
        return {SocketAttribute.remote_address: lambda: (self._host, 1)} if self._host else {}

    async def send(self, item: bytes) -> None:
        await self._send.send(item)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        item: bytes = await self._receive.receive()
        assert len(item) <= max_bytes
        return item

    async def send_eof(self) -> None:
        await self._send.aclose()

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        self._send.close()
        self._receive.close()


@dataclass
class Endpoint:
    """An endpoint that runs, and the means to connect to it and to read its counters and log."""

    acceptor: ConnectionAcceptor
    simulators: Simulators
    stepper: Stepper
    registry: Registry
    tasks: TaskGroup
    logged: list[dict[str, Any]] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)

    def connect(self, host: str = "192.0.2.1", capacity: int = 4) -> Peer:
        """Opens a connection that seems to come from `host` and buffers up to `capacity` messages each way."""
        there, here = (anyio.create_memory_object_stream[bytes](capacity) for _ in range(2))
        ours, theirs = End(here[0], there[1], host), End(there[0], here[1])
        self.ends += (ours, theirs)
        self.tasks.start_soon(self.acceptor.admit, ours)
        return Peer(theirs)

    def accept_websockets(self, *origins: str) -> None:
        """From now on connections must be WebSockets, of programs or of pages with these origins."""
        self.acceptor.upgrade = upgrade_from(origins)

    def counter(self, name: str) -> float:
        """Returns the value of counter `name`, 0 if it was never incremented."""
        return dict(self.registry.snapshot(0.0).counters).get(name, 0.0)

    def log_lines(self, event: str) -> list[dict[str, Any]]:
        """Returns the log lines of one event."""
        return [line for line in self.logged if line["event"] == event]


class Peer:
    """The simulator's end of a connection."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self._reader = FrameReader()

    async def send(self, message: Any) -> None:
        """Sends a message, or raw bytes."""
        await self.stream.send(message if isinstance(message, bytes) else to_bytes(message))

    async def receive(self) -> Any:
        """Returns the next message, or None once the connection is closed."""
        while (message := self._reader.next()) is None:
            try:
                self._reader.feed(await self.stream.receive())
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return None
        return message

    async def send_repeatedly(self, data: bytes, pause_s: float = 0.0) -> None:
        """Sends the same bytes until the connection is closed."""
        try:
            while True:
                await self.stream.send(data)
                await anyio.sleep(pause_s)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return

    async def handshake(self, **values: Any) -> None:
        """Sends Hello and receives the Welcome and the first Reset."""
        await self.send(hello(**values))
        welcome = await self.receive()
        assert isinstance(welcome, Welcome), welcome
        assert isinstance(await self.receive(), Reset)

    async def receive_fault(self) -> Fault:
        """Returns the Fault that ends the conversation."""
        fault = await self.receive()
        assert isinstance(fault, Fault)
        assert await self.receive() is None
        return fault


@asynccontextmanager
async def endpoint(
    credentials: Credentials | None = None, unnamed: DefaultBehaviors | None = None, **values: Any
) -> AsyncIterator[Endpoint]:
    """Runs an endpoint with the given settings; connections that are still open at the end are closed."""
    settings = SteppingSettings.model_validate({"address": "unix:///nowhere", **values})
    behaviors = parse_settings("behaviors: {Goal: }", "test").settings.behaviors
    registry, stepper = (
        Registry("stepping-0", "test"),
        Stepper({}, max_agents=2**20, agents_each=settings.limits.agents),
    )
    for name in ("action_latency_s", "backpressured_s"):
        registry.histogram(name, LATENCY_BOUNDS)
    with structlog.testing.capture_logs() as logged:
        context = ServerContext(
            settings=settings,
            behaviors=behaviors,
            scripts={},
            seed=1,
            clock=anyio.current_time,
            registry=registry,
            log=structlog.get_logger(),
            arrived=lambda: None,
            frame_arrived=lambda: None,
            known=lambda: None,
            unnamed=unnamed,
        )
        simulators = Simulators(stepper, context)
        required = credentials or Credentials()
        acceptor = ConnectionAcceptor(required, settings.limits, simulators.rejections, simulators.serve)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(simulators.watch_silence)
            running = Endpoint(acceptor, simulators, stepper, registry, tasks, logged)
            try:
                yield running
            finally:
                simulators.stopping = True
                tasks.cancel_scope.cancel()
                for end in running.ends:
                    end.close()


def secrets_of(keys: Path) -> list[str]:
    """Returns what no log or message may contain: the token and one line of each private key."""
    private = [path.read_text().splitlines()[1] for path in sorted((keys / "tls").glob("*.key"))]
    return [(keys / "token").read_text().strip(), *private]
