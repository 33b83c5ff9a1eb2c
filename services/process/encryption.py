"""Which addresses of a run others can reach, and the keys that protect these and the queue ends of services."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.queues.curve import Curve, Protection
from sparring.pipeline.queues.endpoints import LONGEST_PATH, is_loopback, is_open
from sparring.pipeline.security import (
    CONNECTIONS,
    ROLES,
    SIMULATORS,
    allowed,
    endpoint_role,
    owner,
    public_key,
    secret_key,
    server_tls,
    token,
)
from sparring.pipeline.settings import Settings
from sparring.pipeline.settings.hosts import machines, main, place

if TYPE_CHECKING:  # `sparring check` needs no event loop
    from sparring.services.process.runtime import Run

KEYS_VARIABLE: Final = "SPARRING_KEYS"

_SIMULATORS_COULD: Final = "any peer that reaches it can act as a simulator, poison the training and copy the policies"

_SERVICES_COULD: Final = "any peer that reaches it can replace weights and data"


def keys_folder(settings: Settings) -> Path | None:
    """Returns the folder of keys on this machine, which the environment or the settings name; None without keys."""
    named = os.environ.get(KEYS_VARIABLE) or settings.pipeline.keys
    return None if named is None else Path(named).absolute()


def exposed(settings: Settings, *, insecure: bool, in_process: bool = False) -> list[str]:
    """Returns the addresses that other machines or users could reach unprotected, one line for each.

    Args:
        settings: of the run.
        insecure: the user allows access without keys.
        in_process: the services need no addresses.
    """
    return [
        f"got {what}, which {who} can reach{remedy}, or pass --insecure where any peer may take part"
        for what, who, _, remedy in ([] if insecure else _open_addresses(settings, in_process=in_process))
    ]


def unprotected(settings: Settings, *, insecure: bool) -> list[str]:
    """Returns the warnings of a run with `--insecure`, one line for each."""
    found = _open_addresses(settings) if insecure else []
    return [f"--insecure: {what} is open to any peer: {danger}" for what, _, danger, _ in found]


def _open_addresses(settings: Settings, *, in_process: bool = False) -> Iterator[tuple[str, str, str, str]]:
    """Yields each address that no key protects, who can reach it, what any peer could do there, and the remedy."""
    pipeline, others = settings.pipeline, "other machines"
    if not is_loopback(pipeline.player_host) and any(one.name == "unity" for one in settings.launched):
        remedy = "; expected loopback, for no key protects it; use an SSH tunnel to the players' ports"
        yield f"pipeline.player_host {pipeline.player_host!r}", others, _SIMULATORS_COULD, remedy
    if keys_folder(settings) is not None:
        return
    remedy = (
        ", without keys; expected keys, or loopback (127.0.0.1, ::1, localhost) or unix:///PATH; make keys with "
        "`sparring keys DIR` and set pipeline.keys: DIR, use loopback and an SSH tunnel"
    )
    if is_open(pipeline.address):
        yield f"pipeline.address {pipeline.address!r}", others, _SIMULATORS_COULD, remedy
    for name, host in pipeline.hosts.items():
        if is_open(f"tcp://{host.address}"):
            yield f"pipeline.hosts.{name} {host.address}", others, f"{_SERVICES_COULD} and start programs", remedy
    if pipeline.transport == "tcp" and not in_process:  # else sockets in a private folder
        remedy = (
            ", without keys; expected keys, or Unix sockets; make keys with `sparring keys DIR` and set "
            "pipeline.keys: DIR, or leave pipeline.transport out"
        )
        yield "pipeline.transport 'tcp'", "all users of this machine", _SERVICES_COULD, remedy


def socket_paths(settings: Settings, *, in_process: bool = False) -> Iterator[tuple[str, Path]]:
    """Yields the paths of a run's Unix sockets, each after what determines it; of those between services only one.

    Args:
        settings: of the run.
        in_process: the services need no sockets.
    """
    pipeline = settings.pipeline
    address = urlsplit(pipeline.address)
    for number in range(pipeline.stepping_processes if address.scheme == "unix" else 0):
        yield "pipeline.address", Path(address.path + (f".{number}" if number else ""))
    if not (in_process or pipeline.hosts or pipeline.transport == "tcp") and os.name == "posix":
        yield "TMPDIR", Path(tempfile.gettempdir(), "sparring-12345678.999")


def long_paths(settings: Settings, *, in_process: bool = False) -> list[str]:
    """Returns a line for each Unix socket whose path is longer than the system allows; see `socket_paths`."""
    return [
        f"got {what} with a socket at {path}, {len(bytes(path))} bytes; expected at most {LONGEST_PATH}; choose a "
        "shorter one, as in /tmp"
        for what, path in socket_paths(settings, in_process=in_process)
        if len(bytes(path)) > LONGEST_PATH
    ]


def keys_missing(settings: Settings) -> list[str]:
    """Returns a line where the settings name keys that this machine lacks."""
    folder = keys_folder(settings)
    if folder is None or folder.is_dir():
        return []
    return [f"got the keys {folder}, which are not here; expected a folder; make it with `sparring keys`, or copy it"]


def keys_unusable(settings: Settings) -> list[str]:
    """Returns the errors of keys that this machine, where the run is started, has and needs, one line for each."""
    folder, hosts = keys_folder(settings), settings.pipeline.hosts
    if folder is None or not folder.is_dir():
        return []
    here = main(hosts)
    reads: list[Callable[[], object]] = []
    if any(place(hosts, f"stepping-{index}") == here for index in range(settings.pipeline.stepping_processes)):
        reads += [partial(server_tls, folder), partial(token, folder), partial(allowed, folder, SIMULATORS)]
    if hosts or settings.pipeline.transport == "tcp":
        services = [*ROLES, *(f"learning-{name}" for name in settings.behaviors)]
        roles = {name.partition("-")[0] for name in services if place(hosts, name) == here}
        reads += [partial(secret_key, folder, role) for role in sorted(roles)]
        reads += [partial(public_key, folder, role) for role in ROLES]
        reads += [partial(allowed, folder, kind) for kind in CONNECTIONS]
    errors = []
    for read in reads:
        try:
            read()
        except SettingsError as error:
            errors.append(str(error))
    return list(dict.fromkeys(errors))


def curve(folder: Path, role: str, names: Iterable[str]) -> Curve:
    """Returns the keys of a service.

    Args:
        folder: of keys.
        role: of the service.
        names: of all queues and topics ("topic:NAME") of the run.

    Raises:
        SettingsError: a key or the list is missing, or others can read or change it.
    """
    kinds = {name: endpoint_role(name) for name in names}
    lists = {kind: allowed(folder, kind) for kind in set(kinds.values())}
    known = {one: public_key(folder, one) for one in {*map(owner, lists), *frozenset[str]().union(*lists.values())}}
    return Curve(
        public=public_key(folder, role),
        secret=secret_key(folder, role),
        servers={name: known[owner(kind)] for name, kind in kinds.items()},
        clients={name: frozenset(known[one] for one in lists[kind]) for name, kind in kinds.items()},
    )


def protection(run: Run, names: Iterable[str], service: str, host: str | None = None) -> Protection:
    """Returns the protection of the queue ends of a service.

    Args:
        run: run of the service.
        names: of all queues and topics ("topic:NAME") of the run.
        service: such as "learning-Ball", or "supervisor".
        host: host that it runs on; None for the one in the run's settings.

    Raises:
        SettingsError: as `curve`.
    """
    here = place(run.hosts, service) if host is None else host
    keys = None if run.keys is None else curve(run.keys, service.partition("-")[0], names)
    return Protection(curve=keys, insecure=run.insecure, machines=machines(run.hosts, here))
