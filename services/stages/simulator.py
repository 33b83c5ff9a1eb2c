"""This process runs a built-in simulator or bridge: `sparring simulator NAME --connect ADDRESS`.

    consumes      Act, Reset (from stepping, over its socket)
    produces      Step
    waits for     an answer to each Step; actions are backpressured while the step budget is used up
    unblocked by  stepping

It exits with 0 after a Bye from either side, with 3 for an error that a restart would repeat (bad arguments, or a
rejected version, credential, spec or behavior name), and with 1 and one line on stderr for a lost link or another
Fault. Its last line on stdout is JSON with the steps that it counted itself, for the step accounting.
"""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from sparring.pipeline.bridges.explain import frames_of_author, say, traceback_of
from sparring.pipeline.errors import FAILED, UNUSABLE, RemoteProtocolError, SettingsError, SparringError
from sparring.pipeline.games.registry import make, names, parse_options
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.simulation.client import number_from
from sparring.pipeline.simulation.client import run as play
from sparring.pipeline.simulation.game import DrawnGame, Game, PlayerGame
from sparring.pipeline.simulation.replays import FOLDER_VARIABLE, Recorder
from sparring.pipeline.specs import SpecError

_REFUSALS: Final = ("version", "credential", "specs", "unknown_behavior", "scripts")
"""Codes of Faults that every restart of the simulator would repeat."""
_HANG_S: Final = 30.0
"""Seconds after which a call of an environment that has not returned is named."""
_CLOSE_S: Final = 300.0
"""Time for `close`, in which an environment may write a video."""
_MOST: Final = 1e9
"""No longer time can be waited for everywhere."""


def slow_down(game: Game, longest_s: float, seed: int | None, sleep: Callable[[float], None] = time.sleep) -> None:
    """Makes a game wait for a random time before each step.

    Args:
        game: the game.
        longest_s: the waits are uniform from 0 to this.
        seed: of the waits; the game's random source stays untouched.
        sleep: function that waits.
    """
    random, step = np.random.default_rng(seed), game.step

    def step_slowly(actions: Mapping[str, BehaviorActions]) -> Sequence[BehaviorReport]:
        sleep(random.uniform(0, longest_s))
        return step(actions)

    game.step = step_slowly  # type: ignore[method-assign]
    if isinstance(game, PlayerGame):
        game.player = None  # type: ignore[assignment,method-assign]  # a trainer that speaks with it would not wait


def name_hang(name: str, thread: int, is_over: threading.Event, limit_s: float = _HANG_S) -> None:
    """Names, once, the line of an environment's call that has not returned between two looks.

    Nothing else would: the link goes on answering the trainer meanwhile.

    Args:
        name: of the simulator.
        thread: that plays.
        is_over: set once it does so no more.
        limit_s: between the looks.
    """
    held = None
    while not is_over.wait(limit_s):
        frames = frames_of_author(thread)
        if held is not None and held in frames:
            got = f"a call of the environment that has not returned for {limit_s:g} s"
            place = f"{frames[0].f_code.co_filename}:{frames[0].f_lineno}"
            sys.stderr.write(f"sparring simulator {name}: got {got} ({place}); expected it to return; correct it\n")
            sys.stderr.flush()
            return
        held = frames[-1] if frames else None


def limit_close(name: str, game: Game) -> None:
    """Makes `close` of a game end this process where it does not return: nothing else is left to do.

    Args:
        name: of the simulator.
        game: the game.
    """
    close = game.close

    def end() -> None:
        got = f"a call of close() that has not returned for {_CLOSE_S:g} s"
        sys.stderr.write(f"sparring simulator {name}: got {got}; expected it to return; correct it\n")
        sys.stderr.flush()
        os._exit(FAILED)

    def close_in_time() -> None:
        timer = threading.Timer(_CLOSE_S, end)
        timer.daemon = True
        timer.start()
        try:
            close()
        finally:
            timer.cancel()

    game.close = close_in_time  # type: ignore[method-assign]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line of `sparring simulator`."""
    parser.add_argument("name", choices=names(), help="simulator or bridge, built in or of a plug-in")
    parser.add_argument("--connect", metavar="ADDRESS", help="tcp://HOST:PORT or unix:///PATH ($SPARRING_ADDRESS)")
    parser.add_argument("--areas", type=int, default=1, metavar="N", help="copies of the environment (1)")
    parser.add_argument("--number", type=int, metavar="K", help="number of this simulator ($SPARRING_NUMBER)")
    parser.add_argument("--seed", type=int, metavar="S", help="of the first episodes ($SPARRING_SEED)")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="of the simulator; repeat")
    parser.add_argument("--slow", type=float, default=0.0, metavar="MS", help="random delay per step, at most this")
    parser.add_argument("--keys", metavar="DIR", help="folder of the keys, where the trainer has some ($SPARRING_KEYS)")
    parser.add_argument("--name", dest="certificate", metavar="NAME", help="certificate to show ($SPARRING_NAME)")
    parser.add_argument(
        "--python-path", action="append", default=[], metavar="DIR", help="where environments are imported from; repeat"
    )
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="how long to try to connect (60)")


def run(args: argparse.Namespace) -> int:
    """Plays until either side says Bye.

    Args:
        args: as `add_arguments` declares them. SPARRING_CREDENTIAL has no argument, because other users can read a
            command line.

    Returns:
        The exit status.
    """
    is_over = threading.Event()
    try:
        address = args.connect or os.environ.get("SPARRING_ADDRESS")
        for option in ("timeout", "slow"):
            if not 0 <= (value := getattr(args, option)) <= _MOST:
                raise SettingsError(f"got --{option} {value:g}; expected 0 to {_MOST:g}; give another number")
        if not address:
            raise SettingsError("got no address; expected --connect or $SPARRING_ADDRESS; name the trainer's address")
        number = number_from("SPARRING_NUMBER") if args.number is None else args.number
        seed = number_from("SPARRING_SEED") if args.seed is None else args.seed
        sys.path.extend(args.python_path)  # last: environments must not shadow installed packages
        game = make(args.name, args.areas, **parse_options(args.name, args.option))
        if (replays := os.environ.get(FOLDER_VARIABLE)) and isinstance(game, DrawnGame):
            Recorder(game, Path(replays))
        limit_close(args.name, game)
        if args.slow:
            slow_down(game, args.slow / 1000, seed)
        of_thread = args.name, threading.get_ident(), is_over
        threading.Thread(target=name_hang, args=of_thread, name="hang watch", daemon=True).start()
        result = play(
            game,
            address,
            number=number,
            seed=seed,
            keys=args.keys,
            certificate=args.certificate or "",
            connect_timeout_s=args.timeout,
        )
    except SparringError as error:
        say(f"sparring simulator {args.name}: {error}\n")
        refused = isinstance(error, RemoteProtocolError) and error.code in _REFUSALS
        return UNUSABLE if refused or isinstance(error, SettingsError | SpecError) else FAILED
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of an environment
        say(traceback_of(error))
        return FAILED
    finally:
        is_over.set()
    line = {"simulator": args.name, "number": number, "steps": result.steps, "reason": result.reason}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
    return 0
