"""Plays a Godot game with the Godot RL Agents plugin as a game of ours.

The game is launched (or a person presses Play in the editor), connects, describes the spaces of its agents, is reset
and then plays. All its agents decide in every frame, and none ever leaves.

A game begins an agent's next episode by itself, mostly before the plugin asks for observations. So the observation
beside a `done` is most often the first of the next episode, and sometimes the last of the old one; the message does not
say which. Nothing is bootstrapped from it: an end is never an interruption. The same agent decides on it in the same
report, as its next episode.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.bridges.godot import spaces
from sparring.pipeline.bridges.godot.connection import GameConnection
from sparring.pipeline.bridges.godot.spaces import PolicyAgents, UnreadableMessage, column
from sparring.pipeline.bridges.player import PlayerFailed, PlayerProgram, split_arguments
from sparring.pipeline.bridges.spaces import Option
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.files import Json, expanded
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.simulation.game import decisions, ends
from sparring.pipeline.specs import Array, BehaviorSpec, SpecError

PORT: Final = 11008
MAJOR_VERSION: Final = "0"
MINOR_VERSION: Final = "7"
ENDING_S: Final = 5.0
"""Time for a game to end in order."""
_SHOWN: Final = 5
"""Number of returned values of a call that are printed."""
_WIDTH: Final = 60
"""Printed characters of each value."""

_RENAMED_OPTIONS: Final = {"env_path": "path", "seed": "env_seed", "show_window": "headless", "viz": "headless"}
"""Options of Godot RL Agents that have another name here."""


def make_godot(
    areas: int = 1,
    *,
    path: str | None = None,
    port: int = PORT,
    behavior: str | None = None,
    env_seed: int | None = None,
    speedup: float | None = None,
    action_repeat: int | None = None,
    framerate: int | None = None,
    headless: bool = True,
    timeout_s: float = 60.0,
    log: str | None = None,
    call: str = "",
    arguments: str = "",
    **options: Option,
) -> GodotGame:
    """Returns a Godot game that has connected.

    Args:
        areas: always 1; the scene determines the number of agents.
        path: path of the exported game, or a program that runs it; None waits for a game that a person starts.
        port: port to which the game connects; a launched game uses this + $SPARRING_NUMBER, or any free port if the
            default one is in use.
        behavior: name of the behavior of a game with one policy; None takes the policy's name, or "Godot" if it has
            none.
        env_seed: seed of the game's random source; None: $SPARRING_SEED, else the game's own.
        speedup: factor of the game's clock.
        action_repeat: number of physics frames for each action.
        framerate: frames per second of simulated time (--fixed-fps).
        headless: run without a window; cameras see nothing then.
        timeout_s: time for the game to connect, and for each answer.
        log: file for the output of a launched game; None: a temporary file, which is kept if the game fails.
        call: methods of the agents' controllers to call before the first reset, in order.
        arguments: further arguments of its command line, split as in a shell.
        options: passed to the game as --key=value.

    Raises:
        SettingsError: an option is impossible, or the port is in use.
        PlayerFailed: the game did not start, connect or introduce itself.
        SpecError: a space is not supported.
    """
    _check(areas, timeout_s, options)
    methods = _methods(call)
    number = int(os.environ.get("SPARRING_NUMBER") or 0)
    name = f"Godot game {number}"
    if path is None:
        connection = GameConnection(port, otherwise=False, timeout_s=timeout_s)
        return GodotGame(PlayerProgram(name, None), connection, behavior, methods)
    program, words = _program(path), split_arguments(arguments)
    connection = GameConnection(port and port + number, otherwise=port == PORT, timeout_s=timeout_s)
    command = [program, f"--port={connection.port}", *(["--headless"] if headless else [])]
    command += [] if framerate is None else ["--fixed-fps", str(framerate)]
    seed = env_seed if env_seed is not None else os.environ.get("SPARRING_SEED") or None
    named = {"env_seed": seed, "speedup": speedup, "action_repeat": action_repeat, **options}
    command += [f"--{key}={_text(value)}" for key, value in named.items() if value is not None]
    written = Path(log) if log else _temporary(number)
    player = PlayerProgram(name, [*command, *words], log=written)
    return GodotGame(player, connection, behavior, methods, None if log else written)


class GodotGame:
    """Represents a game that has introduced itself. A game that does not is ended.

    Args:
        player: the program, to be started.
        connection: where it connects.
        behavior: see `make_godot`.
        methods: methods to call before the first reset.
        temporary_log: file to remove unless the game fails.

    Raises:
        PlayerFailed: the game does not start, connect or introduce itself.
        SpecError: a space is not supported.
    """

    name = "godot"

    def __init__(
        self,
        player: PlayerProgram,
        connection: GameConnection,
        behavior: str | None,
        methods: Sequence[str] = (),
        temporary_log: Path | None = None,
    ) -> None:
        self._player = player
        self._connection = connection
        self._methods = methods
        self._temporary_log = temporary_log
        try:
            player.start()
            connection.accept(player)
            self._policies = self._introduce(behavior)
        except BaseException:
            self._end(0.0, keep_log=player.has_failed)
            raise
        self._agents = range(sum(policy.agents.size for policy in self._policies))
        self._commands: list[dict[str, Json]] = [{}] * len(self._agents)

    def behaviors(self) -> Mapping[str, BehaviorSpec]:
        """Returns the spec of one behavior for each policy."""
        return {policy.behavior: policy.spec for policy in self._policies}

    def reset(self, parameters: Mapping[str, float], seed: int | None) -> Sequence[BehaviorReport]:
        """Begins new episodes for all agents. The game has its seed from the command line: the protocol has no field
        for it.
        """
        del seed
        if parameters:
            raise SettingsError(
                f"got the environment parameters {', '.join(sorted(parameters))} for a Godot game; expected none, its "
                "protocol has no field for them; set constants as options of the simulator"
            )
        if self._player.phase == "initialized":
            for method in self._methods:
                self._note(method, self.call(method))
            self._player.phase = "first reset"
        with self._explaining():
            columns = self._columns(self._connection.request({"type": "reset"}))
        self._player.phase = "stepping"
        return [
            BehaviorReport(behavior=policy.behavior, decisions=decisions(policy.agents, seen))
            for policy, seen in zip(self._policies, columns, strict=True)
        ]

    def step(self, actions: Mapping[str, BehaviorActions]) -> Sequence[BehaviorReport]:
        """Plays one frame. A `done` ends an episode, and the same agent decides as its next one."""
        for policy in self._policies:
            for agent, command in zip(policy.agents.tolist(), policy.commands(actions[policy.behavior]), strict=True):
                self._commands[agent] = command
        with self._explaining():
            answer = self._connection.request({"type": "action", "action": self._commands})
            columns = self._columns(answer)
            rewards = column(self._agents, self._listed(answer, "reward"), spaces.one_number, "reward")
            over = column(self._agents, self._listed(answer, "done"), spaces.flags, "done")
        return [
            _report(policy, seen, rewards[policy.agents], over[policy.agents])
            for policy, seen in zip(self._policies, columns, strict=True)
        ]

    def call(self, method: str) -> list[Json]:
        """Makes each agent's controller call a method without arguments.

        Returns:
            [agents] returned values; None for no value or an unknown method: the game's log says which.

        Raises:
            PlayerFailed: the game has ended, does not answer, or does not answer for each agent.
        """
        with self._explaining(f"correct {method} of the agents' controllers, or remove it from the option call"):
            return self._listed(self._connection.request({"type": "call", "method": method}), "returns")

    def _note(self, method: str, returned: list[Json]) -> None:
        """Prints the values that a call returned, equal values once."""
        values = list(dict.fromkeys(json.dumps(value)[:_WIDTH] for value in returned))
        shown = ", ".join(values[:_SHOWN]) + (", ..." if len(values) > _SHOWN else "")
        sys.stderr.write(f"{self._player.name}: {method} of {len(returned)} agents returned {shown}\n")

    def close(self) -> None:
        """Asks the game to end, and ends it if it does not."""
        failed = self._player.has_failed
        if not failed:
            with contextlib.suppress(PlayerFailed):  # the game has ended already
                self._connection.send({"type": "close"})
        self._end(0.0 if failed else ENDING_S, keep_log=failed)

    def _end(self, timeout_s: float, *, keep_log: bool) -> None:
        """Ends the game if it does not end by itself in time."""
        self._player.close(timeout_s)
        self._connection.close()
        if self._temporary_log is not None and not keep_log:
            self._temporary_log.unlink(missing_ok=True)

    def _introduce(self, behavior: str | None) -> list[PolicyAgents]:
        self._connection.send({"type": "handshake", "major_version": MAJOR_VERSION, "minor_version": MINOR_VERSION})
        info = self._connection.request({"type": "env_info"})
        try:
            policies = spaces.read_policies(info, behavior)
        except SpecError as error:
            where = f"{self._player.name}, {self._player.phase}: {error.got}"
            raise SpecError(got=where, expected=error.expected, remedy=error.remedy) from error
        self._player.phase = "initialized"
        return policies

    def _columns(self, answer: Mapping[str, Json]) -> list[tuple[Array, ...]]:
        """Returns the observations of each policy."""
        rows = self._listed(answer, "obs")
        return [policy.columns(rows) for policy in self._policies]

    def _listed(self, answer: Mapping[str, Json], key: str) -> list[Json]:
        """Returns a list of an answer that has one entry for each agent."""
        values = answer.get(key)
        if not isinstance(values, list) or len(values) != len(self._agents):
            got = f"{len(values)} entries" if isinstance(values, list) else repr(values)[:40]
            raise UnreadableMessage(f"{got} as {key!r} of {len(self._agents)} agents")
        return values

    @contextlib.contextmanager
    def _explaining(self, remedy: str = "correct get_obs, get_reward or get_done of the agent") -> Iterator[None]:
        """Reports an unreadable message as a failure of the game."""
        try:
            yield
        except UnreadableMessage as error:
            raise self._player.failure(str(error), remedy) from error


def _report(
    policy: PolicyAgents, seen: tuple[Array, ...], rewards: NDArray[np.float32], over: NDArray[np.bool_]
) -> BehaviorReport:
    ended = None
    if over.any():
        ended = ends(policy.agents[over], [one[over] for one in seen], rewards=rewards[over])
        rewards = np.where(over, np.float32(0), rewards)
    return BehaviorReport(
        behavior=policy.behavior, decisions=decisions(policy.agents, seen, rewards=rewards), ends=ended
    )


def _check(areas: int, timeout_s: float, options: Iterable[str]) -> None:
    if areas != 1 or not timeout_s > 0:
        raise SettingsError(
            f"got areas={areas} and timeout_s={timeout_s:g}; expected 1 area and a positive time; the scene of a Godot "
            "game determines the number of agents: for more games raise count"
        )
    for name in _RENAMED_OPTIONS.keys() & set(options):
        raise SettingsError(f"got the option {name!r}; expected {_RENAMED_OPTIONS[name]!r}; use that name")


def _program(path: str) -> str:
    """Returns the program of a path; on macOS the one inside an .app folder."""
    given = expanded(path)
    if given.is_dir() and given.suffix == ".app":
        given = next(iter(sorted((given / "Contents" / "MacOS").glob("*"))), given)
    if given.is_file():
        return str(given.absolute())
    if (found := shutil.which(path)) is None:
        raise SettingsError(
            f"got path {path!r}, which is no program; expected an exported Godot game; correct the path, or leave it "
            "out to start the game from the editor"
        )
    return found


def _methods(call: str) -> list[str]:
    """Returns names of methods, separated by spaces or commas."""
    methods = call.replace(",", " ").split()
    for method in methods:
        if not method.isidentifier():
            raise SettingsError(
                f"got call {call!r}; expected names of methods of the agents' controllers, which take no arguments; "
                "correct the option"
            )
    return methods


def _temporary(number: int) -> Path:
    handle, name = tempfile.mkstemp(prefix=f"godot-game-{number}-", suffix=".log")
    os.close(handle)
    return Path(name)


def _text(value: Option) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
