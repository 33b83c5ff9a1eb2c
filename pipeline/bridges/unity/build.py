"""Finds the program of a Unity build, and makes its command line with the port that it calls."""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.files import expanded

EDITOR_PORT = 5004
BUILD_PORT = 5005


def find_build(text: str) -> Path:
    """Returns the program of a build, whose extension may be omitted, as `mlagents-learn` allows.

    Args:
        text: path of the program, on macOS of the `.app` folder, with or without extension.

    Raises:
        SettingsError: the program does not exist, or cannot be run.
    """
    if not Path(text).name:
        raise SettingsError(f"got the build {text!r}; expected the path of its program; correct --env")
    path = expanded(text)
    found = next((one for one in _candidates(path) if one.is_file()), None)
    if found is None:
        what, where = ("a folder", path) if path.is_dir() else ("not there", path.parent)
        near = sorted(one.name for one in where.glob("*"))[:8] if where.is_dir() else []
        raise SettingsError(
            f"got the build {text}, which is {what}; expected the program of a Unity build; correct --env"
            + (f" (in {where} there are {', '.join(near)})" if near else "")
        )
    if not os.access(found, os.X_OK):
        raise SettingsError(f"got the build {found}, which may not be run; expected a program; chmod +x makes it one")
    return found.absolute()


def _candidates(path: Path) -> Iterator[Path]:
    yield path
    app = path if path.suffix == ".app" else path.with_name(path.name + ".app")
    if sys.platform == "darwin" and app.is_dir():
        yield from sorted((app / "Contents" / "MacOS").glob("*"))
    for suffix in (".x86_64", ".x86", ".exe"):
        yield path.with_name(path.name + suffix)


def command(build: Path, port: int, *, no_graphics: bool, log: Path | None, arguments: Sequence[str]) -> list[str]:
    """Returns program and arguments of one player.

    Args:
        build: the program.
        port: port on which the trainer listens.
        no_graphics: run without a window and without rendering.
        log: file for the player's log; None: Unity's default place.
        arguments: the game's own arguments, which come last.
    """
    graphics = ["-nographics", "-batchmode"] if no_graphics else []
    logging = [] if log is None else ["-logFile", str(log)]
    return [str(build), *graphics, "--mlagents-port", str(port), *logging, *arguments]
