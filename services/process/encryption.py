"""Which addresses of a run others can reach, and the keys that protect these and the services."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.files import temporary_folder
from sparring.pipeline.queues.endpoints import LONGEST_PATH, is_loopback, is_open
from sparring.pipeline.security import KEY_FILE, allowed, secret_key, server_tls, token

if TYPE_CHECKING:  # `sparring check` needs no event loop, and a page no settings
    from sparring.pipeline.settings import Settings
    from sparring.services.process.runtime import Run

KEYS_VARIABLE: Final = "SPARRING_KEYS"

_DANGER: Final = "any peer that reaches it can act as a simulator, poison the training and copy the policies"
_NUMBERS_DANGER: Final = "any peer that reaches it can read all numbers of the run"


def keys_folder(settings: Settings) -> Path | None:
    """Returns the folder of keys on this machine, which the environment or the settings name; None without keys."""
    named = os.environ.get(KEYS_VARIABLE) or settings.pipeline.keys
    return None if named is None else Path(named).absolute()


def exposed(settings: Settings, *, insecure: bool) -> list[str]:
    """Returns the addresses that other machines could reach unprotected, one line for each.

    Args:
        settings: of the run.
        insecure: the user allows that simulators connect without keys.
    """
    return [
        f"got {what}, which other machines can reach{remedy}, or pass --insecure where any peer may take part"
        for what, remedy, _ in ([] if insecure else _open_addresses(settings))
    ]


def unprotected(settings: Settings, *, insecure: bool) -> list[str]:
    """Returns the warnings of a run with `--insecure`, one line for each."""
    found = _open_addresses(settings) if insecure else []
    return [f"--insecure: {what} is open to any peer: {danger}" for what, _, danger in found]


def _open_addresses(settings: Settings) -> Iterator[tuple[str, str, str]]:
    """Yields each address that no key protects, the remedy, and the danger."""
    pipeline = settings.pipeline
    if not is_loopback(pipeline.player_host) and any(one.name == "unity" for one in settings.launched):
        remedy = "; expected loopback, for no key protects it; use an SSH tunnel to the players' ports"
        yield f"pipeline.player_host {pipeline.player_host!r}", remedy, _DANGER
    if pipeline.metrics_address is not None and is_open(pipeline.metrics_address):
        remedy = "; expected loopback, for no key protects it; let a proxy of your own answer other machines"
        yield f"pipeline.metrics_address {pipeline.metrics_address!r}", remedy, _NUMBERS_DANGER
    for key in ("address", "websocket_address"):
        address = getattr(pipeline, key)
        if address is None or not is_open(address) or keys_folder(settings) is not None:
            continue
        remedy = (
            ", without keys; expected keys, or loopback (127.0.0.1, ::1, localhost) or unix:///PATH; make keys with "
            "`sparring keys DIR` and set pipeline.keys: DIR, use loopback and an SSH tunnel"
        )
        yield f"pipeline.{key} {address!r}", remedy, _DANGER


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
    if not in_process and pipeline.transport != "tcp":
        yield "TMPDIR", temporary_folder() / "sparring-12345678.999"


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
    """Returns the errors of keys that this machine has, one line for each."""
    folder = keys_folder(settings)
    return [] if folder is None or not folder.is_dir() else unusable(folder)


def unusable(folder: Path) -> list[str]:
    """Returns the errors of a folder of keys, one line for each."""
    errors = []
    for read in (server_tls, token, allowed):
        try:
            read(folder)
        except SettingsError as error:
            errors.append(str(error))
    return list(dict.fromkeys(errors))


def service_key(run: Run) -> str | None:
    """Returns the key that the services of a run share; None where they use Unix sockets.

    Raises:
        SettingsError: it is missing, or others can read it.
    """
    return secret_key(run.directory) if (run.directory / KEY_FILE).exists() else None
