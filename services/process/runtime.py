"""A service gets its run, transport, clocks, stop signal and metrics from a context.

A service is a function `run(context)` that returns when `context.stop` is set and its data are sent. It takes time,
randomness and threads only from its context, so that the same function runs as a process over ZeroMQ, in one process
over memory, and under a virtual clock in a test.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread
from anyio.abc import Listener, TaskGroup

from sparring.pipeline.errors import QueueClosed, ServiceError, described
from sparring.pipeline.messages.channels import ADDED, METRICS, RESULTS, RUN
from sparring.pipeline.messages.metrics import Metrics
from sparring.pipeline.monitoring.metrics import Registry
from sparring.pipeline.monitoring.progress import ALL, ProgressTracker
from sparring.pipeline.monitoring.writing import Writing
from sparring.pipeline.queues.interface import Capacity, Publisher, Receiver, Sender, Subscription, Transport
from sparring.pipeline.settings.model import BehaviorSettings, Settings
from sparring.pipeline.specs import BehaviorSpec
from sparring.pipeline.stepping.settings import GATHERED_STEPS
from sparring.services.endpoint.sockets import listen

T = TypeVar("T")
Clock = Callable[[], float]

METRICS_INTERVAL_S = 1.0
SUPERVISOR: Final = "supervisor"
"""Service name under which the supervisor publishes, in runs that may get behaviors, or on a cluster."""
MEETING: Final = "sparring_ranks-"
"""Beginning of the names of the temporary folders in which the ranks of a learner meet."""
MATCHES = RESULTS.name
"""Queue of the results of matches, from stepping to coordination."""


async def in_thread(work: Callable[[], T]) -> T:
    """Runs work in a worker thread; what a plug-in raises there, to exit for example, is a failure as any other."""
    return await anyio.to_thread.run_sync(partial(_failing, work))


def _failing(work: Callable[[], T]) -> T:
    try:
        return work()
    except Exception:
        raise
    except BaseException as error:  # the event loop would take it for an interrupt or a cancellation of its own
        raise RuntimeError(described(error)) from error


_LARGEST_GROUP: Final = 1024
_SHARES: Final = 4
"""A queue holds this many of the largest messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Playback:
    """A Playback describes a run that acts with checkpoints and learns nothing.

    Attributes:
        checkpoints: folder of the checkpoint of each behavior, by name.
        episodes: number of episodes of each behavior after which the run ends; 0 for no end.
        record: episodes are written to files.
        timeout_s: seconds after which a run with an end stops without all its episodes.
        players: labels of the players of a tournament, by their number; none where each behavior has one checkpoint.
        matches: number of matches of each pair of players.
        mirror: each player meets itself too.
    """

    checkpoints: Mapping[str, str]
    episodes: int = 0
    record: bool = False
    timeout_s: float = 3600.0
    players: Sequence[str] = ()
    matches: int = 0
    mirror: bool = False


@dataclass(frozen=True, kw_only=True)
class Run:
    """A Run holds what all services of a run know.

    Attributes:
        id: run id.
        directory: run folder.
        settings: of the run.
        seed: source of all random streams.
        addresses: addresses for simulators, by stepping service.
        local: further address of a stepping service, for simulators of this package that the run starts; none where no
            private folder has a place for it.
        simulators: number of simulators that the supervisor starts for each stepping service.
        resumed: the run continues from the state in its folder.
        playing: checkpoints that it plays; None where it learns.
        keys: folder of keys on this machine.
        insecure: other machines may connect without keys.
        added: behaviors that simulators have named and the configuration lacks.
        clustered: a cluster runs it.
    """

    id: str
    directory: Path
    settings: Settings
    seed: int
    addresses: Mapping[str, str]
    simulators: Mapping[str, int]
    local: Mapping[str, str] = field(default_factory=dict)
    resumed: bool = False
    playing: Playback | None = None
    keys: Path | None = None
    insecure: bool = False
    added: tuple[str, ...] = ()
    clustered: bool = False

    @property
    def stepping(self) -> tuple[str, ...]:
        """Returns the names of the stepping services."""
        return tuple(self.addresses)

    @property
    def assemblies(self) -> tuple[str, ...]:
        """Returns the names of the assembly services: one, or one for each stepping service."""
        several = self.settings.pipeline.assembly == "per stepping" and len(self.addresses) > 1
        return tuple(f"assembly-{index}" for index in range(len(self.addresses))) if several else ("assembly",)

    def assembly_of(self, stepping: str) -> str:
        """Returns the assembly to which a stepping service sends its steps."""
        return self.assemblies[self.stepping.index(stepping) % len(self.assemblies)]

    def sources_of(self, assembly: str) -> tuple[str, ...]:
        """Returns the stepping services that send their steps to an assembly."""
        return tuple(name for name in self.stepping if self.assembly_of(name) == assembly)

    @property
    def grows(self) -> bool:
        """Returns whether simulators may add behaviors to the run."""
        return self.playing is None and self.settings.unnamed is not None

    def behavior(self, name: str) -> BehaviorSettings:
        """Returns the settings of a behavior, which the run has or may get."""
        settings = self.settings if name in self.settings.behaviors else self.settings.naming([name])
        return settings.behaviors[name]

    def capacity(self, queue: str) -> Capacity:
        """Returns the capacity of a queue: twice the step budget, so that the budget is exhausted before a queue."""
        settings, limits = self.settings, self.settings.pipeline.capacities
        kind, _, name = queue.partition(":")
        if kind != "segments":  # at most as many matches end in a tick as there are agents
            further = settings.pipeline.limits.unnamed_behaviors if self.grows else 0
            agents = settings.pipeline.max_agents * (len(settings.behaviors) + further) + GATHERED_STEPS
            processes = 1 if name else len(self.stepping)  # steps:1 is of one of them
            return Capacity(messages=limits.step_batches, steps=_SHARES * agents * processes, senders=processes)
        behavior = self.behavior(name)
        budget = settings.step_budget(behavior)
        most = max(2 * budget, _SHARES * behavior.time_horizon)
        if behavior.hyperparameters.groups:  # a message holds at least one timestep of a whole group
            most = max(most, _SHARES * _LARGEST_GROUP)
        senders = len(self.assemblies)
        return Capacity(messages=limits.segments, steps=most * senders, senders=senders)

    @property
    def self_play(self) -> tuple[str, ...]:
        """Returns the names of the behaviors that play against ghosts, or as ghosts only."""
        if self.playing is not None:
            return tuple(self.settings.behaviors) if self.playing.players else ()
        return tuple(name for name, one in self.settings.behaviors.items() if one.self_play is not None)

    @property
    def services(self) -> tuple[str, ...]:
        """Returns all services that have a topic, in the order of the data flow."""
        return (*self.stepping, *self.assemblies, "coordination", *(f"learning-{name}" for name in self.learners))

    @property
    def sinks(self) -> tuple[str, ...]:
        """Returns the services at the end of the data flow.

        Added behaviors count only where the configuration has none: their simulators may have left.
        """
        named = [name for name in self.learners if name not in self.added]
        return tuple(f"learning-{name}" for name in named or self.learners) or ("coordination",)

    @property
    def learners(self) -> tuple[str, ...]:
        """Returns the names of the behaviors with a process of their own, which learns or plays a checkpoint."""
        return () if self.playing is not None and self.playing.players else tuple(self.settings.behaviors)


@dataclass(kw_only=True)
class Context:
    """A Context belongs to one incarnation of one service.

    Attributes:
        run: shared by all services.
        service: name, such as "stepping-0".
        start: its incarnation, such as "stepping-0.5f3a-2"; never reused.
        first: it is the service's first incarnation under this supervisor.
        transport: opens queues and topics.
        stop: set when the service must end in order.
        log: structlog logger with run, service and behavior bound.
        clock: seconds, monotonic. An event loop's own clock may be as coarse as a millisecond.
        wall_clock: seconds since the epoch, for readers.
        compute: runs long work beside the event loop, by default in a worker thread; a cancellation waits for its end.
        reload: returns the present run, which may have more behaviors; None where it cannot change.
        listen: opens the endpoint for simulators.
        registry: metrics of the service.
        writing: handles a full disk; it fails only when a stall would be reported.
        progress: counts of its activities, and what these wait for.
    """

    run: Run
    service: str
    start: str
    first: bool
    transport: Transport
    stop: anyio.Event
    log: Any
    clock: Clock = anyio.current_time
    wall_clock: Clock = time.time
    compute: Callable[[Callable[[], Any]], Awaitable[Any]] = in_thread
    listen: Callable[[str], Awaitable[Listener[Any]]] = listen
    reload: Callable[[], Run] | None = None
    registry: Registry = field(init=False)
    writing: Writing = field(init=False)
    progress: ProgressTracker = field(init=False)

    def __post_init__(self) -> None:
        self.registry = Registry(self.service, self.start)
        self.progress = ProgressTracker(self.registry, self.clock)
        limit_s = self.run.settings.pipeline.stall_timeout_s
        self.writing = Writing(self.registry, self.log, self.clock, limit_s, self.progress)

    def numbers(self) -> Metrics:
        """Returns all its present metrics, for its topic."""
        waits = self.progress.published()
        return self.registry.snapshot(self.wall_clock(), self.progress.waiting_for, waits)

    def note_sender(self, name: str, queue: Sender[T]) -> None:
        """Adds the statistics of a sending end to the metrics."""
        stats = queue.statistics()
        self._note_queue(f"{name}.out", queue, stats.unacknowledged_messages, stats.unacknowledged_steps)
        self.registry.reach(f"queue.{name}.out.put_steps", stats.put_steps)
        self.registry.reach(f"queue.{name}.out.put_bytes", stats.put_bytes)

    def note_receiver(self, name: str, queue: Receiver[T]) -> None:
        """Adds the statistics of a receiving end to the metrics."""
        stats = queue.statistics()
        self._note_queue(name, queue, stats.queued_messages, stats.queued_steps)

    def _note_queue(self, name: str, queue: Sender[T] | Receiver[T], messages: int, steps: int) -> None:
        stats, capacity = queue.statistics(), queue.maxlen
        waits, waited_s = stats.waits, stats.waited_s
        self.registry.queue(name, messages=messages, steps=steps, capacity=capacity, waits=waits, waited_s=waited_s)


async def publish_metrics(context: Context, topic: Publisher, refresh: Callable[[], None]) -> None:
    """Publishes the service's metrics every second, until cancelled.

    Args:
        context: of the service.
        topic: of the service.
        refresh: updates the gauges.
    """
    while True:
        refresh()
        topic.publish(METRICS, context.numbers())
        await anyio.sleep(METRICS_INTERVAL_S)


async def follow(subscription: Subscription, react: Callable[[Subscription], Awaitable[None] | None]) -> None:
    """Calls `react` with the subscription, at once and after each change, until the subscription is closed."""
    with suppress(QueueClosed):
        while True:
            await subscription.changed()
            if (outcome := react(subscription)) is not None:
                await outcome


async def follow_growth(context: Context, grow: Callable[[Sequence[str]], Awaitable[None]]) -> None:
    """Calls `grow` with the names of behaviors that the run gets, once the context has the run with them."""
    if context.reload is None or not context.run.grows:
        return

    async def adopt(topics: Subscription) -> None:
        added = topics.latest(ADDED)
        if context.reload is not None and added is not None:
            names = [name for name in added.names if name not in context.run.settings.behaviors]
            context.run = context.reload()
            await grow(names)

    await follow(await context.transport.subscribe(SUPERVISOR), adopt)


async def spec_of(context: Context, coordination: Subscription, name: str) -> tuple[BehaviorSpec, int]:
    """Waits for a behavior's spec; returns it with the highest version of its weights ever published."""
    context.progress.waits(ALL, f"specs/{name}", "coordination", text=f"the first simulator with {name}")
    while True:
        state = coordination.latest(RUN)
        if state is not None and name in state.specs:
            context.progress.works()
            return state.specs[name], state.versions.get(name, 0)
        await coordination.changed()


def refuse_restart(context: Context) -> None:
    """Fails an evaluation in which this service was restarted, or a tournament whose results it held.

    Raises:
        ServiceError: it was.
    """
    playing = context.run.playing
    if playing is None or context.first:
        return
    if playing.episodes or (playing.players and context.service == "coordination"):
        what, missing = ("a tournament", "results") if playing.players else ("an evaluation", "episodes")
        raise ServiceError(
            f"got {context.service}, which was restarted during {what}; expected one start, because {missing} "
            f"are missing; {'start it' if playing.players else 'evaluate'} again"
        )


async def cancel_at_stop(context: Context, tasks: TaskGroup) -> None:
    """Cancels `tasks` when the service must end."""
    await context.stop.wait()
    tasks.cancel_scope.cancel()
