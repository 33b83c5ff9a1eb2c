"""A service ends with its supervisor, even while it is still loading."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparring import __main__
from sparring.services import main as command
from sparring.services.process.lifeline import PIPE_VARIABLE


def test_service_watches_its_supervisor_before_it_loads_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def load(name: str) -> None:
        order.append(name)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "end_with_supervisor", lambda: order.append("tied"))
    monkeypatch.setattr(command.importlib, "import_module", load)
    with pytest.raises(KeyboardInterrupt):
        command.main(["service", "assembly"])
    assert order == ["tied", "sparring.services.commands.service"]


def test_interrupt_that_no_command_handles_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "main", interrupted)
    assert __main__.main() == 130


def test_process_without_a_supervisor_ends_at_once(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(writer)
    code = "from sparring.services.process.lifeline import end_with_supervisor as tie; tie(); "
    code += "import threading; threading.Event().wait(50)"
    process = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, PIPE_VARIABLE: str(reader)}, pass_fds=(reader,), timeout=40
    )
    os.close(reader)
    assert process.returncode == 1
