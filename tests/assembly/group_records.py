"""What the slow twin of the assembler of groups keeps: an object for each agent, step, segment and group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.assembly.assembly_twin import Action, Carried, Seen

Did = tuple[tuple[float, ...], tuple[int, ...]]
"""Continuous actions and branches."""


@dataclass
class Decision:
    seen: Seen
    time: int
    action: Action | None = None
    carried: Carried = None

    @property
    def did(self) -> Did | None:
        return None if self.action is None else (self.action.continuous, self.action.discrete)


@dataclass
class StepTwin:
    decision: Decision
    time: int
    reward: float
    group_reward: float


@dataclass
class StayTwin:
    """A segment of a member. What followed is a decision that may still get its action, or an end."""

    name: str
    agent: int
    key: int
    team: int
    simulator: int
    steps: list[StepTwin]
    following: Decision
    next_time: int
    until: int
    terminated: bool = False
    interrupted: bool = False


@dataclass(eq=False)
class MemberTwin:
    name: str
    slot: int
    agent: int
    key: int
    team: int
    simulator: int
    whole: bool
    group: GroupTwin
    decision: Decision | None = None
    steps: list[StepTwin] = field(default_factory=list)
    base: float = 0.0
    total: float = 0.0
    group_total: float = 0.0
    length: int = 0


@dataclass(eq=False)
class GroupTwin:
    """A group's life, and its open segment.

    Attributes:
        present: at each time of the open segment, whose last decision is which.
        series: what was earned from each of these times to the next.
        stays: of members that are gone.
        entered: members that were or are in the open segment.
        horizon: most times of a segment.
        own: what members earned themselves.
        total: what the group itself earned.
    """

    place: Any
    key: int
    began: int
    whole: bool = True
    members: list[MemberTwin] = field(default_factory=list)
    present: list[list[tuple[MemberTwin, Decision]]] = field(default_factory=list)
    series: list[float] = field(default_factory=list)
    stays: list[StayTwin] = field(default_factory=list)
    entered: int = 0
    horizon: int = 10**9
    names: set[str] = field(default_factory=set)
    own: float = 0.0
    total: float = 0.0
    ended: int | None = None

    def there(self) -> list[tuple[MemberTwin, Decision]]:
        """Members of which a decision is known, and which."""
        return [(one, one.decision) for one in self.members if one.decision is not None]


@dataclass
class GroupSegmentTwin:
    group: GroupTwin
    span: int
    over: bool
    rewards: list[float]
    present: list[list[tuple[MemberTwin, Decision]]]
    stays: list[StayTwin]

    def steps(self, name: str) -> int:
        return sum(len(stay.steps) for stay in self.stays if stay.name == name)


@dataclass
class EpisodesTwin:
    """`rows`: agent, return, length, team, outcome, return of its group, group key."""

    rows: list[tuple[float, ...]] = field(default_factory=list)
    group_returns: list[float] = field(default_factory=list)
    unreported: list[int] = field(default_factory=list)
