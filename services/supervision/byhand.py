"""Games that somebody starts by hand: the console says when, because one that is started earlier finds nobody.

consumes      the standard error of bridges, in logs/simulator-N.stderr
produces      lines on the console
waits for     nothing
unblocked by  nothing
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import anyio

ASKS: Final = "press Play"
"""What a bridge says once it listens for its game."""

_MOST_BYTES: Final = 65536


async def relay(paths: Iterable[Path], log: Any, pace_s: float = 0.5) -> None:
    """Logs each line in which a bridge asks for its game, until it is cancelled.

    Args:
        paths: of what bridges write; what stands there already is of an earlier session.
        log: for the console.
        pace_s: seconds between two looks.
    """
    ends = {path: path.stat().st_size if path.exists() else 0 for path in paths}
    while True:
        for path, end in ends.items():
            new, ends[path] = written_since(path, end)
            for line in asked(new):
                log.info("start_the_game", part=path.stem, note=line, notice=True)
        await anyio.sleep(pace_s)


def asked(text: bytes) -> Iterator[str]:
    """The lines that ask for a game."""
    for line in text.decode(errors="replace").splitlines():
        if ASKS in line:
            yield line


def written_since(path: Path, end: int) -> tuple[bytes, int]:
    """Whole lines of a file behind `end`, from its beginning where it has been emptied since; and where they end."""
    try:
        with path.open("rb") as file:
            end = end if end <= os.fstat(file.fileno()).st_size else 0
            file.seek(end)
            text = file.read(_MOST_BYTES)
    except OSError:
        return b"", end
    whole = text if len(text) == _MOST_BYTES else text[: text.rfind(b"\n") + 1]
    return whole, end + len(whole)
