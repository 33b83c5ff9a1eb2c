"""Where the services of a run listen: for each other, and for simulators."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from pipeline.errors import SettingsError
from pipeline.settings import Settings
from pipeline.settings.hosts import HostSettings, main, place

SUPERVISOR: Final = "board:supervisor"


def addresses_of(settings: Settings, stepping: list[str]) -> dict[str, str]:
    """Where the simulators of each stepping service connect; fixed now, so that a restart finds it again."""
    parts = urlsplit(settings.pipeline.address)
    if parts.scheme == "unix":
        paths = [parts.path if not index else f"{parts.path}.{index}" for index in range(len(stepping))]
        return {name: f"unix://{path}" for name, path in zip(stepping, paths, strict=True)}
    if hosts := settings.pipeline.hosts:
        first = parts.port or settings.pipeline.port - len(stepping)  # below those between the services
        return {name: _at(hosts[place(hosts, name)].address, first + index) for index, name in enumerate(stepping)}
    host = parts.hostname or "127.0.0.1"
    ports = [_free_port(host, parts.port + index if parts.port else 0) for index in range(len(stepping))]
    return {name: _at(host, port) for name, port in zip(stepping, ports, strict=True)}


def _at(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _free_port(host: str, wanted: int) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, wanted))
        except OSError as error:
            raise SettingsError(
                f"got port {wanted} on {host}, which is not free ({error.strerror}); expected a free port; "
                "stop what uses it, or set pipeline.address to another port (0 chooses one)"
            ) from error
        return int(probe.getsockname()[1])


def endpoints_of(settings: Settings, names: list[str], sockets: Path | None) -> dict[str, str]:
    """Addresses of queues and boards.

    Args:
        settings: of the run.
        names: of the queues, and of the boards as "board:NAME".
        sockets: a folder for Unix sockets, or None for loopback ports.

    Raises:
        SettingsError: a port is not free.
    """
    if settings.pipeline.hosts:
        return _between_machines(settings, names)
    if sockets is not None:
        return {name: f"ipc://{sockets}/{index}" for index, name in enumerate(names)}
    return {name: f"tcp://127.0.0.1:{_free_port('127.0.0.1', 0)}" for name in names}


def _between_machines(settings: Settings, names: list[str]) -> dict[str, str]:
    """Endpoints at numbered ports, the supervisor's first: who joins knows that one only."""
    hosts = settings.pipeline.hosts
    own = main(hosts)
    found = {}
    for port, name in enumerate([SUPERVISOR, *names, *(f"board:host-{one}" for one in hosts)], settings.pipeline.port):
        where = _listening_host(hosts, name)
        found[name] = _at(hosts[where].address, port)
        if where == own:
            _free_port(hosts[where].address, port)
    return found


def _listening_host(hosts: Mapping[str, HostSettings], name: str) -> str:
    """The host on which somebody listens at a queue or board."""
    kind, _, rest = name.partition(":")
    if kind == "board" and rest.startswith("host-"):
        return rest.removeprefix("host-")
    if kind == "board":
        service = {"ghosts": "coordination"}.get(rest, rest.replace("policy-", "learning-", 1))
    else:
        service = {"steps": "assembly", "segments": "coordination"}.get(kind, f"learning-{rest}")
    return place(hosts, service)
