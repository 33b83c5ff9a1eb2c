"""The queues and topics of a run: the name of each, and the type of its records.

A queue is named in the whole run. A topic is a key among those that one service publishes; several services may use the
same key for records of their own.
"""

from typing import Final, Generic, NamedTuple, TypeVar

from sparring.pipeline.messages import state
from sparring.pipeline.messages.matches import MatchupAssignment, Results
from sparring.pipeline.messages.metrics import Metrics
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.steps import StepBatch

T = TypeVar("T")


class Queue(NamedTuple, Generic[T]):
    """A queue carries records of one type to one receiver."""

    name: str
    record: type[T]


class Topic(NamedTuple, Generic[T]):
    """A topic retains the latest record that a service has published under a key."""

    key: str
    record: type[T]


RESULTS: Final = Queue("matches", Results)


def steps_queue(assembly: str) -> Queue[StepBatch]:
    """Returns the queue from stepping to an assembly."""
    _, _, number = assembly.partition("-")
    return Queue(f"steps:{number}" if number else "steps", StepBatch)


def segments_queue(behavior: str) -> Queue[Segments]:
    """Returns the queue from assembly to the learner of a behavior."""
    return Queue(f"segments:{behavior}", Segments)


METRICS: Final = Topic("metrics", Metrics)
"""Every service publishes its metrics."""

STEPPING_STATE: Final = Topic("state", state.SteppingState)
SPECS: Final = Topic("specs", state.BehaviorSpecs)

ASSEMBLY_STATE: Final = Topic("state", state.AssemblyState)

LEARNER_STATE: Final = Topic("state", state.LearnerState)
EPISODES: Final = Topic("episodes", state.EpisodeReturns)
POLICY_WEIGHTS: Final = Topic("weights", state.PolicyWeights)

RUN: Final = Topic("run", state.RunState)
LESSONS: Final = Topic("lessons", state.LessonsState)
ASSIGNMENT: Final = Topic("assignment", MatchupAssignment)
FLUSHES: Final = Topic("flushes", state.FlushRequests)

ADDED: Final = Topic("added", state.AddedBehaviors)
"""The supervisor's, in a run that may get behaviors."""
ENDPOINTS: Final = Topic("endpoints", state.Endpoints)
"""The supervisor's, in a run on a cluster."""


def allowances_topic(service: str) -> Topic[state.StepAllowances]:
    """Returns coordination's topic for the step allowances of a stepping service."""
    return Topic(f"allowances:{service}", state.StepAllowances)


def ghost_topic(place: int) -> Topic[state.PolicyWeights]:
    """Returns coordination's topic for the weights of one ghost that plays now."""
    return Topic(f"ghost-{place}", state.PolicyWeights)
