"""The whole pipeline against its parts: `python scripts/bench/end_to_end.py [a] [b] [a12] [images] [--seconds 30]`.

Prints, for each case, end-to-end agent-steps/s after warm-up, the simulator alone (answered by a null
server over its socket), the learner alone on data in memory with the same number of threads, and the
ratio of end-to-end to the smaller of the two; and the action latency while the learner updates.

a: batch 64, buffer 12,000; b: batch 4,096, buffer 65,536; both 3 epochs, 64 `balance` agents in one
simulator, 128x2, overlap, horizon 64. a12: as a, with 12 agents in the simulator. images: 16 agents that see 84x84x3
bytes, `nature_cnn`, batch 64, buffer 512; also the bytes of each hop per step, over those of the observation.

The speed of a machine may change within seconds by more than what is measured here. So the whole is paused
(all its processes stopped) every few seconds, and the parts are measured in the pauses; its rate is over the
time it ran. Absolute figures are of this machine in these minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import learner as learner_bench

from sparring.pipeline.messages.codec import FrameReader, to_bytes
from sparring.pipeline.messages.simulator import VERSION, Act, BehaviorActions, Bye, Hello, Reset, Step, Welcome
from sparring.pipeline.specs import ActionSpec

CONFIG = """
behaviors:
  {behavior}:
    hyperparameters: {{batch_size: {batch}, buffer_size: {buffer}, num_epoch: {epochs}}}
    network_settings: {network}
    max_steps: 1000000000
    time_horizon: {horizon}
    summary_freq: 1000000
simulators: {simulators}
pipeline: {{export: false}}
"""
BALANCE = (sys.executable, "-m", "sparring", "simulator", "balance", "--areas")
PICTURES = (sys.executable, str(Path(__file__).parent / "pictures.py"), "--agents")
CASES = {
    "a": ("a", "Balance", (*BALANCE, "64"), 64),
    "b": ("b", "Balance", (*BALANCE, "64"), 64),
    "a12": ("a", "Balance", (*BALANCE, "12"), 12),
    "images": ("images", "Pictures", (*PICTURES, "16"), 16),
}
QUEUES = {
    "stepping to assembly": ("stepping-0", "steps.out"),
    "assembly to learner": ("assembly", "segments:{behavior}.out"),
}
"""Service and queue of each hop after the first."""


class Whole:
    """A real run of a case, past its first updates, whose processes are paused and resumed together."""

    def __init__(self, case: learner_bench.Case, behavior: str, simulator: dict[str, Any], folder: Path) -> None:
        self._behavior, self._metrics = behavior, folder / "bench" / "services.jsonl"
        config = folder / "bench.yaml"
        config.write_text(
            CONFIG.format(
                behavior=behavior,
                batch=case.batch,
                buffer=case.buffer,
                epochs=case.epochs,
                horizon=case.horizon,
                network=json.dumps(case.network.model_dump(exclude_none=True)),
                simulators=json.dumps([simulator]),
            )
        )
        command = [sys.executable, "-m", "sparring", "train", str(config), "--results-dir", str(folder)]
        self._process = psutil.Popen([*command, "--run-id", "bench"], stdout=subprocess.DEVNULL)
        self._status = folder / "bench" / "status.json"
        deadline = time.monotonic() + 120
        while not self._status.exists() or self.figures()["updates"] < 2:
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise SystemExit("the run did not begin to learn within 120 s")
            time.sleep(0.2)

    def __enter__(self) -> Whole:
        return self

    def __exit__(self, *error: object) -> None:
        self.resume()
        self._process.send_signal(signal.SIGINT)
        self._process.wait(60)

    def pause(self) -> None:
        """Pauses every process of the run."""
        for process in [self._process, *self._process.children(recursive=True)]:
            process.suspend()

    def resume(self) -> None:
        """Resumes every process of the run."""
        for process in [self._process, *self._process.children(recursive=True)]:
            process.resume()

    def look(self) -> dict[str, Any]:
        """Reads the monitor's status."""
        shown: dict[str, Any] = json.loads(self._status.read_text())
        return shown

    def fresh(self) -> dict[str, Any]:
        """Waits for the monitor's next status."""
        before = look = self.look()
        while look["time_s"] == before["time_s"]:
            time.sleep(0.01)
            look = self.look()
        return look

    def hops(self) -> dict[str, float]:
        """Returns the bytes of each hop per step, after the end."""
        lines = [json.loads(line) for line in self._metrics.read_text().splitlines()]
        # each line counts from the one before
        frames = [line["counters"] for line in lines if line["service"] == "stepping-0"]
        received = sum(counters.get("received_bytes", 0) for counters in frames)
        found = {"simulator to stepping": received / sum(c.get(f"steps/{self._behavior}", 0) for c in frames)}
        for hop, (service, queue) in QUEUES.items():
            name = queue.format(behavior=self._behavior)
            ends = [line["queues"].get(name, {}) for line in lines if line["service"] == service]
            found[hop] = sum(end.get("put_bytes", 0) for end in ends) / sum(end.get("put_steps", 0) for end in ends)
        return found

    def figures(self) -> dict[str, Any]:
        """The step counts and other figures of the behavior."""
        shown: dict[str, Any] = self.look()["behaviors"][self._behavior]["figures"]
        return shown


class SimulatorAlone:
    """A simulator whose every frame is answered at once with the same actions; a call measures steps/s."""

    def __init__(self, command: Sequence[str], agents: int, actions: ActionSpec, seconds: float) -> None:
        self._seconds = seconds
        self._server = socket.create_server(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        environment = {**os.environ, "SPARRING_ADDRESS": address}
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        self._connection, _ = self._server.accept()
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = FrameReader()
        self._continuous = np.zeros((agents, actions.continuous), np.float32)
        self._discrete = np.zeros((agents, len(actions.discrete)), np.int32)
        assert isinstance(self._receive(), Hello)
        welcome = Welcome(version=VERSION, connection=1, heartbeat_s=600.0, timeout_s=3600.0)
        self._connection.sendall(to_bytes(welcome) + to_bytes(Reset(seed=1)))

    def __enter__(self) -> SimulatorAlone:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.sendall(to_bytes(Bye()))
        self._process.wait(10)
        self._connection.close()
        self._server.close()

    def __call__(self) -> float:
        began, steps = time.monotonic(), 0
        while time.monotonic() < began + self._seconds:
            message = self._receive()
            if isinstance(message, Step):
                report = message.reports[0]
                agents = report.decisions.agents if report.decisions is not None else np.empty(0, np.int64)
                actions = BehaviorActions(
                    behavior=report.behavior, agents=agents, continuous=self._continuous, discrete=self._discrete
                )
                self._connection.sendall(to_bytes(Act(sequence=message.sequence, actions=(actions,))))
                steps += len(agents)
        return steps / (time.monotonic() - began)

    def _receive(self) -> object:
        while (message := self._reader.next()) is None:
            self._reader.feed(self._connection.recv(1 << 18))
        return message


def compare(name: str, seconds: float, warm_s: float, turn_s: float) -> str:
    """Measures one case, whole and parts in turn; returns a line."""
    key, behavior, command, agents = CASES[name]
    case = learner_bench.CASES[key]
    learner = learner_bench.Alone(case)
    learner()
    simulator_rates: list[float] = []
    update_seconds: list[float] = []
    paused = 0.0
    with tempfile.TemporaryDirectory() as folder:
        own = {"name": "balance", "areas": agents} if command[: len(BALANCE)] == BALANCE else {"command": command}
        with (
            Whole(case, behavior, own, Path(folder)) as whole,
            SimulatorAlone(command, agents, case.spec.actions, 0.3) as simulator,
        ):
            time.sleep(warm_s)
            before = whole.fresh()
            for turn in range(round(seconds / turn_s)):
                time.sleep(turn_s / 2 if turn == 0 else turn_s)
                began = time.monotonic()
                whole.pause()
                simulator_rates.append(simulator())
                update_seconds.append(learner())
                whole.resume()
                paused += time.monotonic() - began
            time.sleep(turn_s / 2)
            after = whole.fresh()
        whole_hops = whole.hops()
    span = after["time_s"] - before["time_s"] - paused
    one, two = (look["behaviors"][behavior]["figures"] for look in (before, after))
    produced, trained = (
        (two["step_counts"][count] - one["step_counts"][count]) / span for count in ("produced", "trained")
    )
    simulator_alone = statistics.mean(simulator_rates)
    learner_alone = case.buffer / statistics.mean(update_seconds)
    latency = after["services"]["stepping-0"]["histograms"]["action_latency_s"]
    seen = case.spec.observation_bytes
    hops = ", ".join(f"{hop} {size / seen:.3f}" for hop, size in whole_hops.items())
    bare = learner_bench.measure(case)["ratio"] if key in learner_bench.COMPARED else math.nan
    return (
        f"{name}: ratio {produced / min(simulator_alone, learner_alone):.2f}  "
        f"end to end {produced:,.0f}/s (trained {trained:,.0f}/s) over {span:.0f} s  "
        f"simulator alone {simulator_alone:,.0f}/s  learner alone {learner_alone:,.0f}/s  "
        f"learner/bare {bare:.2f}  "
        f"latency p50 {latency['p50'] * 1e3:.2f} ms p99 {latency['p99'] * 1e3:.2f} ms  "
        f"lag mean {two['lag']['mean']:.2f} max {two['lag']['max']:.0f}  "
        f"bytes per step, over the observation's {seen}: {hops}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="a, b, a12 (default: all)")
    parser.add_argument("--seconds", type=float, default=30.0, help="that the whole runs, measured")
    parser.add_argument("--turn", type=float, default=2.0, help="seconds between two pauses")
    parser.add_argument("--warm", type=float, default=5.0)
    args = parser.parse_args()
    for name in args.cases or CASES:
        print(compare(name, args.seconds, args.warm, args.turn), flush=True)


if __name__ == "__main__":
    main()
