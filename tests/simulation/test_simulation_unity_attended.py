"""A Unity player with which the trainer speaks itself: launched, looked after, ended."""

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
    """What a conversation says, one after the other; and that this side wants to stop."""

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
    return RemoteProtocolError(code, got="NaN in it", expected="a game that goes on", remedy="mend it")


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Unity, Trainer, Path]]:
    """A build that writes its arguments into `said` when it starts, and lives until `over` can be read."""
    monkeypatch.setenv("SPARRING_LOGS", str(tmp_path / "run_logs"))
    build, said, over = tmp_path / "Game", tmp_path / "said", tmp_path / "over"
    os.mkfifo(said)
    os.mkfifo(over)
    build.write_text(f'#!/bin/sh\necho "$@" > {said}\nread code < {over}\necho "the display is gone"\nexit $code\n')
    build.chmod(0o755)
    unity = make_unity(1, path=str(build), port=0, timeout_s=7.0)
    monkeypatch.setattr("sparring.pipeline.bridges.unity.game._FAREWELL_S", 0.0)
    yield unity, Trainer(), tmp_path
    unity.close()


def test_the_trainer_is_told_what_it_needs(tmp_path: Path) -> None:
    """Nothing listens before it has answered."""
    before = psutil.Process().net_connections("tcp")
    unity = make_unity(4, path="/bin/true", port=0, timeout_s=7.0, time_scale=2.0)
    told = unity.player()
    assert (told.protocol, told.port, told.areas, told.connect_s, told.timeout_s) == ("unity", 0, 4, 7.0, 7.0)
    assert bytes.fromhex(told.settings)
    assert psutil.Process().net_connections("tcp") == before
    unity.close()


def test_it_is_launched_with_the_trainers_port_and_ended_at_the_end(scene: tuple[Unity, Trainer, Path]) -> None:
    """The trainer's Bye is what `attend` returns."""
    unity, trainer, folder = scene
    trainer.news.put(Bye(reason="the run ended"))
    assert unity.attend(adopted(4321), trainer).reason == "the run ended"
    assert "--mlagents-port 4321" in (folder / "said").read_text()
    child = _player(folder)
    unity.close()
    assert not child.is_running()


def test_one_that_ends_by_itself_is_a_failure(scene: tuple[Unity, Trainer, Path]) -> None:
    """With how far it had come, its exit status and the end of its log; the trainer hears Bye."""
    unity, _, folder = scene

    class Ends(Trainer):
        def follow(self) -> Any:
            if self.news.empty():
                (folder / "said").read_text()
                (folder / "over").write_text("9\n")
            return super().follow()

    ends = Ends()
    ends.news.put(Progress(phase="stepping"))
    with pytest.raises(PlayerFailed) as failed:
        unity.attend(adopted(4321), ends)
    said = str(failed.value)
    assert "Unity player 0, stepping: the end of the game by exit status 9" in said
    assert "the display is gone" in said


@pytest.mark.parametrize("code", ["player", "unknown_behavior"])
def test_what_the_trainer_refuses_is_told_with_what_is_known_here(
    code: str, scene: tuple[Unity, Trainer, Path]
) -> None:
    """Of the player; any other refusal stays what it is."""
    unity, trainer, folder = scene
    trainer.news.put(Progress(phase="first reset"))
    trainer.news.put(refused(code))
    with pytest.raises(PlayerFailed if code == "player" else RemoteProtocolError) as failed:
        unity.attend(adopted(4321), trainer)
    (folder / "said").read_text()
    assert "NaN in it" in str(failed.value)
    assert ("Unity player 0, first reset" in str(failed.value)) == (code == "player")


def test_a_trainer_that_is_back_gets_a_player_that_starts_anew(scene: tuple[Unity, Trainer, Path]) -> None:
    """The end of the old one is no failure."""
    unity, _, folder = scene

    class Back(Trainer):
        def follow(self) -> Any:
            said.append((folder / "said").read_text())
            children.append(_player(folder))
            return super().follow()

    said: list[str] = []
    children: list[psutil.Process] = []
    back = Back()
    back.news.put(adopted(4322))
    back.news.put(Bye(reason="the run ended"))
    assert unity.attend(adopted(4321), back).reason == "the run ended"
    assert ["--mlagents-port 4321" in said[0], "--mlagents-port 4322" in said[1]] == [True, True]
    assert [child.is_running() for child in children] == [False, True]


def _player(folder: Path) -> psutil.Process:
    """The one that runs."""
    (child,) = (one for one in psutil.Process().children() if str(folder / "Game") in one.cmdline())
    return child
