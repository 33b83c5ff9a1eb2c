"""Copies what a part writes on its node into the folder of the run, so that no disk needs to be shared."""

import re
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from sparring.pipeline.files import append, write_atomically
from sparring.pipeline.learning.checkpoints import age
from sparring.pipeline.monitoring.files import full, trim

Read = Callable[[str, int], Awaitable[bytes]]
"""Returns the next bytes of a file on the node, given its name and an offset; none at its end."""
Listing = Mapping[str, Sequence[int]]
"""Size and time of the last change of files, by name."""

GROWING: Final = ("logs", "run_logs")
"""Folders whose files only grow, or begin anew; what was rotated there has `.1` and so on at its end."""
_ROTATED: Final = re.compile(r"\.\d+$")
_STATE: Final = "state.json"


class Mirror:
    """The copies of one agent's files. A checkpoint is a folder that appears whole, here as there.

    Args:
        folder: of the run.
        checkpoints: folder of the checkpoints within it; "" for a part that writes none.
        sent: names of the files that the agent got from here.
        most_bytes: of a growing file here, beyond which it is rotated.
        kept: number of rotated files.
    """

    def __init__(
        self,
        folder: Path,
        checkpoints: str = "",
        sent: Sequence[str] = (),
        *,
        most_bytes: int = 16_000_000,
        kept: int = 3,
    ) -> None:
        self._folder = folder
        self._checkpoints = checkpoints
        self._bounds = most_bytes, kept
        self._copied: dict[str, int] = {}  # bytes of growing files
        self._rotated: dict[str, Sequence[int]] = {}  # state of what was rotated, by name of the growing file
        self._version: Sequence[int] = ()
        self._whole = {str(PurePosixPath(name).parent) for name in sent} - {checkpoints, "."}  # folders that are here

    async def update(self, listing: Listing, read: Read) -> None:
        """Copies what has changed.

        Args:
            listing: of all files on the node.
            read: reads there.

        Raises:
            OSError: the disk is full, or the folder of the run cannot be written.
        """
        listing = {name: state for name, state in listing.items() if not {"..", ""} & {*name.split("/")}}
        for name, (size, _) in listing.items():
            if name.split("/")[0] in GROWING and not _ROTATED.search(name):
                await self._grow(name, size, listing, read)
        if not self._checkpoints:
            return
        (self._folder / self._checkpoints).mkdir(exist_ok=True)
        note = f"{self._checkpoints}/version"
        state = listing.get(note, ())
        if state != self._version and len(content := await _whole(note, read)) == state[0]:
            write_atomically(self._folder / note, content, durable=False)
            self._version = state
        own = PurePosixPath(self._checkpoints)
        there = {str(path.parent) for path in map(PurePosixPath, listing) if path.parent.parent == own}
        there = {one for one in there if f"{one}/{_STATE}" in listing}
        for folder in sorted(there - self._whole):
            await self._copy(folder, listing, read)
        if not there <= self._whole:
            return  # one is not copied whole: it may be the newest
        newest = max((age(Path(one)) for one in there), default=None)
        for folder in self._whole - there:
            if newest is not None and folder.startswith(f"{own}/") and age(Path(folder)) < newest:
                shutil.rmtree(self._folder / folder, ignore_errors=True)
                self._whole.discard(folder)

    async def _grow(self, name: str, size: int, listing: Listing, read: Read) -> None:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        rotated, former = listing.get(f"{name}.1", ()), self._rotated.get(name, ())
        if size < self._copied.get(name, 0):  # it was rotated, or emptied
            if rotated and rotated != former:  # its end may not be copied
                await self._append(path, name, f"{name}.1", rotated[0], read)
            self._copied[name] = 0
        self._rotated[name] = rotated
        await self._append(path, name, name, size, read)

    async def _append(self, path: Path, name: str, source: str, size: int, read: Read) -> None:
        """Appends the bytes of a file there from the last copied one on."""
        while self._copied.get(name, 0) < size and (part := await read(source, self._copied.get(name, 0))):
            append(path, part)
            self._copied[name] = self._copied.get(name, 0) + len(part)
            if full(path, self._bounds[0]):
                trim(path, *self._bounds)

    async def _copy(self, folder: str, listing: Listing, read: Read) -> None:
        """Copies a checkpoint, unless it changes or is removed meanwhile: the next call tries again."""
        target = self._folder / folder
        partial = target.with_name(f".partial-{target.name}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name in [name for name in listing if str(PurePosixPath(name).parent) == folder]:
            content = await _whole(name, read)
            if len(content) != listing[name][0]:
                shutil.rmtree(partial)
                return
            write_atomically(partial / PurePosixPath(name).name, content)
        if not target.exists():
            partial.rename(target)
        self._whole.add(folder)


async def _whole(name: str, read: Read) -> bytes:
    content = bytearray()
    while part := await read(name, len(content)):
        content += part
    return bytes(content)
