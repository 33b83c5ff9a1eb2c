"""Fixtures of the simulation tests."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparring.pipeline.bridges.godot.game import GodotGame, make_godot
from tests.simulation.godot_helpers import GAME, Open
from tests.simulation.simulation_helpers import Trainer

if TYPE_CHECKING:
    from tests.simulation.unity_bridge import Bridges


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


@pytest.fixture
def bridges(tmp_path: Path) -> Iterator[Bridges]:
    """Makes bridges to Unity players, which are closed at the end."""
    from tests.simulation.unity_bridge import Bridges

    made = Bridges(tmp_path)
    yield made
    made.close()


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the players' logs, which a run sets."""
    monkeypatch.setenv("SPARRING_LOGS", str(tmp_path / "run_logs"))
    return tmp_path / "run_logs"


@pytest.fixture
def opened() -> Iterator[Open]:
    """Returns a function that makes games, which are closed at the end."""
    games: list[GodotGame] = []

    def make_one(**options: Any) -> GodotGame:
        games.append(make_godot(**({"path": GAME, "port": 0} | options)))
        return games[-1]

    yield make_one
    for game in games:
        game.close()
