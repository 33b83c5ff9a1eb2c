"""A player's conversation with its trainer, in the order of ML-Agents' communicator."""

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
from tests.simulation.unity_player_sides import Ear, statistics
from tests.simulation.unity_player_wire import Dialect, Encoder, initialization, nothing

LOG: Final = logging.getLogger("player")
Exchange = Callable[[bytes], bytes]


class Crash(Exception):
    """The player dies because a test asked for it."""


class Wrong(Exception):
    """The trainer broke the protocol."""


class Over(Exception):
    """The trainer said quit, or closed."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong on purpose; messages with agents count, from 1.

    Attributes:
        crash_at: launch, initialise or reset: before the connection; after the trainer's initialisation; after its
            first reset.
        crash_after: dies instead of the next message. So do the other two: `stall_after` calls no more and stays
            alive, `close_after` says good-bye.
        nan_after: every later message has a NaN, in the first number that its first agent sees.
    """

    crash_at: str | None = None
    stall_at: str | None = None
    crash_after: int | None = None
    stall_after: int | None = None
    close_after: int | None = None
    nan_after: int | None = None

    def at(self, phase: str) -> None:
        """Raises: Crash: it is asked for here."""
        if self.crash_at == phase:
            raise Crash(f"crashed at {phase}")
        if self.stall_at == phase:
            stall(f"at {phase}")

    def after(self, messages: int) -> None:
        """Raises: Crash or Over: one is asked for."""
        if messages == self.crash_after:
            raise Crash(f"crashed after {messages} messages")
        if messages == self.stall_after:
            stall(f"after {messages} messages")


def stall(when: str) -> None:
    """Alive, and silent for ever."""
    LOG.error("stalled %s", when)
    threading.Event().wait()


class Session:
    """One player from its first message to its last.

    Args:
        first: sends the first message and waits for the answer; keeps trying while nobody listens.
        exchange: sends any other message and waits for the answer.
        dialect: of the player.
        make: the game, from areas, seed and what both sides know.
        ear: is told what arrives.
        held_back: decisions of a message with ends follow in the next one.
        with_statistics: every message has some.
    """

    def __init__(
        self,
        first: Exchange,
        exchange: Exchange,
        dialect: Dialect,
        make: Callable[[int, int, Dialect], Game],
        ear: Ear,
        faults: Faults,
        held_back: bool = False,
        with_statistics: bool = False,
    ) -> None:
        self._first = first
        self._exchange = exchange
        self._dialect = dialect
        self._make = make
        self._ear = ear
        self._faults = faults
        self._held_back = held_back
        self._statistics = with_statistics
        self._outbox: deque[list[Report]] = deque()
        self._messages = 0

    def run(self) -> None:
        """Plays until the trainer ends it.

        Raises:
            Over: it said so.
            Crash: a test asked for it.
            Wrong: the trainer broke the protocol.
            Unreadable: its side channel bytes are broken.
        """
        game = self._initialise()
        self._faults.at("initialise")
        if self._answer(nothing()).command != RESET:
            raise Wrong("got a step as the first command; expected a reset")
        self._faults.at("reset")
        self._put(game.reset())
        while True:
            self._message(game)

    def _initialise(self) -> Game:
        answer = _received(self._first(initialization(self._dialect)))
        if not answer.unity_input.HasField("rl_initialization_input"):
            raise Wrong("got no rl_initialization_input in answer to the initialisation")
        said = answer.unity_input.rl_initialization_input
        known = {name: getattr(said.capabilities, name) for name in CAPABILITIES}
        names = ("seed", "communication_version", "package_version", "num_areas")
        self._ear.hear(heard="initialisation", **{name: getattr(said, name) for name in names}, capabilities=known)
        if said.communication_version.split(".")[0] != "1":
            raise Wrong(f"got communication version {said.communication_version!r}; expected 1.x.y")
        dialect = self._dialect.agree(said.capabilities)
        self._encoder = Encoder(dialect)
        self._action_spec = dialect.action_spec
        LOG.info("initialised: trainer %s, protocol %s", said.package_version, said.communication_version)
        return self._make(max(said.num_areas, 1), said.seed, dialect)

    def _answer(self, message: bytes) -> Any:
        """The trainer's command; its side channels have been heard."""
        answer = _received(self._exchange(message))
        if not answer.unity_input.HasField("rl_input"):
            raise Wrong("got an answer without rl_input")
        told = answer.unity_input.rl_input
        if told.side_channel:
            self._ear.listen(told.side_channel)
        if told.command == QUIT:
            raise Over("quit")
        if told.command == RESET:
            self._ear.hear(heard="reset")
        elif told.command != STEP:
            raise Wrong(f"got command {told.command}; expected 0 step, 1 reset or 2 quit")
        return told

    def _put(self, reports: list[Report]) -> None:
        if self._held_back and any(report.ends for report in reports):
            self._outbox.append([replace(report, decisions=None) for report in reports])
            reports = [replace(report, ends=None) for report in reports]
        self._outbox.append(reports)

    def _message(self, game: Game) -> None:
        self._faults.after(self._messages)
        if self._messages == self._faults.close_after:
            self._exchange(nothing(CLOSED))
            raise Over(f"the player itself, after {self._messages} messages")
        reports = self._outbox.popleft()
        if self._faults.nan_after is not None and self._messages >= self._faults.nan_after:
            reports = _spoiled(reports)
        self._messages += 1
        told = self._answer(self._encoder.message(reports, statistics(self._messages) if self._statistics else b""))
        if told.command == RESET:
            self._outbox.clear()
            self._put(game.reset())
            return
        actions = self._actions(told, reports)
        if not self._outbox:
            self._put(game.step(actions))

    def _actions(self, told: Any, reports: list[Report]) -> dict[str, Actions]:
        given = {entry.behavior: entry.list.value for entry in told.agent_actions}
        taken = {}
        for report in reports:
            values = given.pop(report.behavior.key, ())
            agents = 0 if report.decisions is None else len(report.decisions.ids)
            if len(values) != agents:
                raise Wrong(f"got actions for {len(values)} agents of {report.behavior.key}; expected {agents}")
            if agents:
                taken[report.behavior.key] = self._columns(values, report)
        if given:
            raise Wrong(f"got actions for {', '.join(given)}; expected none: nobody decides there")
        return taken

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
            raise Wrong(f"got a continuous action of {behavior.key} that is not finite")
        if ((discrete < 0) | (discrete >= behavior.branches)).any():
            raise Wrong(f"got discrete actions {discrete.tolist()} of {behavior.key}; branches {behavior.branches}")
        assert report.decisions is not None
        if report.decisions.masks is not None:
            self._look_at_masks(behavior.key, report.decisions, discrete, behavior.branches)
        return Actions(continuous=continuous, discrete=discrete)

    def _look_at_masks(
        self, key: str, decisions: Entries, discrete: NDArray[np.int64], branches: tuple[int, ...]
    ) -> None:
        """Unity does not check this; a test may want to know."""
        starts = np.cumsum((0, *branches[:-1]))
        assert decisions.masks is not None
        forbidden = np.take_along_axis(decisions.masks, discrete + starts, 1).any(1)
        for agent in decisions.ids[forbidden].tolist():
            self._ear.hear(heard="forbidden action", behavior=key, agent=agent, message=self._messages)


def _received(data: bytes) -> Any:
    answer = Message.FromString(data)
    if answer.header.status != OK:
        raise Over(f"status {answer.header.status}")
    return answer


def _floats(pieces: list[bytes], width: int, key: str) -> NDArray[np.float32]:
    """[agents, width]."""
    if any(len(piece) != 4 * width for piece in pieces):
        raise Wrong(f"got {[len(p) / 4 for p in pieces]} numbers per agent of {key}; expected {width} for each")
    return np.frombuffer(b"".join(pieces), "<f4").reshape(len(pieces), width)


def _numbers(pieces: list[bytes], width: int, key: str) -> NDArray[np.int64]:
    """[agents, width]."""
    small = np.frombuffer(b"".join(pieces), np.uint8)
    if small.size == width * len(pieces) and not (small & 0x80).any() and all(len(p) == width for p in pieces):
        return small.reshape(len(pieces), width).astype(np.int64)
    rows = [unpacked(piece) for piece in pieces]
    if any(len(row) != width for row in rows):
        raise Wrong(f"got {[len(row) for row in rows]} discrete actions per agent of {key}; expected {width} for each")
    return np.array(rows, np.int64).reshape(len(pieces), width)


def _spoiled(reports: list[Report]) -> list[Report]:
    """With a NaN in the first float that the first deciding agent sees, or in its reward where it sees none."""
    for at, report in enumerate(reports):
        if report.decisions is None or not len(report.decisions.ids):
            continue
        seen = [values.copy() for values in report.decisions.observations]
        rewards = report.decisions.rewards.astype(np.float32)
        spoiled = next((values for values in seen if values.dtype != np.uint8), rewards)
        spoiled.reshape(-1)[0] = np.nan
        decisions = replace(report.decisions, observations=tuple(seen), rewards=rewards)
        return [*reports[:at], replace(report, decisions=decisions), *reports[at + 1 :]]
    return reports
