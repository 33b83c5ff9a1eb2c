"""The process around coordination: publishes what follows from the counts of the stages. No step passes through it.

consumes       the state of stepping, of assembly and of the learners; Results from "matches"; under self-play
               PolicyWeights from the policy topics
produces       step allowances, flushes, the assignment of opponents, the lessons of environment parameters and the
               state of the run on its topic; the weights of ghosts on the topic "ghosts"
waits for      a state that a stage publishes; results
unblocked by   produced steps, a published update, an ended match

Results are acknowledged once the ratings that include them are on disk, so that a restart loses none.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import anyio

from sparring.pipeline.coordination.coordinator import STATE_FILE, Coordinator, of_known_shape, read_state
from sparring.pipeline.coordination.ledger import StepLedger
from sparring.pipeline.coordination.teaching import LessonPlan
from sparring.pipeline.errors import QueueClosed
from sparring.pipeline.files import write_atomically
from sparring.pipeline.messages import channels
from sparring.pipeline.messages.incarnations import service_of
from sparring.pipeline.messages.matches import Results
from sparring.pipeline.messages.state import FlushRequests, StepAllowances
from sparring.pipeline.monitoring.progress import ALL, SIMULATORS
from sparring.pipeline.queues.interface import Delivery, Publisher, Receiver, Subscription
from sparring.pipeline.settings.parameters import curricula
from sparring.services.process.runtime import (
    MATCHES,
    Context,
    Run,
    follow,
    follow_growth,
    publish_metrics,
    refuse_restart,
)
from sparring.services.stages.ghosts import add_sides, open_ghosts

_SAVE_INTERVAL_S: Final = 0.2


class Coordination:
    """The coordinator's queue, topic and file.

    Args:
        context: of the service.
        topic: of the service.
        coordinator: that decides.
    """

    def __init__(self, context: Context, topic: Publisher, coordinator: Coordinator) -> None:
        self._context = context
        self._topic = topic
        self.coordinator = coordinator
        self._unwritten = False
        self._unsaved: deque[Delivery[Results]] = deque()  # results that are counted and not on disk
        self._unfinished: set[str] = set()  # stepping services whose final report is missing
        self._final_reports = anyio.Event()
        self._published: dict[str, object] = {}
        self._path = context.run.directory / STATE_FILE

    # ---------------------------------------------------------------- what arrives

    async def rate(self, results: Receiver[Results]) -> None:
        """Counts the results of matches, until their queue is closed."""
        progress = self._context.progress
        with suppress(QueueClosed):
            while True:
                progress.waits(MATCHES, "steps", *self._context.run.stepping, text="results of matches")
                delivery = await results.receive()
                progress.works(MATCHES)
                progress.passed(MATCHES, delivery.steps)
                self._unsaved.append(delivery)
                for learner, score in self.coordinator.on_results(delivery.record):
                    self._context.registry.observe_moments("Self-play/Win Rate", [score], learner)
                self.publish()

    def on_stepping(self, topics: Subscription) -> None:
        """Takes over what a stepping service publishes."""
        specs, state = topics.latest(channels.SPECS), topics.latest(channels.STEPPING_STATE)
        if state is None or specs is None:
            return
        self.coordinator.on_stepping_state(specs, state)
        self._note_final_report(service_of(state.source), final=state.final)
        self.publish()

    def _note_final_report(self, name: str, *, final: bool) -> None:
        """Saves a final report at once, because it is published only once."""
        if not final:
            self._unfinished.add(name)
        elif name in self._unfinished:
            self._unfinished.remove(name)
            self._write(self.save)
        if not self._unfinished:
            self._final_reports.set()

    def on_weights(self, topics: Subscription) -> None:
        """Takes over the weights that a learner under self-play publishes."""
        weights, ghosts = topics.latest(channels.POLICY_WEIGHTS), self.coordinator.ghosts
        if weights is not None and ghosts is not None:
            self._write(partial(ghosts.weights, weights))
            self.publish()

    def on_assembly(self, topics: Subscription) -> None:
        """Takes over what assembly publishes."""
        state = topics.latest(channels.ASSEMBLY_STATE)
        if state is not None:
            self.coordinator.on_assembly_state(state)

    def on_learner(self, topics: Subscription) -> None:
        """Takes over what a learner publishes."""
        state = topics.latest(channels.LEARNER_STATE)
        if state is None:
            return
        for line in self.coordinator.on_learner_state(state, topics.latest(channels.EPISODES)):
            self._context.log.info("lesson", **line, notice=True)
        self.log_losses()
        self.publish()

    # ---------------------------------------------------------------- what is published

    def publish(self) -> None:
        """Publishes assignment and lessons, then the allowances and flushes that follow, and the run's end.

        Where the disk is full, `settle` publishes once it has written what must be on disk first.
        """
        self._write(self._publish)

    def _publish(self) -> None:
        self._publish_assignment()
        self.coordinator.teaching.publish(self._topic, self.save)
        for name in self.coordinator.next_flushes():
            self._context.registry.add(f"flushes/{name}")
        for source, granted in self.coordinator.allowances().items():
            content = tuple(
                (name, one.serial, one.version, one.assignment, one.lessons) for name, one in sorted(granted.items())
            )
            if self._is_new(source, content):
                topic = channels.allowances_topic(service_of(source))
                self._topic.publish(topic, StepAllowances(source=source, behaviors=granted))
        if self._published.get("flushes", {}) != self.coordinator.flushes:
            self.save()  # a later incarnation must not give the serial to another flush
            self.publish_flushes()
        if self._is_new("run", (len(self.coordinator.specs), self.coordinator.finished)):
            self._topic.publish(channels.RUN, self.coordinator.state())

    def _is_new(self, key: str, content: object) -> bool:
        new = self._published.get(key) != content
        self._published[key] = content
        return new

    def _publish_assignment(self) -> None:
        """Publishes a new assignment, once it is on disk and the weights that it names are published."""
        assignment, ghosts = self.coordinator.assignment, self.coordinator.ghosts
        if assignment is None or ghosts is None:
            return
        self.save()
        ghosts.publish()
        self._topic.publish(channels.ASSIGNMENT, assignment)
        self.coordinator.assigned = assignment.serial
        self._context.log.info("opponents_assigned", serial=assignment.serial, **ghosts.described())

    def publish_flushes(self) -> None:
        """Publishes the latest flush of each behavior."""
        self._published["flushes"] = latest = self.coordinator.flushes
        self._topic.publish(channels.FLUSHES, FlushRequests(behaviors=latest))

    async def time_out(self, limit_s: float) -> None:
        """Ends a tournament that is not over after `limit_s` seconds."""
        await anyio.sleep(limit_s)
        if self.coordinator.time_out():
            self._context.log.error("tournament_timed_out", seconds=limit_s, notice=True)
            self.publish()

    def refresh(self) -> None:
        """Brings gauges and the state of the run up to date."""
        self._topic.publish(channels.RUN, self.coordinator.state())
        for gauge, value in self.coordinator.gauges():
            self._context.registry.gauge(gauge, value)
        for name, ledger in self.coordinator.ledgers.items():
            self._note_waits(name, ledger)
        if not self.coordinator.ledgers:
            self._context.progress.waits(ALL, "the first simulator", SIMULATORS, who="outside")

    def _note_waits(self, name: str, ledger: StepLedger) -> None:
        """Notes which stage stepping waits for where the budget is used up, and which one a learner without a spec."""
        progress, stepping = self._context.progress, self._context.run.stepping
        if ledger.in_flight >= ledger.budget:
            progress.waits(f"allowances/{name}", f"weights/{name}", f"learning-{name}")
        else:
            progress.works(f"allowances/{name}")
        if name in self.coordinator.specs:
            progress.works(f"specs/{name}")
        else:
            progress.waits(f"specs/{name}", f"steps/{name}", *stepping, text=f"the first simulator with {name}")

    # ---------------------------------------------------------------- on disk

    async def settle(self) -> None:
        """Saves the state at a pace, and acknowledges the results that it includes."""
        while True:
            await anyio.sleep(_SAVE_INTERVAL_S)
            await self._context.writing.until_done(self._settle, "the state of coordination")

    async def _settle(self) -> None:
        self.save()
        if self._unwritten:
            self._unwritten = False
            self.publish()

    def _write(self, write: Callable[[], None]) -> None:
        """Writes; on a full disk that is left to `settle`, with the publication of what depends on it."""
        try:
            write()
        except OSError as error:
            self._unwritten = True
            self._context.writing.failed(error, "the state of coordination")

    async def wait_for_final_reports(self) -> None:
        """Waits for the final reports of stepping, which may be slow to arrive: they hold the last steps produced."""
        with anyio.move_on_after(self._context.run.settings.pipeline.stop_timeout_s / 4):
            if self._unfinished:
                self._final_reports = anyio.Event()
                await self._final_reports.wait()

    async def end(self) -> None:
        """Writes off what no learner received, saves the step counts a last time, and publishes the final state.

        Raises:
            DiskFull: the step counts could not be written.
        """
        self.coordinator.close()
        self.log_losses()
        limit_s = self._context.run.settings.pipeline.stop_timeout_s / 2
        try:
            await self._context.writing.until_done(self._settle, "the step counts", limit_s)
        finally:
            self.refresh()
            self.publish()

    def save(self) -> None:
        """Writes the file, then acknowledges the results that it includes.

        Raises:
            OSError: the disk is full or the folder cannot be written; nothing is acknowledged.
        """
        write_atomically(self._path, json.dumps(self.coordinator.to_plain()).encode(), durable=False)
        while self._unsaved:
            self._unsaved.popleft().acknowledge()

    def restore(self) -> None:
        """Continues from what an earlier incarnation has saved, if there is anything.

        Raises:
            ServiceError: a loss of power or another program has damaged the file.
        """
        plain = read_state(self._path)
        if plain is not None:
            with of_known_shape(self._path):
                self.coordinator.restore(plain)
            self._context.log.info("step_counts_restored", behaviors=sorted(plain["behaviors"]))

    def log_losses(self) -> None:
        """Logs the steps that were lost since the last call."""
        for name, ledger in self.coordinator.ledgers.items():
            for cause, steps in ledger.take_new_losses().items():
                self._context.log.warning("steps_lost", behavior=name, cause=cause, steps=steps)


def add_behaviors(coordinator: Coordinator, run: Run, names: Iterable[str]) -> None:
    """Adds behaviors of a run to the step accounting, and to self-play where they use it."""
    for name in names:
        behavior = run.behavior(name)
        ledger = StepLedger(
            buffer_size=behavior.hyperparameters.buffer_size,
            overlap=run.settings.overlap,
            processes=len(run.stepping),
        )
        coordinator.add(name, ledger, behavior.max_steps, added=name in run.added)
    if coordinator.ghosts is not None:
        add_sides(coordinator.ghosts, run, names)


async def open_coordination(context: Context, topic: Publisher) -> Coordination:
    """Opens all that coordination works with, and restores what an earlier incarnation has saved."""
    run, playing = context.run, context.run.playing
    if playing is not None and playing.players:
        refuse_restart(context)
    ghosts = await open_ghosts(context)
    teaching = LessonPlan(curricula(run.settings.environment_parameters), ghosts)
    coordinator = Coordinator(context.start, ghosts=ghosts, teaching=teaching)
    add_behaviors(coordinator, run, run.settings.behaviors)
    coordination = Coordination(context, topic, coordinator)
    if playing is not None:  # checkpoints play in the lessons that their run has come to
        path = run.directory.parent / STATE_FILE
        with of_known_shape(path):
            teaching.restore((read_state(path) or {}).get("lessons"))
    coordination.restore()
    if run.resumed and context.first:
        coordinator.close_former_run()
        coordination.log_losses()
    coordination.publish_flushes()
    teaching.publish(topic, coordination.save)
    return coordination


async def run(context: Context) -> None:
    """Coordinates until stopped; then saves the step counts."""
    topic, playing = await context.transport.publisher(context.service), context.run.playing
    coordination = await open_coordination(context, topic)
    stepping = [await context.transport.subscribe(name) for name in context.run.stepping]
    assembly = await context.transport.subscribe("assembly")
    results = await context.transport.receiver(channels.RESULTS, context.run.capacity(channels.RESULTS.name))

    def refresh() -> None:
        coordination.refresh()
        context.note_receiver(MATCHES, results)

    async def follow_learners(names: Iterable[str]) -> None:
        for name in names:
            tasks.start_soon(follow, await context.transport.subscribe(f"learning-{name}"), coordination.on_learner)
            if name in context.run.self_play and playing is None:
                tasks.start_soon(follow, await context.transport.subscribe(f"policy-{name}"), coordination.on_weights)

    async def grow(names: Sequence[str]) -> None:
        add_behaviors(coordination.coordinator, context.run, names)
        for subscription in stepping:  # what they said of these behaviors before
            coordination.on_stepping(subscription)
        await follow_learners(names)

    async with anyio.create_task_group() as tasks:
        if playing is not None and playing.players:
            tasks.start_soon(coordination.time_out, playing.timeout_s)
        for subscription in stepping:
            tasks.start_soon(follow, subscription, coordination.on_stepping)
        tasks.start_soon(follow, assembly, coordination.on_assembly)
        await follow_learners(context.run.learners)
        tasks.start_soon(follow_growth, context, grow)
        tasks.start_soon(coordination.rate, results)
        tasks.start_soon(coordination.settle)
        tasks.start_soon(publish_metrics, context, topic, refresh)
        await context.stop.wait()
        await coordination.wait_for_final_reports()
        tasks.cancel_scope.cancel()
    try:
        await coordination.end()
    finally:
        topic.publish(channels.METRICS, context.numbers())
