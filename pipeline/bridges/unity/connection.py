"""Speaks with one Unity player on an event loop, for the trainer's stepping or for the bridge.

Calls arrive on the event loop and are parsed and answered there: a step wakes no other thread. A large message with
images is parsed on a thread, because the decoding libraries release the interpreter lock. Stepping speaks with the
players of its machine, without a hop through their simulators, which only supervise their processes. For any other
trainer the bridge speaks with the player, on a loop of its own.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import anyio

from sparring.pipeline.bridges.player import ORDERLY_END, Phase
from sparring.pipeline.bridges.unity import HOST, UnreadableData, channels
from sparring.pipeline.bridges.unity.conversation import PlayerConversation, PlayerMessage
from sparring.pipeline.errors import LocalProtocolError, SettingsError
from sparring.pipeline.messages.simulator import Act, Fault, Player, Reset

LAST_CALL_S: Final = 1.0
"""Seconds that the end of a run waits for a player's last call: longer than a frame takes."""
GONE: Final = "gone"
"""Fault code of a player that ended or disconnected: its exit status says more."""

_LARGE: Final = 64 * 1024
"""Bytes of a message above which parsing it takes longer than passing it to a thread."""

Event = Phase | PlayerMessage | Fault
"""A phase that the player has reached, a message after its introduction, or an error."""


class PlayerConnection:
    """A PlayerConnection speaks with one player.

    Args:
        player: description that its simulator gives.
        seed: of its random source.
        on_event: receives its events. A message that is ready for the first reset or holds reports must be answered.
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
        self._phase: Phase = "launched"
        self._due: float | None = clock() + player.connect_s  # None while the player waits for an answer
        self._idle_since: float | None = None  # time since which no agent has decided or ended
        self._awaits_answer = False  # the receiver of events must answer
        self._is_parting = False
        self._server = Server(player.port, self._on_call, self._on_disconnect, loop, host)
        self.port = self._server.port

    def answer(self, answer: Act | Reset) -> None:
        """Answers its last message."""
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
        return player_fault(
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
        if self._phase == "launched":
            self._set_phase("connected")
        read = partial(self._conversation.receive, content)
        if len(content) <= _LARGE:
            self._react_to(read)
        else:
            self._loop.run_in_executor(None, read).add_done_callback(lambda done: self._react_to(done.result))

    def _react_to(self, read: Callable[[], PlayerMessage]) -> None:
        with self._ending_on_error():
            self._react(read())

    @contextlib.contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        """Reports errors, and asks the player to quit."""
        try:
            yield
        except UnreadableData as error:
            self._fail(player_fault(str(error), error.remedy))
        except (LocalProtocolError, SettingsError) as error:
            got, expected, remedy = explanation(error)
            self._fail(player_fault(f"{got}, where {expected} is needed", remedy))

    def _react(self, message: PlayerMessage) -> None:
        if message.kind == "farewell":
            reason = f" ({message.farewell})" if message.farewell else ""
            self._fail(player_fault(f"{ORDERLY_END}{reason}", "keep the game running", GONE))
        elif message.kind == "introduction":
            answer = self._conversation.initialize(seed=self._seed, num_areas=self._player.areas)
            self._set_phase("initialized")
            self._send(answer)
        elif message.kind == "ready" or message.reports:
            self._idle_since = None
            self._awaits_answer = True
            self._on_event(message)
            if self._is_parting and self._awaits_answer:
                self._quit()
        else:
            self._on_event(message)
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

    def _send(self, message: bytes) -> None:
        self._due = self._clock() + self._player.timeout_s
        self._server.answer(message)

    def _fail(self, fault: Fault) -> None:
        self._quit()
        self._on_event(fault)

    def _quit(self) -> None:
        """Asks the player to quit, where it waits for an answer; one whose introduction is refused sees an error."""
        self._due, self._awaits_answer = None, False
        self._ended.set()
        try:
            self._server.answer(None if self._phase == "connected" else self._conversation.quit())
        except LocalProtocolError:
            self._server.answer(None)

    def _set_phase(self, phase: Phase) -> None:
        if self._phase != phase:
            self._phase = phase
            self._on_event(phase)

    def _on_disconnect(self) -> None:
        self._due, self._awaits_answer = None, False
        self._ended.set()
        self._on_event(player_fault("the player broke the connection", "see its log", GONE))


def player_fault(got: str, remedy: str, code: str = "player") -> Fault:
    """Returns the fault of a player."""
    return Fault(code=code, got=got, expected="a game that keeps running", remedy=remedy)


def explanation(error: LocalProtocolError | SettingsError) -> tuple[str, str, str]:
    """Returns what was got, what was expected, and the remedy."""
    got, _, rest = str(error).removeprefix("got ").partition("; expected ")
    expected, _, remedy = rest.partition("; ")
    return got, expected, remedy
