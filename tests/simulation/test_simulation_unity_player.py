"""The player stand-in against a minimal trainer: order of messages, side channels, faults."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.simulation import unity_player_session
from tests.simulation.unity_null_trainer import PLAYER, executable, null_trainer
from tests.simulation.unity_player_peer import RESET, Background, Trainer, against, play, serving, side_channel, string
from tests.simulation.unity_player_session import Crash

ENGINE = uuid.UUID("e951342c-4f7e-11ea-b238-784f4387d1f7")
PARAMETERS = uuid.UUID("534c891e-810f-11ea-a9d0-822485860400")
ANALYTICS = uuid.UUID("b664a4a9-d86f-5a5f-95cb-e8353a7e8356")
GAMES = ("goal", "balance", "soccer", "match3", "basic", "zoo")


def test_messages_are_initialization_then_a_header_then_agents(tmp_path: Path) -> None:
    """The first has no behaviors, the second only a header, the third agents and behavior, later ones agents."""
    trainer = Trainer(steps=3)
    played = against(trainer, tmp_path, "--game", "goal", "--areas", "2")
    first, second, third, *later = trainer.messages
    introduction = first.unity_output.rl_initialization_output
    assert (introduction.communication_version, introduction.package_version) == ("1.5.0", "4.0.0")
    assert not introduction.brain_parameters
    assert len(introduction.capabilities.ListFields()) == 7
    assert trainer.calls[1] == b"\n\x03\x08\xc8\x01"
    assert not second.HasField("unity_output")
    (brain,) = third.unity_output.rl_initialization_output.brain_parameters
    assert (brain.brain_name, brain.action_spec.num_continuous_actions) == ("Goal?team=0", 1)
    assert len(later) == 3
    assert not any(message.unity_output.HasField("rl_initialization_output") for message in later)
    assert (played.code, len(trainer.outputs[0]["Goal?team=0"].value)) == (0, 2)


def test_the_trainers_initialization_is_logged(tmp_path: Path) -> None:
    """The log has seed, areas, versions, capabilities and unknown arguments; the areas are made."""
    trainer = Trainer(areas=3, missing=("trainingAnalytics",))
    played = against(trainer, tmp_path, "--areas", "2", "--my-level", "4")
    (initialization,) = played.received("initialization")
    assert (
        initialization["seed"],
        initialization["num_areas"],
        initialization["communication_version"],
        initialization["package_version"],
    ) == (
        7,
        3,
        "1.5.0",
        "1.1.0",
    )
    assert [name for name, has in initialization["capabilities"].items() if not has] == ["trainingAnalytics"]
    assert played.received("arguments") == [{"graphics": False, "batch": True, "unknown": ["--my-level", "4"]}]
    assert len(trainer.outputs[0]["Goal?team=0"].value) == 6


@pytest.mark.parametrize("game", ["goal", "balance", "soccer", "match3"])
def test_the_seed_determines_the_game(game: str, tmp_path: Path) -> None:
    """The same seed gives the same bytes, another seed gives others."""
    calls = []
    for seed in (1, 1, 2):
        trainer = Trainer(seed=seed)
        against(trainer, tmp_path, "--game", game, "--areas", "4")
        calls.append(trainer.calls)
    assert calls[0] == calls[1] != calls[2]


@pytest.mark.parametrize("discrete", [True, False])
def test_an_old_player_has_no_action_spec(discrete: bool, tmp_path: Path) -> None:
    """Protocol 1.0 has size and kind of deprecated vector actions, which the player reads."""

    def act(number: int, infos: Any, rl_input: Any) -> None:
        trainer.fill("Goal?team=0", rl_input.agent_actions["Goal?team=0"].value.add(), 0.2, 1)

    trainer = Trainer(steps=6, act=act)
    played = against(trainer, tmp_path, "--protocol", "1.0.0", *(["--discrete"] if discrete else []))
    brain = trainer.specs["Goal?team=0"]
    assert played.code == 0
    assert not trainer.messages[0].unity_output.rl_initialization_output.HasField("capabilities")
    assert not brain.HasField("action_spec")
    assert list(brain.vector_action_size_deprecated) == [2 if discrete else 1]
    assert brain.vector_action_space_type_deprecated == (0 if discrete else 1)
    assert trainer.outputs[5]["Goal?team=0"].value[0].done


def test_a_reset_restarts_the_game(tmp_path: Path) -> None:
    """First decisions follow with the same ids, without ends or rewards."""

    def act(number: int, infos: Any, rl_input: Any) -> None:
        if number == 3:
            rl_input.command = RESET
        else:
            trainer.zeros(number, infos, rl_input)

    trainer = Trainer(steps=5, act=act)
    played = against(trainer, tmp_path, "--game", "zoo")
    ages = [infos["Zoo?team=0"].value[0].observations[0].float_data.data[1] for infos in trainer.outputs]
    assert ages == [0, 1, 2, 0, 1, 2]
    assert len(played.received("reset")) == 2


def test_side_channel_messages_are_logged(tmp_path: Path) -> None:
    """They are engine settings, parameters, samplers, analytics and unknown channels, in order."""
    foreign_channel = uuid.UUID("44444444-3333-2222-1111-000000000000")
    side = b"".join(
        (
            side_channel(ENGINE, struct.pack("<iii", 0, 84, 90)),
            side_channel(ENGINE, struct.pack("<if", 2, 20.0)),
            side_channel(PARAMETERS, string("size"), struct.pack("<if", 0, 1.5)),
            side_channel(PARAMETERS, string("mass"), struct.pack("<iiiff", 1, 9, 0, 1.0, 2.0)),
            side_channel(PARAMETERS, string("wind"), struct.pack("<iiii4f", 1, 9, 2, 4, 0.0, 1.0, 4.0, 5.0)),
            side_channel(ANALYTICS, b"some"),
            side_channel(foreign_channel, b"other"),
        )
    )
    played = against(Trainer(side=side), tmp_path)
    assert played.received("engine") == [
        {"setting": "resolution", "value": [84, 90]},
        {"setting": "time_scale", "value": 20.0},
    ]
    assert played.received("parameter") == [{"key": "size", "value": 1.5}]
    assert [(event["key"], event["sampler"], event["values"]) for event in played.received("sampler")] == [
        ("mass", "uniform", [1, 2]),
        ("wind", "multirange", [0, 1, 4, 5]),
    ]
    assert played.received("analytics")[0]["payload"] == b"some".hex()
    assert played.received("unknown") == [{"channel": str(foreign_channel), "payload": b"other".hex()}]


@pytest.mark.parametrize(
    "side",
    [
        b"short",
        side_channel(ENGINE, b"\x02\0\0\0"),
        side_channel(ENGINE, struct.pack("<if", 9, 1.0)),
        side_channel(PARAMETERS, struct.pack("<i", 99)),
        side_channel(PARAMETERS, string("a"), struct.pack("<iiif", 1, 1, 0, 1.0)),
        side_channel(ANALYTICS, b"long")[:-1],
    ],
)
def test_malformed_side_channels_end_the_player(side: bytes, tmp_path: Path) -> None:
    """The status is 4, and the log has the cause."""
    played = against(Trainer(side=side), tmp_path)
    assert played.code == 4
    assert "the trainer broke the protocol: got" in played.log


def test_each_message_may_have_statistics(tmp_path: Path) -> None:
    """There is one side channel message of each kind."""
    trainer = Trainer(steps=2)
    against(trainer, tmp_path, "--statistics")
    sides = [m.unity_output.rl_output.side_channel for m in trainer.messages[2:]]
    channel = uuid.UUID("a1d8f7b7-cec8-50f9-b78b-d3e165a78520")
    for number, side in enumerate(sides, 1):
        values = (("Average", number), ("Latest", number), ("Sum", 1), ("Histogram", number))
        assert side == b"".join(
            side_channel(channel, string(f"Player/{name}"), struct.pack("<fi", value, kind))
            for kind, (name, value) in enumerate(values)
        )


WRONG: dict[str, tuple[str, Any]] = {
    "none": ("goal", lambda rl_input: None),
    "too many": ("goal", lambda rl_input: [rl_input.agent_actions["Goal?team=0"].value.add() for _ in range(2)]),
    "too short": ("goal", lambda rl_input: rl_input.agent_actions["Goal?team=0"].value.add()),
    "a foreign_channel's": ("goal", lambda rl_input: rl_input.agent_actions["Other?team=0"].value.add()),
    "not finite": (
        "goal",
        lambda rl_input: rl_input.agent_actions["Goal?team=0"].value.add(continuous_actions=[float("nan")]),
    ),
    "too large": ("basic", lambda rl_input: rl_input.agent_actions["Basic?team=0"].value.add(discrete_actions=[3])),
    "very large": ("basic", lambda rl_input: rl_input.agent_actions["Basic?team=0"].value.add(discrete_actions=[300])),
    "negative": ("basic", lambda rl_input: rl_input.agent_actions["Basic?team=0"].value.add(discrete_actions=[-1])),
    "an unknown command": ("goal", lambda rl_input: setattr(rl_input, "command", 7)),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_actions_are_refused(case: str, tmp_path: Path) -> None:
    """The status is 4, while Unity would throw or silently continue."""
    game, wrong = WRONG[case]
    played = against(Trainer(act=lambda number, infos, rl_input: wrong(rl_input)), tmp_path, "--game", game)
    assert played.code == 4
    assert "broke the protocol: got" in played.log


def test_another_major_version_is_refused(tmp_path: Path) -> None:
    """The status is 4, before any game starts."""
    trainer = Trainer(version="2.0.0")
    assert against(trainer, tmp_path).code == 4
    assert len(trainer.calls) == 1


def test_status_400_ends_the_player(tmp_path: Path) -> None:
    """The exit status is 0, as after quit."""
    played = against(Trainer(quit_with=400), tmp_path)
    assert (played.code, "quit: status 400" in played.log) == (0, True)


def test_a_lost_trainer_ends_the_player(tmp_path: Path) -> None:
    """The exit status is 0 as with Unity, and the log has the cause."""
    trainer = Trainer(act=lambda number, infos, rl_input: server.stop(None))
    with serving(trainer.answer) as (port, server):
        played = play(tmp_path, port)
    assert (played.code, "lost the trainer" in played.log) == (0, True)


def test_the_player_retries_until_a_trainer_listens(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        player = Background(tmp_path, port)
        listener.accept()[0].close()
    trainer = Trainer()
    with serving(trainer.answer, port):
        player.join()
    assert (player.played.code, len(trainer.outputs)) == (0, 6)


def test_the_player_gives_up_without_a_trainer(tmp_path: Path) -> None:
    """The exit status is 1 after the timeout."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    played = play(tmp_path, port, "--connect-timeout", "0.05")
    assert (played.code, f"no trainer on port {port}" in played.log) == (1, True)


@pytest.mark.parametrize(("fault", "calls"), [("at launch", 0), ("at initialize", 1), ("at reset", 2), ("after 3", 5)])
@pytest.mark.parametrize("kind", ["crash", "stall"])
def test_the_player_crashes_and_stalls_on_request(
    kind: str, fault: str, calls: int, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """It sends nothing more before the connection, after initialization, after a reset, or after some messages."""

    def stalled(when: str) -> None:
        raise Crash(f"stalled {when}")

    monkeypatch.setattr(unity_player_session, "stall", stalled)
    where, value = fault.split()
    trainer = Trainer(steps=9)
    played = against(trainer, tmp_path, f"--{kind}-{where}", value)
    assert (played.code, len(trainer.calls)) == (3, calls)
    assert capsys.readouterr().err.startswith(f"player: {kind}ed {fault}")


def test_the_player_can_end_the_conversation(tmp_path: Path) -> None:
    """As when the editor stops, it makes a call with status 400 and exits with status 0."""
    trainer = Trainer(steps=9)
    assert against(trainer, tmp_path, "--close-after", "2").code == 0
    assert (len(trainer.outputs), trainer.calls[-1]) == (2, b"\n\x03\x08\x90\x03")


@pytest.mark.parametrize("game", GAMES)
def test_the_player_sends_nan_on_request(game: str, tmp_path: Path) -> None:
    """The first number of the first agent that decides is NaN, or its reward if it observes only PNG files."""
    trainer = Trainer(steps=3)
    against(trainer, tmp_path, "--game", game, "--nan-after", "2")
    spoiled = []
    for infos in trainer.outputs:
        agent = next(a for _, agents in sorted(infos.items()) for a in agents.value if not a.done)
        numbers = [agent.reward] if game == "match3" else list(agent.observations[0].float_data.data)
        spoiled.append(bool(np.isnan(numbers[0])) and not np.isnan(numbers[1:]).any())
    assert spoiled == [False, False, True, True]


def test_the_player_runs_as_a_program_with_unitys_arguments(tmp_path: Path) -> None:
    """Launched like a build, it plays, crashes with status 3 and prints one line."""
    player = executable(tmp_path, "--game", "basic", "--crash-after", "2")
    trainer = Trainer()
    with serving(trainer.answer) as (port, _):
        command = [
            str(player),
            "-nographics",
            "-batchmode",
            "--mlagents-port",
            str(port),
            "-logFile",
            str(tmp_path / "l"),
        ]
        done = subprocess.run([*command, "--extra"], capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout) == (3, "player: crashed after 2 messages\n", "")
    assert len(trainer.outputs) == 2
    assert "crashed after 2 messages" in (tmp_path / "l").read_text()


def test_the_player_can_ignore_quit() -> None:
    """It stays alive after the end until it is killed."""
    with serving(Trainer().answer) as (port, _):
        command = [sys.executable, str(PLAYER), "--ignore-quit", "--mlagents-port", str(port)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            assert any("stalled after the end" in line for line in iter(process.stderr.readline, ""))
            assert process.poll() is None
            process.kill()


def test_the_null_trainer_counts_agent_steps(tmp_path: Path) -> None:
    """Each message of 12 agents that decide is 12 agent steps, over all players."""
    rates = null_trainer(["--game", "balance", "--areas", "12"], 0.2, players=2, warmup=5)
    assert rates.agent_steps == 12 * rates.messages > 0
    assert rates.player_cpu_us > 0


def test_the_null_trainer_reports_a_player_that_does_not_play() -> None:
    """The error has its status and log."""
    with pytest.raises(RuntimeError, match=r"(?s)status 3, .*crashed after 2 messages"):
        null_trainer(["--crash-after", "2"], 0.1)
