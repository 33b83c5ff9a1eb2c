"""The line to a Unity player, called by one over real gRPC."""

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
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.messages.simulator import Act, BehaviorActions, Fault, Player, Reset, Sampler
from sparring.services.endpoint import players
from sparring.services.endpoint.players import GONE, Event, PlayerConnection, PlayerEvent
from tests.simulation.unity_bridge import LONG_S, Doll, agents, introduction, message, player_by_hand
from tests.simulation.unity_player_peer import Message

T = TypeVar("T")
QUIT = 2
SETTINGS = channels.parameter("engine", 1.0)


class Loop:
    """An event loop on a thread, as the line has one in stepping."""

    def __init__(self) -> None:
        self.own = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self.own.run_forever)
        self._thread.start()

    def do(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises on the loop."""

        async def done() -> T:
            return work()

        return self.begin(done()).result(LONG_S)

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """What `work` will return or raise on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.own)

    def end(self) -> None:
        self.do(lambda: self.own.call_soon(self.own.stop))
        self._thread.join(LONG_S)
        self.own.run_until_complete(self.own.shutdown_default_executor())
        self.own.close()


@contextmanager
def loop() -> Iterator[Loop]:
    made = Loop()
    try:
        yield made
    finally:
        made.end()


@dataclass
class Scene:
    """A line, what it tells, and a player by hand."""

    loop: Loop
    line: PlayerConnection
    doll: Doll
    told: queue.SimpleQueue[Event]
    now: list[float]
    phases: list[str] = field(default_factory=list)

    def next(self) -> PlayerEvent | Fault:
        """What is told next that is no phase."""
        while isinstance(event := self.told.get(timeout=LONG_S), str):
            self.phases.append(event)
        return event

    def begin(self, reset: Reset | None = None) -> PlayerEvent:
        """From the introduction to the first decisions, whose call is open at the return."""
        told = self.doll.ask(introduction()).unity_input.rl_initialization_input
        assert (told.seed, told.num_areas) == (11, 3)
        call = self.doll.call(message())
        assert self.next() == PlayerEvent(at=self.now[0])  # ready
        self.loop.do(lambda: self.line.answer(reset or Reset()))
        self.reset = Message.FromString(call.result(LONG_S)).unity_input.rl_input
        assert self.reset.command == 1
        self.doll.open = self.doll.call(agents(known=True, count=2))
        said = self.next()
        assert isinstance(said, PlayerEvent)
        return said

    def answer(self, act: Act) -> Any:
        """The trainer's answer to the open call, as the player reads it."""
        self.loop.do(lambda: self.line.answer(act))
        return Message.FromString(self.doll.open.result(LONG_S)).unity_input.rl_input

    def hang_up(self, doll: Doll) -> None:
        """Closes a player's connection, and has that known."""
        doll.channel.close()
        while self.loop.do(lambda: self.line._server._lines):
            pass

    def again(self) -> PlayerConnection:
        """Another line on the same port."""
        port, loop = self.line.port, self.loop
        player = Player(protocol="unity", port=port, settings="", areas=1, connect_s=1.0, timeout_s=1.0)
        return loop.do(lambda: PlayerConnection(player, seed=0, hear=lambda _: None, clock=lambda: 0.0, loop=loop.own))


@pytest.fixture
def scene() -> Iterator[Scene]:
    told: queue.SimpleQueue[Event] = queue.SimpleQueue()
    now = [100.0]
    player = Player(protocol="unity", port=0, settings=SETTINGS.hex(), areas=3, connect_s=60.0, timeout_s=5.0)
    with loop() as running:
        line = running.do(
            lambda: PlayerConnection(player, seed=11, hear=told.put, clock=lambda: now[0], loop=running.own)
        )
        with player_by_hand(line.port) as doll:
            yield Scene(running, line, doll, told, now)
            running.begin(line.close()).result(LONG_S)


def act(*actions: float, **told: Any) -> Act:
    rows = np.array(actions, np.float32)[:, None]
    none = np.zeros((len(rows), 0), np.int32)
    one = BehaviorActions(behavior="Doll?team=0", agents=np.arange(len(rows)), continuous=rows, discrete=none)
    return Act(sequence=0, actions=(one,), **told)


def test_what_the_player_says_reaches_the_loop_and_the_answer_goes_back(scene: Scene) -> None:
    """New behaviors with their first agents; phases in order; actions by agent."""
    said = scene.begin()
    assert list(said.behaviors) == ["Doll?team=0"]
    (report,) = said.reports
    assert report.decisions is not None
    assert report.decisions.agents.tolist() == [0, 1]
    told = scene.answer(act(0.25, -0.5)).agent_actions["Doll?team=0"].value
    assert [list(one.continuous_actions) for one in told] == [[0.25], [-0.5]]
    scene.doll.open = scene.doll.call(agents(count=2, seen=0.75))
    said = scene.next()
    assert isinstance(said, PlayerEvent)
    assert not said.behaviors
    assert scene.phases == ["connected", "initialised", "first reset", "stepping"]


def test_parameters_and_settings_are_told(scene: Scene) -> None:
    """The settings once, parameters of a Reset and of an Act with it, samplers as such."""
    sampler = Sampler(kind="uniform", values=(0.0, 1.0), seed=4)
    scene.begin(Reset(parameters={"mass": 2.0, "wind": 0.5}, samplers={"wind": sampler}))
    wind = channels.sampler("wind", "uniform", (0.0, 1.0), 4)
    assert scene.reset.side_channel == SETTINGS + wind + channels.parameter("mass", 2.0)
    assert scene.answer(act(0, 0, parameters={"mass": 3.0})).side_channel == channels.parameter("mass", 3.0)
    scene.doll.open = scene.doll.call(agents(count=2))
    scene.next()
    scene.loop.do(lambda: scene.line.answer(Reset(parameters={"mass": 4.0})))
    told = Message.FromString(scene.doll.open.result(LONG_S)).unity_input.rl_input
    assert (told.command, told.side_channel) == (1, channels.parameter("mass", 4.0))


def test_a_message_without_agents_is_answered_without_the_loop(scene: Scene) -> None:
    """For a while; then the player is given up: it would play for ever."""
    scene.begin()
    scene.answer(act(0, 0))
    assert scene.doll.ask(message()).unity_input.rl_input.command == 0
    scene.now[0] += 5.1
    assert scene.doll.ask(message()).unity_input.rl_input.command == QUIT
    fault = scene.next()
    assert isinstance(fault, Fault)
    assert "no agent that wanted a decision or ended in 5 s" in fault.got
    assert "Decision Requester" in fault.remedy


@pytest.mark.parametrize(("begun", "late_s", "got"), [(False, 60.1, "nothing in 60 s"), (True, 5.1, "nothing in 5 s")])
def test_silence_is_overdue(begun: bool, late_s: float, got: str, scene: Scene) -> None:
    """Longer for the first call than for later ones; never while the player waits for the trainer."""
    if begun:
        scene.begin()
        assert scene.line.overdue(1e9) is None
        scene.answer(act(0, 0))
    assert scene.line.overdue(scene.now[0] + late_s - 0.2) is None
    fault = scene.line.overdue(scene.now[0] + late_s)
    assert fault is not None
    assert fault.got == got


def nonsense() -> Any:
    made = agents(count=1, seen=float("nan"))
    made.unity_output.rl_output.agentInfos["Doll?team=0"].value[0].reward = float("nan")
    return made


@pytest.mark.parametrize(
    ("last", "code", "got"),
    [
        (nonsense, "player", "NaN or infinity"),
        (lambda: message(400, "out of memory"), GONE, "a player that ended the conversation (out of memory)"),
        (lambda: introduction("1.5.0"), "player", "introduction in the middle"),
    ],
    ids=["NaN", "farewell", "another introduction"],
)
def test_what_can_not_be_used_ends_the_line(last: Callable[[], Any], code: str, got: str, scene: Scene) -> None:
    """With its cause; the player is told to quit."""
    scene.begin()
    scene.answer(act(0, 0))
    answer = scene.doll.ask(last())
    assert answer.unity_input.rl_input.command == QUIT
    fault = scene.next()
    assert isinstance(fault, Fault)
    assert fault.code == code
    assert got in fault.got


def test_a_call_that_is_broken_off_is_told_of(scene: Scene) -> None:
    scene.begin()
    scene.doll.open.cancel()
    fault = scene.next()
    assert isinstance(fault, Fault)
    assert (fault.code, fault.got) == (GONE, "the player broke the connection off")


def test_who_calls_after_a_call_that_was_broken_off_is_turned_away(scene: Scene) -> None:
    """It has missed an answer, and the line is at its end."""
    scene.begin()
    scene.doll.open.cancel()
    assert isinstance(scene.next(), Fault)
    call = scene.doll.call(introduction())
    with pytest.raises(grpc.RpcError):
        call.result(LONG_S)
    assert (call.code(), call.details()) == (grpc.StatusCode.UNAVAILABLE, "the trainer has ended")
    assert scene.told.empty()


def test_a_player_that_connects_anew_between_two_calls_goes_on(scene: Scene) -> None:
    """One that begins anew there is told of at once, not by its silence."""
    scene.begin()
    scene.answer(act(0, 0))
    scene.hang_up(scene.doll)
    with player_by_hand(scene.line.port) as again:
        scene.doll.open = again.call(agents(count=2, seen=0.75))
        assert isinstance(scene.next(), PlayerEvent)
        scene.answer(act(0, 0))
        scene.hang_up(again)
    with player_by_hand(scene.line.port) as another:
        assert another.ask(introduction()).unity_input.rl_input.command == QUIT
        fault = scene.next()
    assert isinstance(fault, Fault)
    assert "introduction in the middle" in fault.got


@pytest.mark.parametrize("last", [None, agents(count=2), message()], ids=["waits", "acts", "has nothing to say"])
def test_at_the_end_the_player_is_told_to_quit(last: Any, scene: Scene) -> None:
    """At once where it waits, else when it calls next; what it says then is not lost without a word: it is told of."""
    scene.begin()
    if last is not None:
        scene.answer(act(0, 0))
    scene.loop.do(scene.line.part)
    call = scene.doll.open if last is None else scene.doll.call(last)
    assert Message.FromString(call.result(LONG_S)).unity_input.rl_input.command == QUIT
    assert scene.line.overdue(1e9) is None


def test_closing_frees_the_port(scene: Scene) -> None:
    """A player that waits is told to quit first."""
    scene.begin()
    scene.loop.begin(scene.line.close()).result(LONG_S)
    assert Message.FromString(scene.doll.open.result(LONG_S)).unity_input.rl_input.command == QUIT
    line = scene.again()
    with pytest.raises(SettingsError, match=f"got port {line.port}"):
        scene.again()
    scene.loop.begin(line.close()).result(LONG_S)


def test_a_large_message_is_read_beside_the_loop(scene: Scene) -> None:
    """Others go on meanwhile; what it says, and what is wrong with it, is heard all the same."""
    scene.begin()
    scene.answer(act(0, 0))
    scene.doll.open = scene.doll.call(agents(count=3000, seen=0.5))
    said = scene.next()
    assert isinstance(said, PlayerEvent)
    assert said.reports[0].decisions is not None
    assert len(said.reports[0].decisions.agents) == 3000
    scene.answer(act(*[0.0] * 3000))
    scene.doll.open = scene.doll.call(agents(count=3000, seen=float("nan")))
    fault = scene.next()
    assert isinstance(fault, Fault)
    assert "NaN or infinity" in fault.got
    assert Message.FromString(scene.doll.open.result(LONG_S)).unity_input.rl_input.command == QUIT


def test_a_player_that_computes_while_the_line_is_closed_is_still_told_to_quit(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who launched it may have parted already."""
    monkeypatch.setattr(players, "LAST_CALL_S", LONG_S)
    scene.begin()
    scene.answer(act(0, 0))
    scene.loop.do(scene.line.part)
    closing = scene.loop.begin(scene.line.close())
    scene.loop.do(lambda: None)
    assert not closing.done()
    call = scene.doll.open = scene.doll.call(agents(count=2))
    assert Message.FromString(call.result(LONG_S)).unity_input.rl_input.command == QUIT
    closing.result(LONG_S)


def test_a_player_that_never_calls_again_does_not_keep_the_line_open(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(players, "LAST_CALL_S", 0.0)
    scene.begin()
    scene.answer(act(0, 0))
    scene.loop.do(scene.line.part)
    scene.loop.begin(scene.line.close()).result(LONG_S)
    scene.loop.begin(scene.again().close()).result(LONG_S)
