"""Real runs beside each other, at addresses of others, with hasty signals, full consoles and broken simulators."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml

from sparring.pipeline.games.balance import Balance
from sparring.pipeline.messages.codec import FrameReader, to_bytes
from sparring.pipeline.messages.simulator import (
    VERSION,
    BehaviorReport,
    Decisions,
    Fault,
    Hello,
    Reset,
    Step,
    Welcome,
)
from sparring.services.process.hosting import SPARRING
from tests.services.services_helpers import HANG_S, Training, balanced, config, json_lines

pytestmark = pytest.mark.slow

IMPORTS_S = 15.0
"""Less than any deadline for what does not start."""
ENDLESS = {"max_steps": 10**9, "summary_freq": 1024, "buffer_size": 1024, "count": 1}


def again(training: Training, file: Path, *arguments: str, closed: bool = False) -> subprocess.CompletedProcess[str]:
    """Starts the run of `training` a second time, also with all standard streams closed, and waits for its end."""
    command = [sys.executable, "-m", "sparring", "train", str(file), "--results-dir", str(training.directory.parent)]
    command += ["--run-id", training.directory.name, "--no-export", *arguments]
    if closed:
        command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)


@contextlib.contextmanager
def blocked_signals() -> Iterator[None]:
    """Blocks the signals that end a run, as a program does that waits for them in a thread; children inherit that."""
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def test_refused_second_start_killed_simulator_and_hangup_lose_no_steps(tmp_path: Path) -> None:
    """Two signals at once are one, and the run that they ended is resumed without any standard stream."""
    file = config(tmp_path, **ENDLESS)
    with blocked_signals():
        training = Training(tmp_path, str(file))
    training.updates(1)
    children = psutil.Process(training.process.pid).children(True)  # a watcher waits for the signals in a thread
    others = [one.pid for one in children if "watcher" not in " ".join(one.cmdline())]
    processes = [training.process.pid, *others]
    blocked = {
        line for pid in processes for line in Path(f"/proc/{pid}/status").read_text().split("\n") if "SigBlk" in line
    }
    assert blocked == {"SigBlk:\t0000000000000000"}
    results = training.directory.parent
    for argument in ("--resume", "--force"):
        second = Training(results, str(file), argument)
        assert second.end() == 2, second.lines
        assert str(training.process.pid) in "\n".join(second.lines)
    training.kill("simulator-0")
    training.wait_for(lambda lines: any("failed" in line and "simulator-0" in line for line in lines))
    training.updates(2)
    training.process.send_signal(signal.SIGHUP)
    training.process.send_signal(signal.SIGTERM)
    assert training.end() == 0, "\n".join(training.lines)
    assert training.summary["status"] == "stopped"
    result = training.summary["behaviors"]["Balance"]
    assert result["checkpoint"] is not None
    assert (balanced(result["step_counts"]), result["step_counts"]["lost"]) == (True, 0)
    assert any("--resume" in line for line in training.lines)
    more = training.summary["behaviors"]["Balance"]["steps"] + 2048
    assert again(training, file, "--resume", "--max-steps", str(more), closed=True).returncode == 0
    assert training.summary["status"] == "completed"
    assert training.summary["behaviors"]["Balance"]["steps"] >= more


def test_interrupt_during_an_update_without_end_keeps_what_it_has_learned_and_exports_it(tmp_path: Path) -> None:
    """The learner looks at the stop between two minibatches."""
    file = config(tmp_path, **ENDLESS | {"num_epoch": 10**6})
    plain = yaml.safe_load(file.read_text())
    plain["behaviors"]["Balance"]["trainer_type"] = "poca"
    file.write_text(yaml.safe_dump(plain))
    training = Training(tmp_path, str(file), export=True)
    shown, deadline = training.directory / "status.json", time.monotonic() + HANG_S
    while not shown.exists() or not re.search(r'"minibatches/Balance":\{"count":[1-9]', shown.read_text()):
        if time.monotonic() > deadline or training.process.poll() is not None:
            training.process.kill()
            raise AssertionError("no update began:\n" + "\n".join(training.lines))
        time.sleep(0.05)
    training.process.send_signal(signal.SIGINT)
    assert training.end() == 0, "\n".join(training.lines)
    result = training.summary["behaviors"]["Balance"]
    assert (result["updates"], result["steps"]) == (1, result["step_counts"]["trained"])
    assert Path(result["checkpoint"]).is_dir()
    assert training.directory.stat().st_mode & 0o777 == 0o700  # docs/security.md
    assert (training.directory / "Balance.onnx").is_file()


@pytest.mark.parametrize("library", ["numpy", "pydantic_core", "zmq"])
def test_interrupt_while_libraries_are_imported_ends_the_command_in_order(tmp_path: Path, library: str) -> None:
    """Some libraries swallow an interrupt, or raise another error for it."""
    file = config(tmp_path, **ENDLESS)
    command = [sys.executable, "-m", "sparring", "train", str(file), "--results-dir", str(tmp_path), "--run-id", "run"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    maps, deadline = Path(f"/proc/{process.pid}/maps"), time.monotonic() + HANG_S
    while f"/{library}/" not in maps.read_text():
        if time.monotonic() > deadline or process.poll() is not None:
            process.kill()
            raise AssertionError(f"{library} was not imported")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode in (0, 128 + signal.SIGINT), output
    assert "Traceback" not in output


def test_interrupt_while_services_wait_for_imports_without_end_ends_the_run_at_once(tmp_path: Path) -> None:
    """Nothing has begun that could be lost. Else each service would be waited for, and the imports themselves."""
    training = Training(tmp_path, str(config(tmp_path, **ENDLESS)), tensorboard=True, forked=False)
    server: list[psutil.Process] = []
    deadline = time.monotonic() + HANG_S
    while not server:
        assert time.monotonic() < deadline, training.lines
        children = psutil.Process(training.process.pid).children()
        server = [one for one in children if "sparring.services.process.forking" in one.cmdline()]
    server[0].suspend()
    training.wait_for(lambda lines: any("run_started" in line for line in lines))
    training.process.send_signal(signal.SIGINT)
    before = time.monotonic()
    assert training.end() == 0, "\n".join(training.lines)
    assert time.monotonic() - before < IMPORTS_S
    assert not [line for line in training.lines if re.search("failed|waiting|not_started", line)], training.lines


def messages(connection: socket.socket) -> Iterator[object]:
    """Yields what stepping sends."""
    reader = FrameReader()
    while True:
        while (message := reader.next()) is None:
            reader.feed(connection.recv(65536))
        yield message


def rows(terminal: int) -> list[str]:
    """Reads a terminal until all its writers have closed it; returns its rows, from which progress was removed."""
    found = b""
    with contextlib.suppress(OSError):
        while block := os.read(terminal, 65536):
            found += block
    return [row.rpartition("\r\x1b[K")[2].strip() for row in found.decode().split("\n")]


def test_console_of_a_run_has_whole_lines_only_and_the_finished_run_is_not_resumed(tmp_path: Path) -> None:
    file = config(tmp_path, **ENDLESS | {"max_steps": 2048})
    command = [sys.executable, "-m", "sparring", "train", str(file), "--results-dir", str(tmp_path), "--run-id", "run"]
    command += ["--no-export"]
    ours, terminal = pty.openpty()
    with subprocess.Popen(command, stdout=terminal, stderr=terminal) as training:
        os.close(terminal)
        lines = rows(ours)
    os.close(ours)
    assert training.returncode == 0, lines
    shown = [line for line in lines if line]
    assert len([line for line in shown if line.startswith("Balance  step ")]) >= 1
    assert all(re.match(r"\d\d:\d\d:\d\d  |Balance  step [\d,]+ of 2,048  ", line) for line in shown), shown
    again = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout.startswith("run has completed: Balance 2,048 of 2,048 steps")


def test_terminal_that_stops_writers_in_the_background_stops_no_service(tmp_path: Path) -> None:
    """Each service has a process group of its own, which a terminal with `stty tostop` takes for the background."""
    file = config(tmp_path, **ENDLESS | {"max_steps": 4096})
    command = [sys.executable, "-m", "sparring", "train", str(file), "--results-dir", str(tmp_path), "--run-id", "run"]
    ours, terminal = pty.openpty()
    attributes = termios.tcgetattr(terminal)
    attributes[3] |= termios.TOSTOP
    termios.tcsetattr(terminal, termios.TCSANOW, attributes)
    with subprocess.Popen(
        [*command, "--no-export"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as training:
        os.close(terminal)
        lines = rows(ours)
    os.close(ours)
    assert training.returncode == 0, lines
    assert any(line.startswith("Balance  step ") for line in lines), lines
    assert not any("heartbeat_missed" in line for line in lines), lines


def test_port_in_use_is_refused_and_leaves_no_folder(tmp_path: Path) -> None:
    file = config(tmp_path, **ENDLESS)
    plain = yaml.safe_load(file.read_text())
    with socket.create_server(("127.0.0.1", 0)) as server:
        plain["pipeline"]["address"] = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        file.write_text(yaml.safe_dump(plain))
        training = Training(tmp_path, str(file))
        assert training.end() == 2, "\n".join(training.lines)
    assert not training.directory.exists()


def test_unix_address_takes_no_file_and_no_socket_of_others(tmp_path: Path) -> None:
    file = config(tmp_path, **ENDLESS)
    plain = yaml.safe_load(file.read_text())
    path = tmp_path / "own"
    plain["pipeline"]["address"] = f"unix://{path}"
    file.write_text(yaml.safe_dump(plain))
    path.write_text("precious")
    assert Training(tmp_path, str(file), run_id="file").end() != 0
    assert path.read_text() == "precious"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        assert Training(tmp_path, str(file), run_id="socket").end() != 0
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_hasty_simulators_and_one_of_huge_numbers_disturb_no_other(tmp_path: Path) -> None:
    """A connection may be gone before stepping has written its first byte; 3.4e38 would end any mean and variance."""
    file = config(tmp_path, **ENDLESS)
    plain = yaml.safe_load(file.read_text())
    plain["behaviors"]["Balance"]["network_settings"]["normalize"] = True
    file.write_text(yaml.safe_dump(plain))
    training = Training(tmp_path, str(file))
    training.updates(1)
    (line,) = (line for line in training.lines if "run_started" in line)
    host, port = re.search(r"tcp://([\d.]+):(\d+)", line).groups()  # type: ignore[union-attr]
    data = to_bytes(Hello(version=VERSION, name="hasty", behaviors=dict(Balance().behaviors())))
    for _ in range(200):
        with socket.create_connection((host, int(port))) as hasty:
            hasty.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            hasty.sendall(data)
    with socket.create_connection((host, int(port)), timeout=HANG_S) as huge:
        huge.sendall(data)
        received = messages(huge)
        assert [type(next(received)) for _ in range(2)] == [Welcome, Reset]
        seen, agents = np.full((2, 8), 3.4e38, np.float32), np.array([1, 2])
        decisions = Decisions(agents=agents, observations=(seen,), rewards=np.zeros(2, np.float32))
        report = BehaviorReport(behavior="Balance?team=0", decisions=decisions)
        huge.sendall(to_bytes(Step(sequence=0, reports=(report,))))
        fault = next(received)
    assert isinstance(fault, Fault)
    assert fault.code == "not_finite"
    training.updates(2)
    training.process.send_signal(signal.SIGINT)
    assert training.end() == 0, "\n".join(training.lines)
    assert not [line for line in training.lines if "failed" in line], "\n".join(training.lines)
    result = training.summary["behaviors"]["Balance"]
    assert (balanced(result["step_counts"]), result["step_counts"]["lost"]) == (True, 0)


def test_stepping_that_is_told_to_end_takes_its_simulators_back_and_a_learner_that_is_hung_up_saves(
    tmp_path: Path,
) -> None:
    """It says goodbye to them, and they end before their first steps are known: that is no mistake of theirs.

    The end of a session may hang up all of its processes.
    """
    training = Training(tmp_path, str(config(tmp_path, **ENDLESS)))
    training.wait_for(lambda lines: any("read_as" in line for line in lines))
    os.kill(training.pid("stepping-0"), signal.SIGTERM)
    training.updates(1)
    os.kill(training.pid("learning-Balance"), signal.SIGHUP)
    said = "part=learning-Balance  error=ended without a request to stop"
    training.wait_for(lambda lines: any(said in line for line in lines))
    assert list(training.directory.glob("Balance/checkpoint-*"))
    training.process.send_signal(signal.SIGINT)
    assert training.end() == 0, "\n".join(training.lines)


def test_folder_of_logs_that_was_removed_ends_no_run(tmp_path: Path) -> None:
    training = Training(tmp_path, str(config(tmp_path, **ENDLESS)))
    training.updates(1)
    pids = [training.pid(part) for part in ("assembly", "simulator-0")]
    shutil.rmtree(training.directory / "logs")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for said in ("failed  part=assembly", "failed  part=simulator-0"):
        training.wait_for(lambda lines: any(said in line for line in lines))  # noqa: B023
    training.updates(2)
    training.process.send_signal(signal.SIGINT)
    assert training.end() == 0, "\n".join(training.lines)


def test_pipes_and_loops_in_the_place_of_files_are_told_at_once(tmp_path: Path) -> None:
    file = config(tmp_path, **ENDLESS | {"max_steps": 2048})
    training = Training(tmp_path, str(file))
    assert training.end() == 0, "\n".join(training.lines)
    folder = training.directory
    (checkpoint,) = folder.glob("Balance/checkpoint-*")
    for other in folder.glob("Balance/recovery-*"):  # on a slow machine
        shutil.rmtree(other)
    resumed = ["train", str(file), "--results-dir", str(folder.parent), "--run-id", folder.name, "--resume"]
    resumed += ["--max-steps", "4096", "--no-export"]
    cases = [
        (folder / "summary.json", ["status", str(folder)]),
        (checkpoint / "state.json", ["export", str(folder)]),
        (checkpoint / "state.json", ["evaluate", str(folder), "--episodes", "1"]),
        (folder / "coordination.json", resumed),  # last: its learner may save a newer checkpoint before it ends
    ]
    for path, words in cases:
        path.rename(path.with_suffix(".away"))
        os.mkfifo(path)
        said = subprocess.run([*SPARRING, *words], capture_output=True, text=True, timeout=HANG_S, check=False)
        path.unlink()
        path.with_suffix(".away").rename(path)
        assert said.returncode in (1, 2), said.stderr
        assert str(path) in said.stderr
        assert re.search("Not a regular file|is a named pipe", said.stderr)
        assert "Traceback" not in said.stderr
    log = folder / "logs" / "assembly.jsonl"
    log.unlink()
    log.symlink_to(log.name)
    said = subprocess.run([*SPARRING, *resumed], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert said.returncode == 1
    assert f"got {log}: Too many levels of symbolic links; expected a file; move it away" in said.stderr
    assert "Traceback" not in (folder / "logs" / "assembly.stderr").read_text()


def test_run_whose_folder_is_removed_ends_soon_and_says_so_once(tmp_path: Path) -> None:
    training = Training(tmp_path, str(config(tmp_path, **ENDLESS)))
    training.updates(1)
    training.directory.rename(tmp_path / "moved")
    assert training.end() == 1, "\n".join(training.lines)
    (failed,) = [line for line in training.lines if "run_failed" in line]
    assert f"got no folder {training.directory} any more" in failed
    assert not any("writer_failed" in line or "--resume" in line for line in training.lines)


def test_stop_before_the_first_update_offers_no_command_to_resume(tmp_path: Path) -> None:
    training = Training(tmp_path, str(config(tmp_path, **ENDLESS | {"buffer_size": 10**6})))
    training.wait_for(lambda lines: any("run_started" in line for line in lines))
    training.process.send_signal(signal.SIGINT)
    assert training.end() == 0, "\n".join(training.lines)
    assert not any("--resume" in line for line in training.lines), "there is no checkpoint"


def test_simulator_that_fails_before_its_first_step_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    game = tmp_path / "broken_game.py"
    game.write_text("import json\n\n\ndef make():\n    return json()\n\n\nmake()\n")
    file = config(tmp_path, **ENDLESS)
    plain = yaml.safe_load(file.read_text())
    plain["simulators"] = [{"command": [sys.executable, str(game)]}]
    file.write_text(yaml.safe_dump(plain))
    training = Training(tmp_path, str(file))
    assert training.end() == 1, "\n".join(training.lines)
    text = "\n".join(training.lines)
    assert "broken_game.py" in text
    assert "line 5" in text
    assert "'module' object is not callable" in text
    assert str(training.directory / "logs" / "simulator-0.stderr") in text
    starts = [one for one in training.log() if one["event"] == "started" and one["part"] == "simulator-0"]
    assert len(starts) == 1


def test_environment_that_fails_again_and_again_at_the_same_line_ends_the_run_soon(tmp_path: Path) -> None:
    (tmp_path / "broken_env.py").write_text(
        "import gymnasium\nfrom gymnasium.envs.classic_control import CartPoleEnv\n\n\nclass Broken(CartPoleEnv):\n"
        "    def step(self, action):\n        self.count = getattr(self, 'count', 0) + 1\n"
        "        return super().step(action) if self.count < 9 else {}['speed']\n\n\n"
        "gymnasium.register('Broken-v0', Broken)\n"
    )
    file = config(tmp_path, **ENDLESS)
    plain = yaml.safe_load(file.read_text())
    options = {"env_id": "broken_env:Broken-v0", "behavior": "Balance"}
    plain["simulators"] = [{"name": "gymnasium", "options": options}]
    file.write_text(yaml.safe_dump(plain))
    training = Training(tmp_path, str(file))
    assert training.end() == 1, "\n".join(training.lines)
    error = training.summary["error"]
    assert error.startswith(
        "simulator-0 failed 3 times in the same way, without a trained step in between: exit status 1"
    )
    assert f"KeyError: 'speed' ({tmp_path / 'broken_env.py'}:8); correct it there" in error
    starts = [one for one in training.log() if one["event"] == "started" and one["part"] == "simulator-0"]
    assert len(starts) == 3


def test_console_that_nothing_reads_and_simulators_behind_a_shell_hold_nothing_up(tmp_path: Path) -> None:
    """The console is a full pipe; a suspended simulator, and a killed service, end in order nevertheless."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    pid, file = tmp_path / "pid", config(tmp_path, **ENDLESS)
    plain = yaml.safe_load(file.read_text())
    inner = f"{sys.executable} -m sparring simulator balance & echo $! > {pid}; wait"
    plain["simulators"] = [{"command": ["/bin/sh", "-c", inner]}]
    file.write_text(yaml.safe_dump(plain))
    command = [sys.executable, "-m", "sparring", "train", str(file), "--no-export"]
    command += ["--results-dir", str(tmp_path), "--run-id", "run"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer)
    os.close(writer)
    log, metrics = tmp_path / "run" / "logs" / "supervisor.jsonl", tmp_path / "run" / "metrics.jsonl"

    def started() -> dict[str, int]:
        events = json_lines(log) if log.exists() else []
        return {f"{one['part']} {one['start']}": one["pid"] for one in events if one["event"] == "started"}

    def wait_until(part: str, path: Path) -> None:
        deadline = time.monotonic() + HANG_S
        while part not in started() or not path.exists() or not path.read_text():
            assert time.monotonic() < deadline, started()
            assert process.poll() is None
            time.sleep(0.05)

    try:
        wait_until("simulator-0 1", metrics)
        os.kill(started()["assembly 1"], signal.SIGKILL)
        wait_until("assembly 2", metrics)
        simulator = psutil.Process(int(pid.read_text()))
        simulator.suspend()
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 0
        assert not simulator.is_running() or simulator.status() == psutil.STATUS_ZOMBIE
    finally:
        process.kill()
        process.wait()
        os.close(reader)
