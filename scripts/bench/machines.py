"""Runs over several network namespaces as machines, each with an address of its own: `scripts/bench/machines.py CASE`.

    speed          agent-steps/s of a run over two namespaces with CURVE, over those on one machine (needs root)
    cut SECONDS    the network of the node with the learner is cut for that long; then how the run ended
    node, head     SIGKILL of all Ray processes of a node, or of the head; then how the run ended
    soccer         configs/soccer.yaml on three nodes, of which one is killed every SECONDS and starts again; the run
                   is kept in --results, for a tournament with undisturbed ones

All namespaces share the cores of this machine, which nobody divides among them; so a run on one machine does not divide
them either (`leave_cores_to_learners: false`). Ray's head and the driver are in the first namespace, the parts of the
run in others. Linux with iproute2, as root.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

SHORT_S = 20.0
"""Ray gives up a node that is away for longer."""
SOCCER = Path(__file__).parents[2] / "configs" / "soccer.yaml"
RAY = str(Path(sys.executable).parent / "ray")
CONFIG = """
behaviors:
  Balance:
    hyperparameters: {{batch_size: {batch}, buffer_size: {buffer}, num_epoch: 3}}
    network_settings: {{hidden_units: 128, num_layers: 2}}
    max_steps: {steps}
    time_horizon: 64
    summary_freq: 20000
    checkpoint_interval: 20000
simulators: [{{name: balance, areas: 64}}]
pipeline:
  export: false
  recovery_interval: 2
  leave_cores_to_learners: false
  placement:
    stepping: {{num_cpus: 0.5, resources: {{near: 1}}}}
    simulators: {{num_cpus: 0.25}}
    assembly: {{num_cpus: 0.5, resources: {{far: 0.5}}}}
    learning: {{num_cpus: 0.5, resources: {{far: 0.5}}}}
    timeout_s: 120
"""


def shell(*words: str, check: bool = True) -> None:
    subprocess.run(words, check=check, stdout=subprocess.DEVNULL, stderr=None if check else subprocess.DEVNULL)


def inside(number: int) -> list[str]:
    return ["ip", "netns", "exec", f"sparring{number}"]


def address(number: int) -> str:
    return f"10.77.0.{10 + number}"


@contextmanager
def machines(count: int) -> Iterator[None]:
    """Makes namespaces that share a bridge."""
    remove(count)
    shell("ip", "link", "add", "sparringbr", "type", "bridge")
    shell("ip", "link", "set", "sparringbr", "up")
    try:
        for number in range(count):
            name, end = f"sparring{number}", f"sparringv{number}"
            shell("ip", "netns", "add", name)
            shell("ip", "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", name)
            shell("ip", "link", "set", end, "master", "sparringbr", "up")
            shell(*inside(number), "ip", "address", "add", f"{address(number)}/24", "dev", "eth0")
            shell(*inside(number), "ip", "link", "set", "eth0", "up")
            shell(*inside(number), "ip", "link", "set", "lo", "up")
        yield
    finally:
        remove(count)


def remove(count: int) -> None:
    for number in range(count):
        found = subprocess.run(
            ["ip", "netns", "pids", f"sparring{number}"], capture_output=True, text=True, check=False
        )
        for pid in found.stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        shell("ip", "link", "delete", f"sparringv{number}", check=False)
        shell("ip", "netns", "delete", f"sparring{number}", check=False)
    shell("ip", "link", "delete", "sparringbr", check=False)


def node(number: int, resources: dict[str, float], folder: Path, cores: int = 2) -> None:
    """Starts Ray in a namespace; the first is the head."""
    own = ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={folder}/ray"]
    command = [*inside(number), RAY, "start", f"--node-ip-address={address(number)}", "--disable-usage-stats"]
    command += own if number == 0 else [f"--address={address(0)}:6379"]
    command += ["--num-cpus=" + str(0 if number == 0 else cores), f"--resources={json.dumps(resources)}"]
    shell(*command, "--object-store-memory=80000000")


def train(folder: Path, name: str, *, ray: bool, steps: int, batch: int, buffer: int) -> subprocess.Popen[bytes]:
    config = folder / f"{name}.yaml"
    config.write_text(CONFIG.format(steps=steps, batch=batch, buffer=buffer))
    return start(folder, name, config, ray=ray)


def start(folder: Path, name: str, config: Path, *more: str, ray: bool = True) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "sparring", "train", str(config), "--run-id", name, *more]
    command += ["--results-dir", str(folder)]
    command = [*inside(0), *command, f"--ray={address(0)}:6379"] if ray else command
    with (folder / f"{name}.txt").open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output)


def steps(folder: Path, name: str) -> int:
    try:
        found = json.loads((folder / name / "status.json").read_bytes())
        return int(found["behaviors"]["Balance"]["step"])
    except (OSError, ValueError, KeyError):
        return 0


def wait_for(folder: Path, name: str, process: subprocess.Popen[bytes], least: int) -> None:
    while steps(folder, name) < least:
        if process.poll() is not None:
            raise SystemExit((folder / f"{name}.txt").read_text())
        time.sleep(0.05)


def rate(folder: Path, name: str, *, ray: bool, seconds: float) -> float:
    """Returns agent-steps/s from the end of an early update to the end of a later one."""
    process = train(folder, name, ray=ray, steps=10**9, batch=4096, buffer=65536)
    wait_for(folder, name, process, 65536)

    def after_update() -> tuple[int, float]:
        before = steps(folder, name)
        wait_for(folder, name, process, before + 1)
        return steps(folder, name), time.monotonic()

    first, began = after_update()
    time.sleep(seconds)
    last, ended = after_update()
    process.send_signal(signal.SIGINT)
    process.wait()
    return (last - first) / (ended - began)


def raylet_processes(number: int) -> list[psutil.Process]:
    found = subprocess.run(["ip", "netns", "pids", f"sparring{number}"], capture_output=True, text=True, check=True)
    return [psutil.Process(int(pid)) for pid in found.stdout.split()]


def soccer(folder: Path, results: Path, seed: int, seconds: float) -> None:
    """Trains while the nodes are killed in turn; prints how the run ended."""
    for number in (1, 2, 3):
        node(number, {}, folder, cores=4)
    name, kills = f"killed{seed}", 0
    process, began = start(results, name, SOCCER, "--seed", str(seed), "--no-export"), time.monotonic()
    while process.poll() is None:
        time.sleep(0.1)
        if time.monotonic() - began > seconds * (kills + 1):
            number = 1 + kills % 3
            for one in raylet_processes(number):
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            time.sleep(5.0)
            node(number, {}, folder, cores=4)
            kills += 1
    found = json.loads((results / name / "summary.json").read_text())["behaviors"]["Soccer"]
    took = time.monotonic() - began
    print(f"seed {seed}: status {process.returncode} after {took:.0f} s and {kills} kills; {found['step_counts']}")
    print(f"losses {found['losses']}, unaccounted {found['unaccounted']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=("speed", "cut", "node", "head", "soccer"))
    parser.add_argument("seconds", nargs="?", type=float, default=30.0)
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # required beyond loopback
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="sp-") as name, machines(4):
        folder = Path(name)
        node(0, {}, folder)
        if args.case == "soccer":
            soccer(folder, args.results.absolute(), args.seed, args.seconds)
            return
        node(1, {"near": 1.0}, folder)
        node(2, {"far": 1.0}, folder)
        if args.case == "speed":
            pairs = [
                (
                    rate(folder, f"one{at}", ray=False, seconds=args.seconds),
                    rate(folder, f"two{at}", ray=True, seconds=args.seconds),
                )
                for at in range(3)
            ]
            for one, two in pairs:
                print(f"one machine {one:,.0f} steps/s, two namespaces {two:,.0f}, ratio {two / one:.2f}")
            return
        most = 10**9 if args.case == "head" else 200_000  # the run outlives the time in which it waits for the head
        process = train(folder, "run", ray=True, steps=most, batch=256, buffer=2048)
        wait_for(folder, "run", process, 20_000)
        began = time.monotonic()
        if args.case == "node" or (args.case == "cut" and args.seconds > SHORT_S):
            node(3, {"far": 1.0}, folder)
        if args.case == "cut":
            shell("ip", "link", "set", "sparringv2", "down")
            time.sleep(args.seconds)
            shell("ip", "link", "set", "sparringv2", "up")
        else:
            words = ("raylet", "gcs_server")
            for found_process in raylet_processes(2 if args.case == "node" else 0):
                if any(word in " ".join(found_process.cmdline()[:1]) for word in words):
                    found_process.kill()
        status = process.wait()
        print((folder / "run.txt").read_text()[-3000:])
        summary = json.loads((folder / "run" / "summary.json").read_text())
        found = summary["behaviors"]["Balance"]
        print(f"status {status} ({summary['status']}) {time.monotonic() - began:.0f} s after the fault")
        print(f"{found['step_counts']}, losses {found['losses']}, unaccounted {found['unaccounted']}")
        print(f"checkpoint {found['checkpoint']}")


if __name__ == "__main__":
    main()
