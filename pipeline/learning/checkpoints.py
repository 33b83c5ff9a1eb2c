"""This module writes checkpoints atomically, with hashes and without pickle.

    DIR/BEHAVIOR/checkpoint-000000012000/    kept: the newest `keep_checkpoints`
                     weights.safetensors     actor and critic
                     optimizer.safetensors   moments of Adam, random state
                     state.json              all else, and the SHA-256 of the other two and of itself
    DIR/BEHAVIOR/recovery-000000013000-0008/ steps and version; the newest only
    DIR/BEHAVIOR/version                     highest version ever published, in decimal
    DIR/BEHAVIOR/replay/                     steps of an off-policy trainer, if they are kept; see `replay`

A checkpoint is written to a temporary folder, flushed to the disk and then renamed, and none is ever overwritten: a
crash leaves the old ones and perhaps a `.partial-` folder, which the next save removes. If another lineage has reached
the same steps, the version is added to the name.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from sparring.pipeline.errors import CheckpointError
from sparring.pipeline.files import DAMAGE, Json, regular, remove, sync_folder, write_atomically
from sparring.pipeline.networks.arrays import Arrays, non_finite
from sparring.pipeline.specs import names_a_folder

FORMAT: Final = 1
REPLAY: Final = "replay"
"""Folder of the replay, below that of the behavior."""

_NAMES: Final = re.compile(r"(checkpoint|recovery)-(\d+)(?:-(\d+))?")
_TENSORS: Final = ("weights.safetensors", "optimizer.safetensors")
_STATE: Final = "state.json"
_VERSION: Final = "version"
_MOST_DIGITS: Final = 18
_FIELDS: Final = {"behavior": str, "description": dict, "version": int, "updates": int, "trained": int, "counts": dict}
"""Fields of `state.json` and their types, beside those of its format."""


class DamagedCheckpoint(CheckpointError):
    """Reports a checkpoint whose files differ from what was written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Holds everything a learner needs to resume as if it had never stopped.

    Attributes:
        behavior: name of the behavior.
        description: what the networks were built from, as JSON; loading compares it strictly.
        version: version of the weights published last.
        updates: number of updates.
        trained: steps in these updates.
        counts: steps that are not in the weights, as JSON: `stale`, `lost` and `reached` of LearnerState.
        weights: weights of actor and critic.
        optimizer: moments and random state.
    """

    behavior: str
    description: dict[str, Json]
    version: int
    updates: int
    trained: int
    weights: Arrays
    optimizer: Arrays
    counts: dict[str, Json] = field(default_factory=dict)


class CheckpointFolder:
    """Manages the checkpoints of one behavior.

    Args:
        root: folder of the run's checkpoints.
        behavior: name of the behavior; the first save creates a folder of this name.

    Raises:
        CheckpointError: the name cannot be that of a folder.
    """

    def __init__(self, root: Path, behavior: str) -> None:
        if not names_a_folder(behavior):
            raise CheckpointError(
                got=f"behavior name {behavior!r}",
                expected="a name for a folder: printable, short, no leading dot, no slash or other reserved character",
                remedy="rename the behavior in the simulator and in the configuration",
            )
        self.behavior = behavior
        self.path = root / behavior
        self._is_made = False

    def save(self, checkpoint: Checkpoint, keep: int) -> Path:
        """Writes a permanent checkpoint and removes all but the newest `keep`.

        Raises:
            CheckpointError: a weight is not finite; nothing was written.
            OSError: the disk is full or the folder cannot be written; the existing checkpoints are unchanged.
        """
        return self._save(checkpoint, f"checkpoint-{checkpoint.trained:012d}", keep)

    def save_recovery(self, checkpoint: Checkpoint) -> Path:
        """Writes the recovery checkpoint and removes the previous one; raises the same errors as `save`."""
        return self._save(checkpoint, f"recovery-{checkpoint.trained:012d}-{checkpoint.version:04d}", 1)

    def newest_first(self) -> list[Path]:
        """Returns all checkpoints, recovery checkpoints included, by steps; they are not verified."""
        return newest_first(self.path)

    def load_latest(self) -> Checkpoint:
        """Returns the newest checkpoint.

        Raises:
            DamagedCheckpoint: it is damaged; the error names it and the newest undamaged one.
            CheckpointError: the folder holds no checkpoint.
        """
        found = self.newest_first()
        if not found:
            remedy = "start a new run, or correct the folder"
            raise CheckpointError(got=f"no checkpoint in {self.path}", expected="at least one", remedy=remedy)
        try:
            return load(found[0])
        except DamagedCheckpoint as damage:
            good = next((path for path in found[1:] if _if_good(path) is not None), None)
            how = f"remove it to resume from {good}, the last good one" if good else "start a new run: no other is good"
            raise DamagedCheckpoint(got=damage.got, expected=damage.expected, remedy=how) from damage

    def note_version(self, version: int) -> None:
        """Stores `version` as published; it is called before the weights are published.

        Raises:
            OSError: the disk is full or the folder cannot be written.
        """
        self.path.mkdir(parents=not self._is_made, exist_ok=True)
        self._is_made = True
        # Not flushed to the disk: this runs once per update, and a flush may take longer than a small update does.
        # What was written survives the end of the process, kill -9 included. Only a power loss can remove it, which
        # also ends every process that had received the version, so that publishing it again does no harm.
        write_atomically(self.path / _VERSION, str(version).encode(), durable=False)

    def noted_version(self) -> int:
        """Returns the version noted last; 0 if there is none, or if a power loss or another program has damaged it.

        Raises:
            CheckpointError: its file cannot be read.
        """
        path = self.path / _VERSION
        try:
            text = regular(path).read_bytes()
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise CheckpointError(
                got=f"{path}, which cannot be read ({error.strerror})",
                expected="the file of an earlier start in the folder of the behavior",
                remedy="correct its permissions, or remove what is in its place",
            ) from error
        return int(text) if text.isdigit() and len(text) <= _MOST_DIGITS else 0

    def _save(self, checkpoint: Checkpoint, name: str, keep: int) -> Path:
        path, kind = self._write(checkpoint, name), name.partition("-")[0]
        for old in [path for path in self.newest_first() if path.name.startswith(kind)][keep:]:
            self._remove(old)
        return path

    def _write(self, checkpoint: Checkpoint, name: str) -> Path:
        if bad := non_finite(checkpoint.weights):
            raise CheckpointError(
                got=f"weights with NaN or infinity in {bad[:4]}",
                expected="finite weights",
                remedy="resume from the last checkpoint with a lower learning_rate",
            )
        final = self.path / name
        if (existing := _if_good(final)) is not None:
            same = existing.version == checkpoint.version
            return final if same else self._write(checkpoint, f"{name}-{checkpoint.version:04d}")
        if final.exists():
            self._remove(final)
        # With its parents once: a run whose folder was removed meanwhile does not make it anew.
        self.path.mkdir(parents=not self._is_made, exist_ok=True)
        self._is_made = True
        for left in self.path.glob(".partial-*"):  # of a crash
            remove(left)
        partial = self.path / f".partial-{name}"
        partial.mkdir()
        try:
            for file, content in packed(checkpoint).items():
                write_atomically(partial / file, content)
            partial.rename(final)
        except OSError:  # if the disk is full, a partial checkpoint takes the space of a whole one
            shutil.rmtree(partial, ignore_errors=True)
            raise
        sync_folder(self.path)
        return final

    def _remove(self, path: Path) -> None:
        """Removes a checkpoint so that a crash leaves all of it or nothing that looks like one."""
        remove(path.rename(self.path / f".partial-{path.name}"))  # which may be a link to another disk


def initial_folder(root: Path, behavior: str) -> Path:
    """Returns where a run keeps the checkpoint of another run that a behavior starts from, if any.

    Args:
        root: folder of the run.
        behavior: name of the behavior.
    """
    return root / "initial" / behavior


def load(path: Path) -> Checkpoint:
    """Reads and verifies one checkpoint.

    Raises:
        DamagedCheckpoint: a file is missing or differs from what was written.
        CheckpointError: the checkpoint has another format.
    """
    return unpacked({name: _read(path / name) for name in (_STATE, *_TENSORS)}, path)


def unpacked(files: Mapping[str, bytes], path: Path) -> Checkpoint:
    """Reads and verifies what `packed` returned; `path` is named in errors, which are those of `load`."""
    state = _state(files[_STATE], path)
    tensors: list[Arrays] = []
    for name in _TENSORS:
        content = files[name]
        if _sha256(content) != state["files"].get(name):
            raise _damaged(path / name, "content with the hash in state.json")
        try:
            tensors.append(load_tensors(content))
        except (*DAMAGE, SafetensorError) as error:
            raise _damaged(path / name, f"safetensors ({error})") from error
    return Checkpoint(**{name: state[name] for name in _FIELDS}, weights=tensors[0], optimizer=tensors[1])


def _state(content: bytes, path: Path) -> dict[str, Json]:
    try:
        state = json.loads(content)
        claimed = state.pop("sha256")
    except DAMAGE as error:
        raise _damaged(path / _STATE, "a JSON object with its own hash") from error
    if _sha256(_canonical(state)) != claimed:
        raise _damaged(path / _STATE, "content with its own hash")
    if state.get("format") != FORMAT:
        raise CheckpointError(
            got=f"{path} in format {state.get('format')!r:.40}",
            expected=f"format {FORMAT}",
            remedy="use the version of sparring that wrote it",
        )
    if wrong := [name for name, kind in (_FIELDS | {"files": dict}).items() if type(state.get(name)) is not kind]:
        raise _damaged(path / _STATE, f"a value of the right type for {', '.join(wrong)}")
    return dict(state)


def packed(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Returns the files of a checkpoint, by name."""
    files = {
        name: save_tensors({key: np.asarray(array, order="C") for key, array in arrays.items()})
        for name, arrays in zip(_TENSORS, (checkpoint.weights, checkpoint.optimizer), strict=True)
    }
    state = {
        "format": FORMAT,
        **{name: getattr(checkpoint, name) for name in _FIELDS},
        "files": {name: _sha256(content) for name, content in files.items()},
    }
    state["sha256"] = _sha256(_canonical(state))
    return files | {_STATE: json.dumps(state, indent=2).encode()}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _canonical(state: Mapping[str, Json]) -> bytes:
    return json.dumps(state, sort_keys=True, separators=(",", ":")).encode()


def newest_first(folder: Path) -> list[Path]:
    """Returns the checkpoints in the folder of a behavior, as `CheckpointFolder.newest_first` does."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if _NAMES.fullmatch(path.name)), key=age, reverse=True)


def age(path: Path) -> tuple[int, int]:
    """Returns the steps and the version in the name of a checkpoint; of equal steps the one with a version is newer."""
    steps, version = _NAMES.fullmatch(path.name).groups()[1:]  # type: ignore[union-attr]
    return int(steps), int(version or 0)


def _if_good(path: Path) -> Checkpoint | None:
    try:
        return load(path)
    except CheckpointError:
        return None


def _read(path: Path) -> bytes:
    try:
        return regular(path).read_bytes()
    except OSError as error:
        raise _damaged(path, f"a readable file ({error.strerror})") from error


def _damaged(path: Path, expected: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(got=f"damaged checkpoint file {path}", expected=expected, remedy="use another checkpoint")
