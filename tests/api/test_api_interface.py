"""What `import sparring` offers, and how little it loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import sparring
from sparring.services.api import measuring


def test_every_name_of_the_interface_is_there() -> None:
    assert set(sparring.__all__) == {name for names in sparring._MODULES.values() for name in names}
    for name in sparring.__all__:
        assert getattr(sparring, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'tain'"):
        sparring.tain  # type: ignore[attr-defined]  # noqa: B018


def test_import_loads_no_more_than_numpy_and_msgpack() -> None:
    code = "import sys; before = set(sys.modules); import sparring; print(*sorted(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    others = {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names)
    assert others <= {"sparring", "numpy", "msgpack"}


def test_torch_is_loaded_only_with_a_checkpoint() -> None:
    code = "import sys, sparring; sparring.load; sparring.start; print(*({'torch', 'zmq'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == []


def test_working_folder_that_was_removed_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for config in ({"behaviors": {}}, "run.yaml"):
        with pytest.raises(sparring.SettingsError, match=r"got a working folder that cannot be found .*; change to"):
            sparring.train(config)


def test_interrupt_that_comes_twice_within_a_second_stops_a_run_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a shell signals a script and its process group."""
    run = Mock()
    run.wait.side_effect = [KeyboardInterrupt, KeyboardInterrupt, None]
    monkeypatch.setattr("sparring.services.api.runs.start", lambda *_, **__: run)
    with pytest.raises(KeyboardInterrupt):
        sparring.train("a.yaml")
    assert (run.stop.call_count, run.wait.call_count) == (1, 3)


INTERRUPTING = """
import os, pathlib, signal, sys

def end(*_):
    pathlib.Path(sys.argv[-1]).write_text("in order")
    sys.exit(1)

signal.signal(signal.SIGTERM, end)
os.kill(os.getppid(), signal.SIGINT)
while True:
    signal.pause()
"""


def test_command_whose_caller_is_interrupted_ends_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "SPARRING", [sys.executable, "-c", INTERRUPTING])
    with pytest.raises(KeyboardInterrupt):
        measuring._output([str(tmp_path / "end")])
    assert (tmp_path / "end").read_text() == "in order"
