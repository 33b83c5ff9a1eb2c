"""The endpoint for simulators alone: gate, conversations and a stepper that never acts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import structlog
from anyio.abc import ByteStream, SocketAttribute, TaskGroup

from sparring.pipeline.games.goal import Goal
from sparring.pipeline.messages.codec import FrameReader, to_bytes
from sparring.pipeline.messages.simulator import VERSION, Fault, Hello, Reset, Welcome
from sparring.pipeline.monitoring.metrics import LATENCY_BOUNDS, Registry
from sparring.pipeline.settings import parse_settings
from sparring.pipeline.stepping.settings import SteppingSettings
from sparring.pipeline.stepping.stepper import Stepper
from sparring.services.endpoint.admission import ConnectionAcceptor
from sparring.services.endpoint.credentials import Credentials
from sparring.services.endpoint.simulators import DefaultBehaviors, ServerContext, Simulators

SPECS = dict(Goal().behaviors())


def hello(**values: Any) -> Hello:
    """Of a simulator that hosts the game "Goal"."""
    return Hello(**{"version": VERSION, "name": "guest", "behaviors": SPECS, **values})


class End(ByteStream):
    """One end of a connection in memory, which may seem to come from anywhere; it holds a few messages at most."""

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
    """An endpoint, and strangers' ends of connections to it.

    Attributes:
        logged: what was written.
    """

    gate: ConnectionAcceptor
    simulators: Simulators
    stepper: Stepper
    registry: Registry
    tasks: TaskGroup
    logged: list[dict[str, Any]] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)

    def connect(self, host: str = "192.0.2.1", room: int = 4) -> Peer:
        """A new connection."""
        there, here = anyio.create_memory_object_stream[bytes](room), anyio.create_memory_object_stream[bytes](room)
        ours, theirs = End(here[0], there[1], host), End(there[0], here[1])
        self.ends += (ours, theirs)
        self.tasks.start_soon(self.gate.admit, ours)
        return Peer(theirs)

    def counted(self, name: str) -> float:
        """Counter `name`."""
        return dict(self.registry.snapshot(0.0).counters).get(name, 0.0)

    def lines(self, event: str) -> list[dict[str, Any]]:
        """Lines of one event."""
        return [line for line in self.logged if line["event"] == event]


class Peer:
    """The simulator's end of a connection."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self._reader = FrameReader()

    async def say(self, message: Any) -> None:
        """Sends a message, or bytes."""
        await self.stream.send(message if isinstance(message, bytes) else to_bytes(message))

    async def hear(self) -> Any:
        """The next message; None where the connection was closed."""
        while (message := self._reader.next()) is None:
            try:
                self._reader.feed(await self.stream.receive())
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return None
        return message

    async def pour(self, data: bytes, pause_s: float = 0.0) -> None:
        """Sends the same again and again, until the connection is closed."""
        try:
            while True:
                await self.stream.send(data)
                await anyio.sleep(pause_s)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return

    async def come_in(self, **values: Any) -> None:
        """Says Hello and hears the Welcome and the first Reset."""
        await self.say(hello(**values))
        welcome = await self.hear()
        assert isinstance(welcome, Welcome), welcome
        assert isinstance(await self.hear(), Reset)

    async def refused(self) -> Fault:
        """The Fault that ends the conversation."""
        fault = await self.hear()
        assert isinstance(fault, Fault)
        assert await self.hear() is None
        return fault


@asynccontextmanager
async def endpoint(
    credentials: Credentials | None = None, unnamed: DefaultBehaviors | None = None, **values: Any
) -> AsyncIterator[Endpoint]:
    """An endpoint with some settings; what is still open at the end is broken off."""
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
            known=lambda: None,
            unnamed=unnamed,
        )
        simulators = Simulators(stepper, context)
        gate = ConnectionAcceptor(credentials or Credentials(), simulators.guard, simulators.serve)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(simulators.watch_silence)
            made = Endpoint(gate, simulators, stepper, registry, tasks, logged)
            try:
                yield made
            finally:
                simulators.stopping = True
                tasks.cancel_scope.cancel()
                for end in made.ends:
                    end.close()


def secrets_of(keys: Path) -> list[str]:
    """What must stand nowhere: the token, and a line out of each private key."""
    private = [path.read_text().splitlines()[1] for path in sorted((keys / "tls").glob("*.key"))]
    return [(keys / "token").read_text().strip(), *private]
