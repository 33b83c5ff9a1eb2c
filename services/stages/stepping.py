"""The process around stepping.

consumes       Step and others from simulators, over stream sockets; PolicyWeights from the policy
               boards, and of ghosts from the board "ghosts"; permits, the assignment and the lessons of environment
               parameters from coordination's
produces       Act and Reset to simulators; StepBatch on "steps"; its state on its board
waits for      frames; permits and weights for those it has; credit for steps
unblocked by   a frame, a permit, new weights, assembly's acknowledgement
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import anyio
import numpy as np
from anyio.abc import TaskGroup

from sparring.pipeline.coordination.opponents import opponents_of
from sparring.pipeline.messages.matches import MatchupAssignment
from sparring.pipeline.messages.state import (
    BehaviorSpecs,
    LessonsState,
    PolicyWeights,
    RunState,
    StepAllowances,
    SteppingState,
)
from sparring.pipeline.messages.steps import BehaviorSteps, StepBatch
from sparring.pipeline.monitoring.metrics import LATENCY_BOUNDS, ROW_BOUNDS, Registry
from sparring.pipeline.monitoring.progress import ALL, SIMULATORS
from sparring.pipeline.queues.interface import SendingQueue, Topic
from sparring.pipeline.settings.parameters import in_lessons
from sparring.pipeline.specs import BehaviorId
from sparring.pipeline.stepping.parameters import RunParameters
from sparring.pipeline.stepping.policies import Policies
from sparring.pipeline.stepping.settings import GATHERED_BYTES, GATHERED_STEPS, GATHERING_MOST_S, GATHERING_S
from sparring.pipeline.stepping.stepper import Stepper
from sparring.pipeline.stepping.waiting import FRAMES, SIMULATOR, WEIGHTS, waits_for
from sparring.services.endpoint.admission import ConnectionAcceptor
from sparring.services.endpoint.credentials import credentials
from sparring.services.endpoint.listening import allow_descriptors
from sparring.services.endpoint.simulators import DefaultBehaviors, ServerContext, Simulators
from sparring.services.process.runtime import Context, Run, follow, publish_metrics, refuse_restart

PARTING_S: Final = 2.0
"""How long the end of a run waits for simulators to say Bye."""


class Stepping:
    """A stepper between its simulators, its boards and its queue."""

    def __init__(self, context: Context, topic: Topic, sender: SendingQueue) -> None:
        settings = context.run.settings
        self._context = context
        self._topic = topic
        self._sender = sender
        self._lockstep = settings.overlap == 0
        self._behaviors = dict(settings.behaviors)  # and those that simulators add
        self._followed: set[str] = set()  # behaviors whose weights we hear of
        self._hears_ghosts = False
        self._unnamed = _unnamed(context.run)
        self._scripts = _scripts(context.run)
        self._prepared = anyio.Event()  # the run has a learner for another one
        self.policies = Policies(self._behaviors, seed=context.run.seed)
        self.stepper = Stepper(
            self.policies.current,
            lockstep=self._lockstep,
            expected=max(1, context.run.simulators.get(context.service, 0)),
            max_agents=settings.pipeline.max_agents,
            agents_each=settings.pipeline.limits.agents,
            self_play=context.run.self_play,
            ghosts=self.policies.ghosts,
            parameters=RunParameters(in_lessons(settings.environment_parameters), context.run.seed),
        )
        self._assignment: MatchupAssignment | None = None
        self._ghosts: dict[tuple[str, int], PolicyWeights] = {}  # heard of, and not yet built
        self._wake = anyio.Event()
        house = ServerContext(
            settings=settings.pipeline,
            behaviors=self._behaviors,
            scripts=self._scripts,
            seed=context.run.seed,
            clock=context.clock,
            registry=context.registry,
            log=context.log,
            arrived=self.wake_up,
            known=self._load,
            unnamed=self._unnamed,
        )
        self.simulators = Simulators(self.stepper, house)
        self._told: dict[str, tuple[int, bool]] = {}  # by behavior, steps and whether there were agents
        self._specs_told: tuple[int, dict[str, tuple[int, ...]]] = (0, {})  # behaviors, and teams of each
        self._gathered = 0  # rows that assembly has not got
        self._gathered_bytes = 0  # of their observations
        self._leaving: tuple[StepBatch, int] | None = None  # steps that wait for credit
        self._filled = anyio.Event()
        self._turn = anyio.Lock(fast_acquire=True)
        self._final = False
        _prepare(context.registry)

    # ---------------------------------------------------------------- state from elsewhere

    def allowances(self, latest: Mapping[str, Any]) -> None:
        """Coordination has granted permits, or changed who plays or what is taught, or for whom there are learners."""
        run = latest.get("run")
        if isinstance(run, RunState) and run.step_counts.keys() - self._followed:
            self._prepared.set()
        lessons = latest.get("lessons")
        if isinstance(lessons, LessonsState) and self.stepper.parameters.adopt(lessons):
            self.simulators.begin()
            self.wake_up()
        allowances = latest.get(f"allowances:{self._context.service}")
        if isinstance(allowances, StepAllowances) and allowances.source == self._context.start:
            for name, allowance in allowances.behaviors.items():
                self.stepper.grant(name, allowance)
            self.wake_up()
        assignment = latest.get("assignment")
        if isinstance(assignment, MatchupAssignment) and assignment is not self._assignment:
            self._assignment = assignment
            self._adopt()

    def ghosts(self, latest: Mapping[str, Any]) -> None:
        """Coordination has published what ghosts play with."""
        self._ghosts = {(one.behavior, one.version): one for one in latest.values() if isinstance(one, PolicyWeights)}
        self._adopt()

    def _adopt(self) -> None:
        """Plays by the newest assignment once all that it names is here; until then by the one before."""
        assignment, matches = self._assignment, self.stepper.matches
        if assignment is None or assignment.serial <= matches.serial:
            return
        wanted = {
            (BehaviorId.parse(behavior_id).name, number)
            for matchup in assignment.matchups
            for behavior_id, number in matchup.ghosts.items()
        }
        for name, number in wanted:
            behavior, weights = self.stepper.behaviors.get(name), self._ghosts.get((name, number))
            if behavior is not None and weights is not None:
                self.policies.hold(behavior.spec, weights)
        if wanted <= self.policies.ghosts.keys():
            matches.assignment = assignment
            self.policies.release(matches.in_use(self.stepper.behaviors))
            self.wake_up()

    def weights(self, latest: Mapping[str, Any]) -> None:
        """A learner has published weights."""
        weights = latest.get("weights")
        if isinstance(weights, PolicyWeights):
            self.policies.learn(weights)
            self._load()

    async def follow_learners(self, run: Run, tasks: TaskGroup) -> None:
        """Hears of the weights of every behavior that has a learner, and of ghosts."""
        transport = self._context.transport
        if run.self_play and not self._hears_ghosts:
            self._hears_ghosts = True
            tasks.start_soon(follow, await transport.subscribe("ghosts"), self.ghosts)
        for name in run.settings.behaviors:
            if name not in self._followed:
                self._followed.add(name)
                tasks.start_soon(follow, await transport.subscribe(f"policy-{name}"), self.weights)

    async def follow_added(self, tasks: TaskGroup) -> None:
        """The same of those that simulators have added, here or elsewhere, when the run has learners for them."""
        while self._context.reload is not None:
            await self._prepared.wait()
            self._prepared = anyio.Event()
            run = self._context.reload()
            self._behaviors.update(run.settings.behaviors | self._behaviors)
            if self._unnamed is not None:
                self._unnamed.added.update(run.added)
            self._scripts |= _scripts(run)
            self.stepper.matches.names |= {*run.self_play}
            await self.follow_learners(run, tasks)
            self._load()

    def reader_restarted(self, _starts: int) -> None:
        """Assembly is new: it needs to hear of every live agent."""
        self.stepper.rejoin()
        self.wake_up()

    def _load(self) -> None:
        if self._unnamed is not None:
            self.stepper.added |= self._unnamed.added
            if self._unnamed.settings.self_play is not None:
                self.stepper.matches.names |= self._unnamed.added
        for name, behavior in self.stepper.behaviors.items():
            self.policies.build(name, behavior.spec)
        self._adopt()
        self.wake_up()

    # ---------------------------------------------------------------- the loop

    def wake_up(self) -> None:
        """Something arrived."""
        self._wake.set()

    async def loop(self) -> None:
        """Wakes up whenever something arrived, acts, and hands the steps on."""
        while True:
            await self._wake.wait()
            self._wake = anyio.Event()
            await self._step()

    async def _step(self) -> None:
        async with self._turn:
            wake = self.stepper.wake(self._context.clock(), acting=not self.simulators.stopping)
            for key, answer, received_at, backpressured_s in wake.acts:
                self.simulators.answer(key, answer, received_at, backpressured_s)
            if wake.acts:
                self._context.registry.add("frames", len(wake.acts))
                self._context.registry.observe("batch_rows", wake.acted)
            if self.stepper.has_steps:
                self._gathered += max(1, wake.rows)
                self._gathered_bytes += wake.bytes
                self._filled.set()
            full = self._gathered >= GATHERED_STEPS or self._gathered_bytes >= GATHERED_BYTES
            if full or not wake.acts or self.stepper.backpressured:
                await self._hand_on()
            self._tell()

    async def _hand_on(self) -> None:
        """Sends assembly what has gathered."""
        while self._leaving is not None or self.stepper.has_steps:
            if self._leaving is None:
                introduces, rows = self.stepper.introduced, self._gathered
                batch = StepBatch(source=self._context.start, parts=self.stepper.take_steps(), introduces=introduces)
                self._gathered = self._gathered_bytes = 0
                self._leaving = batch, rows
            self._context.progress.waits(ALL, "credit.steps", "assembly")
            await self._sender.put(*self._leaving)
            self._leaving = None
            self._context.progress.works()

    async def hand_on_in_time(self) -> None:
        """Sends what has gathered at the latest after a moment, however little it is.

        A message costs the services a millisecond, whatever is in it; a learner with a small buffer waits
        for each of its steps.
        """
        while True:
            await self._filled.wait()
            much = min(map(self._share_of_update, self._behaviors))
            await anyio.sleep(GATHERING_S)
            if self._gathered < much:
                await anyio.sleep(GATHERING_MOST_S - GATHERING_S)
            self._filled = anyio.Event()
            async with self._turn:
                await self._hand_on()

    def _tell(self) -> None:
        """Publishes the state where coordination needs it: enough progress, a stall, agents come or gone."""
        for name, behavior in self.stepper.behaviors.items():
            steps, populated = self._told.get(name, (-1, None))
            fresh = behavior.produced + behavior.ghosts - steps
            quantum = 2**62 if self._lockstep else self._share_of_update(name)
            if (
                fresh >= quantum
                or (fresh > 0 and behavior.remaining <= 0)
                or populated is not (behavior.table.taken > 0)
            ):
                self.publish()
                return

    def publish(self) -> None:
        """Publishes the state."""
        self.stepper.return_unused()
        behaviors, teams = self.stepper.state(), self.stepper.teams
        if self._specs_told != (len(behaviors), teams):
            self._specs_told = (len(behaviors), teams)
            specs = {name: behavior.spec for name, behavior in self.stepper.behaviors.items()}
            self._topic.publish("specs", BehaviorSpecs(behaviors=specs, teams=teams))
        self._told = {name: (one.steps + one.ghosts, one.agents > 0) for name, one in behaviors.items()}
        self._topic.publish(
            "state",
            SteppingState(
                source=self._context.start,
                behaviors=behaviors,
                simulators=len(self.stepper.connections),
                deterministic=self.stepper.deterministic,
                final=self._final,
                given_up=dict(self.simulators.given_up),
            ),
        )

    def refresh(self) -> None:
        """Brings gauges up to date."""
        registry = self._context.registry
        self.publish()
        registry.gauge("simulators", len(self.stepper.connections))
        registry.gauge("outbox", self._gathered)
        for name, behavior in self.stepper.behaviors.items():
            registry.gauge(f"agents/{name}", behavior.table.taken)
            registry.reach(f"steps/{name}", behavior.produced)
            if name in self.stepper.matches.names:
                registry.reach(f"ghost_steps/{name}", behavior.ghosts)
        if self.stepper.matches.names:
            registry.gauge("ghosts.held", len(self.policies.ghosts))
            registry.gauge("matches.under_way", self.stepper.matches.under_way)
            registry.reach("matches.ended", self.stepper.matches.ended)
            registry.reach("matches.lost", self.stepper.matches.lost)
        self._context.note_sender("steps", self._sender)
        self._note_waits()

    async def introduce(self) -> None:
        """Tells assembly of this start, so that what a former one left can be closed."""
        parts = tuple(_nothing(name) for name in self._context.run.settings.behaviors)
        await self._sender.put(StepBatch(source=self._context.start, parts=parts), 0)

    async def leave(self, timeout_s: float) -> None:
        """Parts from the simulators, and hands all on. Who was paused meanwhile has no time left, and gets a little."""
        for limit_s, parting_s in ((timeout_s, PARTING_S), (min(PARTING_S, timeout_s / 2), 0.0)):
            with anyio.move_on_after(limit_s):
                await self.part(parting_s)
                await self._sender.drain()
                return

    async def part(self, timeout_s: float) -> None:
        """Says Bye to every simulator, and takes over what they had sent before they heard it."""
        self.simulators.hush()
        await self._step()
        with anyio.move_on_after(timeout_s):
            await self.simulators.part()
        await self._step()
        async with self._turn:
            await self._hand_on()

    def _share_of_update(self, name: str) -> int:
        """Steps of a behavior that others should hear of soon."""
        return max(1, self._behaviors[name].hyperparameters.buffer_size // 16)

    def end(self) -> None:
        """Says for the last time where it stands."""
        self._final = True
        self.refresh()

    def _note_waits(self) -> None:
        """Says for every behavior whose turn it is."""
        progress = self._context.progress
        for name in self._behaviors:
            reason = waits_for(self.stepper, name, lockstep=self._lockstep)
            if reason is None:
                progress.works(f"steps/{name}")
            elif reason.what in (FRAMES, SIMULATOR):
                progress.waits(f"steps/{name}", f"{reason.what}/{name}", SIMULATORS, who=reason.who)
            elif reason.what == WEIGHTS:
                progress.waits(f"steps/{name}", f"{reason.what}/{reason.behavior}", f"learning-{reason.behavior}")
            else:
                progress.waits(f"steps/{name}", f"{reason.what}/{reason.behavior}", "coordination")
            behavior = self.stepper.behaviors.get(name)
            if behavior is not None:
                progress.reach(f"steps/{name}", behavior.produced + behavior.ghosts)


def _prepare(registry: Registry) -> None:
    """Names the histograms."""
    for name, bounds in (
        ("action_latency_s", LATENCY_BOUNDS),
        ("backpressured_s", LATENCY_BOUNDS),
        ("batch_rows", ROW_BOUNDS),
    ):
        registry.histogram(name, bounds)


def _scripts(run: Run) -> dict[str, frozenset[str]]:
    """By behavior name, the scripts that every simulator must be able to play."""
    opponents = opponents_of(run.directory)
    return {name: frozenset(one.script for one in own if one.script) for name, own in opponents.items()}


def _unnamed(run: Run) -> DefaultBehaviors | None:
    """What counts for behaviors that the configuration does not name; None where these are refused."""
    settings = run.settings.unnamed
    if settings is None or run.playing is not None:
        return None
    others = () if settings.self_play is None else settings.self_play.opponents
    scripts = frozenset(one.scripted for one in others if one.scripted is not None)
    return DefaultBehaviors(settings=settings, scripts=scripts, added=set(run.added))


def _nothing(behavior: str) -> BehaviorSteps:
    """What a start says of a behavior before its first tick."""
    none = np.empty(0, np.int64)
    return BehaviorSteps(
        behavior=behavior, produced_before=0, ticks=none, completed=none, rows=np.empty((0, 5), np.int32)
    )


def _tell_afresh(context: Context) -> None:
    """A new start has no agents: those whose simulators connect again are new ones, and remember nothing."""
    behaviors = context.run.settings.behaviors
    forgetful = [name for name, one in behaviors.items() if one.network_settings.sequence_length]
    if forgetful and not context.first:
        context.log.warning(
            "agents_start_afresh", behaviors=forgetful, cause="what they carried was in the former process", notice=True
        )


async def run(context: Context) -> None:
    """Steps until stopped; then says Bye to the simulators and hands on the last steps."""
    refuse_restart(context)
    transport = context.transport
    settings = context.run.settings
    topic = await transport.topic(context.service)
    sender = await transport.sender("steps")
    stepping = Stepping(context, topic, sender)
    _tell_afresh(context)
    sender.on_receiver(stepping.reader_restarted)
    coordination = await transport.subscribe("coordination")
    address = context.run.addresses[context.service]
    asked = credentials(address, context.run.keys, settings.pipeline.credentials, encrypt=settings.pipeline.encrypt)
    gate = ConnectionAcceptor(asked, stepping.simulators.guard, stepping.simulators.serve)
    if (available := allow_descriptors(wanted := settings.pipeline.limits.descriptors)) < wanted:
        remedy = "raise the system's limit (ulimit -n), or lower pipeline.limits.connections"
        context.log.warning("few_descriptors", got=available, expected=wanted, remedy=remedy)
    listener = await context.listen(address)
    async with anyio.create_task_group() as tasks:
        await stepping.follow_learners(context.run, tasks)
        tasks.start_soon(gate.run, listener, tasks)
        tasks.start_soon(follow, coordination, stepping.allowances)
        tasks.start_soon(stepping.follow_added, tasks)
        tasks.start_soon(stepping.simulators.watch_silence)
        tasks.start_soon(stepping.loop)
        tasks.start_soon(stepping.hand_on_in_time)
        tasks.start_soon(publish_metrics, context, topic, stepping.refresh)
        tasks.start_soon(stepping.introduce)
        await context.stop.wait()
        await stepping.leave(settings.pipeline.stop_timeout_s / 2)
        tasks.cancel_scope.cancel()
    stepping.end()
    topic.publish("metrics", context.numbers())
