"""The effect of random kills on learning: `python scripts/bench/kills.py [--minutes 20] [--every 20] [--seeds 1 2]`.

For each seed two runs of the same settings side by side: in one, a random service or simulator is
killed (-9) every 20 seconds, with recovery checkpoints every 5 s; in the other none. Both end at the same number of
trained steps, because steps and not minutes decide what is learned: simulators are slowed so that the steps take about
the given minutes, and the run with kills takes longer by what it repeats and waits.

Prints for each run the mean return over the last tenth of its steps and over all of them, the lost steps, and the kills
by part. Exit status 1 if a run did not complete, if its step counts do not balance, or if the learning results differ
by more than the seeds do: in each of both results the means of the two kinds may differ by twice the standard error of
their difference, taken from the spread of the seeds, or by 5 % of what was learned if that is more, because the spread
of a few seeds may be small by chance.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.services.services_helpers import Training, balanced
from tests.services.started import SAME_EVERYWHERE

PARTS = ("simulator-0", "simulator-1", "stepping-0", "assembly", "coordination", "learning-Balance", "monitor")
STEPS_PER_S = 500
SLOW_MS = 45.0
"""Longest wait of a simulator before a step, with which sixteen agents make about `STEPS_PER_S`."""
AGAINST_CHANCE = 0.05


def configuration(steps: int) -> dict[str, Any]:
    """Returns the configuration of all runs, with constant schedules, so that progress decides only the end."""
    command = [sys.executable, "-m", "sparring", "simulator", "balance", "--areas", "8", "--slow", str(SLOW_MS)]
    return {
        "behaviors": {
            "Balance": {
                "hyperparameters": {
                    "batch_size": 64,
                    "buffer_size": 2048,
                    "learning_rate": 0.0003,
                    "learning_rate_schedule": "constant",
                },
                "network_settings": {"normalize": True, "hidden_units": 64, "num_layers": 2},
                "max_steps": steps,
                "time_horizon": 256,
                "summary_freq": max(2048, steps // 50),
                "checkpoint_interval": steps,
            }
        },
        "simulators": [{"command": [*command, "--timeout", "300"], "count": 2}],
        "pipeline": {
            "recovery_interval": 5.0,
            "heartbeat_s": 2.0,
            "simulator_timeout_s": 30.0,
            "restarts": {"budget": 10_000, "period_s": 600.0, "backoff_s": 0.5, "backoff_max_s": 0.5},
        },
    }


@dataclass
class KillRun:
    """One run.

    Attributes:
        seed: of the run.
        killed: whether its parts are killed.
        training: its process and files.
        deaths: number of kills by part.
    """

    seed: int
    killed: bool
    training: Training
    deaths: Counter[str] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        return f"seed {self.seed}, {'deaths' if self.killed else 'none'}"

    @property
    def running(self) -> bool:
        return self.training.process.poll() is None

    def kill_one(self, chance: random.Random) -> None:
        """Kills a part, unless it is just being restarted."""
        if self.running and self.started:
            part = chance.choice(PARTS)
            with contextlib.suppress(OSError, IndexError):
                self.training.kill(part)
                self.deaths[part] += 1

    @property
    def started(self) -> bool:
        return (self.training.directory / "Balance" / "version").exists()

    def rewards(self) -> tuple[float, float]:
        """Returns the mean return of episodes over the last tenth of the steps, and over all."""
        rows = []
        for line in (self.training.directory / "metrics.jsonl").read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if row.get("type") == "interval" and row["reward"] is not None:
                    rows.append((row["step"], row["reward"]))
        # Updates that were rolled back are not in the lineage: the last line of each step counts.
        lineage: list[tuple[int, float]] = []
        for step, reward in rows:
            while lineage and lineage[-1][0] >= step:
                lineage.pop()
            lineage.append((step, reward))
        end = [reward for step, reward in lineage if step > 0.9 * lineage[-1][0]]
        return statistics.fmean(end), statistics.fmean(reward for _, reward in lineage)

    def faults(self) -> list[str]:
        """Lists what is wrong with its end."""
        found = []
        if self.training.end(60) != 0 or self.training.summary["status"] != "completed":
            found.append(f"{self.name}: did not complete: {self.training.lines[-3:]}")
            return found
        step_counts = self.training.summary["behaviors"]["Balance"]["step_counts"]
        if not balanced(step_counts):
            found.append(f"{self.name}: got step counts {step_counts}; expected a balance")
        losses = self.training.summary["behaviors"]["Balance"]["losses"]
        if sum(losses.values()) != step_counts["lost"]:
            found.append(f"{self.name}: got {step_counts['lost']} lost steps; expected those with a cause, {losses}")
        return found


def run(folder: Path, minutes: float, every_s: float, seeds: list[int], limit_s: float) -> list[KillRun]:
    """Trains all runs side by side, to their end or the limit."""
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(configuration(int(minutes * 60 * STEPS_PER_S))))
    runs = []
    for seed in seeds:
        for killed in (True, False):
            run_id = f"{seed}-{'deaths' if killed else 'none'}"
            own = Training(
                folder, str(file), "--seed", str(seed), run_id=run_id, environment=SAME_EVERYWHERE, apart=True
            )
            runs.append(KillRun(seed, killed, own))
    chance = random.Random(1)
    began = time.monotonic()
    while any(one.running for one in runs):
        until = time.monotonic() + every_s
        while time.monotonic() < until and any(one.running for one in runs):
            time.sleep(0.1)
        for one in runs:
            if one.killed:
                one.kill_one(chance)
        if time.monotonic() - began > limit_s:
            for one in runs:
                one.training.process.send_signal(signal.SIGTERM)
            break
    return runs


def differ(kind: str, with_deaths: list[float], without: list[float], floor: float) -> str | None:
    """Compares a result of both kinds of runs; returns a line where they differ by more than chance."""
    spread = [statistics.variance(values) if len(values) > 1 else 0.0 for values in (with_deaths, without)]
    chance = 2 * math.sqrt(sum(spread) / len(without))
    learned = statistics.fmean(without) - floor
    allowed = max(chance, AGAINST_CHANCE * abs(learned))
    found = statistics.fmean(with_deaths) - statistics.fmean(without)
    print(
        f"{kind}: {statistics.fmean(with_deaths):.2f} with deaths, {statistics.fmean(without):.2f} without; "
        f"differ by {found:+.2f}, allowed {allowed:.2f} (seeds: {chance:.2f})"
    )
    return None if abs(found) <= allowed else f"{kind} differs by {found:+.2f}, more than {allowed:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="that a run takes without deaths (%(default)g)")
    parser.add_argument("--every", type=float, default=20.0, help="seconds from one death to the next (%(default)g)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="two runs for each (%(default)s)")
    parser.add_argument("--limit", type=float, default=90.0, help="minutes after which all are stopped (%(default)g)")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    began = time.monotonic()
    runs = run(folder, args.minutes, args.every, args.seeds, args.limit * 60)
    wrong = [fault for one in runs for fault in one.faults()]
    print(f"{'run':<16} {'wall':>7} {'end':>8} {'all':>8} {'lost':>8}  deaths")
    rewards = {}
    for one in runs:
        rewards[one.seed, one.killed] = one.rewards()
        summary = one.training.summary
        step_counts = summary["behaviors"]["Balance"]["step_counts"]
        end, whole = rewards[one.seed, one.killed]
        print(
            f"{one.name:<16} {summary['wall_s']:>6.0f}s {end:>8.2f} {whole:>8.2f} {step_counts['lost']:>8}  "
            f"{sum(one.deaths.values())}: {dict(sorted(one.deaths.items()))}"
        )
    for at, kind in enumerate(("end", "all")):
        values = [[rewards[seed, killed][at] for seed in args.seeds] for killed in (True, False)]
        verdict = differ(kind, values[0], values[1], floor=0.0)
        if verdict is not None:
            wrong.append(verdict)
    print(f"{time.monotonic() - began:.0f} s, in {folder}")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
