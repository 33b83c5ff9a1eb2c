"""This process plays a checkpoint in place of a learner.

consumes       Segments from "segments:NAME"; the behavior's spec from coordination
produces       PolicyWeights of a checkpoint on the topic "policy-NAME"; its state on its own topic; `episodes.csv` and
               recorded episodes in the run folder
waits for      the spec, then segments
unblocked by   coordination, which flushes open segments whenever a whole buffer waits

Played steps count as "ghost" in the step accounting: no learner uses them.
"""

import math
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio

from sparring.pipeline.errors import CheckpointError, QueueClosed, ServiceError
from sparring.pipeline.evaluation.episodes import EPISODES_FILE, FirstEpisodes, Recorder, write_episodes
from sparring.pipeline.learning.checkpoints import Checkpoint, load
from sparring.pipeline.learning.learner import Intake, Learner
from sparring.pipeline.messages.channels import LEARNER_STATE, METRICS, POLICY_WEIGHTS, segments_queue
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.state import LearnerState
from sparring.pipeline.monitoring.progress import ALL
from sparring.pipeline.queues.interface import Publisher, Receiver, Subscription
from sparring.pipeline.settings import Settings, started_by_hand
from sparring.pipeline.specs import BehaviorSpec
from sparring.services.process.runtime import (
    Context,
    Playback,
    cancel_at_stop,
    publish_metrics,
    refuse_restart,
    spec_of,
)


class CheckpointPlayer:
    """A CheckpointPlayer publishes a checkpoint and collects the episodes played with it.

    Args:
        context: of the service.
        playing: settings of the playback.
        learner: holds the checkpoint's weights; never updated.
        topic: of the service.
        recorder: records episodes; None where these are not recorded.

    Attributes:
        learner: holds the checkpoint's weights.
    """

    def __init__(
        self, context: Context, playing: Playback, learner: Learner, topic: Publisher, recorder: Recorder | None
    ) -> None:
        self._context = context
        self.learner = learner
        self._topic = topic
        self._requested = playing.episodes
        self._recorder = recorder
        self._episodes = FirstEpisodes(playing.episodes)
        self._folder = context.run.directory / learner.behavior
        self._stream: tuple[str, str] | None = None
        self._intake = Intake(restarted=not context.first)
        self._played = 0
        self._timed_out = False

    @property
    def done(self) -> bool:
        """Returns whether all requested episodes have arrived, and all segments of recorded ones."""
        waiting = self._recorder is not None and self._recorder.waiting
        return self._requested > 0 and self._episodes.complete and not waiting

    @property
    def missing(self) -> str:
        """Returns the missing episode; "" where none was requested or all have arrived."""
        return self._episodes.waiting_for if self._requested and not self._episodes.complete else ""

    def count(self, segments: Segments) -> None:
        """Counts the steps of segments."""
        self._intake.add(segments)
        self._played += len(segments.log_probs)

    async def take(self, segments: Segments) -> None:
        """Counts played episodes.

        Raises:
            ServiceError: a service has restarted, and its former episodes are missing.
        """
        self.count(segments)
        key = (segments.origin, segments.source)
        if self._requested and self._stream not in (None, key):
            raise ServiceError(
                f"got steps of {key} after those of {self._stream}: a service has restarted, and episodes are "
                "missing; expected the same services to the last episode; evaluate again"
            )
        self._stream = key
        if self._recorder is not None:
            await self._context.compute(partial(self._recorder.add, segments))
        if self._requested and not self._episodes.complete:
            self._episodes.add(segments.episodes)

    def give_up(self, limit_s: float) -> None:
        """Ends the run without the missing episodes."""
        self._context.log.error(
            "evaluation_timed_out", seconds=limit_s, missing=self._episodes.waiting_for, notice=True
        )
        self._timed_out = True
        self.publish()

    def publish(self) -> None:
        """Publishes the state, in which all steps that arrived are done."""
        self._topic.publish(
            LEARNER_STATE,
            LearnerState(
                behavior=self.learner.behavior,
                start=self._context.start,
                version=self.learner.version,
                updates=0,
                trained=0,
                ghost=self._played,
                lost=dict(self._intake.lost),
                reached=dict(self._intake.reached),
                done=self.done or self._timed_out,
            ),
        )

    def refresh(self) -> None:
        """Updates the gauges."""
        registry, name = self._context.registry, self.learner.behavior
        registry.gauge(f"version/{name}", self.learner.version)
        registry.reach(f"played/{name}", self._played)
        if self._requested:
            registry.gauge(f"evaluated/{name}", self._episodes.count)

    def finish(self) -> None:
        """Writes the episodes and their recordings."""
        if self._recorder is not None:
            self._recorder.flush()
            files = [str(path.relative_to(self._context.run.directory)) for path in self._recorder.files]
            self._context.log.info("episodes_recorded", episodes=self._recorder.episodes, files=files, notice=True)
        if self._requested:
            self._folder.mkdir(exist_ok=True)
            write_episodes(self._folder / EPISODES_FILE, self._episodes.columns())


async def run(context: Context) -> None:
    """Plays until stopped; then writes the episodes.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another behavior, spec or network.
        ServiceError: the service was restarted during an evaluation.
    """
    refuse_restart(context)
    name = context.service.partition("-")[2]
    topic = await context.transport.publisher(context.service)
    policies = await context.transport.publisher(f"policy-{name}")
    queue = segments_queue(name)
    receiver = await context.transport.receiver(queue, context.run.capacity(queue.name))
    coordination = await context.transport.subscribe("coordination")
    player: CheckpointPlayer | None = None

    def refresh() -> None:
        if player is not None:
            player.refresh()
        context.note_receiver(f"segments:{name}", receiver)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(publish_metrics, context, topic, refresh)
        tasks.start_soon(cancel_at_stop, context, tasks)
        spec = await _spec_in_time(context, coordination, name)
        player = await _player(context, name, spec, topic)
        policies.publish(POLICY_WEIGHTS, player.learner.weights())
        player.publish()
        limit = context.run.playing.timeout_s if context.run.playing and context.run.playing.episodes else math.inf
        with anyio.move_on_after(limit) as deadline:
            await _play(context, player, receiver)
        if deadline.cancelled_caught:
            player.give_up(limit)
            while True:  # the stages before this one can send what they hold, and stop
                player.count(await receiver.get())
    if player is not None:
        while not receiver.empty():
            player.count(receiver.get_nowait())
        with anyio.CancelScope(shield=True):
            await context.compute(player.finish)
            refresh()
            player.publish()
    topic.publish(METRICS, context.numbers())


async def _spec_in_time(context: Context, coordination: Subscription, name: str) -> BehaviorSpec:
    """Returns the behavior's spec; an evaluation waits for a limited time."""
    limit_s, remedy = spec_timeout(context.run.settings, context.run.playing)
    with anyio.move_on_after(limit_s):
        return (await spec_of(context, coordination, name))[0]
    raise ServiceError(f"got no simulator with {name!r} in {limit_s:g} s; expected one, to evaluate it; {remedy}")


def spec_timeout(settings: Settings, playing: Playback | None) -> tuple[float, str]:
    """Returns the seconds within which a simulator with the behavior must connect, and the remedy.

    A simulator that the supervisor does not start may take as long as all episodes.
    """
    if playing is None or not playing.episodes:
        return math.inf, ""
    if settings.launched and not started_by_hand(settings):
        limit_s = settings.pipeline.simulator_timeout_s
        return limit_s, "list a simulator that has it, or raise pipeline.simulator_timeout_s"
    return playing.timeout_s, "start one that has it, or raise --timeout"


async def _player(context: Context, name: str, spec: BehaviorSpec, topic: Publisher) -> CheckpointPlayer:
    """Loads the checkpoint."""
    playing = context.run.playing
    assert playing is not None
    checkpoint: Checkpoint = await context.compute(partial(load, Path(playing.checkpoints[name])))
    settings = context.run.settings.behaviors[name]
    learner = await context.compute(partial(Learner, name, spec, settings, context.run.seed, learns=False))
    try:
        learner.restore(checkpoint)
    except CheckpointError as error:
        remedy = "play it with the network_settings and the simulator that it was trained with"
        raise CheckpointError(got=error.got, expected=error.expected, remedy=remedy) from error
    context.log.info("playback_started", checkpoint=playing.checkpoints[name], trained=learner.trained, notice=True)
    folder, limit = context.run.directory / name, settings.network_settings.action_limit
    recorder = Recorder(folder, name, spec, playing.episodes, limit) if playing.record else None
    return CheckpointPlayer(context, playing, learner, topic, recorder)


async def _play(context: Context, player: CheckpointPlayer, receiver: Receiver[Segments]) -> None:
    name = player.learner.behavior
    with suppress(QueueClosed):
        while True:
            context.progress.waits(ALL, f"segments/{name}", "assembly", text=player.missing)
            segments = await receiver.get()
            context.progress.works()
            await player.take(segments)
            context.progress.passed(f"episodes/{name}", len(segments.log_probs))
            player.publish()
