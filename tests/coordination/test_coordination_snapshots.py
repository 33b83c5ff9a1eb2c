"""Snapshots of policies are loaded as saved, or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from sparring.pipeline.coordination.ghosts import Snapshots
from sparring.pipeline.errors import ServiceError
from sparring.pipeline.messages.state import PolicyWeights


def policy(version: int, *, name: str = "Soccer", network: str = "") -> PolicyWeights:
    arrays: dict[str, Any] = {
        "actor.body.weight": np.arange(6, dtype=np.float32).reshape(2, 3) + version,
        "actor.seen": np.array([version], np.int64),
    }
    return PolicyWeights(behavior=name, version=version, arrays=arrays, trained=10 * version, network=network)


@pytest.mark.parametrize("network", ["", '{"hidden_units": 128, "memory": null}'])
def test_a_saved_snapshot_is_loaded(tmp_path: Path, network: str) -> None:
    """It has arrays with their types, trained steps, and the network where it is known."""
    snapshots = Snapshots(tmp_path)
    snapshots.save(policy(3, network=network))
    found = Snapshots(tmp_path).load("Soccer", 3)
    assert (found.behavior, found.version, found.trained, found.network) == ("Soccer", 3, 30, network)
    expected = policy(3).arrays
    assert found.arrays.keys() == expected.keys()
    for key, array in expected.items():
        assert found.arrays[key].dtype == array.dtype
        assert np.array_equal(found.arrays[key], array)


def test_a_snapshot_is_one_file_in_the_run_folder(tmp_path: Path) -> None:
    """Its path is RUN/BEHAVIOR/snapshots/VERSION.safetensors, and no other file stays."""
    Snapshots(tmp_path).save(policy(3))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [Snapshots(tmp_path).path("Soccer", 3)]
    assert files[0].parent == tmp_path / "Soccer" / "snapshots"
    assert files[0].suffix == ".safetensors"
    assert int(files[0].stem) == 3


def test_has_finds_saved_snapshots(tmp_path: Path) -> None:
    """It distinguishes behaviors and versions."""
    snapshots = Snapshots(tmp_path)
    assert not snapshots.path("Soccer", 1).exists()
    snapshots.save(policy(1))
    assert snapshots.path("Soccer", 1).exists()
    assert not snapshots.path("Soccer", 2).exists()
    assert not snapshots.path("Tag", 1).exists()


def test_keep_removes_other_versions_of_one_behavior(tmp_path: Path) -> None:
    """A behavior without a folder is ignored."""
    snapshots = Snapshots(tmp_path)
    for version in range(1, 6):
        snapshots.save(policy(version))
        snapshots.save(policy(version, name="Tag"))
    snapshots.keep("Soccer", {2, 5, 9})
    snapshots.keep("Missing", {1})
    assert [version for version in range(1, 10) if snapshots.path("Soccer", version).exists()] == [2, 5]
    assert all(snapshots.path("Tag", version).exists() for version in range(1, 6))


def refused(snapshots: Snapshots, version: int) -> str:
    with pytest.raises(ServiceError) as caught:
        snapshots.load("Soccer", version)
    return str(caught.value)


def test_a_missing_snapshot_is_refused(tmp_path: Path) -> None:
    """The error says what was got, what was expected, and what to do."""
    message = refused(Snapshots(tmp_path), 4)
    assert message.startswith("got ")
    assert str(Snapshots(tmp_path).path("Soccer", 4)) in message
    assert "expected a snapshot" in message
    assert "put it back" in message


@given(share=st.floats(0, 1, exclude_max=True), garbage=st.binary(max_size=40))
def test_a_damaged_snapshot_is_refused(tmp_path_factory: pytest.TempPathFactory, share: float, garbage: bytes) -> None:
    """Neither a truncated file nor one with another header loads as part of a policy."""
    snapshots = Snapshots(tmp_path_factory.mktemp("run"))
    snapshots.save(policy(1))
    path = snapshots.path("Soccer", 1)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    assert "expected" in refused(snapshots, 1)
    path.write_bytes(b"\xff" * 9 + garbage + whole[60:])
    assert "expected" in refused(snapshots, 1)


def test_a_snapshot_of_no_numbers_is_refused(tmp_path: Path) -> None:
    """Simulators would get actions of NaN, and be blamed for what follows."""
    snapshots, saved = Snapshots(tmp_path), policy(1)
    snapshots.save(replace(saved, arrays={**saved.arrays, "weights": np.array([1.0, np.nan], np.float32)}))
    assert "which cannot be read (NaN or infinity)" in refused(snapshots, 1)


def test_a_snapshot_whose_notes_are_of_another_kind_is_refused(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    snapshots.save(policy(1))
    snapshots.path("Soccer", 1).write_bytes(save(policy(1).arrays, {"trained": "many"}))
    assert "which cannot be read (invalid literal" in refused(snapshots, 1)


def test_a_snapshot_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    """The old file may be damaged."""
    snapshots = Snapshots(tmp_path)
    snapshots.save(policy(1))
    snapshots.path("Soccer", 1).write_bytes(b"")
    snapshots.save(policy(1))
    assert snapshots.load("Soccer", 1).trained == 10
