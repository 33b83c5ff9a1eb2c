"""Checkpoints are complete or absent and verified, and the last good one is offered."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from sparring.pipeline import files
from sparring.pipeline.errors import CheckpointError
from sparring.pipeline.learning import checkpoints
from sparring.pipeline.learning.checkpoints import CheckpointFolder, DamagedCheckpoint, load
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.networks.arrays import weights_sha256
from tests.learning.learning_helpers import HYBRID, segments, small_settings


def state_at(trained, version=1):
    state = Learner("Test", HYBRID, small_settings(), seed=trained).checkpoint()
    return dataclasses.replace(state, trained=trained, version=version)


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path, "Test")


def test_a_folder_that_was_removed_with_its_run_is_not_made_anew(tmp_path):
    folder = CheckpointFolder(tmp_path / "run", "Test")
    folder.note_version(1)
    shutil.rmtree(tmp_path / "run")
    for write in (lambda: folder.note_version(2), lambda: folder.save(state_at(9), keep=1)):
        with pytest.raises(FileNotFoundError):
            write()
    assert not (tmp_path / "run").exists()


def names(folder):
    return [path.name for path in folder.newest_first()]


def test_saved_checkpoint_is_loaded_unchanged(folder):
    state = state_at(12_000, version=4)
    path = folder.save(state, keep=5)
    assert path == folder.path / "checkpoint-000000012000"
    assert sorted(file.name for file in path.iterdir()) == [
        "optimizer.safetensors", "state.json", "weights.safetensors",
    ]  # fmt: skip
    got = folder.load_latest()
    assert (got.behavior, got.version, got.updates, got.trained) == ("Test", 4, 0, 12_000)
    assert got.description == state.description
    assert weights_sha256(got.weights) == weights_sha256(state.weights)
    assert weights_sha256(got.optimizer) == weights_sha256(state.optimizer)


def test_learner_resumed_from_disk_continues_bit_for_bit(folder):
    through = Learner("Test", HYBRID, small_settings(), seed=3)
    through.add(segments([64]))
    through.update()
    folder.save(through.checkpoint(), keep=1)
    resumed = Learner("Test", HYBRID, small_settings(), seed=4)
    resumed.restore(folder.load_latest())
    for one in (through, resumed):
        one.add(segments([64], seed=1))
        one.update()
    assert resumed.weights_sha256 == through.weights_sha256


def test_newest_checkpoints_are_kept_and_the_recovery_one_is_separate(folder):
    for trained in (100, 200, 300):
        folder.save(state_at(trained), keep=2)
        folder.save_recovery(state_at(trained + 50, version=trained))
    assert names(folder) == ["recovery-000000000350-0300", "checkpoint-000000000300", "checkpoint-000000000200"]
    assert folder.load_latest().trained == 350


def test_saving_again_changes_nothing_and_another_lineage_has_its_own_name(folder):
    first = folder.save(state_at(100, version=2), keep=5)
    assert folder.save(state_at(100, version=2), keep=5) == first
    assert folder.save(state_at(100, version=7), keep=5).name == "checkpoint-000000000100-0007"
    assert folder.load_latest().version == 7


@pytest.mark.parametrize("file", ["weights.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "truncated", "missing", "empty"])
def test_damaged_checkpoint_is_refused_by_name_and_the_last_good_one_is_offered(folder, file, damage):
    good, bad = folder.save(state_at(100), keep=5), folder.save(state_at(200), keep=5)
    content = bytearray((bad / file).read_bytes())
    if damage == "missing":
        (bad / file).unlink()
    else:
        content[len(content) // 2] ^= 1
        (bad / file).write_bytes({"flip": content, "truncated": content[:-3], "empty": b""}[damage])
    with pytest.raises(DamagedCheckpoint, match=f"{bad.name}.*{good.name}"):
        folder.load_latest()
    assert load(good).trained == 100


def test_error_without_a_good_checkpoint_offers_none(folder):
    bad = folder.save(state_at(100), keep=5)
    (bad / "state.json").write_text("[]")
    with pytest.raises(DamagedCheckpoint, match="no other is good"):
        folder.load_latest()


def test_damaged_checkpoint_is_replaced_by_the_same_steps(folder):
    bad = folder.save(state_at(100), keep=5)
    (bad / "state.json").write_text("{")
    assert folder.save(state_at(100), keep=5) == bad
    assert folder.load_latest().trained == 100


def test_checkpoint_of_another_format_is_refused(folder):
    path = folder.save(state_at(100), keep=5) / "state.json"
    state = json.loads(path.read_text())
    state["format"] = 2
    del state["sha256"]
    state["sha256"] = checkpoints._sha256(checkpoints._canonical(state))
    path.write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="format 2"):
        folder.load_latest()


def test_loading_without_a_checkpoint_is_an_error(folder):
    with pytest.raises(CheckpointError, match="no checkpoint"):
        folder.load_latest()


@pytest.mark.parametrize("step", range(6))
def test_crash_while_saving_keeps_old_checkpoints_and_the_next_save_works(folder, monkeypatch, step):
    folder.save(state_at(100), keep=1)
    calls = 0

    def crash(handle):
        nonlocal calls
        calls += 1
        if calls > step:
            raise OSError("power failure")

    monkeypatch.setattr(os, "fsync", crash)
    try:
        folder.save(state_at(200), keep=1)
    except OSError:
        assert folder.load_latest().trained in (100, 200)
    monkeypatch.undo()
    folder.save(state_at(300), keep=1)
    assert names(folder) == ["checkpoint-000000000300"]
    assert [path.name for path in folder.path.iterdir()] == ["checkpoint-000000000300"]


def test_checkpoint_that_the_user_has_linked_to_another_disk_is_replaced_like_any_other(folder, tmp_path):
    folder.save(state_at(100), keep=1)
    (old,) = folder.newest_first()
    moved = old.rename(tmp_path / "moved")
    old.symlink_to(moved)
    for steps in (200, 300):
        folder.save(state_at(steps), keep=1)
    assert [path.name for path in folder.path.iterdir()] == ["checkpoint-000000000300"]
    assert moved.is_dir(), "only the link is removed"


def test_weights_with_nan_are_never_saved(folder):
    state = state_at(100)
    state.weights["actor.log_sigma"][0] = np.nan
    with pytest.raises(CheckpointError, match="log_sigma"):
        folder.save(state, keep=5)
    assert names(folder) == []


@pytest.mark.parametrize("name", ["", ".", "..", "../up", "a/b", "a\\b", "a\0b", ".hidden", "a:b"])
def test_behavior_name_that_is_no_folder_name_is_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match="rename the behavior"):
        CheckpointFolder(tmp_path, name)


# ---------------------------------------------------------------- the highest published version


def test_noted_version_is_read_back_and_is_no_checkpoint(folder):
    assert folder.noted_version() == 0
    for version in (1, 2, 130):
        folder.note_version(version)
        assert folder.noted_version() == version
    assert names(folder) == []


@pytest.mark.parametrize("text", ["", "seven", "-1", "9" * 20])
def test_damaged_version_counts_as_none(folder, text):
    """Coordination knows the last one, too."""
    folder.note_version(7)
    (folder.path / "version").write_text(text)
    assert folder.noted_version() == 0


def test_file_in_place_of_the_folder_is_refused_with_its_remedy(folder):
    folder.path.write_text("not a folder")
    with pytest.raises(CheckpointError, match=r"version, which cannot be read \(Not a directory\).*remove what is in"):
        folder.noted_version()


@pytest.mark.parametrize("step", ["write", "replace"])
def test_crash_while_noting_keeps_the_earlier_version(folder, monkeypatch, step):
    folder.note_version(7)

    def crash(*_, **__):
        raise OSError("killed")

    if step == "write":
        monkeypatch.setattr(files, "open", crash, raising=False)
    else:
        monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(OSError, match="killed"):
        folder.note_version(8)
    monkeypatch.undo()
    assert folder.noted_version() == 7


@pytest.mark.parametrize("left", [b"", b"\0\0\0", b"7x", b"-3"])
def test_damaged_note_counts_as_none(folder, left):
    folder.note_version(7)
    (folder.path / "version").write_bytes(left)
    assert folder.noted_version() == 0


def test_noting_a_version_does_not_wait_for_the_disk(folder, monkeypatch):
    """The note is written at every update."""
    flushed = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    folder.note_version(7)
    assert flushed == []
