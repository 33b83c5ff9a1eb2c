"""A real run, and light simulators that connect to it, for `unauthenticated.py` and `storm.py`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from sparring.pipeline.games.registry import make
from sparring.pipeline.messages.codec import FrameReader, to_bytes
from sparring.pipeline.messages.simulator import (
    VERSION,
    Act,
    BehaviorReport,
    Bye,
    Decisions,
    Fault,
    Hello,
    Ping,
    Reset,
    Step,
    Welcome,
)
from sparring.pipeline.security import client_tls

SPECS = dict(make("balance", 1).behaviors())
(BEHAVIOR,) = SPECS
SMALL = {"hidden_units": 32, "num_layers": 1}
CONFIG = """
behaviors:
  {behavior}:
    trainer_type: {trainer}
    hyperparameters: {{batch_size: {batch}, buffer_size: {buffer}, num_epoch: 1}}
    network_settings: {network}
    max_steps: 1000000000
    time_horizon: 64
    summary_freq: 1000000
simulators: {simulators}
pipeline: {pipeline}
"""


class LiveRun:
    """A run of `sparring train`, from its start to its end in order.

    Args:
        folder: for its files.
        simulators: that it launches.
        pipeline: settings of that section.
        buffer: `buffer_size` of the learner.
        batch: its `batch_size`.
        network: its network.
        behavior: its name.
        trainer: its `trainer_type`.
    """

    def __init__(
        self,
        folder: Path,
        simulators: Sequence[dict[str, Any]],
        pipeline: dict[str, Any],
        buffer: int,
        batch: int = 512,
        network: Mapping[str, Any] = SMALL,
        behavior: str = "Balance",
        trainer: str = "ppo",
    ) -> None:
        self._behavior = behavior
        values = {"simulators": list(simulators), "pipeline": pipeline, "network": network}
        texts = {name: json.dumps(value) for name, value in values.items()}
        config = folder / "live.yaml"
        plain = {"buffer": buffer, "batch": batch, "behavior": behavior, "trainer": trainer}
        config.write_text(CONFIG.format(**plain, **texts))
        self.directory = folder / "run"
        self._output = (folder / "console.txt").open("w")
        command = [sys.executable, "-m", "sparring", "train", str(config), "--results-dir", str(folder)]
        self._process = psutil.Popen([*command, "--run-id", "run", "--no-export"], stdout=self._output)

    def __enter__(self) -> LiveRun:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self.status = self._process.wait(120)
        except psutil.TimeoutExpired:
            self._process.kill()
            raise
        finally:
            self._output.close()

    def wait(self, updates: int, timeout_s: float = 480.0) -> None:
        """Returns after a number of updates."""
        deadline = time.monotonic() + timeout_s
        while self._figures().get("updates", 0) < updates:
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise SystemExit(f"got fewer than {updates} updates in {timeout_s:g} s; see {self.directory / 'logs'}")
            time.sleep(0.2)

    @property
    def address(self) -> tuple[str, int]:
        """The address for simulators."""
        host, _, port = self.plan["addresses"]["stepping-0"].removeprefix("tcp://").rpartition(":")
        return host, int(port)

    @property
    def plan(self) -> dict[str, Any]:
        """The content of `run.json`."""
        plan: dict[str, Any] = json.loads((self.directory / "run.json").read_text())
        return plan

    @property
    def stepping(self) -> psutil.Process:
        """The stepping process."""
        started = [
            line for line in self.log("supervisor") if line["event"] == "started" and line["part"] == "stepping-0"
        ]
        if len(started) != 1:
            raise SystemExit(f"stepping was started {len(started)} times")
        return psutil.Process(started[-1]["pid"])

    def log(self, part: str) -> list[dict[str, Any]]:
        """Returns the log of a part."""
        path = self.directory / "logs" / f"{part}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def produced(self) -> int:
        """Returns the steps produced so far."""
        return int(self._figures()["step_counts"]["produced"])

    def newly_produced(self) -> int:
        """Waits for the monitor's next count, and returns it."""
        before = self.produced()
        while (now := self.produced()) == before:
            time.sleep(0.01)
        return now

    def rate(self, seconds: float) -> float:
        """Measures the steps per second over some seconds."""
        began, steps = time.monotonic(), self.produced()
        time.sleep(seconds)
        return (self.produced() - steps) / (time.monotonic() - began)

    def lines(self, service: str) -> list[dict[str, Any]]:
        """Returns the lines of a service, written every 30 s, each with the counts since the one before."""
        path = self.directory / "services.jsonl"
        lines = map(json.loads, path.read_text().splitlines() if path.exists() else [])
        return [line for line in lines if line["service"] == service]

    def _figures(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError, KeyError):
            status = json.loads((self.directory / "status.json").read_text())
            figures: dict[str, Any] = status["behaviors"][self._behavior]["figures"]
            return figures
        return {}


class LightSimulator:
    """A simulator that sends noise, as one task of many.

    Args:
        address: of the trainer.
        keys: folder of keys, None where nothing is encrypted.
        name: of the simulator and of its certificate.
        agents: number of its agents.
        number: of the simulator.
    """

    def __init__(self, address: tuple[str, int], keys: Path | None, name: str, agents: int, number: int | None) -> None:
        self._address, self._name, self._number = address, name, number
        self._tls: ssl.SSLContext | None = None if keys is None else client_tls(keys, name)
        spec = SPECS[BEHAVIOR]
        noise = np.random.default_rng(number).normal
        self._rows = Decisions(
            agents=np.arange(agents),
            observations=tuple(noise(size=(agents, *one.shape)).astype(np.float32) for one in spec.observations),
            rewards=np.zeros(agents, np.float32),
        )
        self._writer: asyncio.StreamWriter | None = None
        self.latencies: list[tuple[float, float]] = []

    async def open(self) -> None:
        """Connects, sends Hello, and receives Welcome and Reset."""
        host, port = self._address
        self._reader, self._writer = await asyncio.open_connection(
            host,
            port,
            ssl=self._tls,
            server_hostname=host if self._tls else None,
            ssl_handshake_timeout=60 if self._tls else None,
        )
        self._frames, self._sequence = FrameReader(), 0
        self._send(Hello(version=VERSION, name=self._name, behaviors=SPECS, number=self._number))
        for kind in (Welcome, Reset):
            message = await self._receive()
            if not isinstance(message, kind):
                raise ConnectionError(f"{message}")

    async def play(self, frames: int, pause_s: float = 0.0) -> None:
        """Plays some frames and records the latency of each answer."""
        for _ in range(frames):
            began = time.perf_counter()
            report = BehaviorReport(behavior=BEHAVIOR, decisions=self._rows)
            self._send(Step(sequence=self._sequence, reports=(report,)))
            message = await self._receive()
            if isinstance(message, Act):
                self.latencies.append((time.monotonic(), time.perf_counter() - began))
            elif not isinstance(message, Reset):
                raise ConnectionError(f"{message}")
            self._sequence += 1
            if pause_s:
                await asyncio.sleep(pause_s)

    async def close(self) -> None:
        """Sends Bye and closes."""
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._send(Bye())
                await self._writer.drain()
                self._writer.close()
                await self._writer.wait_closed()

    async def drop(self, last: bytes = b"") -> None:
        """Breaks the connection, after some last bytes."""
        if self._writer is None:
            return
        with contextlib.suppress(OSError):
            self._writer.write(last)
            self._writer.transport.abort()
            await self._writer.wait_closed()

    def _send(self, message: Any) -> None:
        assert self._writer is not None
        self._writer.write(to_bytes(message))

    async def _receive(self) -> Any:
        while True:
            while (message := self._frames.next()) is None:
                try:
                    data = await asyncio.wait_for(self._reader.read(2**16), 4.0)
                except TimeoutError:
                    self._send(Ping())
                    continue
                if not data:
                    raise ConnectionError("closed")
                self._frames.feed(data)
            if isinstance(message, Bye | Fault):
                raise ConnectionError(f"{message}")
            if isinstance(message, Welcome | Reset | Act):
                return message


def percentile(values: Sequence[float], share: float) -> float:
    """Returns a quantile of some values; NaN of none."""
    return float(np.quantile(np.array(values), share)) if values else float("nan")


@contextlib.contextmanager
def beside(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Runs a script in another process, which ends when its standard input closes."""
    command = [sys.executable, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as process:
        yield process
