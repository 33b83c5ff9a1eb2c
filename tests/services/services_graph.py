"""The whole graph in one event loop, with queues and sockets in memory and any clock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import structlog
from anyio.abc import ByteStream, TaskGroup

from sparring.pipeline.messages.codec import FrameReader, to_bytes
from sparring.pipeline.messages.simulator import VERSION, Act, Bye, Fault, Hello, Ping, Reset, Step
from sparring.pipeline.messages.state import AssemblyState, LearnerState, RunState
from sparring.pipeline.queues.memory import MemoryHub, MemoryTransport
from sparring.pipeline.settings import parse_settings
from sparring.pipeline.simulation.counting import StepCounter
from sparring.pipeline.simulation.game import Game, ScriptedGame
from sparring.pipeline.simulation.parameters import Parameters
from sparring.services.process.runtime import Context, Run
from sparring.services.stages import assembly, coordination, learning, stepping
from sparring.services.supervision.topology import build
from tests.services import inline

SERVICES: dict[str, Callable[[Context], Any]] = {
    "stepping-0": stepping.run,
    "assembly": assembly.run,
    "learning-Goal": learning.run,
    "coordination": coordination.run,
}

BEHAVIOR = """
  {name}:
    trainer_type: {trainer}
    hyperparameters: {{batch_size: 16, buffer_size: {buffer_size}, {hyper}}}
    network_settings: {{hidden_units: 8, num_layers: 1{network}}}
    max_steps: {max_steps}
    time_horizon: {horizon}
    reward_signals: {signals}"""
CONFIG = """
behaviors: {behaviors}
pipeline: {{mode: {mode}, recovery_interval: 1, address: "unix:///nowhere"}}
"""


class MemoryStream(ByteStream):
    """One end of a connection in memory."""

    def __init__(self, send: Any, receive: Any) -> None:
        self._send, self._receive = send, receive

    async def send(self, item: bytes) -> None:
        await self._send.send(item)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        item: bytes = await self._receive.receive()
        assert len(item) <= max_bytes
        return item

    async def send_eof(self) -> None:
        await self._send.aclose()

    async def aclose(self) -> None:
        self._send.close()
        self._receive.close()


class MemoryListener:
    """A listener whose connections come from `connect`."""

    def __init__(self) -> None:
        self._send, self._receive = anyio.create_memory_object_stream[Any](100)

    def connect(self) -> MemoryStream:
        """Opens a connection and returns the simulator's end."""
        there, here = anyio.create_memory_object_stream[bytes](100), anyio.create_memory_object_stream[bytes](100)
        try:
            self._send.send_nowait(MemoryStream(here[0], there[1]))
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            for end in (*there, *here):
                end.close()
            raise
        return MemoryStream(there[0], here[1])

    async def serve(self, handler: Callable[[Any], Any], tasks: TaskGroup) -> None:
        async for stream in self._receive:
            tasks.start_soon(handler, stream)

    async def __aenter__(self) -> MemoryListener:
        return self

    async def __aexit__(self, *_: object) -> None:
        while True:
            try:
                await self._receive.receive_nowait().aclose()
            except (anyio.WouldBlock, anyio.EndOfStream):
                break
        self._receive.close()
        self._send.close()


@dataclass
class Graph:
    """A run of one behavior or several.

    Attributes:
        run: description of the run that services read.
        frame_s: virtual seconds per frame of a simulator.
        counts: steps that each simulator counted.
        counted: the same by behavior name.
        faults: Fault messages that simulators received.
    """

    run: Run
    tasks: TaskGroup
    frame_s: float = 0.001
    hub: MemoryHub = field(default_factory=MemoryHub)
    counts: dict[int, int] = field(default_factory=dict)
    counted: dict[int, dict[str, int]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    starts: dict[str, int] = field(default_factory=dict)
    scopes: dict[str, anyio.CancelScope] = field(default_factory=dict)
    stops: dict[str, anyio.Event] = field(default_factory=dict)
    ended: dict[str, anyio.Event] = field(default_factory=dict)
    links: dict[int, anyio.CancelScope] = field(default_factory=dict)
    listener: MemoryListener | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the behaviors."""
        return tuple(self.run.settings.behaviors)

    @property
    def services(self) -> tuple[str, ...]:
        """All services, in the order in which they are stopped."""
        return ("stepping-0", "assembly", *(f"learning-{name}" for name in self.names), "coordination")

    def start(self, name: str) -> None:
        """Starts a service."""
        self.starts[name] = self.starts.get(name, 0) + 1
        self.scopes[name], self.stops[name] = anyio.CancelScope(), anyio.Event()
        self.ended[name] = anyio.Event()
        self.tasks.start_soon(self._serve, name, self.starts[name])

    async def _serve(self, name: str, number: int) -> None:
        start = f"{name}.t-{number}"
        ended = self.ended[name]
        with self.scopes[name]:
            transport = MemoryTransport(self.hub, start=start)
            async with transport:
                context = Context(
                    run=self.run,
                    service=name,
                    start=start,
                    first=number == 1,
                    transport=transport,
                    stop=self.stops[name],
                    log=structlog.get_logger(),
                    compute=inline,
                    listen=self._listen,
                )
                try:
                    await SERVICES.get(name, learning.run)(context)
                except anyio.get_cancelled_exc_class():
                    transport.abandon()
                    raise
        ended.set()

    async def _listen(self, _address: str) -> Any:
        self.listener = MemoryListener()
        return self.listener

    async def kill(self, name: str) -> None:
        """Crashes a service, and starts it again a little later."""
        self.scopes[name].cancel()
        await self.ended[name].wait()
        await anyio.sleep(0.05)
        self.start(name)

    def disconnect(self, number: int) -> None:
        """Breaks the connection of a simulator, which connects again a little later."""
        self.links[number].cancel()

    async def simulate(self, number: int, game: Game) -> None:
        """Plays a game forever, and connects again whenever the connection breaks."""
        counter, parameters = StepCounter(), Parameters()
        while True:
            try:
                if self.listener is None:
                    raise anyio.BrokenResourceError
                with anyio.CancelScope() as self.links[number]:
                    async with self.listener.connect() as stream:
                        await self._play(stream, number, game, counter, parameters)
                    return
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                pass
            self._note(number, counter)
            counter.discard_open()
            await anyio.sleep(0.02)

    def _note(self, number: int, counter: StepCounter) -> None:
        self.counts[number] = sum(counter.steps.values())
        self.counted[number] = dict(counter.steps)

    async def _play(
        self, stream: MemoryStream, number: int, game: Game, counter: StepCounter, parameters: Parameters
    ) -> None:
        scripts = game.scripts() if isinstance(game, ScriptedGame) else {}
        hello = Hello(
            version=VERSION,
            name="goal",
            behaviors=dict(game.behaviors()),
            number=number,
            scripts=dict(scripts),
            process=f"goal-{number}",
            steps=dict(counter.steps),
        )
        await stream.send(to_bytes(hello))
        reader, sequence, due = FrameReader(), 0, anyio.current_time() + 5
        while True:
            with anyio.move_on_at(due) as beat:
                reader.feed(await stream.receive())
            if beat.cancelled_caught:  # a simulator has to ping while it waits
                await stream.send(to_bytes(Ping()))
                due += 5
            while (message := reader.next()) is not None:
                if isinstance(message, Fault):
                    self.faults.append(message)
                    return
                if isinstance(message, Bye):
                    await stream.send(to_bytes(Bye(steps=counter.steps)))
                    self._note(number, counter)
                    return
                if isinstance(message, Reset):
                    counter.discard_open()
                    parameters.replace(message.parameters, message.samplers)
                    reports = game.reset(parameters, message.seed)
                elif isinstance(message, Act):
                    parameters.update(message.parameters, message.samplers)
                    for entry in message.actions:
                        counter.add_open(entry.behavior, entry.agents)
                    await anyio.sleep(self.frame_s)
                    reports = game.step({entry.behavior: entry for entry in message.actions})
                else:
                    continue
                await stream.send(to_bytes(Step(sequence=sequence, reports=tuple(reports))))
                counter.count_report(reports)
                sequence += 1

    def latest(self, service: str, key: str) -> Any:
        """Returns what a service published last under a key."""
        return self.seen[service].records.get(key)

    seen: dict[str, Any] = field(default_factory=dict)

    async def until(self, name: str, reached: Callable[[LearnerState], bool]) -> LearnerState:
        """Waits until `reached` is true for the state of a behavior's learner; returns the state."""
        while not (isinstance(state := self.latest(f"learning-{name}", "state"), LearnerState) and reached(state)):
            await self.seen[f"learning-{name}"].changed()
        return state

    def _finished(self) -> bool:
        state = self.latest("coordination", "run")
        return isinstance(state, RunState) and state.finished

    def describe(self) -> str:
        """Returns the latest publications of every service as text, to explain a run that does not end."""
        return "\n".join(
            f"{name} {key}: {self.latest(name, key)}"
            for name in self.services
            for key in sorted(self.seen[name].records)
        )

    async def finish(self, early: Callable[[], bool] | None = None) -> dict[str, int]:
        """Waits for the end, stops the services in order, and returns the step counts of the first behavior.

        With `early`, it does not wait longer than until that is true after a publication of coordination.
        """
        with anyio.move_on_after(600) as deadline:
            while not (self._finished() or (early is not None and early())):
                await self.seen["coordination"].changed()
        assert not deadline.cancelled_caught, self.describe()
        for name in self.services:
            self.stops[name].set()
            await self.ended[name].wait()
            await anyio.sleep(0.1)
        return self.step_counts(self.names[0])

    def step_counts(self, name: str) -> dict[str, int]:
        """Returns the step counts of a behavior after the end, with `open` counted in each stage."""
        run: RunState = self.latest("coordination", "run")
        learner: LearnerState = self.latest(f"learning-{name}", "state")
        held: AssemblyState = self.latest("assembly", "state")
        open_steps = learner.buffered + learner.training
        open_steps += sum(one.open + one.closed for one in held.held.get(name, {}).values())
        step_counts = run.step_counts[name]
        return {
            **{term: getattr(step_counts, term) for term in ("produced", "trained", "ghost", "stale", "lost")},
            "open": open_steps,
        }


def settings_text(**values: Any) -> str:
    """Returns a small configuration of the behavior "Goal", or of those in `names`."""
    defaults = {"buffer_size": 64, "max_steps": 1000, "horizon": 8, "mode": "overlap", "network": "", "trainer": "ppo"}
    values = {**defaults, "hyper": "num_epoch: 1", "signals": "{extrinsic: {}}", "names": ("Goal",), **values}
    behaviors = "".join(BEHAVIOR.format(name=name, **values) for name in values["names"])
    return CONFIG.format(behaviors=behaviors, **values)


async def begin(
    tasks: TaskGroup, stack: AbstractAsyncContextManager[Any], folder: Path, games: list[Game], **values: Any
) -> Graph:
    """Starts a graph with one simulator for each game."""
    settings = parse_settings(settings_text(**values), "test").settings
    topology = build(settings, run_id="test", directory=folder, seed=1)
    run = topology.run
    run = Run(**{**run.__dict__, "simulators": {"stepping-0": len(games)}})
    graph = Graph(run=run, tasks=tasks)
    watcher = await stack.enter_async_context(MemoryTransport(graph.hub, start="test.1"))  # type: ignore[attr-defined]
    for name in graph.services:
        graph.seen[name] = await watcher.subscribe(name)
        graph.start(name)
    await anyio.sleep(0.01)
    for number, game in enumerate(games):
        tasks.start_soon(graph.simulate, number, game)
    return graph
