"""The whole pipeline against its parts: `python scripts/bench/end_to_end.py [a] [b] [a12] [--seconds 30]`.

Prints, for each case, end-to-end agent-steps/s after warm-up, the simulator alone (answered by a null
server over its socket), the learner alone on data in memory with the same number of threads, and the
ratio of end-to-end to the smaller of the two; and the action latency while the learner updates.

a: batch 64, buffer 12,000; b: batch 4,096, buffer 65,536; both 3 epochs, 64 `balance` agents in one
simulator, 128x2, overlap, horizon 64. a12: as a, with 12 agents in the simulator.

The speed of a machine may change from minute to minute by more than what is measured here, so the parts
and the whole take turns: each round's window of the whole is compared with the mean of the parts just
before and just after it, and the median of the rounds' ratios is printed with all of them beside it.
Absolute figures are of this machine in these minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import learner as learner_bench

from pipeline.messages.codec import FrameReader, to_bytes
from pipeline.messages.simulator import VERSION, Act, BehaviorActions, Bye, Hello, Reset, Step, Welcome

CONFIG = """
behaviors:
  Balance:
    hyperparameters: {{batch_size: {batch}, buffer_size: {buffer}, num_epoch: 3}}
    network_settings: {{normalize: true, hidden_units: 128, num_layers: 2}}
    max_steps: 1000000000
    time_horizon: 64
    summary_freq: 1000000
simulators:
  - {{name: balance, areas: {areas}}}
"""
CASES = {"a": ("a", 64), "b": ("b", 64), "a12": ("a", 12)}


def end_to_end(case: learner_bench.Case, areas: int, warm_s: float, seconds: float) -> dict[str, float]:
    """A real run; produced and trained steps/s between two looks at its status."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "bench.yaml"
        config.write_text(CONFIG.format(batch=case.batch, buffer=case.buffer, areas=areas))
        command = [sys.executable, "-m", "services", "train", str(config), "--results-dir", folder, "--run-id", "bench"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as process:
            status = Path(folder) / "bench" / "status.json"
            _wait_for_updates(process, status, 2)
            time.sleep(warm_s)
            before = json.loads(status.read_text())
            time.sleep(seconds)
            after = json.loads(status.read_text())
            process.send_signal(signal.SIGINT)
            process.wait(60)
    span = after["time_s"] - before["time_s"]
    one, two = (look["behaviors"]["Balance"]["figures"] for look in (before, after))
    latency = after["services"]["stepping-0"]["histograms"]["action_latency_s"]
    return {
        "produced/s": (two["books"]["produced"] - one["books"]["produced"]) / span,
        "trained/s": (two["books"]["trained"] - one["books"]["trained"]) / span,
        "p50_ms": latency["p50"] * 1e3,
        "p99_ms": latency["p99"] * 1e3,
        "lag_mean": two["lag_mean"],
        "lag_max": two["lag_max"],
    }


def _wait_for_updates(process: subprocess.Popen[bytes], status: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.5)
        if status.exists() and json.loads(status.read_text())["behaviors"]["Balance"]["figures"]["updates"] >= count:
            return
    raise SystemExit("the run did not begin to learn within 120 s")


def simulator_alone(areas: int, seconds: float) -> float:
    """Agent-steps/s of a simulator whose every frame is answered at once with the same actions."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        command = [
            sys.executable,
            "-m",
            "services",
            "simulator",
            "balance",
            "--connect",
            address,
            "--areas",
            str(areas),
        ]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            connection, _ = server.accept()
            with connection:
                steps = _serve(connection, areas, seconds)
            process.wait(10)
    return steps / seconds


def _serve(connection: socket.socket, areas: int, seconds: float) -> int:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    reader = FrameReader()
    steps, end = 0, float("inf")
    continuous, discrete = np.zeros((areas, 2), np.float32), np.zeros((areas, 0), np.int32)
    while time.monotonic() < end:
        reader.feed(connection.recv(1 << 18))
        while (message := reader.next()) is not None:
            if isinstance(message, Hello):
                connection.sendall(
                    to_bytes(Welcome(version=VERSION, connection=1, heartbeat_s=5.0, timeout_s=60.0))
                    + to_bytes(Reset(seed=1))
                )
                end = time.monotonic() + seconds
            elif isinstance(message, Step):
                report = message.reports[0]
                agents = report.decisions.agents if report.decisions is not None else np.empty(0, np.int64)
                actions = BehaviorActions(
                    behavior=report.behavior, agents=agents, continuous=continuous, discrete=discrete
                )
                connection.sendall(to_bytes(Act(sequence=message.sequence, actions=(actions,))))
                steps += len(agents)
    connection.sendall(to_bytes(Bye()))
    return steps


def parts(case: learner_bench.Case, areas: int) -> dict[str, float]:
    """Simulator and learner, each alone; the learner in a thread as in its process."""
    found: dict[str, float] = {"simulator/s": simulator_alone(areas, 3.0)}
    thread = threading.Thread(target=lambda: found.update(learner_bench.measure(case, updates=3)))
    thread.start()
    thread.join()
    return found


def compare(name: str, rounds: int, warm_s: float, seconds: float) -> str:
    """One case: the parts and the whole in turn; one line."""
    key, areas = CASES[name]
    case = learner_bench.CASES[key]
    alone, runs = [parts(case, areas)], []
    for _ in range(rounds):
        runs.append(end_to_end(case, areas, warm_s, seconds / rounds))
        alone.append(parts(case, areas))
    slower = [min(part["simulator/s"], part["learner_steps_per_s"]) for part in alone]
    ratios = [2 * run["produced/s"] / (a + b) for run, a, b in zip(runs, slower, slower[1:], strict=False)]

    def middle(looks: list[dict[str, float]], figure: str) -> float:
        return statistics.median(look[figure] for look in looks)

    rates = [run["produced/s"] for run in runs]
    return (
        f"{name}: ratio {statistics.median(ratios):.2f} ({' '.join(f'{ratio:.2f}' for ratio in ratios)})  "
        f"end to end {statistics.median(rates):,.0f}/s ({' '.join(f'{rate:,.0f}' for rate in rates)})  "
        f"simulator alone {middle(alone, 'simulator/s'):,.0f}/s  "
        f"learner alone {middle(alone, 'learner_steps_per_s'):,.0f}/s  learner/bare {middle(alone, 'ratio'):.2f}  "
        f"latency p50 {middle(runs, 'p50_ms'):.2f} ms p99 {middle(runs, 'p99_ms'):.2f} ms  "
        f"lag mean {middle(runs, 'lag_mean'):.2f} max {max(run['lag_max'] for run in runs):.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="a, b, a12 (default: all)")
    parser.add_argument("--seconds", type=float, default=30.0, help="measured of the whole, over all rounds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", type=float, default=5.0)
    args = parser.parse_args()
    for name in args.cases or CASES:
        print(compare(name, args.rounds, args.warm, args.seconds), flush=True)


if __name__ == "__main__":
    main()
