"""What the services of a run say to each other.

Data travel through queues: `StepBatch`, `Segments`. Everything else is state on a board, where the
latest value wins, counts are cumulative since the start of the process that publishes them, and a
late or restarted reader is served at once.

Names: a *source* is one start of a stepping process ("stepping-0.1"), an *origin* one start of an
assembly process. A *slot* is the row a live agent has in its source, for one behavior name; it is
used again after the agent's end. Rows of arrays in one record belong together.
"""

from __future__ import annotations

from dataclasses import field

import numpy as np

from sparring.pipeline.messages.matches import RatedLearner, Results
from sparring.pipeline.messages.schema import (
    F32,
    I32,
    I64,
    F32Matrix,
    Flags,
    FlagsMatrix,
    I32Matrix,
    Observation,
    Weights,
    record,
)
from sparring.pipeline.messages.simulator import Statistic
from sparring.pipeline.specs import BehaviorSpec

# ---------------------------------------------------------------- stepping -> assembly


@record("joined")
class AgentsStarted:
    """Agents that a slot was given to, or whose group changed, or whose reader is new.

    Attributes:
        slots: [n] slot of each agent.
        agents: [n] id of the agent's life, unique within the source.
        groups: [n] group key, unique within the source; 0 for no group.
        teams: [n] team.
        simulators: [n] connection number of the simulator.
        fresh: [n] True where the episode starts now, False where it is under way.
        draws: [n] number of the draw that its match is played under; None without self-play.
        lessons: [n] serial of the lessons that its simulator had when its episode began; None without curricula.
    """

    slots: I32
    agents: I64
    groups: I64
    teams: I32
    simulators: I32
    fresh: Flags
    draws: I64 | None = None
    lessons: I64 | None = None


@record("ended")
class AgentsEnded:
    """Agents whose episode ended.

    Attributes:
        slots: [n] slot, free from here on.
        observations: one [n, *shape] per observation: the last of the episode.
        rewards: [n] reward since the previous decision.
        interrupted: [n] True where the episode was cut, False where the task ended.
        group_rewards: [n] group reward since the previous decision; None for none.
        outcomes: [n] 1 won, 0.5 drawn, 0 lost, from the team's view, -1 unsaid; None where nobody said.
    """

    slots: I32
    observations: tuple[Observation, ...]
    rewards: F32
    interrupted: Flags
    group_rewards: F32 | None = None
    outcomes: F32 | None = None


@record("reported")
class OutcomesReported:
    """Agents that arrived at their next decision.

    Attributes:
        slots: [n] slot.
        observations: one [n, *shape] per observation, seen at the decision.
        rewards: [n] reward since the previous decision.
        group_rewards: [n] group reward since then; None for none.
    """

    slots: I32
    observations: tuple[Observation, ...]
    rewards: F32
    group_rewards: F32 | None = None


@record("acted")
class ActionsChosen:
    """Actions chosen for the decisions last reported; later than these where the budget withheld them.

    Attributes:
        slots: [n] slot; None where the rows are those of `OutcomesReported`, tick by tick.
        log_probs: [n] log-probability of the joint action.
        versions: [n] policy version that chose.
        continuous: [n, continuous actions] raw sample; None where the behavior has none.
        discrete: [n, branches] chosen index; None where the behavior has none.
        masks: [n, choices of all branches] True = forbidden; None where nothing was.
        carried: [n, numbers carried] what the agent carried to this decision: memory, previous action; None where the
            network asks for neither.
    """

    slots: I32 | None
    log_probs: F32
    versions: I64
    continuous: F32Matrix | None = None
    discrete: I32Matrix | None = None
    masks: FlagsMatrix | None = None
    carried: F32Matrix | None = None


@record("behavior_steps")
class BehaviorSteps:
    """One or several ticks of stepping for one behavior name.

    The rows of all ticks stand one after the other; those of one tick are applied in the order
    of the columns of `rows`, then those of the next.

    Attributes:
        behavior: name.
        produced_before: steps this source completed for the behavior before the first tick.
        ticks: [t] number of each tick; what happened in one tick happened together.
        completed: [t] steps that the rows of `ended` and `reported` complete: the others of these
            rows had no action pending.
        rows: [t, 5] how many rows of lost, ended, joined, reported and acted belong to each.
        lost: slots whose simulator went away or was reset; free from here on.
        ended: agents whose episode ended.
        joined: slots newly given.
        reported: agents at their next decision.
        acted: actions chosen.
        ghosts: steps that ghosts have played for this behavior name in all, by the last tick; no row tells of them.
        results: matches of learning agents of this name that ended.
    """

    behavior: str
    produced_before: int
    ticks: I64
    completed: I64
    rows: I32Matrix
    lost: I32 | None = None
    ended: AgentsEnded | None = None
    joined: AgentsStarted | None = None
    reported: OutcomesReported | None = None
    acted: ActionsChosen | None = None
    ghosts: int = 0
    results: Results | None = None


@record("step_batch")
class StepBatch:
    """What one source did in one or several ticks.

    Attributes:
        source: its start.
        parts: by behavior name.
        statistics: of its simulators.
        introduces: it tells of all live agents, for a reader that is new.
    """

    source: str
    parts: tuple[BehaviorSteps, ...]
    statistics: tuple[Statistic, ...] = ()
    introduces: bool = False


# ---------------------------------------------------------------- assembly -> coordination -> learning


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
        untold: ids of lives that are over and of which nothing is told: their simulator went away, or they had begun
            before this start of assembly.
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
    untold: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    lessons: I64 = field(default_factory=lambda: np.empty(0, np.int64))


@record("mates")
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
        mates: members of other behavior names, by name.
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
    mates: tuple[TeammateSegments, ...] = ()


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
        cut: serial of the cut that these segments complete, else 0. Sent even when empty.
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
        draws: [s] number of the draw that each was played under, which names the versions that it met; None without
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
    cut: int
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
    draws: I64 | None = None
    ghosts: int = 0
    results: Results | None = None


# ---------------------------------------------------------------- boards


@record("policy_weights")
class PolicyWeights:
    """Weights of one behavior's actor; the latest version wins.

    Attributes:
        behavior: name.
        version: counts published weights; only rises, also over restarts.
        arrays: parameters and buffers of the actor by their name in its state dict.
        trained: steps in their lineage.
        network: JSON of the network settings, where they are not the run's: of an opponent from elsewhere.
        script: of the simulators, that plays instead of weights; "" for weights.
    """

    behavior: str
    version: int
    arrays: dict[str, Weights]
    trained: int = 0
    network: str = ""
    script: str = ""


@record("mark")
class Mark:
    """How far a learner has taken the Segments of one origin and source.

    Attributes:
        sequence: of the last that it took.
        began: as these say.
        steps: `handed_on` of these.
    """

    sequence: int
    began: int
    steps: int


Marks = dict[str, dict[str, Mark]]
"""By start of assembly, by start of stepping."""


@record("learner_state")
class LearnerState:
    """Where a learner stands.

    Attributes:
        behavior: name.
        start: this start of the learning process, as "learning-Ball.2".
        version: of the weights published last.
        updates: in the lineage of the current weights.
        trained: steps in that lineage.
        taken: steps got from the queue since this start.
        training: of these, steps in the update under way.
        buffered: of these, steps that wait for an update.
        stale: steps dropped as too old since this start.
        ghost: steps that were played and are not learned from, since this start.
        duplicate: steps dropped because they had been taken before, since this start.
        latest: how far it, and those before it whose weights it has restored, have taken what came.
        restored: how far that was when those weights were kept.
        done: `max_steps` is reached.
        checkpoint: folder of the newest checkpoint within the run folder, "" for none.
        weights_sha256: of the weights published last.
    """

    behavior: str
    start: str
    version: int
    updates: int
    trained: int
    taken: int = 0
    training: int = 0
    buffered: int = 0
    stale: int = 0
    ghost: int = 0
    duplicate: int = 0
    latest: Marks = field(default_factory=dict)
    restored: Marks = field(default_factory=dict)
    done: bool = False
    checkpoint: str = ""
    weights_sha256: str = ""


@record("produced")
class ProducedSteps:
    """What one source has done for one behavior since it started.

    Attributes:
        steps: completed steps.
        serial: of the permit it works on.
        allowance: what it keeps of that permit: less than granted where it gives the rest back.
        agents: live agents.
        waiting: live agents whose decision waits for a permit or for weights.
        ghosts: steps completed by ghosts, which need no permit and are not among `steps`.
    """

    steps: int
    serial: int
    allowance: int
    agents: int
    waiting: int
    ghosts: int = 0


@record("behavior_specs")
class BehaviorSpecs:
    """What simulators have said of their behaviors, by name.

    Attributes:
        behaviors: specs.
        teams: numbers of the teams that each has been seen with, in order.
    """

    behaviors: dict[str, BehaviorSpec]
    teams: dict[str, tuple[int, ...]] = field(default_factory=dict)


@record("stepping_state")
class SteppingState:
    """Where a stepping process stands.

    Attributes:
        source: this start of it.
        behaviors: by name.
        simulators: connected now.
        deterministic: False once a simulator left a lockstep run, which ends its promise.
        final: it has stopped in order, and says no more.
        given_up: by number of the simulator, how often it was given up because it was silent.
    """

    source: str
    behaviors: dict[str, ProducedSteps]
    simulators: int
    deterministic: bool = True
    final: bool = False
    given_up: dict[str, int] = field(default_factory=dict)


@record("permit")
class StepAllowance:
    """How far a source may go with one behavior.

    Attributes:
        serial: counts the permits of this source and behavior.
        allowance: steps it may produce since its own start, cumulative.
        version: policy version to wait for before using it; 0 for any.
        assignment: serial of the assignment to wait for, too; 0 for any.
        lessons: serial of the lessons to wait for, too; 0 for any.
    """

    serial: int
    allowance: int
    version: int = 0
    assignment: int = 0
    lessons: int = 0


@record("permits")
class StepAllowances:
    """Permits of one source, by behavior name."""

    source: str
    behaviors: dict[str, StepAllowance]


@record("lessons")
class LessonsState:
    """Where the curricula of the environment parameters stand.

    Attributes:
        serial: counts the changes of lessons.
        numbers: of the present lesson from 0, by parameter.
        since: serial of the change that it began with, 0 for the first, by parameter.
        resets: serial of the last change that asks for new episodes everywhere; 0 for none.
    """

    serial: int
    numbers: dict[str, int]
    since: dict[str, int]
    resets: int = 0


@record("cut")
class FlushRequest:
    """Close all open segments of a behavior.

    Attributes:
        serial: counts the cuts of the behavior from 1.
        marks: by source, the steps that must have arrived first.
    """

    serial: int
    marks: dict[str, int]


@record("cuts")
class FlushRequests:
    """The latest cut of each behavior name."""

    behaviors: dict[str, FlushRequest]


@record("assembled")
class AssembledSteps:
    """What assembly holds of one behavior from one source.

    Attributes:
        received: steps the source had produced by the last part that arrived.
        open: steps in open segments.
        closed: steps in finished segments that are not sent yet.
        orphaned: steps it could not record, because they began before this start.
    """

    received: int
    open: int
    closed: int
    orphaned: int


@record("assembly_state")
class AssemblyState:
    """Where assembly stands: `held["Name"]["stepping-0.1"]`."""

    origin: str
    held: dict[str, dict[str, AssembledSteps]]


@record("books")
class StepCounts:
    """produced = trained + ghost + stale + lost + open, in steps, for one behavior name."""

    produced: int
    trained: int
    ghost: int
    stale: int
    lost: int
    open: int


@record("run_state")
class RunState:
    """What coordination knows of the run.

    Attributes:
        start: this start of coordination.
        finished: every behavior has reached its end.
        specs: of every behavior seen so far.
        books: by behavior name; `open` is what the other terms leave.
        routed: by behavior name, steps that have come and that the learner has not acknowledged.
        versions: highest version seen of each behavior.
        reward_mean_last100: by behavior name, mean return of the last 100 episodes; absent before the first.
        episodes: by behavior name, episodes ended.
        ratings: by behavior name under self-play.
        heard: by service, the start of it that the books know of: what those before it had lost is counted.
    """

    start: str
    finished: bool
    specs: dict[str, BehaviorSpec]
    books: dict[str, StepCounts]
    routed: dict[str, int]
    versions: dict[str, int]
    reward_mean_last100: dict[str, float]
    episodes: dict[str, int]
    ratings: dict[str, RatedLearner] = field(default_factory=dict)
    heard: dict[str, str] = field(default_factory=dict)


@record("histogram")
class Histogram:
    """Cumulative counts of values: `counts[i]` at most `bounds[i]`, the last one above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@record("wait")
class Wait:
    """What one activity of a service needs before it can go on.

    Attributes:
        activity: what it hands on when it goes on, as "segments/Walk"; "*" where it is the whole service.
        what: it waits for, as "steps/Walk", or "credit.segments/Walk" for room in the queue of these.
        sources: services that give it, or "simulators"; none where no other stage can be blamed.
        seconds: for how long it has waited.
        who: of the sources, which one, where the service knows; "" where it does not.
    """

    activity: str
    what: str
    sources: tuple[str, ...] = ()
    seconds: float = 0.0
    who: str = ""


@record("metrics")
class Metrics:
    """All numbers of one service start. Counters and histograms are cumulative, so that any
    interval is a difference and a lost message loses nothing.

    Attributes:
        service: as "learning-Ball".
        start: this start of it.
        sequence: rises with each publication.
        time_s: seconds since the epoch.
        counters: by name; a name may end in "/Behavior".
        gauges: by name, the value now.
        histograms: by name.
        waiting_for: what the service waits for, or "" while it works.
        waits: the same for each of its activities that waits.
    """

    service: str
    start: str
    sequence: int
    time_s: float
    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)
    waiting_for: str = ""
    waits: tuple[Wait, ...] = ()
