"""Folders of keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparring.pipeline.security import making


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of keys with two simulators."""
    folder = tmp_path_factory.mktemp("security") / "keys"
    making.make(folder, ["arcade", "simulator-0"])
    return folder


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of another authority that uses our names."""
    folder = tmp_path_factory.mktemp("security") / "others"
    making.make(folder, ["arcade"])
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("security") / "keys"
    making.make(folder, ["arcade"], ["10.0.0.1", "trainer.local"])
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of the keys that a test may change."""
    copy = tmp_path / "keys"
    for path in sorted(made.rglob("*")):
        target = copy / path.relative_to(made)
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.is_file():
            target.touch(mode=0o600)
            target.write_bytes(path.read_bytes())
    return copy
