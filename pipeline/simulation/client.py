"""Plays a game for the trainer."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.messages.simulator import VERSION, Bye, Hello, Reset
from sparring.pipeline.simulation.answers import Actions
from sparring.pipeline.simulation.connection import Client
from sparring.pipeline.simulation.dialer import Dialer, parse_address
from sparring.pipeline.simulation.encrypted import credential_of
from sparring.pipeline.simulation.game import Game, PlayerGame, ScriptedGame, StatisticsGame


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Says how a conversation ended.

    Attributes:
        steps: steps (decision and outcome) reported since the start, by behavior name.
        reason: reason in the Bye of either side.
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
    """Plays `game` for the trainer until either side sends Bye; SIGINT and SIGTERM make this side send it.

    Args:
        game: always closed at the end.
        address: `tcp://HOST:PORT` or `unix:///PATH`; None: $SPARRING_ADDRESS, which `simulators: command` and `sparring
            compliance` set.
        number: number among the supervisor's simulators; None: $SPARRING_NUMBER, if that is set.
        seed: for the first episodes, if the trainer's first Reset has none; None: $SPARRING_SEED, if that is set.
        credential: token for an endpoint that requires one; "": $SPARRING_CREDENTIAL, if that is set.
        keys: folder of the keys, for an endpoint that encrypts; None: $SPARRING_KEYS, if that is set.
        certificate: name of the certificate to present; "": $SPARRING_NAME; without either, the token of the keys is
            sent.
        connect_timeout_s: time to connect, at the start and after a loss.
        reconnect: False raises `LinkLost` when a connection breaks.
        clock: monotonic clock, in seconds.
        sleep: waits between two tries to connect; None: a wait that a signal ends.

    Raises:
        SettingsError: the address is missing, a variable is no whole number, or the keys cannot be used.
        LinkLost: no trainer answered in time.
        RemoteProtocolError: the trainer broke the protocol, or reports that this side did.
    """
    try:
        address = os.environ.get("SPARRING_ADDRESS") if address is None else address
        if address is None:
            raise SettingsError(
                "got no address; expected one, or $SPARRING_ADDRESS; give the address at which the trainer listens"
            )
        tls, credential = credential_of(address, keys, certificate, credential)
        scripts = game.scripts() if isinstance(game, ScriptedGame) else {}
        hello = Hello(
            version=VERSION,
            name=game.name,
            behaviors=dict(game.behaviors()),
            number=number_from("SPARRING_NUMBER") if number is None else number,
            credential=credential,
            scripts={name: tuple(own) for name, own in scripts.items()},
            player=game.player() if isinstance(game, PlayerGame) and _is_here(address) else None,
        )
        seed = number_from("SPARRING_SEED") if seed is None else seed
        client = Client(hello, Dialer(address, connect_timeout_s, tls, clock, sleep), reconnect=reconnect)
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
    """Returns whether the trainer is on this machine: players call no other."""
    there = parse_address(address)
    return isinstance(there, str) or there[0] in ("127.0.0.1", "localhost", "::1")


def number_from(variable: str) -> int | None:
    """Returns the whole number in an environment variable; None where it is not set.

    Raises:
        SettingsError: it is no whole number.
    """
    text = os.environ.get(variable)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise SettingsError(f"got ${variable} {text!r}; expected a whole number; correct it") from None


def _play(game: Game, client: Client, seed: int | None) -> Bye:
    statistics = game.statistics if isinstance(game, StatisticsGame) else tuple
    message: Actions | Reset | Bye = client.begin()
    while not isinstance(message, Bye):
        if isinstance(message, Reset):
            reports = game.reset(client.parameters, seed if message.seed is None else message.seed)
            seed = None  # later episodes continue the sequence of the first seed
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
    before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

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
