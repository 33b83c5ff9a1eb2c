"""Snapshots of policies in the run folder: RUN/BEHAVIOR/snapshots/VERSION.safetensors."""

from collections.abc import Collection
from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from sparring.pipeline.errors import ServiceError
from sparring.pipeline.files import write_atomically
from sparring.pipeline.messages.state import PolicyWeights

_FOLDER: Final = "snapshots"
_SUFFIX: Final = ".safetensors"


class Snapshots:
    """Stores the snapshots of a run.

    Args:
        root: the run folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def path(self, name: str, version: int) -> Path:
        """Returns the path of a snapshot."""
        return self._root / name / _FOLDER / f"{version:09d}{_SUFFIX}"

    def has(self, name: str, version: int) -> bool:
        """Returns whether a snapshot is on disk."""
        return self.path(name, version).exists()

    def save(self, weights: PolicyWeights) -> None:
        """Writes a snapshot atomically."""
        path = self.path(weights.behavior, weights.version)
        path.parent.mkdir(parents=True, exist_ok=True)
        noted = {"trained": str(weights.trained), "network": weights.network}
        write_atomically(path, save(weights.arrays, noted), durable=False)

    def load(self, name: str, version: int) -> PolicyWeights:
        """Reads a snapshot.

        Raises:
            ServiceError: it is missing or damaged.
        """
        path = self.path(name, version)
        try:
            arrays = dict(sorted(load(path.read_bytes()).items()))  # safetensors gives them in any order
            with safe_open(path, "np") as file:
                noted = file.metadata() or {}
        except (OSError, ValueError, SafetensorError) as error:
            raise ServiceError(
                f"got {path}, which cannot be read ({error}); expected a snapshot that this run has written; "
                "put it back from a copy of the run folder, or start a new run"
            ) from error
        trained, network = int(noted.get("trained", 0)), noted.get("network", "")
        return PolicyWeights(behavior=name, version=version, arrays=arrays, trained=trained, network=network)

    def keep(self, name: str, versions: Collection[int]) -> None:
        """Removes all other snapshots of a behavior."""
        folder = self._root / name / _FOLDER
        for path in folder.glob(f"*{_SUFFIX}") if folder.is_dir() else ():
            if int(path.name.removesuffix(_SUFFIX)) not in versions:
                path.unlink(missing_ok=True)
