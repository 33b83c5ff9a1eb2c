"""The connection to a Unity player, called by one over real gRPC."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest

from sparring.pipeline.bridges.unity import channels
from sparring.pipeline.bridges.unity import connection as players
from sparring.pipeline.bridges.unity.connection import GONE, Event, PlayerConnection
from sparring.pipeline.bridges.unity.conversation import PlayerMessage
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.messages.simulator import Act, BehaviorActions, Fault, Player, Reset, Sampler
from tests.simulation.unity_bridge import LONG_S, ManualPlayer, agents, introduction, manual_player, message
from tests.simulation.unity_player_peer import Message

T = TypeVar("T")
QUIT = 2
SETTINGS = channels.parameters({"engine": 1.0}, {})


class LoopThread:
    """Runs an event loop on a thread, as stepping does."""

    def __init__(self) -> None:
        self.own = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self.own.run_forever)
        self._thread.start()

    def do(self, work: Callable[[], T]) -> T:
        """Runs `work` on the loop; returns or raises what it does."""

        async def done() -> T:
            return work()

        return self.begin(done()).result(LONG_S)

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts `work` on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.own)

    def end(self) -> None:
        self.do(lambda: self.own.call_soon(self.own.stop))
        self._thread.join(LONG_S)
        self.own.run_until_complete(self.own.shutdown_default_executor())
        self.own.close()


@contextmanager
def loop() -> Iterator[LoopThread]:
    made = LoopThread()
    try:
        yield made
    finally:
        made.end()


@dataclass
class Scene:
    """A connection, its events, and a player that the test drives."""

    loop: LoopThread
    connection: PlayerConnection
    doll: ManualPlayer
    events: queue.SimpleQueue[Event]
    now: list[float]
    phases: list[str] = field(default_factory=list)

    def next(self) -> PlayerMessage | Fault:
        """Returns the next event that is no phase."""
        while isinstance(event := self.events.get(timeout=LONG_S), str):
            self.phases.append(event)
        return event

    def begin(self, reset: Reset | None = None) -> PlayerMessage:
        """Runs the conversation up to the first decisions, whose call stays open."""
        received = self.doll.ask(introduction()).unity_input.rl_initialization_input
        assert (received.seed, received.num_areas) == (11, 3)
        call = self.doll.call(message())
        assert self.next() == PlayerMessage(kind="ready")  # ready
        self.loop.do(lambda: self.connection.answer(reset or Reset()))
        self.reset = Message.FromString(call.result(LONG_S)).unity_input.rl_input
        assert self.reset.command == 1
        self.doll.open = self.doll.call(agents(known=True, count=2))
        event = self.next()
        assert isinstance(event, PlayerMessage)
        return event

    def answer(self, act: Act) -> Any:
        """Answers the open call; returns the answer as the player reads it."""
        self.loop.do(lambda: self.connection.answer(act))
        return Message.FromString(self.doll.open.result(LONG_S)).unity_input.rl_input

    def disconnect(self, doll: ManualPlayer) -> None:
        """Closes a player's channel, and waits until the server has noticed."""
        doll.channel.close()
        while self.loop.do(lambda: self.connection._server._connections):
            pass

    def reopen(self) -> PlayerConnection:
        """Returns another connection on the same port."""
        port, loop = self.connection.port, self.loop
        player = Player(protocol="unity", port=port, settings="", areas=1, connect_s=1.0, timeout_s=1.0)
        return loop.do(
            lambda: PlayerConnection(player, seed=0, on_event=lambda _: None, clock=lambda: 0.0, loop=loop.own)
        )


@pytest.fixture
def scene() -> Iterator[Scene]:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    now = [100.0]
    player = Player(protocol="unity", port=0, settings=SETTINGS.hex(), areas=3, connect_s=60.0, timeout_s=5.0)
    with loop() as running:
        connection = running.do(
            lambda: PlayerConnection(player, seed=11, on_event=events.put, clock=lambda: now[0], loop=running.own)
        )
        with manual_player(connection.port) as doll:
            yield Scene(running, connection, doll, events, now)
            running.begin(connection.close()).result(LONG_S)


def act(*actions: float, **fields: Any) -> Act:
    rows = np.array(actions, np.float32)[:, None]
    none = np.zeros((len(rows), 0), np.int32)
    one = BehaviorActions(behavior="Doll?team=0", agents=np.arange(len(rows)), continuous=rows, discrete=none)
    return Act(sequence=0, actions=(one,), **fields)


def test_messages_of_the_player_reach_the_loop_and_are_answered(scene: Scene) -> None:
    """New behaviors arrive with their first agents, phases in order, and actions by agent."""
    event = scene.begin()
    assert list(event.behaviors) == ["Doll?team=0"]
    (report,) = event.reports
    assert report.decisions is not None
    assert report.decisions.agents.tolist() == [0, 1]
    actions = scene.answer(act(0.25, -0.5)).agent_actions["Doll?team=0"].value
    assert [list(one.continuous_actions) for one in actions] == [[0.25], [-0.5]]
    scene.doll.open = scene.doll.call(agents(count=2, observed=0.75))
    event = scene.next()
    assert isinstance(event, PlayerMessage)
    assert not event.behaviors
    assert scene.phases == ["connected", "initialized", "first reset", "stepping"]


def test_the_player_receives_parameters_and_settings(scene: Scene) -> None:
    """Settings are sent once, parameters and samplers with the Reset or Act that brings them."""
    sampler = Sampler(kind="uniform", values=(0.0, 1.0), seed=4)
    scene.begin(Reset(parameters={"mass": 2.0, "wind": 0.5}, samplers={"wind": sampler}))
    wind = channels.parameters({}, {"wind": sampler})
    assert scene.reset.side_channel == SETTINGS + wind + channels.parameters({"mass": 2.0}, {})
    assert scene.answer(act(0, 0, parameters={"mass": 3.0})).side_channel == channels.parameters({"mass": 3.0}, {})
    scene.doll.open = scene.doll.call(agents(count=2))
    scene.next()
    scene.loop.do(lambda: scene.connection.answer(Reset(parameters={"mass": 4.0})))
    received = Message.FromString(scene.doll.open.result(LONG_S)).unity_input.rl_input
    assert (received.command, received.side_channel) == (1, channels.parameters({"mass": 4.0}, {}))


def test_a_message_without_agents_is_answered_without_the_loop(scene: Scene) -> None:
    """After the timeout the conversation ends, as such a player would play for ever."""
    scene.begin()
    scene.answer(act(0, 0))
    assert scene.doll.ask(message()).unity_input.rl_input.command == 0
    assert scene.next() == PlayerMessage(kind="output")
    scene.now[0] += 5.1
    assert scene.doll.ask(message()).unity_input.rl_input.command == QUIT
    assert scene.next() == PlayerMessage(kind="output")
    fault = scene.next()
    assert isinstance(fault, Fault)
    assert "no agent that wanted a decision or ended in 5 s" in fault.got
    assert "Decision Requester" in fault.remedy


@pytest.mark.parametrize(("begun", "late_s", "got"), [(False, 60.1, "nothing in 60 s"), (True, 5.1, "nothing in 5 s")])
def test_a_silent_player_is_overdue(begun: bool, late_s: float, got: str, scene: Scene) -> None:
    """The first call has a longer timeout, and no timeout runs while the player waits for the trainer."""
    if begun:
        scene.begin()
        assert scene.connection.overdue(1e9) is None
        scene.answer(act(0, 0))
    assert scene.connection.overdue(scene.now[0] + late_s - 0.2) is None
    fault = scene.connection.overdue(scene.now[0] + late_s)
    assert fault is not None
    assert fault.got == got


def nonsense() -> Any:
    made = agents(count=1, observed=float("nan"))
    made.unity_output.rl_output.agentInfos["Doll?team=0"].value[0].reward = float("nan")
    return made


@pytest.mark.parametrize(
    ("last", "code", "got"),
    [
        (nonsense, "player", "NaN or infinity"),
        (lambda: message(400, "out of memory"), "gone", "an orderly end of the game (out of memory)"),
        (lambda: introduction("1.5.0"), "player", "introduction in the middle"),
    ],
    ids=["NaN", "farewell", "another introduction"],
)
def test_an_unusable_message_ends_the_connection(last: Callable[[], Any], code: str, got: str, scene: Scene) -> None:
    """The fault names the cause, and the player receives the command to quit."""
    scene.begin()
    scene.answer(act(0, 0))
    answer = scene.doll.ask(last())
    assert answer.unity_input.rl_input.command == QUIT
    fault = scene.next()
    assert isinstance(fault, Fault)
    assert fault.code == code
    assert got in fault.got


def test_a_cancelled_call_is_reported(scene: Scene) -> None:
    scene.begin()
    scene.doll.open.cancel()
    fault = scene.next()
    assert isinstance(fault, Fault)
    assert (fault.code, fault.got) == (GONE, "the player broke the connection")


def test_a_call_after_a_cancelled_call_is_refused(scene: Scene) -> None:
    """The player has missed an answer, so its connection has ended."""
    scene.begin()
    scene.doll.open.cancel()
    assert isinstance(scene.next(), Fault)
    call = scene.doll.call(introduction())
    with pytest.raises(grpc.RpcError):
        call.result(LONG_S)
    assert (call.code(), call.details()) == (grpc.StatusCode.UNAVAILABLE, "the trainer has ended")
    assert scene.events.empty()


def test_a_player_that_reconnects_between_two_calls_continues(scene: Scene) -> None:
    """A player that introduces itself again is reported at once, without a timeout."""
    scene.begin()
    scene.answer(act(0, 0))
    scene.disconnect(scene.doll)
    with manual_player(scene.connection.port) as reopen:
        scene.doll.open = reopen.call(agents(count=2, observed=0.75))
        assert isinstance(scene.next(), PlayerMessage)
        scene.answer(act(0, 0))
        scene.disconnect(reopen)
    with manual_player(scene.connection.port) as another:
        assert another.ask(introduction()).unity_input.rl_input.command == QUIT
        fault = scene.next()
    assert isinstance(fault, Fault)
    assert "introduction in the middle" in fault.got


@pytest.mark.parametrize("last", [None, agents(count=2), message()], ids=["waits", "acts", "has no agents"])
def test_the_player_receives_the_command_to_quit_at_the_end(last: Any, scene: Scene) -> None:
    """A waiting player receives it at once, any other with its next call."""
    scene.begin()
    if last is not None:
        scene.answer(act(0, 0))
    scene.loop.do(scene.connection.part)
    call = scene.doll.open if last is None else scene.doll.call(last)
    assert Message.FromString(call.result(LONG_S)).unity_input.rl_input.command == QUIT
    assert scene.connection.overdue(1e9) is None


def test_closing_frees_the_port(scene: Scene) -> None:
    """A waiting player receives the command to quit first."""
    scene.begin()
    scene.loop.begin(scene.connection.close()).result(LONG_S)
    assert Message.FromString(scene.doll.open.result(LONG_S)).unity_input.rl_input.command == QUIT
    connection = scene.reopen()
    with pytest.raises(SettingsError, match=f"got port {connection.port}"):
        scene.reopen()
    scene.loop.begin(connection.close()).result(LONG_S)


def test_a_large_message_is_read_on_a_thread(scene: Scene) -> None:
    """The loop stays free meanwhile, and content and errors of the message are reported as usual."""
    scene.begin()
    scene.answer(act(0, 0))
    scene.doll.open = scene.doll.call(agents(count=3000, observed=0.5))
    event = scene.next()
    assert isinstance(event, PlayerMessage)
    assert event.reports[0].decisions is not None
    assert len(event.reports[0].decisions.agents) == 3000
    scene.answer(act(*[0.0] * 3000))
    scene.doll.open = scene.doll.call(agents(count=3000, observed=float("nan")))
    fault = scene.next()
    assert isinstance(fault, Fault)
    assert "NaN or infinity" in fault.got
    assert Message.FromString(scene.doll.open.result(LONG_S)).unity_input.rl_input.command == QUIT


def test_a_player_that_computes_at_the_end_still_receives_the_command_to_quit(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulator that launched it may have disconnected already."""
    monkeypatch.setattr(players, "LAST_CALL_S", LONG_S)
    scene.begin()
    scene.answer(act(0, 0))
    scene.loop.do(scene.connection.part)
    closing = scene.loop.begin(scene.connection.close())
    scene.loop.do(lambda: None)
    assert not closing.done()
    call = scene.doll.open = scene.doll.call(agents(count=2))
    assert Message.FromString(call.result(LONG_S)).unity_input.rl_input.command == QUIT
    closing.result(LONG_S)


def test_a_player_that_never_calls_again_does_not_keep_the_connection_open(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(players, "LAST_CALL_S", 0.0)
    scene.begin()
    scene.answer(act(0, 0))
    scene.loop.do(scene.connection.part)
    scene.loop.begin(scene.connection.close()).result(LONG_S)
    scene.loop.begin(scene.reopen().close()).result(LONG_S)
