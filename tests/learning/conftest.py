"""Fixtures of the learners' tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.learning.signals_helpers import SPECS, recorded, write


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Every learner computes on one thread."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with demonstrations for each spec."""
    root = tmp_path_factory.mktemp("demonstrations")
    for name, spec in SPECS.items():
        (root / name).mkdir()
        write(root / name, spec, recorded(spec, [4, 3, 5, 2, 6], masked=True))
    return root
