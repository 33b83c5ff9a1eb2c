"""Assembly sends the learner finished segments of agents and groups, and statistics of the episodes that ended."""

from dataclasses import field

import numpy as np

from sparring.pipeline.messages.schema import F32, I32, I64, F32Matrix, Flags, I32Matrix, Masks, Observation, record


@record("episodes")
class Episodes:
    """Statistics describe `e` episodes and `g` groups that ended.

    Attributes:
        returns: [e] sum of the agent's own rewards.
        lengths: [e] number of decisions.
        group_returns: [g] sum of the group's rewards, once per ended group.
        teams: [e] team of each episode.
        outcomes: [e] 1 won, 0.5 drawn, 0 lost, -1 not reported.
        agents: [e] id of the agent episode.
        shared_returns: [e] sum of the group's rewards during the episode.
        groups: [e] group key at the end, 0 for none.
        unreported: ids of agent episodes that ended without statistics, because their simulator disconnected or they
            began before this incarnation of assembly.
        lessons: [e] serial of the lessons that each began in; empty without curricula.
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
    """A critic sees group members of another behavior name in these segments; no policy learns from them.

    `s` segments of members lie one after the other in `r` rows, group by group, as in `Segments`.

    Attributes:
        behavior: name of these members.
        members: [g] how many belong to each group segment.
        lengths: [s] steps of each member's segment; 0 where it holds only what followed.
        times: [r] group time of each decision.
        next_times: [s] group time of what followed.
        until: [s] group time from which on the member is absent.
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
class GroupSegments:
    """These columns join the segments of agents into segments of groups.

    A group's time advances at each tick in which any of its members decides or ends. A group segment covers `span`
    of these times, 0 to span - 1, for all its members together; what followed is at time `span`. Row i of a member is
    its last decision from its own time until that of row i + 1 or of what followed; what followed is its last decision
    from there until `until`. The members present at a time, and their last observations and actions, thus follow from
    these columns: nothing is stored for each pair of members.

    Attributes:
        numbers: [g] number of the group episode, unique within origin and source.
        spans: [g] number of group times.
        members: [g] how many of the segments in `Segments` belong to each, in their order.
        ended: [g] no member is left.
        rewards: [sum of spans] rewards of all members between each time and the next: their own, and the group's once.
        times: [r] group time of each decision.
        next_times: [s] group time of what followed: `span`, or earlier where that decision is still open or where the
            member ended.
        until: [s] group time from which on the member is absent; span + 1 where it is still present.
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
    """Assembly sends the finished segments of one behavior name from one source.

    `s` segments lie one after the other in `r` rows: row i of a segment is its i-th step.

    Attributes:
        behavior: name.
        source: stepping's incarnation that produced the steps.
        origin: assembly's incarnation that assembled them.
        reached: steps of the source that are in Segments up to and including these, or that assembly could not record:
            those that began before its incarnation.
        flush: serial of the flush that these segments complete, else 0; sent even when empty.
        lengths: [s] steps of each segment; 0 only in a group segment, for a member that has only what followed.
        observations: one [r, *shape] per observation, seen at the decision.
        next_observations: one [s, *shape] per observation: what followed the last step.
        continuous: [r, continuous actions] raw sample.
        discrete: [r, branches] chosen index.
        log_probs: [r] log-probability of the joint action.
        masks: [r, choices of all branches] True = forbidden; None where all choices were allowed.
        rewards: [r] the agent's own reward.
        group_rewards: [r] the group's reward.
        versions: [r] policy version that acted.
        terminated: [s] the episode ended with the segment: no bootstrap.
        interrupted: [s] the episode was truncated with the segment: bootstrap.
        group_ended: [s] the whole group ended.
        teams: [s] team.
        groups: [s] group key, 0 for none.
        agents: [s] id of the agent episode.
        simulators: [s] connection number of the simulator.
        episodes: episodes that ended since the last message.
        carried: [q, numbers carried] recurrent state and previous action at the first step of each sequence: a
            segment's first step and every `sequence_length` steps from there, in a group segment every
            `sequence_length` group times; None where the network needs neither.
        shared: joins the segments into those of groups; None where the learner does not train groups.
        matchups: [s] number of the matchup that each was played under; None without self-play.
        next_masks: [s, choices of all branches] True = forbidden in what followed, where the episode goes on; None
            where `masks` is.
    """

    behavior: str
    source: str
    origin: str
    reached: int
    flush: int
    lengths: I32
    observations: tuple[Observation, ...]
    next_observations: tuple[Observation, ...]
    continuous: F32Matrix
    discrete: I32Matrix
    log_probs: F32
    masks: Masks | None
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
    shared: GroupSegments | None = None
    matchups: I64 | None = None
    next_masks: Masks | None = None
