"""The conversation of a player with its trainer in the order of ML-Agents' communicator."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tests.simulation.unity_player_reports import Actions, Entries, Game, Report
from tests.simulation.unity_player_schema import CAPABILITIES, CLOSED, OK, QUIT, RESET, STEP, Message, unpacked
from tests.simulation.unity_player_sides import EventLog, statistics
from tests.simulation.unity_player_wire import Dialect, Encoder, initialization, nothing

LOG: Final = logging.getLogger("player")
Exchange = Callable[[bytes], bytes]


class Crash(Exception):
    """The player ends because a test requested a crash."""


class ProtocolViolation(Exception):
    """The trainer broke the protocol."""


class ConversationEnded(Exception):
    """The trainer sent quit or closed the conversation."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Faults that a test requests; messages with agents are counted from 1.

    Attributes:
        crash_at: phase of a crash: launch (before the connection), initialize (after the trainer's initialization) or
            reset (after its first reset).
        crash_after: number of messages after which the player crashes; with `stall_after` it stays alive without
            further calls, with `close_after` it sends its farewell.
        nan_after: number of messages after which the first number of the first agent is NaN.
    """

    crash_at: str | None = None
    stall_at: str | None = None
    crash_after: int | None = None
    stall_after: int | None = None
    close_after: int | None = None
    nan_after: int | None = None

    def at(self, phase: str) -> None:
        """Raises Crash, or stalls, if that is requested at `phase`."""
        if self.crash_at == phase:
            raise Crash(f"crashed at {phase}")
        if self.stall_at == phase:
            stall(f"at {phase}")

    def after(self, messages: int) -> None:
        """Raises Crash or ConversationEnded, or stalls, if that is requested after `messages` messages."""
        if messages == self.crash_after:
            raise Crash(f"crashed after {messages} messages")
        if messages == self.stall_after:
            stall(f"after {messages} messages")


def stall(when: str) -> None:
    """Sleeps for ever."""
    LOG.error("stalled %s", when)
    threading.Event().wait()


class Session:
    """One player from its first message to its last.

    Args:
        first: sends the first message and waits for the answer; retries until a trainer listens.
        exchange: sends any other message and waits for the answer.
        dialect: dialect of the player.
        make: makes the game from areas, seed and the agreed dialect.
        events: log of all that arrives.
        held_back: whether decisions of a message with ends follow in the next one.
        with_statistics: whether every message has statistics.
    """

    def __init__(
        self,
        first: Exchange,
        exchange: Exchange,
        dialect: Dialect,
        make: Callable[[int, int, Dialect], Game],
        events: EventLog,
        faults: Faults,
        held_back: bool = False,
        with_statistics: bool = False,
    ) -> None:
        self._first = first
        self._exchange = exchange
        self._dialect = dialect
        self._make = make
        self._events = events
        self._faults = faults
        self._held_back = held_back
        self._statistics = with_statistics
        self._outbox: deque[list[Report]] = deque()
        self._messages = 0

    def run(self) -> None:
        """Plays until the trainer ends it.

        Raises:
            ConversationEnded: the trainer ended it.
            Crash: a test requested it.
            ProtocolViolation: the trainer broke the protocol.
            UnreadableData: its side channel bytes are malformed.
        """
        game = self._initialize()
        self._faults.at("initialize")
        if self._answer(nothing()).command != RESET:
            raise ProtocolViolation("got a step as the first command; expected a reset")
        self._faults.at("reset")
        self._put(game.reset())
        while True:
            self._message(game)

    def _initialize(self) -> Game:
        answer = _received(self._first(initialization(self._dialect)))
        if not answer.unity_input.HasField("rl_initialization_input"):
            raise ProtocolViolation("got no rl_initialization_input in answer to the initialization")
        received = answer.unity_input.rl_initialization_input
        known = {name: getattr(received.capabilities, name) for name in CAPABILITIES}
        names = ("seed", "communication_version", "package_version", "num_areas")
        self._events.write(
            event="initialization", **{name: getattr(received, name) for name in names}, capabilities=known
        )
        if received.communication_version.split(".")[0] != "1":
            raise ProtocolViolation(f"got communication version {received.communication_version!r}; expected 1.x.y")
        dialect = self._dialect.agree(received.capabilities)
        self._encoder = Encoder(dialect)
        self._action_spec = dialect.action_spec
        LOG.info("initialized: trainer %s, protocol %s", received.package_version, received.communication_version)
        return self._make(max(received.num_areas, 1), received.seed, dialect)

    def _answer(self, message: bytes) -> Any:
        """Returns the trainer's answer after its side channels were logged."""
        answer = _received(self._exchange(message))
        if not answer.unity_input.HasField("rl_input"):
            raise ProtocolViolation("got an answer without rl_input")
        rl_input = answer.unity_input.rl_input
        if rl_input.side_channel:
            self._events.write_side_channel(rl_input.side_channel)
        if rl_input.command == QUIT:
            raise ConversationEnded("quit")
        if rl_input.command == RESET:
            self._events.write(event="reset")
        elif rl_input.command != STEP:
            raise ProtocolViolation(f"got command {rl_input.command}; expected 0 step, 1 reset or 2 quit")
        return rl_input

    def _put(self, reports: list[Report]) -> None:
        if self._held_back and any(report.ends for report in reports):
            self._outbox.append([replace(report, decisions=None) for report in reports])
            reports = [replace(report, ends=None) for report in reports]
        self._outbox.append(reports)

    def _message(self, game: Game) -> None:
        self._faults.after(self._messages)
        if self._messages == self._faults.close_after:
            self._exchange(nothing(CLOSED))
            raise ConversationEnded(f"the player itself, after {self._messages} messages")
        reports = self._outbox.popleft()
        if self._faults.nan_after is not None and self._messages >= self._faults.nan_after:
            reports = _with_nan(reports)
        self._messages += 1
        rl_input = self._answer(self._encoder.message(reports, statistics(self._messages) if self._statistics else b""))
        if rl_input.command == RESET:
            self._outbox.clear()
            self._put(game.reset())
            return
        actions = self._actions(rl_input, reports)
        if not self._outbox:
            self._put(game.step(actions))

    def _actions(self, rl_input: Any, reports: list[Report]) -> dict[str, Actions]:
        given = {entry.behavior: entry.list.value for entry in rl_input.agent_actions}
        columns = {}
        for report in reports:
            values = given.pop(report.behavior.key, ())
            agents = 0 if report.decisions is None else len(report.decisions.ids)
            if len(values) != agents:
                raise ProtocolViolation(
                    f"got actions for {len(values)} agents of {report.behavior.key}; expected {agents}"
                )
            if agents:
                columns[report.behavior.key] = self._columns(values, report)
        if given:
            raise ProtocolViolation(
                f"got actions for {', '.join(given)}; expected none, because no agent decides there"
            )
        return columns

    def _columns(self, values: Any, report: Report) -> Actions:
        behavior, agents = report.behavior, len(values)
        widths = behavior.continuous, len(behavior.branches)
        if self._action_spec:
            continuous = _floats([value.continuous_actions for value in values], widths[0], behavior.key)
            discrete = _numbers([value.discrete_actions for value in values], widths[1], behavior.key)
        else:
            old = _floats([value.vector_actions_deprecated for value in values], max(widths), behavior.key)
            none = np.zeros((agents, 0), np.float32)
            continuous, numbers = (none, old) if widths[1] else (old, none)
            discrete = numbers.astype(np.int64)
        if not np.isfinite(continuous).all():
            raise ProtocolViolation(f"got a continuous action of {behavior.key} that is not finite")
        if ((discrete < 0) | (discrete >= behavior.branches)).any():
            raise ProtocolViolation(
                f"got discrete actions {discrete.tolist()} of {behavior.key}; branches {behavior.branches}"
            )
        assert report.decisions is not None
        if report.decisions.masks is not None:
            self._log_forbidden(behavior.key, report.decisions, discrete, behavior.branches)
        return Actions(continuous=continuous, discrete=discrete)

    def _log_forbidden(
        self, key: str, decisions: Entries, discrete: NDArray[np.int64], branches: tuple[int, ...]
    ) -> None:
        """Logs forbidden actions, which Unity does not check."""
        starts = np.cumsum((0, *branches[:-1]))
        assert decisions.masks is not None
        forbidden = np.take_along_axis(decisions.masks, discrete + starts, 1).any(1)
        for agent in decisions.ids[forbidden].tolist():
            self._events.write(event="forbidden action", behavior=key, agent=agent, message=self._messages)


def _received(data: bytes) -> Any:
    answer = Message.FromString(data)
    if answer.header.status != OK:
        raise ConversationEnded(f"status {answer.header.status}")
    return answer


def _floats(pieces: list[bytes], width: int, key: str) -> NDArray[np.float32]:
    """Returns the numbers as [agents, width]."""
    if any(len(piece) != 4 * width for piece in pieces):
        raise ProtocolViolation(
            f"got {[len(p) / 4 for p in pieces]} numbers per agent of {key}; expected {width} for each"
        )
    return np.frombuffer(b"".join(pieces), "<f4").reshape(len(pieces), width)


def _numbers(pieces: list[bytes], width: int, key: str) -> NDArray[np.int64]:
    """Returns the numbers as [agents, width]."""
    small = np.frombuffer(b"".join(pieces), np.uint8)
    if small.size == width * len(pieces) and not (small & 0x80).any() and all(len(p) == width for p in pieces):
        return small.reshape(len(pieces), width).astype(np.int64)
    rows = [unpacked(piece) for piece in pieces]
    if any(len(row) != width for row in rows):
        raise ProtocolViolation(
            f"got {[len(row) for row in rows]} discrete actions per agent of {key}; expected {width} for each"
        )
    return np.array(rows, np.int64).reshape(len(pieces), width)


def _with_nan(reports: list[Report]) -> list[Report]:
    """Returns reports with a NaN in the first float observation of the first agent, or in its reward if it has none."""
    for at, report in enumerate(reports):
        if report.decisions is None or not len(report.decisions.ids):
            continue
        observations = [values.copy() for values in report.decisions.observations]
        rewards = report.decisions.rewards.astype(np.float32)
        target = next((values for values in observations if values.dtype != np.uint8), rewards)
        target.reshape(-1)[0] = np.nan
        decisions = replace(report.decisions, observations=tuple(observations), rewards=rewards)
        return [*reports[:at], replace(report, decisions=decisions), *reports[at + 1 :]]
    return reports
