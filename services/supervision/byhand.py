"""Games that a user starts by hand: the console says when, because one that is started earlier finds no trainer.

consumes      the standard error of bridges, in logs/simulator-N.stderr
produces      lines on the console
waits for     nothing
unblocked by  nothing
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import anyio
from structlog.typing import FilteringBoundLogger

ASKS: Final = "press Play"
"""A bridge writes these words once it listens for its game."""

_MOST_BYTES: Final = 65536


async def relay(paths: Iterable[Path], log: FilteringBoundLogger, pace_s: float = 0.5) -> None:
    """Logs each line in which a bridge asks for its game, until it is cancelled.

    Args:
        paths: files that the bridges write; lines that exist already are skipped, as an earlier session wrote them.
        log: for the console.
        pace_s: seconds between two looks.
    """
    ends = {path: path.stat().st_size if path.exists() else 0 for path in paths}
    while True:
        for path, end in ends.items():
            new, ends[path] = written_since(path, end)
            for line in new.decode(errors="replace").splitlines():
                if ASKS in line:
                    log.info("start_the_game", part=path.stem, note=line, notice=True)
        await anyio.sleep(pace_s)


def written_since(path: Path, end: int) -> tuple[bytes, int]:
    """Returns the whole lines of a file after `end`, or all where it was emptied since, and the offset of their end."""
    try:
        with path.open("rb") as file:
            end = end if end <= os.fstat(file.fileno()).st_size else 0
            file.seek(end)
            text = file.read(_MOST_BYTES)
    except OSError:
        return b"", end
    whole = text if len(text) == _MOST_BYTES else text[: text.rfind(b"\n") + 1]
    return whole, end + len(whole)
