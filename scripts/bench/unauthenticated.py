"""Attacks on a real run: `python scripts/bench/unauthenticated.py [--seconds 6] [--half-open 10000]`.

A run with keys trains with two simulators of its own, and its services use TCP. Each attack lasts some seconds. It
prints for each: the answers that the attacker got, the run's steps per second before and during the attack, what
stepping logged meanwhile, and which warnings other services logged. At the end it checks that the step counts balance,
that nothing restarted, and that no file of the run holds a secret.

The attackers share the machine with the run, so the rates include the CPU time that the attack itself takes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from attacks import ATTACKS, SIMULATOR_TIMEOUT_S, Target, record_conversation
from live_run import LiveRun

from sparring.pipeline.security import making
from sparring.services.endpoint.sockets import allow_descriptors

STEPPING = "stepping-0"
PARTS = (STEPPING, "assembly", "coordination", "learning-Balance", "monitor", "supervisor")
HANDSHAKE_S = 4.0


def main() -> int:
    """Runs all attacks; returns 0 where the run continued undisturbed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="duration of each attack")
    parser.add_argument("--half-open", type=int, default=10_000, help="number of silent connections")
    parser.add_argument("--only", nargs="+", choices=[attack.__name__ for attack in ATTACKS], help="only these attacks")
    args = parser.parse_args()
    allow_descriptors(args.half_open + 500)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        keys, others = folder / "keys", folder / "others"
        making.make(keys, ["simulator-0", "simulator-1", "traitor"])
        making.make(others, ["simulator-0"])
        pipeline = {
            "keys": str(keys),
            "transport": "tcp",
            "simulator_timeout_s": SIMULATOR_TIMEOUT_S,
            "heartbeat_s": 2,
            "limits": {"handshake_timeout_s": HANDSHAKE_S},
        }
        with LiveRun(folder, [{"name": "balance", "count": 2, "areas": 8}], pipeline, buffer=4096) as run:
            run.wait(3)
            chosen = [attack for attack in ATTACKS if not args.only or attack.__name__ in args.only]
            endpoints = run.plan["endpoints"]
            target = Target(run.address, endpoints, run.directory, keys, others, args.seconds, args.half_open)
            record_conversation(target)
            first = {"rss_mb": run.stepping.memory_info().rss / 1e6, "descriptors": run.stepping.num_fds()}
            for attack in chosen:
                _one(attack, target, run)
            time.sleep(min(SIMULATOR_TIMEOUT_S, 2 * args.seconds))
            last = {"rss_mb": run.stepping.memory_info().rss / 1e6, "descriptors": run.stepping.num_fds()}
        summary = json.loads((run.directory / "summary.json").read_text())
        starts = [line for line in run.log("supervisor") if line["event"] == "started"]
        secrets = _secrets_found(keys, folder / "run")
    step_counts = summary["behaviors"]["Balance"]["step_counts"]
    balanced = step_counts["produced"] == sum(value for term, value in step_counts.items() if term != "produced")
    figures = {
        "stepping_before": first,
        "stepping_after": last,
        "step_counts": step_counts,
        "balanced": balanced,
        "restarted": [line["part"] for line in starts if line["start"] > 1],
        "secrets_in_the_run_folder": secrets,
        "exit_status": run.status,
    }
    print(json.dumps(figures, indent=1))
    return 0 if balanced and not figures["restarted"] and not secrets and run.status == 0 else 1


def _one(attack: Callable[[Target], str], target: Target, run: LiveRun) -> None:
    before = run.rate(target.seconds)
    lines, began, steps = {part: len(run.log(part)) for part in PARTS}, time.monotonic(), run.produced()
    got = attack(target)
    during = (run.produced() - steps) / (time.monotonic() - began)
    fresh = [(part, line) for part in PARTS for line in run.log(part)[lines[part] :]]
    logged_lines = [(part, line) for part, line in fresh if part == STEPPING or line["level"] == "warning"]
    logged = Counter(" ".join(filter(None, (part, line["event"], line.get("kind")))) for part, line in logged_lines)
    print(f"{attack.__name__}: {(attack.__doc__ or '').strip()}")
    print(f"    got: {got}")
    print(f"    steps/s: {before:.0f} before, {during:.0f} during; logged: {dict(logged)}", flush=True)


def _secrets_found(keys: Path, directory: Path) -> list[str]:
    """Returns the files of the run that contain a secret."""
    private = [path.read_text().splitlines()[1] for path in (keys / "tls").glob("*.key")]
    secrets = [(keys / "token").read_text().strip(), *private]
    files = [path for path in directory.rglob("*") if path.is_file()]
    return [path.name for path in files if any(secret.encode() in path.read_bytes() for secret in secrets)]


if __name__ == "__main__":
    sys.exit(main())
