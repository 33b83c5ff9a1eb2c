"""A whole run on several addresses: two supervisors, CURVE between all services, and balanced step accounting."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparring.pipeline.security import secret_key, token
from sparring.pipeline.security.making import make
from tests.services.services_helpers import Training

MAIN, RACK = "127.0.0.2", "127.0.0.3"


def free_range(count: int) -> int:
    """Returns the first of `count` consecutive ports that are free on both addresses."""
    for first in range(20_000 + os.getpid() % 10_000, 60_000, count):
        try:
            for port in range(first, first + count):
                for address in (MAIN, RACK):
                    with socket.socket() as probe:
                        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                        probe.bind((address, port))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


def settings(folder: Path, port: int) -> dict[str, Any]:
    return {
        "behaviors": {
            "Balance": {
                "hyperparameters": {"batch_size": 128, "buffer_size": 1024, "num_epoch": 1},
                "network_settings": {"hidden_units": 16, "num_layers": 1},
                "max_steps": 3000,
                "summary_freq": 1024,
            }
        },
        "simulators": [{"name": "balance", "areas": 8}, {"name": "balance", "areas": 8, "host": "rack"}],
        "pipeline": {
            "keys": str(folder / "keys"),
            "port": port + 1,
            "hosts": {"main": {"address": MAIN}, "rack": {"address": RACK, "services": ["stepping"]}},
            "export": False,
        },
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux is all of 127/8 loopback")
def test_a_run_on_two_machines_trains_with_balanced_step_counts_and_no_secret_in_its_files(tmp_path: Path) -> None:
    make(tmp_path / "keys", [], [MAIN, RACK])
    port = free_range(20)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings(tmp_path, port), sort_keys=False))
    here, there = tmp_path / "here", tmp_path / "there"
    join = [sys.executable, "-m", "sparring", "join", f"tcp://{MAIN}:{port + 1}", "--host", "rack"]
    join += ["--results-dir", str(there)]
    with subprocess.Popen(
        [*join, "--keys", str(tmp_path / "keys")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as joined:
        try:
            training = Training(here, str(config), "--seed", "1", run_id="r")
            assert training.end() == 0, training.lines
            output, _ = joined.communicate(timeout=120)
        finally:
            joined.kill()
    assert joined.returncode == 0, output
    summary = json.loads((here / "r" / "summary.json").read_text())
    step_counts = summary["behaviors"]["Balance"]["step_counts"]
    assert step_counts["trained"] >= 3000
    assert step_counts["produced"] == sum(value for term, value in step_counts.items() if term != "produced")
    simulators = [
        json.loads(line)
        for folder, number in ((here, 0), (there, 1))
        for line in (folder / "r" / "logs" / f"simulator-{number}.stderr").read_text().splitlines()
        if line.startswith("{")
    ]
    assert [simulator["number"] for simulator in simulators] == [0, 1]
    assert sum(sum(simulator["steps"].values()) for simulator in simulators) == step_counts["produced"]
    assert (there / "r" / "logs" / "stepping-0.jsonl").exists()
    assert not (here / "r" / "logs" / "stepping-0.jsonl").exists()
    secrets = [token(tmp_path / "keys"), secret_key(tmp_path / "keys")]
    for path in (path for folder in (here, there) for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        assert not any(secret.encode() in content for secret in secrets), path
    assert not any(secret in "\n".join(training.lines) + output for secret in secrets)
