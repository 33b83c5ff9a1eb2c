"""Kills and pauses random services of one real run, and follows every decision to the weights.

    scripts/chaos [--minutes 20] [--mode overlap|lockstep] [--seed 1]

Two simulators number their decisions. Every few seconds one to all services get SIGKILL within half a second, or
SIGSTOP for up to ten seconds, some beyond the deadline of their heartbeat. At the end these must hold:

    once          no decision is trained twice in the lineage of the final weights, and none that no simulator made
    trained       the lineage holds as many decisions as the run reports as trained
    accounting    produced = trained + ghost + stale + lost + open; the losses by cause sum to lost
    unaccounted   0: the simulators count as many steps as the run (after a long pause of stepping they are restarted,
                  and only what they have told stepping is left to compare)

Prints what was done and lost, and exits with status 1 where a condition is broken.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from tests.faults.judge import expect, expect_balance
from tests.faults.trial import RECOVERY_S, SILENCE_S, continue_process
from tests.services.services_helpers import Training, progress
from tests.services.started import SAME_EVERYWHERE

ROOT = Path(__file__).parents[2]
BEHAVIOR = "Chaos"
SERVICES = ("stepping-0", "assembly", "coordination", f"learning-{BEHAVIOR}", "monitor")
PAUSE_S = 0.012


def configuration(folder: Path, mode: str) -> dict[str, Any]:
    """Returns the settings of the run."""
    command = [sys.executable, "-m", "tests.faults.numbered_simulator", str(folder), str(PAUSE_S)]
    return {
        "behaviors": {
            BEHAVIOR: {
                "hyperparameters": {"batch_size": 128, "buffer_size": 1024, "num_epoch": 1},
                "network_settings": {"hidden_units": 16, "num_layers": 1},
                "max_steps": 10**9,
                "time_horizon": 64,
                "checkpoint_interval": 8192,
                "summary_freq": 1024,
            }
        },
        "simulators": [{"command": command, "count": 2}],
        "pipeline": {
            "mode": mode,
            "recovery_interval": RECOVERY_S,
            "heartbeat_s": 1.0,
            "simulator_timeout_s": SILENCE_S,
            "restarts": {"budget": 10**6, "backoff_s": 0.2, "backoff_max_s": 1.0},
        },
    }


def disturb(training: Training, chance: random.Random, done: Counter[str]) -> None:
    """Kills or pauses one to all services."""
    chosen = chance.sample(SERVICES, chance.randint(1, len(SERVICES)))
    kills = chance.random() < 0.6
    paused = []
    for service in chosen:
        pid = training.pid(service)
        with contextlib.suppress(ProcessLookupError):  # it has ended, and its next incarnation has not started
            os.kill(pid, signal.SIGKILL if kills else signal.SIGSTOP)
            done[f"{'kill' if kills else 'pause'} {service}"] += 1
            if not kills:
                paused.append(pid)
        time.sleep(chance.uniform(0, 0.5))
    if paused:
        time.sleep(chance.uniform(0.5, 10.0))
    for pid in paused:
        continue_process(pid)


def lineage(audit: Path) -> list[int]:
    """Returns the numbers of the decisions in the updates that lead to the last weights."""
    updates: list[tuple[int, list[int]]] = []
    kept = 0  # highest version that a new incarnation of the learner continues from
    for line in audit.read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "start":
            kept = 0
        elif event["event"] == "restore":
            kept = event["version"]
            updates = [one for one in updates if one[0] <= kept]
        else:
            updates = updates if kept else []
            kept = event["version"]
            updates.append((event["version"], event["numbers"]))
    return [number for _, numbers in updates for number in numbers]


def judge(training: Training, audit: Path) -> None:
    """Checks a run that has ended, and prints its counts.

    Raises:
        Violation: a condition is broken.
    """
    summary = training.summary
    found = summary["behaviors"][BEHAVIOR]
    numbers = lineage(audit)
    twice = [number for number, count in Counter(numbers).items() if count > 1]
    print(f"step counts {found['step_counts']}, lost by cause {found['losses']}, unaccounted {found['unaccounted']}")
    counted = training.simulator_steps()
    print(f"decisions in the lineage {len(numbers)}, twice {len(twice)}, simulators counted {counted}")
    expect(summary["status"] == "stopped", f"status {summary['status']}: {summary['error']}")
    expect(not twice, f"{len(twice)} decisions were trained twice, such as {twice[:5]}")
    expect(min(numbers) > 0, "a decision was trained that no simulator made")
    expect(len(numbers) == found["steps"], f"{len(numbers)} decisions in the lineage, {found['steps']} trained")
    expect_balance(found["step_counts"])
    expect(sum(found["losses"].values()) == found["step_counts"]["lost"], "lost steps without a cause")
    expect(found["unaccounted"] == 0, f"{found['unaccounted']} steps unaccounted")
    if not any(entry["event"] == "failed" and entry["part"].startswith("simulator") for entry in training.log()):
        expect(counted == found["step_counts"]["produced"], "simulators count other steps than the run")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="duration (%(default)g)")
    parser.add_argument("--mode", choices=("overlap", "lockstep"), default="overlap", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the faults and of the run (%(default)s)")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    audit, file = folder / "audit.jsonl", folder / "chaos.yaml"
    file.write_text(yaml.safe_dump(configuration(folder, args.mode)))
    path = os.pathsep.join([str(ROOT / "tests" / "faults" / "audited"), str(ROOT)])
    environment = {**SAME_EVERYWHERE, "CHAOS_AUDIT": str(audit), "PYTHONPATH": path}
    training = Training(folder, str(file), "--seed", str(args.seed), environment=environment, apart=True)
    chance, done = random.Random(args.seed), Counter[str]()
    training.wait_for(lambda lines: bool(progress(lines, BEHAVIOR)))
    ends_at = time.monotonic() + 60 * args.minutes
    try:
        while time.monotonic() < ends_at and training.process.poll() is None:
            time.sleep(chance.uniform(2.0, 10.0))
            disturb(training, chance, done)
        time.sleep(2 * SILENCE_S)
        training.process.send_signal(signal.SIGINT)
        training.end(300.0)
        print(", ".join(f"{what} {count}" for what, count in sorted(done.items())))
        judge(training, audit)
    except (AssertionError, OSError) as error:
        print(f"broken: {error}\nkept: {folder}")
        return 1
    finally:
        if training.process.poll() is None:
            training.process.kill()
    shutil.rmtree(folder)
    print("ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
