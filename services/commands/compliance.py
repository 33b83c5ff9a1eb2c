"""`sparring compliance -- CMD ...`: checks a foreign simulator against the protocol.

| consumes | produces | waits for | unblocked by |
|---|---|---|---|
| a command that starts a simulator | one verdict per rule | each answer of the simulator | the answer, or `--timeout` |
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from sparring.pipeline.compliance.peer import SimulatorProcess
from sparring.pipeline.compliance.rules import Verdict, examine
from sparring.pipeline.errors import FAILED, SettingsError, install_command
from sparring.pipeline.monitoring.logs import printable
from sparring.services.commands.runs import add_json, check_positive, print_json
from sparring.services.process.hosting import ending_signals, interrupting
from sparring.services.process.lifeline import PIPE_VARIABLE, adopt_orphans, children, end_strays

_STRAYS_S: Final = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("--episodes", type=int, default=3, metavar="N", help="ended episodes to play for (default 3)")
    parser.add_argument("--timeout", type=float, default=10.0, metavar="S", help="for each answer (default 10)")
    parser.add_argument("--websocket", action="store_true", help="the simulator connects with a WebSocket (ws://)")
    add_json(parser)
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- CMD ...",
        help="starts the simulator; {address} in it is replaced, SPARRING_ADDRESS holds the address",
    )


def run(args: argparse.Namespace) -> int:
    """Checks the simulator and prints the verdicts; returns 0 where no rule failed, else 1.

    Raises:
        SettingsError: there is no command, it cannot be started, or a number is out of range.
    """
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise SettingsError("got no command; expected a simulator's; write: sparring compliance -- CMD ...")
    check_positive(args, "episodes", "timeout")
    if shutil.which(command[0]) is None:
        raise SettingsError(f"got {command[0]!r}, which is no program; expected a simulator's; correct the command")
    if args.websocket and importlib.util.find_spec("websockets") is None:
        raise SettingsError(
            "got --websocket without the library websockets; expected it to be installed; try: "
            + install_command("websocket")
        )
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"{'ws' if args.websocket else 'tcp'}://127.0.0.1:{listener.getsockname()[1]}"
    words = [part.replace("{address}", address) for part in command]
    with ending_signals(interrupting()), simulator_process(address, listener, words, {}) as host:
        verdicts = examine(host, episodes=args.episodes, timeout_s=args.timeout)
    if args.json:
        print_json([dataclasses.asdict(verdict) for verdict in verdicts])
    else:
        sys.stdout.write(printable(as_text(verdicts)))
    return FAILED if any(verdict.status == "FAIL" for verdict in verdicts) else 0


@contextlib.contextmanager
def simulator_process(
    address: str, listener: socket.socket, command: Sequence[str], environment: Mapping[str, str]
) -> Iterator[SimulatorProcess]:
    """Yields a simulator, not started yet, that ends with this process and speaks without encryption.

    What it has started ends at the end, too, also where its watcher is stopped or was killed.
    """
    adopt_orphans()
    spared = children()
    watched = [sys.executable, "-P", "-m", "sparring.services.process.watcher", *command] if command else []
    cleared = {"SPARRING_KEYS": "", "SPARRING_NAME": "", PIPE_VARIABLE: "0"}
    host = SimulatorProcess(address, listener, watched, {**environment, **cleared})
    try:
        yield host
    finally:
        host.stop()
        end_strays(spared, _STRAYS_S)


def as_text(verdicts: Sequence[Verdict]) -> str:
    """Formats the verdicts as lines."""
    lines = []
    for verdict in verdicts:
        lines.append(f"{verdict.status}  {verdict.rule:<15} {verdict.sentence}")
        if verdict.status == "SKIP":
            lines.append(f"      because  {verdict.got}")
        elif verdict.status != "PASS":
            lines += [f"      {part:<8} {getattr(verdict, part)}" for part in ("got", "expected", "remedy")]
    counts = [(status, sum(v.status == status for v in verdicts)) for status in ("PASS", "FAIL", "WARN", "SKIP")]
    lines.append(", ".join(f"{count} {status}" for status, count in counts))
    return "\n".join(lines) + "\n"
