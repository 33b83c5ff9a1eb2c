"""Parts of the tiny pipeline: messages, stepping processes, assemblers."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from sparring.pipeline.messages.state import StepAllowance


@dataclass
class Part:
    """The rows of one tick: agents with a completed step, and agents with an action.

    Attributes:
        before: steps that the source had produced before.
        introduces: all live agents are listed; an assembly skips parts of a source until one is so.
    """

    before: int
    completed: list[tuple[int, int]]
    acted: list[int]
    introduces: bool = False


@dataclass
class Segments:
    """What a learner counts of a message: where it comes from, how far it reaches, and its steps."""

    source: str
    reached: int
    flush: int
    steps: list[int]

    @property
    def log_probs(self) -> list[int]:
        """One for each step."""
        return self.steps


class Stepping:
    """One incarnation of a stepping process with some simulators.

    Args:
        service: its name.
        incarnation: its number.
        simulators: number of agents of each.
        totals: steps that each simulator's process has reported so far, by its name; shared by all incarnations.
    """

    def __init__(self, service: str, incarnation: int, simulators: list[int], totals: Counter[str]) -> None:
        self.service = service
        self.source = f"{service}.5f3a-{incarnation}"
        self.sizes = simulators
        self.computing = [False] * len(simulators)
        self.produced = 0
        self.totals = totals
        self.before = {self.process(one): totals[self.process(one)] for one in range(len(simulators))}
        self.allowance = StepAllowance(serial=0, steps=0)
        self.outbox: deque[Part] = deque([Part(0, [], [], introduces=True)])

    def process(self, simulator: int) -> str:
        return f"{self.service}/{simulator}"

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


@dataclass
class Assembler:
    """Holds open and closed steps of one source.

    Attributes:
        received: steps that the source had produced by the last part.
        reached: of these, those that were sent or could not be recorded; `announced` of them the last message says.
    """

    received: int
    reached: int
    announced: int = 0
    acting: set[int] = field(default_factory=set)
    open: dict[int, list[int]] = field(default_factory=dict)
    closed: list[int] = field(default_factory=list)

    def held(self) -> list[int]:
        return [step for steps in self.open.values() for step in steps] + self.closed
