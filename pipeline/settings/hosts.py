"""Defines the machines of a run, and which services run on which."""

import ipaddress
from collections.abc import Mapping
from typing import Final

from pydantic import Field, field_validator

from sparring.pipeline.coordination.settings import SettingsModel

MOVABLE: Final = ("stepping", "assembly", "learning")
"""Stages that may run on any machine. Coordination and monitor stay on the first, which has the files of the run."""


class HostSettings(SettingsModel):
    """Configures one machine of the run.

    Attributes:
        address: IP address at which the other machines reach it.
        services: its services: a stage (`stepping`, `assembly`, `learning`) for all services of it, or one service
            (`stepping-0`, `learning-NAME`). Services that no machine names run on the first.
    """

    address: str
    services: tuple[str, ...] = Field(default=(), strict=False)  # JSON has lists only

    @field_validator("address")
    @classmethod
    def _one_machine(cls, address: str) -> str:
        try:
            unspecified = ipaddress.ip_address(address).is_unspecified
        except ValueError:
            unspecified = True
        if unspecified:
            raise ValueError(
                f"got {address!r}; expected the IP address of one machine; "
                "write the one at which the others reach it, without port, as 10.0.0.2"
            )
        return address


def place(hosts: Mapping[str, HostSettings], service: str) -> str:
    """Returns the host of a service; "" for a run on one machine."""
    stage = service.partition("-")[0]
    for wanted in (service, stage):  # the more specific name wins
        for name, host in hosts.items():
            if wanted in host.services:
                return name
    return main(hosts)


def main(hosts: Mapping[str, HostSettings]) -> str:
    """Returns the host on which the run is started; "" for a run on one machine."""
    return next(iter(hosts), "")
