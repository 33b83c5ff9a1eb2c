"""This process answers the calls of a Unity player directly, without a hop through its simulator.

Calls arrive on the event loop and are parsed and answered there: a step wakes no other thread. A large message with
images is parsed on a thread, because the decoding libraries release the interpreter lock. The simulator that launched
the player only supervises its process.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import anyio

from sparring.pipeline.bridges.unity import UnreadableData, channels
from sparring.pipeline.bridges.unity.build import HOST
from sparring.pipeline.bridges.unity.columns import PlainGoals
from sparring.pipeline.bridges.unity.conversation import PlayerConversation, PlayerMessage
from sparring.pipeline.errors import LocalProtocolError, SettingsError
from sparring.pipeline.messages.simulator import Act, BehaviorReport, Fault, Player, Reset, Statistic
from sparring.pipeline.specs import BehaviorSpec

LAST_CALL_S: Final = 1.0
"""Seconds that the end of a run waits for a player's last call: longer than a frame takes."""
GONE: Final = "gone"
"""Fault code of a player that disconnected: the simulator reports its exit status."""

_LARGE: Final = 64 * 1024
"""Bytes of a message above which parsing it takes longer than passing it to a thread."""


@dataclass(kw_only=True, slots=True)
class PlayerEvent:
    """A PlayerEvent holds a message of a player that needs an answer.

    Attributes:
        at: time of its arrival.
        behaviors: new specs by behavior id.
        reports: of its agents; none where it is ready for its first reset.
        plain_goals: goal signals of new behaviors that networks read as ordinary observations.
        statistics: of the game.
    """

    at: float = 0.0
    behaviors: dict[str, BehaviorSpec] = field(default_factory=dict)
    reports: tuple[BehaviorReport, ...] = ()
    plain_goals: dict[str, PlainGoals] = field(default_factory=dict)
    statistics: tuple[Statistic, ...] = ()


Event = str | PlayerEvent | Fault
"""A phase that the player has reached, a message, or an error."""


class PlayerConnection:
    """A PlayerConnection speaks with one player.

    Args:
        player: description that its simulator gives.
        seed: of its random source.
        on_event: receives its events.
        clock: seconds, monotonic.
        loop: event loop that runs all callbacks.
        host: IP address that the player connects to.

    Attributes:
        port: port that the player connects to.

    Raises:
        SettingsError: the port is not free, or a library is not installed.
    """

    def __init__(
        self,
        player: Player,
        *,
        seed: int,
        on_event: Callable[[Event], None],
        clock: Callable[[], float],
        loop: asyncio.AbstractEventLoop,
        host: str = HOST,
    ) -> None:
        from sparring.pipeline.bridges.unity.server import Server  # needs the library h2, which only players use

        self._player = player
        self._seed = seed
        self._on_event = on_event
        self._clock = clock
        self._loop = loop
        self._conversation = PlayerConversation()
        self._ended = asyncio.Event()  # set when it was asked to quit, or has disconnected
        self._phase = "launched"
        self._due: float | None = clock() + player.connect_s  # None while the player waits for an answer
        self._idle_since: float | None = None  # time since which no agent has decided or ended
        self._awaits_answer = False  # the stepper must answer
        self._is_parting = False
        self._event = PlayerEvent()  # next to be reported
        self._server = Server(player.port, self._on_call, self._on_disconnect, loop, host)
        self.port = self._server.port

    def answer(self, answer: Act | Reset) -> None:
        """Answers its last event."""
        if not self._awaits_answer:  # it has disconnected or was asked to quit
            return
        self._awaits_answer = False
        with self._ending_on_error():
            side_channel = channels.parameters(answer.parameters, answer.samplers) if answer.parameters else b""
            if isinstance(answer, Act):
                self._set_phase("stepping")
                self._send(self._conversation.step(answer.actions, side_channel))
                return
            if self._phase == "initialized":
                self._set_phase("first reset")
                side_channel = bytes.fromhex(self._player.settings) + side_channel
            self._send(self._conversation.reset(side_channel))

    def overdue(self, now: float) -> Fault | None:
        """Returns the error of a player that has been silent for too long; None otherwise."""
        due = self._due
        if due is None or now <= due:
            return None
        limit_s = self._player.connect_s if self._phase == "launched" else self._player.timeout_s
        return _fault(
            f"nothing in {limit_s:g} s", "see what the game does; raise --timeout-wait where it only takes longer"
        )

    def part(self) -> None:
        """Asks the player to quit, at once where it waits for an answer, else at its next call."""
        self._due = None
        self._is_parting = True
        if self._awaits_answer:
            self._quit()

    async def close(self) -> None:
        """Frees the port, even when cancelled; a player that waits for an answer is asked to quit first.

        After `part`, a player that is still computing has `LAST_CALL_S` for its next call.
        """
        if self._is_parting:
            with anyio.move_on_after(LAST_CALL_S, shield=True):
                await self._ended.wait()
        self.part()
        self._ended.set()
        self._server.close()

    # ------------------------------------------------------------ messages of the player

    def _on_call(self, content: bytes) -> None:
        if self._ended.is_set():  # a player that reconnects has missed an answer
            self._server.answer(None)
            return
        self._due = None
        if len(content) <= _LARGE:
            with self._ending_on_error():
                self._react(self._conversation.receive(content))
            return
        reading = self._loop.run_in_executor(None, self._conversation.receive, content)
        reading.add_done_callback(self._read)

    def _read(self, reading: asyncio.Future[PlayerMessage]) -> None:
        """Handles a large message parsed on a thread."""
        with self._ending_on_error():
            self._react(reading.result())

    @contextlib.contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        """Reports errors, and asks the player to quit."""
        try:
            yield
        except UnreadableData as error:
            self._fail(_fault(str(error), error.remedy))
        except (LocalProtocolError, SettingsError) as error:
            self._fail(_fault(str(error), "report it"))

    def _react(self, message: PlayerMessage) -> None:
        conversation = self._conversation
        if message.farewell is not None:
            reason = f" ({message.farewell})" if message.farewell else ""
            self._fail(_fault(f"a player that ended the conversation{reason}", "keep the game running", GONE))
            return
        if message.is_introduction:
            self._set_phase("connected")
            answer = conversation.initialize(seed=self._seed, num_areas=self._player.areas)
            self._set_phase("initialized")
            self._send(answer)
            return
        self._event.behaviors |= message.behaviors
        self._event.plain_goals |= message.plain_goals
        self._event.statistics += message.statistics
        if message.reports or conversation.state == "ready":
            self._request_answer(message.reports)
        else:
            self._continue()

    def _continue(self) -> None:
        """Continues the game without actions, since no agent decides or has ended; for a limited time."""
        if self._is_parting:
            self._quit()
            return
        now = self._clock()
        since = self._idle_since = now if self._idle_since is None else self._idle_since
        if now - since > self._player.timeout_s:
            raise UnreadableData(
                f"no agent that wanted a decision or ended in {self._player.timeout_s:g} s",
                "give the agents a Decision Requester, or call RequestDecision",
            )
        self._send(self._conversation.step(()))

    def _request_answer(self, reports: tuple[BehaviorReport, ...]) -> None:
        """Passes an event to the stepper, which answers it."""
        event, self._event, self._idle_since = self._event, PlayerEvent(), None
        event.at, event.reports = self._clock(), reports
        self._awaits_answer = True
        self._on_event(event)
        if self._is_parting and self._awaits_answer:
            self._quit()

    def _send(self, message: bytes) -> None:
        self._due = self._clock() + self._player.timeout_s
        self._server.answer(message)

    def _fail(self, fault: Fault) -> None:
        self._quit()
        self._on_event(fault)

    def _quit(self) -> None:
        """Asks the player to quit, where it waits for an answer."""
        self._due, self._awaits_answer = None, False
        self._ended.set()
        try:
            self._server.answer(self._conversation.quit())
        except LocalProtocolError:
            self._server.answer(None)

    def _set_phase(self, phase: str) -> None:
        if self._phase != phase:
            self._phase = phase
            self._on_event(phase)

    def _on_disconnect(self) -> None:
        self._due, self._awaits_answer = None, False
        self._ended.set()
        self._on_event(_fault("the player broke the connection", "see its log", GONE))


def _fault(got: str, remedy: str, code: str = "player") -> Fault:
    return Fault(code=code, got=got, expected="a game that keeps running", remedy=remedy)
