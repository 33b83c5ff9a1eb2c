"""A damaged checkpoint is loaded exactly as it was written, or refused by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.errors import CheckpointError
from sparring.pipeline.learning import checkpoints
from sparring.pipeline.learning.checkpoints import Checkpoint, CheckpointFolder, DamagedCheckpoint, load
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.networks.arrays import weights_sha256
from tests.learning.learning_helpers import HYBRID, small_settings

FILES = ("state.json", "weights.safetensors", "optimizer.safetensors")
STATE = Checkpoint(
    behavior="Ball",
    description={"spec": [1, {"a": None}], "text": "ü"},
    version=3,
    updates=2,
    trained=4096,
    weights={"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(0, np.float32)},
    optimizer={"generator": np.arange(8, dtype=np.uint8)},
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CheckpointFolder(tmp_path_factory.mktemp("checkpoints"), "Ball").save(STATE, keep=1)


@contextmanager
def replaced(path: Path, **contents: bytes) -> Iterator[None]:
    """Replaces the contents of some files, named without suffix, for the duration of a block."""
    before = {name: (path / name).read_bytes() for name in FILES}
    for name in FILES:
        (path / name).write_bytes(contents.get(name.partition(".")[0], before[name]))
    try:
        yield
    finally:
        for name, content in before.items():
            (path / name).write_bytes(content)


def loaded(path: Path) -> Checkpoint | str:
    """Returns the checkpoint, or the error message."""
    try:
        return load(path)
    except DamagedCheckpoint as damage:
        return damage.got
    except CheckpointError as error:
        return str(error)


def same(one: Checkpoint, other: Checkpoint) -> bool:
    def plain(checkpoint: Checkpoint) -> Any:
        hashes = weights_sha256(checkpoint.weights), weights_sha256(checkpoint.optimizer)
        return {**vars_of(checkpoint), "weights": hashes[0], "optimizer": hashes[1]}

    return bool(plain(one) == plain(other))


def vars_of(checkpoint: Checkpoint) -> dict[str, Any]:
    return {field.name: getattr(checkpoint, field.name) for field in dataclasses.fields(checkpoint)}


@settings(max_examples=40)
@given(data=st.data())
def test_damaged_checkpoint_is_unchanged_or_refused_by_file_name(written: Path, data: st.DataObject) -> None:
    """Bytes are changed, removed, inserted, or taken from the other files."""
    name = data.draw(st.sampled_from(FILES))
    content = bytearray((written / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content)))
        other = (written / data.draw(st.sampled_from(FILES))).read_bytes()
        new = data.draw(st.binary(max_size=6) | st.sampled_from([b"", b" ", b"\n", other]))
        content[at : at + data.draw(st.sampled_from([0, 1, 1, 8, 10_000]))] = new
    with replaced(written, **{name.partition(".")[0]: bytes(content)}):
        found = loaded(written)
    assert str(written) in found if isinstance(found, str) else same(found, STATE)


@settings(max_examples=25)
@given(
    st.sampled_from(["format", *checkpoints._FIELDS, "files", "more"]),
    st.none() | st.booleans() | st.integers(0, 1) | st.text(max_size=3) | st.lists(st.none(), max_size=1),
    st.booleans(),
)
def test_state_with_other_fields_and_a_correct_hash_is_refused_or_equivalent(
    written: Path, field: str, value: object, remove: bool
) -> None:
    """It may have been written by hand or by another version."""
    state = json.loads((written / "state.json").read_bytes())
    del state["sha256"]
    state = {name: one for name, one in state.items() if name != field} | ({} if remove else {field: value})
    with replaced(written, state=hashed(state)):
        found = loaded(written)
    if isinstance(found, str):
        assert str(written) in found
        return
    assert {type(one) for one in (found.version, found.updates, found.trained)} == {int}
    assert isinstance(found.behavior, str)
    kept = {field: getattr(STATE, field)} if hasattr(STATE, field) else {}
    assert same(dataclasses.replace(found, **kept), STATE)


def hashed(state: dict[str, Any]) -> bytes:
    """Returns a state with its hash."""
    return json.dumps({**state, "sha256": checkpoints._sha256(checkpoints._canonical(state))}).encode()


def test_deeply_nested_file_is_refused(written: Path) -> None:
    with replaced(written, state=b'{"a":' + b"[" * 100_000), pytest.raises(DamagedCheckpoint, match=r"state\.json"):
        load(written)


@pytest.mark.parametrize("kind", ["another dtype", "no random state at all"])
def test_checkpoint_that_does_not_fit_restores_nothing(kind: str) -> None:
    """Correct hashes do not prove that a checkpoint fits."""
    own, other = (Learner("Test", HYBRID, small_settings(), seed=seed) for seed in (1, 2))
    good = other.checkpoint()
    state = good.optimizer["generator"]
    wrong = state.astype(np.float32) if kind == "another dtype" else np.full_like(state, 255)
    before = weights_sha256(own.checkpoint().weights), weights_sha256(own.checkpoint().optimizer)
    with pytest.raises(CheckpointError, match="optimizer"):
        own.restore(dataclasses.replace(good, optimizer={**good.optimizer, "generator": wrong}))
    assert (weights_sha256(own.checkpoint().weights), weights_sha256(own.checkpoint().optimizer)) == before
    own.restore(good)
    assert own.weights_sha256 == other.weights_sha256


def test_weights_of_an_unsupported_dtype_are_refused(written: Path) -> None:
    """Safetensors supports the dtype, but numpy does not."""
    header = b'{"x":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'
    content = len(header).to_bytes(8, "little") + header + b"\0\0"
    state = json.loads((written / "state.json").read_bytes())
    del state["sha256"]
    state["files"]["weights.safetensors"] = checkpoints._sha256(content)
    with (
        replaced(written, state=hashed(state), weights=content),
        pytest.raises(DamagedCheckpoint, match=r"weights\.safetensors"),
    ):
        load(written)
