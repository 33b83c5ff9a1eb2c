"""A Unity player whose calls are answered in this process: a hop less for each of its steps.

gRPC brings each call on a thread of its own. The message is decoded there, handed to the event loop, and the thread
waits; the loop's answer is encoded there again. The simulator that launched the player only looks after it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from pipeline.errors import LocalProtocolError, SettingsError
from pipeline.messages.simulator import Act, BehaviorReport, Fault, Player, Reset, Sampler, Statistic
from pipeline.specs import BehaviorSpec
from pipeline.unity import Unreadable, channels
from pipeline.unity.conversation import PACKAGE, Conversation, Heard
from pipeline.unity.server import Server

LAST_CALL_S: Final = 1.0
"""For a player's last call: longer than a frame takes, and a run's end waits for it."""
GONE: Final = "gone"
"""Code of the fault of a player that has broken off: how it ended says more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What a player has said that the loop has to answer.

    Attributes:
        at: when.
        behaviors: new ones, by behavior id.
        reports: of its agents; none: it is ready for its first reset.
        statistics: the game's own.
    """

    at: float
    behaviors: Mapping[str, BehaviorSpec] = field(default_factory=dict)
    reports: tuple[BehaviorReport, ...] = ()
    statistics: tuple[Statistic, ...] = ()


Event = str | Said | Fault
"""A phase that it has come to, what it says, or what it did wrong."""


class Line:
    """The line to one player.

    Args:
        player: what is told of it.
        seed: of its random source.
        hear: gets what happens; called on threads of gRPC's.
        clock: seconds, monotonic.

    Attributes:
        port: on which it is to call.

    Raises:
        SettingsError: its port is not free, or gRPC is not installed.
    """

    def __init__(self, player: Player, *, seed: int, hear: Callable[[Event], None], clock: Callable[[], float]) -> None:
        self._player = player
        self._seed = seed
        self._hear = hear
        self._clock = clock
        self._conversation = Conversation()
        self._parting = False
        self._over = threading.Event()  # it was told to quit, or has broken off
        self._phase = "launched"
        self._due: float | None = clock() + player.connect_s  # None while the player waits for us
        self._quiet_since: float | None = None  # agents have not decided or ended since
        self._news: dict[str, BehaviorSpec] = {}
        self._statistics: list[Statistic] = []
        self._answers: queue.SimpleQueue[Act | Reset | None] = queue.SimpleQueue()
        self._server = Server(player.port, self._called, self._broken)
        self.port = self._server.port

    # ------------------------------------------------------------ for the loop

    def answer(self, answer: Act | Reset) -> None:
        """Answers what it has said."""
        self._answers.put(answer)

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
        self._answers.put(None)

    def close(self) -> None:
        """Frees the port. It blocks for a moment: for a thread.

        A player that is to quit and computes at the time is still told so when it calls next.
        """
        if self._parting:
            self._over.wait(LAST_CALL_S)
        self._server.refuse()
        self._answers.put(None)
        self._server.close()

    # ------------------------------------------------------------ on threads of gRPC's

    def _called(self, content: bytes) -> bytes | None:
        try:
            return self._answered(self._conversation.hear(content))
        except Unreadable as error:
            self._hear(_fault(str(error), error.remedy))
        except (LocalProtocolError, SettingsError) as error:
            self._hear(_fault(str(error), "report it"))
        return self._farewell()

    def _answered(self, heard: Heard) -> bytes | None:
        conversation = self._conversation
        self._due = None
        if heard.farewell is not None:
            said = f" ({heard.farewell})" if heard.farewell else ""
            self._hear(_fault(f"a player that ended the conversation{said}", "keep the game running", GONE))
            return self._farewell()
        if heard.introduction is not None:
            self._come_to("connected")
            answer = conversation.initialise(seed=self._seed, package=PACKAGE, num_areas=self._player.areas)
            self._come_to("initialised")
            return self._sent(answer)
        self._news |= heard.behaviors
        self._statistics += heard.statistics
        if heard.reports or conversation.state == "ready":
            return self._ask(heard.reports)
        return self._go_on()

    def _go_on(self) -> bytes:
        """No agent wants a decision or has ended: the game goes on, for a while."""
        now = self._clock()
        since = self._quiet_since = now if self._quiet_since is None else self._quiet_since
        if now - since > self._player.timeout_s:
            raise Unreadable(
                f"no agent that wanted a decision or ended in {self._player.timeout_s:g} s",
                "give the agents a Decision Requester, or call RequestDecision",
            )
        return self._sent(self._conversation.step(()))

    def _ask(self, reports: tuple[BehaviorReport, ...]) -> bytes | None:
        """Has the loop answer."""
        said = Said(at=self._clock(), behaviors=self._news, reports=reports, statistics=tuple(self._statistics))
        self._news, self._statistics, self._quiet_since = {}, [], None
        self._hear(said)
        answer = self._answers.get()
        if answer is None:
            return self._farewell()
        told = _told(answer.parameters, answer.samplers)
        if isinstance(answer, Act):
            self._come_to("stepping")
            return self._sent(self._conversation.step(answer.actions, told))
        if self._phase == "initialised":
            self._come_to("first reset")
            told = bytes.fromhex(self._player.settings) + told
        return self._sent(self._conversation.reset(told))

    def _sent(self, message: bytes) -> bytes:
        self._due = self._clock() + self._player.timeout_s
        return message

    def _farewell(self) -> bytes | None:
        """Tells it to quit, where that can be said now."""
        self._due = None
        try:
            return self._conversation.quit()
        except LocalProtocolError:
            return None
        finally:
            self._over.set()

    def _come_to(self, phase: str) -> None:
        if self._phase != phase:
            self._phase = phase
            self._hear(phase)

    def _broken(self) -> None:
        self._due = None
        self._over.set()
        self._hear(_fault("the player broke the connection off", "see its log", GONE))


def _fault(got: str, remedy: str, code: str = "player") -> Fault:
    return Fault(code=code, got=got, expected="a game that goes on", remedy=remedy)


def _told(parameters: Mapping[str, float], samplers: Mapping[str, Sampler]) -> bytes:
    """Side channel bytes of parameters. The player draws from samplers itself, whenever the game asks.

    Raises:
        SettingsError: one can not be told.
    """
    if not parameters:
        return b""
    told = [channels.sampler(key, one.kind, one.values, one.seed) for key, one in samplers.items()]
    told += [channels.parameter(key, value) for key, value in parameters.items() if key not in samplers]
    return b"".join(told)
