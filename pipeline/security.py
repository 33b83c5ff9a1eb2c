"""What other machines can reach, and whether keys keep strangers out of it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from pipeline.errors import SettingsError
from pipeline.keys import SIMULATORS, allowed, server_tls, token
from pipeline.queues.endpoints import is_open
from pipeline.settings import Settings

KEYS_VARIABLE: Final = "SPARRING_KEYS"

_SIMULATORS_COULD: Final = "whoever reaches it can act as a simulator, poison what is learned and copy how it acts"

_SERVICES_COULD: Final = "whoever reaches it can replace weights and data, and start the run's programs on its machines"


def add_insecure(parser: argparse.ArgumentParser) -> None:
    """Declares `--insecure`."""
    parser.add_argument(
        "--insecure", action="store_true", help="listen beyond loopback without keys: strangers can join the run"
    )


def keys_folder(settings: Settings, environ: Mapping[str, str] | None = None) -> Path | None:
    """The folder of keys on this machine, None where there are none.

    Args:
        settings: of the run.
        environ: variables; None: the process's own.
    """
    named = (os.environ if environ is None else environ).get(KEYS_VARIABLE) or settings.pipeline.keys
    return None if named is None else Path(named).absolute()


def exposed(settings: Settings, *, insecure: bool) -> list[str]:
    """What other machines could reach unprotected, and keys that can not be used; one line for each.

    Args:
        settings: of the run.
        insecure: the user has said that it may be reached without keys.
    """
    folder = keys_folder(settings)
    if folder is not None:
        return list(_unusable(folder))
    if insecure:
        return []
    return [
        f"got {what}, which other machines can reach, without keys; expected keys, or loopback (127.0.0.1, ::1, "
        "localhost) or unix:///PATH; make keys with `sparring keys DIR` and set pipeline.keys: DIR, use loopback and "
        "an SSH tunnel, or say --insecure where everybody who can connect may"
        for what, _ in _reachable(settings)
    ]


def unprotected(settings: Settings, *, insecure: bool) -> list[str]:
    """Warnings of a run that the user lets be reached without keys, one line for each."""
    if not insecure or keys_folder(settings) is not None:
        return []
    return [f"--insecure: {what} is open to everybody: {could}" for what, could in _reachable(settings)]


def _reachable(settings: Settings) -> Iterator[tuple[str, str]]:
    """What listens beyond loopback, and what a stranger could do there."""
    if is_open(settings.pipeline.address):
        yield f"pipeline.address {settings.pipeline.address!r}", _SIMULATORS_COULD
    for name, host in settings.pipeline.hosts.items():
        if is_open(f"tcp://{host.address}"):
            yield f"pipeline.hosts.{name} {host.address}", _SERVICES_COULD


def _unusable(folder: Path) -> Iterator[str]:
    for read in (lambda: server_tls(folder), lambda: token(folder), lambda: allowed(folder, SIMULATORS)):
        try:
            read()
        except SettingsError as error:
            yield str(error)
