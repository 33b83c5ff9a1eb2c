"""A run on a Ray cluster of this machine: nodes that a test adds and kills, and the run in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

MARK = "SPARRING_TEST_CLUSTER"
PARTS = ("sparring service", "sparring simulator", "sparring.services.process.watcher")
TEXT = """
{behavior}
  trainer_type: ppo
  hyperparameters: {{batch_size: 64, buffer_size: 256}}
  network_settings: {{hidden_units: 16, num_layers: 1}}
  max_steps: {steps}
  time_horizon: 32
  summary_freq: 1000
  checkpoint_interval: 2000
simulators:
  - {{name: balance, count: 2, areas: 4}}
pipeline:
  export: false
  recovery_interval: 1.0
  placement:
    timeout_s: 90
    assembly: {{num_cpus: 1.5}}
    learning: {{num_cpus: 1.5}}
    simulators: {{num_cpus: 0.25}}
    {placement}
"""


@dataclass
class Nodes:
    """The nodes of a cluster on this machine; the head has no CPU for a part of a run."""

    cluster: Any
    cpus: int
    workers: list[Any] = field(default_factory=list)

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self) -> None:
        self.workers.append(self.cluster.add_node(num_cpus=self.cpus, object_store_memory=80 * 2**20))

    def kill_node_of(self, part: str) -> None:
        """Kills the raylet of the worker that runs a service."""
        service = next(
            process
            for process in psutil.process_iter(["cmdline"])
            if f"sparring service {part} " in " ".join(process.info["cmdline"] or ())
            and process.environ().get(MARK) == os.environ[MARK]
        )
        above = {process.pid for process in service.parents()}
        node = next(one for one in self.workers if one.all_processes["raylet"][0].process.pid in above)
        self.workers.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def kill_head(self) -> None:
        """Kills all processes of the head."""
        head = self.cluster.head_node
        for kind in ("gcs_server", "raylet"):
            for process in head.all_processes.get(kind, ()):
                os.kill(process.process.pid, signal.SIGKILL)


@contextmanager
def nodes(workers: int = 3, cpus: int = 2) -> Iterator[Nodes]:
    """Starts a head and some workers with so many CPUs each."""
    from ray.cluster_utils import Cluster

    former = os.environ.get(MARK)
    os.environ[MARK] = f"{os.getpid()}-{time.monotonic_ns()}"  # all that the cluster starts inherits it
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "object_store_memory": 80 * 2**20, "include_dashboard": False},
    )
    made = Nodes(cluster, cpus)
    try:
        for _ in range(workers):
            made.add()
        yield made
    finally:
        cluster.shutdown()
        os.environ.pop(MARK) if former is None else os.environ.update({MARK: former})


class ClusterRun:
    """`sparring train --ray` in a process of its own."""

    def __init__(
        self,
        folder: Path,
        address: str,
        *,
        steps: int,
        placement: str = "",
        behavior: str = "behaviors:\n Balance:",
        resume: bool = False,
    ) -> None:
        self.folder = folder / "results" / "run"
        self.mark = os.environ.get(MARK)
        config = folder / "config.yaml"
        config.write_text(TEXT.format(steps=steps, placement=placement, behavior=behavior))
        command = [sys.executable, "-P", "-m", "sparring", "train", str(config), "--run-id", "run", f"--ray={address}"]
        command += ["--results-dir", str(folder / "results"), *(["--resume"] if resume else [])]
        self.output = folder / f"output-{time.monotonic_ns()}.txt"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)

    def trained(self) -> int:
        """Returns the trained steps that the monitor has shown last."""
        try:
            status = json.loads((self.folder / "status.json").read_bytes())
        except (OSError, ValueError):
            return 0
        return int(status["behaviors"].get("Balance", {}).get("step", 0))

    def until(self, condition: Callable[[], bool], limit_s: float = 300.0) -> None:
        """Waits for a condition."""
        deadline = time.monotonic() + limit_s
        while not condition():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.1)

    def end(self, limit_s: float = 240.0) -> int:
        """Waits for the end and returns the exit status."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(self.text()) from None

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_bytes())
        return found

    def orphans(self) -> list[str]:
        """Returns the command lines of processes that still run a part of the run."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            line = " ".join(process.info["cmdline"] or ())
            with suppress(psutil.Error):
                if any(part in line for part in PARTS) and process.environ().get(MARK) == self.mark:
                    found.append(line)
        return found


def check_balance(counts: dict[str, int]) -> None:
    """Checks that each produced step is in one term."""
    terms = ("trained", "ghost", "stale", "lost", "open")
    assert counts["produced"] == sum(counts[term] for term in terms), counts
