"""Unity games: a player of ML-Agents' communicator as a game of ours.

The player is launched, or somebody presses Play in the editor. It calls in, introduces itself, is reset and plays:
each of its messages is a call, and what its agents are to do is the answer. A trainer on the same machine
speaks with it directly, and the bridge only supervises it. For any other trainer the bridge plays it as a game, and
launches it at the first reset, because the seed comes with that.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sparring.pipeline.bridges.player import PHASES, PlayerFailed, PlayerProgram
from sparring.pipeline.bridges.unity import Unreadable, channels
from sparring.pipeline.bridges.unity.build import BUILD_PORT, EDITOR_PORT, command, find_build
from sparring.pipeline.bridges.unity.game_server import Calls, PlayerGone
from sparring.pipeline.bridges.unity.server import HOST, check_free
from sparring.pipeline.errors import LocalProtocolError, RemoteProtocolError, SettingsError
from sparring.pipeline.messages import simulator as record
from sparring.pipeline.messages.simulator import Adopted, BehaviorActions, BehaviorReport, Bye, Progress, Statistic
from sparring.pipeline.simulation.game import AttendedGame
from sparring.pipeline.specs import BehaviorSpec

if TYPE_CHECKING:
    from sparring.pipeline.bridges.unity.conversation import PlayerConversation, PlayerMessage

Reports = tuple[BehaviorReport, ...]

EDITOR_WAIT_S: Final = 600.0
"""For somebody to press Play."""

_ENDED: Final = "the player has ended"

_END_S: Final = 1.0
"""For a player to end whose connection has broken: how it ended says more."""

_FAREWELL_S: Final = 5.0
"""For a player to end after it was told to."""


class Unity:
    """One Unity player. Made by `make_unity`.

    Args:
        launch: makes the program, given the port on which it is to call; nobody's where the editor plays.
        port: on which it is to call; 0 chooses one.
        areas: training areas that the game is to make.
        engine: side channel bytes that say how its engine runs, and whatever else it is told first.
        connect_s: seconds to wait for its first call.
        timeout_s: seconds to wait for any other.
        host: IP address on which it is to call.
        clock: seconds, monotonic.
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
        self._served: tuple[Calls, PlayerProgram] | None = None  # by this process
        self._attended: PlayerProgram | None = None  # and the trainer speaks with it
        self._areas = areas
        self._engine = engine
        self._connect_s = connect_s
        self._timeout_s = timeout_s
        self._host = host
        self._clock = clock
        self._conversation: PlayerConversation | None = None
        self._known: dict[str, BehaviorSpec] = {}
        self._statistics: list[Statistic] = []
        self._parameters: Mapping[str, float] = {}
        self._revision = -1

    def behaviors(self) -> Mapping[str, BehaviorSpec]:
        """Those whose agents have appeared: none before the first reset."""
        return self._known

    def reset(self, parameters: Mapping[str, float], seed: int | None) -> Sequence[BehaviorReport]:
        """Launches the player, the first time, and has it begin new episodes.

        Raises:
            PlayerFailed: it did not start, call, introduce itself or answer; or what it says cannot be used.
            SettingsError: a parameter cannot be told to it.
        """
        self._parameters = parameters
        conversation = self._conversation or self._meet(seed or 0)
        told = self._told_parameters()
        if self._player.phase == "initialised":
            told, self._player.phase = self._engine + told, "first reset"
        self._calls.answer(conversation.reset(told))
        return self._until_somebody_is_there(conversation, self._hear(conversation, self._timeout_s).reports)

    def step(self, actions: Mapping[str, BehaviorActions]) -> Sequence[BehaviorReport]:
        """Plays on until some agent wants a decision or has ended.

        Raises:
            PlayerFailed: it has ended, did not answer, or what it says cannot be used.
        """
        assert self._conversation is not None
        self._player.phase = "stepping"
        reports = self._go_on(self._conversation, actions.values())
        return self._until_somebody_is_there(self._conversation, reports)

    def player(self) -> record.Player:
        """What a trainer on this machine needs to speak with the player itself."""
        return record.Player(
            protocol="unity",
            port=self._port,
            settings=self._engine.hex(),
            areas=self._areas,
            connect_s=self._connect_s,
            timeout_s=self._timeout_s,
        )

    def attend(self, adopted: Adopted, trainer: AttendedGame) -> Bye:
        """Launches the player, which calls the trainer, and looks after it until the end.

        Raises:
            PlayerFailed: it did not start, has ended, or the trainer cannot use what it says or does.
            LinkLost: the trainer has gone and does not come back.
            RemoteProtocolError: the trainer refuses something else.
        """
        news: Adopted | Progress | Bye = adopted
        try:
            while not isinstance(news, Bye):
                if isinstance(news, Adopted):
                    self._look_after(news.port, trainer)
                elif self._attended is not None and news.phase in PHASES:
                    self._attended.phase = news.phase
                news = trainer.follow()
        except RemoteProtocolError as fault:
            raise self._failed(fault) from fault
        if self._attended is not None and news.reason == _ENDED:
            self._attended.check()
        return news

    def _look_after(self, port: int, trainer: AttendedGame) -> None:
        """Starts a player for a trainer. One that is new knows nothing of the last."""
        former, self._attended = self._attended, None
        if former is not None:
            former.close(_FAREWELL_S)
        player = self._attended = self._launch(port)
        player.start()
        player.watch(lambda: trainer.stop(_ENDED) if player is self._attended else None)
        if not player.launched:
            _ask_for_play(player, port)

    def _failed(self, fault: RemoteProtocolError) -> Exception:
        """What the trainer says of the player, with what is known here: how far it had come, how it ended, its log."""
        player = self._attended
        if player is None or fault.code not in ("player", "gone"):
            return fault
        try:
            player.check(_END_S if fault.code == "gone" else 0.0)
        except PlayerFailed as failure:
            return failure
        return player.failure(fault.got, fault.remedy)

    def statistics(self) -> Sequence[Statistic]:
        """The game's own numbers since the last call."""
        told, self._statistics = self._statistics, []
        return told

    def close(self) -> None:
        """Tells the player to end, and ends it where it does not."""
        attended, self._attended = self._attended, None
        if attended is not None:
            attended.close(_FAREWELL_S)
        if self._served is None:
            return
        conversation, (calls, player) = self._conversation, self._served
        if conversation is not None and calls.open:
            with contextlib.suppress(LocalProtocolError):  # it called when its time was up: nobody has heard it
                calls.answer(conversation.quit())
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
        """Listens, from the first use on: until then it is open who speaks with the player."""
        if self._served is None:
            calls = Calls(self._port, self._host)
            self._served = calls, self._launch(calls.port)
        return self._served

    def _meet(self, seed: int) -> PlayerConversation:
        from sparring.pipeline.bridges.unity.conversation import PACKAGE, PlayerConversation

        player, conversation = self._player, PlayerConversation()
        player.start()
        player.watch(lambda: self._calls.gone(""))
        if not player.launched:
            _ask_for_play(player, self._calls.port)
        message = self._called(self._connect_s)
        player.phase = "connected"
        self._understood(conversation, message)
        self._calls.answer(conversation.initialise(seed=seed, package=PACKAGE, num_areas=self._areas))
        player.phase = "initialised"
        self._understood(conversation, self._called(self._timeout_s))
        self._conversation = conversation
        return conversation

    def _until_somebody_is_there(self, conversation: PlayerConversation, reports: Reports) -> Reports:
        """Lets the game go on until some agent wants a decision or has ended: that may take some steps."""
        deadline = self._clock() + self._timeout_s
        while not reports:
            if self._clock() > deadline:
                raise self._player.failure(
                    f"no agent that wanted a decision or ended in {self._timeout_s:g} s",
                    "give the agents a Decision Requester, or call RequestDecision",
                )
            reports = self._go_on(conversation, ())
        return reports

    def _go_on(self, conversation: PlayerConversation, actions: Any) -> Reports:
        self._calls.answer(conversation.step(actions, self._news()))
        return self._hear(conversation, self._timeout_s).reports

    def _hear(self, conversation: PlayerConversation, timeout_s: float) -> PlayerMessage:
        heard = self._understood(conversation, self._called(timeout_s))
        if heard.behaviors:
            self._known = {**self._known, **heard.behaviors}
        for behavior, goals in heard.plain_goals.items():
            for name, kind in goals:
                sys.stderr.write(
                    f"{self._player.name}: goal signal {name!r} of {behavior} is read as any other {kind}; "
                    "networks are conditioned on goals of one axis only\n"
                )
        self._statistics += heard.statistics
        return heard

    def _understood(self, conversation: PlayerConversation, message: bytes) -> PlayerMessage:
        try:
            heard = conversation.hear(message)
        except Unreadable as error:
            raise self._player.failure(str(error), error.remedy) from error
        if heard.farewell is not None:
            self._player.check()
            said = f" ({heard.farewell})" if heard.farewell else ""
            raise self._player.failure(f"a player that ended the conversation{said}", "keep the game running")
        return heard

    def _called(self, timeout_s: float) -> bytes:
        """The player's next message."""
        message = self._calls.receive(timeout_s)
        if isinstance(message, bytes):
            return message
        if message is None:
            raise self._player.failure(
                f"nothing in {timeout_s:g} s", "see what the game does; raise --timeout-wait where it only takes longer"
            )
        raise self._gone(message)

    def _gone(self, gone: PlayerGone) -> PlayerFailed:
        try:
            self._player.check(_END_S)
        except PlayerFailed as failure:
            return failure
        return self._player.failure(gone.why or "the end of the game", "see its log")

    # ------------------------------------------------------------ parameters

    def _news(self) -> bytes:
        """Side channel bytes of the parameters, where the trainer has changed them."""
        if getattr(self._parameters, "revision", 0) == self._revision:
            return b""
        return self._told_parameters()

    def _told_parameters(self) -> bytes:
        """Side channel bytes of all parameters. The player draws from samplers itself, whenever the game asks."""
        self._revision = getattr(self._parameters, "revision", 0)
        samplers = getattr(self._parameters, "samplers", {})
        told = [channels.sampler(key, one.kind, one.values, one.seed) for key, one in samplers.items()]
        told += [channels.parameter(key, self._parameters[key]) for key in self._parameters if key not in samplers]
        return b"".join(told)


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
    told: str = "",
    host: str = HOST,
) -> Unity:
    """A Unity player.

    The first simulator of a run ($SPARRING_NUMBER) listens on `port`, the others on those after it; its log is in
    $SPARRING_LOGS, where that is set.

    Args:
        areas: training areas that the game is to make.
        path: of the build; None: somebody presses Play in the editor.
        port: None: 5005 for builds, 5004 for the editor; 0 chooses one.
        arguments: of the game, as on a command line.
        no_graphics: without window and rendering.
        timeout_s: seconds to wait for the player; for somebody to press Play at least ten minutes.
        width: of the window, in pixels.
        height: of the window, in pixels.
        quality_level: of rendering.
        time_scale: factor of the game's clock.
        target_frame_rate: frames per second; -1: as many as possible.
        capture_frame_rate: frames per second of the game's clock.
        told: further side channel bytes for its first reset, in hexadecimal digits.
        host: IP address on which it is to call; beyond loopback whoever reaches the port can be the player. A trainer
            that speaks with it itself goes by its own settings.

    Raises:
        SettingsError: no such build, or the port is not free, or a library is missing; or `told` is none.
    """
    number = int(os.environ.get("SPARRING_NUMBER") or 0)
    engine = channels.engine(
        resolution=(width, height),
        quality_level=quality_level,
        time_scale=time_scale,
        target_frame_rate=target_frame_rate,
        capture_frame_rate=capture_frame_rate,
    ) + _bytes(told)
    if path is None:
        where, connect_s = EDITOR_PORT if port is None else port, max(timeout_s, EDITOR_WAIT_S)

        def launch(port: int) -> PlayerProgram:
            del port  # the editor knows only one
            return PlayerProgram("the Unity editor", None)
    else:
        build, logs, words = find_build(path), os.environ.get("SPARRING_LOGS"), _split(arguments)
        where = (BUILD_PORT if port is None else port) + (number if port != 0 else 0)
        log, connect_s = Path(logs) / f"Player-{number}.log" if logs else None, timeout_s

        def launch(port: int) -> PlayerProgram:
            launched = command(build, port, no_graphics=no_graphics, log=log, arguments=words)
            output = None if log is None else log.with_suffix(".out")
            return PlayerProgram(f"Unity player {number}", launched, log=output, more=() if log is None else (log,))

    check_free(where, host)
    return Unity(launch, where, areas=areas, engine=engine, connect_s=connect_s, timeout_s=timeout_s, host=host)


def _ask_for_play(player: PlayerProgram, port: int) -> None:
    sys.stderr.write(f"{player.name}: press Play; waiting for its call on port {port}\n")


def _bytes(told: str) -> bytes:
    try:
        found = bytes.fromhex(told)
        list(channels.received(found))
    except (ValueError, Unreadable) as error:
        raise SettingsError(
            f"got {told!r} as what the game is told ({error}); expected side channel bytes in hexadecimal digits; "
            "leave the option told out"
        ) from error
    return found


def _split(arguments: str) -> list[str]:
    try:
        return shlex.split(arguments)
    except ValueError as error:
        raise SettingsError(
            f"got the game's arguments {arguments!r} ({error}); expected them as on a command line; close the quotes"
        ) from error
