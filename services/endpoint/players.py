"""A Unity player whose calls are answered in this process: a hop less for each of its steps.

They arrive on the event loop, and are read and answered there: a step wakes no thread but this one. A large message,
of images, is read on a thread, where the libraries that decode them let others go on. The simulator that launched the
player only looks after it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import anyio

from sparring.pipeline.bridges.unity import Unreadable, channels
from sparring.pipeline.bridges.unity.columns import PlainGoals
from sparring.pipeline.bridges.unity.conversation import PACKAGE, PlayerConversation, PlayerMessage
from sparring.pipeline.bridges.unity.server import HOST, Server
from sparring.pipeline.errors import LocalProtocolError, SettingsError
from sparring.pipeline.messages.simulator import Act, BehaviorReport, Fault, Player, Reset, Sampler, Statistic
from sparring.pipeline.specs import BehaviorSpec

LAST_CALL_S: Final = 1.0
"""For a player's last call: longer than a frame takes, and a run's end waits for it."""
GONE: Final = "gone"
"""Code of the fault of a player that has broken off: how it ended says more."""

_LARGE: Final = 64 * 1024
"""Bytes of a message from which reading it takes longer than handing it to a thread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayerEvent:
    """What a player has said that the loop has to answer.

    Attributes:
        at: when.
        behaviors: new ones, by behavior id.
        reports: of its agents; none: it is ready for its first reset.
        plain_goals: as the conversation has heard them.
        statistics: the game's own.
    """

    at: float
    behaviors: Mapping[str, BehaviorSpec] = field(default_factory=dict)
    reports: tuple[BehaviorReport, ...] = ()
    plain_goals: Mapping[str, PlainGoals] = field(default_factory=dict)
    statistics: tuple[Statistic, ...] = ()


Event = str | PlayerEvent | Fault
"""A phase that it has come to, what it says, or what it did wrong."""


class PlayerConnection:
    """The line to one player.

    Args:
        player: what is told of it.
        seed: of its random source.
        hear: gets what happens.
        clock: seconds, monotonic.
        loop: on which all of this happens.
        host: IP address on which it is to call.

    Attributes:
        port: on which it is to call.

    Raises:
        SettingsError: its port is not free, or a library is not installed.
    """

    def __init__(
        self,
        player: Player,
        *,
        seed: int,
        hear: Callable[[Event], None],
        clock: Callable[[], float],
        loop: asyncio.AbstractEventLoop,
        host: str = HOST,
    ) -> None:
        self._player = player
        self._seed = seed
        self._hear = hear
        self._clock = clock
        self._loop = loop
        self._conversation = PlayerConversation()
        self._over = asyncio.Event()  # it was told to quit, or has broken off
        self._phase = "launched"
        self._due: float | None = clock() + player.connect_s  # None while the player waits for us
        self._quiet_since: float | None = None  # agents have not decided or ended since
        self._asked = False  # it waits for an answer of the loop's
        self._parting = False
        self._news: dict[str, BehaviorSpec] = {}
        self._plain_goals: dict[str, PlainGoals] = {}
        self._statistics: list[Statistic] = []
        self._server = Server(player.port, self._called, self._broken, loop, host)
        self.port = self._server.port

    def answer(self, answer: Act | Reset) -> None:
        """Answers what it has said."""
        if not self._asked:  # it has gone meanwhile, or was told to quit
            return
        self._asked = False
        with self._refusing():
            told = _told(answer.parameters, answer.samplers)
            if isinstance(answer, Act):
                self._come_to("stepping")
                self._send(self._conversation.step(answer.actions, told))
                return
            if self._phase == "initialised":
                self._come_to("first reset")
                told = bytes.fromhex(self._player.settings) + told
            self._send(self._conversation.reset(told))

    def overdue(self, now: float) -> Fault | None:
        """What to say of it where it has been silent for too long."""
        due = self._due
        if due is None or now <= due:
            return None
        limit_s = self._player.connect_s if self._phase == "launched" else self._player.timeout_s
        return _fault(
            f"nothing in {limit_s:g} s", "see what the game does; raise --timeout-wait where it only takes longer"
        )

    def part(self) -> None:
        """Has it told to quit, now where it waits, else when it calls next."""
        self._due = None
        self._parting = True
        if self._asked:
            self._say_farewell()

    async def close(self) -> None:
        """Frees the port, also when it is cancelled; where the player waits, it is told to quit first.

        A player that is to quit and computes at the time is still told so when it calls next.
        """
        if self._parting:
            with anyio.move_on_after(LAST_CALL_S, shield=True):
                await self._over.wait()
        self.part()
        self._over.set()
        self._server.close()

    # ------------------------------------------------------------ what the player says

    def _called(self, content: bytes) -> None:
        if self._over.is_set():  # who comes back has missed an answer
            self._server.answer(None)
            return
        self._due = None
        if len(content) <= _LARGE:
            with self._refusing():
                self._react(self._conversation.hear(content))
            return
        reading = self._loop.run_in_executor(None, self._conversation.hear, content)
        reading.add_done_callback(self._read)

    def _read(self, reading: asyncio.Future[PlayerMessage]) -> None:
        """A large message has been read on a thread."""
        with self._refusing():
            self._react(reading.result())

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Tells of what cannot be used, and has the player quit."""
        try:
            yield
        except Unreadable as error:
            self._give_up(_fault(str(error), error.remedy))
        except (LocalProtocolError, SettingsError) as error:
            self._give_up(_fault(str(error), "report it"))

    def _react(self, heard: PlayerMessage) -> None:
        conversation = self._conversation
        if heard.farewell is not None:
            said = f" ({heard.farewell})" if heard.farewell else ""
            self._give_up(_fault(f"a player that ended the conversation{said}", "keep the game running", GONE))
            return
        if heard.introduction is not None:
            self._come_to("connected")
            answer = conversation.initialise(seed=self._seed, package=PACKAGE, num_areas=self._player.areas)
            self._come_to("initialised")
            self._send(answer)
            return
        self._news |= heard.behaviors
        self._plain_goals |= heard.plain_goals
        self._statistics += heard.statistics
        if heard.reports or conversation.state == "ready":
            self._ask(heard.reports)
        else:
            self._go_on()

    def _go_on(self) -> None:
        """No agent wants a decision or has ended: the game goes on, for a while."""
        if self._parting:
            self._say_farewell()
            return
        now = self._clock()
        since = self._quiet_since = now if self._quiet_since is None else self._quiet_since
        if now - since > self._player.timeout_s:
            raise Unreadable(
                f"no agent that wanted a decision or ended in {self._player.timeout_s:g} s",
                "give the agents a Decision Requester, or call RequestDecision",
            )
        self._send(self._conversation.step(()))

    def _ask(self, reports: tuple[BehaviorReport, ...]) -> None:
        """Has somebody answer."""
        said = PlayerEvent(
            at=self._clock(),
            behaviors=self._news,
            reports=reports,
            plain_goals=self._plain_goals,
            statistics=tuple(self._statistics),
        )
        self._news, self._plain_goals, self._statistics, self._quiet_since = {}, {}, [], None
        self._asked = True
        self._hear(said)
        if self._parting and self._asked:
            self._say_farewell()

    def _send(self, message: bytes) -> None:
        self._due = self._clock() + self._player.timeout_s
        self._server.answer(message)

    def _give_up(self, fault: Fault) -> None:
        self._say_farewell()
        self._hear(fault)

    def _say_farewell(self) -> None:
        """Tells it to quit, where that can be said now."""
        self._due, self._asked = None, False
        self._over.set()
        try:
            self._server.answer(self._conversation.quit())
        except LocalProtocolError:
            self._server.answer(None)

    def _come_to(self, phase: str) -> None:
        if self._phase != phase:
            self._phase = phase
            self._hear(phase)

    def _broken(self) -> None:
        self._due, self._asked = None, False
        self._over.set()
        self._hear(_fault("the player broke the connection off", "see its log", GONE))


def _fault(got: str, remedy: str, code: str = "player") -> Fault:
    return Fault(code=code, got=got, expected="a game that goes on", remedy=remedy)


def _told(parameters: Mapping[str, float], samplers: Mapping[str, Sampler]) -> bytes:
    """Side channel bytes of parameters. The player draws from samplers itself, whenever the game asks.

    Raises:
        SettingsError: one cannot be told.
    """
    if not parameters:
        return b""
    told = [channels.sampler(key, one.kind, one.values, one.seed) for key, one in samplers.items()]
    told += [channels.parameter(key, value) for key, value in parameters.items() if key not in samplers]
    return b"".join(told)
