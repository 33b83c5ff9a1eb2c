"""The process around coordination: publishes what follows from the counts of the stages. No step passes through it.

consumes       the state of stepping, of assembly and of the learners; Results from "matches"; under self-play
               PolicyWeights from the policy topics
produces       step allowances, flushes, the assignment of opponents, the lessons of environment parameters and the
               state of the run on its topic; the weights of ghosts on the topic "ghosts"
waits for      a state that a stage publishes; results
unblocked by   produced steps, a published update, an ended match

Results are acknowledged once the ratings that include them are on disk, so that a restart loses none.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

import anyio

from sparring.pipeline.coordination.coordinator import STATE_FILE, Coordinator, SavedState, read_state
from sparring.pipeline.coordination.ghosts import Ghosts
from sparring.pipeline.coordination.ledger import StepLedger
from sparring.pipeline.coordination.lessons import Lessons
from sparring.pipeline.coordination.opponents import ExternalOpponent, Tournament, opponents_of
from sparring.pipeline.coordination.self_play import SelfPlay
from sparring.pipeline.errors import QueueClosed
from sparring.pipeline.files import write_atomically
from sparring.pipeline.messages import channels
from sparring.pipeline.messages.incarnations import service_of
from sparring.pipeline.messages.matches import Results
from sparring.pipeline.messages.state import AssemblyState, FlushRequests, StepAllowances
from sparring.pipeline.monitoring.progress import ALL, SIMULATORS
from sparring.pipeline.queues.interface import Delivery, Publisher, Receiver, Subscription
from sparring.pipeline.settings.parameters import curricula
from sparring.services.process.runtime import MATCHES, Context, follow, follow_growth, publish_metrics, refuse_restart

_MANY_TURNS: Final = 3
"""A first match that lasts so many turns of the learning team is reported."""
_FEW_STEPS: Final = 4
"""Fewer steps of an agent in a buffer are reported."""
_SAVE_INTERVAL_S: Final = 0.2
_IDLE_TURNS: Final = 5
_LEAST_PLACES: Final = 4
_MOST_PLACES: Final = 16


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
        self._heard: set[str] = set()  # stepping services that this incarnation has heard of
        self._final_reports = anyio.Event()
        self._published: dict[str, object] = {}
        self._is_warned = False  # of absent teams
        self._warned: set[str] = set()  # behaviors with short segments
        self._endless: set[str] = set()  # behaviors whose matches do not end
        self._path = context.run.directory / STATE_FILE

    # ---------------------------------------------------------------- what arrives

    async def rate(self, results: Receiver[Results]) -> None:
        """Counts the results of matches, until their queue is closed."""
        progress, ghosts = self._context.progress, self.coordinator.ghosts
        with suppress(QueueClosed):
            while True:
                progress.waits(MATCHES, "steps", *self._context.run.stepping, text="results of matches")
                delivery = await results.receive()
                progress.works(MATCHES)
                progress.passed(MATCHES, delivery.steps)
                self._unsaved.append(delivery)
                for learner, score in [] if ghosts is None else ghosts.results(delivery.record):
                    self._context.registry.observe_moments("Self-play/Win Rate", [score], learner)
                self._warn_of_absent_teams()
                self.publish()

    def _warn_of_absent_teams(self) -> None:
        """Warns once where matches end without a team that simulators have named."""
        ghosts = self.coordinator.ghosts
        if self._is_warned or ghosts is None or isinstance(ghosts.rules, Tournament) or not ghosts.rules.absent:
            return
        self._is_warned = True
        cause = f"matches end without an agent of the teams {sorted(ghosts.rules.absent)}"
        effect = "they count for no rating and no win rate, and these teams do not learn"
        remedy = "report agents of every team; in PettingZoo, step() passes agent_selection on"
        self._context.log.warning("no_opponents", cause=cause, effect=effect, remedy=remedy, notice=True)

    def on_stepping(self, topics: Subscription) -> None:
        """Takes over what a stepping service publishes."""
        specs, state = topics.latest(channels.SPECS), topics.latest(channels.STEPPING_STATE)
        if state is None or specs is None:
            return
        self.coordinator.on_stepping_state(specs, state)
        name = service_of(state.source)
        self._heard.add(name)
        if not state.final:
            self._unfinished.add(name)
        elif name in self._unfinished:  # saved at once, because a final report is published only once
            self._unfinished.remove(name)
            self._write(self.save)
        if not self._unfinished:
            self._final_reports.set()
        self.publish()

    def on_weights(self, topics: Subscription) -> None:
        """Takes over the weights that a learner under self-play publishes."""
        weights, ghosts = topics.latest(channels.POLICY_WEIGHTS), self.coordinator.ghosts
        if weights is not None and ghosts is not None:
            self._write(partial(ghosts.weights, weights))
            self.publish()

    def on_learner(self, topics: Subscription) -> None:
        """Takes over what a learner publishes."""
        state = topics.latest(channels.LEARNER_STATE)
        if state is None:
            return
        for change in self.coordinator.on_learner_state(state, topics.latest(channels.EPISODES)):
            rounded = change._replace(measure=round(change.measure, 6))
            self._context.log.info("lesson", **rounded._asdict(), notice=True)
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
        self.coordinator.publish_lessons(self._topic, self.save)
        for name in self.coordinator.next_flushes():
            self._context.registry.add(f"flushes/{name}")
        for source, granted in self.coordinator.allowances().items():
            content = {name: replace(one, steps=0) for name, one in granted.items()}  # new steps have a new serial
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
        if not self.coordinator.finished:
            self.coordinator.timed_out = True
            self._context.log.error("tournament_timed_out", seconds=limit_s, notice=True)
            self.publish()

    def refresh(self) -> None:
        """Brings gauges and the state of the run up to date."""
        self._topic.publish(channels.RUN, self.coordinator.state())
        for gauge, value in self.coordinator.gauges():
            self._context.registry.gauge(gauge, value)
        for name, ledger in self.coordinator.ledgers.items():
            self._note_waits(name, ledger)
            self._warn_of_short_segments(name, ledger)
            self._warn_of_endless_matches(name, ledger)
        if not self.coordinator.ledgers:
            self._context.progress.waits(ALL, "the first simulator", SIMULATORS)

    def _warn_of_short_segments(self, name: str, ledger: StepLedger) -> None:
        """Warns once where a buffer holds so few steps of each agent that hardly a reward is seen in a segment."""
        horizon, agents = self._context.run.behavior(name).time_horizon, ledger.agents
        steps = ledger.update_steps / max(1, agents)
        if name in self._warned or steps >= min(_FEW_STEPS, horizon) or not agents:
            return
        self._warned.add(name)
        cause = f"{agents} agents share a buffer of {ledger.least_update_steps}: about {steps:.2g} steps of each"
        remedy = f"raise buffer_size (to {agents * horizon} for whole segments), or lower the number of agents"
        self._context.log.warning("short_segments", behavior=name, cause=cause, remedy=remedy, notice=True)

    def _warn_of_endless_matches(self, name: str, ledger: StepLedger) -> None:
        """Warns once where self-play goes on for several turns without the end of a match, after which teams change."""
        rules = None if self.coordinator.ghosts is None else self.coordinator.ghosts.rules
        if not isinstance(rules, SelfPlay) or name not in rules.sides or name in self._endless:
            return
        due = ledger.produced >= _MANY_TURNS * rules.sides[name].settings.team_change
        if due and not rules.played and not ledger.episodes.episodes:
            self._endless.add(name)
            cause = f"no match has ended in {ledger.produced} steps"
            effect = "opponents and the learning team change only between matches"
            remedy = "end the episodes of all agents: step() terminates or truncates them"
            facts = {"cause": cause, "effect": effect, "remedy": remedy}
            self._context.log.warning("no_match_ends", behavior=name, **facts, notice=True)

    def _note_waits(self, name: str, ledger: StepLedger) -> None:
        """Notes which stage stepping waits for where the budget is used up, and which one a learner without a spec."""
        progress, stepping = self._context.progress, self._context.run.stepping
        if ledger.in_flight >= ledger.limit:
            progress.waits(f"allowances/{name}", f"weights/{name}", f"learning-{name}")
        else:
            progress.works(f"allowances/{name}")
        if name in self.coordinator.specs:
            progress.works(f"specs/{name}")
        else:
            progress.waits(f"specs/{name}", f"steps/{name}", *stepping, text=f"the first simulator with {name}")

    # ---------------------------------------------------------------- on disk

    async def settle(self) -> None:
        """Saves the state every second, or sooner where results wait for it, which are acknowledged then."""
        for turn in itertools.count(1):
            await anyio.sleep(_SAVE_INTERVAL_S)
            if self._unsaved or self._unwritten or turn % _IDLE_TURNS == 0:
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

    async def end(self, assemblies: Iterable[AssemblyState | None]) -> None:
        """Writes off what no learner received, saves the step counts a last time, and publishes the final state.

        Raises:
            DiskFull: the step counts could not be written.
        """
        run = self._context.run
        unheard = () if self._context.first else {*run.stepping} - self._heard
        self.coordinator.close(assemblies, self._unfinished, unheard)
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
        write_atomically(self._path, self.coordinator.saved(), durable=False)
        while self._unsaved:
            self._unsaved.popleft().acknowledge()

    def restore(self) -> SavedState | None:
        """Continues from what an earlier incarnation has saved, if there is anything, and returns that.

        Raises:
            ServiceError: a loss of power or another program has damaged the file.
        """
        saved = read_state(self._path)
        if saved is not None:
            self.coordinator.restore(saved)
            self._context.log.info("step_counts_restored", behaviors=sorted(saved.behaviors))
        return saved

    def log_losses(self) -> None:
        """Logs the steps that were lost since the last call."""
        for name, ledger in self.coordinator.ledgers.items():
            for cause, steps in ledger.take_new_losses().items():
                self._context.log.warning("steps_lost", behavior=name, cause=cause, steps=steps)


def add_behaviors(coordinator: Coordinator, context: Context, names: Iterable[str]) -> None:
    """Adds behaviors of a run to the step accounting, and to self-play where they use it."""
    run = context.run
    for name in names:
        behavior = run.behavior(name)
        ledger = StepLedger(
            least_update_steps=behavior.hyperparameters.update_steps,
            budget=run.settings.step_budget(behavior),
            agent_steps=run.settings.agent_steps(behavior),
            overlap=run.settings.overlap,
            processes=len(run.stepping),
            max_steps=behavior.max_steps,
            added=name in run.added,
            most_agents=run.settings.pipeline.max_agents,
        )
        coordinator.add(name, ledger)
        ghosts, external = coordinator.ghosts, opponents_of(run.directory).get(name, ())
        if behavior.self_play is not None and ghosts is not None and isinstance(ghosts.rules, SelfPlay):
            ghosts.rules.add(name, behavior.self_play, behavior.max_steps, external)
            ghosts.load_external(name, external)


async def open_ghosts(context: Context) -> Ghosts | None:
    """Opens self-play without behaviors, if any uses it or may do so, or the tournament that the run plays."""
    run, playing = context.run, context.run.playing
    unnamed = run.settings.unnamed if run.grows else None
    if not run.self_play and (unnamed is None or unnamed.self_play is None):
        return None
    topic = await context.transport.publisher("ghosts")
    if playing is None:
        places = min(_MOST_PLACES, max(_LEAST_PLACES, sum(run.simulators.values())))
        return Ghosts(SelfPlay(seed=run.seed, places=places, lockstep=run.settings.overlap == 0), run.directory, topic)
    tournament = Tournament(run.self_play, playing.players, playing.matches, mirror=playing.mirror)
    ghosts = Ghosts(tournament, run.directory, topic)
    for name in run.self_play:
        ghosts.load_external(name, [ExternalOpponent(label, 1.0) for label in playing.players])
    return ghosts


async def open_coordination(context: Context, topic: Publisher) -> Coordination:
    """Opens all that coordination works with, and restores what an earlier incarnation has saved."""
    run, playing = context.run, context.run.playing
    if playing is not None and playing.players:
        refuse_restart(context)
    ghosts = await open_ghosts(context)
    parameters = run.settings.environment_parameters
    coordinator = Coordinator(context.start, ghosts=ghosts, lessons=Lessons(curricula(parameters)))
    add_behaviors(coordinator, context, run.settings.behaviors)
    coordination = Coordination(context, topic, coordinator)
    former = None if playing is None else read_state(run.directory.parent / STATE_FILE)
    if former is not None:  # checkpoints play in the lessons that their run has come to
        coordinator.lessons = coordinator.lessons.continue_from(former.lessons)
    saved = coordination.restore()
    if run.resumed and context.first:
        coordinator.begin_session(saved)
        coordination.log_losses()
    coordination.publish_flushes()
    coordinator.publish_lessons(topic, coordination.save)
    return coordination


async def run(context: Context) -> None:
    """Coordinates until stopped; then saves the step counts."""
    topic, playing = await context.transport.publisher(context.service), context.run.playing
    coordination = await open_coordination(context, topic)
    transport = context.transport
    states = (channels.SPECS, channels.STEPPING_STATE)
    stepping = [await transport.subscribe(name, *states) for name in context.run.stepping]
    assemblies = [await transport.subscribe(name, channels.ASSEMBLY_STATE) for name in context.run.assemblies]
    results = await transport.receiver(channels.RESULTS, context.run.capacity(channels.RESULTS.name))

    def refresh() -> None:
        coordination.refresh()
        context.note_receiver(MATCHES, results)

    async def follow_learners(names: Iterable[str]) -> None:
        for name in names:
            learner = await transport.subscribe(f"learning-{name}", channels.LEARNER_STATE, channels.EPISODES)
            tasks.start_soon(follow, learner, coordination.on_learner)
            if name in context.run.self_play and playing is None:
                tasks.start_soon(follow, await transport.subscribe(f"policy-{name}"), coordination.on_weights)

    async def grow(names: Sequence[str]) -> None:
        add_behaviors(coordination.coordinator, context, names)
        for subscription in stepping:  # what they said of these behaviors before
            coordination.on_stepping(subscription)
        await follow_learners(names)

    async with anyio.create_task_group() as tasks:
        if playing is not None and playing.players:
            tasks.start_soon(coordination.time_out, playing.timeout_s)
        for subscription in stepping:
            tasks.start_soon(follow, subscription, coordination.on_stepping)
        await follow_learners(context.run.learners)
        tasks.start_soon(follow_growth, context, grow)
        tasks.start_soon(coordination.rate, results)
        tasks.start_soon(coordination.settle)
        tasks.start_soon(publish_metrics, context, topic, refresh)
        await context.stop.wait()
        await coordination.wait_for_final_reports()
        tasks.cancel_scope.cancel()
    try:
        await coordination.end([one.latest(channels.ASSEMBLY_STATE) for one in assemblies])
    finally:
        topic.publish(channels.METRICS, context.numbers())
