"""Settings of stepping define where simulators connect and when they are disconnected."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from sparring.pipeline.networks.settings import StrictSettings
from sparring.pipeline.queues.endpoints import is_open, is_tcp
from sparring.pipeline.stepping.limits import LimitSettings

Accepted = Literal["certificate", "token", "either"]

_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9.-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")

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
        websocket_address: `tcp://HOST:PORT` at which browsers and other WebSocket clients connect; None for none.
            Beyond loopback it requires `keys`. Further stepping processes use the ports that follow.
        websocket_origins: origins of pages whose scripts may connect there, as `http://localhost:8000`.
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
    websocket_address: str | None = None
    websocket_origins: tuple[str, ...] = ()
    player_host: str = "127.0.0.1"
    stepping_processes: int = Field(default=1, ge=1)
    max_agents: int = Field(default=65_536, ge=1)
    heartbeat_s: float = Field(default=5.0, ge=0.001)
    simulator_timeout_s: float = Field(default=60.0, gt=0, le=1e6)  # longer waits than 2^31 ms no system has
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

    @field_validator("websocket_address")
    @classmethod
    def _for_websockets(cls, address: str | None) -> str | None:
        if address is None or (is_tcp(address) and urlsplit(address).port):
            return address
        raise ValueError(
            f"got {address!r}; expected tcp://HOST:PORT with a port from 1 to 65535; write for example "
            "tcp://127.0.0.1:5010, to which ws://127.0.0.1:5010 connects"
        )

    @field_validator("websocket_origins")
    @classmethod
    def _origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for one in origins:
            if not _ORIGIN.fullmatch(one):
                raise ValueError(
                    f"got {one!r}; expected scheme, host and port of a page, in lower case and without a path, as "
                    "http://localhost:8000; a page from a file has none: serve it (python -m http.server)"
                )
        return origins

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
        listening = [one for one in (self.address, self.websocket_address) if one is not None]
        if not self.encrypt and (self.credentials == "certificate" or any(map(is_open, listening))):
            raise ValueError(
                f"got encrypt: false with address {' and '.join(map(repr, listening))} and credentials "
                f"{self.credentials!r}; "
                "expected a token on loopback, the only credential that may be sent unencrypted; leave encrypt out"
            )
        if self.websocket_origins and self.websocket_address is None:
            raise ValueError(
                "got websocket_origins without websocket_address; expected both; add the address, as "
                "tcp://127.0.0.1:5010, or remove the origins"
            )
        if self.websocket_address is not None and _overlap(
            self.address, self.websocket_address, self.stepping_processes
        ):
            raise ValueError(
                f"got websocket_address {self.websocket_address!r} with address {self.address!r} and "
                f"{self.stepping_processes} stepping processes, which use the ports that follow too; expected ports of "
                "their own for both; choose another port"
            )
        if self.heartbeat_s >= self.simulator_timeout_s:
            raise ValueError(
                f"got heartbeat_s {self.heartbeat_s:g} with simulator_timeout_s {self.simulator_timeout_s:g}; "
                "expected a heartbeat shorter than the timeout; "
                "lower heartbeat_s or raise simulator_timeout_s (ten heartbeats are usual)"
            )
        return self

    def websocket_of(self, index: int) -> str:
        """Returns the address for WebSockets of a stepping process, where there is one."""
        host, _, port = str(self.websocket_address).rpartition(":")
        return f"{host}:{int(port) + index}"


def _overlap(address: str, other: str, processes: int) -> bool:
    """Returns whether two addresses share a port, counting the ports of further processes; hosts may be the same."""
    ports = urlsplit(address).port, urlsplit(other).port
    return all(ports) and abs((ports[0] or 0) - (ports[1] or 0)) < processes
