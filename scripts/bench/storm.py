"""Simulators that come and go at random: `python scripts/bench/storm.py [--seconds 120] [--tls]`.

200 simulators connect, play some frames, drop (with a Bye, without one, or in the middle of a message) and connect
again, for two minutes, beside 4 healthy ones at 50 frames/s each in a process of their own. Printed: memory and
descriptors of stepping before, during and after; whether a healthy simulator was lost; and the time from a healthy
simulator's Step to its Act, before and during, as it measured it itself.

The storm shares the machine with the run: with few cores, the latencies include the CPU time that the storm takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from live_run import LightSimulator, LiveRun, beside, percentile

from sparring.pipeline.messages.codec import to_bytes
from sparring.pipeline.messages.simulator import Ping
from sparring.pipeline.security import making

HEALTHY = 4
AGENTS = 8
FRAME_S = 0.02
STORMING_AGENTS = 1


# ---------------------------------------------------------------- the other processes


async def healthy(address: tuple[str, int], keys: Path | None) -> None:
    """Plays until a line arrives on standard input; then prints latencies and lost connections."""
    lights = [LightSimulator(address, keys, f"healthy-{k}", AGENTS, k) for k in range(HEALTHY)]
    lost: list[str] = []

    async def stay(light: LightSimulator) -> None:
        await _open(light)
        try:
            await light.play(10**9, FRAME_S)
        except (OSError, asyncio.IncompleteReadError) as error:
            lost.append(repr(error))

    tasks = [asyncio.create_task(stay(light)) for light in lights]
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for light in lights:
        await light.close()
    print(json.dumps({"lost": lost, "latencies": [pair for light in lights for pair in light.latencies]}))


async def _open(light: LightSimulator) -> None:
    """Connects as soon as the run listens."""
    while True:
        try:
            return await light.open()
        except ConnectionRefusedError:
            await asyncio.sleep(0.2)


async def storm(address: tuple[str, int], keys: Path | None, count: int, seconds: float, seed: int) -> None:
    """Connects and disconnects many simulators, for a time."""
    end, counts = time.monotonic() + seconds, Counter[str]()

    async def one(k: int) -> None:
        rng = random.Random(seed * 1000 + k)
        await asyncio.sleep(rng.uniform(0, 2))
        while time.monotonic() < end:
            name = f"storming-{k}" if keys is None else "storming"
            light = LightSimulator(address, keys, name, STORMING_AGENTS, 100 + k)
            try:
                await light.open()
                counts["connected"] += 1
                await light.play(rng.randrange(1, 20), rng.uniform(0, 0.1))
                await _leave(light, rng)
            except (OSError, asyncio.IncompleteReadError) as error:
                counts[f"{type(error).__name__}: {error}"[:150]] += 1
                await light.drop()
            await asyncio.sleep(rng.uniform(0, 3))

    await asyncio.gather(*(one(k) for k in range(count)))
    print(json.dumps(counts))


async def _leave(light: LightSimulator, rng: random.Random) -> None:
    how = rng.randrange(3)
    if how == 0:
        await light.close()
    else:
        await light.drop(b"" if how == 1 else to_bytes(Ping())[: rng.randrange(1, 40)])


# ---------------------------------------------------------------- the run


def usage_of(run: LiveRun) -> dict[str, float]:
    """Measures memory and descriptors of stepping."""
    process = run.stepping
    return {"rss_mb": round(process.memory_info().rss / 1e6, 1), "descriptors": process.num_fds()}


def measure(args: argparse.Namespace, folder: Path) -> bool:
    """Runs the benchmark, prints its results, and returns whether the bars hold."""
    keys = folder / "keys" if args.tls else None
    if keys is not None:
        making.make(keys, [*(f"healthy-{k}" for k in range(HEALTHY)), "storming"])
    pipeline: dict[str, Any] = {"address": "tcp://127.0.0.1:0"} | ({"keys": str(keys)} if keys else {})
    with LiveRun(folder, [], pipeline, buffer=8192) as run:
        while not (run.directory / "run.json").exists():
            time.sleep(0.2)
        time.sleep(args.settle)
        own = [str(Path(__file__)), "--address", json.dumps(run.address), "--keys", str(keys or "")]
        with beside(*own, "--as", "healthy") as staying:
            run.wait(2)
            warm = _storm(own, args, args.warm)  # what the first connections load stays loaded
            time.sleep(args.settle)
            before, calm = usage_of(run), (time.monotonic(), run.rate(args.calm))
            print(json.dumps({"before": before, "steps_per_s": round(calm[1])}), flush=True)
            during = time.monotonic()
            came = _storm(own, args, args.seconds)
            stormed = time.monotonic()
            time.sleep(args.settle)
            after, rate = usage_of(run), run.rate(args.calm / 2)
            output, _ = staying.communicate("end\n", timeout=60)
        log = run.log("stepping-0")
    healthy_run = json.loads(output)
    calm_s = [s for at, s in healthy_run["latencies"] if calm[0] <= at < during]
    storm_s = [s for at, s in healthy_run["latencies"] if during <= at < stormed]
    lost = [
        line
        for line in log
        if line["event"] in ("simulator_lost", "simulator_silent") and (line.get("number") or 0) < HEALTHY
    ]
    ratio = percentile(storm_s, 0.99) / percentile(calm_s, 0.99)
    figures = {
        "warm-up": warm,
        "storm": came,
        "after": after,
        "steps_per_s_after": round(rate),
        "healthy_lost": healthy_run["lost"] + lost,
        "latency_ms_before": _summary(calm_s),
        "latency_ms_during": _summary(storm_s),
        "p99_ratio": round(ratio, 2),
        "lines_logged": Counter(line["event"] for line in log),
        "exit_status": run.status,
    }
    print(json.dumps(figures, indent=1))
    grown_mb = after["rss_mb"] - before["rss_mb"]
    held = {
        "memory": grown_mb < args.grown_mb,
        "descriptors": after["descriptors"] <= before["descriptors"] + 4,
        "no healthy simulator lost": not figures["healthy_lost"],
        "p99 below 3 times": ratio < 3,
    }
    print(json.dumps({"grown_mb": round(grown_mb, 1), **held}))
    return all(held.values())


def _storm(own: list[str], args: argparse.Namespace, seconds: float) -> dict[str, int]:
    with beside(*own, "--as", "storm", "--seconds", str(seconds), "--count", str(args.count)) as process:
        output, _ = process.communicate(timeout=seconds + 120)
    counts: dict[str, int] = json.loads(output)
    return counts


def _summary(seconds: list[float]) -> dict[str, float]:
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {
        "frames": len(seconds),
        **{name: round(1e3 * percentile(seconds, share), 2) for name, share in shares.items()},
    }


def main() -> int:
    """Runs the benchmark, or one of its further processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="of the storm")
    parser.add_argument("--calm", type=float, default=30.0, help="seconds that are measured before it")
    parser.add_argument("--warm", type=float, default=15.0, help="seconds of a first storm, not measured")
    parser.add_argument("--settle", type=float, default=3.0, help="seconds of rest between these")
    parser.add_argument("--count", type=int, default=200, help="simulators in the storm")
    parser.add_argument("--grown-mb", type=float, default=30.0, help="growth of memory that is no leak")
    parser.add_argument("--tls", action="store_true", help="with certificates")
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--keys", default="", help=argparse.SUPPRESS)
    parser.add_argument("--as", dest="role", choices=["healthy", "storm"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    keys = Path(args.keys) if args.keys else None
    if args.role == "healthy":
        asyncio.run(healthy(tuple(json.loads(args.address)), keys))
    elif args.role == "storm":
        asyncio.run(storm(tuple(json.loads(args.address)), keys, args.count, args.seconds, seed=1))
    else:
        with tempfile.TemporaryDirectory() as folder:
            return 0 if measure(args, Path(folder)) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
