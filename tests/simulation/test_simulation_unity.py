"""Unity players talk to the bridge over real gRPC: messages both ways, and which clients are accepted."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

import grpc
import pytest

from sparring.pipeline.bridges.player import PlayerFailed
from sparring.pipeline.bridges.unity.channels import parse_messages
from sparring.pipeline.messages.simulator import Sampler
from sparring.pipeline.simulation.parameters import Parameters
from tests.simulation.unity_bridge import (
    LONG_S,
    Bridges,
    agents,
    introduction,
    manual_player,
    message,
    step,
)
from tests.simulation.unity_player_peer import Message
from tests.simulation.unity_player_schema import CAPABILITIES, QUIT
from tests.simulation.unity_player_sides import parse_message

SOON_S: Final = 0.2


def test_statistics_of_the_game_are_returned_once_with_their_kind(bridges: Bridges) -> None:
    """This includes those of the reset."""
    unity, _ = bridges.played("--statistics")
    frame = unity.reset({}, 7)
    step(unity, frame)
    statistics = unity.statistics()
    assert [(one.name, one.value, one.aggregation) for one in statistics] == [
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


# ---------------------------------------------------------------- messages to the player


def test_the_player_receives_seed_areas_versions_and_capabilities(bridges: Bridges) -> None:
    unity, player = bridges.played("--areas", "2", areas=3)
    (report,) = unity.reset({}, 4711)
    assert report.decisions is not None
    assert report.decisions.agents.size == 6
    unity.close()
    player.join(LONG_S)
    (initialization,) = player.played.received("initialization")
    assert initialization == {
        "seed": 4711,
        "communication_version": "1.5.0",
        "package_version": "1.1.0",
        "num_areas": 3,
        "capabilities": dict.fromkeys(CAPABILITIES, True),
    }


def side_channel_events(side: bytes) -> list[dict[str, Any]]:
    """Returns the messages in side channel bytes."""
    return [parse_message(channel, payload) for channel, payload in parse_messages(side)]


def test_engine_settings_are_sent_once_and_parameters_at_each_reset(bridges: Bridges) -> None:
    """Engine settings come first, in the order of their channel."""
    engine = {"width": 96, "height": 64, "quality_level": 2, "time_scale": 4.5}
    unity, player = bridges.played(**engine, target_frame_rate=30, capture_frame_rate=50)
    for size in (1.5, 2.5):
        step(unity, unity.reset({"size": size, "mass": -3}, 7))
    unity.close()
    player.join(LONG_S)
    assert player.played.received("engine") == [
        {"setting": "resolution", "value": [96, 64]},
        {"setting": "quality_level", "value": 2},
        {"setting": "time_scale", "value": 4.5},
        {"setting": "target_frame_rate", "value": 30},
        {"setting": "capture_frame_rate", "value": 50},
    ]
    assert [(event["key"], event["value"]) for event in player.played.received("parameter")] == [
        ("size", 1.5),
        ("mass", -3.0),
        ("size", 2.5),
        ("mass", -3.0),
    ]


def test_changed_parameters_are_sent_with_the_next_step(bridges: Bridges) -> None:
    """Numbers are sent as numbers, and samplers as samplers from which the game samples."""
    live = Parameters()
    wind = {"wind": Sampler(kind="uniform", values=(1.0, 2.0), seed=5)}
    live.replace({"size": 1.0, "wind": 1.2}, wind)
    unity, manual = bridges.manual()
    waiting = manual.meanwhile(lambda: unity.reset(live, 7))
    manual.ask(introduction())
    first = side_channel_events(manual.ask(message()).unity_input.rl_input.side_channel)
    manual.open = manual.call(agents(known=True))
    frame = waiting.result(LONG_S)
    sent: list[list[tuple[Any, ...]]] = []
    changes: list[dict[str, Any]] = [{}, {"size": 2.0}, {}, {"wind": 7.0}, {"size": 2.0}]
    for change in changes:
        live.update(change, {})
        waiting = manual.meanwhile(partial(step, unity, frame))
        answer = Message.FromString(manual.open.result(LONG_S)).unity_input.rl_input
        sent.append([(one["key"], one.get("value")) for one in side_channel_events(answer.side_channel)])
        manual.open = manual.call(agents())
        frame = waiting.result(LONG_S)
    kinds_first = {one.get("key"): (one["event"], one.get("values", one.get("value"))) for one in first}
    assert kinds_first["size"] == ("parameter", 1.0)
    assert kinds_first["wind"] == ("sampler", [1.0, 2.0])
    assert sent == [[], [("wind", None), ("size", 2.0)], [], [("size", 2.0), ("wind", 7.0)], []]


@pytest.mark.parametrize("kind", ["gaussian", "multirangeuniform"])
def test_every_sampler_has_its_own_format(kind: Any, bridges: Bridges) -> None:
    """A Gaussian has mean and deviation, several ranges have all their bounds."""
    values = (0.5, 2.0) if kind == "gaussian" else (0.0, 1.0, 4.0, 5.0)
    live = Parameters()
    live.replace({"mass": 0.7}, {"mass": Sampler(kind=kind, values=values, seed=9)})
    unity, player = bridges.played()
    unity.reset(live, 7)
    unity.close()
    player.join(LONG_S)
    sampler = "gaussian" if kind == "gaussian" else "multirange"
    assert player.played.received("sampler") == [{"key": "mass", "seed": 9, "sampler": sampler, "values": list(values)}]
    assert player.played.received("parameter") == []


@pytest.mark.parametrize(("name", "value"), [("größe", 1.0), ("size", 1e39)])
def test_a_parameter_that_cannot_be_sent_is_refused_by_name(name: str, value: float, bridges: Bridges) -> None:
    """The player still ends in order."""
    unity, player = bridges.played()
    with pytest.raises(PlayerFailed, match=name):
        unity.reset({name: value}, 7)
    unity.close()
    player.join(LONG_S)
    assert player.played.code == 0


# ---------------------------------------------------------------- accepted clients


def test_a_second_player_is_refused_and_the_first_continues(bridges: Bridges) -> None:
    """This holds while the first waits for actions, and while it has no open call."""
    unity, manual = bridges.manual()
    frame = manual.begin(unity)

    def refused() -> None:
        with manual_player(unity.player().port) as other:
            call = other.call(introduction())
            with pytest.raises(grpc.RpcError):
                call.result(LONG_S)
            assert (call.code(), call.details()) == (
                grpc.StatusCode.UNAVAILABLE,
                "another player is connected to this port",
            )

    refused()
    waiting = manual.meanwhile(lambda: step(unity, frame))
    manual.open.result(LONG_S)
    refused()
    manual.open = manual.call(agents(observed=0.25))
    (report,) = waiting.result(LONG_S)
    assert report.decisions is not None
    assert report.decisions.observations[0].tolist() == [[0.25]]


def test_a_player_that_calls_after_the_deadline_does_not_disturb_the_end(bridges: Bridges) -> None:
    """It receives quit."""
    unity, manual = bridges.manual()
    frame = manual.begin(unity)
    assert unity._connection is not None
    unity._connection._player = replace(unity.player(), timeout_s=SOON_S)
    waiting = manual.meanwhile(lambda: step(unity, frame))
    manual.open.result(LONG_S)
    with pytest.raises(PlayerFailed, match=r"Unity editor, stepping: nothing in 0\.2 s; .* raise --timeout-wait"):
        waiting.result(LONG_S)
    late = manual.call(agents())
    while not unity._connection._awaits_answer:
        pass
    unity.close()
    assert Message.FromString(late.result(LONG_S)).unity_input.rl_input.command == QUIT


@pytest.mark.parametrize(
    ("version", "cause"),
    [("2.0.0", r"version '2\.0\.0' of the communication \(package '4\.0\.0'\), not 1\.x"), ("", "no introduction")],
)
def test_another_major_version_is_refused(version: str, cause: str, bridges: Bridges) -> None:
    """The error names its package and what to update."""
    unity, manual = bridges.manual()
    waiting = manual.meanwhile(lambda: unity.reset({}, 7))
    call = manual.call(introduction(version))
    with pytest.raises(PlayerFailed, match=rf"the Unity editor, connected: .*{cause}"):
        waiting.result(LONG_S)
    unity.close()
    with pytest.raises(grpc.RpcError):
        call.result(LONG_S)


@pytest.mark.parametrize("text", ["", "out of memory"])
def test_a_player_that_ends_the_conversation_gets_an_answer(text: str, bridges: Bridges) -> None:
    """The editor does so when Play is pressed again; the answer is quit."""
    unity, manual = bridges.manual()
    frame = manual.begin(unity)
    waiting = manual.meanwhile(lambda: step(unity, frame))
    manual.open.result(LONG_S)
    call = manual.call(message(400, text))
    with pytest.raises(PlayerFailed, match=rf"stepping: an orderly end of the game.*{text}"):
        waiting.result(LONG_S)
    unity.close()
    answer = Message.FromString(call.result(LONG_S))
    assert (answer.header.status, answer.unity_input.rl_input.command) == (400, 2)


def test_a_player_that_cancels_the_open_call_is_reported_at_once(bridges: Bridges) -> None:
    """The bridge does not wait for the deadline of an answer."""
    unity, manual = bridges.manual()
    frame = manual.begin(unity)
    manual.open.cancel()
    assert unity._connection is not None
    while not unity._connection._ended.is_set():
        pass
    with pytest.raises(PlayerFailed, match="the Unity editor, first reset: the player broke the connection"):
        step(unity, frame)


def test_a_game_may_send_some_messages_before_its_agents_appear(bridges: Bridges) -> None:
    """It receives steps without actions."""
    unity, manual = bridges.manual()
    waiting = manual.meanwhile(lambda: unity.reset({}, 7))
    manual.ask(introduction())
    manual.ask(message())
    for _ in range(3):
        rl_input = manual.ask(message()).unity_input.rl_input
        assert (rl_input.command, len(rl_input.agent_actions)) == (0, 0)
    manual.open = manual.call(agents(known=True))
    (report,) = waiting.result(LONG_S)
    assert report.behavior == "Doll?team=0"


@pytest.mark.parametrize("begun", [False, True], ids=["after the reset", "after a step"])
def test_a_game_in_which_no_agent_ever_decides_is_given_up(
    begun: bool, bridges: Bridges, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers each message, so the deadline of an answer does not apply."""
    unity, manual = bridges.manual()
    now = [0.0]
    monkeypatch.setattr(unity, "_clock", lambda: now[0])
    if begun:
        frame = manual.begin(unity)
        waiting = manual.meanwhile(lambda: step(unity, frame))
        manual.open.result(LONG_S)
    else:
        waiting = manual.meanwhile(lambda: unity.reset({}, 7))
        manual.ask(introduction())
        manual.ask(message())
    assert Message.FromString(manual.call(message()).result(LONG_S)).unity_input.rl_input.command != QUIT
    now[0] = 1000.0
    last = manual.call(message())
    with pytest.raises(PlayerFailed, match="no agent"):
        waiting.result(LONG_S)
    unity.close()
    assert Message.FromString(last.result(LONG_S)).unity_input.rl_input.command == QUIT
