"""Runs assembly as a process.

consumes       StepBatch from "steps" (all stepping services, or one); FlushRequests from coordination's topic
produces       Segments on "segments:NAME", one queue for each behavior name
waits for      steps; credit for segments while a learner is busy and its queue is full
unblocked by   the next StepBatch or flush; a learner's acknowledgement

Every incarnation of a learner, and every new source, gets a message that says how far the segments have come, even
without steps: what is missing before it was lost.
"""

import math
from collections import Counter, deque
from contextlib import suppress
from dataclasses import replace
from functools import partial

import anyio
import numpy as np

from sparring.pipeline.assembly.assembler import Assembler
from sparring.pipeline.assembly.members import Members, Sizes
from sparring.pipeline.errors import QueueClosed
from sparring.pipeline.messages.channels import ASSEMBLY_STATE, FLUSHES, METRICS, segments_queue, steps_queue
from sparring.pipeline.messages.incarnations import service_of
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.state import AssembledSteps, AssemblyState, FlushRequests
from sparring.pipeline.messages.steps import BehaviorSteps, StepBatch
from sparring.pipeline.monitoring.progress import ALL
from sparring.pipeline.queues.interface import Publisher, Sender, Subscription
from sparring.services.process.runtime import Context, follow, publish_metrics, refuse_restart


class Assembly:
    """Assembles the segments of all behaviors and sources, and sends them."""

    def __init__(self, context: Context, topic: Publisher) -> None:
        self._context = context
        self._topic = topic
        self._senders: dict[str, Sender[Segments]] = {}
        self._assemblers: dict[str, Assembler] = {}  # by source, of those that have listed all their agents
        self._warned: set[str] = set()
        self._flushes = FlushRequests(behaviors={})
        self._flushed: dict[tuple[str, str], int] = {}
        self._outbox: deque[Segments] = deque()  # finished, not yet put on a queue
        self._turn = anyio.Lock(fast_acquire=True)  # messages leave in the order of their numbers
        self._unaware: set[str] = set()  # behaviors whose learner does not know how far the segments have come
        self._started: set[str] = set()  # behaviors whose learner has started
        self._learner_started = anyio.Event()

    async def open(self, name: str) -> bool:
        """Opens the queue to a behavior's learner; returns False where the behavior has none yet."""
        context = self._context
        if name not in context.run.learners and context.reload is not None:
            context.run = context.reload()
        if name not in context.run.learners:
            return False
        self._senders[name] = await context.transport.sender(segments_queue(name))
        self._senders[name].on_receiver(partial(self._on_learner, name))
        return True

    async def take(self, batch: StepBatch) -> None:
        """Assembles a batch and sends finished segments.

        Cancelled: the whole batch was taken, and segments that were not sent are held.
        """
        async with self._turn:
            self._apply(batch)
            await self._hand_on()

    def _apply(self, batch: StepBatch) -> None:
        self._replace(batch.source)
        if batch.source not in self._assemblers:
            if not batch.introduces:
                return  # it describes agents that this incarnation does not know; what it holds is lost
            made = Assembler(batch.source, self._context.start, self._sizes, self._in_groups)
            self._assemblers[batch.source] = made
        assembler = self._assemblers[batch.source]
        # A behavior that may still get a learner has agents, but no step allowance and so no steps.
        run = self._context.run
        parts = [part for part in batch.parts if run.grows or part.behavior in run.learners]
        new = [part.behavior for part in parts if part.behavior not in assembler.members]
        assembler.apply(parts)
        self._outbox.extend(assembler.announcement(behavior) for behavior in new)
        self._outbox.extend(assembler.ready_messages())
        for part in parts:
            self._warn_of_missing_teammates(assembler, part)
            self._flush_if_due(part.behavior, batch.source)

    def _warn_of_missing_teammates(self, assembler: Assembler, part: BehaviorSteps) -> None:
        """Logs once that group members are trained by PPO, so that critics of their teammates do not see them."""
        behavior, joined = part.behavior, part.joined
        if joined is None or behavior in self._warned or self._in_groups(behavior) or not assembler.has(joined.groups):
            return
        self._warned.add(behavior)
        trainer = self._context.run.behavior(behavior).trainer_type
        cause = f"its trainer_type is {trainer}, so the critics of those that share groups with it do not see it"
        self._context.log.warning("teammates_left_out", behavior=behavior, cause=cause, notice=True)

    async def flush(self, topics: Subscription) -> None:
        """Closes and sends the open segments that coordination has requested."""
        flushes = topics.latest(FLUSHES)
        if flushes is None:
            return
        self._flushes = flushes
        async with self._turn:
            for behavior, source in self._held():
                self._flush_if_due(behavior, source)
            await self._hand_on()

    async def announce(self) -> None:
        """Tells every new incarnation of a learner how far the segments of its behavior have come."""
        while True:
            await self._learner_started.wait()
            self._learner_started = anyio.Event()
            async with self._turn:
                for behavior, source in self._held():
                    if behavior in self._unaware:
                        self._outbox.append(self._assemblers[source].announcement(behavior))
                self._unaware.clear()
                await self._hand_on()

    def _on_learner(self, behavior: str, _receivers: int) -> None:
        self._unaware.add(behavior)
        self._started.add(behavior)
        self._learner_started.set()

    async def settle(self) -> None:
        """Waits until no batch is partly handled, and learners have received all that was sent.

        It waits for no learner that has yet to start where nothing but announcements is on the way. Before the first
        step of a behavior nothing else is, and its learner may not yet know what the behavior is like.
        """
        counts = [sender.statistics() for sender in self._senders.values()]
        if self._context.first and not any(one.put_steps for one in counts) and not self._outbox:
            return
        if not any(one.unacknowledged_messages for one in counts) and not any(
            len(message.log_probs) or message.behavior in self._started for message in self._outbox
        ):
            return
        async with self._turn:
            self._context.progress.waits(ALL, "the end")
        for sender in self._senders.values():
            if sender.statistics().put_steps or not self._context.first:
                await sender.drain()

    def refresh(self, *, final: bool = False) -> None:
        """Brings gauges and state up to date; a final state is the last."""
        held: dict[str, dict[str, AssembledSteps]] = {}
        for (behavior, source), members in self._held().items():
            steps = AssembledSteps(sent=members.reached, open=members.open_steps, closed=members.closed_steps)
            held.setdefault(behavior, {})[source] = steps
        for message in self._outbox:
            sources = held.setdefault(message.behavior, {})
            rows = len(message.log_probs)
            known = sources.get(message.source, AssembledSteps(sent=message.reached, open=0, closed=0))
            sources[message.source] = replace(known, sent=known.sent - rows, closed=known.closed + rows)
        self._topic.publish(ASSEMBLY_STATE, AssemblyState(origin=self._context.start, held=held, final=final))
        self._note_open()
        for name, sender in self._senders.items():
            self._context.note_sender(f"segments:{name}", sender)

    # ---------------------------------------------------------------- inside

    def _held(self) -> dict[tuple[str, str], Members]:
        """Returns the members by behavior and source."""
        return {
            (behavior, source): members
            for source, assembler in self._assemblers.items()
            for behavior, members in assembler.members.items()
        }

    def _in_groups(self, behavior: str) -> bool:
        """Returns whether the behavior's learner trains on group segments."""
        run = self._context.run
        return run.playing is None and run.behavior(behavior).hyperparameters.groups

    def _sizes(self, behavior: str) -> Sizes:
        settings = self._context.run.behavior(behavior)
        largest = self._context.run.capacity(f"segments:{behavior}").largest
        steps, sequence = settings.hyperparameters.update_steps // 16, settings.network_settings.sequence_length
        least = max(1, min(steps, largest // 2))
        return Sizes(horizon=settings.time_horizon, message_steps=least, largest=largest, sequence=sequence)

    def _replace(self, source: str) -> None:
        """Closes the segments of a source's previous incarnation once a new one has sent a batch."""
        for former in [one for one in self._assemblers if one != source and service_of(one) == service_of(source)]:
            assembler = self._assemblers.pop(former)
            for behavior in assembler.members:
                self._context.log.warning("source_replaced", behavior=behavior, former=former, source=source)
            assembler.close_all()
            self._outbox.extend(assembler.rest())

    def _flush_if_due(self, behavior: str, source: str) -> None:
        flush = self._flushes.behaviors.get(behavior)
        if flush is None or self._flushed.get((behavior, source), 0) >= flush.serial:
            return
        assembler = self._assemblers[source]
        if assembler.members[behavior].received >= flush.required_steps.get(source, math.inf):
            self._flushed[behavior, source] = flush.serial
            self._outbox.extend(assembler.flush(behavior, flush.serial))

    async def _hand_on(self) -> None:
        """Sends finished segments; those that could not be sent stay in the outbox."""
        progress = self._context.progress
        while self._outbox:
            message = self._outbox[0]
            name, rows = message.behavior, len(message.log_probs)
            if name not in self._senders and not await self.open(name):
                assert not rows, "a behavior without a learner has no steps"
                self._outbox.popleft()  # an announcement, which its learner gets once it has started
                continue
            progress.waits(ALL, f"credit.segments/{name}", f"learning-{name}")
            await self._senders[name].put(message, rows)
            self._outbox.popleft()
            self._note(message)
            progress.works()
            progress.passed(f"segments/{name}", rows)

    def _note(self, message: Segments) -> None:
        registry, name = self._context.registry, message.behavior
        registry.add(f"segments/{name}", len(message.lengths))
        registry.add(f"segment_steps/{name}", len(message.log_probs))
        registry.add(f"interrupted/{name}", int(message.interrupted.sum()))
        registry.observe_moments("step_reward", message.rewards + message.group_rewards, name)
        episodes = message.episodes
        if len(episodes.returns):
            registry.observe_moments("episode_return", episodes.returns, name)
            registry.observe_moments("episode_length", episodes.lengths, name)
        if len(episodes.group_returns):
            registry.observe_moments("group_return", episodes.group_returns, name)

    def _note_open(self) -> None:
        gauges: Counter[str] = Counter()
        for (name, _), members in self._held().items():
            live, lengths = members.live, members.lengths
            gauges[f"open_segments/{name}"] += int(np.count_nonzero(lengths[live]))
            gauges[f"open_steps/{name}"] += members.open_steps
            gauges[f"episodes_open/{name}"] += int(np.count_nonzero(live))
            longest = int((members.episode_lengths + lengths)[live].max(initial=0))
            gauges[f"episode_oldest/{name}"] = max(gauges[f"episode_oldest/{name}"], longest)
        for gauge, value in gauges.items():
            self._context.registry.gauge(gauge, value)


async def run(context: Context) -> None:
    """Assembles until stopped; then handles the batches that have arrived and sends finished segments."""
    refuse_restart(context)
    transport = context.transport
    topic = await transport.publisher(context.service)
    queue, sources = steps_queue(context.service), context.run.sources_of(context.service)
    receiver = await transport.receiver(queue, context.run.capacity(queue.name))
    coordination = await transport.subscribe("coordination", FLUSHES)
    assembly = Assembly(context, topic)
    for name in context.run.learners:
        await assembly.open(name)

    def refresh() -> None:
        assembly.refresh()
        context.note_receiver("steps", receiver)

    async def consume() -> None:
        with suppress(QueueClosed):
            while True:
                context.progress.waits("segments", "steps", *sources)
                batch = await receiver.get()
                context.progress.works("segments")
                await assembly.take(batch)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consume)
        tasks.start_soon(follow, coordination, assembly.flush)
        tasks.start_soon(assembly.announce)
        tasks.start_soon(publish_metrics, context, topic, refresh)
        await context.stop.wait()  # stepping has ended and drained: no further batch arrives
        with anyio.move_on_after(context.run.settings.pipeline.stop_timeout_s / 2):
            await assembly.settle()
        tasks.cancel_scope.cancel()
    assembly.refresh(final=True)
    topic.publish(METRICS, context.numbers())
