"""The process around one learner.

consumes       Segments from "updates:NAME"; the behavior's spec and highest version from coordination
produces       PolicyWeights on the board "policy-NAME"; its state on its own; checkpoints in the run folder
waits for      the spec, then enough segments for an update
unblocked by   coordination, which cuts open segments whenever a whole buffer waits

Updates run in a worker thread, so the loop keeps answering while they do. Segments are taken only
between updates: until then they wait in the queue, which is how a busy learner holds the others back.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import Final

import anyio
import numpy as np

from sparring.pipeline.errors import Closed
from sparring.pipeline.learning.checkpoints import Checkpoint, CheckpointFolder, initial_folder, load
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.learning.report import UpdateReport
from sparring.pipeline.learning.signals.gail import biased
from sparring.pipeline.learning.taken import Deduplicator
from sparring.pipeline.messages.matches import MatchupAssignment
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.state import LearnerState
from sparring.pipeline.monitoring.metrics import LAG_BOUNDS
from sparring.pipeline.monitoring.progress import ALL
from sparring.pipeline.networks.device import usable
from sparring.pipeline.queues.interface import ReceivingQueue, Subscription, Topic
from sparring.services.process.runtime import Context, cancel_at_stop, publish_metrics, spec_of

LEAST_SAMPLE_SIZE: Final = 0.1
"""Effective share of an update's steps below which their correction for staleness is called weak."""


class Learning:
    """A learner with its queue, its board and its checkpoints."""

    def __init__(
        self,
        context: Context,
        learner: Learner,
        topic: Topic,
        policies: Topic,
        receiver: ReceivingQueue,
        coordination: Subscription,
    ) -> None:
        settings = context.run.settings
        self._context = context
        self._learner = learner
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
        self._taken = Deduplicator()
        self._cut = 0
        self._training = 0
        self._dropped = 0
        self._said = False
        self._warned = False
        self._weak = False
        self._team: int | None = None

    async def begin(self, versions_seen: int) -> None:
        """Goes on from the newest checkpoint, if this start is not the first; publishes the weights.

        Args:
            versions_seen: highest version that coordination knows of. It may not have heard of the last ones.
        """
        for file in self._learner.demo_files:
            self._context.log.info("demonstrations_loaded", **asdict(file))
        initial = initial_folder(self._context.run.directory, self._learner.behavior)
        if initial.exists():
            self._learner.load_weights(await self._context.compute(partial(load, initial)))
            self._context.log.info("initialised", checkpoint=str(initial))
        if self._context.run.resumed or not self._context.first:
            await self._go_on(versions_seen)
        every = self._behavior.steps_between_checkpoints
        self._next_checkpoint = (self._learner.trained // every + 1) * every
        await self._publish_weights()

    async def _go_on(self, versions_seen: int) -> None:
        """Takes the newest checkpoint, and a version above every one that was given out.

        Above the noted one, which no start of ours has published beyond; and above what coordination has
        seen, because its permits name that version, and after a loss of power its books may be the newer.
        """
        noted = await self._context.compute(self._folder.noted_version)
        restored = bool(self._folder.newest_first())
        if restored:
            checkpoint = await self._context.compute(self._folder.load_latest)
            self._learner.restore(checkpoint)
            self._taken.restore(checkpoint.taken)
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
            self._context.log.info("critic_starts_afresh", cause="its memory of agents was in the former process")

    async def loop(self) -> None:
        """Updates until `max_steps`, or until the queue is closed."""
        clock, registry = self._context.clock, self._context.registry
        try:
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
                await self._hold()
            else:  # the simulators go on for the others, and need permits for this one's agents
                await self._discard()
        except Closed:
            return

    async def finish(self) -> None:
        """Keeps the weights as they are.

        Raises:
            NoRoom: they could not be written.
        """
        limit_s = self._pipeline.stop_timeout_s / 2
        try:
            await self._context.writing.until_done(self._save, "the last checkpoint", limit_s)
        finally:
            self.publish()

    async def _publish_weights(self) -> None:
        """Publishes the weights, then the state: a permit never comes before the weights that it is for."""
        # Whatever dies in between, no version is given twice.
        await self._context.writing.until_done(self._note_version, "the version of the next weights")
        self._policies.publish("weights", self._learner.weights())
        self.publish()

    async def _note_version(self) -> None:
        self._folder.note_version(self._learner.version)

    def publish(self) -> None:
        """Publishes the state."""
        learner = self._learner
        self._topic.publish(
            "state",
            LearnerState(
                behavior=learner.behavior,
                start=self._context.start,
                version=learner.version,
                updates=learner.updates,
                trained=learner.trained,
                taken=self._taken.steps,
                training=self._training,
                buffered=learner.buffered - self._training,
                stale=learner.stale + self._dropped,
                duplicate=self._taken.duplicate,
                latest=self._taken.latest,
                restored=self._taken.restored,
                done=learner.done,
                checkpoint=self._checkpoint,
                weights_sha256=learner.weights_sha256 if self._checkpoint else "",
            ),
        )

    def refresh(self) -> None:
        """Brings gauges up to date."""
        registry, name = self._context.registry, self._learner.behavior
        registry.gauge(f"version/{name}", self._learner.version)
        registry.gauge(f"step/{name}", self._learner.trained)
        registry.gauge(f"max_steps/{name}", self._behavior.max_steps)
        registry.reach(f"trained/{name}", self._learner.trained)
        self._context.progress.reach(f"weights/{name}", self._learner.version)
        self._context.progress.reach(f"minibatches/{name}", self._learner.minibatches)  # within an update too
        self._context.note_receiver(f"updates:{name}", self._receiver)

    # ---------------------------------------------------------------- one update

    async def _gather(self) -> None:
        """Returns when there is enough for an update: a whole buffer, or all up to a cut in lockstep."""
        progress, name = self._context.progress, self._learner.behavior
        while True:
            if not self._lockstep and self._learner.ready:
                if not self._learner.drop_stale(self._pipeline.max_policy_lag):
                    break
                self.publish()
                continue
            progress.waits(ALL, f"segments/{name}", "coordination")
            segments = await self._receiver.get()
            progress.works()
            await self._meet(segments)
            closing = self._take(segments)
            # Every source that a cut names sends a marker; the first ends the collection. In lockstep only one lives:
            # the settings refuse several stepping processes there, else this would have to wait for all markers.
            # Just after stepping died, a cut may name its former start too. Should that marker come first, this update
            # is smaller and the rest trains a version later: a run that lost a process repeats no other in any case.
            if self._lockstep and closing and self._learner.buffered:
                break

    async def _meet(self, segments: Segments) -> None:
        """Other behavior names are in our groups: the critic is told what they see and do."""
        for name in self._learner.strangers(segments):
            spec, _ = await spec_of(self._context, self._coordination, name)
            self._learner.meet({name: spec})
            self._context.log.info("teammates_registered", teammates=name)

    def _take(self, segments: Segments) -> bool:
        """Adds segments to the buffer; returns whether they complete a new cut."""
        if not self._taken.is_new(segments):
            return False
        if len(segments.log_probs):
            self._learner.add(segments)
        return self._closes(segments)

    def _closes(self, segments: Segments) -> bool:
        """Whether they complete a new cut."""
        closing = segments.flush > self._cut
        self._cut = max(self._cut, segments.flush)
        return closing

    async def _update(self) -> None:
        learner = self._learner
        self._training = learner.size_of_update(everything=self._lockstep)
        self.publish()
        report = await self._context.compute(partial(learner.update, everything=self._lockstep))
        self._training = 0
        self._note(report)
        await self._publish_weights()

    def _note(self, report: UpdateReport) -> None:
        registry, name = self._context.registry, self._learner.behavior
        registry.add(f"updates/{name}")
        registry.add(f"skipped/{name}", report.skipped)
        registry.observe_many(f"lag/{name}", np.repeat(np.arange(len(report.lags)), report.lags))
        for statistic, value in report.statistics.items():
            registry.observe_mean(statistic, value, behavior=name)
        if report.staleness.sample_size < LEAST_SAMPLE_SIZE:
            self._note_weak_correction(report)
        if report.skipped:
            self._context.log.warning("minibatches_skipped", count=report.skipped, cause="loss or gradient not finite")
        if not self._said:
            self._say_of_groups(report)
        if report.terminated and not self._warned:
            self._warn_of_ends()

    def _note_weak_correction(self, report: UpdateReport) -> None:
        """Counts an update whose data are too old for the correction; the first of them is logged."""
        self._context.registry.add(f"correction.weak/{self._learner.behavior}")
        if not self._weak:
            self._weak = True
            self._context.log.warning(
                "stale_correction_weak",
                effective_sample_size=round(report.staleness.sample_size, 3),
                lag=len(report.lags) - 1,
                cause="the data are so old that few of their steps count; they are trained on all the same; lower "
                "pipeline.max_policy_lag or learning_rate, or raise buffer_size",
                notice=True,
            )

    def _say_of_groups(self, report: UpdateReport) -> None:
        """Says once where algorithm and simulator do not belong together."""
        grouped = self._behavior.trainer_type == "poca"
        if report.group_rewards and not grouped and self._behavior.reward_signals.extrinsic is not None:
            self._said = True
            self._context.log.info(
                "group_rewards_added",
                cause="trainer_type ppo adds the group's reward to each agent's own; poca credits members better, "
                "also with what the group earns after their end",
                notice=True,
            )
        if grouped:
            self._said = True
            if not report.groups:
                self._context.log.info(
                    "no_groups", cause="every agent is a group of its own, from which poca learns too", notice=True
                )

    def _warn_of_ends(self) -> None:
        """Says once that imitation alone pays for staying alive."""
        self._warned = True
        signals = self._behavior.reward_signals
        if signals.gail is not None and biased(signals.extrinsic):
            self._context.log.warning(
                "gail_pays_for_staying_alive",
                cause="its reward is above 0 at every step and nothing else is paid, while episodes here can end: what "
                "ends one early earns less, demonstrated or not; add the extrinsic signal or behavioral_cloning, or "
                "let episodes have one length",
                notice=True,
            )

    # ---------------------------------------------------------------- checkpoints

    async def _keep(self) -> None:
        """Writes the checkpoints that are due. One that cannot be written is tried again with the next."""
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
        """Whether another team learns than at the last look: what the former has learned is kept."""
        assignment = self._coordination.latest.get("assignment")
        before = self._team
        if isinstance(assignment, MatchupAssignment):
            self._team = assignment.matchups[0].team
        return before is not None and before != self._team

    def _make_checkpoint(self) -> Checkpoint:
        """With how far what came was taken: what is sent again to who restores it was trained on, or is lost."""
        return replace(self._learner.checkpoint(), taken=self._taken.keep())

    async def _save(self) -> None:
        if not self._learner.updates:
            return
        checkpoint = self._make_checkpoint()
        path = await self._context.compute(partial(self._folder.save, checkpoint, self._behavior.keep_checkpoints))
        self._recovered_at = self._context.clock()
        self._checkpoint = str(path.relative_to(self._context.run.directory))
        self._context.log.info("checkpoint_saved", path=self._checkpoint, trained=self._learner.trained)

    async def _hold(self) -> None:
        """Takes what still comes, so that the stages before this one can hand on what they hold, and stop."""
        self._context.progress.waits(ALL, "the end")
        while True:
            self._take(await self._receiver.get())

    async def _discard(self) -> None:
        """Drops and counts what still comes.

        In lockstep it tells of that at cuts only: told of at any time it would move the next cut, which closes the
        segments of groups that others still learn from.
        """
        self._context.progress.waits(ALL, "the other behaviors")
        while True:
            segments = await self._receiver.get()
            if not self._taken.is_new(segments):
                continue
            self._dropped += len(segments.log_probs)
            if self._closes(segments) or not self._lockstep:
                self.publish()


async def run(context: Context) -> None:
    """Learns until stopped; then saves what there is.

    Raises:
        Unsupported: the device that it is to train on cannot be used here.
    """
    name = context.service.partition("-")[2]
    device = await context.compute(partial(usable, context.run.settings.torch_settings.device))
    topic = await context.transport.topic(context.service)
    policies = await context.transport.topic(f"policy-{name}")  # apart: its readers are few and its records large
    receiver = await context.transport.receiver(f"updates:{name}", context.run.capacities[f"updates:{name}"], name)
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
    topic.publish("metrics", context.numbers())
