"""The cost of a message: put and get of a 4 KB record of 15 arrays over ipc between two processes.

For each loop the figures are CPU time of both processes together, ZeroMQ's own threads and the
codec included, and messages per second; beside them a bare pyzmq PUSH/PULL of the same frames in the
same run, without codec, credit or event loop.

    python scripts/bench/queues.py [--messages 20000] [--rate 2000] [--uvloop]

`--rate` is the pace of a second comparison, in which every message wakes both processes' threads; the
sender's CPU time there includes its sleeps between messages.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import zmq

from sparring.pipeline.messages import codec
from sparring.pipeline.messages.channels import Queue
from sparring.pipeline.messages.schema import Observation, record
from sparring.pipeline.queues.interface import Capacity
from sparring.pipeline.queues.zmq import ZmqTransport

NAME = "steps"
STEPS = 12
CAPACITY = Capacity(messages=256, steps=256 * STEPS)


@record("bench_columns")
class Columns:
    source: str
    tick: int
    columns: tuple[Observation, ...]


QUEUE = Queue(NAME, Columns)


def columns() -> Columns:
    """Makes a record of 15 arrays, 4 KB together."""
    return Columns(
        source="stepping-0.1",
        tick=1,
        columns=(*(np.zeros((12, 6), np.float32) for _ in range(14)), np.zeros(12, np.float32)),
    )


def report(messages: int, wall: float, cpu: float) -> None:
    """Prints the result and waits for that of the other end: a bare PUSH that closes early loses messages."""
    print(json.dumps({"messages": messages, "wall": wall, "cpu": cpu}), flush=True)
    sys.stdin.read()


async def put(endpoint: str, messages: int, rate: float) -> None:
    value = columns()
    async with ZmqTransport({NAME: endpoint}, "sender.1") as transport:
        queue = await transport.sender(QUEUE)
        await queue.put(value, STEPS)
        await queue.drain()
        began, cpu = time.perf_counter(), time.process_time()
        for index in range(messages):
            await queue.put(value, STEPS)
            ahead = began + index / rate - time.perf_counter() if rate else 0.0
            if ahead > 0:
                await anyio.sleep(ahead)
        await queue.drain()
        result = messages, time.perf_counter() - began, time.process_time() - cpu
        await anyio.to_thread.run_sync(report, *result)


async def get(endpoint: str, messages: int) -> None:
    async with ZmqTransport({NAME: endpoint}, "receiver.1") as transport:
        queue = await transport.receiver(QUEUE, CAPACITY)
        await queue.get()
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(messages):
            await queue.get()
        result = messages, time.perf_counter() - began, time.process_time() - cpu
        await anyio.to_thread.run_sync(report, *result)


def push(endpoint: str, messages: int, rate: float) -> None:
    frames = codec.encode(columns())
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(endpoint)
        socket.send_multipart(frames)
        began, cpu = time.perf_counter(), time.process_time()
        for index in range(messages):
            socket.send_multipart(frames)
            ahead = began + index / rate - time.perf_counter() if rate else 0.0
            if ahead > 0:
                time.sleep(ahead)
        report(messages, time.perf_counter() - began, time.process_time() - cpu)


def pull(endpoint: str, messages: int) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.bind(endpoint)
        socket.recv_multipart()
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(messages):
            socket.recv_multipart()
        report(messages, time.perf_counter() - began, time.process_time() - cpu)


def measure(label: str, ends: tuple[str, str], arguments: list[str]) -> float:
    """Runs both ends, prints a line, returns microseconds of CPU per message."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__)), "--endpoint", f"ipc://{folder}/q", *arguments]
        pipe = subprocess.PIPE
        processes = [subprocess.Popen([*command, "--end", end], stdin=pipe, stdout=pipe) for end in ends]
        results: list[dict[str, Any]] = [
            json.loads(process.stdout.readline()) for process in processes if process.stdout
        ]
        for process in processes:
            process.communicate(timeout=10)
    cost = [1e6 * result["cpu"] / result["messages"] for result in results]
    rate = results[1]["messages"] / results[1]["wall"]
    print(
        f"{label:38s} {rate:9,.0f} messages/s  {cost[0]:6.1f} + {cost[1]:6.1f} = {sum(cost):6.1f} us of CPU per message"
    )
    total: float = sum(cost)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--rate", type=float, default=2_000.0)
    parser.add_argument("--uvloop", action="store_true")
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    parser.add_argument("--end", choices=["put", "get", "push", "pull"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    options = {"use_uvloop": given.uvloop}
    if given.end == "put":
        anyio.run(put, given.endpoint, given.messages, given.rate, backend_options=options)
    elif given.end == "get":
        anyio.run(get, given.endpoint, given.messages, backend_options=options)
    elif given.end == "push":
        push(given.endpoint, given.messages, given.rate)
    elif given.end == "pull":
        pull(given.endpoint, given.messages)
    else:
        compare(given.messages, given.rate, given.uvloop)


def compare(messages: int, rate: float, uvloop: bool) -> None:
    value = columns()
    frames = codec.encode(value)
    print(f"{len(frames) - 1} arrays, {sum(map(len, frames)):,} bytes, {'uvloop' if uvloop else 'asyncio'}")
    loop = ["--uvloop"] if uvloop else []
    for pace in (0.0, rate) if rate else (0.0,):
        label = f"{pace:,.0f} messages/s" if pace else "as fast as it goes"
        arguments = ["--messages", str(int(3 * pace) or messages), "--rate", str(pace), *loop]
        bare = measure(f"bare PUSH/PULL, {label}", ("push", "pull"), arguments)
        full = measure(f"queue, {label}", ("put", "get"), arguments)
        print(f"{'ratio':38s} {full / bare:9.2f}")
    began = time.process_time()
    for _ in range(2_000):
        codec.decode(codec.encode(value))
    print(f"of that the codec, both ways {(time.process_time() - began) / 2_000 * 1e6:12.1f} us")


if __name__ == "__main__":
    main()
