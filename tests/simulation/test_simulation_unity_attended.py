"""A Unity player to which the trainer talks directly is launched, watched and ended."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sparring.pipeline.bridges.player import PlayerFailed
from sparring.pipeline.bridges.unity.game import Unity, make_unity
from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.messages.simulator import Adopted, Bye, Progress
from tests.simulation.unity_bridge import LONG_S

News = Adopted | Progress | Bye | RemoteProtocolError


class Trainer:
    """A scripted conversation that records stop requests."""

    def __init__(self) -> None:
        self.news: queue.SimpleQueue[News] = queue.SimpleQueue()

    def follow(self) -> Adopted | Progress | Bye:
        news = self.news.get(timeout=LONG_S)
        if isinstance(news, RemoteProtocolError):
            raise news
        return news

    def stop(self, reason: str) -> None:
        self.news.put(Bye(reason=reason))


def adopted(port: int) -> Adopted:
    return Adopted(version=1, connection=1, heartbeat_s=5.0, timeout_s=60.0, port=port)


def refused(code: str) -> RemoteProtocolError:
    return RemoteProtocolError(code, got="NaN in it", expected="a game that keeps running", remedy="mend it")


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Unity, Trainer, Path]]:
    """A build that writes its arguments to `arguments` when it starts, and runs until `over` can be read."""
    monkeypatch.setenv("SPARRING_LOGS", str(tmp_path / "run_logs"))
    build, arguments, over = tmp_path / "Game", tmp_path / "arguments", tmp_path / "over"
    os.mkfifo(arguments)
    os.mkfifo(over)
    build.write_text(f'#!/bin/sh\necho "$@" > {arguments}\nread code < {over}\necho "lost the display"\nexit $code\n')
    build.chmod(0o755)
    unity = make_unity(1, path=str(build), port=0, timeout_s=7.0)
    monkeypatch.setattr("sparring.pipeline.bridges.unity.game._FAREWELL_S", 0.0)
    yield unity, Trainer(), tmp_path
    unity.close()


def test_the_trainer_receives_the_settings_of_the_player(tmp_path: Path) -> None:
    """No port is open before it has answered."""
    before = psutil.Process().net_connections("tcp")
    unity = make_unity(4, path="/bin/true", port=0, timeout_s=7.0, time_scale=2.0)
    player = unity.player()
    assert (player.protocol, player.port, player.areas, player.connect_s, player.timeout_s) == ("unity", 0, 4, 7.0, 7.0)
    assert bytes.fromhex(player.settings)
    assert psutil.Process().net_connections("tcp") == before
    unity.close()


def test_the_player_is_launched_with_the_trainers_port_and_ended_at_the_end(scene: tuple[Unity, Trainer, Path]) -> None:
    """`attend` returns the trainer's Bye."""
    unity, trainer, folder = scene
    trainer.news.put(Bye(reason="the run ended"))
    assert unity.attend(adopted(4321), trainer).reason == "the run ended"
    assert "--mlagents-port 4321" in (folder / "arguments").read_text()
    child = _player(folder)
    unity.close()
    assert not child.is_running()


def test_a_player_that_ends_by_itself_is_a_failure(scene: tuple[Unity, Trainer, Path]) -> None:
    """The error has phase, exit status and end of the log; the trainer receives Bye."""
    unity, _, folder = scene

    class Ends(Trainer):
        def follow(self) -> Any:
            if self.news.empty():
                (folder / "arguments").read_text()
                (folder / "over").write_text("9\n")
            return super().follow()

    ends = Ends()
    ends.news.put(Progress(phase="stepping"))
    with pytest.raises(PlayerFailed) as failed:
        unity.attend(adopted(4321), ends)
    error = str(failed.value)
    assert "Unity player 0, stepping: the end of the game by exit status 9" in error
    assert "lost the display" in error


@pytest.mark.parametrize("code", ["player", "unknown_behavior"])
def test_a_refusal_of_the_trainer_is_reported_with_the_players_name(
    code: str, scene: tuple[Unity, Trainer, Path]
) -> None:
    """Refusals that do not concern the player are unchanged."""
    unity, trainer, folder = scene
    trainer.news.put(Progress(phase="first reset"))
    trainer.news.put(refused(code))
    with pytest.raises(PlayerFailed if code == "player" else RemoteProtocolError) as failed:
        unity.attend(adopted(4321), trainer)
    (folder / "arguments").read_text()
    assert "NaN in it" in str(failed.value)
    assert ("Unity player 0, first reset" in str(failed.value)) == (code == "player")


def test_a_trainer_that_reconnects_gets_a_new_player(scene: tuple[Unity, Trainer, Path]) -> None:
    """The end of the old player is no failure."""
    unity, _, folder = scene

    class Back(Trainer):
        def follow(self) -> Any:
            launches.append((folder / "arguments").read_text())
            children.append(_player(folder))
            return super().follow()

    launches: list[str] = []
    children: list[psutil.Process] = []
    back = Back()
    back.news.put(adopted(4322))
    back.news.put(Bye(reason="the run ended"))
    assert unity.attend(adopted(4321), back).reason == "the run ended"
    assert ["--mlagents-port 4321" in launches[0], "--mlagents-port 4322" in launches[1]] == [True, True]
    assert [child.is_running() for child in children] == [False, True]


def _player(folder: Path) -> psutil.Process:
    """Returns the player's process."""
    running = (one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE)  # of other tests
    (child,) = (one for one in running if str(folder / "Game") in one.cmdline())
    return child
