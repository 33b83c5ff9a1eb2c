"""A scripted trainer, and helpers that tests of games share."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from sparring.pipeline.messages.codec import FrameReader, from_bytes, to_bytes
from sparring.pipeline.messages.simulator import (
    Act,
    BehaviorActions,
    BehaviorReport,
    Decisions,
    Ends,
    Hello,
    Ping,
    Pong,
    Reset,
    Step,
    Welcome,
)
from sparring.pipeline.specs import BehaviorSpec

DEADLINE_S = 20.0


class Peer:
    """The trainer's end of one connection."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.socket.settimeout(DEADLINE_S)
        self.pings = 0
        self._reader = FrameReader()

    def next(self) -> Any:
        """Returns the next message of any kind, or None at the end of the stream."""
        while (message := self._reader.next()) is None:
            data = self.socket.recv(65536)
            if not data:
                return None
            self._reader.feed(data)
        return message

    def receive(self, kind: type[Any]) -> Any:
        """Returns the next message and answers Pings before it."""
        while isinstance(message := self.next(), Ping):
            self.pings += 1
            self.send(Pong(number=message.number))
        assert isinstance(message, kind), message
        return message

    def send(self, message: Any, piece: int | None = None) -> None:
        data = to_bytes(message)
        for at in range(0, len(data), piece or len(data)):
            self.socket.sendall(data[at : at + (piece or len(data))])

    def greet(self, reset: Reset | None = None, *, heartbeat_s: float = 60.0, timeout_s: float = DEADLINE_S) -> Hello:
        hello: Hello = self.receive(Hello)
        self.send(Welcome(version=1, connection=1, heartbeat_s=heartbeat_s, timeout_s=timeout_s))
        self.send(reset or Reset(seed=7))
        return hello

    def close(self) -> None:
        self.socket.close()


class Trainer:
    """A listener whose script runs in its own thread."""

    def __init__(self, listener: socket.socket, address: str) -> None:
        self.address = address
        self._listener = listener
        self._listener.settimeout(DEADLINE_S)
        self._listener.listen()
        self._pool = ThreadPoolExecutor(1)
        self._script: Future[Any] | None = None
        self._peers: list[Peer] = []

    def accept(self) -> Peer:
        self._peers.append(Peer(self._listener.accept()[0]))
        return self._peers[-1]

    def play(self, script: Callable[[Trainer], Any]) -> str:
        """Starts the script and returns the address to connect to."""
        self._script = self._pool.submit(self._play, script)
        return self.address

    def _play(self, script: Callable[[Trainer], Any]) -> Any:
        try:
            return script(self)
        finally:
            for peer in self._peers:
                peer.close()

    def result(self) -> Any:
        """Returns the result of the script, or raises its failure."""
        assert self._script is not None
        return self._script.result(DEADLINE_S)

    def close(self) -> None:
        self._listener.close()
        self._pool.shutdown()


def actions_for(
    report: BehaviorReport, spec: BehaviorSpec, random: np.random.Generator | None = None
) -> BehaviorActions:
    """Returns zero or random actions for the decisions of a report."""
    assert report.decisions is not None
    agents = report.decisions.agents
    shape = (agents.size, spec.actions.continuous)
    branches = np.array(spec.actions.discrete, np.int64)
    discrete = np.zeros((agents.size, branches.size), np.int32)
    continuous = np.zeros(shape, np.float32)
    if random is not None:
        continuous = random.uniform(-1, 1, shape).astype(np.float32)
        discrete = random.integers(0, branches, discrete.shape).astype(np.int32)
    return BehaviorActions(behavior=report.behavior, agents=agents, continuous=continuous, discrete=discrete)


def act_for(step: Step, hello: Hello) -> Act:
    """Returns zero actions for every decision of a Step."""
    reports = [report for report in step.reports if report.decisions is not None]
    return Act(
        sequence=step.sequence,
        actions=tuple(actions_for(report, hello.behaviors[report.behavior]) for report in reports),
    )


def check_report(report: BehaviorReport, specs: dict[str, BehaviorSpec]) -> None:
    """Checks that a report fits its spec: shapes, dtypes, finite numbers, unique agent ids."""
    spec = specs[report.behavior]
    assert from_bytes(to_bytes(report)).behavior == report.behavior  # the codec accepts every column
    for rows in (report.decisions, report.ends):
        if rows is None:
            continue
        n = rows.agents.size
        assert n > 0
        assert np.unique(rows.agents).size == n
        check_columns(rows, n)
        for observation, expected in zip(rows.observations, spec.observations, strict=True):
            assert observation.shape == (n, *expected.shape)
            assert observation.dtype == expected.dtype
            assert np.isfinite(observation).all()


def check_columns(rows: Decisions | Ends, n: int) -> None:
    columns = {"agents": "int64", "rewards": "float32"}
    optional = {"groups": "int64", "group_rewards": "float32", "matches": "int64", "outcomes": "float32"}
    optional |= {"interrupted": "bool"}
    for name, dtype in (columns | optional).items():
        column = getattr(rows, name, None)
        if column is None and name in optional:
            continue
        assert (column.shape, column.dtype) == ((n,), np.dtype(dtype)), name
        assert np.isfinite(column).all()
