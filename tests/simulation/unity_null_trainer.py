"""A trainer that answers zeros, to measure the speed of a player stand-in alone.

python tests/simulation/unity_null_trainer.py --seconds 10 --players 1 -- --game balance --areas 12
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.simulation.unity_player_schema import CAPABILITIES, METHOD, OK, QUIT, RESET, chunk, classes, varint

PLAYER: Final = Path(__file__).with_name("unity_player.py")
_START_S: Final = 60.0
_HEADER: Final = chunk(1, b"\x08" + varint(OK))


def executable(folder: Path, *options: str, name: str = "player") -> Path:
    """Writes a program that a trainer can launch as it launches a Unity build.

    Args:
        folder: folder of the program.
        options: options of `unity_player.py`, before those of the trainer.
        name: name of the program.
    """
    path = folder / name
    command = shlex.join((sys.executable, str(PLAYER), *options))
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)
    return path


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What all players together did in the measured time.

    Attributes:
        messages: number of exchanges.
        agent_steps: number of answered decisions.
        seconds: wall clock time.
        player_cpu_s: CPU time of the players.
        server_cpu_s: CPU time of this process.
    """

    messages: int
    agent_steps: int
    seconds: float
    player_cpu_s: float
    server_cpu_s: float

    @property
    def messages_per_s(self) -> float:
        return self.messages / self.seconds

    @property
    def agent_steps_per_s(self) -> float:
        return self.agent_steps / self.seconds

    @property
    def player_cpu_us(self) -> float:
        """Returns the CPU time of the players per message, in microseconds."""
        return 1e6 * self.player_cpu_s / max(self.messages, 1)

    @property
    def server_cpu_us(self) -> float:
        """Returns the CPU time of this process per message, in microseconds."""
        return 1e6 * self.server_cpu_s / max(self.messages, 1)


_CLASSES: Final = classes(
    {
        "Message": ("2 output Output",),
        "Output": ("1 rl_output RLOutput", "2 rl_initialization_output InitializationOutput"),
        "RLOutput": ("2 behaviors BehaviorEntry*",),
        "BehaviorEntry": ("1 key string", "2 list AgentList"),
        "AgentList": ("1 agents Agent*",),
        "Agent": ("8 done bool",),
        "InitializationOutput": ("5 brain_parameters BrainParameters*",),
        "BrainParameters": ("7 name string", "9 action_spec ActionSpec"),
        "ActionSpec": ("1 continuous int32", "2 discrete int32"),
    },
    "unity_null_trainer",
)
_Message: Final[Any] = _CLASSES["Message"]


class _Server:
    """Answers one player with zero actions until it is stopped.

    Args:
        warmed: number of messages after which `warm` is set.
    """

    def __init__(self, warmed: int) -> None:
        self.messages = self.agent_steps = 0
        self.warm = threading.Event()
        self.stopping = False
        self._warmed = warmed
        self._zeros: dict[str, bytes] = {}
        self._answers: dict[tuple[tuple[str, int], ...], bytes] = {}

    def answer(self, data: bytes, context: Any) -> bytes:
        """Answers one message."""
        del context
        output = _Message.FromString(data).output
        for behavior in output.rl_initialization_output.brain_parameters:
            spec = behavior.action_spec
            self._zeros[behavior.name] = chunk(6, bytes(4 * spec.continuous)) + chunk(7, bytes(spec.discrete))
        if not output.HasField("rl_output"):
            return _INITIALISATION if output.HasField("rl_initialization_output") else _command(RESET)
        if self.stopping:
            return _command(QUIT)
        counts = tuple(
            (entry.key, sum([not agent.done for agent in entry.list.agents])) for entry in output.rl_output.behaviors
        )
        self.messages += 1
        self.agent_steps += sum(count for _, count in counts)
        if self.messages == self._warmed:
            self.warm.set()
        return self._answers.get(counts) or self._made(counts)

    def _made(self, counts: tuple[tuple[str, int], ...]) -> bytes:
        lists = ((key, chunk(1, self._zeros[key]) * count) for key, count in counts if count)
        actions = b"".join(chunk(1, chunk(1, key.encode()) + chunk(2, values)) for key, values in lists)
        answer = self._answers[counts] = _HEADER + chunk(3, chunk(1, actions))
        return answer


def _command(command: int) -> bytes:
    return _HEADER + chunk(3, chunk(1, b"\x20" + varint(command)))


_INITIALISATION: Final = _HEADER + chunk(
    3,
    chunk(
        2,
        b"\x08\x07"
        + chunk(2, b"1.5.0")
        + chunk(3, b"1.1.0")
        + chunk(4, b"".join(bytes((8 * number, 1)) for number in range(1, 1 + len(CAPABILITIES))))
        + b"\x28\x01",
    ),
)


@contextmanager
def serve(answer: Any, port: int = 0) -> Iterator[int]:
    """Runs a gRPC server on loopback.

    Args:
        answer: function of message bytes and context that returns message bytes.
        port: port to listen on, 0 for any free one.

    Yields:
        The port.
    """
    service, method = METHOD[1:].split("/")
    handlers: Any = {method: grpc.unary_unary_rpc_method_handler(answer)}
    server = grpc.server(
        ThreadPoolExecutor(1),
        handlers=[grpc.method_handlers_generic_handler(service, handlers)],
        options=[("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)],
    )
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield bound
    finally:
        server.stop(None).wait()


@contextmanager
def _player(options: Sequence[str], port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, str(PLAYER), *options, "-nographics", "-batchmode"]
    process = subprocess.Popen([*command, "--mlagents-port", str(port), "-logFile", str(log)])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def null_trainer(options: Sequence[str], seconds: float, *, players: int = 1, warmup: int = 200) -> Rates:
    """Runs player stand-ins against a server that answers zeros and measures them.

    Args:
        options: options of `unity_player.py` for game and areas.
        seconds: duration of the measurement.
        players: number of players, each with its own port.
        warmup: messages of each player before the measurement.

    Raises:
        RuntimeError: a player did not start, or ended.
    """
    servers = [_Server(warmup) for _ in range(players)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = [stack.enter_context(serve(server.answer)) for server in servers]
        logs = [folder / f"{number}.log" for number in range(players)]
        started = [stack.enter_context(_player(options, *pair)) for pair in zip(ports, logs, strict=True)]
        for server, process, log in zip(servers, started, logs, strict=True):
            _wait_until_warm(server, process, log)
        before = _reading(servers, started)
        threading.Event().wait(seconds)
        after = _reading(servers, started)
        if ended := [log for process, log in zip(started, logs, strict=True) if process.poll() is not None]:
            raise RuntimeError(f"a player ended: {ended[0].read_text()}")
        for server in servers:
            server.stopping = True
        for process in started:
            process.wait(_START_S)
    names = ("messages", "agent_steps", "seconds", "player_cpu_s", "server_cpu_s")
    return Rates(**{name: late - early for name, late, early in zip(names, after, before, strict=True)})


def _wait_until_warm(server: _Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while not server.warm.wait(0.1):
        if process.poll() is not None or time.monotonic() > deadline:
            text = log.read_text() if log.exists() else "no log"
            raise RuntimeError(f"player {process.args!r}, status {process.poll()}, does not play: {text}")


def _reading(servers: Sequence[_Server], players: Sequence[subprocess.Popen[bytes]]) -> tuple[Any, ...]:
    times = [psutil.Process(player.pid).cpu_times() for player in players if player.poll() is None]
    return (
        sum(server.messages for server in servers),
        sum(server.agent_steps for server in servers),
        time.perf_counter(),
        sum(spent.user + spent.system for spent in times),
        time.process_time(),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the rates of the player that the arguments after -- describe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--players", type=int, default=1)
    parser.add_argument("options", nargs="*", help="of the player, after --")
    args = parser.parse_args(arguments)
    rates = null_trainer(args.options, args.seconds, players=args.players)
    print(
        f"{rates.messages_per_s:.0f} messages/s, {rates.agent_steps_per_s:.0f} agent-steps/s; "
        f"CPU time of a message: player {rates.player_cpu_us:.0f} us, server {rates.server_cpu_us:.0f} us"
    )


if __name__ == "__main__":
    main()
