"""Programs of games: started, watched, ended; and Unity players that fail, phase by phase, as real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from sparring.pipeline.bridges.player import PlayerFailed, PlayerProgram
from sparring.pipeline.bridges.unity import game as bridge
from sparring.pipeline.bridges.unity.game import Unity
from sparring.pipeline.bridges.unity.game_server import PlayerGone
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.games.registry import make
from sparring.pipeline.messages.simulator import Bye, Step
from tests.simulation.simulation_helpers import Trainer, act_for
from tests.simulation.unity_bridge import LONG_S, Bridges, heard, play, step
from tests.simulation.unity_null_trainer import executable

SOON_S = 0.2
ROOT = Path(__file__).parents[2]


@pytest.fixture
def bridges(tmp_path: Path) -> Iterator[Bridges]:
    made = Bridges(tmp_path)
    yield made
    made.close()


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the players' logs, as a run sets it."""
    monkeypatch.setenv("SPARRING_LOGS", str(tmp_path / "run_logs"))
    return tmp_path / "run_logs"


# ---------------------------------------------------------------- any program


def shell(script: str, log: Path | None = None) -> PlayerProgram:
    """A program of some lines, started."""
    player = PlayerProgram("Game 0", ["/bin/sh", "-c", script], log=log)
    player.start()
    return player


def ended(player: PlayerProgram) -> None:
    """Returns when it has ended."""
    over = threading.Event()
    player.watch(over.set)
    assert over.wait(LONG_S)


def test_a_program_that_ends_is_told_with_status_and_the_end_of_its_log(tmp_path: Path) -> None:
    """Its name, how far it had come, how it ended, the last eight lines that are not empty."""
    player = shell("seq 100; echo; echo 'no display' >&2; exit 7", tmp_path / "logs" / "game.out")
    player.phase = "connected"
    ended(player)
    with pytest.raises(PlayerFailed) as failed:
        player.check()
    assert str(failed.value) == (
        "got Game 0, connected: the end of the game by exit status 7; expected a game that introduces itself; "
        "see its log; start it by hand to see it fail; "
        f"the end of {tmp_path}/logs/game.out: 94 | 95 | 96 | 97 | 98 | 99 | 100 | no display"
    )


def test_a_signal_has_its_name(tmp_path: Path) -> None:
    player = shell("kill -SEGV $$", tmp_path / "log")
    ended(player)
    with pytest.raises(PlayerFailed, match=rf"launched: the end of the game by signal SIGSEGV; .* \({tmp_path}/log: n"):
        player.check()


def test_a_log_of_any_bytes_and_any_length_is_told_in_one_line(tmp_path: Path) -> None:
    """Only the end is read."""
    log = tmp_path / "log"
    player = PlayerProgram("Game 0", None, log=log)
    log.write_bytes(b"a" * 2**24 + b"\n\xff\xfe\r\n  last  \n\n")
    said = str(player.failure("something"))
    assert said.endswith("\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER} | last")
    assert len(said) < 5000
    assert "\n" not in said


def listener(tmp_path: Path, on_term: str) -> tuple[PlayerProgram, subprocess.Popen[bytes]]:
    """A program that waits for SIGTERM, once it is ready for it."""
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    code = "import signal, sys; signal.signal(signal.SIGTERM, {}); open({!r}, 'w').close()\nwhile True: signal.pause()"
    player = PlayerProgram("Game 0", [sys.executable, "-S", "-c", code.format(on_term, str(ready))])
    player.start()
    ready.read_bytes()
    assert player._process is not None
    return player, player._process


def test_it_is_asked_to_end_when_it_does_not(tmp_path: Path) -> None:
    """By a signal that it can answer; a second close does nothing."""
    player, process = listener(tmp_path, "lambda *_: sys.exit(5)")
    player.close(0.0)
    assert process.returncode == 5
    player.close(0.0)
    player.check()


def test_what_does_not_listen_is_forced(tmp_path: Path) -> None:
    """Two seconds after it was asked."""
    player, process = listener(tmp_path, "signal.SIG_IGN")
    player.close(0.0)
    assert process.returncode == -signal.SIGKILL


def test_nobody_is_watched_where_nothing_was_started() -> None:
    """The editor is started by hand: nothing to check, to watch or to end."""
    player = PlayerProgram("the Unity editor", None)
    player.start()
    assert (player.phase, player.launched) == ("launched", False)
    player.watch(lambda: pytest.fail("nothing has ended"))
    player.check()
    player.close(0.0)


def test_it_gets_variables_beside_ours(tmp_path: Path) -> None:
    player = PlayerProgram(
        "Game 0", ["/bin/sh", "-c", "echo $COLOUR $HOME"], log=tmp_path / "log", environment={"COLOUR": "red"}
    )
    player.start()
    ended(player)
    assert (tmp_path / "log").read_text().split() == ["red", os.environ["HOME"]]


# ---------------------------------------------------------------- builds


def test_a_build_that_is_not_there_is_refused_with_what_is(tmp_path: Path) -> None:
    """Before anything is launched, or a port is taken."""
    for name in ("Balls.x86_64", "Balls_Data"):
        (tmp_path / name).touch()
    with pytest.raises(
        SettingsError, match=rf"got the build {tmp_path}/Ball, .* --env \(in .*Balls\.x86_64, Balls_Data\)"
    ):
        make("unity", 1, path=str(tmp_path / "Ball"))
    with pytest.raises(SettingsError, match="which is not there"):
        make("unity", 1, path=str(tmp_path / "no" / "such" / "folder"))
    with pytest.raises(SettingsError, match=r"Balls\.x86_64, which may not be run; .*chmod"):
        make("unity", 1, path=str(tmp_path / "Balls.x86_64"))
    with pytest.raises(SettingsError, match=r"which is a folder; .* \(in .*Balls\.x86_64"):
        make("unity", 1, path=str(tmp_path))


def test_the_extension_of_a_build_may_be_left_out(tmp_path: Path, bridges: Bridges) -> None:
    """As `mlagents-learn` allows."""
    executable(tmp_path, name="Game.x86_64")
    play(bridges(tmp_path / "Game"), 1)


def test_a_file_that_is_no_program_is_told(tmp_path: Path, bridges: Bridges) -> None:
    build = tmp_path / "Game"
    build.write_bytes(b"\x00not a program")
    build.chmod(0o755)
    unity = bridges(build)
    with pytest.raises(PlayerFailed, match=rf"Unity player 0, not started: '{build}', which cannot be started \(Exec"):
        unity.reset({}, 7)


def test_a_build_is_started_with_unitys_words_and_then_its_own(tmp_path: Path, bridges: Bridges, logs: Path) -> None:
    """Its own arguments stand last and keep their spaces; it plays without graphics; its log is in the run's folder."""
    said = tmp_path / "heard"
    build = executable(tmp_path, "--heard", str(said))
    unity = bridges(build, no_graphics=True, arguments="--level 'two words' -x", areas=2, time_scale=3.0)
    play(unity, 2)
    command = unity._player._command
    assert command == [
        *(str(build), "-nographics", "-batchmode", "--mlagents-port", str(unity._calls.port)),
        *("-logFile", str(logs / "Player-0.log"), "--level", "two words", "-x"),
    ]
    unity.close()
    assert heard(said, "arguments") == [{"graphics": False, "batch": True, "unknown": ["--level", "two words", "-x"]}]
    assert heard(said, "initialisation")[0]["num_areas"] == 2
    assert {"setting": "time_scale", "value": 3.0} in heard(said, "engine")
    assert "quit: quit" in (logs / "Player-0.log").read_text()


def test_with_graphics_and_without_a_run_it_gets_a_port_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARRING_LOGS", raising=False)
    unity = make("unity", 1, path=str(executable(tmp_path)), port=0)
    assert isinstance(unity, Unity)
    unity.close()
    assert unity._player._command == [str(tmp_path / "player"), "--mlagents-port", str(unity._calls.port)]


# ---------------------------------------------------------------- failures by phase


def fail(unity: Unity, steps: int = 9) -> str:
    """What is said of a player that fails; sees that its process is gone at the end."""
    with pytest.raises(PlayerFailed) as failed:
        play(unity, steps)
    process = unity._player._process
    unity.close()
    if process is not None:
        assert process.returncode is not None
    return str(failed.value)


CRASHES = {
    "--crash-at launch": ("launched", "a game that connects", "crashed at launch"),
    "--crash-at initialise": ("initialised", "a game that can be reset", "crashed at initialise"),
    "--crash-at reset": ("first reset", "agents that want to decide", "crashed at reset"),
    "--crash-after 4": ("stepping", "a game that goes on", "crashed after 4 messages"),
}


@pytest.mark.parametrize("words", CRASHES)
def test_a_player_that_crashes(words: str, tmp_path: Path, bridges: Bridges, logs: Path) -> None:
    """Its name, the phase, its exit status, and the end of both its own log and of what it wrote."""
    phase, expected, cause = CRASHES[words]
    said = fail(bridges(executable(tmp_path, *words.split())))
    assert re.fullmatch(
        rf"got Unity player 0, {phase}: the end of the game by exit status 3; expected {expected}; "
        rf"see its log; start it by hand to see it fail; the end of {logs}/Player-0\.log: .*ERROR {cause}; "
        rf"the end of {logs}/Player-0\.out: player: {cause}",
        said,
    ), said


@pytest.mark.parametrize("number", ["0", "3"])
def test_a_player_has_the_number_of_its_simulator(
    number: str, tmp_path: Path, bridges: Bridges, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its name and in those of its logs."""
    monkeypatch.setenv("SPARRING_NUMBER", number)
    unity = bridges(executable(tmp_path, "--crash-at", "launch"))
    assert f"Unity player {number}, launched" in fail(unity)
    assert {path.name for path in logs.iterdir()} == {f"Player-{number}.log", f"Player-{number}.out"}


STALLS = {
    "--stall-at launch": "launched",
    "--stall-at initialise": "initialised",
    "--stall-at reset": "first reset",
    "--stall-after 3": "stepping",
}


@pytest.mark.parametrize("words", STALLS)
def test_a_player_that_stalls(
    words: str, tmp_path: Path, bridges: Bridges, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline ends the wait, and the player is ended by force."""
    monkeypatch.setattr(bridge, "_FAREWELL_S", SOON_S)
    unity = bridges(executable(tmp_path, *words.split()))
    unity._timeout_s = SOON_S
    if "launch" in words:
        unity._connect_s = 2.0  # till its log is there
    said = fail(unity)
    assert re.search(
        rf"Unity player 0, {STALLS[words]}: nothing in (0\.2|2) s; .*raise --timeout-wait.*"
        rf"the end of {logs}/Player-0\.log: .*stalled {words[8:].replace('-', ' ')}",
        said,
    ), said


def test_a_player_that_sends_nan(tmp_path: Path, bridges: Bridges) -> None:
    """Agent and observation are named; it is told to quit, and does."""
    unity = bridges(executable(tmp_path, "--nan-after", "3"))
    with pytest.raises(
        PlayerFailed,
        match=r"Unity player 0, stepping: NaN or infinity in observation 'VectorSensor_size1' of agent 0 of "
        r"Goal\?team=0; .*find where the game divides by zero or overflows",
    ):
        play(unity, 5)
    process = unity._player._process
    unity.close()
    assert process is not None
    assert process.returncode == 0


def test_a_player_that_ends_by_itself(tmp_path: Path, bridges: Bridges) -> None:
    said = fail(bridges(executable(tmp_path, "--close-after", "3")))
    assert "Unity player 0, stepping: a player that ended the conversation; expected a game that goes on" in said


def test_a_player_that_is_killed_while_it_waits_for_actions(tmp_path: Path, bridges: Bridges) -> None:
    """The signal is named at the next step."""
    unity = bridges(executable(tmp_path))
    frame = play(unity, 3)[-1]
    process = unity._player._process
    assert process is not None
    process.kill()
    with pytest.raises(PlayerFailed, match="Unity player 0, stepping: the end of the game by signal SIGKILL"):
        step(unity, frame)


def test_a_player_whose_connection_ends_before_its_process(tmp_path: Path, bridges: Bridges) -> None:
    """Its exit status is waited for a moment, for it says more than the broken connection."""
    build, gate = executable(tmp_path), tmp_path / "gate"
    os.mkfifo(gate)
    build.write_text(build.read_text().replace("exec ", "").rstrip() + f"\nread x < {gate}\nexit 9\n")
    unity = bridges(build)
    frame = play(unity, 3)[-1]
    process = unity._player._process
    assert process is not None
    (inner,) = psutil.Process(process.pid).children()
    inner.kill()
    gone = unity._calls.receive(LONG_S)
    assert isinstance(gone, PlayerGone)
    assert gone.why == "the player broke the connection off"
    opener = threading.Thread(target=lambda: gate.write_text("\n"))
    opener.start()
    unity._calls.gone(gone.why)
    with pytest.raises(PlayerFailed, match="Unity player 0, stepping: the end of the game by exit status 9"):
        step(unity, frame)
    opener.join()


# ---------------------------------------------------------------- the end


def test_a_player_that_is_told_to_quit_ends_in_order(tmp_path: Path, bridges: Bridges) -> None:
    """With status 0, also right after the reset."""
    for steps in (0, 3):
        unity = bridges(executable(tmp_path))
        play(unity, steps)
        process = unity._player._process
        unity.close()
        assert process is not None
        assert process.returncode == 0


def test_a_player_that_ignores_quit_is_ended(tmp_path: Path, bridges: Bridges, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its time, by a signal."""
    assert bridge._FAREWELL_S <= 5
    monkeypatch.setattr(bridge, "_FAREWELL_S", SOON_S)
    unity = bridges(executable(tmp_path, "--ignore-quit"))
    play(unity, 2)
    process = unity._player._process
    unity.close()
    assert process is not None
    assert process.returncode == -signal.SIGTERM


def test_a_bridge_that_was_never_reset_ends_at_once(tmp_path: Path) -> None:
    """Nothing was launched."""
    unity = make("unity", 1, path=str(executable(tmp_path)), port=0)
    assert isinstance(unity, Unity)
    unity.close()
    assert not unity._player.launched


def simulate(trainer: Trainer, script: Any, folder: Path, *words: str, **environment: str) -> tuple[int, str]:
    """`sparring simulator unity` with a player of these words: its exit status and standard error."""
    build = executable(folder, *words)
    command = [sys.executable, "-m", "sparring", "simulator", "unity", "--connect", trainer.play(script)]
    command += ["--option", f"path={build}", "--option", "port=0", "--option", "no_graphics=true"]
    variables = {**os.environ, "SPARRING_NUMBER": "0", "SPARRING_LOGS": str(folder), **environment}
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=40, check=False)
    trainer.result()
    return done.returncode, done.stdout + done.stderr


def steps_then_bye(count: int) -> Any:
    """A trainer that answers so many Steps."""

    def script(one: Trainer) -> None:
        peer = one.accept()
        hello, done = peer.greet(), 0
        assert hello.behaviors == {}
        while (told := peer.next()) is not None and not isinstance(told, Bye):
            if not isinstance(told, Step):
                hello.behaviors.update(getattr(told, "behaviors", {}))
            elif done == count:
                peer.send(Bye(reason="enough"))
            else:
                peer.send(act_for(told, hello))
                done += 1

    return script


def test_after_bye_the_player_gets_quit_and_the_steps_are_counted(trainer: Trainer, tmp_path: Path) -> None:
    """The whole program: Bye, quit, exit status 0, and its last line."""
    status, said = simulate(trainer, steps_then_bye(20), tmp_path, "--areas", "4")
    assert status == 0, said
    assert json.loads(said.splitlines()[-1])["steps"] == {"Goal": 80}
    assert "quit: quit" in (tmp_path / "Player-0.log").read_text()


def test_a_failed_player_is_told_in_one_line(trainer: Trainer, tmp_path: Path) -> None:
    """Exit status 1: another start may go well."""
    status, said = simulate(trainer, steps_then_bye(20), tmp_path, "--crash-after", "5")
    assert status == 1
    (line,) = said.splitlines()
    assert line.startswith(
        "sparring simulator unity: PlayerFailed: got Unity player 0, stepping: the end of the game by exit status 3; "
    )


def test_the_line_of_a_failed_player_is_short_enough_for_the_supervisor(tmp_path: Path) -> None:
    """It shows the last 2000 characters of a simulator's standard error: name, phase and cause must be among them."""
    log, more = tmp_path / "Player-0.out", tmp_path / "Player-0.log"
    for path in (log, more):
        path.write_text(
            "".join(f"{'at Game.Player.Update () in a file with a long name ' * 10}{n}\n" for n in range(50))
        )
    player = PlayerProgram("Unity player 0", None, log=log, more=(more,))
    line = f"sparring simulator unity: PlayerFailed: {player.failure('the end of the game by exit status 3')}\n"
    assert "Unity player 0, not started: the end" in line[-2000:]


def test_under_its_watcher_nothing_outlives_a_killed_bridge(trainer: Trainer, tmp_path: Path) -> None:
    """The bridge dies without a word; the player, which ignores that the trainer is gone, goes with it."""
    build = executable(tmp_path, "--ignore-quit")
    reader, writer = os.pipe()
    alive: list[psutil.Process] = []

    def script(one: Trainer) -> None:
        peer = one.accept()
        hello, done = peer.greet(), 0
        while (told := peer.next()) is not None:
            if isinstance(told, Step):
                done += 1
                if done == 5:
                    (bridge_process,) = psutil.Process(watcher.pid).children()
                    alive.extend(psutil.Process(watcher.pid).children(recursive=True))
                    bridge_process.kill()
                    return
                peer.send(act_for(told, hello))
            elif not isinstance(told, Bye):
                hello.behaviors.update(getattr(told, "behaviors", {}))

    command = [
        sys.executable,
        "-m",
        "sparring.services.process.watcher",
        str(reader),
        "--",
        sys.executable,
        "-m",
        "sparring",
    ]
    command += ["simulator", "unity", "--connect", trainer.address, "--option", f"path={build}", "--option", "port=0"]
    with ExitStack() as stack:
        for end in (reader, writer):
            stack.callback(os.close, end)
        watcher = subprocess.Popen(command, pass_fds=(reader,), cwd=ROOT, stderr=subprocess.DEVNULL)
        trainer.play(script)
        trainer.result()
        assert watcher.wait(LONG_S) == -signal.SIGKILL or watcher.returncode != 0
    assert len(alive) == 2
    _, left = psutil.wait_procs(alive, timeout=5)
    assert not left
