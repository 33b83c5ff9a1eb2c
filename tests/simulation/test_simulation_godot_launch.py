"""Godot games are started with the options of the configuration, and wait for the right port."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparring.pipeline.bridges.godot import game as godot
from sparring.pipeline.bridges.godot.game import make_godot
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.games.registry import make
from sparring.pipeline.settings import read
from tests.simulation.godot_helpers import ALL, GAME, Open, play


def started(tmp_path: Path, open_one: Open, **options: Any) -> list[str]:
    """Returns the command line of a game."""
    open_one(started=str(tmp_path / "started"), **options)
    arguments: list[str] = json.loads((tmp_path / "started").read_text())[0]
    return arguments


def test_options_become_the_command_line(opened: Open, tmp_path: Path) -> None:
    """Known options have the plugin's names, unknown ones become --key=value, further arguments are unchanged."""
    arguments = started(
        tmp_path,
        opened,
        env_seed=7,
        speedup=8.0,
        action_repeat=4,
        framerate=60,
        level=2,
        dark=True,
        arguments="-v 'a b'",
    )
    assert re.fullmatch(r"--port=\d+", arguments[0])
    assert arguments[1:] == [
        *("--headless", "--fixed-fps", "60", "--env_seed=7", "--speedup=8.0", "--action_repeat=4"),
        *(f"--started={tmp_path}/started", "--level=2", "--dark=true", "-v", "a b"),
    ]
    assert "--headless" not in started(tmp_path, opened, headless=False)


def test_the_seed_is_that_of_the_supervisor_if_none_is_given(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The protocol has no message for a seed, so it can only be on the command line."""
    monkeypatch.setenv("SPARRING_SEED", "41")
    assert "--env_seed=41" in started(tmp_path, opened)
    assert "--env_seed=5" in started(tmp_path, opened, env_seed=5)
    monkeypatch.delenv("SPARRING_SEED")
    assert not any("env_seed" in argument for argument in started(tmp_path, opened))


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that is in use."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_the_port_counts_up_with_the_simulators_number(
    opened: Open, tmp_path: Path, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A default port that is in use is replaced by a free one; a given port is refused with a remedy."""
    monkeypatch.setenv("SPARRING_NUMBER", "3")
    monkeypatch.setattr(godot, "PORT", taken - 3)
    (argument,) = (text for text in started(tmp_path, opened, port=taken - 3) if text.startswith("--port="))
    assert argument != f"--port={taken}"
    monkeypatch.undo()
    with pytest.raises(SettingsError, match=rf"got port {taken}, .* choose another with the option port"):
        opened(port=taken)
    with pytest.raises(SettingsError, match="expected 0 to 65535"):
        opened(port=70_000)


class StartsGame(io.StringIO):
    """A standard error stream that starts a game when the bridge prints where it waits."""

    games: list[subprocess.Popen[bytes]]

    def __init__(self) -> None:
        super().__init__()
        self.games = []

    def write(self, text: str) -> int:
        found = re.search(r"--port=\d+", text)
        if found:
            self.games.append(subprocess.Popen([GAME, found[0], "--kinds=hopper"], stdout=subprocess.PIPE))
        return super().write(text)


def test_the_bridge_waits_for_a_game_that_the_user_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bridge prints once where it listens; it does not kill a game that it did not start, but sends close."""
    bell = StartsGame()
    monkeypatch.setattr(sys, "stderr", bell)
    game = make_godot(port=0)
    play(game, 2)
    game.close()
    (started_game,) = bell.games
    output, _ = started_game.communicate(timeout=20)
    assert (started_game.returncode, output) == (0, b"received 2 actions and {'type': 'close'}\n")
    assert len(bell.getvalue().splitlines()) == 1
    assert "press Play in the Godot editor" in bell.getvalue()


def test_the_program_may_be_a_macos_bundle_or_on_the_path(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "Ball.app" / "Contents" / "MacOS" / "Ball"
    program.parent.mkdir(parents=True)
    shutil.copy(GAME, program)
    assert list(opened(path=str(tmp_path / "Ball.app")).behaviors()) == ["walker?team=0"]
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    assert list(opened(path="Ball").behaviors()) == ["walker?team=0"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"areas": 2}, "for more games raise count"),
        ({"timeout_s": 0.0}, "a positive time"),
        ({"path": "nowhere.x86_64"}, "which is no program"),
        ({"show_window": True}, "expected 'headless'"),
        ({"seed": 3}, "expected 'env_seed'"),
        ({"arguments": "--level 'two"}, "as a shell splits them"),
        ({"call": "set_level(2)"}, "expected names of methods"),
        ({"kinds": ALL, "behavior": "One"}, "the policies hopper, seer, walker"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], expected: str) -> None:
    """This happens before or while the game starts."""
    areas = options.pop("areas", 1)
    with pytest.raises(SettingsError, match=expected):
        make("godot", areas, **({"path": GAME, "port": 0} | options))


def test_environment_parameters_are_refused(opened: Open) -> None:
    """They would have no effect, because the protocol has no field for them."""
    with pytest.raises(SettingsError, match="the environment parameters gravity"):
        opened().reset({"gravity": 9.81}, None)


def test_the_configuration_in_the_document_is_valid(tmp_path: Path) -> None:
    """A reader can train the example of docs/godot.md."""
    document = (Path(__file__).parents[2] / "docs" / "godot.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", document, re.DOTALL)
    (tmp_path / "ball.yaml").write_text(blocks[0])
    result = read(tmp_path / "ball.yaml")
    assert result.notices == ()
