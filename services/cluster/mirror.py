"""Copies what a part writes on its node into the folder of the run, so that no disk needs to be shared."""

import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from sparring.pipeline.files import append, write_atomically

Read = Callable[[str, int], Awaitable[bytes]]
"""Returns the next bytes of a file on the node, given its name and an offset; none at its end."""

GROWING: Final = ("logs", "run_logs")
"""Folders whose files only grow, or begin anew."""


class Mirror:
    """The copies of one agent's files. A checkpoint is a folder that appears whole, here as there.

    Args:
        folder: of the run.
        checkpoints: folder of the checkpoints within it; "" for a part that writes none.
        sent: names of the files that the agent got from here.
    """

    def __init__(self, folder: Path, checkpoints: str = "", sent: Sequence[str] = ()) -> None:
        self._folder = folder
        self._checkpoints = checkpoints
        self._known: dict[str, Sequence[int]] = {}  # size and time by name, of copied files
        self._whole = {str(PurePosixPath(name).parent) for name in sent} - {checkpoints, "."}  # copied folders

    async def update(self, listing: Mapping[str, Sequence[int]], read: Read) -> None:
        """Copies what has changed.

        Args:
            listing: size and time of each file on the node, by name.
            read: reads there.

        Raises:
            OSError: the disk is full, or the folder of the run cannot be written.
        """
        (self._folder / self._checkpoints).mkdir(exist_ok=True)
        for name, state in listing.items():
            if name.split("/")[0] in GROWING:
                await self._grow(name, state, read)
            elif str(PurePosixPath(name).parent) == self._checkpoints and self._known.get(name) != state:
                write_atomically(self._folder / name, await _whole(name, read), durable=False)
                self._known[name] = state
        own = PurePosixPath(self._checkpoints)
        there = {str(path.parent) for path in map(PurePosixPath, listing) if own in path.parent.parents}
        if not self._checkpoints:
            return
        for folder in sorted(there - self._whole):
            await self._copy(folder, [name for name in listing if str(PurePosixPath(name).parent) == folder], read)
        for folder in self._whole - there:
            shutil.rmtree(self._folder / folder, ignore_errors=True)
        self._whole &= there

    async def _grow(self, name: str, state: Sequence[int], read: Read) -> None:
        copied = self._known.get(name, (0,))[0]
        if state[0] < copied:  # it was rotated, or emptied
            copied = 0
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        while copied < state[0] and (part := await read(name, copied)):
            append(path, part)
            copied += len(part)
        self._known[name] = (copied,)

    async def _copy(self, folder: str, names: Sequence[str], read: Read) -> None:
        target = self._folder / folder
        partial = target.with_name(f".partial-{target.name}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name in names:
            write_atomically(partial / PurePosixPath(name).name, await _whole(name, read))
        if not target.exists():
            partial.rename(target)
        self._whole.add(folder)


async def _whole(name: str, read: Read) -> bytes:
    content = bytearray()
    while part := await read(name, len(content)):
        content += part
    return bytes(content)
