"""Snapshots of policies: what was saved is loaded, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.pipeline.coordination.snapshots import Snapshots
from sparring.pipeline.errors import ServiceError
from sparring.pipeline.messages.state import PolicyWeights


def policy(version: int, *, name: str = "Soccer", network: str = "") -> PolicyWeights:
    arrays: dict[str, Any] = {
        "actor.body.weight": np.arange(6, dtype=np.float32).reshape(2, 3) + version,
        "actor.seen": np.array([version], np.int64),
    }
    return PolicyWeights(behavior=name, version=version, arrays=arrays, trained=10 * version, network=network)


@pytest.mark.parametrize("network", ["", '{"hidden_units": 128, "memory": null}'])
def test_what_was_saved_is_loaded(tmp_path: Path, network: str) -> None:
    """Arrays with their types, steps in the lineage, and the network where it is said."""
    snapshots = Snapshots(tmp_path)
    snapshots.save(policy(3, network=network))
    found = Snapshots(tmp_path).load("Soccer", 3)
    assert (found.behavior, found.version, found.trained, found.network) == ("Soccer", 3, 30, network)
    expected = policy(3).arrays
    assert found.arrays.keys() == expected.keys()
    for key, array in expected.items():
        assert found.arrays[key].dtype == array.dtype
        assert np.array_equal(found.arrays[key], array)


def test_a_snapshot_is_a_file_of_its_own_in_the_run_folder(tmp_path: Path) -> None:
    """RUN/BEHAVIOR/snapshots/VERSION.safetensors, and nothing else is left beside it."""
    Snapshots(tmp_path).save(policy(3))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [Snapshots(tmp_path).path("Soccer", 3)]
    assert files[0].parent == tmp_path / "Soccer" / "snapshots"
    assert files[0].suffix == ".safetensors"
    assert int(files[0].stem) == 3


def test_has_says_whether_it_is_there(tmp_path: Path) -> None:
    """For each behavior and version."""
    snapshots = Snapshots(tmp_path)
    assert not snapshots.has("Soccer", 1)
    snapshots.save(policy(1))
    assert snapshots.has("Soccer", 1)
    assert not snapshots.has("Soccer", 2)
    assert not snapshots.has("Tag", 1)


def test_others_are_removed_and_no_other_behaviors(tmp_path: Path) -> None:
    """`keep` keeps what it is told; a behavior without a folder has nothing to lose."""
    snapshots = Snapshots(tmp_path)
    for version in range(1, 6):
        snapshots.save(policy(version))
        snapshots.save(policy(version, name="Tag"))
    snapshots.keep("Soccer", {2, 5, 9})
    snapshots.keep("Nobody", {1})
    assert [version for version in range(1, 10) if snapshots.has("Soccer", version)] == [2, 5]
    assert all(snapshots.has("Tag", version) for version in range(1, 6))


def refused(snapshots: Snapshots, version: int) -> str:
    with pytest.raises(ServiceError) as caught:
        snapshots.load("Soccer", version)
    return str(caught.value)


def test_one_that_is_missing_is_refused(tmp_path: Path) -> None:
    """With what was got, what was expected, and what to do."""
    said = refused(Snapshots(tmp_path), 4)
    assert said.startswith("got ")
    assert str(Snapshots(tmp_path).path("Soccer", 4)) in said
    assert "expected a snapshot" in said
    assert "put it back" in said


@given(cut=st.floats(0, 1, exclude_max=True), garbage=st.binary(max_size=40))
def test_one_that_is_damaged_is_refused(tmp_path_factory: pytest.TempPathFactory, cut: float, garbage: bytes) -> None:
    """Cut off anywhere, or with other bytes in place of its header: never half a policy."""
    snapshots = Snapshots(tmp_path_factory.mktemp("run"))
    snapshots.save(policy(1))
    path = snapshots.path("Soccer", 1)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(cut * len(whole))])
    assert "expected" in refused(snapshots, 1)
    path.write_bytes(b"\xff" * 9 + garbage + whole[60:])
    assert "expected" in refused(snapshots, 1)


def test_what_is_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    """A damaged file too."""
    snapshots = Snapshots(tmp_path)
    snapshots.save(policy(1))
    snapshots.path("Soccer", 1).write_bytes(b"")
    snapshots.save(policy(1))
    assert snapshots.load("Soccer", 1).trained == 10
