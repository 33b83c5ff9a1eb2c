"""Settings show which addresses other machines can reach, and whether keys protect these."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.queues.endpoints import is_loopback, is_open
from sparring.pipeline.security import (
    CONNECTIONS,
    ROLES,
    SIMULATORS,
    allowed,
    public_key,
    read_curve,
    server_tls,
    token,
)
from sparring.pipeline.settings import Settings
from sparring.pipeline.settings.hosts import main, place

KEYS_VARIABLE: Final = "SPARRING_KEYS"

_SIMULATORS_COULD: Final = "any peer that reaches it can act as a simulator, poison the training and copy the policies"

_SERVICES_COULD: Final = "any peer that reaches it can replace weights and data, and start programs on its machines"


def keys_folder(settings: Settings, environ: Mapping[str, str] | None = None) -> Path | None:
    """Returns the folder of keys on this machine; None without keys.

    Args:
        settings: of the run.
        environ: variables; None for the process's own.
    """
    named = (os.environ if environ is None else environ).get(KEYS_VARIABLE) or settings.pipeline.keys
    return None if named is None else Path(named).absolute()


def exposed(settings: Settings, *, insecure: bool) -> list[str]:
    """Returns the addresses that other machines could reach unprotected, one line for each.

    Args:
        settings: of the run.
        insecure: the user allows access without keys.
    """
    if insecure:
        return []
    players = [
        f"got {what}, which other machines can reach; expected loopback, for no key protects it; use an SSH tunnel to "
        "the players' ports, or pass --insecure where anyone who can connect may take part"
        for what, _ in _players(settings)
    ]
    if keys_folder(settings) is not None:
        return players
    return players + [
        f"got {what}, which other machines can reach, without keys; expected keys, or loopback (127.0.0.1, ::1, "
        "localhost) or unix:///PATH; make keys with `sparring keys DIR` and set pipeline.keys: DIR, use loopback and "
        "an SSH tunnel, or pass --insecure where anyone who can connect may take part"
        for what, _ in _reachable(settings)
    ]


def keys_missing(settings: Settings) -> list[str]:
    """Returns a line where the settings name keys that this machine lacks."""
    folder = keys_folder(settings)
    if folder is None or folder.is_dir():
        return []
    return [f"got the keys {folder}, which are not here; expected a folder; make it with `sparring keys`, or copy it"]


def keys_unusable(settings: Settings) -> list[str]:
    """Returns the errors of keys that this machine has and needs, one line for each."""
    folder = keys_folder(settings)
    if folder is None or not folder.is_dir():
        return []
    found = dict.fromkeys(str(error) for error in _failures(settings, folder))
    return list(found)


def unprotected(settings: Settings, *, insecure: bool) -> list[str]:
    """Returns the warnings of a run with `--insecure`, one line for each."""
    if not insecure:
        return []
    reachable = [] if keys_folder(settings) is not None else _reachable(settings)
    return [f"--insecure: {what} is open to any peer: {could}" for what, could in (*_players(settings), *reachable)]


def _players(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yields the address of Unity players where it is beyond loopback, and the danger."""
    host = settings.pipeline.player_host
    if not is_loopback(host) and any(one.name == "unity" for one in settings.launched):
        yield f"pipeline.player_host {host!r}", _SIMULATORS_COULD


def _reachable(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yields each address beyond loopback, and what an unauthenticated peer could do there."""
    if is_open(settings.pipeline.address):
        yield f"pipeline.address {settings.pipeline.address!r}", _SIMULATORS_COULD
    for name, host in settings.pipeline.hosts.items():
        if is_open(f"tcp://{host.address}"):
            yield f"pipeline.hosts.{name} {host.address}", _SERVICES_COULD


def _failures(settings: Settings, folder: Path) -> Iterator[SettingsError]:
    """Yields the errors of all keys that the machine where the run is started must read."""
    hosts = settings.pipeline.hosts
    here = main(hosts)
    reads: list[Callable[[], object]] = []
    if any(place(hosts, f"stepping-{index}") == here for index in range(settings.pipeline.stepping_processes)):
        reads += [partial(server_tls, folder), partial(token, folder), partial(allowed, folder, SIMULATORS)]
    if hosts or settings.pipeline.transport == "tcp":
        services = [*ROLES, *(f"learning-{name}" for name in settings.behaviors)]
        roles = {name.partition("-")[0] for name in services if place(hosts, name) == here}
        reads += [partial(read_curve, folder, role) for role in sorted(roles)]
        reads += [partial(public_key, folder, role) for role in ROLES]
        reads += [partial(allowed, folder, kind) for kind in CONNECTIONS]
    for read in reads:
        try:
            read()
        except SettingsError as error:
            yield error
