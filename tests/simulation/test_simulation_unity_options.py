"""The bridge waits for the Unity editor, chooses its port, and checks options and actions."""

from __future__ import annotations

import contextlib
import io
import re
import socket
import sys
import threading
from pathlib import Path
from typing import Any, Final

import pytest

from sparring.pipeline.bridges.player import PlayerFailed
from sparring.pipeline.bridges.unity import channels, server
from sparring.pipeline.bridges.unity import game as bridge
from sparring.pipeline.bridges.unity.connection import player_fault
from sparring.pipeline.bridges.unity.game import Unity, make_unity
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.games.registry import make, parse_options
from sparring.pipeline.messages.simulator import BehaviorActions
from tests.simulation.unity_bridge import (
    LONG_S,
    Bridges,
    agents,
    free_ports,
    introduction,
    message,
    play,
    step,
    with_goal_camera,
    zeros,
)
from tests.simulation.unity_player_peer import Background

SOON_S: Final = 0.2


class StartsPlayer(io.StringIO):
    """A standard error stream that starts a player when the bridge prints where it waits."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.players: list[Background] = []

    def write(self, text: str) -> int:
        if found := re.search(r"press Play; waiting for its call on port (\d+)", text):
            self.players.append(Background(self._folder, int(found[1])))
        return super().write(text)


def test_the_bridge_waits_for_the_editor_and_sends_quit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line shows the port; nothing is launched."""
    bell = StartsPlayer(tmp_path)
    monkeypatch.setattr(sys, "stderr", bell)
    unity = make("unity", 1, port=0)
    assert isinstance(unity, Unity)
    play(unity, 3)
    assert unity._program is not None
    assert not unity._program.launched
    unity.close()
    (player,) = bell.players
    player.join(LONG_S)
    assert player.played.code == 0
    assert len(bell.getvalue().splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "number", "port"),
    [
        ({}, "", 5004),
        ({}, "3", 5004),
        ({"port": 6000}, "", 6000),
        ({"path": "/bin/true"}, "", 5005),
        ({"path": "/bin/true"}, "3", 5008),
        ({"path": "/bin/true", "port": 7000}, "2", 7002),
        ({"path": "/bin/true", "port": 0}, "2", 0),
    ],
)
def test_ports_count_up_from_that_of_the_first(
    options: dict[str, Any], number: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The editor uses 5004, builds use 5005 and up, or `--base-port` and up if it is given."""
    checked = []
    monkeypatch.setattr(server, "check_free", lambda *where: checked.append(where))
    monkeypatch.setenv("SPARRING_NUMBER", number)
    unity = make_unity(1, **options)
    assert unity.player().port == port
    assert checked == [(port, "127.0.0.1")]


def test_the_wait_for_the_editor_is_at_least_ten_minutes() -> None:
    """The wait for a build is the given one."""
    makers = (None, 60), (None, 900), ("/bin/true", 5)
    players = [bridge.make_unity(1, path, port=0, timeout_s=timeout_s).player() for path, timeout_s in makers]
    assert [player.connect_s for player in players] == [600, 900, 5]


def test_options_of_a_command_line_get_their_types() -> None:
    texts = ["path=/bin/true", "port=0", "arguments=--level 2", "no_graphics=true", "time_scale=1", "width=84"]
    options = parse_options("unity", texts)
    assert options == {
        "path": "/bin/true",
        "port": 0,
        "arguments": "--level 2",
        "no_graphics": True,
        "time_scale": 1.0,
        "width": 84,
    }
    with pytest.raises(SettingsError, match="did you mean 'no_graphics'"):
        parse_options("unity", ["nographics=true"])


def test_arguments_of_the_game_need_closed_quotes() -> None:
    with pytest.raises(SettingsError, match="No closing quotation"):
        make("unity", 1, path="/bin/true", port=0, arguments="--name 'Jo")


def test_the_bridge_listens_at_the_given_address() -> None:
    unity = bridge.make_unity(1, None, port=free_ports(1), host="127.0.0.2")

    def reset() -> None:
        with pytest.raises(PlayerFailed, match="the end of the test"):
            unity.reset({}, 7)

    waiting = threading.Thread(target=reset)
    waiting.start()
    port = unity.player().port
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            probe = socket.create_connection(("127.0.0.2", port), LONG_S)
            break
    with probe:  # until the bridge has closed its end, which would otherwise be open when its loop ends
        probe.shutdown(socket.SHUT_WR)
        while probe.recv(4096):
            pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    unity._events.put(player_fault("the end of the test", ""))
    waiting.join(LONG_S)
    unity.close()


@pytest.mark.parametrize("text", ["12 or so", "00" * 19, "ff" * 20])
def test_an_invalid_side_channel_option_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="expected side channel bytes in hexadecimal digits"):
        make("unity", 1, path="/bin/true", port=0, side_channel=text)


def test_the_side_channel_option_is_sent_with_the_first_reset() -> None:
    """It follows the engine settings, also if the trainer talks to the player directly."""
    other = channels.analytics(b"anything")
    plain, more = (make_unity(1, path="/bin/true", port=0, side_channel=text).player() for text in ("", other.hex()))
    assert bytes.fromhex(more.settings) == bytes.fromhex(plain.settings) + other


@pytest.mark.parametrize(
    ("others", "cause"),
    [((), "no more actions, where those of .*Goal"), (("Other?team=0",), "actions of 'Other.*, where those of .*Goal")],
)
def test_actions_for_unknown_agents_end_the_conversation(others: tuple[str, ...], cause: str, bridges: Bridges) -> None:
    """The player receives quit."""
    unity, player = bridges.played()
    frame = unity.reset({}, 7)
    chosen = zeros(unity, frame[0])
    actions = {other: BehaviorActions(**{**_fields(chosen), "behavior": other}) for other in others}
    with pytest.raises(PlayerFailed, match=cause):
        unity.step(actions)
    with pytest.raises(PlayerFailed, match=cause):
        unity.step(actions)
    unity.close()
    player.join(LONG_S)
    assert player.played.code == 0


def _fields(chosen: BehaviorActions) -> dict[str, Any]:
    return {name: getattr(chosen, name) for name in ("agents", "continuous", "discrete")}


def test_a_goal_signal_that_is_an_image_is_reported(bridges: Bridges, capsys: pytest.CaptureFixture[str]) -> None:
    """This happens when its behavior is new; networks read it as an image without conditioning."""
    unity, manual = bridges.manual()
    waiting = manual.meanwhile(lambda: unity.reset({}, 7))
    manual.ask(introduction())
    manual.ask(message())
    manual.open = manual.call(with_goal_camera(agents(known=True)))
    frame = waiting.result(LONG_S)
    assert [one.kind for one in unity.behaviors()["Doll?team=0"].observations] == ["vector", "image"]
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "goal" in line)
    assert line.startswith("the Unity editor: goal signal 'GoalCamera' of Doll?team=0 is read as any other image")
    going = manual.meanwhile(lambda: step(unity, frame))
    manual.open.result(LONG_S)
    manual.open = manual.call(with_goal_camera(agents()))
    going.result(LONG_S)
    assert "goal" not in capsys.readouterr().err
