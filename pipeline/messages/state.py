"""Services publish these records on retained topics.

The latest value wins, counts are cumulative since the publishing process started, and a late or restarted subscriber
receives the latest value at once.
"""

from dataclasses import field
from typing import Final

from sparring.pipeline.messages.matches import RatedLearner
from sparring.pipeline.messages.schema import F32, I64, Weights, record
from sparring.pipeline.specs import BehaviorSpec

EARLIER: Final = "earlier.0"
"""In place of an incarnation of stepping: steps that a checkpoint holds without saying which one produced them."""


@record("policy_weights")
class PolicyWeights:
    """A learner publishes the weights of one behavior's actor; the latest version wins.

    Attributes:
        behavior: name.
        version: counts published weights; only rises, also over restarts.
        arrays: parameters and buffers of the actor by their name in its state dict.
        trained: steps in the lineage of these weights.
        network: JSON of the network settings, where they are not those of the run: of an external opponent.
        trainer: its trainer, which brings the actor; "" for that of the run.
        script: script of the simulators that plays instead of weights; "" for weights.
    """

    behavior: str
    version: int
    arrays: dict[str, Weights]
    trained: int = 0
    network: str = ""
    trainer: str = ""
    script: str = ""


@record("learner_state")
class LearnerState:
    """A learner publishes its state; its counts are those of the lineage of its weights, whichever incarnation counted.

    sum of `reached` = trained + training + buffered + stale + ghost + sum of `lost`.

    Attributes:
        behavior: name.
        start: incarnation of the learning process, such as "learning-Ball.5f3a-2".
        version: of the weights published last.
        updates: in the lineage of the current weights.
        trained: steps in that lineage.
        training: steps in the update under way.
        buffered: steps that wait for an update.
        stale: steps dropped as too old.
        ghost: steps that were played and are not learned from.
        lost: steps that never arrived, or whose update the weights do not hold, by the stage whose death lost them:
            "assembly" or "learning".
        reached: by incarnation of stepping, in the order of their first segments: how many of its steps are in one of
            these counts. A later incarnation of a stepping service follows the last steps of an earlier one.
        done: `max_steps` is reached.
        checkpoint: folder of the newest checkpoint within the run folder, "" for none.
        weights_sha256: of the weights published last.
    """

    behavior: str
    start: str
    version: int
    updates: int
    trained: int
    training: int = 0
    buffered: int = 0
    stale: int = 0
    ghost: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    reached: dict[str, int] = field(default_factory=dict)
    done: bool = False
    checkpoint: str = ""
    weights_sha256: str = ""


@record("episode_returns")
class EpisodeReturns:
    """A learner publishes the returns of the latest episodes of learning agents, before the state that includes them.

    Attributes:
        start: incarnation of the learning process.
        episodes: that have ended since it started.
        returns: [r] returns of the latest ones, in their order.
        lessons: [r] serial of the lessons that each began in; empty without curricula.
    """

    start: str
    episodes: int
    returns: F32
    lessons: I64


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
        described: by behavior id, what its first report shows of its agents, for people.
    """

    behaviors: dict[str, BehaviorSpec]
    teams: dict[str, tuple[int, ...]] = field(default_factory=dict)
    described: dict[str, str] = field(default_factory=dict)


@record("simulator_steps")
class SimulatorSteps:
    """A stepping process publishes the steps of one simulator's process, by behavior name.

    Attributes:
        before: that it had reported when it connected, less those that this incarnation of stepping had counted before.
        completed: that this incarnation of stepping has counted.
        total: that it reported at its end; empty before.
        connected: it is connected.
    """

    before: dict[str, int] = field(default_factory=dict)
    completed: dict[str, int] = field(default_factory=dict)
    total: dict[str, int] = field(default_factory=dict)
    connected: bool = False


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
        stepped: numbers of the simulators that have completed a step.
        matches: results of matches that it has reported so far.
        processes: steps of each simulator's process, by its name in Hello; "" for all that have none.
    """

    source: str
    behaviors: dict[str, ProducedSteps]
    simulators: int
    deterministic: bool = True
    final: bool = False
    given_up: dict[str, int] = field(default_factory=dict)
    stepped: tuple[int, ...] = ()
    matches: int = 0
    processes: dict[str, SimulatorSteps] = field(default_factory=dict)


@record("allowance")
class StepAllowance:
    """Coordination allows a source a number of steps for one behavior.

    Attributes:
        serial: counts the allowances of this source and behavior.
        steps: cumulative since the source started.
        version: policy version to wait for before using it; 0 for any.
        assignment: serial of the assignment to wait for, too; 0 for any.
        lessons: serial of the lessons to wait for, too; 0 for any.
        report: cumulative steps after which the source publishes its state at once, because a flush may be due.
    """

    serial: int
    steps: int
    version: int = 0
    assignment: int = 0
    lessons: int = 0
    report: int = 0


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


@record("added_behaviors")
class AddedBehaviors:
    """The supervisor names the behaviors that the run has got since it started, once their queues and topics exist."""

    names: tuple[str, ...]


@record("endpoints")
class Endpoints:
    """The supervisor says where services listen, once a part of the run was placed on another node.

    Attributes:
        addresses: of queues and topics, by name; those that a service knows count until this one arrives.
    """

    addresses: dict[str, str]


@record("assembled")
class AssembledSteps:
    """Assembly counts the steps of one behavior from one source.

    Attributes:
        sent: steps up to which it has sent segments, as `Segments.reached`.
        open: steps in open segments.
        closed: steps in finished segments that are not sent yet.
    """

    sent: int
    open: int
    closed: int


@record("assembly_state")
class AssemblyState:
    """Assembly publishes its state.

    Attributes:
        origin: its incarnation.
        held: its steps by behavior and source: `held["Ball"]["stepping-0.5f3a-1"]`.
        final: it has stopped in order, and publishes no further state.
    """

    origin: str
    held: dict[str, dict[str, AssembledSteps]]
    final: bool = False


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
        step_counts: by behavior name.
        losses: by behavior name, the lost steps by cause: the stage whose death lost them, or "both_ends" for steps
            that only the simulators still knew of.
        unaccounted: by behavior name, steps that the simulators count beyond the produced ones; absent where they may
            have counted more, at a stepping process that died or in a session that left no last counts.
        versions: highest weights version seen, by behavior name.
        reward_mean_last100: by behavior name, mean return of the last 100 episodes; absent before the first episode.
        episodes: by behavior name, episodes ended.
        ratings: by behavior name under self-play.
        matches_lost: results of matches that died unread with stepping.
        incarnations: by service, the latest incarnation whose counts are included.
        final: coordination has ended in order; these counts are the last.
    """

    start: str
    finished: bool
    specs: dict[str, BehaviorSpec]
    step_counts: dict[str, StepCounts]
    losses: dict[str, dict[str, int]]
    unaccounted: dict[str, int]
    versions: dict[str, int]
    reward_mean_last100: dict[str, float]
    episodes: dict[str, int]
    ratings: dict[str, RatedLearner] = field(default_factory=dict)
    matches_lost: int = 0
    incarnations: dict[str, str] = field(default_factory=dict)
    final: bool = False
