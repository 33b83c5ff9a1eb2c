#!/usr/bin/env python3
"""A stand-in for a Unity player, which plays Unity's side of ML-Agents' communicator for tests and benchmarks.

    python unity_player.py --game balance --areas 12 -nographics -batchmode --mlagents-port 5005 -logFile player.log

It connects to the trainer on 127.0.0.1 as a gRPC client. It is stricter than Unity: missing, surplus, infinite or
out-of-range actions end it with status 4.

Exit status: 0 the trainer sent quit, closed or disconnected; 1 no trainer; 3 a requested crash; 4 the trainer broke
the protocol. The log has the cause.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.simulation.unity_player_games import BalanceGame, BasicGame, GoalGame, MatchThree
from tests.simulation.unity_player_grpc import grpc
from tests.simulation.unity_player_record import RecordedGame
from tests.simulation.unity_player_reports import Game, Setup
from tests.simulation.unity_player_schema import METHOD
from tests.simulation.unity_player_session import ConversationEnded, Crash, Faults, ProtocolViolation, Session, stall
from tests.simulation.unity_player_sides import EventLog, UnreadableData
from tests.simulation.unity_player_teams import SoccerGame, Zoo
from tests.simulation.unity_player_wire import Dialect

LOG: Final = logging.getLogger("player")
EDITOR_PORT: Final = 5004
QUIT, NO_TRAINER, CRASHED, WRONG = 0, 1, 3, 4
PHASES: Final = ("launch", "initialize", "reset")
GAMES: Final[dict[str, Callable[[Setup], Game]]] = {
    "goal": GoalGame,
    "balance": BalanceGame,
    "soccer": SoccerGame,
    "match3": MatchThree,
    "basic": BasicGame,
    "zoo": Zoo,
}
_CHANNEL: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.min_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 100),
)


def parser() -> argparse.ArgumentParser:
    """Returns the parser for options of Unity players and for those that tests add."""
    made = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("--mlagents-port", type=int, default=EDITOR_PORT, help="of the trainer; 5004: as the editor")
    made.add_argument("-logFile", type=Path, dest="log", help="its log; without: stderr")
    made.add_argument("-nographics", action="store_true")
    made.add_argument("-batchmode", action="store_true")
    made.add_argument("--connect-timeout", type=float, default=60.0, help="seconds until the trainer has answered")
    _add_game(made.add_argument_group("the game"))
    _add_protocol(made.add_argument_group("the protocol"))
    _add_faults(made.add_argument_group("faults; messages with agents count"))
    return made


def _add_game(group: Any) -> None:
    group.add_argument("--game", choices=GAMES, default="goal")
    group.add_argument("--areas", type=int, default=1, help="times num_areas of the trainer")
    group.add_argument("--behavior", help="name instead of the game's own")
    group.add_argument("--discrete", action="store_true", help="goal: discrete actions")
    group.add_argument("--actions", type=int, default=1, help="goal: how many")
    group.add_argument("--images", choices=("png", "float"), default="png", help="match3, zoo")
    group.add_argument("--max-steps", type=int, default=100, help="soccer, match3, basic: decisions per episode")
    group.add_argument("--record", type=Path, help="gets JSON lines of the episodes' returns")
    group.add_argument("--late-after", type=int, default=5, help="zoo: messages before the second behavior is known")


def _add_protocol(group: Any) -> None:
    group.add_argument("--protocol", choices=[f"1.{minor}.0" for minor in range(6)], default="1.5.0")
    group.add_argument("--layout", choices=("chw", "hwc"), default="chw", help="of images under 1.5.0; hwc before")
    group.add_argument("--restart", choices=("same", "next"), default="same", help="message of decisions after ends")
    group.add_argument("--statistics", action="store_true", help="some with each message")
    group.add_argument("--events", type=Path, help="file for JSON lines of what the trainer sends besides actions")


def _add_faults(group: Any) -> None:
    group.add_argument("--crash-at", choices=PHASES, help="status 3")
    group.add_argument("--stall-at", choices=PHASES, help="stays alive without further calls")
    for name in ("crash", "stall", "nan", "close"):
        group.add_argument(f"--{name}-after", type=int, metavar="MESSAGES")
    group.add_argument("--ignore-quit", action="store_true", help="stays alive after the end")


def play(options: argparse.Namespace, events: EventLog) -> None:
    """Runs a player; raises as `Session.run` does, and grpc.RpcError if there is no trainer or its connection ends."""
    faults = Faults(**{name: getattr(options, name) for name in Faults.__dataclass_fields__})
    faults.at("launch")

    def make(areas: int, seed: int, dialect: Dialect) -> Game:
        setup = Setup(
            areas=options.areas * areas,
            behavior=options.behavior,
            seed=seed,
            discrete=options.discrete,
            actions=options.actions,
            png=options.images == "png",
            max_steps=options.max_steps,
            late_after=options.late_after,
            hybrid=dialect.action_spec,
        )
        game = GAMES[options.game](setup)
        return game if options.record is None else RecordedGame(game, options.record)

    dialect = Dialect.of(options.protocol, options.layout)
    with grpc.insecure_channel(f"127.0.0.1:{options.mlagents_port}", options=_CHANNEL) as channel:
        exchange: Any = channel.unary_unary(METHOD)
        first = partial(exchange, timeout=options.connect_timeout, wait_for_ready=True)
        Session(first, exchange, dialect, make, events, faults, options.restart == "next", options.statistics).run()


def status(options: argparse.Namespace, events: EventLog) -> int:
    """Plays and returns the exit status."""
    try:
        play(options, events)
    except ConversationEnded as end:
        LOG.info("quit: %s", end)
    except grpc.RpcError as lost:
        if lost.code() == grpc.StatusCode.DEADLINE_EXCEEDED:  # only the first message has a deadline
            return _log_end(
                f"no trainer on port {options.mlagents_port} within {options.connect_timeout:g} s", NO_TRAINER
            )
        LOG.warning("lost the trainer: %s %s", lost.code(), lost.details())
    except Crash as crash:
        return _log_end(str(crash), CRASHED)
    except (ProtocolViolation, UnreadableData) as violation:
        return _log_end(f"the trainer broke the protocol: {violation}", WRONG)
    if options.ignore_quit:
        stall("after the end")
    return QUIT


def _log_end(why: str, code: int) -> int:
    LOG.error("%s", why)
    sys.stderr.write(f"player: {why}\n")
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a player from the command line.

    Args:
        arguments: command line; unknown arguments are logged and otherwise ignored, as by Unity.

    Returns:
        The exit status.
    """
    options, unknown = parser().parse_known_args(arguments)
    handler = logging.StreamHandler() if options.log is None else logging.FileHandler(options.log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    LOG.setLevel(logging.INFO)
    LOG.addHandler(handler)
    events = EventLog(options.events)
    events.write(event="arguments", graphics=not options.nographics, batch=options.batchmode, unknown=unknown)
    try:
        return status(options, events)
    finally:
        events.close()
        LOG.removeHandler(handler)
        handler.close()


if __name__ == "__main__":
    sys.exit(main())
