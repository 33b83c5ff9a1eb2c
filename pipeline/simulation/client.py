"""Plays a game for the trainer."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.messages.simulator import VERSION, Bye, Hello, Reset
from sparring.pipeline.simulation.answers import Actions
from sparring.pipeline.simulation.connection import Client
from sparring.pipeline.simulation.encrypted import credential_of
from sparring.pipeline.simulation.game import Game, GivesStatistics, PlayerGame, ScriptedGame
from sparring.pipeline.simulation.link import parse_address

__all__ = ["Actions", "Client", "Result", "run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """How a conversation ended.

    Attributes:
        steps: steps (decision and outcome) reported since the start, per behavior name.
        reason: of the Bye, from whichever side it came.
    """

    steps: dict[str, int]
    reason: str


def run(
    game: Game,
    address: str | None = None,
    *,
    number: int | None = None,
    seed: int | None = None,
    credential: str = "",
    keys: str | Path | None = None,
    certificate: str = "",
    connect_timeout_s: float = 60.0,
    reconnect: bool = True,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] | None = None,
) -> Result:
    """Plays `game` for the trainer until either side says Bye; SIGINT and SIGTERM make this side say it.

    Args:
        game: closed at the end, whatever happens.
        address: `tcp://HOST:PORT` or `unix:///PATH`; None: $SPARRING_ADDRESS, which `simulators: command` and
            `sparring compliance` set.
        number: which of the supervisor's simulators this is; None: $SPARRING_NUMBER, if that is set.
        seed: for the first episodes, where the trainer's first Reset names none; None: $SPARRING_SEED, likewise.
        credential: token where the endpoint asks for one; "": $SPARRING_CREDENTIAL, likewise.
        keys: folder of the keys, where the endpoint encrypts; None: $SPARRING_KEYS, likewise.
        certificate: name of that to show; "": $SPARRING_NAME, likewise; without one, the token of the keys.
        connect_timeout_s: how long to try to connect, at the start and after a loss.
        reconnect: False raises where a connection breaks.
        clock: seconds, monotonic.
        sleep: waits between attempts to connect; None: in a way that a signal ends.

    Raises:
        SettingsError: no address, a variable that is no whole number, or keys that cannot be used.
        LinkLost: no trainer answered in time.
        RemoteProtocolError: the trainer broke the protocol, or says that this side did.
    """
    try:
        address = os.environ.get("SPARRING_ADDRESS") if address is None else address
        if address is None:
            raise SettingsError("got no address; expected one, or $SPARRING_ADDRESS; name where the trainer listens")
        tls, credential = credential_of(address, keys, certificate, credential)
        scripts = game.scripts() if isinstance(game, ScriptedGame) else {}
        hello = Hello(
            version=VERSION,
            name=game.name,
            behaviors=dict(game.behaviors()),
            number=_whole("SPARRING_NUMBER") if number is None else number,
            credential=credential,
            scripts={name: tuple(own) for name, own in scripts.items()},
            player=game.player() if isinstance(game, PlayerGame) and _is_here(address) else None,
        )
        seed = _whole("SPARRING_SEED") if seed is None else seed
        client = Client(
            hello, address, connect_timeout_s=connect_timeout_s, reconnect=reconnect, clock=clock, sleep=sleep, tls=tls
        )
        with client, _signals(client):
            client.open()
            adopted = client.adopted
            if adopted is not None and isinstance(game, PlayerGame):
                bye = game.attend(adopted, client)
            else:
                bye = _play(game, client, seed)
        return Result(steps=dict(bye.steps) if client.adopted else client.steps, reason=bye.reason)
    finally:
        game.close()


def _is_here(address: str) -> bool:
    """Whether the trainer is on this machine: players call no other."""
    there = parse_address(address)
    return isinstance(there, str) or there[0] in ("127.0.0.1", "localhost", "::1")


def _whole(variable: str) -> int | None:
    text = os.environ.get(variable)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise SettingsError(f"got ${variable} {text!r}; expected a whole number; correct it") from None


def _play(game: Game, client: Client, seed: int | None) -> Bye:
    statistics = game.statistics if isinstance(game, GivesStatistics) else tuple
    message: Actions | Reset | Bye = client.begin()
    while not isinstance(message, Bye):
        if isinstance(message, Reset):
            reports = game.reset(client.parameters, seed if message.seed is None else message.seed)
            seed = None  # later episodes go on with the source that the first seed started
        else:
            reports = game.step(message)
        if any(report.behavior not in client.behaviors for report in reports):
            client.add_behaviors(game.behaviors())
        message = client.exchange(reports, statistics())
    return message


@contextmanager
def _signals(client: Client) -> Iterator[None]:
    """Turns the first SIGINT or SIGTERM into a Bye; a second acts as it did before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def stop(number: int, _: FrameType | None) -> None:
        restore()
        client.stop(f"stopped by {signal.Signals(number).name}")

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        restore()
