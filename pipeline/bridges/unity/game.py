"""Plays a player of ML-Agents' communicator as a game of ours.

The player is launched, or a person presses Play in the editor. It calls, introduces itself, is reset and plays: each of
its messages is a call, and the answer holds its agents' actions. A trainer on the same machine talks to it directly,
and the bridge only supervises it. For any other trainer the bridge plays it as a game, and launches it at the first
reset, because that brings the seed.
"""

import asyncio
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from sparring.pipeline.bridges.player import ORDERLY_END, PHASES, PlayerFailed, PlayerProgram, split_arguments
from sparring.pipeline.bridges.unity import HOST, UnreadableData, channels
from sparring.pipeline.bridges.unity.build import BUILD_PORT, EDITOR_PORT, command, find_build
from sparring.pipeline.bridges.unity.connection import GONE, Event, PlayerConnection, player_fault
from sparring.pipeline.bridges.unity.conversation import PlayerMessage
from sparring.pipeline.errors import RemoteProtocolError, SettingsError
from sparring.pipeline.messages import simulator as messages
from sparring.pipeline.simulation.connection import Client
from sparring.pipeline.specs import BehaviorSpec

EDITOR_WAIT_S: Final = 600.0
"""Time for a person to press Play."""

_ENDED: Final = "the player has ended"

_CHECK_S: Final = 0.1
"""Time between two looks at the clock while the player is silent."""

_END_S: Final = 1.0
"""Time for a player with a broken connection to end: its exit status says more."""

_FAREWELL_S: Final = 5.0
"""Time for a player to end after `quit`."""


class Unity:
    """Represents one Unity player. It is made by `make_unity`.

    Args:
        launch: makes the program, given the port that it calls; a program without a command if the editor plays.
        player: what a trainer on this machine needs to talk to the player itself.
        host: IP address to listen on.
        clock: monotonic clock, in seconds.
    """

    name = "unity"

    def __init__(
        self,
        launch: Callable[[int], PlayerProgram],
        player: messages.Player,
        *,
        host: str = HOST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._launch = launch
        self._player = player
        self._host = host
        self._clock = clock
        self._program: PlayerProgram | None = None
        self._connection: PlayerConnection | None = None  # None if the trainer talks to the player, or before it does
        self._runner = asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)  # makes its loop at the first use
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._known: dict[str, BehaviorSpec] = {}
        self._statistics: list[messages.Statistic] = []
        self._parameters: Mapping[str, float] = {}
        self._revision: int | None = None  # of the parameters that the player has

    def behaviors(self) -> Mapping[str, BehaviorSpec]:
        """Returns the behaviors whose agents have appeared: none before the first reset."""
        return self._known

    def reset(self, parameters: Mapping[str, float], seed: int | None) -> Sequence[messages.BehaviorReport]:
        """Launches the player, the first time, and makes it begin new episodes.

        Raises:
            PlayerFailed: the player did not start, call, introduce itself or answer; or its message cannot be used; or
                a parameter cannot be sent to it.
            SettingsError: the port is in use.
        """
        if self._connection is None:
            self._connect(seed or 0)
        self._parameters, self._revision = parameters, None
        return self._exchange(messages.Reset(parameters=self._changed_parameters(), samplers=self._samplers()))

    def step(self, actions: Mapping[str, messages.BehaviorActions]) -> Sequence[messages.BehaviorReport]:
        """Plays on until an agent wants a decision or has ended.

        Raises:
            PlayerFailed: the player has ended, did not answer, or its message cannot be used.
        """
        return self._exchange(
            messages.Act(
                sequence=0,
                actions=tuple(actions.values()),
                parameters=self._changed_parameters(),
                samplers=self._samplers(),
            )
        )

    def player(self) -> messages.Player:
        """Returns what a trainer on this machine needs to talk to the player itself."""
        return self._player

    def attend(self, adopted: messages.Adopted, trainer: Client) -> messages.Bye:
        """Launches the player, which calls the trainer, and supervises it until the end.

        Raises:
            PlayerFailed: the player did not start, has ended, or broke the trainer's rules.
            LinkLost: the connection to the trainer broke and could not be restored.
            RemoteProtocolError: the trainer rejects something else.
        """
        news: messages.Adopted | messages.Progress | messages.Bye = adopted
        try:
            while not isinstance(news, messages.Bye):
                if isinstance(news, messages.Adopted):
                    program = self._start(news.port, lambda: trainer.stop(_ENDED))
                elif news.phase in PHASES:
                    program.phase = news.phase
                news = trainer.follow()
        except RemoteProtocolError as fault:
            if fault.code in ("player", GONE):
                raise _failure(program, fault) from fault
            raise
        if news.reason == _ENDED:
            program.check()
        return news

    def statistics(self) -> Sequence[messages.Statistic]:
        """Returns the game's own statistics since the last call."""
        statistics, self._statistics = self._statistics, []
        return statistics

    def close(self) -> None:
        """Orders the player to quit, and ends it if it does not."""
        connection, self._connection = self._connection, None
        if connection is not None:
            loop = self._runner.get_loop()
            asyncio.run_coroutine_threadsafe(connection.close(), loop).result(_END_S)
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()
        self._runner.close()
        self._end_program()

    # ------------------------------------------------------------ the program

    def _start(self, port: int, on_end: Callable[[], None]) -> PlayerProgram:
        """Starts a player, after the end of a former one, which a new trainer does not know."""
        self._end_program()
        program = self._program = self._launch(port)
        program.start()
        program.watch(lambda: on_end() if program is self._program else None)
        if not program.launched:
            sys.stderr.write(f"{program.name}: press Play; waiting for its call on port {port}\n")
        return program

    def _end_program(self) -> None:
        program, self._program = self._program, None
        if program is not None:
            program.close(_FAREWELL_S)

    # ------------------------------------------------------------ the conversation, unless it is the trainer's

    def _connect(self, seed: int) -> None:
        """Launches the player and waits until it can be reset."""
        loop = self._runner.get_loop()
        connection = self._connection = PlayerConnection(
            self._player, seed=seed, on_event=self._events.put, clock=self._clock, loop=loop, host=self._host
        )
        self._thread = threading.Thread(target=loop.run_forever, name="unity calls", daemon=True)
        self._thread.start()
        ended = player_fault("the end of the game", "see its log", GONE)
        program = self._start(connection.port, lambda: self._events.put(ended))
        self._receive(connection, program)

    def _exchange(self, answer: messages.Act | messages.Reset) -> Sequence[messages.BehaviorReport]:
        """Answers the player's last message, and returns its next reports."""
        connection, program = self._connection, self._program
        assert connection is not None
        assert program is not None
        self._runner.get_loop().call_soon_threadsafe(connection.answer, answer)
        return self._receive(connection, program)

    def _receive(self, connection: PlayerConnection, program: PlayerProgram) -> Sequence[messages.BehaviorReport]:
        """Returns the reports of the next message that needs an answer; none if the player is ready for a reset."""
        while True:
            try:
                event = self._events.get(timeout=_CHECK_S)
            except queue.Empty:
                if (overdue := connection.overdue(self._clock())) is None:
                    continue
                event = overdue
            if isinstance(event, messages.Fault):
                self._events.put(event)  # nothing follows it
                raise _failure(program, event)
            if isinstance(event, str):
                program.phase = event
                continue
            self._known = {**self._known, **event.behaviors}
            self._statistics += event.statistics
            _warn_of_plain_goals(program.name, event)
            if event.kind == "ready" or event.reports:
                return event.reports

    def _changed_parameters(self) -> dict[str, float]:
        """Returns all parameters, if the trainer has changed one."""
        known, self._revision = self._revision, getattr(self._parameters, "revision", 0)
        return dict(self._parameters) if self._revision != known else {}

    def _samplers(self) -> dict[str, messages.Sampler]:
        return dict(getattr(self._parameters, "samplers", {}))


def _warn_of_plain_goals(player: str, message: PlayerMessage) -> None:
    for behavior, goals in message.plain_goals.items():
        for name, kind in goals:
            sys.stderr.write(
                f"{player}: goal signal {name!r} of {behavior} is read as any other {kind}; "
                "networks are conditioned on goals of one axis only\n"
            )


def _failure(program: PlayerProgram, fault: messages.Fault | RemoteProtocolError) -> PlayerFailed:
    """Returns the report about a player with its phase, its log, and its exit status if that says more."""
    try:
        if fault.code == GONE:
            program.check(_END_S, fault.got if fault.got.startswith(ORDERLY_END) else "")
    except PlayerFailed as failure:
        return failure
    return program.failure(fault.got, fault.remedy)


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
    from sparring.pipeline.bridges.unity.server import check_free  # needs the library h2

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
    player = messages.Player(
        protocol="unity", port=where, settings=engine.hex(), areas=areas, connect_s=connect_s, timeout_s=timeout_s
    )
    return Unity(launch, player, host=host)


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
