"""A simulator with one selectable fault, which the compliance test runs as a thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from sparring.pipeline.compliance.peer import SimulatorProcess
from sparring.pipeline.compliance.rules import Verdict, examine
from sparring.pipeline.errors import SparringError
from sparring.pipeline.messages.codec import FrameReader, to_bytes
from sparring.pipeline.messages.simulator import (
    Act,
    BehaviorReport,
    Behaviors,
    Bye,
    Decisions,
    Ends,
    Fault,
    Hello,
    Ping,
    Pong,
    Reset,
    Step,
    Welcome,
)
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec

SPEC = BehaviorSpec(
    observations=(ObservationSpec(name="o", shape=(2,)),), actions=ActionSpec(continuous=1, discrete=(2, 3))
)
WALK = "Walk?team=0"
LONG_S = 10.0
SHORT_S = 1.0
"""Deadlines of an answer, the short one for simulators that give none; a correct thread needs a fraction of either."""


class ThreadHost(SimulatorProcess):
    """Runs a simulator as a thread, on a new port at each start."""

    def __init__(self, simulator: Callable[[str], None]) -> None:
        self._simulator = simulator
        self._thread: threading.Thread | None = None
        self._failed = False

    def start(self) -> None:
        self.stop()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._failed = False
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, args=(self.address,))
        self._thread.start()

    def ended(self, timeout_s: float) -> str | None:
        assert self._thread is not None
        self._thread.join(timeout_s)
        return None if self._thread.is_alive() else "exit status 1" * self._failed

    def printed(self) -> str:
        return "output"

    def stop(self) -> None:
        if self._thread is not None:
            self._listener.close()
            self._thread.join(10)

    def _run(self, address: str) -> None:
        try:
            self._simulator(address)
        except (SparringError, OSError):
            self._failed = True


def step(sequence: int = 0, *, deciding: Any = (1, 2), ended: Any = (), **columns: Any) -> Step:
    """Returns a Step of the behavior Walk with some columns replaced."""
    part = {name.removeprefix("ends_"): value for name, value in columns.items() if name.startswith("ends_")}
    rest = {name: value for name, value in columns.items() if not name.startswith("ends_")}
    decisions = replace(Decisions(**_columns(deciding)), **rest) if len(deciding) else None
    ends = Ends(**_columns(ended), interrupted=np.zeros(len(ended), np.bool_)) if len(ended) else None
    report = BehaviorReport(behavior=WALK, decisions=decisions, ends=ends and replace(ends, **part))
    return Step(sequence=sequence, reports=(report,))


def _columns(agents: Any) -> dict[str, Any]:
    n = len(agents)
    zeros = np.zeros(n, np.float32)
    return {
        "agents": np.array(agents, np.int64),
        "observations": (np.zeros((n, 2), np.float32),),
        "rewards": zeros,
        "group_rewards": zeros,
    }


def floats(*values: float) -> Any:
    return np.array(values, np.float32)


class Simulator:
    """A simulator with one fault.

    Args:
        quirk: the fault; "" for none.
    """

    def __init__(self, quirk: str = "") -> None:
        self.quirk = quirk

    def __call__(self, address: str) -> None:
        self.steps = self.resets = 0
        self._agents: tuple[int, ...] = ()
        if self.quirk == "absent":
            return
        while self._converse(address) == "lost" and self.quirk != "leaves":
            pass

    def _converse(self, address: str) -> str:
        port = int(address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as self._socket:
            self._sequence, self._open = 0, False
            self._handshake()
            for message in self._messages():
                if (ending := self._answer(message)) is not None:
                    return ending
        return "lost"

    def _handshake(self) -> None:
        if self.quirk == "garbage":
            self._socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
        if self.quirk == "silent handshake":
            return
        first = {"bad id": "Walk?side=1", "late behavior": ""}.get(self.quirk, WALK)
        behaviors = {first: SPEC} if first else {}
        if self.quirk == "two specs":
            behaviors["Walk?team=1"] = replace(SPEC, actions=ActionSpec(continuous=3))
        counted = {"miscounts": {"Walk": self.steps + 1}, "does not count": {}}.get(self.quirk, {"Walk": self.steps})
        hello = Hello(version=2 if self.quirk == "version" else 1, name="quirk", behaviors=behaviors, steps=counted)
        self._send(Step(sequence=0, reports=()) if self.quirk == "step first" else hello)

    def _answer(self, message: Any) -> str | None:
        if isinstance(message, Ping) and self.quirk != "deaf":
            self._send(Pong(number=message.number + (self.quirk == "wrong pong")))
        if isinstance(message, Welcome) and self.quirk == "late behavior":
            return None
        if isinstance(message, Reset | Act):
            self._play(message)
        if isinstance(message, Bye):
            return self._linger() if self.quirk == "stays" else self._leave()
        if isinstance(message, Fault):
            return self._linger() if self.quirk == "stubborn" else "over"
        return None

    def _play(self, message: Reset | Act) -> None:
        settled = self.quirk == "settled" and isinstance(message, Act) and message.parameters
        if settled or (self.quirk == "gives up" and self.steps > 20):
            self._send(Fault(code="internal", got="a crash", expected="none", remedy="mend it"))
            return
        if self.quirk == "late behavior" and self._sequence == 0:
            self._send(Behaviors(behaviors={WALK: SPEC}))
        if isinstance(message, Reset):
            self.resets += 1
            self._agents = (1,) if self.quirk == "shrinks" and self.resets > 1 else (1, 2)
            noise = np.full((len(self._agents), 2), self.resets if self.quirk == "unseeded" else 0, np.float32)
            self._send(step(self._sequence, deciding=self._agents, observations=(noise,)))
        else:
            self.steps += len(self._agents)
            habits = {
                "nan": {"rewards": floats(np.nan, 0)},
                "blind": {"observations": ()},
                "ragged": {"rewards": floats(0)},
            }
            over = () if self.quirk == "endless" else self._agents
            self._send(step(self._sequence, ended=over, **habits.get(self.quirk, {})))
            self._agents = (1, 2)
        self._sequence += 1

    def _leave(self) -> str:
        if self.quirk == "crashes":
            raise OSError("crashed on Bye")
        return "over"

    def _linger(self) -> str:
        self._socket.settimeout(None)
        while self._socket.recv(100):
            pass
        return "over"

    def _messages(self) -> Iterator[Any]:
        reader = FrameReader()
        self._socket.settimeout(None if self.quirk == "mute" else 0.05)
        while True:
            while (message := reader.next()) is not None:
                if isinstance(message, Welcome):
                    self._open = True
                yield message
            try:
                data = self._socket.recv(4096)
            except TimeoutError:
                if self._open:
                    self._send(Ping())
                continue
            except ConnectionError:
                return
            if not data:
                return
            reader.feed(data)

    def _send(self, message: Any) -> None:
        self._socket.sendall(to_bytes(message))


def verdicts_of(
    simulator: Callable[[str], None], *, episodes: int = 2, timeout_s: float = LONG_S
) -> dict[str, Verdict]:
    """Returns the verdicts of the compliance test on a simulator, by rule."""
    host = ThreadHost(simulator)
    try:
        return {verdict.rule: verdict for verdict in examine(host, episodes=episodes, timeout_s=timeout_s)}
    finally:
        host.stop()
