"""Behaviors of a stepping process are shared by all its simulators: each has a table of slots and a step allowance."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from sparring.pipeline.messages.state import StepAllowance
from sparring.pipeline.specs import BehaviorSpec
from sparring.pipeline.stepping.agents import SlotTable


@dataclass(slots=True)
class Behavior:
    """A Behavior tracks one behavior name over all simulators.

    Attributes:
        spec: the first simulator's; all others must agree.
        table: slots of its agents.
        produced: completed steps of learning agents.
        running: actions without an outcome yet, of simulators that have been answered.
        ghosts: steps completed by ghosts.
        allowance: latest step allowance of this process.
        row_bytes: bytes of one agent's observations.
    """

    name: str
    spec: BehaviorSpec
    table: SlotTable
    produced: int = 0
    running: int = 0
    ghosts: int = 0
    allowance: StepAllowance = field(default_factory=lambda: StepAllowance(serial=0, steps=0))
    row_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.row_bytes = self.spec.observation_bytes

    @property
    def remaining(self) -> int:
        """Returns the number of steps that may still be started."""
        return self.allowance.steps - self.produced - self.running

    @property
    def is_exhausted(self) -> bool:
        """Returns whether it had a step allowance and has used it up."""
        return self.allowance.serial > 0 and self.remaining <= 0

    def grant(self, allowance: StepAllowance) -> None:
        """Adopts a step allowance; the same allowance received again does not restore returned steps."""
        if allowance.serial < self.allowance.serial:
            return
        if allowance.serial == self.allowance.serial:
            allowance = replace(allowance, steps=min(allowance.steps, self.allowance.steps))
        self.allowance = allowance

    def return_unused(self) -> None:
        """Returns the unused steps of its allowance where it has no agents."""
        if not self.table.taken and self.allowance.steps > self.produced:
            self.allowance = replace(self.allowance, steps=self.produced)
