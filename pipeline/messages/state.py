"""What services publish on retained topics.

The latest value wins, counts are cumulative since the start of the process that publishes them, and a late or restarted
reader is served at once.
"""

from __future__ import annotations

from dataclasses import field

from sparring.pipeline.messages.matches import RatedLearner
from sparring.pipeline.messages.schema import (
    Weights,
    record,
)
from sparring.pipeline.specs import BehaviorSpec


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


@record("allowance")
class StepAllowance:
    """How far a source may go with one behavior.

    Attributes:
        serial: counts the permits of this source and behavior.
        steps: it may produce since its own start, cumulative.
        version: policy version to wait for before using it; 0 for any.
        assignment: serial of the assignment to wait for, too; 0 for any.
        lessons: serial of the lessons to wait for, too; 0 for any.
    """

    serial: int
    steps: int
    version: int = 0
    assignment: int = 0
    lessons: int = 0


@record("allowances")
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


@record("flush")
class FlushRequest:
    """Close all open segments of a behavior.

    Attributes:
        serial: counts the cuts of the behavior from 1.
        marks: by source, the steps that must have arrived first.
    """

    serial: int
    marks: dict[str, int]


@record("flushes")
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


@record("step_counts")
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
        step_counts: by behavior name; `open` is what the other terms leave.
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
    step_counts: dict[str, StepCounts]
    routed: dict[str, int]
    versions: dict[str, int]
    reward_mean_last100: dict[str, float]
    episodes: dict[str, int]
    ratings: dict[str, RatedLearner] = field(default_factory=dict)
    heard: dict[str, str] = field(default_factory=dict)
