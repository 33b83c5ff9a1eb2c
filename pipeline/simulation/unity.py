"""Unity games: a player of ML-Agents' communicator as a game of ours.

The player is launched, or somebody presses Play in the editor. It calls in, introduces itself, is reset and plays:
each of its messages is a call, and what its agents are to do is the answer (`pipeline.unity`). It is launched when the
trainer first asks for a reset, because the seed comes with that.
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

from pipeline.errors import LocalProtocolError, SettingsError
from pipeline.messages.simulator import BehaviorActions, BehaviorReport, Statistic
from pipeline.simulation.player import Player, PlayerFailed
from pipeline.simulation.unity_build import BUILD_PORT, EDITOR_PORT, command, find_build
from pipeline.simulation.unity_server import Calls, Gone
from pipeline.specs import BehaviorSpec
from pipeline.unity import Unreadable, channels

if TYPE_CHECKING:
    from pipeline.unity.conversation import Conversation, Heard

PACKAGE: Final = "1.1.0"
"""Version of ML-Agents' trainers whose behavior towards a game this is."""

Reports = tuple[BehaviorReport, ...]

EDITOR_WAIT_S: Final = 600.0
"""For somebody to press Play."""

_END_S: Final = 1.0
"""For a player to end whose connection has broken: how it ended says more."""

_FAREWELL_S: Final = 5.0
"""For a player to end after it was told to."""


class Unity:
    """One Unity player. Made by `make_unity`.

    Args:
        player: the program, or nobody where the editor plays.
        calls: where it calls.
        areas: training areas that the game is to make.
        engine: side channel bytes that say how its engine runs.
        connect_s: seconds to wait for its first call.
        timeout_s: seconds to wait for any other.
        clock: seconds, monotonic.
    """

    name = "unity"

    def __init__(
        self,
        player: Player,
        calls: Calls,
        *,
        areas: int = 1,
        engine: bytes = b"",
        connect_s: float = 60.0,
        timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._player = player
        self._calls = calls
        self._areas = areas
        self._engine = engine
        self._connect_s = connect_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._conversation: Conversation | None = None
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
            PlayerFailed: it did not start, call, introduce itself or answer; or what it says can not be used.
            SettingsError: a parameter can not be told to it.
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
            PlayerFailed: it has ended, did not answer, or what it says can not be used.
        """
        assert self._conversation is not None
        self._player.phase = "stepping"
        reports = self._go_on(self._conversation, actions.values())
        return self._until_somebody_is_there(self._conversation, reports)

    def statistics(self) -> Sequence[Statistic]:
        """The game's own numbers since the last call."""
        told, self._statistics = self._statistics, []
        return told

    def close(self) -> None:
        """Tells the player to end, and ends it where it does not."""
        conversation = self._conversation
        if conversation is not None and self._calls.open:
            with contextlib.suppress(LocalProtocolError):  # it called when its time was up: nobody has heard it
                self._calls.answer(conversation.quit())
        self._calls.close()
        self._player.close(_FAREWELL_S)

    # ------------------------------------------------------------ the conversation

    def _meet(self, seed: int) -> Conversation:
        from pipeline.unity.conversation import Conversation

        player, conversation = self._player, Conversation()
        player.start()
        player.watch(lambda: self._calls.gone(""))
        if not player.launched:
            sys.stderr.write(f"{player.name}: press Play; waiting for its call on port {self._calls.port}\n")
        message = self._called(self._connect_s)
        player.phase = "connected"
        self._understood(conversation, message)
        self._calls.answer(conversation.initialise(seed=seed, package=PACKAGE, num_areas=self._areas))
        player.phase = "initialised"
        self._understood(conversation, self._called(self._timeout_s))
        self._conversation = conversation
        return conversation

    def _until_somebody_is_there(self, conversation: Conversation, reports: Reports) -> Reports:
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

    def _go_on(self, conversation: Conversation, actions: Any) -> Reports:
        self._calls.answer(conversation.step(actions, self._news()))
        return self._hear(conversation, self._timeout_s).reports

    def _hear(self, conversation: Conversation, timeout_s: float) -> Heard:
        heard = self._understood(conversation, self._called(timeout_s))
        if heard.behaviors:
            self._known = {**self._known, **heard.behaviors}
        self._statistics += heard.statistics
        return heard

    def _understood(self, conversation: Conversation, message: bytes) -> Heard:
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

    def _gone(self, gone: Gone) -> PlayerFailed:
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

    Raises:
        SettingsError: no such build, or the port is not free, or a library is missing.
    """
    number = int(os.environ.get("SPARRING_NUMBER") or 0)
    engine = channels.engine(
        resolution=(width, height),
        quality_level=quality_level,
        time_scale=time_scale,
        target_frame_rate=target_frame_rate,
        capture_frame_rate=capture_frame_rate,
    )
    if path is None:
        calls = Calls(EDITOR_PORT if port is None else port)
        player = Player("the Unity editor", None)
        connect_s = max(timeout_s, EDITOR_WAIT_S)
    else:
        build, logs = find_build(path), os.environ.get("SPARRING_LOGS")
        calls = Calls((BUILD_PORT if port is None else port) + (number if port != 0 else 0))
        log = Path(logs) / f"Player-{number}.log" if logs else None
        launched = command(build, calls.port, no_graphics=no_graphics, log=log, arguments=_split(arguments))
        output = None if log is None else log.with_suffix(".out")
        player = Player(f"Unity player {number}", launched, log=output, more=() if log is None else (log,))
        connect_s = timeout_s
    return Unity(player, calls, areas=areas, engine=engine, connect_s=connect_s, timeout_s=timeout_s)


def _split(arguments: str) -> list[str]:
    try:
        return shlex.split(arguments)
    except ValueError as error:
        raise SettingsError(
            f"got the game's arguments {arguments!r} ({error}); expected them as on a command line; close the quotes"
        ) from error
