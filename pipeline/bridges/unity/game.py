"""Plays a player of ML-Agents' communicator as a game of ours.

The player is launched, or a person presses Play in the editor. It calls, introduces itself, is reset and plays: each of
its messages is a call, and the answer holds its agents' actions. A trainer on the same machine talks to it directly,
and the bridge only supervises it. For any other trainer the bridge plays it as a game, and launches it at the first
reset, because that brings the seed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sparring.pipeline.bridges.player import PHASES, PlayerFailed, PlayerProgram, split_arguments
from sparring.pipeline.bridges.unity import UnreadableData, channels
from sparring.pipeline.bridges.unity.build import BUILD_PORT, EDITOR_PORT, HOST, command, find_build
from sparring.pipeline.bridges.unity.conversation import PlayerConversation, PlayerMessage
from sparring.pipeline.errors import LocalProtocolError, RemoteProtocolError, SettingsError
from sparring.pipeline.messages import simulator as record
from sparring.pipeline.messages.simulator import Adopted, BehaviorActions, BehaviorReport, Bye, Progress, Statistic
from sparring.pipeline.simulation.connection import Client
from sparring.pipeline.specs import BehaviorSpec

if TYPE_CHECKING:
    from sparring.pipeline.bridges.unity.game_server import Calls

Reports = tuple[BehaviorReport, ...]

EDITOR_WAIT_S: Final = 600.0
"""Time for a person to press Play."""

_ENDED: Final = "the player has ended"

_END_S: Final = 1.0
"""Time for a player with a broken connection to end: its exit status says more."""

_FAREWELL_S: Final = 5.0
"""Time for a player to end after `quit`."""


class Unity:
    """Represents one Unity player. It is made by `make_unity`.

    Args:
        launch: makes the program, given the port that it calls; a program without a command if the editor plays.
        port: port that the player calls; 0 chooses one.
        areas: number of training areas for the game to make.
        engine: side channel bytes for the first reset: engine settings, and other messages.
        connect_s: seconds to wait for the first call.
        timeout_s: seconds to wait for any other call.
        host: IP address to listen on.
        clock: monotonic clock, in seconds.
    """

    name = "unity"

    def __init__(
        self,
        launch: Callable[[int], PlayerProgram],
        port: int,
        *,
        areas: int = 1,
        engine: bytes = b"",
        connect_s: float = 60.0,
        timeout_s: float = 60.0,
        host: str = HOST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._launch = launch
        self._port = port
        self._served: tuple[Calls, PlayerProgram] | None = None  # if this process talks to it
        self._attended: PlayerProgram | None = None  # if the trainer talks to it
        self._areas = areas
        self._engine = engine
        self._connect_s = connect_s
        self._timeout_s = timeout_s
        self._host = host
        self._clock = clock
        self._conversation = PlayerConversation()
        self._known: dict[str, BehaviorSpec] = {}
        self._statistics: list[Statistic] = []
        self._parameters: Mapping[str, float] = {}
        self._revision = -1

    def behaviors(self) -> Mapping[str, BehaviorSpec]:
        """Returns the behaviors whose agents have appeared: none before the first reset."""
        return self._known

    def reset(self, parameters: Mapping[str, float], seed: int | None) -> Sequence[BehaviorReport]:
        """Launches the player, the first time, and makes it begin new episodes.

        Raises:
            PlayerFailed: the player did not start, call, introduce itself or answer; or its message cannot be used.
            SettingsError: a parameter cannot be sent to it.
        """
        self._parameters = parameters
        if self._conversation.state == "calling":
            self._start(seed or 0)
        side_channel = self._parameter_bytes()
        if self._player.phase == "initialized":
            side_channel, self._player.phase = self._engine + side_channel, "first reset"
        self._calls.answer(self._conversation.reset(side_channel))
        return self._until_agents_report(self._receive())

    def step(self, actions: Mapping[str, BehaviorActions]) -> Sequence[BehaviorReport]:
        """Plays on until an agent wants a decision or has ended.

        Raises:
            PlayerFailed: the player has ended, did not answer, or its message cannot be used.
        """
        self._player.phase = "stepping"
        return self._until_agents_report(self._continue(actions.values()))

    def player(self) -> record.Player:
        """Returns what a trainer on this machine needs to talk to the player itself."""
        return record.Player(
            protocol="unity",
            port=self._port,
            settings=self._engine.hex(),
            areas=self._areas,
            connect_s=self._connect_s,
            timeout_s=self._timeout_s,
        )

    def attend(self, adopted: Adopted, trainer: Client) -> Bye:
        """Launches the player, which calls the trainer, and supervises it until the end.

        Raises:
            PlayerFailed: the player did not start, has ended, or broke the trainer's rules.
            LinkLost: the connection to the trainer broke and could not be restored.
            RemoteProtocolError: the trainer rejects something else.
        """
        news: Adopted | Progress | Bye = adopted
        try:
            while not isinstance(news, Bye):
                if isinstance(news, Adopted):
                    self._supervise(news.port, trainer)
                elif self._attended is not None and news.phase in PHASES:
                    self._attended.phase = news.phase
                news = trainer.follow()
        except RemoteProtocolError as fault:
            raise self._failed(fault) from fault
        if self._attended is not None and news.reason == _ENDED:
            self._attended.check()
        return news

    def _supervise(self, port: int, trainer: Client) -> None:
        """Starts a player for a trainer. A new trainer does not know the former player."""
        former, self._attended = self._attended, None
        if former is not None:
            former.close(_FAREWELL_S)
        player = self._attended = self._launch(port)
        player.start()
        player.watch(lambda: trainer.stop(_ENDED) if player is self._attended else None)
        if not player.launched:
            _ask_for_play(player, port)

    def _failed(self, fault: RemoteProtocolError) -> Exception:
        """Returns the trainer's report about the player with its phase, its exit status and its log."""
        player = self._attended
        if player is None or fault.code not in ("player", "gone"):
            return fault
        try:
            player.check(_END_S if fault.code == "gone" else 0.0)
        except PlayerFailed as failure:
            return failure
        return player.failure(fault.got, fault.remedy)

    def statistics(self) -> Sequence[Statistic]:
        """Returns the game's own statistics since the last call."""
        statistics, self._statistics = self._statistics, []
        return statistics

    def close(self) -> None:
        """Orders the player to quit, and ends it if it does not."""
        attended, self._attended = self._attended, None
        if attended is not None:
            attended.close(_FAREWELL_S)
        if self._served is None:
            return
        calls, player = self._served
        if calls.open and player.phase != "connected":  # a game that is refused with its introduction sees an error
            with contextlib.suppress(LocalProtocolError):  # a call that came too late was never read
                calls.answer(self._conversation.quit())
        calls.close()
        player.close(_FAREWELL_S)

    # ------------------------------------------------------------ the conversation

    @property
    def _calls(self) -> Calls:
        return self._serve()[0]

    @property
    def _player(self) -> PlayerProgram:
        return self._serve()[1]

    def _serve(self) -> tuple[Calls, PlayerProgram]:
        """Listens from the first use on: until then the trainer may still decide to talk to the player."""
        if self._served is None:
            from sparring.pipeline.bridges.unity.game_server import Calls

            calls = Calls(self._port, self._host)
            self._served = calls, self._launch(calls.port)
        return self._served

    def _start(self, seed: int) -> None:
        """Launches the player and waits until it can be reset."""
        player = self._player
        player.start()
        player.watch(lambda: self._calls.report_exit(""))
        if not player.launched:
            _ask_for_play(player, self._calls.port)
        message = self._next_call(self._connect_s)
        player.phase = "connected"
        self._read(message)
        self._calls.answer(self._conversation.initialize(seed=seed, num_areas=self._areas))
        player.phase = "initialized"
        self._read(self._next_call(self._timeout_s))

    def _until_agents_report(self, reports: Reports) -> Reports:
        """Plays on until an agent wants a decision or has ended, which may take some steps."""
        deadline = self._clock() + self._timeout_s
        while not reports:
            if self._clock() > deadline:
                raise self._player.failure(
                    f"no agent that wanted a decision or ended in {self._timeout_s:g} s",
                    "give the agents a Decision Requester, or call RequestDecision",
                )
            reports = self._continue(())
        return reports

    def _continue(self, actions: Iterable[BehaviorActions]) -> Reports:
        self._calls.answer(self._conversation.step(actions, self._changed_parameters()))
        return self._receive()

    def _receive(self) -> Reports:
        received = self._read(self._next_call(self._timeout_s))
        if received.behaviors:
            self._known = {**self._known, **received.behaviors}
        for behavior, goals in received.plain_goals.items():
            for name, kind in goals:
                sys.stderr.write(
                    f"{self._player.name}: goal signal {name!r} of {behavior} is read as any other {kind}; "
                    "networks are conditioned on goals of one axis only\n"
                )
        self._statistics += received.statistics
        return received.reports

    def _read(self, message: bytes) -> PlayerMessage:
        try:
            received = self._conversation.receive(message)
        except UnreadableData as error:
            raise self._player.failure(str(error), error.remedy) from error
        if received.farewell is not None:
            self._player.check()
            why = f" ({received.farewell})" if received.farewell else ""
            raise self._player.failure(f"a player that ended the conversation{why}", "keep the game running")
        return received

    def _next_call(self, timeout_s: float) -> bytes:
        """Returns the player's next message."""
        message = self._calls.receive(timeout_s)
        if isinstance(message, bytes):
            return message
        if message is None:
            raise self._player.failure(
                f"nothing in {timeout_s:g} s", "see what the game does; raise --timeout-wait if it only takes longer"
            )
        self._player.check(_END_S)
        raise self._player.failure(message.why or "the end of the game", "see its log")

    # ------------------------------------------------------------ parameters

    def _changed_parameters(self) -> bytes:
        """Returns side channel bytes of the parameters, if the trainer has changed them."""
        return self._parameter_bytes() if getattr(self._parameters, "revision", 0) != self._revision else b""

    def _parameter_bytes(self) -> bytes:
        self._revision = getattr(self._parameters, "revision", 0)
        return channels.parameters(self._parameters, getattr(self._parameters, "samplers", {}))


def make_unity(
    areas: int,
    path: str | None = None,
    port: int | None = None,
    arguments: str = "",
    no_graphics: bool = False,
    timeout_s: float = 60.0,
    width: int = 84,
    height: int = 84,
    quality_level: int = 5,
    time_scale: float = 20.0,
    target_frame_rate: int = -1,
    capture_frame_rate: int = 60,
    side_channel: str = "",
    host: str = HOST,
) -> Unity:
    """Returns a Unity player.

    The first simulator of a run ($SPARRING_NUMBER) listens on `port`, the others on those after it; its log is in
    $SPARRING_LOGS, if that is set.

    Args:
        areas: number of training areas for the game to make.
        path: path of the build; None: a person presses Play in the editor.
        port: None: 5005 for builds, 5004 for the editor; 0 chooses one.
        arguments: arguments of the game, as on a command line.
        no_graphics: run without a window and without rendering.
        timeout_s: seconds to wait for the player; a person has at least ten minutes to press Play.
        width: width of the window, in pixels.
        height: height of the window, in pixels.
        quality_level: quality of rendering.
        time_scale: factor of the game's clock.
        target_frame_rate: frames per second; -1: as many as possible.
        capture_frame_rate: frames per second of simulated time.
        side_channel: further side channel bytes for the first reset, in hexadecimal digits.
        host: IP address to listen on; beyond loopback any client that reaches the port can be the player. A trainer
            that talks to the player itself uses its own settings.

    Raises:
        SettingsError: the build does not exist, the port is in use, a library is missing, or `side_channel` cannot be
            read.
    """
    from sparring.pipeline.bridges.unity.server import check_free

    number = int(os.environ.get("SPARRING_NUMBER") or 0)
    engine = channels.engine(
        resolution=(width, height),
        quality_level=quality_level,
        time_scale=time_scale,
        target_frame_rate=target_frame_rate,
        capture_frame_rate=capture_frame_rate,
    ) + _bytes(side_channel)
    logs = os.environ.get("SPARRING_LOGS")
    build, words = None if path is None else find_build(path), split_arguments(arguments)
    log = Path(logs) / f"Player-{number}.log" if logs else None
    if build is None:
        where, connect_s = EDITOR_PORT if port is None else port, max(timeout_s, EDITOR_WAIT_S)
    else:
        where, connect_s = (BUILD_PORT if port is None else port) + (number if port != 0 else 0), timeout_s

    def launch(port: int) -> PlayerProgram:
        if build is None:
            return PlayerProgram("the Unity editor", None)  # which always calls its default port
        launched = command(build, port, no_graphics=no_graphics, log=log, arguments=words)
        output = None if log is None else log.with_suffix(".out")
        return PlayerProgram(f"Unity player {number}", launched, log=output, more=() if log is None else (log,))

    check_free(where, host)
    return Unity(launch, where, areas=areas, engine=engine, connect_s=connect_s, timeout_s=timeout_s, host=host)


def _ask_for_play(player: PlayerProgram, port: int) -> None:
    sys.stderr.write(f"{player.name}: press Play; waiting for its call on port {port}\n")


def _bytes(digits: str) -> bytes:
    try:
        found = bytes.fromhex(digits)
        list(channels.parse_messages(found))
    except (ValueError, UnreadableData) as error:
        raise SettingsError(
            f"got side_channel {digits!r} ({error}); expected side channel bytes in hexadecimal digits; "
            "leave the option side_channel out"
        ) from error
    return found
