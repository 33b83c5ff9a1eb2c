"""Limits bound what simulators may ask of a stepping process; they apply to authenticated simulators too.

`docs/security.md` says what each limit prevents.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from pydantic import Field

from sparring.pipeline.errors import RemoteProtocolError, too_large
from sparring.pipeline.messages.codec import SIMULATORS, Limits
from sparring.pipeline.networks.settings import NetworkSettings, StrictSettings, Unsupported, refuse_unsupported
from sparring.pipeline.specs import BehaviorId, BehaviorSpec, names_a_folder

HELLO: Final = Limits(total=2**18, header=2**18, arrays=SIMULATORS.arrays)
"""Limits of the first message, whose sender is not authenticated yet."""

_OWN_DESCRIPTORS: Final = 256


class LimitSettings(StrictSettings):
    """The section `pipeline.limits` applies to one stepping process, unless an attribute names one simulator.

    Attributes:
        connections: connected simulators.
        connections_per_host: of these, from one address (IPv6: from one network of 64 bits).
        handshakes: connections that have not sent Hello yet; a further one replaces one of the address with most.
        handshake_timeout_s: seconds from the connection to its Hello, including TLS.
        message_bytes: bytes of one message.
        arrays: arrays in one message.
        steps_per_s: Steps of one simulator per second; one that sends more is read more slowly.
        asides_per_s: other messages of one simulator per second (Ping, Pong, Behaviors); likewise.
        bytes_per_s: bytes of one simulator per second; likewise.
        receiving_bytes: bytes of incomplete large messages of all simulators; the next message waits until it fits.
        sending_bytes: unsent bytes for one simulator; it is not read until it has received them.
        agents: live agents of one simulator.
        behaviors: behavior ids of one simulator.
        unnamed_behaviors: behavior names of all simulators that the configuration lacks; each gets a learner.
        observation_bytes: bytes of one agent's observations.
        actions: continuous actions plus choices of all branches of one agent.
        statistics: names of statistics of all simulators; further ones are counted and dropped.
    """

    connections: int = Field(default=1024, ge=1)
    connections_per_host: int = Field(default=512, ge=1)
    handshakes: int = Field(default=256, ge=1)
    handshake_timeout_s: float = Field(default=10.0, gt=0)
    message_bytes: int = Field(default=SIMULATORS.total, ge=2**12, le=2**31)
    arrays: int = Field(default=SIMULATORS.arrays, ge=16)
    steps_per_s: float = Field(default=10_000.0, gt=0)
    asides_per_s: float = Field(default=100.0, gt=0)
    bytes_per_s: float = Field(default=1e9, gt=0)
    receiving_bytes: int = Field(default=2**29, ge=2**12)
    sending_bytes: int = Field(default=2**20, ge=2**10)
    agents: int = Field(default=32_768, ge=1)
    behaviors: int = Field(default=64, ge=1)
    unnamed_behaviors: int = Field(default=16, ge=0)
    observation_bytes: int = Field(default=2**20, ge=4)
    actions: int = Field(default=4096, ge=1)
    statistics: int = Field(default=1024, ge=0)

    @property
    def descriptors(self) -> int:
        """Returns the descriptors needed: two per connection (one for its player), one per handshake, and our own."""
        return 2 * self.connections + self.handshakes + _OWN_DESCRIPTORS

    @property
    def messages(self) -> Limits:
        """Returns the limits of the messages after Hello."""
        return Limits(total=self.message_bytes, header=SIMULATORS.header, arrays=self.arrays)


def check_behaviors(behaviors: Mapping[str, BehaviorSpec], known: int, limits: LimitSettings) -> None:
    """Rejects specs that exceed the limits.

    Args:
        behaviors: specs by behavior id.
        known: number of ids that the simulator has named before.
        limits: of the stepping process.

    Raises:
        RemoteProtocolError: a spec or the number of ids exceeds its limit.
    """
    if known + len(behaviors) > limits.behaviors:
        got = f"{known + len(behaviors)} behavior ids"
        raise too_large(got, limits.behaviors, "limits.behaviors", "name fewer ids")
    for text, spec in behaviors.items():
        if len(spec.observations) >= limits.arrays:  # each is an array of every message
            got = f"{len(spec.observations)} observations of {text}"
            raise too_large(got, limits.arrays - 1, "limits.arrays", "join some")
        if (size := spec.observation_bytes) > limits.observation_bytes:
            got = f"observations of {size} bytes for each agent of {text}"
            raise too_large(got, limits.observation_bytes, "limits.observation_bytes", "let agents see less")
        if (choices := spec.actions.continuous + spec.actions.mask_size) > limits.actions:
            got = f"{choices} actions and choices for each agent of {text}"
            raise too_large(got, limits.actions, "limits.actions", "give agents fewer of them")


def check_unnamed(name: str, known: int, limit: int) -> None:
    """Rejects an unnamed behavior beside `known` others.

    Raises:
        RemoteProtocolError: the limit is reached, or the name cannot be that of a folder.
    """
    if not names_a_folder(name):
        raise RemoteProtocolError(
            "specs",
            got=f"behavior {name!r}",
            expected='a name that a folder of the run can have: short, no dot at its start, none of / \\ ? * : " < > |'
            " or #, and neither logs nor another folder or file of the run",
            remedy="give it another name in the simulator",
        )
    if known >= limit:
        got = f"behavior {name!r} beside {known} that the configuration does not name"
        raise too_large(got, limit, "limits.unnamed_behaviors", "list those to be trained below `behaviors`")


def check_network(name: str, spec: BehaviorSpec, settings: NetworkSettings) -> None:
    """Rejects a spec for which the settings of its behavior build no network.

    Raises:
        RemoteProtocolError: names the observation or setting.
    """
    try:
        refuse_unsupported(spec, settings)
    except Unsupported as error:
        got, expected, remedy = f"{error.got} in behavior {name}", error.expected, error.remedy
        raise RemoteProtocolError("specs", got=got, expected=expected, remedy=remedy) from error


def check_scripts(name: str, known: Iterable[str], required: Collection[str]) -> None:
    """Rejects a simulator that cannot play all scripts which the run needs of a behavior.

    Raises:
        RemoteProtocolError: names those that are missing.
    """
    if missing := {*required} - {*known}:
        raise RemoteProtocolError(
            "scripts",
            got=f"behavior {name} with scripts {sorted(known)}",
            expected=f"{sorted(missing)} too, which self_play.opponents names",
            remedy="name them in Hello and play them when asked, or take them from the configuration",
        )


def unknown_behavior(text: str, known: Iterable[str]) -> RemoteProtocolError:
    """Returns the error of a behavior id whose name the configuration does not have."""
    name = BehaviorId.parse(text).name
    return RemoteProtocolError(
        "unknown_behavior",
        got=f"behavior {text!r}",
        expected=f"one of {sorted(known)}",
        remedy=f"write `{name}: {{}}` below `behaviors` of the configuration, or default_settings, which "
        "count for any other name; or correct the name in the simulator (option behavior of a bridge; with "
        "pettingzoo, the option behaviors: per_type names a behavior for each type of agents, as red of red_0)",
    )
