"""This module runs the process around one learner.

consumes       Segments from "segments:NAME"; the behavior's spec and highest version from coordination
produces       PolicyWeights on the topic "policy-NAME"; LearnerState on its own topic; checkpoints in the run folder
waits for      the spec, then enough segments for an update
unblocked by   coordination, which flushes open segments whenever a whole buffer waits

Updates run in a worker thread, so that the event loop stays responsive. Segments are received only between updates;
until then they wait in the queue, which is how a busy learner slows the stages before it.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Final

import anyio
import numpy as np

from sparring.pipeline.coordination.ledger import LAST_EPISODES
from sparring.pipeline.coordination.lessons import MOST_RECENT
from sparring.pipeline.errors import QueueClosed
from sparring.pipeline.learning.checkpoints import REPLAY, Checkpoint, CheckpointFolder, initial_folder, load
from sparring.pipeline.learning.intake import Intake
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.learning.losses import UpdateReport
from sparring.pipeline.learning.signals.gail import biased
from sparring.pipeline.messages import channels
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.state import EpisodeReturns, LearnerState
from sparring.pipeline.monitoring.metrics import LAG_BOUNDS
from sparring.pipeline.monitoring.progress import ALL
from sparring.pipeline.networks.device import Device, usable
from sparring.pipeline.settings.parameters import curricula
from sparring.services.process.runtime import Context, cancel_at_stop, publish_metrics, refuse_restart, spec_of
from sparring.services.stages.playing import CheckpointPlayer, LearnerLinks, open_player
from sparring.services.stages.ranks import LeadingLearner, lead

LEAST_SAMPLE_SIZE: Final = 0.1
"""Effective share of an update's steps below which their correction for staleness counts as weak."""

_WARNINGS: Final = {
    "stale_correction_weak": "the data are so old that few of their steps count; they are trained on all the same; "
    "lower pipeline.max_policy_lag or learning_rate, or raise buffer_size",
    "gail_survival_bias": "GAIL's reward is above 0 at every step and is the only reward, while episodes can end "
    "early: an agent that ends one earns less, even if the demonstrations do so; add the extrinsic signal or "
    "behavioral_cloning, or let all episodes have one length",
}
_HINTS: Final = {
    "group_rewards_added": "trainer_type ppo adds the group's reward to each agent's own; poca credits members better, "
    "also with what the group earns after their end",
    "no_groups": "every agent is a group of its own, from which poca learns too; where agents form groups, "
    "let the simulator report them (option groups of pettingzoo)",
}
"""What a user should know, by log event."""


class Learning:
    """Connects a learner to its queue, its topics and its checkpoints.

    Args:
        context: of the service.
        learner: without weights of a checkpoint.
        links: to other services.
        versions_seen: highest version that coordination has seen; newer ones may exist.
    """

    def __init__(self, context: Context, learner: Learner, links: LearnerLinks) -> None:
        settings = context.run.settings
        self._context = context
        self._learner = learner
        learner.is_stopping = context.stop.is_set
        self._links = links
        self._pipeline = settings.pipeline
        self._behavior = settings.behaviors[learner.behavior]
        self._lockstep = settings.overlap == 0
        self._alone = len(settings.behaviors) == 1 and settings.unnamed is None
        self._folder = CheckpointFolder(context.run.directory, learner.behavior)
        self._recovered_at = context.clock()
        self._saved = 0  # steps trained by the last checkpoint, in units of the steps between two
        self._checkpoint = ""
        self._intake = Intake(restarted=context.run.resumed or not context.first)
        self._stale = 0  # in the lineage, before this incarnation, and after the end of the learner
        self._episodes_kept = MOST_RECENT if curricula(settings.environment_parameters) else LAST_EPISODES
        returns, lessons = np.empty(0, np.float32), np.empty(0, np.int64)
        self._episodes = EpisodeReturns(start=context.start, episodes=0, returns=returns, lessons=lessons)
        self._logged: set[str] = set()  # warnings and hints
        self._has_updated = False
        self._flushed = 0
        self._training = 0
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
        self._saved = self._learner.trained // self._behavior.steps_between_checkpoints
        await self._publish_weights()

    async def _resume(self, versions_seen: int) -> None:
        """Loads the newest checkpoint and raises the version above every one that was ever published.

        The noted version bounds what earlier incarnations of this service published. The one that coordination has seen
        counts too: step allowances name it, and after a power loss coordination's step counts may be newer than the
        note.
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
        event, version = "restored" if restored else "nothing_to_restore", self._learner.version
        self._context.log.info(event, trained=self._learner.trained, saved=saved, version=version, notice=True)
        if self._behavior.network_settings.memory is not None and not self._behavior.hyperparameters.shares_critic:
            cause = "the previous process held the critic's memory of agents"
            self._context.log.info("critic_memory_reset", cause=cause)

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
            await self._receive_rest()

    async def finish(self) -> None:
        """Counts the segments that wait in the queue, and saves the current weights.

        Raises:
            DiskFull: the weights could not be written.
        """
        while not self._links.receiver.empty():
            segments = self._links.receiver.get_nowait()
            self._take(segments)
            self._left += len(segments.log_probs)
        limit_s = self._pipeline.stop_timeout_s / 2
        try:
            await self._context.writing.until_done(self._save, "the last checkpoint", limit_s)
        finally:
            self.publish()

    def close(self) -> None:
        """Ends the other ranks, if there are any."""
        if isinstance(self._learner, LeadingLearner):
            self._learner.end()

    async def _publish_weights(self) -> None:
        """Publishes the weights before the state, so that no step allowance names unpublished weights."""
        # The note comes first, so that no version is published twice, whichever process dies in between.
        await self._context.writing.until_done(self._note_version, "the version of the next weights")
        self._links.policies.publish(channels.POLICY_WEIGHTS, self._learner.weights())
        self.publish()

    async def _note_version(self) -> None:
        self._folder.note_version(self._learner.version)

    def publish(self) -> None:
        """Publishes the state, and before it the episodes that it includes."""
        learner = self._learner
        self._links.topic.publish(channels.EPISODES, self._episodes)
        state = LearnerState(
            behavior=learner.behavior,
            start=self._context.start,
            version=learner.version,
            updates=learner.updates,
            trained=learner.trained,
            training=self._training,
            buffered=learner.buffered - self._training + self._left,
            stale=self._stale + learner.stale,
            **self._intake.to_plain(),
            done=learner.done,
            checkpoint=self._checkpoint,
            weights_sha256=learner.weights_sha256 if self._checkpoint else "",
        )
        self._links.topic.publish(channels.LEARNER_STATE, state)

    def refresh(self) -> None:
        """Updates the gauges."""
        registry, name = self._context.registry, self._learner.behavior
        registry.gauge(f"version/{name}", self._learner.version)
        registry.gauge(f"step/{name}", self._learner.trained)
        registry.gauge(f"max_steps/{name}", self._behavior.max_steps)
        registry.reach(f"trained/{name}", self._learner.trained)
        self._context.progress.reach(f"weights/{name}", self._learner.version)
        self._context.progress.reach(f"minibatches/{name}", self._learner.minibatches)  # rises during updates too

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
            progress.waits(ALL, f"segments/{name}", *self._context.run.assemblies)
            segments = await self._links.receiver.get()
            progress.works()
            for other in self._learner.unknown_behaviors(segments):  # of the same groups: the critic sees them too
                spec, _ = await spec_of(self._context, self._links.coordination, other)
                self._learner.register({other: spec})
                self._context.log.info("teammates_registered", teammates=other)
            closing = self._add(segments)
            # Every source that a flush names sends a marker; the first one ends the collection. In lockstep there is
            # only one source: the settings reject several stepping processes there, which would need all markers.
            # Just after stepping died, a flush may also name its previous incarnation. If that marker comes first, this
            # update is smaller and the rest trains a version later: a run that lost a process cannot repeat another.
            if self._lockstep and closing and self._learner.buffered:
                break

    def _add(self, segments: Segments) -> bool:
        """Adds segments to the buffer; returns whether they complete a new flush."""
        lost, closing = self._take(segments)
        if len(segments.log_probs):
            self._learner.add(segments)
        if lost:
            self.publish()
        return closing

    def _take(self, segments: Segments) -> tuple[bool, bool]:
        """Counts segments and the episodes that ended in them.

        Returns:
            Whether coordination must know at once, because steps are missing, or a new source has closed an earlier one
            and the budget has room again; and whether the segments complete a new flush.
        """
        before = len(self._intake.reached), sum(self._intake.lost.values())
        self._intake.add(segments)
        known, ended = self._episodes, segments.episodes
        if len(ended.returns):
            returns = np.concatenate([known.returns, ended.returns])[-self._episodes_kept :]
            lessons = np.concatenate([known.lessons, ended.lessons])[-self._episodes_kept :]
            count = known.episodes + len(ended.returns)
            self._episodes = replace(known, episodes=count, returns=returns, lessons=lessons)
        closing, self._flushed = segments.flush > self._flushed, max(self._flushed, segments.flush)
        return before != (len(self._intake.reached), sum(self._intake.lost.values())), closing

    async def _update(self) -> None:
        learner = self._learner
        self._training = learner.size_of_update(everything=self._lockstep)
        self.publish()
        report = await self._context.compute(partial(learner.update, everything=self._lockstep))
        self._training = 0
        self._note(report)
        await self._publish_weights()

    def _note(self, report: UpdateReport) -> None:
        """Counts an update, and logs what its report shows for the first time."""
        registry, name, log = self._context.registry, self._learner.behavior, self._context.log
        registry.add(f"updates/{name}")
        registry.add(f"skipped/{name}", report.skipped)
        registry.observe_many(f"lag/{name}", np.repeat(np.arange(len(report.lags)), report.lags))
        for statistic, value in report.statistics.items():
            registry.observe_moments(statistic, [value], name)
        if report.skipped:
            facts = {"count": report.skipped, "cause": "loss or gradient not finite"}
            log.warning("minibatches_skipped", **facts, notice="minibatches_skipped" not in self._logged)
            self._logged.add("minibatches_skipped")
        signals, grouped = self._behavior.reward_signals, self._behavior.hyperparameters.groups
        sample_size, lag = round(report.staleness.sample_size, 3), len(report.lags) - 1
        if is_weak := report.staleness.sample_size < LEAST_SAMPLE_SIZE:
            registry.add(f"correction.weak/{name}")
        shown = {
            "stale_correction_weak": is_weak,
            "group_rewards_added": report.group_rewards and not grouped and signals.extrinsic is not None,
            "no_groups": grouped and not report.groups and not self._has_updated,
            "gail_survival_bias": report.terminated and biased(signals.gail, signals.extrinsic),
        }
        for event in [event for event, is_shown in shown.items() if is_shown and event not in self._logged]:
            facts = {"effective_sample_size": sample_size, "lag": lag} if event == "stale_correction_weak" else {}
            write, causes = (log.warning, _WARNINGS) if event in _WARNINGS else (log.info, _HINTS)
            write(event, cause=causes[event], notice=True, **facts)
            self._logged.add(event)
        self._has_updated = True

    # ---------------------------------------------------------------- checkpoints

    async def _keep(self) -> None:
        """Writes the checkpoint that is due; one that cannot be written is tried again when the next is due."""
        saved = self._learner.trained // self._behavior.steps_between_checkpoints
        recovery_due = self._context.clock() - self._recovered_at >= self._pipeline.recovery_interval
        try:
            if saved > self._saved:
                self._saved = saved
                await self._save()
            elif self._team_changed() or recovery_due:
                await self._context.compute(partial(self._folder.save_recovery, self._make_checkpoint()))
                self._recovered_at = self._context.clock()
        except OSError as error:
            self._context.writing.failed(error, "a checkpoint")
            self._recovered_at = self._context.clock()

    def _team_changed(self) -> bool:
        """Returns whether the learning team changed since the last call, so that the former team's weights are kept."""
        assignment = self._links.coordination.latest(channels.ASSIGNMENT)
        before = self._team
        if assignment is not None:
            self._team = assignment.matchups[0].team
        return before is not None and before != self._team

    def _make_checkpoint(self) -> Checkpoint:
        """Returns a checkpoint with the counts of the steps that are not in the weights."""
        counts = {"stale": self._stale + self._learner.stale, **self._intake.to_plain()}
        return replace(self._learner.checkpoint(), counts=counts)

    async def _save(self) -> None:
        if not self._learner.updates:
            return
        checkpoint = self._make_checkpoint()
        path = await self._context.compute(partial(self._folder.save, checkpoint, self._behavior.keep_checkpoints))
        self._recovered_at = self._context.clock()
        self._checkpoint = str(path.relative_to(self._context.run.directory))
        self._context.log.info("checkpoint_saved", path=self._checkpoint, trained=self._learner.trained)

    async def _receive_rest(self) -> None:
        """Buffers the remaining segments, so that the stages before this one can send what they hold, and stop.

        Where other behaviors continue, their simulators need step allowances for this one's agents: its segments are
        dropped and counted. In lockstep it publishes that count only at flushes: at any other time it would shift the
        next flush, which closes the segments of groups that others still learn from.
        """
        self._context.progress.waits(ALL, "the end" if self._alone else "the other behaviors")
        while True:
            segments = await self._links.receiver.get()
            if self._alone:
                self._add(segments)
                continue
            lost, closing = self._take(segments)
            self._stale += len(segments.log_probs)
            if closing or lost or not self._lockstep:
                self.publish()


async def open_learning(context: Context, links: LearnerLinks, device: Device) -> Learning:
    """Makes the learner, once a simulator has named the behavior, and publishes its weights."""
    name, run = links.behavior, context.run
    context.registry.histogram(f"lag/{name}", LAG_BOUNDS)
    spec, versions = await spec_of(context, links.coordination, name)
    settings, pipeline = run.settings.behaviors[name], run.settings.pipeline
    replay = run.directory / name / REPLAY
    make: Callable[[], Learner] = partial(Learner, name, spec, settings, run.seed, device=device, replay_folder=replay)
    if pipeline.ranks > 1:
        how = partial(lead, count=pipeline.ranks, timeout_s=pipeline.stall_timeout_s, device=device)
        make = partial(how, name, spec, settings, run.seed)
    learner = await context.compute(make)
    context.log.info("networks", **learner.sizes)
    learning = Learning(context, learner, links)
    await learning.begin(versions)
    return learning


async def run(context: Context) -> None:
    """Trains, or plays a checkpoint, until stopped; then saves the weights, or the episodes.

    Raises:
        Unsupported: PyTorch cannot use the configured device on this machine.
        CheckpointError: the checkpoint to play is damaged, or of another behavior, spec or network.
        ServiceError: a service was restarted during an evaluation.
    """
    refuse_restart(context)
    name, transport, playing = context.service.partition("-")[2], context.transport, context.run.playing
    device = await context.compute(partial(usable, context.run.settings.torch_settings.of_learner(name)))
    topic = await transport.publisher(context.service)
    policies = await transport.publisher(f"policy-{name}")  # a topic of its own: few readers, large records
    queue = channels.segments_queue(name)
    receiver = await transport.receiver(queue, context.run.capacity(queue.name))
    coordination = await transport.subscribe("coordination", channels.RUN, channels.ASSIGNMENT)
    links = LearnerLinks(name, topic, policies, receiver, coordination)
    stage: Learning | CheckpointPlayer | None = None

    def refresh() -> None:
        context.note_receiver(queue.name, receiver)
        if stage is not None:
            stage.refresh()

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publish_metrics, context, topic, refresh)
            tasks.start_soon(cancel_at_stop, context, tasks)
            stage = await (
                open_learning(context, links, device) if playing is None else open_player(context, playing, links)
            )
            await stage.loop()
            context.progress.waits(ALL, "the end")
            await context.stop.wait()
        if stage is not None:
            with anyio.CancelScope(shield=True):
                await stage.finish()
                refresh()
    finally:
        if isinstance(stage, Learning):
            stage.close()
    topic.publish(channels.METRICS, context.numbers())
