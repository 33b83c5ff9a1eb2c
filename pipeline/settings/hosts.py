"""Defines the machines of a run, and which services run on which."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, field_validator

MOVABLE: Final = ("stepping", "assembly", "learning")
"""Stages that may run on any machine. Coordination and monitor stay on the first, which has the files of the run."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


class HostSettings(BaseModel):
    """Configures one machine of the run.

    Attributes:
        address: IP address at which the other machines reach it.
        services: its services: a stage (`stepping`, `assembly`, `learning`) for all services of it, or one service
            (`stepping-0`, `learning-NAME`). Services that no machine names run on the first.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

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


def check_names(hosts: Mapping[str, HostSettings]) -> Mapping[str, HostSettings]:
    """Checks that each name can be part of a topic's name.

    Raises:
        ValueError: a name cannot.
    """
    for name in hosts:
        if not _NAME.fullmatch(name):
            raise ValueError(f"got the host {name!r}; expected a name of letters, digits, - and _; choose another")
    return hosts


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


def machines(hosts: Mapping[str, HostSettings], own: str) -> tuple[str, ...]:
    """Returns the addresses of all machines, that of `own` first; none for a run on one machine."""
    if not hosts:
        return ()
    others = [host.address for name, host in hosts.items() if name != own]
    return tuple(dict.fromkeys([hosts[own].address, *others]))


def problems(hosts: Mapping[str, HostSettings], services: Sequence[str]) -> list[tuple[str, str]]:
    """Returns wrong entries in `services` of the hosts: the host, and got, expected, remedy.

    Args:
        hosts: hosts of the configuration.
        services: names of all services of the run.
    """
    movable = [name for name in services if name.partition("-")[0] in MOVABLE]
    words = [*MOVABLE, *movable]
    found, seen = [], dict[str, str]()
    for name, host in hosts.items():
        for word in host.services:
            if word in seen:
                text = f"got {word!r} on {seen[word]} and on {name}; expected it on one host; remove it from the other"
                found.append((name, text))
            elif word not in words:
                text = f"got the service {word!r}; expected one of {', '.join(words)}; correct it, or leave it out: "
                found.append((name, text + "services that no host names run on the first"))
            seen.setdefault(word, name)
    return found
