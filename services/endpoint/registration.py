"""Simulators register behaviors and a number; both are checked here before stepping uses them."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from structlog.typing import FilteringBoundLogger

from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.messages.simulator import VERSION, Hello, Player
from sparring.pipeline.monitoring.metrics import Registry
from sparring.pipeline.settings.model import BehaviorSettings
from sparring.pipeline.specs import BehaviorId, BehaviorSpec
from sparring.pipeline.stepping.limits import check_network, check_unnamed, unknown_behavior
from sparring.pipeline.stepping.settings import SteppingSettings
from sparring.services.endpoint.peers import SimulatorPeer


@dataclass(frozen=True, kw_only=True)
class DefaultBehaviors:
    """DefaultBehaviors describe the behaviors that the configuration does not name.

    Attributes:
        settings: of each.
        scripts: scripts that every simulator must be able to play.
        added: names of those registered so far; the run prepares their learners.
    """

    settings: BehaviorSettings
    scripts: frozenset[str]
    added: set[str] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class ServerContext:
    """A ServerContext holds what all conversations share.

    Attributes:
        settings: of stepping.
        behaviors: settings by name; gets those that simulators add.
        scripts: by behavior name, scripts that every simulator must be able to play.
        seed: of the run; each simulator gets its own seed from it.
        clock: seconds, monotonic.
        registry: metrics of the service.
        log: log of the service.
        arrived: called when a simulator disconnected.
        frame_arrived: called when a frame arrived; may answer it at once.
        known: called when behaviors were registered.
        unnamed: defaults of behaviors that are not among `behaviors`; None where these are rejected.
    """

    settings: SteppingSettings
    behaviors: dict[str, BehaviorSettings]
    scripts: Mapping[str, frozenset[str]]
    seed: int
    clock: Callable[[], float]
    registry: Registry
    log: FilteringBoundLogger
    arrived: Callable[[], None]
    frame_arrived: Callable[[], None]
    known: Callable[[], None]
    unnamed: DefaultBehaviors | None = None


_HEX: Final = re.compile("(?:[0-9a-fA-F]{2})*")
OWN_NUMBERS: Final = 2**20
"""First number of simulators whose Hello gives none."""


def check_hello(hello: Hello) -> None:
    """Rejects a Hello of another protocol version, or with a number or player out of range.

    Raises:
        RemoteProtocolError: the Hello is rejected.
    """
    version, number, numbers = hello.version, hello.number, f"0 to {OWN_NUMBERS - 1}"
    correct, number_remedy = "correct it in the simulator", "leave the number out, or use $SPARRING_NUMBER"
    player = hello.player or Player(protocol="", port=0, settings="", areas=1, connect_s=0.0, timeout_s=0.0)
    port, areas, digits = player.port, player.areas, player.settings
    for is_sound, code, got, expected, remedy in (
        (version == VERSION, "version", f"protocol version {version}", str(VERSION), "use a client of this version"),
        (number is None or 0 <= number < OWN_NUMBERS, "number", f"simulator number {number}", numbers, number_remedy),
        (0 <= port < 2**16, "specs", f"a player at port {port}", "0 to 65535", correct),
        (0 < areas <= 2**20, "specs", f"a player with {areas} areas", f"1 to {2**20}", correct),
        (_HEX.fullmatch(digits), "specs", f"player settings {digits!r:.40}", "pairs of hexadecimal digits", correct),
    ):
        if not is_sound:
            raise RemoteProtocolError(code, got=got, expected=expected, remedy=remedy)


def check_number(peer: SimulatorPeer, number: int, peers: Iterable[SimulatorPeer], context: ServerContext) -> None:
    """Rejects a second simulator with one number, unless it may be the first one, reconnected after a broken link.

    Args:
        peer: the simulator.
        number: number that it gets.
        peers: all connected simulators; the link of one that is silent for a heartbeat may be broken, and one that is
            not read at present may have hung up.
        context: of the endpoint.

    Raises:
        RemoteProtocolError: the number is taken.
    """
    for other in peers:
        is_silent = context.clock() - other.last_received_at >= context.settings.heartbeat_s
        is_alive = not (is_silent or other.has_hung_up)
        if other.number == number and (is_alive or other.identity != peer.identity):
            raise RemoteProtocolError(
                "number",
                got=f"simulator number {number} twice",
                expected="a number of its own for each simulator",
                remedy="leave the number out, or start each simulator with another",
            )


def check_known(
    behaviors: Mapping[str, BehaviorSpec], scripts: Mapping[str, Sequence[str]], context: ServerContext
) -> list[str]:
    """Rejects behaviors that the run cannot train; returns the names that are new.

    Args:
        behaviors: specs by behavior id.
        scripts: scripts of the simulator by behavior name.
        context: of the endpoint.

    Raises:
        RemoteProtocolError: a behavior is unknown, exceeds the limits, lacks a script, or needs an unsupported network.
    """
    new = sorted({BehaviorId.parse(text).name for text in behaviors} - context.behaviors.keys())
    for text, spec in behaviors.items():
        name = BehaviorId.parse(text).name
        settings, required = _requirements(text, name, new, context)
        if missing := required - {*scripts.get(name, ())}:
            raise RemoteProtocolError(
                "scripts",
                got=f"behavior {name} with scripts {sorted(scripts.get(name, ()))}",
                expected=f"{sorted(missing)} too, which self_play.opponents names",
                remedy="name them in Hello and play them when asked, or take them from the configuration",
            )
        check_network(name, spec, settings.network_settings)
    return new


def _requirements(
    text: str, name: str, new: Sequence[str], context: ServerContext
) -> tuple[BehaviorSettings, frozenset[str]]:
    """Returns the settings of a behavior and the scripts that it requires."""
    known, unnamed = context.behaviors, context.unnamed
    if name in known:
        is_added = unnamed is not None and name in unnamed.added
        return known[name], unnamed.scripts if unnamed and is_added else context.scripts.get(name, frozenset())
    if unnamed is None:
        raise unknown_behavior(text, known)
    check_unnamed(name, len(unnamed.added) + new.index(name), context.settings.limits.unnamed_behaviors)
    return unnamed.settings, unnamed.scripts


def add_names(names: Sequence[str], context: ServerContext) -> None:
    """Adds behaviors that the configuration does not name, for the rest of the run."""
    if context.unnamed is not None:
        context.behaviors.update(dict.fromkeys(names, context.unnamed.settings))
        context.unnamed.added.update(names)
