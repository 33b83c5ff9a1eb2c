"""Unity players through the bridge, over real gRPC: what they say, what they hear, and who may speak."""

from __future__ import annotations

import io
import re
import socket
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from sparring.pipeline.bridges.player import PlayerFailed
from sparring.pipeline.bridges.unity import channels
from sparring.pipeline.bridges.unity import game as bridge
from sparring.pipeline.bridges.unity.channels import received
from sparring.pipeline.bridges.unity.game import Unity, make_unity
from sparring.pipeline.bridges.unity.game_server import PlayerGone
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.games.registry import make, parse_options
from sparring.pipeline.messages.simulator import BehaviorActions, Sampler
from sparring.pipeline.simulation.parameters import Parameters
from tests.simulation.unity_bridge import (
    LONG_S,
    Bridges,
    agents,
    introduction,
    message,
    play,
    player_by_hand,
    step,
    with_goal_camera,
    zeros,
)
from tests.simulation.unity_player_peer import Background, Message
from tests.simulation.unity_player_schema import CAPABILITIES, QUIT
from tests.simulation.unity_player_sides import understood

SOON_S: Final = 0.2


@pytest.fixture
def bridges(tmp_path: Path) -> Iterator[Bridges]:
    made = Bridges(tmp_path)
    yield made
    made.close()


def test_the_games_own_numbers(bridges: Bridges) -> None:
    """Each once, with its kind; those of the reset too."""
    unity, _ = bridges.played("--statistics")
    frame = unity.reset({}, 7)
    step(unity, frame)
    told = unity.statistics()
    assert [(one.name, one.value, one.aggregation) for one in told] == [
        (f"Player/{name}", value, kind)
        for count in (1.0, 2.0)
        for name, value, kind in (
            ("Average", count, "average"),
            ("Latest", count, "most_recent"),
            ("Sum", 1.0, "sum"),
            ("Histogram", count, "histogram"),
        )
    ]
    assert unity.statistics() == []


# ---------------------------------------------------------------- what the player hears


def test_the_introduction(bridges: Bridges) -> None:
    """Seed, areas, versions, and all seven capabilities; the areas are made."""
    unity, player = bridges.played("--areas", "2", areas=3)
    (report,) = unity.reset({}, 4711)
    assert report.decisions is not None
    assert report.decisions.agents.size == 6
    unity.close()
    player.join(LONG_S)
    (said,) = player.played.told("initialisation")
    assert said == {
        "seed": 4711,
        "communication_version": "1.5.0",
        "package_version": "1.1.0",
        "num_areas": 3,
        "capabilities": dict.fromkeys(CAPABILITIES, True),
    }


def said_by(side: bytes) -> list[dict[str, Any]]:
    """Side channel bytes in words."""
    return [understood(channel, payload) for channel, payload in received(side)]


def test_engine_settings_are_told_once_and_parameters_at_each_reset(bridges: Bridges) -> None:
    """In the order of the engine's channel, then the parameters."""
    engine = {"width": 96, "height": 64, "quality_level": 2, "time_scale": 4.5}
    unity, player = bridges.played(**engine, target_frame_rate=30, capture_frame_rate=50)
    for size in (1.5, 2.5):
        step(unity, unity.reset({"size": size, "mass": -3}, 7))
    unity.close()
    player.join(LONG_S)
    assert player.played.told("engine") == [
        {"setting": "resolution", "value": [96, 64]},
        {"setting": "quality_level", "value": 2},
        {"setting": "time_scale", "value": 4.5},
        {"setting": "target_frame_rate", "value": 30},
        {"setting": "capture_frame_rate", "value": 50},
    ]
    assert [(said["key"], said["value"]) for said in player.played.told("parameter")] == [
        ("size", 1.5),
        ("mass", -3.0),
        ("size", 2.5),
        ("mass", -3.0),
    ]


def test_what_the_trainer_changes_is_told_with_the_next_step(bridges: Bridges) -> None:
    """Numbers as numbers, samplers as samplers, which the game draws from itself; nothing where nothing changed."""
    live = Parameters()
    wind = {"wind": Sampler(kind="uniform", values=(1.0, 2.0), seed=5)}
    live.replace({"size": 1.0, "wind": 1.2}, wind)
    unity, doll = bridges.by_hand()
    waiting = doll.meanwhile(lambda: unity.reset(live, 7))
    doll.ask(introduction())
    first = said_by(doll.ask(message()).unity_input.rl_input.side_channel)
    doll.open = doll.call(agents(known=True))
    frame = waiting.result(LONG_S)
    told: list[list[tuple[Any, ...]]] = []
    changes: list[dict[str, Any]] = [{}, {"size": 2.0}, {}, {"wind": 7.0}, {"size": 2.0}]
    for change in changes:
        live.update(change, {})
        waiting = doll.meanwhile(partial(step, unity, frame))
        answer = Message.FromString(doll.open.result(LONG_S)).unity_input.rl_input
        told.append([(one["key"], one.get("value")) for one in said_by(answer.side_channel)])
        doll.open = doll.call(agents())
        frame = waiting.result(LONG_S)
    kinds_first = {one.get("key"): (one["heard"], one.get("values", one.get("value"))) for one in first}
    assert kinds_first["size"] == ("parameter", 1.0)
    assert kinds_first["wind"] == ("sampler", [1.0, 2.0])
    assert told == [[], [("wind", None), ("size", 2.0)], [], [("size", 2.0), ("wind", 7.0)], []]


@pytest.mark.parametrize("kind", ["gaussian", "multirangeuniform"])
def test_every_sampler_has_its_form(kind: Any, bridges: Bridges) -> None:
    """Gaussian by mean and deviation, several ranges by all their ends."""
    values = (0.5, 2.0) if kind == "gaussian" else (0.0, 1.0, 4.0, 5.0)
    live = Parameters()
    live.replace({"mass": 0.7}, {"mass": Sampler(kind=kind, values=values, seed=9)})
    unity, player = bridges.played()
    unity.reset(live, 7)
    unity.close()
    player.join(LONG_S)
    word = "gaussian" if kind == "gaussian" else "multirange"
    assert player.played.told("sampler") == [{"key": "mass", "seed": 9, "sampler": word, "values": list(values)}]
    assert player.played.told("parameter") == []


@pytest.mark.parametrize(("name", "value"), [("größe", 1.0), ("size", 1e39)])
def test_a_parameter_that_can_not_be_told_is_refused_by_name(name: str, value: float, bridges: Bridges) -> None:
    """And the player ends in order."""
    unity, player = bridges.played()
    with pytest.raises(SettingsError, match=name):
        unity.reset({name: value}, 7)
    unity.close()
    player.join(LONG_S)
    assert player.played.code == 0


# ---------------------------------------------------------------- who may speak


def test_a_second_player_is_turned_away_and_the_first_goes_on(bridges: Bridges) -> None:
    """While the first waits for its actions, and while it plays and no call is open."""
    unity, doll = bridges.by_hand()
    frame = doll.begin(unity)

    def turned_away() -> None:
        with player_by_hand(unity._calls.port) as other:
            call = other.call(introduction())
            with pytest.raises(grpc.RpcError):
                call.result(LONG_S)
            assert (call.code(), call.details()) == (grpc.StatusCode.UNAVAILABLE, "another player plays on this port")

    turned_away()
    waiting = doll.meanwhile(lambda: step(unity, frame))
    doll.open.result(LONG_S)
    turned_away()
    doll.open = doll.call(agents(seen=0.25))
    (report,) = waiting.result(LONG_S)
    assert report.decisions is not None
    assert report.decisions.observations[0].tolist() == [[0.25]]


def test_a_player_that_calls_after_its_time_is_up_does_not_spoil_the_end(bridges: Bridges) -> None:
    """Nobody has heard it, so nothing fits as an answer: it is broken off."""
    unity, doll = bridges.by_hand()
    frame = doll.begin(unity)
    unity._timeout_s = SOON_S
    waiting = doll.meanwhile(lambda: step(unity, frame))
    doll.open.result(LONG_S)
    with pytest.raises(PlayerFailed, match=r"Unity editor, stepping: nothing in 0\.2 s; .* raise --timeout-wait"):
        waiting.result(LONG_S)
    late = doll.call(agents())
    assert isinstance(unity._calls.receive(LONG_S), bytes)
    unity.close()
    with pytest.raises(grpc.RpcError):
        late.result(LONG_S)
    assert late.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("version", "cause"),
    [("2.0.0", r"version '2\.0\.0' of the communication \(package '4\.0\.0'\), not 1\.x"), ("", "no introduction")],
)
def test_another_major_version_is_refused(version: str, cause: str, bridges: Bridges) -> None:
    """With its package, and what to update."""
    unity, doll = bridges.by_hand()
    waiting = doll.meanwhile(lambda: unity.reset({}, 7))
    call = doll.call(introduction(version))
    with pytest.raises(PlayerFailed, match=rf"the Unity editor, connected: .*{cause}"):
        waiting.result(LONG_S)
    unity.close()
    with pytest.raises(grpc.RpcError):
        call.result(LONG_S)


@pytest.mark.parametrize("said", ["", "out of memory"])
def test_a_player_that_ends_the_conversation_itself_gets_an_answer(said: str, bridges: Bridges) -> None:
    """As the editor does when Play is pressed again; the answer is quit."""
    unity, doll = bridges.by_hand()
    frame = doll.begin(unity)
    waiting = doll.meanwhile(lambda: step(unity, frame))
    doll.open.result(LONG_S)
    call = doll.call(message(400, said))
    with pytest.raises(PlayerFailed, match=rf"stepping: a player that ended the conversation.*{said}"):
        waiting.result(LONG_S)
    unity.close()
    assert Message.FromString(call.result(LONG_S)).unity_input.rl_input.command == 2


def test_a_player_that_breaks_off_the_open_call_is_missed_at_once(bridges: Bridges) -> None:
    """Without waiting for the deadline of an answer."""
    unity, doll = bridges.by_hand()
    frame = doll.begin(unity)
    doll.open.cancel()
    gone = unity._calls.receive(LONG_S)
    assert isinstance(gone, PlayerGone)
    unity._calls.gone(gone.why)  # back to where it was
    with pytest.raises(PlayerFailed, match="the Unity editor, stepping: the player broke the connection off"):
        step(unity, frame)


def test_a_game_may_take_some_messages_until_its_agents_appear(bridges: Bridges) -> None:
    """It is told to go on with no actions."""
    unity, doll = bridges.by_hand()
    waiting = doll.meanwhile(lambda: unity.reset({}, 7))
    doll.ask(introduction())
    doll.ask(message())
    for _ in range(3):
        told = doll.ask(message()).unity_input.rl_input
        assert (told.command, len(told.agent_actions)) == (0, 0)
    doll.open = doll.call(agents(known=True))
    (report,) = waiting.result(LONG_S)
    assert report.behavior == "Doll?team=0"


@pytest.mark.parametrize("begun", [False, True], ids=["after the reset", "after a step"])
def test_a_game_in_which_nobody_ever_decides_is_not_waited_for_for_ever(begun: bool, bridges: Bridges) -> None:
    """It answers each message, so the deadline of an answer does not find it."""
    unity, doll = bridges.by_hand()
    now = [0.0]
    unity._clock = lambda: now[0]
    if begun:
        frame = doll.begin(unity)
        waiting = doll.meanwhile(lambda: step(unity, frame))
        doll.open.result(LONG_S)
    else:
        waiting = doll.meanwhile(lambda: unity.reset({}, 7))
        doll.ask(introduction())
        doll.ask(message())
    assert Message.FromString(doll.call(message()).result(LONG_S)).unity_input.rl_input.command != QUIT
    now[0] = 1000.0
    last = doll.call(message())
    with pytest.raises(PlayerFailed, match="no agent"):
        waiting.result(LONG_S)
    unity.close()
    assert Message.FromString(last.result(LONG_S)).unity_input.rl_input.command == QUIT


# ---------------------------------------------------------------- the editor, ports, options


class Bell(io.StringIO):
    """Standard error that starts a player when the bridge says where it waits."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.players: list[Background] = []

    def write(self, text: str) -> int:
        if found := re.search(r"press Play; waiting for its call on port (\d+)", text):
            self.players.append(Background(self._folder, int(found[1])))
        return super().write(text)


def test_the_editor_is_waited_for_and_told_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says where; nothing is launched."""
    bell = Bell(tmp_path)
    monkeypatch.setattr(sys, "stderr", bell)
    unity = make("unity", 1, port=0)
    assert isinstance(unity, Unity)
    play(unity, 3)
    unity.close()
    (player,) = bell.players
    player.join(LONG_S)
    assert player.played.code == 0
    assert len(bell.getvalue().splitlines()) == 1
    assert not unity._player.launched


class Listens:
    """Stands in for the port: notes which one was asked for."""

    asked: Final[list[int]] = []

    def __init__(self, port: int, host: str) -> None:
        assert host == "127.0.0.1"
        self.port = port
        self.asked.append(port)


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
    """5004 for the editor, 5005 and up for builds, `--base-port` and up where it is given."""
    monkeypatch.setattr(bridge, "check_free", lambda _port, _host: None)
    monkeypatch.setattr(bridge, "Calls", Listens)
    monkeypatch.setenv("SPARRING_NUMBER", number)
    unity = make_unity(1, **options)
    assert unity.player().port == port
    assert unity._calls.port == Listens.asked.pop() == port


def test_the_editor_has_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """At least; a build has what is asked for."""
    monkeypatch.setattr(bridge, "Calls", Listens)
    waits = [
        bridge.make_unity(1, path, timeout_s=t)._connect_s for path, t in ((None, 60), (None, 900), ("/bin/true", 5))
    ]
    assert waits == [600, 900, 5]


def test_options_have_their_types() -> None:
    """As they stand on a command line."""
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


def test_arguments_of_the_game_need_their_quotes_closed() -> None:
    with pytest.raises(SettingsError, match="No closing quotation"):
        make("unity", 1, path="/bin/true", port=0, arguments="--name 'Jo")


def test_it_calls_where_it_is_told_to() -> None:
    unity = bridge.make_unity(1, "/bin/true", port=0, host="127.0.0.2")
    socket.create_connection(("127.0.0.2", unity._calls.port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", unity._calls.port))
    unity.close()


@pytest.mark.parametrize("told", ["12 or so", "00" * 19, "ff" * 20])
def test_what_it_is_told_has_to_be_for_side_channels(told: str) -> None:
    with pytest.raises(SettingsError, match="expected side channel bytes in hexadecimal digits"):
        make("unity", 1, path="/bin/true", port=0, told=told)


def test_what_it_is_told_goes_out_with_the_first_reset() -> None:
    """After how its engine is to run, to a trainer that speaks with it itself as to the game."""
    other = channels.analytics(b"anything")
    plain, more = (make_unity(1, path="/bin/true", port=0, told=told).player() for told in ("", other.hex()))
    assert bytes.fromhex(more.settings) == bytes.fromhex(plain.settings) + other


def test_actions_for_nobody_are_this_sides_fault(bridges: Bridges) -> None:
    """And the player is told to end all the same."""
    unity, player = bridges.played()
    frame = unity.reset({}, 7)
    told = zeros(unity, frame[0])
    with pytest.raises(Exception, match="expected those of"):
        unity.step({})
    with pytest.raises(Exception, match="actions of 'Other"):
        unity.step({"Other?team=0": BehaviorActions(**{**_fields(told), "behavior": "Other?team=0"})})
    unity.close()
    player.join(LONG_S)
    assert player.played.code == 0


def _fields(told: BehaviorActions) -> dict[str, Any]:
    return {name: getattr(told, name) for name in ("agents", "continuous", "discrete")}


def test_a_goal_that_is_a_picture_is_told_of(bridges: Bridges, capsys: pytest.CaptureFixture[str]) -> None:
    """When its behavior is new; networks see it, and are not conditioned on it."""
    unity, doll = bridges.by_hand()
    waiting = doll.meanwhile(lambda: unity.reset({}, 7))
    doll.ask(introduction())
    doll.ask(message())
    doll.open = doll.call(with_goal_camera(agents(known=True)))
    frame = waiting.result(LONG_S)
    assert [one.kind for one in unity.behaviors()["Doll?team=0"].observations] == ["vector", "image"]
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "goal" in line)
    assert line.startswith("the Unity editor: goal signal 'GoalCamera' of Doll?team=0 is read as any other image")
    going = doll.meanwhile(lambda: step(unity, frame))
    doll.open.result(LONG_S)
    doll.open = doll.call(with_goal_camera(agents()))
    going.result(LONG_S)
    assert "goal" not in capsys.readouterr().err
