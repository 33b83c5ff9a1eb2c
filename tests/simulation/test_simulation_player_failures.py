"""Unity players that fail or end are reported in each phase, as real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from sparring.pipeline.bridges.player import PlayerFailed, PlayerProgram
from sparring.pipeline.bridges.unity import game as bridge
from sparring.pipeline.bridges.unity.game import Unity
from sparring.pipeline.games.registry import make
from sparring.pipeline.messages.simulator import Bye, Fault, Step
from sparring.services.process.hosting import ProcessHost
from tests.simulation.simulation_helpers import Trainer, act_for
from tests.simulation.unity_bridge import LONG_S, Bridges, play, step
from tests.simulation.unity_null_trainer import executable

SOON_S = 0.2
ROOT = Path(__file__).parents[2]


def ended(player: PlayerProgram) -> None:
    """Waits until a program has ended."""
    over = threading.Event()
    player.watch(over.set)
    assert over.wait(LONG_S)


def program_of(unity: Unity) -> PlayerProgram:
    """Returns the program of a player that was started."""
    assert unity._program is not None
    return unity._program


# ---------------------------------------------------------------- failures by phase


def fail(unity: Unity, steps: int = 9) -> str:
    """Returns the error of a player that fails, and checks that its process has ended."""
    with pytest.raises(PlayerFailed) as failed:
        play(unity, steps)
    process = program_of(unity)._process
    unity.close()
    if process is not None:
        assert process.returncode is not None
    return str(failed.value)


CRASHES = {
    "--crash-at launch": ("launched", "a game that connects", "crashed at launch"),
    "--crash-at initialize": ("initialized", "a game that can be reset", "crashed at initialize"),
    "--crash-at reset": ("first reset", "agents that want to decide", "crashed at reset"),
    "--crash-after 4": ("stepping", "a game that keeps running", "crashed after 4 messages"),
}


@pytest.mark.parametrize("options", CRASHES)
def test_a_player_that_crashes_is_reported_with_phase_and_cause(
    options: str, tmp_path: Path, bridges: Bridges, logs: Path
) -> None:
    """The error has name, phase, exit status, and the ends of its log and of its output."""
    phase, expected, cause = CRASHES[options]
    error = fail(bridges(executable(tmp_path, *options.split())))
    assert re.fullmatch(
        rf"got Unity player 0, {phase}: the end of the game by exit status 3; expected {expected}; "
        rf"see its log; start it by hand to see it fail; the end of {logs}/Player-0\.log: .*ERROR {cause}; "
        rf"the end of {logs}/Player-0\.out: player: {cause}",
        error,
    ), error


@pytest.mark.parametrize("number", ["0", "3"])
def test_a_player_has_the_number_of_its_simulator(
    number: str, tmp_path: Path, bridges: Bridges, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name and those of its logs have that number."""
    monkeypatch.setenv("SPARRING_NUMBER", number)
    unity = bridges(executable(tmp_path, "--crash-at", "launch"))
    assert f"Unity player {number}, launched" in fail(unity)
    assert {path.name for path in logs.iterdir()} == {f"Player-{number}.log", f"Player-{number}.out"}


STALLS = {
    "--stall-at launch": "launched",
    "--stall-at initialize": "initialized",
    "--stall-at reset": "first reset",
    "--stall-after 3": "stepping",
}


@pytest.mark.parametrize("options", STALLS)
def test_a_player_that_stalls_is_killed_at_the_deadline(
    options: str, tmp_path: Path, bridges: Bridges, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge, "_FAREWELL_S", SOON_S)
    unity = bridges(executable(tmp_path, *options.split()))
    connect_s = 2.0 if "launch" in options else LONG_S  # until its log exists
    unity._player = replace(unity._player, timeout_s=SOON_S, connect_s=connect_s)
    error = fail(unity)
    assert re.search(
        rf"Unity player 0, {STALLS[options]}: nothing in (0\.2|2) s; .*raise --timeout-wait.*"
        rf"the end of {logs}/Player-0\.log: .*stalled {options[8:].replace('-', ' ')}",
        error,
    ), error


def test_a_player_that_sends_nan_is_reported_with_agent_and_observation(tmp_path: Path, bridges: Bridges) -> None:
    """It receives quit and ends."""
    unity = bridges(executable(tmp_path, "--nan-after", "3"))
    with pytest.raises(
        PlayerFailed,
        match=r"Unity player 0, stepping: NaN or infinity in observation 'VectorSensor_size1' of agent 0 of "
        r"Goal\?team=0; .*find where the game divides by zero or overflows",
    ):
        play(unity, 5)
    process = program_of(unity)._process
    unity.close()
    assert process is not None
    assert process.returncode == 0


def test_a_player_that_ends_the_conversation_is_reported(tmp_path: Path, bridges: Bridges) -> None:
    error = fail(bridges(executable(tmp_path, "--close-after", "3")))
    what = "an orderly end of the game by exit status 0; expected a game that keeps running"
    assert f"Unity player 0, stepping: {what}; keep it running: it was closed" in error


def test_a_player_that_is_killed_while_it_waits_for_actions_is_reported(tmp_path: Path, bridges: Bridges) -> None:
    """The next step names the signal."""
    unity = bridges(executable(tmp_path))
    frame = play(unity, 3)[-1]
    process = program_of(unity)._process
    assert process is not None
    process.kill()
    with pytest.raises(PlayerFailed, match="Unity player 0, stepping: the end of the game by signal SIGKILL"):
        step(unity, frame)


def test_a_lost_connection_is_reported_with_the_exit_status(tmp_path: Path, bridges: Bridges) -> None:
    """The bridge waits briefly for the exit status, which explains more than the lost connection."""
    build, gate = executable(tmp_path), tmp_path / "gate"
    os.mkfifo(gate)
    build.write_text(build.read_text().replace("exec ", "").rstrip() + f"\nread x < {gate}\nexit 9\n")
    unity = bridges(build)
    frame = play(unity, 3)[-1]
    process = program_of(unity)._process
    assert process is not None
    (inner,) = psutil.Process(process.pid).children()
    inner.kill()
    assert unity._connection is not None
    event = unity._events.get(timeout=20)
    assert isinstance(event, Fault)
    assert event.got == "the player broke the connection"
    opener = threading.Thread(target=lambda: gate.write_text("\n"))
    opener.start()
    unity._events.put(event)
    with pytest.raises(PlayerFailed, match="Unity player 0, stepping: the end of the game by exit status 9"):
        step(unity, frame)
    opener.join()


# ---------------------------------------------------------------- the end


def test_a_player_that_receives_quit_ends_with_status_0(tmp_path: Path, bridges: Bridges) -> None:
    """This includes a quit right after the reset."""
    for steps in (0, 3):
        unity = bridges(executable(tmp_path))
        play(unity, steps)
        process = program_of(unity)._process
        unity.close()
        assert process is not None
        assert process.returncode == 0


def test_a_player_that_ignores_quit_is_ended(tmp_path: Path, bridges: Bridges, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal ends it after its time."""
    assert bridge._FAREWELL_S <= 5
    monkeypatch.setattr(bridge, "_FAREWELL_S", SOON_S)
    unity = bridges(executable(tmp_path, "--ignore-quit"))
    play(unity, 2)
    process = program_of(unity)._process
    unity.close()
    assert process is not None
    assert process.returncode == -signal.SIGTERM


def test_a_bridge_that_was_never_reset_ends_at_once(tmp_path: Path) -> None:
    """No program was launched."""
    unity = make("unity", 1, path=str(executable(tmp_path)), port=0)
    assert isinstance(unity, Unity)
    unity.close()
    assert unity._program is None


def simulate(trainer: Trainer, script: Any, folder: Path, *options: str, **environment: str) -> tuple[int, str]:
    """Runs `sparring simulator unity` with a player and returns exit status and standard error."""
    build = executable(folder, *options)
    command = [sys.executable, "-m", "sparring", "simulator", "unity", "--connect", trainer.play(script)]
    command += ["--option", f"path={build}", "--option", "port=0", "--option", "no_graphics=true"]
    variables = {**os.environ, "SPARRING_NUMBER": "0", "SPARRING_LOGS": str(folder), **environment}
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=40, check=False)
    trainer.result()
    return done.returncode, done.stdout + done.stderr


def steps_then_bye(count: int) -> Any:
    """Returns the script of a trainer that answers `count` Steps and then sends Bye."""

    def script(one: Trainer) -> None:
        peer = one.accept()
        hello, done = peer.greet(), 0
        assert hello.behaviors == {}
        while (message := peer.next()) is not None and not isinstance(message, Bye):
            if not isinstance(message, Step):
                hello.behaviors.update(getattr(message, "behaviors", {}))
            elif done == count:
                peer.send(Bye(reason="enough"))
            else:
                peer.send(act_for(message, hello))
                done += 1

    return script


def test_after_bye_the_player_gets_quit_and_the_steps_are_counted(trainer: Trainer, tmp_path: Path) -> None:
    """The whole program handles Bye and quit, exits with status 0, and prints its last line."""
    status, errors = simulate(trainer, steps_then_bye(20), tmp_path, "--areas", "4")
    assert status == 0, errors
    assert json.loads(errors.splitlines()[-1])["steps"] == {"Goal": 80}
    assert "quit: status 400" in (tmp_path / "Player-0.log").read_text()


def test_a_failed_player_is_reported_in_one_line(trainer: Trainer, tmp_path: Path) -> None:
    """The exit status is 1, because a restart may help."""
    status, errors = simulate(trainer, steps_then_bye(20), tmp_path, "--crash-after", "5")
    assert status == 1
    (line,) = errors.splitlines()
    assert line.startswith(
        "sparring simulator unity: got Unity player 0, stepping: the end of the game by exit status 3; "
    )


def test_the_line_of_a_failed_player_is_short_enough_for_the_supervisor(tmp_path: Path) -> None:
    """The supervisor shows the last 2000 characters of standard error, which must have name, phase and cause."""
    log, more = tmp_path / "Player-0.out", tmp_path / "Player-0.log"
    for path in (log, more):
        path.write_text(
            "".join(f"{'at Game.Player.Update () in a file with a long name ' * 10}{n}\n" for n in range(50))
        )
    player = PlayerProgram("Unity player 0", None, log=log, more=(more,))
    line = f"sparring simulator unity: {player.failure('the end of the game by exit status 3')}\n"
    assert "Unity player 0, not started: the end" in line[-2000:]


def test_the_watcher_ends_the_player_of_a_killed_bridge(trainer: Trainer, tmp_path: Path) -> None:
    """The player itself ignores the lost trainer; it ends with the process group of its watcher."""
    build = executable(tmp_path, "--ignore-quit")
    host = ProcessHost(tmp_path)
    processes: list[psutil.Process] = []

    def script(one: Trainer) -> None:
        peer = one.accept()
        hello, done = peer.greet(), 0
        while (message := peer.next()) is not None:
            if isinstance(message, Step):
                done += 1
                if done == 5:
                    (bridge_process,) = psutil.Process(watcher.pid).children()
                    processes.extend(psutil.Process(watcher.pid).children(recursive=True))
                    bridge_process.kill()
                    return
                peer.send(act_for(message, hello))
            elif not isinstance(message, Bye):
                hello.behaviors.update(getattr(message, "behaviors", {}))

    command = [sys.executable, "-m", "sparring", "simulator", "unity", "--connect", trainer.address]
    watcher = host.watched("bridge", [*command, "--option", f"path={build}", "--option", "port=0"], {})
    with closing(host):
        trainer.play(script)
        trainer.result()
        assert watcher.join(LONG_S)
    assert len(processes) == 2
    _, left = psutil.wait_procs(processes, timeout=5)
    assert not left
