"""Fixtures of the simulation tests."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulation.simulation_helpers import Trainer


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    listener = socket.create_server(("127.0.0.1", 0))
    made = Trainer(listener, f"tcp://127.0.0.1:{listener.getsockname()[1]}")
    yield made
    made.close()


@pytest.fixture
def unix_trainer(tmp_path: Path) -> Iterator[Trainer]:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "trainer"))
    made = Trainer(listener, f"unix://{tmp_path / 'trainer'}")
    yield made
    made.close()
