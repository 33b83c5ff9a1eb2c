"""Parts of the tiny pipeline: messages without data, stepping processes, assemblers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from sparring.pipeline.messages.segments import Episodes, Segments
from sparring.pipeline.messages.state import ProducedSteps, StepAllowance


def segments(
    source: str,
    origin: str,
    sequence: int,
    *,
    steps: int,
    began: int,
    received: int,
    orphaned: int,
    flush: int = 0,
    before: int = 0,
) -> Segments:
    """Returns a message with the counts that a ledger reads and no data; earlier ones held `before` steps."""
    f, i, none = np.zeros(steps, np.float32), np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Segments(
        behavior="B",
        source=source,
        origin=origin,
        sequence=sequence,
        began=began,
        orphaned=orphaned,
        received=received,
        handed_on=before + steps,
        flush=flush,
        lengths=i,
        observations=(),
        next_observations=(),
        continuous=np.zeros((steps, 0), np.float32),
        discrete=np.zeros((steps, 0), np.int32),
        log_probs=f,
        masks=None,
        rewards=f,
        group_rewards=f,
        versions=np.zeros(steps, np.int64),
        terminated=np.zeros(0, bool),
        interrupted=np.zeros(0, bool),
        group_ended=np.zeros(0, bool),
        teams=i,
        groups=i.astype(np.int64),
        agents=i.astype(np.int64),
        simulators=i,
        episodes=Episodes(returns=none, lengths=i, group_returns=none, teams=i, outcomes=none),
    )


def produced(steps: int, serial: int, allowance: int, agents: int) -> ProducedSteps:
    """Returns the state that a source publishes."""
    return ProducedSteps(steps=steps, serial=serial, allowance=allowance, agents=agents, waiting=0)


@dataclass
class Part:
    """The rows of one tick: agents with a completed step, and agents with an action."""

    before: int
    completed: list[tuple[int, int]]
    acted: list[int]
    joined: list[int] = field(default_factory=list)


class Stepping:
    """One incarnation of a stepping process with some simulators."""

    def __init__(self, service: str, incarnation: int, simulators: list[int]) -> None:
        self.service = service
        self.source = f"{service}.{incarnation}"
        self.sizes = simulators
        self.computing = [False] * len(simulators)
        self.produced = 0
        self.allowance = StepAllowance(serial=0, steps=0)
        self.outbox: deque[Part] = deque()
        self.has_reported = False

    @property
    def running(self) -> int:
        return sum(size for size, computing in zip(self.sizes, self.computing, strict=True) if computing)

    @property
    def remaining(self) -> int:
        return self.allowance.steps - self.produced - self.running

    def agents(self, simulator: int) -> list[int]:
        first = sum(self.sizes[:simulator])
        return list(range(first, first + self.sizes[simulator]))

    def return_unused(self) -> None:
        if not self.sizes and self.allowance.steps > self.produced:
            self.allowance = StepAllowance(serial=self.allowance.serial, steps=self.produced)


class Assembler:
    """Holds open and closed steps of one source."""

    def __init__(self, began: int) -> None:
        self.began = self.received = began
        self.orphaned = 0
        self.acting: set[int] = set()
        self.open: dict[int, list[int]] = {}
        self.closed: list[int] = []
        self.sequence = self.handed_on = 0

    def held(self) -> list[int]:
        return [step for steps in self.open.values() for step in steps] + self.closed


@dataclass
class Message:
    """A Segments record with the numbers of its steps."""

    record: Segments
    steps: list[int]
