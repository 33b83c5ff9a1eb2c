"""Machines of a run, and what runs on which."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, field_validator

MOVABLE: Final = ("stepping", "assembly", "learning")
"""Stages that may run on any machine. Coordination and monitor stay on the first: their files are those of the run."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


class HostSettings(BaseModel):
    """One machine of the run.

    Attributes:
        address: IP address at which the other machines reach it.
        services: what runs there: a stage (`stepping`, `assembly`, `learning`) with all its services, or one of them
            (`stepping-0`, `learning-NAME`). What no machine names runs on the first.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    address: str
    services: tuple[str, ...] = Field(default=(), strict=False)  # JSON knows lists only

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
    """Refuses names that could name no board.

    Raises:
        ValueError: there is one.
    """
    for name in hosts:
        if not _NAME.fullmatch(name):
            raise ValueError(f"got the host {name!r}; expected a name of letters, digits, - and _; choose another")
    return hosts


def place(hosts: Mapping[str, HostSettings], service: str) -> str:
    """The host that a service runs on; "" where there is one machine only."""
    stage = service.partition("-")[0]
    for wanted in (service, stage):  # the most exact word counts
        for name, host in hosts.items():
            if wanted in host.services:
                return name
    return main(hosts)


def main(hosts: Mapping[str, HostSettings]) -> str:
    """The host on which the run is started; "" where there is one machine only."""
    return next(iter(hosts), "")


def machines(hosts: Mapping[str, HostSettings], own: str) -> tuple[str, ...]:
    """The addresses of all machines, that of `own` first; none where there is one machine only."""
    if not hosts:
        return ()
    others = [host.address for name, host in hosts.items() if name != own]
    return tuple(dict.fromkeys([hosts[own].address, *others]))


def problems(hosts: Mapping[str, HostSettings], services: Sequence[str]) -> list[tuple[str, str]]:
    """What `services` of the hosts name wrongly: the host, and got, expected, remedy.

    Args:
        hosts: of the configuration.
        services: all that there are.
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
                found.append((name, text + "what no host names runs on the first"))
            seen.setdefault(word, name)
    return found
