"""Godot games: a game with the Godot RL Agents plugin as a game of ours.

The game is launched (or somebody presses Play in the editor), dials in, says what its agents see and do, is reset and
then plays. All its agents decide in every frame, and none ever leaves.

A game begins an agent's next episode by itself, mostly before the plugin asks for observations. So the one beside a
`done` is most often the first of the next episode, and sometimes the last of the old one; the message does not say
which. Nothing is bootstrapped from it: an end is never an interruption. The same agent decides on it in the same
report, as its next episode.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.bridges.godot.columns import UnreadableMessage, column, flags, one_number
from sparring.pipeline.bridges.godot.connection import GameConnection, GameListener
from sparring.pipeline.bridges.godot.spaces import PolicyAgents, read_policies
from sparring.pipeline.bridges.player import PlayerFailed, PlayerProgram
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.simulation.game import decisions, ends
from sparring.pipeline.specs import BehaviorSpec, SpecError

PORT: Final = 11008
MAJOR_VERSION: Final = "0"
MINOR_VERSION: Final = "7"
ENDING_S: Final = 5.0
"""How long a game may take to end in order."""
_SHOWN: Final = 5
"""Values of a call that are said."""
_WIDTH: Final = 60
"""Characters of each."""

_OUR_WORDS: Final = {"env_path": "path", "seed": "env_seed", "show_window": "headless", "viz": "headless"}
"""Words of Godot RL Agents for what is called otherwise here."""


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
    **options: Any,
) -> GodotGame:
    """A Godot game that has dialled in.

    Args:
        areas: 1; the scene says how many agents there are.
        path: of the exported game, or a program that runs it; None waits for one that is started by hand.
        port: where the game dials in; a launched one at this + $SPARRING_NUMBER, or at any free one where that is taken
            and no other port was asked for.
        behavior: name of the behavior of a game with one policy; None: the policy's, and "Godot" where it has no name.
        env_seed: of the game's random source; None: $SPARRING_SEED, else the game's own.
        speedup: of the game's clock.
        action_repeat: physics frames for which an action holds.
        framerate: of simulated time (--fixed-fps).
        headless: without a window; cameras see nothing then.
        timeout_s: how long the game may take to dial in, and for each answer.
        log: file for what a launched game writes; None: a temporary one, which is kept where the game fails.
        call: methods of the agents' controllers that are called before the first reset, one after the other.
        arguments: further ones of its command line, as a shell would split them.
        options: go to the game as --key=value.

    Raises:
        SettingsError: an option is impossible, or the port is not free.
        PlayerFailed: the game did not start, or dial in, or introduce itself.
        SpecError: a space has no form here.
    """
    _check(areas, timeout_s, options)
    methods = _methods(call)
    number = _environment("SPARRING_NUMBER") or 0
    name = f"Godot game {number}"
    if path is None:
        return _opened(
            PlayerProgram(name, None), GameListener(port, otherwise=False, timeout_s=timeout_s), behavior, methods
        )
    program, words = _program(path), _words(arguments)
    door = GameListener(port and port + number, otherwise=port == PORT, timeout_s=timeout_s)
    command = [program, f"--port={door.port}", *(["--headless"] if headless else [])]
    command += [] if framerate is None else ["--fixed-fps", str(framerate)]
    seed = _environment("SPARRING_SEED") if env_seed is None else env_seed
    named = {"env_seed": seed, "speedup": speedup, "action_repeat": action_repeat, **options}
    command += [f"--{key}={_text(value)}" for key, value in named.items() if value is not None]
    written = Path(log) if log else _temporary(number)
    player = PlayerProgram(name, [*command, *words], log=written)
    return _opened(player, door, behavior, methods, None if log else written)


class GodotGame:
    """A game that has introduced itself.

    Args:
        player: started, connected.
        line: to it.
        behavior: as for `make_godot`.
        methods: to call before the first reset.
        litter: a file to remove where the game does not fail.

    Raises:
        PlayerFailed: it does not introduce itself.
        SpecError: a space has no form here.
    """

    name = "godot"

    def __init__(
        self,
        player: PlayerProgram,
        line: GameConnection,
        behavior: str | None,
        methods: Sequence[str] = (),
        litter: Path | None = None,
    ) -> None:
        self._player = player
        self._line = line
        self._methods = methods
        self._litter = litter
        self._failed = False
        self._policies = self._introduced(behavior)
        self._agents = range(sum(policy.agents.size for policy in self._policies))
        self._commands: list[dict[str, Any]] = [{}] * len(self._agents)

    def behaviors(self) -> Mapping[str, BehaviorSpec]:
        """One behavior for each policy."""
        return {policy.behavior: policy.spec for policy in self._policies}

    def reset(self, parameters: Mapping[str, float], seed: int | None) -> Sequence[BehaviorReport]:
        """New episodes for all agents. The game has its seed from its command line: the protocol has no word for it."""
        del seed
        if parameters:
            raise SettingsError(
                f"got the environment parameters {', '.join(sorted(parameters))} for a Godot game; expected none, its "
                "protocol has no place for them; give what is constant as options of the simulator"
            )
        if self._player.phase == "initialised":
            for method in self._methods:
                self._note(method, self.call(method))
            self._player.phase = "first reset"
        with self._blamed():
            columns = self._columns(self._line.ask({"type": "reset"}))
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
        with self._blamed():
            answer = self._line.ask({"type": "action", "action": self._commands})
            columns = self._columns(answer)
            rewards = column(self._agents, self._listed(answer, "reward"), one_number, "reward")
            over = column(self._agents, self._listed(answer, "done"), flags, "done")
        return [
            _report(policy, seen, rewards[policy.agents], over[policy.agents])
            for policy, seen in zip(self._policies, columns, strict=True)
        ]

    def call(self, method: str) -> list[Any]:
        """Has each agent's controller call a method of its own, which takes no arguments.

        Returns:
            [agents] What came back; None where nothing did, or there is no such method: the game's log says which.

        Raises:
            PlayerFailed: the game has ended, does not answer, or not for each agent.
        """
        with self._blamed(f"correct {method} of the agents' controllers, or take it from the option call"):
            return self._listed(self._line.ask({"type": "call", "method": method}), "returns")

    def _note(self, method: str, returned: list[Any]) -> None:
        """Says what a call has brought, once for equal values."""
        values = list(dict.fromkeys(json.dumps(value)[:_WIDTH] for value in returned))
        said = ", ".join(values[:_SHOWN]) + (", ..." if len(values) > _SHOWN else "")
        sys.stderr.write(f"{self._player.name}: {method} of {len(returned)} agents returned {said}\n")

    def close(self) -> None:
        """Asks the game to end, and sees that it does."""
        if not self._failed:
            with contextlib.suppress(PlayerFailed):  # it has ended by itself
                self._line.say({"type": "close"})
        self._player.close(0.0 if self._failed else ENDING_S)
        self._line.close()
        if self._litter is not None and not self._failed:
            self._litter.unlink(missing_ok=True)

    def _introduced(self, behavior: str | None) -> list[PolicyAgents]:
        self._line.say({"type": "handshake", "major_version": MAJOR_VERSION, "minor_version": MINOR_VERSION})
        info = self._line.ask({"type": "env_info"})
        try:
            policies = read_policies(info, behavior)
        except SpecError as error:
            where = f"{self._player.name}, {self._player.phase}: {error.got}"
            raise SpecError(got=where, expected=error.expected, remedy=error.remedy) from error
        self._player.phase = "initialised"
        return policies

    def _columns(self, answer: Mapping[str, Any]) -> list[tuple[NDArray[Any], ...]]:
        """The observations of each policy."""
        rows = self._listed(answer, "obs")
        return [policy.columns(rows) for policy in self._policies]

    def _listed(self, answer: Mapping[str, Any], key: str) -> list[Any]:
        """A list of an answer that has an entry for each agent."""
        values = answer.get(key)
        if not isinstance(values, list) or len(values) != len(self._agents):
            got = f"{len(values)} entries" if isinstance(values, list) else repr(values)[:40]
            raise UnreadableMessage(f"{got} as {key!r} of {len(self._agents)} agents")
        return values

    @contextlib.contextmanager
    def _blamed(self, remedy: str = "correct get_obs, get_reward or get_done of the agent") -> Iterator[None]:
        """Remembers that the game has failed; what is unreadable is its failure too."""
        try:
            yield
        except UnreadableMessage as error:
            self._failed = True
            raise self._player.failure(str(error), remedy) from error
        except PlayerFailed:
            self._failed = True
            raise


def _report(
    policy: PolicyAgents, seen: tuple[NDArray[Any], ...], rewards: NDArray[np.float32], over: NDArray[np.bool_]
) -> BehaviorReport:
    ended = None
    if over.any():
        ended = ends(policy.agents[over], [one[over] for one in seen], rewards=rewards[over])
        rewards = np.where(over, np.float32(0), rewards)
    return BehaviorReport(
        behavior=policy.behavior, decisions=decisions(policy.agents, seen, rewards=rewards), ends=ended
    )


def _opened(
    player: PlayerProgram, door: GameListener, behavior: str | None, methods: Sequence[str], litter: Path | None = None
) -> GodotGame:
    """Starts the game and waits until it has introduced itself; on any failure nothing of it is left running."""
    line: GameConnection | None = None
    try:
        player.start()
        line = door.accept(player)
        return GodotGame(player, line, behavior, methods, litter)
    except BaseException as error:
        player.close(0.0)
        if line is not None:
            line.close()
        if litter is not None and not isinstance(error, PlayerFailed):
            litter.unlink(missing_ok=True)
        raise
    finally:
        door.close()


def _check(areas: int, timeout_s: float, options: Mapping[str, Any]) -> None:
    if areas != 1 or not timeout_s > 0:
        raise SettingsError(
            f"got areas={areas} and timeout_s={timeout_s:g}; expected 1 area and some time; the scene of a Godot game "
            "says how many agents it has: for more games raise count"
        )
    for word in options.keys() & _OUR_WORDS.keys():
        raise SettingsError(f"got the option {word!r}; expected {_OUR_WORDS[word]!r}; use that word")


def _program(path: str) -> str:
    """The program of a path; on macOS the one inside an .app folder."""
    given = Path(path).expanduser()
    if given.is_dir() and given.suffix == ".app":
        given = next(iter(sorted((given / "Contents" / "MacOS").glob("*"))), given)
    if given.is_file():
        return str(given.absolute())
    if (found := shutil.which(path)) is None:
        raise SettingsError(
            f"got path {path!r}, where no program is; expected an exported Godot game; correct the path, or leave it "
            "out to start the game from the editor"
        )
    return found


def _words(arguments: str) -> list[str]:
    try:
        return shlex.split(arguments)
    except ValueError as error:
        raise SettingsError(
            f"got arguments {arguments!r} ({error}); expected words as a shell splits them; correct the option"
        ) from error


def _methods(call: str) -> list[str]:
    """Names of methods, apart by spaces or commas."""
    methods = call.replace(",", " ").split()
    for method in methods:
        if not method.isidentifier():
            raise SettingsError(
                f"got call {call!r}; expected names of methods of the agents' controllers, which take no arguments; "
                "correct the option"
            )
    return methods


def _environment(variable: str) -> int | None:
    """A number that the supervisor gives; the simulator's command line has refused what is none."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None


def _temporary(number: int) -> Path:
    handle, name = tempfile.mkstemp(prefix=f"godot-game-{number}-", suffix=".log")
    os.close(handle)
    return Path(name)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
