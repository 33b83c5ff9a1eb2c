"""What assembly sends the learner: finished segments of agents and groups, and the episodes that ended."""

from __future__ import annotations

from dataclasses import field

import numpy as np

from sparring.pipeline.messages.matches import Results
from sparring.pipeline.messages.schema import (
    F32,
    I32,
    I64,
    F32Matrix,
    Flags,
    FlagsMatrix,
    I32Matrix,
    Observation,
    record,
)


@record("episodes")
class Episodes:
    """Episodes that ended, for statistics.

    Attributes:
        returns: [e] sum of the agent's own rewards.
        lengths: [e] number of decisions.
        group_returns: [g] sum of the group's rewards, once per ended group.
        teams: [e] team of each episode.
        outcomes: [e] 1 won, 0.5 drawn, 0 lost, -1 unsaid.
        agents: [e] id of the agent's life, which is the episode.
        shared_returns: [e] sum of the group's rewards while the agent lived.
        groups: [e] group key at the end, 0 for none.
        unreported: ids of agent episodes that are over and have no statistics: their simulator went away, or they had
            begun before this incarnation of assembly.
        lessons: [e] serial of the lessons that each began in; none without curricula.
    """

    returns: F32
    lengths: I32
    group_returns: F32
    teams: I32
    outcomes: F32
    agents: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    shared_returns: F32 = field(default_factory=lambda: np.empty(0, np.float32))
    groups: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    unreported: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    lessons: I64 = field(default_factory=lambda: np.empty(0, np.int64))


@record("teammates")
class TeammateSegments:
    """Members of group segments that have another behavior name: what a critic is shown of them, nothing to act by.

    `s` segments of members lie one after the other in `r` rows, group by group, as in `Segments`.

    Attributes:
        behavior: their name.
        members: [g] how many there are in each group segment.
        lengths: [s] steps of each member's segment; 0 where it has only what followed.
        times: [r] group time of each decision.
        next_times: [s] group time of what followed.
        until: [s] group time from which on the member is not there.
        observations: one [r, *shape] per observation.
        next_observations: one [s, *shape] per observation: what followed the last step.
        continuous: [r, continuous actions] raw sample.
        discrete: [r, branches] chosen index.
        next_continuous: [s, continuous actions] of what followed.
        next_discrete: [s, branches] of what followed.
    """

    behavior: str
    members: I32
    lengths: I32
    times: I32
    next_times: I32
    until: I32
    observations: tuple[Observation, ...]
    next_observations: tuple[Observation, ...]
    continuous: F32Matrix
    discrete: I32Matrix
    next_continuous: F32Matrix
    next_discrete: I32Matrix


@record("shared")
class Shared:
    """What the segments of one group have in common.

    A group's time advances at each tick in which any of its members decides or ends. A group segment covers `span`
    of these times, 0 to span - 1, for all its members together; what followed is at time `span`. Row i of a member is
    its last decision from its own time on, up to that of row i + 1 or of what followed; that one is its last decision
    from there until `until`. So who is there at a time, and what it saw and did last, is an arithmetic on these
    columns: nothing is stored once per member and mate.

    Attributes:
        numbers: [g] number of the group's life, unique within origin and source.
        spans: [g] group times.
        members: [g] how many of the segments in `Segments` belong to each, in their order.
        ended: [g] nobody is left.
        rewards: [sum of spans] what all members earned between each time and the next: their own rewards, and the
            group's once.
        times: [r] group time of each decision.
        next_times: [s] group time of what followed: `span`, or before it where that decision is still under way, or
            where the member ended.
        until: [s] group time from which on the member is not there; span + 1 where it still is.
        next_continuous: [s, continuous actions] raw sample of the decision that followed; without meaning at `span`.
        next_discrete: [s, branches] likewise.
        teammates: members of other behavior names, by name.
    """

    numbers: I64
    spans: I32
    members: I32
    ended: Flags
    rewards: F32
    times: I32
    next_times: I32
    until: I32
    next_continuous: F32Matrix
    next_discrete: I32Matrix
    teammates: tuple[TeammateSegments, ...] = ()


@record("segments")
class Segments:
    """Finished segments of one behavior name from one source.

    `s` segments lie one after the other in `r` rows: row i of a segment is its i-th step.

    Attributes:
        behavior: name.
        source: the stepping start that produced the steps.
        origin: the assembly start that assembled them.
        sequence: counts the Segments of this origin, source and behavior from 1.
        began: steps the source had produced for the behavior when this origin first heard of it.
        orphaned: steps this origin could not record since its start, because they began before it.
        received: steps the source had produced by the last part that arrived, still open ones included.
        handed_on: steps in all Segments of this origin, source and behavior up to these, which are included.
        flush: serial of the cut that these segments complete, else 0. Sent even when empty.
        lengths: [s] steps of each segment; 0 only in a group segment, for a member that has only what followed.
        observations: one [r, *shape] per observation, seen at the decision.
        next_observations: one [s, *shape] per observation: what followed the last step.
        continuous: [r, continuous actions] raw sample.
        discrete: [r, branches] chosen index.
        log_probs: [r] log-probability of the joint action.
        masks: [r, choices of all branches] True = forbidden; None where nothing was.
        rewards: [r] the agent's own reward.
        group_rewards: [r] the group's reward.
        versions: [r] policy version that acted.
        terminated: [s] the episode ended with the segment: no bootstrap.
        interrupted: [s] the episode was cut with the segment: bootstrap.
        group_ended: [s] the whole group ended.
        teams: [s] team.
        groups: [s] group key, 0 for none.
        agents: [s] id of the agent's life.
        simulators: [s] connection number of the simulator.
        episodes: what ended since the last message.
        carried: [q, numbers carried] what the agent carried to the first step of each sequence: a segment's first step,
            and every `sequence_length` steps from there, in a group segment every `sequence_length` group times;
            None where the network asks for nothing.
        shared: how the segments form those of groups; None where the learner does not ask for groups.
        matchups: [s] number of the draw that each was played under, which names the versions that it met; None without
            self-play.
        ghosts: steps that ghosts of the source have played for the behavior in all, by the last part that arrived.
        results: matches that ended since the last message; None for none.
    """

    behavior: str
    source: str
    origin: str
    sequence: int
    began: int
    orphaned: int
    received: int
    handed_on: int
    flush: int
    lengths: I32
    observations: tuple[Observation, ...]
    next_observations: tuple[Observation, ...]
    continuous: F32Matrix
    discrete: I32Matrix
    log_probs: F32
    masks: FlagsMatrix | None
    rewards: F32
    group_rewards: F32
    versions: I64
    terminated: Flags
    interrupted: Flags
    group_ended: Flags
    teams: I32
    groups: I64
    agents: I64
    simulators: I32
    episodes: Episodes
    carried: F32Matrix | None = None
    shared: Shared | None = None
    matchups: I64 | None = None
    ghosts: int = 0
    results: Results | None = None
