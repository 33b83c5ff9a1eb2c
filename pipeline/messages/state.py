"""Services publish these records on retained topics.

The latest value wins, counts are cumulative since the publishing process started, and a late or restarted subscriber
receives the latest value at once.
"""

from __future__ import annotations

from dataclasses import field

from sparring.pipeline.messages.matches import RatedLearner
from sparring.pipeline.messages.schema import Weights, record
from sparring.pipeline.specs import BehaviorSpec


@record("policy_weights")
class PolicyWeights:
    """A learner publishes the weights of one behavior's actor; the latest version wins.

    Attributes:
        behavior: name.
        version: counts published weights; only rises, also over restarts.
        arrays: parameters and buffers of the actor by their name in its state dict.
        trained: steps in the lineage of these weights.
        network: JSON of the network settings, where they are not those of the run: of an external opponent.
        script: script of the simulators that plays instead of weights; "" for weights.
    """

    behavior: str
    version: int
    arrays: dict[str, Weights]
    trained: int = 0
    network: str = ""
    script: str = ""


@record("stream_position")
class StreamPosition:
    """A learner has taken the Segments of one origin and source up to this position.

    Attributes:
        sequence: of the last Segments that it took.
        began: theirs.
        steps: their `handed_on`.
    """

    sequence: int
    began: int
    steps: int


StreamPositions = dict[str, dict[str, StreamPosition]]
"""Positions by incarnation of assembly, by incarnation of stepping."""


@record("learner_state")
class LearnerState:
    """A learner publishes its state; its counts begin with its incarnation.

    Attributes:
        behavior: name.
        start: incarnation of the learning process, such as "learning-Ball.5f3a-2".
        version: of the weights published last.
        updates: in the lineage of the current weights.
        trained: steps in that lineage.
        taken: steps received from the queue.
        training: of these, steps in the update under way.
        buffered: of these, steps that wait for an update.
        stale: steps dropped as too old.
        ghost: steps that were played and are not learned from.
        duplicate: steps dropped because they had been taken before.
        latest: position that it, and the incarnations whose weights it restored, have reached in the Segments.
        restored: that position when the restored weights were saved.
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
    latest: StreamPositions = field(default_factory=dict)
    restored: StreamPositions = field(default_factory=dict)
    done: bool = False
    checkpoint: str = ""
    weights_sha256: str = ""


@record("produced")
class ProducedSteps:
    """A source publishes what it has done for one behavior since it started.

    Attributes:
        steps: completed steps.
        serial: of its present step allowance.
        allowance: cumulative steps that it keeps of that allowance; less than granted where it returns the rest.
        agents: live agents.
        waiting: live agents whose decision waits for a step allowance or for weights.
        ghosts: steps completed by ghosts, which need no allowance and are not among `steps`.
    """

    steps: int
    serial: int
    allowance: int
    agents: int
    waiting: int
    ghosts: int = 0


@record("behavior_specs")
class BehaviorSpecs:
    """A stepping process publishes the behaviors that its simulators have named.

    Attributes:
        behaviors: specs by behavior name.
        teams: by behavior name, numbers of its teams so far, in order.
    """

    behaviors: dict[str, BehaviorSpec]
    teams: dict[str, tuple[int, ...]] = field(default_factory=dict)


@record("stepping_state")
class SteppingState:
    """A stepping process publishes its state.

    Attributes:
        source: its incarnation.
        behaviors: by name.
        simulators: number of those connected.
        deterministic: False once a simulator left a lockstep run: the run is no longer reproducible.
        final: it has stopped in order, and publishes no further state.
        given_up: by number of the simulator, how often it was disconnected because it was silent.
    """

    source: str
    behaviors: dict[str, ProducedSteps]
    simulators: int
    deterministic: bool = True
    final: bool = False
    given_up: dict[str, int] = field(default_factory=dict)


@record("allowance")
class StepAllowance:
    """Coordination allows a source a number of steps for one behavior.

    Attributes:
        serial: counts the allowances of this source and behavior.
        steps: cumulative since the source started.
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
    """StepAllowances hold the latest step allowance of each behavior for one source."""

    source: str
    behaviors: dict[str, StepAllowance]


@record("lessons")
class LessonsState:
    """Coordination publishes the present lessons of the environment parameters.

    Attributes:
        serial: counts the changes of lessons.
        numbers: number of the present lesson from 0, by parameter.
        since: by parameter, serial of the change that began this lesson; 0 for the first lesson.
        resets: serial of the last change that asks for new episodes everywhere; 0 for none.
    """

    serial: int
    numbers: dict[str, int]
    since: dict[str, int]
    resets: int = 0


@record("flush")
class FlushRequest:
    """Coordination asks assembly to close and send all open segments of a behavior.

    Attributes:
        serial: counts the flushes of the behavior from 1.
        required_steps: by source, produced steps that must have arrived before the flush.
    """

    serial: int
    required_steps: dict[str, int]


@record("flushes")
class FlushRequests:
    """FlushRequests hold the latest flush request of each behavior name."""

    behaviors: dict[str, FlushRequest]


@record("assembled")
class AssembledSteps:
    """Assembly counts the steps of one behavior from one source.

    Attributes:
        received: steps that the source had produced by the last part that arrived.
        open: steps in open segments.
        closed: steps in finished segments that are not sent yet.
        orphaned: steps that it could not record, because they began before this incarnation.
    """

    received: int
    open: int
    closed: int
    orphaned: int


@record("assembly_state")
class AssemblyState:
    """Assembly publishes its steps by behavior and source: `held["Ball"]["stepping-0.5f3a-1"]`."""

    origin: str
    held: dict[str, dict[str, AssembledSteps]]


@record("step_counts")
class StepCounts:
    """The steps of one behavior name satisfy: produced = trained + ghost + stale + lost + open."""

    produced: int
    trained: int
    ghost: int
    stale: int
    lost: int
    open: int


@record("run_state")
class RunState:
    """Coordination publishes the state of the run.

    Attributes:
        start: coordination's incarnation.
        finished: every behavior has reached its end.
        specs: of every behavior seen so far.
        step_counts: by behavior name; `open` is the rest after the other terms.
        routed: by behavior name, steps that have arrived and that the learner has not acknowledged.
        versions: highest weights version seen, by behavior name.
        reward_mean_last100: by behavior name, mean return of the last 100 episodes; absent before the first episode.
        episodes: by behavior name, episodes ended.
        ratings: by behavior name under self-play.
        known_incarnations: by service, the incarnation whose losses, and those of all before it, are counted.
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
    known_incarnations: dict[str, str] = field(default_factory=dict)
