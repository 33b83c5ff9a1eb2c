"""The queues and topics of a run: the name of each, and the type of its records.

A queue is named in the whole run. A topic is a key among those that one service publishes; several services may use the
same key for records of their own.
"""

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from sparring.pipeline.messages.hosts import HostOrders, HostRun, HostState
from sparring.pipeline.messages.matches import MatchupAssignment, Results
from sparring.pipeline.messages.metrics import Metrics
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.state import (
    AddedBehaviors,
    AssemblyState,
    BehaviorSpecs,
    EpisodeReturns,
    FlushRequests,
    LearnerState,
    LessonsState,
    PolicyWeights,
    RunState,
    StepAllowances,
    SteppingState,
)
from sparring.pipeline.messages.steps import StepBatch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Queue(Generic[T]):
    """A queue carries records of one type to one receiver."""

    name: str
    record: type[T]


@dataclass(frozen=True, slots=True)
class Topic(Generic[T]):
    """A topic retains the latest record that a service has published under a key."""

    key: str
    record: type[T]


STEPS: Final = Queue("steps", StepBatch)
RESULTS: Final = Queue("matches", Results)


def segments_queue(behavior: str) -> Queue[Segments]:
    """Returns the queue from assembly to the learner of a behavior."""
    return Queue(f"segments:{behavior}", Segments)


METRICS: Final = Topic("metrics", Metrics)
"""Every service publishes its metrics."""

STEPPING_STATE: Final = Topic("state", SteppingState)
SPECS: Final = Topic("specs", BehaviorSpecs)

ASSEMBLY_STATE: Final = Topic("state", AssemblyState)

LEARNER_STATE: Final = Topic("state", LearnerState)
EPISODES: Final = Topic("episodes", EpisodeReturns)
POLICY_WEIGHTS: Final = Topic("weights", PolicyWeights)

RUN: Final = Topic("run", RunState)
LESSONS: Final = Topic("lessons", LessonsState)
ASSIGNMENT: Final = Topic("assignment", MatchupAssignment)
FLUSHES: Final = Topic("flushes", FlushRequests)

ADDED: Final = Topic("added", AddedBehaviors)
"""The supervisor's, in a run that may get behaviors."""
HOST_RUN: Final = Topic("run", HostRun)
HOST_STATE: Final = Topic("state", HostState)


def allowances_topic(service: str) -> Topic[StepAllowances]:
    """Returns coordination's topic for the step allowances of a stepping service."""
    return Topic(f"allowances:{service}", StepAllowances)


def ghost_topic(place: int) -> Topic[PolicyWeights]:
    """Returns coordination's topic for the weights of one ghost that plays now."""
    return Topic(f"ghost-{place}", PolicyWeights)


def orders_topic(host: str) -> Topic[HostOrders]:
    """Returns the main machine's topic for the orders of another machine."""
    return Topic(f"orders:{host}", HostOrders)
