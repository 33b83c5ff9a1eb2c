"""What one simulator may ask of a stepping process, kept against those that have shown a credential too.

`docs/security.md` says what each limit stops.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.messages.codec import SIMULATORS, Limits
from sparring.pipeline.specs import BehaviorSpec, names_a_folder

HELLO: Final = Limits(total=2**18, header=2**18, arrays=SIMULATORS.arrays)
"""Of the first message, which comes from a stranger."""

_OWN_DESCRIPTORS: Final = 256


class LimitSettings(BaseModel):
    """The `pipeline.limits` section: all of one stepping process, unless it says of one simulator.

    Attributes:
        connections: simulators at once.
        connections_per_host: of these, from one address (IPv6: from one network of 64 bits).
        handshakes: connections that have not introduced themselves yet, at once; the oldest makes room.
        handshake_timeout_s: seconds from the connection to its Hello, those of TLS among them.
        message_bytes: of one message.
        arrays: in one message.
        steps_per_s: Steps of one simulator per second; one that sends more is read more slowly.
        asides_per_s: its other messages per second (Ping, Pong, Behaviors); likewise.
        bytes_per_s: of one simulator per second; likewise.
        receiving_bytes: of large messages that have come in part, of all simulators; the next one waits for its room.
        sending_bytes: that one simulator has not taken; it is not read until it has.
        agents: alive at once in one simulator.
        behaviors: behavior ids of one simulator.
        unnamed_behaviors: names that the configuration does not have, of all simulators; each gets a learner.
        observation_bytes: of one agent's observations.
        actions: of one agent: continuous ones, and the choices of all branches.
        statistics: names of simulators' own numbers; more are not shown, and counted.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

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
        """That the connections may take, each one for reading and one for writing, beside those of the process."""
        return 2 * self.connections + self.handshakes + _OWN_DESCRIPTORS

    @property
    def messages(self) -> Limits:
        """Of the messages after Hello."""
        return Limits(total=self.message_bytes, header=SIMULATORS.header, arrays=self.arrays)


def check_behaviors(behaviors: Mapping[str, BehaviorSpec], known: int, limits: LimitSettings) -> None:
    """Refuses specs from which more would have to be built than the limits allow.

    Args:
        behaviors: specs by behavior id.
        known: ids that the simulator has named before.
        limits: of the stepping process.

    Raises:
        RemoteProtocolError: of the first such thing.
    """
    if known + len(behaviors) > limits.behaviors:
        raise _too_large(f"{known + len(behaviors)} behavior ids", limits.behaviors, "behaviors", "name fewer ids")
    for text, spec in behaviors.items():
        if len(spec.observations) >= limits.arrays:  # each is an array of every message
            raise _too_large(
                f"{len(spec.observations)} observations of {text}", limits.arrays - 1, "arrays", "join some"
            )
        if (size := spec.observation_bytes) > limits.observation_bytes:
            got = f"observations of {size} bytes for each agent of {text}"
            raise _too_large(got, limits.observation_bytes, "observation_bytes", "let agents see less")
        if (choices := spec.actions.continuous + spec.actions.mask_size) > limits.actions:
            got = f"{choices} actions and choices for each agent of {text}"
            raise _too_large(got, limits.actions, "actions", "give agents fewer of them")


def check_agents(alive: int, new: int, limit: int) -> None:
    """Refuses more agents of one simulator.

    Raises:
        RemoteProtocolError: `new` beside those `alive` are more than `limit`.
    """
    if alive + new > limit:
        raise _too_large(f"{new} more agents beside {alive} of one simulator", limit, "agents", "run fewer areas")


def check_unnamed(name: str, known: int, limit: int) -> None:
    """Refuses a behavior that needs a learner of its own where there are `known` such already.

    Raises:
        RemoteProtocolError: that is the limit, or the name cannot be that of a folder.
    """
    if not names_a_folder(name):
        raise RemoteProtocolError(
            "specs",
            got=f"behavior {name!r}",
            expected='a name that a folder of the run can have: short, no dot at its start, none of / \\ ? * : " < > |'
            " or #, and not logs or another that is there",
            remedy="give it another name in the simulator",
        )
    if known >= limit:
        got = f"behavior {name!r} beside {known} that the configuration does not name"
        raise _too_large(got, limit, "unnamed_behaviors", "name those that are to be trained below `behaviors`")


def _too_large(got: str, limit: int, key: str, remedy: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        "too_large", got=got, expected=f"at most {limit}", remedy=f"{remedy}, or raise pipeline.limits.{key}"
    )
