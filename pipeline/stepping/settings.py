"""Settings of stepping define where simulators connect and when they are disconnected."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, field_validator, model_validator

from sparring.pipeline.networks.settings import StrictSettings
from sparring.pipeline.queues.endpoints import is_open, is_tcp
from sparring.pipeline.stepping.limits import LimitSettings

Accepted = Literal["certificate", "token", "either"]

GATHERED_STEPS: Final = 4096
"""Steps that stepping sends to assembly in one message."""
GATHERED_BYTES: Final = 4 * 2**20
"""Bytes of observations after which it sends the message, however few steps it has."""
GATHERING_S: Final = 0.01
"""Seconds that steps wait for more where they are a large part of an update already."""
GATHERING_MOST_S: Final = 0.04
"""Seconds that they wait otherwise."""


class SteppingSettings(StrictSettings):
    """The settings describe the endpoint for simulators.

    Attributes:
        address: `tcp://HOST:PORT` (port 0: chosen at the start) or `unix:///PATH`. Beyond loopback it requires `keys`.
        player_host: IP address on which Unity players connect. Their protocol has no authentication: beyond loopback
            any peer that reaches their ports can pose as the player.
        stepping_processes: how many processes share the simulators.
        max_agents: maximum number of live agents in one stepping process.
        heartbeat_s: seconds of silence after which a simulator sends a ping.
        simulator_timeout_s: seconds of silence after which a simulator is disconnected; each message must arrive whole
            within this time.
        credentials: accepted credentials where `keys` is set: a certificate, the token, or either of them.
        encrypt: TLS on TCP where `keys` is set. Without it, simulators on loopback send the token unencrypted.
        limits: of each simulator and of the stepping process.
    """

    address: str = "tcp://127.0.0.1:0"
    player_host: str = "127.0.0.1"
    stepping_processes: int = Field(default=1, ge=1)
    max_agents: int = Field(default=65_536, ge=1)
    heartbeat_s: float = Field(default=5.0, ge=0.001)
    simulator_timeout_s: float = Field(default=60.0, gt=0)
    credentials: Accepted = "either"
    encrypt: bool = True
    limits: LimitSettings = LimitSettings()

    @field_validator("address")
    @classmethod
    def _well_formed(cls, address: str) -> str:
        path = address.removeprefix("unix://")
        is_file = path != address and path.startswith("/") and Path(path).name and not {*"?#"} & {*path}
        if is_file or is_tcp(address):
            return address
        raise ValueError(
            f"got {address!r}; expected tcp://HOST:PORT with a port from 0 to 65535, or unix:///PATH; "
            "write for example tcp://127.0.0.1:5005, or tcp://127.0.0.1:0 for a free port"
        )

    @field_validator("player_host")
    @classmethod
    def _an_address(cls, host: str) -> str:
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise ValueError(
                f"got {host!r}; expected an IP address of this machine; write 127.0.0.1, or 0.0.0.0 in a container "
                "whose ports are forwarded to it"
            ) from None
        return host

    @model_validator(mode="after")
    def _consistent(self) -> SteppingSettings:
        if not self.encrypt and (self.credentials == "certificate" or is_open(self.address)):
            raise ValueError(
                f"got encrypt: false with address {self.address!r} and credentials {self.credentials!r}; "
                "expected a token on loopback, the only credential that may be sent unencrypted; leave encrypt out"
            )
        if self.heartbeat_s >= self.simulator_timeout_s:
            raise ValueError(
                f"got heartbeat_s {self.heartbeat_s:g} with simulator_timeout_s {self.simulator_timeout_s:g}; "
                "expected a heartbeat shorter than the timeout; "
                "lower heartbeat_s or raise simulator_timeout_s (ten heartbeats are usual)"
            )
        return self
