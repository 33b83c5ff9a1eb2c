"""What `--ray` refuses before it connects to anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparring.services.main import main

PLAIN = "behaviors: {A: }\nsimulators: [{name: goal}]\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (PLAIN, ["--in-process"], "got --in-process with --ray"),
        (PLAIN + "pipeline: {transport: ipc}\n", [], "got Unix sockets with --ray"),
        (PLAIN + "pipeline: {address: 'unix:///tmp/x'}\n", [], "got Unix sockets with --ray"),
        (PLAIN + "pipeline: {mode: lockstep, placement: {stepping: {per: node}}}\n", [], "per: node in lockstep"),
        (PLAIN, ["--ray", "ray://10.0.0.1:10001"], "expected an address of the cluster itself"),
        (PLAIN, ["--ray", "127.0.0.1"], "where no cluster answers (no port)"),
        (PLAIN, ["--ray", "127.0.0.1:99999"], "where no cluster answers"),
        (PLAIN, ["--ray", "127.0.0.1:1"], "where no cluster answers (Connection refused)"),
    ],
)
def test_what_a_cluster_cannot_run_is_named(
    config: Path, text: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(text)
    results = config.parent / "results"
    given = words if "--ray" in words else [*words, "--ray"]
    assert main(["train", str(config), "--results-dir", str(results), *given]) == 2
    assert message in capsys.readouterr().err
    assert not [*results.rglob("run.json")]


@pytest.mark.parametrize("command", ["train", "check"])
def test_a_machine_without_ray_is_told_how_to_install_it(
    command: str, config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [
        name for name in sys.modules if name.split(".")[0] == "ray" or name.startswith("sparring.services.cluster")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    config.write_text(PLAIN)
    where = ["--results-dir", str(config.parent)] if command == "train" else []
    assert main([command, str(config), *where, "--ray"]) == 2
    error = capsys.readouterr().err
    assert "got --ray without Ray; expected its package; install it with `pip install 'ray" in error


def test_ray_is_given_more_patience_before_it_is_imported() -> None:
    """It reads its limit then; a run could otherwise not save its weights a minute after the death of the head."""
    program = """
import os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "ray":
            print(os.environ["RAY_gcs_rpc_server_reconnect_timeout_s"])

sys.meta_path.insert(0, Watch())
import sparring.services.cluster.host
"""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    command = [sys.executable, "-c", program]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout
    assert printed.splitlines()[0] == "600"
