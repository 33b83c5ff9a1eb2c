"""This module stores the steps of earlier updates in columns, for trainers that learn from a step many times.

The columns are files that are mapped into memory, so that the system keeps what is in use and writes the rest to disk.
They form one ring of slots. A segment takes a slot for each of its steps and one for the observation that follows: that
of any other step is in the next slot, and no observation is stored twice. The oldest slots are overwritten, one by one:
a step needs only what follows it. Images are stored as bytes.

What follows the end of an episode has no masks. Where choices are masked, the last step of an episode that was
truncated only ends the one before it, unless it is the only one of its segment.

Two counters say where the ring is. They belong to the optimizer state of a checkpoint, so that a restored learner
continues with the steps that it had then: slots that were written later are not sampled, and neither are those that
they have overwritten.

r steps of s segments, one segment after the other; n slots; K choices of all branches.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
import torch

from sparring.pipeline.assembly import sequences
from sparring.pipeline.errors import CheckpointError
from sparring.pipeline.files import regular
from sparring.pipeline.learning.buffer import Batch
from sparring.pipeline.specs import Array, BehaviorSpec, Floats, Numbers

_ENDED: Final = 1
_TERMINATED: Final = 2
_COUNTS: Final = "counts"


class Replay:
    """Holds the newest steps of one behavior, in a bounded number of bytes.

    Args:
        spec: observations and actions of the behavior.
        slots: number of slots; a segment takes one more than it has steps.
        sequence_length: most steps of a sequence; 0 if agents carry nothing.
        carried: numbers that an agent carries into the first step of each sequence.
        folder: of the files; None keeps the columns in memory.
        keep: the files stay after the end of the process, and an earlier process's are continued; otherwise the system
            removes them with the process, whichever way it ends.

    Attributes:
        counters: slots written and steps that arrived, ever; restored with a checkpoint.
        bytes: size of all columns.

    Raises:
        CheckpointError: kept files are of another spec or size, or the disk has no room.
    """

    def __init__(
        self,
        spec: BehaviorSpec,
        slots: int,
        *,
        sequence_length: int = 0,
        carried: int = 0,
        folder: Path | None = None,
        keep: bool = False,
    ) -> None:
        self._slots = slots
        self._length = sequence_length
        self._bytes_of_floats = [one.kind == "image" and one.dtype == "float32" for one in spec.observations]
        kinds = [np.dtype(np.uint8 if one.kind == "image" else one.dtype) for one in spec.observations]
        observations = {
            f"observation.{at}": (one.shape, kind)
            for at, (one, kind) in enumerate(zip(spec.observations, kinds, strict=True))
        }
        actions, single = spec.actions, np.dtype(np.float32)
        shapes: dict[str, tuple[tuple[int, ...], np.dtype[np.generic]]] = {
            **observations,
            "continuous": ((actions.continuous,), single),
            "discrete": ((len(actions.discrete),), np.min_scalar_type(max(actions.discrete, default=0))),
            "masks": ((actions.mask_size,), np.dtype(np.bool_)),
            "rewards": ((), single),
            "left": ((), np.dtype(np.int32)),  # steps from this one to the end of the segment; 0 for what follows
            "ends": ((), np.dtype(np.uint8)),
            "carried": ((carried,), single),
            "since": ((), np.dtype(np.int32)),  # steps since the start of the sequence
        }
        unused = {"carried"} if not carried else set()
        unused |= set() if sequence_length > 1 else {"since"}
        wanted = {
            name: ((slots, *shape), kind)
            for name, (shape, kind) in shapes.items()
            if name not in unused and 0 not in shape
        }
        self.bytes = sum(math.prod(shape) * kind.itemsize for shape, kind in wanted.values())
        self._columns = _columns(wanted | {_COUNTS: ((3,), np.dtype(np.int64))}, folder, keep, self.bytes)
        self._observations = [self._columns[name] for name in observations]
        # First slot and first step of what is stored, and the first slot that was never written.
        self._counts: Numbers = self._columns.pop(_COUNTS)
        self.counters = torch.zeros(2, dtype=torch.int64)
        self._settled: list[int] | None = None

    @property
    def stored(self) -> int:
        """Returns the steps that arrived since the replay was last empty, those that were overwritten included."""
        self._settle()
        return int(self.counters[1]) - int(self._counts[1])

    @property
    def first(self) -> int:
        """Returns the oldest slot that can be sampled; slots are numbered without end."""
        self._settle()
        return max(int(self._counts[0]), int(self._counts[2]) - self._slots)

    @property
    def written(self) -> int:
        """Returns the slots that were ever written, those that were overwritten included."""
        return int(self.counters[0])

    @property
    def share(self) -> float:
        """Returns the share of the slots that are in use."""
        return (self.written - self.first) / self._slots

    def add(self, batch: Batch, rewards: Floats) -> None:
        """Stores segments, which overwrite the oldest.

        Args:
            batch: segments.
            rewards: [r] of each step, those of groups included.
        """
        self._settle()
        lengths = batch.lengths.astype(np.int64)
        own = np.ones(len(lengths), np.int64)  # the observation that follows has a slot of its own
        if batch.masks is not None:
            own[batch.ended & ~batch.terminated & (lengths > 1)] = 0
        sizes = lengths + own
        begins = self.written + np.cumsum(sizes) - sizes
        within = np.arange(batch.steps) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        at, left = np.repeat(begins, lengths) + within, np.repeat(sizes - 1, lengths) - within
        following, ended = begins + sizes - 1, np.cumsum(lengths) - 1
        end = self.written + int(sizes.sum())
        # Noted before it happens, so that no process takes overwritten slots for what they were.
        self._counts[2] = max(int(self._counts[2]), end)
        kept = at >= end - self._slots
        place = at[kept] % self._slots
        ends = np.zeros(batch.steps, np.uint8)
        ends[ended] = (batch.ended * _ENDED | batch.terminated * _TERMINATED) * own
        columns: dict[str, Array | None] = {
            "continuous": batch.continuous,
            "discrete": batch.discrete,
            "masks": np.zeros((batch.steps, 1), np.bool_) if batch.masks is None else batch.masks,
            "rewards": rewards,
            "left": left,
            "ends": ends,
            "since": within % self._length if self._length else None,
        }
        for name, column in columns.items():
            if name in self._columns and column is not None:
                self._columns[name][place] = column[kept]
        last = (own > 0) & (following >= end - self._slots)
        places = following[last] % self._slots
        self._columns["left"][places] = 0
        if "masks" in self._columns:
            self._columns["masks"][places] = False if batch.next_masks is None else batch.next_masks[last]
        each = zip(self._observations, batch.observations, batch.next_observations, self._bytes_of_floats, strict=True)
        for stored, seen, after, is_float in each:
            stored[place] = _as_bytes(seen[kept]) if is_float else seen[kept]
            stored[places] = _as_bytes(after[last]) if is_float else after[last]
        if batch.carried is not None and "carried" in self._columns:
            starts = batch.starts()
            chosen = kept[starts]
            self._columns["carried"][at[starts[chosen]] % self._slots] = batch.carried[chosen]
        self.counters += torch.tensor([int(sizes.sum()), batch.steps])
        self._settled = self.counters.tolist()

    def sample(self, count: int, steps: int, generator: torch.Generator) -> Batch:
        """Samples steps with equal probability, each with up to `steps - 1` that follow it, or whole sequences.

        Log-probabilities, versions and rewards of groups are zeros, because rewards hold both kinds.

        Args:
            count: number of segments to sample; more than 0 steps must be stored.
            steps: most steps of each; without effect if networks have a memory, which need sequences.
            generator: random source.
        """
        first, columns = self.first, self._columns
        found: list[Numbers] = []
        missing = count
        while missing:
            chosen = first + torch.randint(self.written - first, (missing,), generator=generator).numpy()
            chosen = chosen[columns["left"][chosen % self._slots] > 0]
            if "since" in columns:
                chosen = chosen - columns["since"][chosen % self._slots]
                chosen = chosen[chosen >= first]
            found.append(chosen)
            missing -= len(chosen)
        begins = np.concatenate(found)
        left = columns["left"][begins % self._slots].astype(np.int64)
        lengths = np.minimum(left, self._length if self._length > 1 else steps)
        rows, after = sequences.rows_of(begins, lengths) % self._slots, (begins + lengths) % self._slots
        ends = np.where(lengths == left, columns["ends"][(begins + lengths - 1) % self._slots], 0)
        zeros, nothing = np.zeros(len(rows), np.float32), np.empty((len(rows), 0), np.float32)
        starts = begins if self._length > 1 else sequences.rows_of(begins, lengths)
        masks = columns.get("masks")
        return Batch(
            lengths=lengths,
            terminated=(ends & _TERMINATED) > 0,
            ended=(ends & _ENDED) > 0,
            agent_episodes=np.arange(count),
            next_observations=tuple(column[after] for column in self._observations),
            observations=tuple(column[rows] for column in self._observations),
            continuous=columns["continuous"][rows] if "continuous" in columns else nothing,
            discrete=columns["discrete"][rows].astype(np.int32) if "discrete" in columns else nothing.astype(np.int32),
            log_probs=zeros,
            masks=None if masks is None else masks[rows],
            next_masks=None if masks is None else masks[after],
            rewards=columns["rewards"][rows],
            group_rewards=zeros,
            versions=np.zeros(len(rows), np.int64),
            sequence_length=self._length,
            carried=columns["carried"][starts % self._slots] if "carried" in columns else None,
        )

    def _settle(self) -> None:
        """Empties the replay if its counters were restored to a state that these files do not hold."""
        written, stored = counters = self.counters.tolist()
        if counters == self._settled:
            return
        self._settled = counters
        begun, _, reached = self._counts.tolist()
        if not begun <= written <= reached or written <= reached - self._slots:
            self._counts[:] = written, stored, written


def _as_bytes(image: Array) -> Array:
    return np.rint(np.clip(image, 0, 1) * np.float32(255)).astype(np.uint8)


def _columns(
    wanted: Mapping[str, tuple[tuple[int, ...], np.dtype[np.generic]]], folder: Path | None, keep: bool, size: int
) -> dict[str, Array]:
    """Returns columns of zeros, or an earlier process's."""
    if folder is None:
        return {name: np.zeros(shape, kind) for name, (shape, kind) in wanted.items()}
    paths = {name: folder / f"{name}.npy" for name in wanted}
    if keep and folder.exists():
        return {name: _opened(path, *wanted[name]) for name, path in paths.items()}
    made = folder.with_name(f".partial-{folder.name}")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    if (free := shutil.disk_usage(made).free) < size:
        raise CheckpointError(
            got=f"{free:,} bytes of free disk for the replay in {folder.parent}",
            expected=f"{size:,} bytes, which hyperparameters.buffer_size steps take",
            remedy="free some, lower hyperparameters.buffer_size, or choose another --results-dir",
        )
    found: dict[str, Array] = {}
    for name, (shape, kind) in wanted.items():
        path = made / f"{name}.npy"
        found[name] = np.lib.format.open_memmap(path, "w+", kind, shape)
        _reserve(path)
    if keep:
        made.rename(folder)
    else:
        with suppress(OSError):  # Windows removes no file that is mapped
            shutil.rmtree(made)
    return found


def _reserve(path: Path) -> None:
    """Allocates the blocks of a file: a full disk would otherwise end the process in the middle of a write."""
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _opened(path: Path, shape: tuple[int, ...], kind: np.dtype[np.generic]) -> Array:
    try:
        found: Array = np.lib.format.open_memmap(regular(path), "r")  # `r+` would lengthen a truncated file
        if (found.dtype, found.shape) == (kind, shape):
            opened: Array = np.lib.format.open_memmap(path, "r+")
            return opened
        problem = f"{found.dtype} {list(found.shape)}"
    except Exception as error:  # NumPy raises many kinds for a damaged file
        problem = f"what cannot be read ({error})"
    raise CheckpointError(
        got=f"{path} with {problem}",
        expected=f"a column of the replay, {kind} {list(shape)}",
        remedy=f"restore the spec and the buffer_size that it was written with, or remove {path.parent} to begin "
        "with an empty replay",
    )
