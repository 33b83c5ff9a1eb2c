"""Real runs beside each other, at addresses of others, and with hasty signals."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.services.services_helpers import HANG_S, Training, config

pytestmark = pytest.mark.slow

ENDLESS = {"max_steps": 10**9, "summary_freq": 1024, "buffer_size": 1024, "count": 1}


def again(training: Training, file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Starts the run of `training` a second time and waits for the end of that."""
    command = [sys.executable, "-m", "sparring", "train", str(file), "--results-dir", str(training.directory.parent)]
    command += ["--run-id", training.directory.name, "--no-export", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)


def test_second_start_in_the_folder_of_a_living_run_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    file = config(tmp_path, **ENDLESS)
    training = Training(tmp_path, str(file))
    training.updates(1)
    for argument in ("--resume", "--force"):
        second = again(training, file, argument)
        assert second.returncode == 2, second.stderr
        assert str(training.process.pid) in second.stderr
    training.updates(1)
    training.process.send_signal(signal.SIGINT)
    assert training.end() == 0, "\n".join(training.lines)
    assert training.summary["status"] == "stopped"
    assert again(training, file, "--resume", "--max-steps", "1").returncode == 0


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


def test_hangup_ends_a_run_in_order_and_two_signals_at_once_are_one(tmp_path: Path) -> None:
    training = Training(tmp_path, str(config(tmp_path, **ENDLESS)))
    training.updates(2)
    training.process.send_signal(signal.SIGHUP)
    training.process.send_signal(signal.SIGTERM)
    assert training.end() == 0, "\n".join(training.lines)
    assert training.summary["status"] == "stopped"
    assert training.summary["behaviors"]["Balance"]["checkpoint"] is not None
    assert any("--resume" in line for line in training.lines)
