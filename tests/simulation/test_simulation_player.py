"""Programs of games are started, watched and ended, and Unity builds get their arguments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sparring.pipeline.bridges.player import PlayerFailed, PlayerProgram
from sparring.pipeline.bridges.unity.game import Unity
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.games.registry import make
from tests.simulation.unity_bridge import LONG_S, Bridges, play, player_events
from tests.simulation.unity_null_trainer import executable

SOON_S = 0.2
ROOT = Path(__file__).parents[2]


def ended(player: PlayerProgram) -> None:
    """Waits until a program has ended."""
    over = threading.Event()
    player.watch(over.set)
    assert over.wait(LONG_S)


# ---------------------------------------------------------------- any program


def shell(script: str, log: Path | None = None) -> PlayerProgram:
    """Starts a program of the given shell script."""
    player = PlayerProgram("Game 0", ["/bin/sh", "-c", script], log=log)
    player.start()
    return player


def test_a_program_that_ends_is_reported_with_status_and_end_of_log(tmp_path: Path) -> None:
    """The report has name, phase, exit status and the last eight lines that are not empty."""
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


def test_a_signal_is_reported_by_name(tmp_path: Path) -> None:
    player = shell("kill -SEGV $$", tmp_path / "log")
    ended(player)
    with pytest.raises(PlayerFailed, match=rf"launched: the end of the game by signal SIGSEGV; .* \({tmp_path}/log: n"):
        player.check()


def test_a_log_of_any_bytes_and_any_length_is_reported_in_one_line(tmp_path: Path) -> None:
    """Only its end is read."""
    log = tmp_path / "log"
    player = PlayerProgram("Game 0", None, log=log)
    log.write_bytes(b"a" * 2**24 + b"\n\xff\xfe\r\n  last  \n\n")
    text = str(player.failure("something"))
    assert text.endswith("\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER} | last")
    assert len(text) < 5000
    assert "\n" not in text


def listener(tmp_path: Path, on_term: str) -> tuple[PlayerProgram, subprocess.Popen[bytes]]:
    """Returns a program that is ready for SIGTERM."""
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    code = "import signal, sys; signal.signal(signal.SIGTERM, {}); open({!r}, 'w').close()\nwhile True: signal.pause()"
    player = PlayerProgram("Game 0", [sys.executable, "-S", "-c", code.format(on_term, str(ready))])
    player.start()
    ready.read_bytes()
    assert player._process is not None
    return player, player._process


def test_a_program_that_does_not_end_receives_sigterm(tmp_path: Path) -> None:
    """It can handle the signal; a second close does nothing."""
    player, process = listener(tmp_path, "lambda *_: sys.exit(5)")
    player.close(0.0)
    assert process.returncode == 5
    player.close(0.0)
    player.check()


def test_a_program_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """This happens two seconds after the signal."""
    player, process = listener(tmp_path, "signal.SIG_IGN")
    player.close(0.0)
    assert process.returncode == -signal.SIGKILL


def test_without_a_program_nothing_is_watched() -> None:
    """The user starts the editor, so there is nothing to check, watch or end."""
    player = PlayerProgram("the Unity editor", None)
    player.start()
    assert (player.phase, player.launched) == ("launched", False)
    player.watch(lambda: pytest.fail("nothing has ended"))
    player.check()
    player.close(0.0)


# ---------------------------------------------------------------- builds


def test_a_missing_build_is_refused_with_the_existing_ones(tmp_path: Path) -> None:
    """This happens before a launch and before a port is used."""
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
    """`mlagents-learn` allows the same."""
    executable(tmp_path, name="Game.x86_64")
    play(bridges(tmp_path / "Game"), 1)


def test_a_file_that_is_not_executable_is_refused(tmp_path: Path, bridges: Bridges) -> None:
    build = tmp_path / "Game"
    build.write_bytes(b"\x00not a program")
    build.chmod(0o755)
    unity = bridges(build)
    with pytest.raises(PlayerFailed, match=rf"Unity player 0, not started: '{build}', which cannot be started \(Exec"):
        unity.reset({}, 7)


def test_a_build_is_started_with_unitys_arguments_and_then_its_own(
    tmp_path: Path, bridges: Bridges, logs: Path
) -> None:
    """Its own arguments are last and keep their spaces; it has no graphics, and its log is in the run's folder."""
    events = tmp_path / "events"
    build = executable(tmp_path, "--events", str(events))
    unity = bridges(build, no_graphics=True, arguments="--level 'two words' -x", areas=2, time_scale=3.0)
    play(unity, 2)
    assert unity._program is not None
    assert unity._connection is not None
    command = unity._program._command
    assert command == [
        *(str(build), "-nographics", "-batchmode", "--mlagents-port", str(unity._connection.port)),
        *("-logFile", str(logs / "Player-0.log"), "--level", "two words", "-x"),
    ]
    unity.close()
    assert player_events(events, "arguments") == [
        {"graphics": False, "batch": True, "unknown": ["--level", "two words", "-x"]}
    ]
    assert player_events(events, "initialization")[0]["num_areas"] == 2
    assert {"setting": "time_scale", "value": 3.0} in player_events(events, "engine")
    assert "quit: status 400" in (logs / "Player-0.log").read_text()


def test_with_graphics_and_without_a_run_a_build_gets_only_a_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPARRING_LOGS", raising=False)
    unity = make("unity", 1, path=str(executable(tmp_path)), port=0)
    assert isinstance(unity, Unity)
    unity.close()
    assert unity._launch(4321)._command == [str(tmp_path / "player"), "--mlagents-port", "4321"]


@pytest.mark.parametrize(
    ("status", "announced", "what"),
    [
        (0, "", "an orderly end of the game by exit status 0"),
        (
            0,
            "an orderly end of the game (out of memory)",
            "an orderly end of the game \\(out of memory\\) by exit status 0",
        ),
        (3, "an orderly end of the game", "an orderly end of the game by exit status 3"),
        (3, "", "the end of the game by exit status 3"),
    ],
)
def test_an_orderly_end_is_named_with_its_exit_status(status: int, announced: str, what: str) -> None:
    """A program announces it, or ends with the status 0."""
    program = PlayerProgram("Game 0", ["/bin/sh", "-c", f"exit {status}"])
    program.start()
    with pytest.raises(PlayerFailed, match=f"got Game 0, launched: {what}; expected a game that connects; "):
        program.check(20.0, announced)
    program.close()
