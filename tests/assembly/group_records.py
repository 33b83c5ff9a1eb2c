"""Records of the slow twin of the group assembler: an object for each agent, step, segment and group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.assembly.assembly_twin import Action, Carried, Mask, Observed

Actions = tuple[tuple[float, ...], tuple[int, ...]]
"""Continuous actions and branches."""


@dataclass
class Decision:
    observed: Observed
    time: int
    action: Action | None = None
    carried: Carried = None
    mask: Mask = None

    @property
    def actions(self) -> Actions | None:
        return None if self.action is None else (self.action.continuous, self.action.discrete)


@dataclass
class StepTwin:
    decision: Decision
    time: int
    reward: float
    group_reward: float


@dataclass
class MemberSegmentTwin:
    """A segment of a member, followed by a decision that may still get its action, or by an end."""

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
    """A group from its first member to its last, and its open segment.

    Attributes:
        present: members and their last decisions at each time of the open segment.
        series: rewards from each of these times to the next.
        member_segments: segments of members that have ended or left.
        entered: count of members that were or are in the open segment.
        horizon: most times of a segment.
        own: sum of the members' own rewards.
        total: sum of group rewards.
    """

    place: Any
    key: int
    began: int
    whole: bool = True
    members: list[MemberTwin] = field(default_factory=list)
    present: list[list[tuple[MemberTwin, Decision]]] = field(default_factory=list)
    series: list[float] = field(default_factory=list)
    member_segments: list[MemberSegmentTwin] = field(default_factory=list)
    entered: int = 0
    horizon: int = 10**9
    names: set[str] = field(default_factory=set)
    own: float = 0.0
    total: float = 0.0
    ended: int | None = None

    def deciders(self) -> list[tuple[MemberTwin, Decision]]:
        """Returns the members with a known decision, and that decision."""
        return [(one, one.decision) for one in self.members if one.decision is not None]


@dataclass
class GroupSegmentTwin:
    group: GroupTwin
    span: int
    over: bool
    rewards: list[float]
    present: list[list[tuple[MemberTwin, Decision]]]
    member_segments: list[MemberSegmentTwin]

    def steps(self, name: str) -> int:
        return sum(len(member_segment.steps) for member_segment in self.member_segments if member_segment.name == name)


@dataclass
class EpisodesTwin:
    """Rows hold agent, return, length, team, outcome, group return and group key."""

    rows: list[tuple[float, ...]] = field(default_factory=list)
    group_returns: list[float] = field(default_factory=list)
    unreported: list[int] = field(default_factory=list)
