"""What a ledger counts of each incarnation of stepping, and of each incarnation of assembly that read its steps."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from sparring.pipeline.messages.incarnations import precedes


@dataclass(slots=True)
class Origin:
    """What one incarnation of assembly did with the steps of one incarnation of stepping.

    Attributes:
        began: steps that stepping had produced before the first batch that this incarnation received.
        sequence: number of its last message.
        received: steps that arrived in its messages.
        orphaned: steps it could not record, because they began before it.
        taken: of those received, steps that learners have acknowledged.
        taken_before: of these, steps that earlier incarnations of the learner acknowledged.
        settled: of these, steps already counted as trained, ghost, stale or lost.
        kept: of these, steps that the restored weights hold.
    """

    began: int
    sequence: int = 0
    received: int = 0
    orphaned: int = 0
    taken: int = 0
    taken_before: int = 0
    settled: int = 0
    kept: int = 0


@dataclass(slots=True)
class SteppingSource:
    """One incarnation of a stepping process.

    Attributes:
        serial: of its latest step allowance.
        allowance: steps it may produce, cumulative.
        produced: steps it has completed, as far as known.
        origins: by incarnation of assembly that sent its segments, in their order.
        agents: live agents; without any it needs no allowance, except in lockstep, where all wait for one update.
        ghosts: steps of ghosts; all other counts are steps of agents that learn.
        alive: the process runs.
        closed: all steps that it produced have arrived or are lost.
    """

    serial: int = 0
    allowance: int = 0
    produced: int = 0
    origins: dict[str, Origin] = field(default_factory=dict)
    agents: int = 0
    ghosts: int = 0
    alive: bool = True
    closed: bool = False

    def origin(self, name: str, began: int) -> Origin:
        """Returns the counts of one incarnation of assembly; a new one takes its place in the order of incarnations."""
        if name not in self.origins:
            later = [one for one in self.origins if precedes(name, one)]
            moved = {one: self.origins.pop(one) for one in later}
            self.origins[name] = Origin(began)
            self.origins.update(moved)
        return self.origins[name]

    @property
    def received(self) -> int:
        """Steps that arrived in segments."""
        return sum(origin.received for origin in self.origins.values())

    @property
    def lost(self) -> int:
        """Steps that a crash took before they arrived.

        An incarnation of assembly is responsible for the steps from its own beginning to that of the next one. Segments
        of an earlier incarnation that arrive late reduce the loss again.
        """
        if self.closed:
            return max(0, self.produced - self.received)
        origins = list(self.origins.values())
        if not origins:
            return 0
        lost = sum(after.began - one.began - one.received for one, after in itertools.pairwise(origins))
        return origins[0].began + lost + origins[-1].orphaned

    @property
    def unused(self) -> int:
        """Steps of its allowance that it has not produced."""
        return max(0, self.allowance - self.produced)

    @property
    def committed(self) -> int:
        """Steps it has produced or may still produce."""
        return max(self.allowance, self.produced) if self.alive else self.produced

    @property
    def missing(self) -> int:
        """Steps it has produced that neither arrived nor are known to be lost."""
        return max(0, self.produced - self.received - self.lost)


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """Steps lost in one crash.

    Attributes:
        stage: that died.
        start: incarnation that died; of assembly and of a learner the next one, which revealed the crash.
        steps: how many; negative where an earlier incident counted too many.
        cause: where the steps were at the crash.
    """

    stage: str
    start: str
    steps: int
    cause: str
