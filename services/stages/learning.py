"""This module runs the process around one learner.

consumes       Segments from "segments:NAME"; the behavior's spec and highest version from coordination
produces       PolicyWeights on the topic "policy-NAME"; LearnerState on its own topic; checkpoints in the run folder
waits for      the spec, then enough segments for an update
unblocked by   coordination, which flushes open segments whenever a whole buffer waits

Updates run in a worker thread, so that the event loop stays responsive. Segments are received only between updates;
until then they wait in the queue, which is how a busy learner slows the stages before it.
"""

from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial

import anyio
import numpy as np

from sparring.pipeline.coordination.coordinator import LAST_EPISODES
from sparring.pipeline.coordination.lessons import MOST_RECENT
from sparring.pipeline.errors import QueueClosed
from sparring.pipeline.learning.checkpoints import Checkpoint, CheckpointFolder, initial_folder, load
from sparring.pipeline.learning.learner import Intake, Learner
from sparring.pipeline.messages import channels
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.state import EpisodeReturns, LearnerState
from sparring.pipeline.monitoring.metrics import LAG_BOUNDS
from sparring.pipeline.monitoring.progress import ALL
from sparring.pipeline.networks.device import usable
from sparring.pipeline.queues.interface import Publisher, Receiver, Subscription
from sparring.pipeline.settings.parameters import curricula
from sparring.services.process.runtime import Context, cancel_at_stop, publish_metrics, spec_of
from sparring.services.stages.update_reporter import UpdateReporter


class Learning:
    """Connects a learner to its queue, its topics and its checkpoints."""

    def __init__(
        self,
        context: Context,
        learner: Learner,
        topic: Publisher,
        policies: Publisher,
        receiver: Receiver[Segments],
        coordination: Subscription,
    ) -> None:
        settings = context.run.settings
        self._context = context
        self._learner = learner
        learner.is_stopping = context.stop.is_set
        self._topic = topic
        self._policies = policies
        self._receiver = receiver
        self._coordination = coordination
        self._pipeline = settings.pipeline
        self._behavior = settings.behaviors[learner.behavior]
        self._lockstep = settings.overlap == 0
        self._alone = len(settings.behaviors) == 1 and settings.unnamed is None
        self._folder = CheckpointFolder(context.run.directory, learner.behavior)
        self._recovered_at = context.clock()
        self._next_checkpoint = 0
        self._checkpoint = ""
        self._intake = Intake(restarted=context.run.resumed or not context.first)
        self._stale = 0  # in the lineage, before this incarnation
        self._episodes_kept = MOST_RECENT if curricula(settings.environment_parameters) else LAST_EPISODES
        self._episodes = EpisodeReturns(
            start=context.start, episodes=0, returns=np.empty(0, np.float32), lessons=np.empty(0, np.int64)
        )
        self._reporter = UpdateReporter(context, learner.behavior)
        self._flushed = 0
        self._training = 0
        self._dropped = 0
        self._left = 0  # steps that waited in the queue at the end
        self._team: int | None = None

    async def begin(self, versions_seen: int) -> None:
        """Restores the newest checkpoint, except at the first start of a new run, and publishes the weights.

        Args:
            versions_seen: highest version that coordination has seen; newer ones may exist.
        """
        for file in self._learner.demo_files:
            self._context.log.info("demonstrations_loaded", **asdict(file))
        initial = initial_folder(self._context.run.directory, self._learner.behavior)
        if initial.exists():
            self._learner.load_weights(await self._context.compute(partial(load, initial)))
            self._context.log.info("weights_initialized", checkpoint=str(initial))
        if self._context.run.resumed or not self._context.first:
            await self._resume(versions_seen)
        every = self._behavior.steps_between_checkpoints
        self._next_checkpoint = (self._learner.trained // every + 1) * every
        await self._publish_weights()

    async def _resume(self, versions_seen: int) -> None:
        """Loads the newest checkpoint and raises the version above every one that was ever published.

        The noted version bounds what earlier incarnations of this service published. `versions_seen` counts too: step
        allowances name that version, and after a power loss coordination's step counts may be newer than the note.
        """
        noted = await self._context.compute(self._folder.noted_version)
        restored = bool(self._folder.newest_first())
        if restored:
            checkpoint = await self._context.compute(self._folder.load_latest)
            self._learner.restore(checkpoint)
            self._stale = checkpoint.counts.get("stale", 0)
            self._intake.restore(checkpoint.counts, self._learner.trained + self._stale)
        saved = self._learner.version
        self._learner.raise_version(max(noted, versions_seen))
        self._context.log.info(
            "restored" if restored else "nothing_to_restore",
            trained=self._learner.trained,
            saved=saved,
            version=self._learner.version,
            notice=True,
        )
        if self._behavior.network_settings.memory is not None and not self._behavior.hyperparameters.shared_critic:
            self._context.log.info(
                "critic_memory_reset", cause="the previous process held the critic's memory of agents"
            )

    async def loop(self) -> None:
        """Trains until `max_steps`, or until the queue is closed."""
        clock, registry = self._context.clock, self._context.registry
        with suppress(QueueClosed):
            while not self._learner.done:
                began = clock()
                await self._gather()
                registry.add("wait_s", clock() - began)
                began = clock()
                await self._update()
                registry.add("update_s", clock() - began)
                await self._keep()
            await self._context.writing.until_done(self._save, "the last checkpoint")
            self.publish()
            if self._alone:
                await self._drain()
            else:  # the other behaviors continue, and their simulators need step allowances for this one's agents
                await self._discard()

    async def finish(self) -> None:
        """Counts the segments that wait in the queue, and saves the current weights.

        Raises:
            DiskFull: the weights could not be written.
        """
        while not self._receiver.empty():
            segments = self._receiver.get_nowait()
            self._take(segments)
            self._left += len(segments.log_probs)
        limit_s = self._pipeline.stop_timeout_s / 2
        try:
            await self._context.writing.until_done(self._save, "the last checkpoint", limit_s)
        finally:
            self.publish()

    async def _publish_weights(self) -> None:
        """Publishes the weights before the state, so that no step allowance names unpublished weights."""
        # The note comes first, so that no version is published twice, whichever process dies in between.
        await self._context.writing.until_done(self._note_version, "the version of the next weights")
        self._policies.publish(channels.POLICY_WEIGHTS, self._learner.weights())
        self.publish()

    async def _note_version(self) -> None:
        self._folder.note_version(self._learner.version)

    def publish(self) -> None:
        """Publishes the state, and before it the episodes that it includes."""
        learner = self._learner
        self._topic.publish(channels.EPISODES, self._episodes)
        self._topic.publish(
            channels.LEARNER_STATE,
            LearnerState(
                behavior=learner.behavior,
                start=self._context.start,
                version=learner.version,
                updates=learner.updates,
                trained=learner.trained,
                training=self._training,
                buffered=learner.buffered - self._training + self._left,
                stale=self._stale + learner.stale + self._dropped,
                lost=dict(self._intake.lost),
                reached=dict(self._intake.reached),
                done=learner.done,
                checkpoint=self._checkpoint,
                weights_sha256=learner.weights_sha256 if self._checkpoint else "",
            ),
        )

    def refresh(self) -> None:
        """Updates the gauges."""
        registry, name = self._context.registry, self._learner.behavior
        registry.gauge(f"version/{name}", self._learner.version)
        registry.gauge(f"step/{name}", self._learner.trained)
        registry.gauge(f"max_steps/{name}", self._behavior.max_steps)
        registry.reach(f"trained/{name}", self._learner.trained)
        self._context.progress.reach(f"weights/{name}", self._learner.version)
        self._context.progress.reach(f"minibatches/{name}", self._learner.minibatches)  # rises during updates too
        self._context.note_receiver(f"segments:{name}", self._receiver)

    # ---------------------------------------------------------------- one update

    async def _gather(self) -> None:
        """Receives segments until an update is due: a whole buffer, or in lockstep everything up to a flush."""
        progress, name = self._context.progress, self._learner.behavior
        while True:
            if not self._lockstep and self._learner.ready:
                if not self._learner.drop_stale(self._pipeline.max_policy_lag):
                    break
                self.publish()
                continue
            progress.waits(ALL, f"segments/{name}", "assembly")
            segments = await self._receiver.get()
            progress.works()
            await self._register_teammates(segments)
            closing = self._add(segments)
            # Every source that a flush names sends a marker; the first one ends the collection. In lockstep there is
            # only one source: the settings reject several stepping processes there, which would need all markers.
            # Just after stepping died, a flush may also name its previous incarnation. If that marker comes first, this
            # update is smaller and the rest trains a version later: a run that lost a process cannot repeat another.
            if self._lockstep and closing and self._learner.buffered:
                break

    async def _register_teammates(self, segments: Segments) -> None:
        """Registers the specs of other behavior names in the groups, which the critic observes too."""
        for name in self._learner.unknown_behaviors(segments):
            spec, _ = await spec_of(self._context, self._coordination, name)
            self._learner.register({name: spec})
            self._context.log.info("teammates_registered", teammates=name)

    def _add(self, segments: Segments) -> bool:
        """Adds segments to the buffer; returns whether they complete a new flush."""
        lost = self._take(segments)
        if len(segments.log_probs):
            self._learner.add(segments)
        if lost:
            self.publish()
        return self._completes_flush(segments)

    def _take(self, segments: Segments) -> bool:
        """Counts segments and the episodes that ended in them; returns whether coordination must know at once.

        That is so where steps are missing, or where a new source has closed an earlier one: the budget has room again.
        """
        before = len(self._intake.reached), sum(self._intake.lost.values())
        self._intake.add(segments)
        known, ended = self._episodes, segments.episodes
        if len(ended.returns):
            self._episodes = replace(
                known,
                episodes=known.episodes + len(ended.returns),
                returns=np.concatenate([known.returns, ended.returns])[-self._episodes_kept :],
                lessons=np.concatenate([known.lessons, ended.lessons])[-self._episodes_kept :],
            )
        return before != (len(self._intake.reached), sum(self._intake.lost.values()))

    def _completes_flush(self, segments: Segments) -> bool:
        """Returns whether segments complete a new flush."""
        closing = segments.flush > self._flushed
        self._flushed = max(self._flushed, segments.flush)
        return closing

    async def _update(self) -> None:
        learner = self._learner
        self._training = learner.size_of_update(everything=self._lockstep)
        self.publish()
        report = await self._context.compute(partial(learner.update, everything=self._lockstep))
        self._training = 0
        self._reporter.note(report)
        await self._publish_weights()

    # ---------------------------------------------------------------- checkpoints

    async def _keep(self) -> None:
        """Writes the checkpoints that are due; one that cannot be written is tried again when the next is due."""
        try:
            await self._write_due()
        except OSError as error:
            self._context.writing.failed(error, "a checkpoint")
            self._recovered_at = self._context.clock()

    async def _write_due(self) -> None:
        if self._learner.trained >= self._next_checkpoint:
            every = self._behavior.steps_between_checkpoints
            self._next_checkpoint = (self._learner.trained // every + 1) * every
            await self._save()
        elif self._team_changed() or self._context.clock() - self._recovered_at >= self._pipeline.recovery_interval:
            await self._context.compute(partial(self._folder.save_recovery, self._make_checkpoint()))
            self._recovered_at = self._context.clock()

    def _team_changed(self) -> bool:
        """Returns whether the learning team changed since the last call, so that the former team's weights are kept."""
        assignment = self._coordination.latest(channels.ASSIGNMENT)
        before = self._team
        if assignment is not None:
            self._team = assignment.matchups[0].team
        return before is not None and before != self._team

    def _make_checkpoint(self) -> Checkpoint:
        """Returns a checkpoint with the counts of the steps that are not in the weights."""
        counts = {"stale": self._stale + self._learner.stale + self._dropped, **self._intake.to_plain()}
        return replace(self._learner.checkpoint(), counts=counts)

    async def _save(self) -> None:
        if not self._learner.updates:
            return
        checkpoint = self._make_checkpoint()
        path = await self._context.compute(partial(self._folder.save, checkpoint, self._behavior.keep_checkpoints))
        self._recovered_at = self._context.clock()
        self._checkpoint = str(path.relative_to(self._context.run.directory))
        self._context.log.info("checkpoint_saved", path=self._checkpoint, trained=self._learner.trained)

    async def _drain(self) -> None:
        """Buffers the remaining segments, so that the stages before this one can send what they hold, and stop."""
        self._context.progress.waits(ALL, "the end")
        while True:
            self._add(await self._receiver.get())

    async def _discard(self) -> None:
        """Drops and counts the remaining segments.

        In lockstep it publishes that count only at flushes: at any other time it would shift the next flush, which
        closes the segments of groups that others still learn from.
        """
        self._context.progress.waits(ALL, "the other behaviors")
        while True:
            segments = await self._receiver.get()
            lost = self._take(segments)
            self._dropped += len(segments.log_probs)
            if self._completes_flush(segments) or lost or not self._lockstep:
                self.publish()


async def run(context: Context) -> None:
    """Trains until stopped, then saves the weights.

    Raises:
        Unsupported: PyTorch cannot use the configured device on this machine.
    """
    name = context.service.partition("-")[2]
    device = await context.compute(partial(usable, context.run.settings.torch_settings.device))
    topic = await context.transport.publisher(context.service)
    policies = await context.transport.publisher(f"policy-{name}")  # a topic of its own: few readers, large records
    queue = channels.segments_queue(name)
    receiver = await context.transport.receiver(queue, context.run.capacity(queue.name))
    coordination = await context.transport.subscribe("coordination")
    context.registry.histogram(f"lag/{name}", LAG_BOUNDS)
    learning: Learning | None = None

    def refresh() -> None:
        if learning is not None:
            learning.refresh()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(publish_metrics, context, topic, refresh)
        tasks.start_soon(cancel_at_stop, context, tasks)
        spec, versions = await spec_of(context, coordination, name)
        behavior = context.run.settings.behaviors[name]
        learner = await context.compute(partial(Learner, name, spec, behavior, context.run.seed, device=device))
        context.log.info("networks", **learner.sizes)
        learning = Learning(context, learner, topic, policies, receiver, coordination)
        await learning.begin(versions)
        await learning.loop()
        context.progress.waits(ALL, "the end")
        await context.stop.wait()
    if learning is not None:
        with anyio.CancelScope(shield=True):
            await learning.finish()
            refresh()
    topic.publish(channels.METRICS, context.numbers())
