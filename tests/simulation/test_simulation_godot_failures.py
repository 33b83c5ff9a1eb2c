"""A Godot game that fails gives an error with player, phase and cause in time, and leaves no process."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import struct
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sparring.pipeline.bridges.godot.game import make_godot
from sparring.pipeline.bridges.player import PlayerFailed
from sparring.pipeline.messages.simulator import Step
from sparring.pipeline.specs import SpecError
from sparring.services.main import main
from tests.simulation.simulation_helpers import Trainer, act_for
from tests.simulation.test_simulation_godot import GAME, play

SOON_S = 0.2
INTRODUCTION, RESET, STEP = range(3)
PHASES = {INTRODUCTION: "connected", RESET: "first reset", STEP: "stepping"}


def fail(tmp_path: Path, fault: str, at: int, kind: type[Exception] = PlayerFailed, **options: Any) -> str:
    """Returns the error of a game with a fault, and checks that its process has ended."""
    started = tmp_path / "started"
    options |= {"started": str(started), "log": str(tmp_path / "log")}
    with pytest.raises(kind) as failed, closing(make_godot(path=GAME, port=0, fault=fault, at=at, **options)) as game:
        play(game, 4)
    with pytest.raises(ProcessLookupError):
        os.kill(json.loads(started.read_text())[1], 0)
    return str(failed.value)


@pytest.mark.parametrize(
    ("fault", "options", "cause"),
    [
        ("no_start", {}, r"the end of the game by exit status 7; expected a game that connects; .*ERROR: no display"),
        ("no_call", {"timeout_s": 1.0}, r"no connection to port \d+ within 1 s; .*control mode Training"),
    ],
)
def test_a_game_that_does_not_connect_fails_in_time(
    tmp_path: Path, fault: str, options: dict[str, Any], cause: str
) -> None:
    """The phase is launch; the message has the end of the log if the game ended."""
    assert re.search(rf"Godot game 0, launched: {cause}", fail(tmp_path, fault, -1, **options))


@pytest.mark.parametrize("at", PHASES)
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("crash", r"the end of the game by exit status 9; .*division by zero in player\.gd:7"),
        ("hang_up", r"the end of the connection by the game"),
        ("huge", r"a message of 2,147,483,648 bytes, more than the limit of 67,108,864"),
        ("no_json", r"b'GET / HTTP/1\.1', which is no JSON"),
        ("deep", r"b'\[+', which is no JSON"),
        ("a_list", r"a list where '\w+' was expected"),
        ("a_type", r"an answer of type 'surprise' where '\w+' was expected"),
    ],
)
def test_a_game_that_breaks_the_conversation_fails_in_any_phase(
    tmp_path: Path, fault: str, at: int, cause: str
) -> None:
    assert re.search(rf"Godot game 0, {PHASES[at]}: {cause}", fail(tmp_path, fault, at))


@pytest.mark.parametrize(
    ("fault", "at", "cause"),
    [
        ("nan", RESET, "agent 0's observation 'obs': NaN or infinity"),
        ('obs.1={"obs": [0, NaN]}', STEP, "agent 1's observation 'obs': 2 numbers where 1 were expected"),
        ('obs.1={"obs": [1e39]}', STEP, "agent 1's observation 'obs': NaN or infinity"),
        ('obs.2={"obs": ["1"]}', STEP, "agent 2's observation 'obs': ['1'] where numbers were expected"),
        ('obs.2={"obs": [[1], 2]}', STEP, "agent 2's observation 'obs': "),
        ('obs.3={"nothing": 1}', STEP, "agent 3's observation 'obs': None where numbers were expected"),
        ("obs.3=null", RESET, "agent 3's observation 'obs': None where numbers were expected"),
        ("obs", RESET, "None as 'obs' of 4 agents"),
        ("obs=[]", STEP, "0 entries as 'obs' of 4 agents"),
        ("reward", STEP, "None as 'reward' of 4 agents"),
        ("reward=[1, 2]", STEP, "2 entries as 'reward' of 4 agents"),
        ("reward.2=null", STEP, "agent 2's reward: None where numbers were expected"),
        ("reward.1=Infinity", STEP, "agent 1's reward: NaN or infinity"),
        ("reward.1=[1, 2]", STEP, "agent 1's reward: 2 numbers where 1 were expected"),
        ('done.1="yes"', STEP, "agent 1's done: 'yes' where true or false was expected"),
        ("done=7", STEP, "7 as 'done' of 4 agents"),
    ],
)
def test_a_game_with_invalid_values_fails_with_agent_and_field(tmp_path: Path, fault: str, at: int, cause: str) -> None:
    """NaN, wrong lengths and wrong types are invalid."""
    assert f"Godot game 0, {PHASES[at]}: {cause}" in fail(tmp_path, fault, at)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("n_agents", "None as n_agents"),
        ("n_agents=0", "0 agents; expected 1 to 65536"),
        ("n_agents=1000000000", "1000000000 agents"),
        ("n_agents=3", "observation_space "),
        ("observation_space=7", "observation_space 7; expected one map of spaces, or a list of 4"),
        (
            'observation_space.2={"obs": {"size": [2], "space": "box"}}',
            "agents 0 and 2 of walker?team=0 with different",
        ),
        ('observation_space={"obs": {"size": [2], "space": "ball"}}', "observation 'obs' of the space"),
        ('observation_space={"obs": {"size": ["x"], "space": "box"}}', "'x' as the size of 'obs'"),
        ('observation_space={"obs": {"size": [4096, 4097], "space": "box"}}', "observation 'obs' of size [4096, 4097]"),
        ('observation_space={"obs": {"size": [0], "space": "box"}}', "agents of walker?team=0 without observations"),
        ('action_space={"move": {"size": 2, "action_type": "magic"}}', "action 'move' of the space"),
        ('action_space={"move": {"size": 0, "action_type": "continuous"}}', "action 'move' of size 0"),
        ("action_space={}", "a behavior without actions"),
        ('agent_policy_names=["a"]', "agent_policy_names ['a']; expected 4 names"),
        ('agent_policy_names=["a?b", "c", "d", "e"]', "behavior id 'a?b'"),
    ],
)
def test_a_game_with_unsupported_spaces_fails_for_good(tmp_path: Path, fault: str, cause: str) -> None:
    """A restart would not help, so it raises SpecError."""
    assert f"Godot game 0, connected: {cause}" in fail(tmp_path, fault, INTRODUCTION, SpecError)


@pytest.mark.parametrize("fault", ["stall", "half"])
@pytest.mark.parametrize("at", [RESET, STEP])
def test_a_game_that_stalls_is_ended_at_the_deadline(tmp_path: Path, fault: str, at: int) -> None:
    """The deadline of an answer also applies within a message."""
    game = make_godot(path=GAME, port=0, fault=fault, at=at, started=str(tmp_path / "started"))
    litter = game._temporary_log
    assert litter is not None
    game._connection._timeout_s = SOON_S  # the phases before include the start of a process
    with pytest.raises(
        PlayerFailed, match=rf"game 0, {PHASES[at]}: no answer '(reset|step)' within 0\.2 s; .*timeout_s"
    ):
        play(game, 2)
    game.close()
    litter.unlink()  # the log of a game that failed stays
    with pytest.raises(ProcessLookupError):
        os.kill(json.loads((tmp_path / "started").read_text())[1], 0)


class SilentClient(io.StringIO):
    """A standard error stream that connects when the bridge prints where it waits, and then sends nothing."""

    lines: list[socket.socket]

    def write(self, text: str) -> int:
        if found := re.search(r"--port=(\d+)", text):
            self.lines = [socket.create_connection(("127.0.0.1", int(found[1])))]
        return super().write(text)


def test_a_client_that_sends_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both requests were sent, and the port is free again."""
    client = SilentClient()
    monkeypatch.setattr(sys, "stderr", client)
    with pytest.raises(PlayerFailed, match=r"Godot game 0, connected: no answer 'env_info' within 0\.2 s"):
        make_godot(port=0, timeout_s=SOON_S)
    (line,) = client.lines
    sizes, kinds = [], []
    with line.makefile("rb") as received:
        while head := received.read(4):
            sizes.append(struct.unpack("<I", head)[0])
            kinds.append(json.loads(received.read(sizes[-1]))["type"])
    assert kinds == ["handshake", "env_info"]
    with socket.create_server(("127.0.0.1", line.getpeername()[1])):
        line.close()


def test_the_wait_for_a_game_that_the_user_starts_has_a_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PlayerFailed, match=r"Godot game 0, launched: no connection"):
        make_godot(port=0, timeout_s=SOON_S)
    assert capsys.readouterr().err.count("waiting at 127.0.0.1:") == 1


def test_a_simulator_process_reports_the_crash_of_its_game(
    trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard error has one line with phase and cause, and the exit status lets the supervisor restart it."""

    def script(one: Trainer) -> int:
        peer = one.accept()
        hello, steps = peer.greet(), 0
        while (message := peer.next()) is not None:
            if isinstance(message, Step):
                steps += 1
                peer.send(act_for(message, hello))
        return steps

    options = [f"path={GAME}", "port=0", "fault=crash", "at=5", f"log={tmp_path / 'log'}"]
    arguments = [text for option in options for text in ("--option", option)]
    status = main(["simulator", "godot", "--connect", trainer.play(script), *arguments])
    assert (status, trainer.result()) == (1, 4)
    assert re.search(
        r"^sparring simulator godot: got Godot game 0, stepping: the end of the game by exit status 9; ",
        capsys.readouterr().err,
    )
