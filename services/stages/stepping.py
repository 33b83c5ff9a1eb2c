"""This process runs stepping.

consumes       Step and others from simulators, over stream sockets; PolicyWeights from the policy topics, and of ghosts
               from the topic "ghosts"; step allowances, the assignment and the lessons of environment parameters from
               coordination's topic
produces       Act and Reset to simulators; StepBatch on the queue "steps" of its assembly; Results on "matches"; its
               state on its topic
waits for      frames; step allowances and weights for those it has; credit for steps
unblocked by   a frame, a step allowance, new weights, assembly's acknowledgement
"""

from collections import Counter
from functools import partial
from typing import Any, Final

import anyio
from anyio.abc import Listener, TaskGroup

from sparring.pipeline.coordination.opponents import opponents_of
from sparring.pipeline.messages import channels
from sparring.pipeline.messages.matches import MatchupAssignment, Results, ghosts_of
from sparring.pipeline.messages.state import BehaviorSpecs, PolicyWeights, ProducedSteps, SteppingState
from sparring.pipeline.messages.steps import StepBatch
from sparring.pipeline.monitoring.metrics import LATENCY_BOUNDS, ROW_BOUNDS
from sparring.pipeline.monitoring.progress import SIMULATORS
from sparring.pipeline.networks.device import Device, usable
from sparring.pipeline.queues.interface import Publisher, Sender, Subscription
from sparring.pipeline.settings.parameters import in_lessons
from sparring.pipeline.stepping.agents import Behavior
from sparring.pipeline.stepping.parameters import RunParameters
from sparring.pipeline.stepping.policies import Policies
from sparring.pipeline.stepping.stepper import Stepper
from sparring.pipeline.stepping.waiting import FRAMES, SIMULATOR, WEIGHTS
from sparring.services.endpoint.admission import ConnectionAcceptor, credentials
from sparring.services.endpoint.peers import DefaultBehaviors, ServerContext, SimulatorPeer
from sparring.services.endpoint.simulators import Simulators
from sparring.services.endpoint.sockets import allow_descriptors
from sparring.services.endpoint.websocket import upgrade_from
from sparring.services.process.runtime import Context, Run, follow, follow_growth, publish_metrics, refuse_restart
from sparring.services.stages.outboxes import MatchOutbox, StepOutbox

_SPECS_S: Final = 5.0
"""Seconds that a restarted process waits for the specs that the run has; coordination may be restarting, too."""
PARTING_S: Final = 2.0
"""Seconds that the end of a run waits for the Byes of simulators."""


class Stepping:
    """Stepping connects a stepper with its simulators, its topics and its queue."""

    def __init__(
        self, context: Context, topic: Publisher, sender: Sender[StepBatch], results: Sender[Results], device: Device
    ) -> None:
        settings = context.run.settings
        self._context = context
        self._topic = topic
        self._sender = sender
        self._lockstep = settings.overlap == 0
        self._behaviors = dict(settings.behaviors)  # and those that simulators add
        self._followed: set[str] = set()  # services whose weights are subscribed
        unnamed = settings.unnamed if context.run.grows else None
        self._unnamed = None if unnamed is None else DefaultBehaviors(settings=unnamed, added={*context.run.added})
        self._scripts = _scripts(context.run)
        self.policies = Policies(self._behaviors, context.run.seed, device)
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
        self._ghosts: dict[tuple[str, int], PolicyWeights] = {}  # latest, by behavior and number
        self._arrived = anyio.Event()
        server = ServerContext(
            settings=settings.pipeline,
            behaviors=self._behaviors,
            scripts=self._scripts,
            seed=context.run.seed,
            clock=context.clock,
            registry=context.registry,
            log=context.log,
            arrived=self.on_arrival,
            frame_arrived=self.on_frame,
            known=self._load,
            unnamed=self._unnamed,
        )
        self.simulators = Simulators(self.stepper, server)
        self._published: dict[str, ProducedSteps] = {}  # by behavior
        # Number of specs, teams, number of described ids. Coordination waits for the first, even where there are none.
        self._published_specs: tuple[int, dict[str, tuple[int, ...]], int] = (-1, {}, 0)
        self.outbox = StepOutbox(context, self.stepper, sender, self._behaviors, self.on_arrival)
        self.match_outbox = MatchOutbox(context, self.stepper.matches, results)
        context.registry.histogram("action_latency_s", LATENCY_BOUNDS)
        context.registry.histogram("backpressured_s", LATENCY_BOUNDS)
        context.registry.histogram("batch_rows", ROW_BOUNDS)

    # ---------------------------------------------------------------- records of other services

    def on_coordination(self, topics: Subscription) -> None:
        """Adopts the specs of the run, step allowances, matchups and lessons."""
        self.adopt_specs(topics)
        lessons = topics.latest(channels.LESSONS)
        if lessons is not None and self.stepper.parameters.adopt(lessons):
            self.simulators.send_first_resets()
            self.on_arrival()
        allowances = topics.latest(channels.allowances_topic(self._context.service))
        if allowances is not None and allowances.source == self._context.start:
            for name, allowance in allowances.behaviors.items():
                self.stepper.grant(name, allowance)
            self.on_arrival()
        assignment = topics.latest(channels.ASSIGNMENT)
        if assignment is not None and assignment is not self._assignment:
            self._assignment = assignment
            self._adopt()

    def adopt_specs(self, topics: Subscription) -> None:
        """Adopts the specs of the run."""
        state = topics.latest(channels.RUN)
        for key, error in self.stepper.adopt_specs(state.specs).items() if state is not None else ():
            self.simulators.refuse(key, error)

    def on_ghosts(self, topics: Subscription) -> None:
        """Stores the published weights of ghosts."""
        self._ghosts = {(one.behavior, one.version): one for one in topics.every(PolicyWeights)}
        self._adopt()

    def _adopt(self) -> None:
        """Adopts the newest assignment once the weights of all its ghosts have arrived."""
        assignment, matches = self._assignment, self.stepper.matches
        if assignment is None or assignment.serial <= matches.serial:
            return
        for name, number in (required := ghosts_of(assignment.matchups)):
            behavior, weights = self.stepper.behaviors.get(name), self._ghosts.get((name, number))
            if behavior is not None and weights is not None:
                self.policies.hold(behavior.spec, weights)
        if required <= self.policies.ghosts.keys():
            matches.assignment = assignment
            self.policies.release(matches.in_use(self.stepper.behaviors))
            self.on_arrival()

    def on_weights(self, topics: Subscription) -> None:
        """Stores weights that a learner has published."""
        weights = topics.latest(channels.POLICY_WEIGHTS)
        if weights is not None:
            self.policies.learn(weights)
            self._load()

    async def follow_learners(self, run: Run, tasks: TaskGroup) -> None:
        """Subscribes to the weights of every behavior that has a learner, and of ghosts."""
        reactions = {"ghosts": self.on_ghosts} if run.self_play else {}
        reactions |= {f"policy-{name}": self.on_weights for name in run.settings.behaviors}
        for service, react in reactions.items():
            if service not in self._followed:
                self._followed.add(service)
                tasks.start_soon(follow, await self._context.transport.subscribe(service), react)

    async def grow(self, tasks: TaskGroup) -> None:
        """Takes over the behaviors that the run has got."""
        run = self._context.run
        self._behaviors.update(run.settings.behaviors | self._behaviors)
        if self._unnamed is not None:
            self._unnamed.added.update(run.added)
        self._scripts |= _scripts(run)
        self.stepper.matches.names |= {*run.self_play}
        await self.follow_learners(run, tasks)
        self._load()

    def on_assembly_restarted(self, _starts: int) -> None:
        """Lists every live agent for assembly, which has restarted."""
        self.stepper.reintroduce_agents()
        self.on_arrival()

    def _load(self) -> None:
        if self._unnamed is not None:
            self.stepper.requirements.added |= self._unnamed.added
            if self._unnamed.settings.self_play is not None:
                self.stepper.matches.names |= self._unnamed.added
        for name, behavior in self.stepper.behaviors.items():
            self.policies.build(name, behavior.spec)
        self._adopt()
        self.on_arrival()

    # ---------------------------------------------------------------- the loop

    def on_arrival(self) -> None:
        """Requests a tick, because something arrived."""
        self._arrived.set()

    def on_frame(self) -> None:
        """Runs a tick at once where it answers every simulator; else the frames of others may arrive before it."""
        if self.stepper.has_every_frame:
            self.step()
        else:
            self.on_arrival()

    async def loop(self) -> None:
        """Runs a tick whenever something arrived."""
        while True:
            await self._arrived.wait()
            self._arrived = anyio.Event()
            self.step()

    def step(self) -> None:
        """Runs a tick, unless steps must be sent first: then the outbox requests it."""
        if self.outbox.is_full:
            return
        result = self.stepper.tick(self._context.clock(), acting=not self.simulators.stopping)
        for answer in result.acts:
            self.simulators.answer(*answer)
        if result.acts:
            self._context.registry.add("frames", len(result.acts))
            self._context.registry.observe("batch_rows", result.acted)
        self.outbox.gather(result)
        self.match_outbox.gather()
        if not result.acts or self.stepper.backpressured:
            self.outbox.flush()
        self._publish_progress()

    def _publish_progress(self) -> None:
        """Publishes the state where coordination needs it: after enough steps, a stall, or the first or last agent.

        Also before the first steps of a simulator's process: its later Hello counts them, where this process dies.
        """
        has_news = self.stepper.processes.has_news(self.stepper.connections.values())
        if has_news or any(self._is_due(one, self._published.get(one.name)) for one in self.stepper.behaviors.values()):
            self.publish()

    def _is_due(self, behavior: Behavior, last: ProducedSteps | None) -> bool:
        """Returns whether coordination needs to know how far a behavior is; `last` is what was published of it."""
        if last is None or (last.agents > 0) is not (behavior.table.taken > 0):
            return True
        new = behavior.produced + behavior.ghosts - last.steps - last.ghosts
        if self._lockstep or new <= 0 or behavior.remaining <= 0:
            return new > 0 and behavior.remaining <= 0
        # Processes that share a budget get new allowances of it before they have used up the last one.
        most = self._behaviors[behavior.name].hyperparameters.update_steps // (4 * len(self._context.run.stepping))
        return new >= most or last.steps < behavior.allowance.report <= behavior.produced

    def publish(self, *, final: bool = False) -> None:
        """Publishes the state; a final one is the last."""
        self.stepper.return_unused()
        behaviors, teams, described = self.stepper.state(), self.stepper.teams, self.simulators.described
        if self._published_specs != (content := (len(behaviors), teams, len(described))):
            self._published_specs = content
            specs = {name: behavior.spec for name, behavior in self.stepper.behaviors.items()}
            self._topic.publish(channels.SPECS, BehaviorSpecs(behaviors=specs, teams=teams, described=dict(described)))
        self._published = behaviors
        state = SteppingState(
            source=self._context.start,
            behaviors=behaviors,
            simulators=len(self.stepper.connections),
            deterministic=self.stepper.requirements.deterministic,
            final=final,
            given_up=dict(self.simulators.given_up),
            stepped=self.simulators.that_stepped(),
            matches=self.stepper.matches.reported,
            processes=self.stepper.processes.steps(self.stepper.connections.values()),
        )
        self._topic.publish(channels.STEPPING_STATE, state)

    def refresh(self, *, final: bool = False) -> None:
        """Updates the gauges, and publishes the state."""
        registry = self._context.registry
        self.publish(final=final)
        registry.gauge("simulators", len(self.stepper.connections))
        registry.gauge("outbox", self.outbox.rows)
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

    async def leave(self, timeout_s: float) -> None:
        """Disconnects the simulators and sends all steps; tries once more, shortly, where the process was paused."""
        for limit_s, parting_s in ((timeout_s, PARTING_S), (min(PARTING_S, timeout_s / 2), 0.0)):
            with anyio.move_on_after(limit_s):
                await self.part(parting_s)
                await self._sender.drain()
                await self.match_outbox.drain()
                return

    async def part(self, timeout_s: float) -> None:
        """Sends Bye to every simulator, and applies what they had sent before it arrived."""
        self.simulators.stop_answering()
        await self.outbox.drain()
        self.step()
        with anyio.move_on_after(timeout_s):
            await self.simulators.disconnect_all()
        await self.outbox.drain()
        self.step()
        await self.outbox.drain()

    def _note_waits(self) -> None:
        """Notes for every behavior what it waits for."""
        progress = self._context.progress
        for name in self._behaviors:
            reason = self.stepper.requirements.waits_for(name)
            if reason is None:
                progress.works(f"steps/{name}")
            else:
                sources = {FRAMES: SIMULATORS, SIMULATOR: SIMULATORS, WEIGHTS: f"learning-{reason.behavior}"}
                source, what = sources.get(reason.what, "coordination"), f"{reason.what}/{reason.behavior}"
                progress.waits(f"steps/{name}", what, source, who=reason.who)
            behavior = self.stepper.behaviors.get(name)
            if behavior is not None:
                progress.reach(f"steps/{name}", behavior.produced + behavior.ghosts)


def _scripts(run: Run) -> dict[str, frozenset[str]]:
    """Returns the scripts that every simulator must be able to play, by behavior name."""
    opponents = opponents_of(run.directory)
    return {name: frozenset(one.script for one in own if one.script) for name, own in opponents.items()}


def _warn_of_memory_reset(context: Context) -> None:
    """Warns that the memory of agents was lost with the former incarnation."""
    behaviors = context.run.settings.behaviors
    forgetful = [name for name, one in behaviors.items() if one.network_settings.sequence_length]
    if forgetful and not context.first:
        cause = "their memory was in the former process"
        context.log.warning("agent_memory_reset", behaviors=forgetful, cause=cause, notice=True)


async def _listen(context: Context, simulators: Simulators) -> list[tuple[ConnectionAcceptor, Listener[Any]]]:
    """Opens the endpoint for simulators: plain sockets, and WebSockets where the settings name an address for them.

    Simulators of this package have a Unix socket of their own: a frame of 12 agents costs 8 % less than over TCP.
    """
    run, settings = context.run, context.run.settings.pipeline
    addresses = [run.addresses[context.service]]
    if context.service in run.local:
        addresses.append(run.local[context.service])
    if settings.websocket_address is not None:
        addresses.append(settings.websocket_of(run.stepping.index(context.service)))
    connected: Counter[str] = Counter()
    pending: dict[SimulatorPeer, None] = {}
    acceptors = []
    for address in addresses:
        required = credentials(address, run.keys, settings.credentials, encrypt=settings.encrypt)
        acceptor = ConnectionAcceptor(required, settings.limits, simulators.rejections, simulators.serve)
        acceptor.connected, acceptor.pending = connected, pending
        acceptors.append((acceptor, await context.listen(address)))
    if settings.websocket_address is not None:
        acceptor.upgrade = upgrade_from(settings.websocket_origins)
        context.log.info("websocket_listening", address=address, origins=list(settings.websocket_origins))
    return acceptors


async def run(context: Context) -> None:
    """Steps until stopped; then sends Bye to the simulators and the last steps to assembly.

    Raises:
        Unsupported: PyTorch cannot use the device for acting on this machine.
    """
    refuse_restart(context)
    transport = context.transport
    settings = context.run.settings
    topic = await transport.publisher(context.service)
    steps = channels.steps_queue(context.run.assembly_of(context.service))
    sender, results = await transport.sender(steps), await transport.sender(channels.RESULTS)
    acting = settings.torch_settings.acting_device
    device = await context.compute(partial(usable, acting, "torch_settings.acting_device"))
    stepping = Stepping(context, topic, sender, results, device)
    _warn_of_memory_reset(context)
    sender.on_receiver(stepping.on_assembly_restarted)
    allowances = channels.allowances_topic(context.service)
    topics = channels.RUN, allowances, channels.ASSIGNMENT, channels.LESSONS
    coordination = await transport.subscribe("coordination", *topics)
    if (available := allow_descriptors(wanted := settings.pipeline.limits.descriptors)) < wanted:
        remedy = "raise the system's limit (ulimit -n), or lower pipeline.limits.connections"
        context.log.warning("low_file_descriptor_limit", got=available, expected=wanted, remedy=remedy)
    if not context.first:  # a simulator with another spec than the run's must not be the first one
        with anyio.move_on_after(_SPECS_S):
            while coordination.latest(channels.RUN) is None:
                await coordination.changed()
        stepping.adopt_specs(coordination)
    acceptors = await _listen(context, stepping.simulators)
    async with anyio.create_task_group() as tasks:
        await stepping.follow_learners(context.run, tasks)
        for acceptor, listener in acceptors:
            tasks.start_soon(acceptor.run, listener, tasks)
        tasks.start_soon(follow, coordination, stepping.on_coordination)
        tasks.start_soon(follow_growth, context, lambda _names: stepping.grow(tasks))
        tasks.start_soon(stepping.simulators.watch_silence)
        tasks.start_soon(stepping.loop)
        tasks.start_soon(stepping.outbox.run)
        tasks.start_soon(stepping.match_outbox.send)
        tasks.start_soon(publish_metrics, context, topic, stepping.refresh)
        tasks.start_soon(stepping.outbox.introduce, context.run.settings.behaviors)
        await context.stop.wait()
        await stepping.leave(settings.pipeline.stop_timeout_s / 2)
        tasks.cancel_scope.cancel()
    stepping.refresh(final=True)
    topic.publish(channels.METRICS, context.numbers())
