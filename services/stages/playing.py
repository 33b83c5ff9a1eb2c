"""Plays a checkpoint in place of a learner.

consumes       Segments from "segments:NAME"; the behavior's spec from coordination
produces       PolicyWeights of a checkpoint on the topic "policy-NAME"; its state on its own topic; `episodes.csv` and
               recorded episodes in the run folder
waits for      the spec, then segments
unblocked by   coordination, which flushes open segments whenever a whole buffer waits

Played steps count as "ghost" in the step accounting: no learner uses them.
"""

import math
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio

from sparring.pipeline.errors import CheckpointError, QueueClosed, ServiceError
from sparring.pipeline.evaluation.episodes import EPISODES_FILE, FirstEpisodes, Recorder, write_episodes
from sparring.pipeline.learning.checkpoints import Checkpoint, load
from sparring.pipeline.learning.intake import Intake
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.messages.channels import LEARNER_STATE, POLICY_WEIGHTS
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.state import LearnerState
from sparring.pipeline.monitoring.progress import ALL
from sparring.pipeline.queues.interface import Publisher, Receiver, Subscription
from sparring.pipeline.settings import Settings, started_by_hand
from sparring.services.process.runtime import Context, Playback, spec_of


@dataclass(frozen=True, slots=True)
class LearnerLinks:
    """Links a learner, or what plays a checkpoint in its place, to the other services.

    Attributes:
        behavior: name of the behavior.
        topic: of the service.
        policies: topic of the weights.
        receiver: end of the queue of segments.
        coordination: topic of coordination.
    """

    behavior: str
    topic: Publisher
    policies: Publisher
    receiver: Receiver[Segments]
    coordination: Subscription


class CheckpointPlayer:
    """A CheckpointPlayer publishes a checkpoint and collects the episodes played with it.

    Args:
        context: of the service.
        playing: settings of the playback.
        links: to other services.
        learner: holds the checkpoint's weights; never updated.
        recorder: records episodes; None where these are not recorded.
    """

    def __init__(
        self, context: Context, playing: Playback, links: LearnerLinks, learner: Learner, recorder: Recorder | None
    ) -> None:
        self._context = context
        self._playing = playing
        self._links = links
        self._learner = learner
        self._recorder = recorder
        self._episodes = FirstEpisodes(playing.episodes)
        self._stream: tuple[str, str] | None = None
        self._intake = Intake(restarted=not context.first)
        self._played = 0
        self._timed_out = False

    async def loop(self) -> None:
        """Plays until the queue is closed; an evaluation that takes too long only counts what still arrives.

        Raises:
            ServiceError: a service has restarted, and its former episodes are missing.
        """
        self._links.policies.publish(POLICY_WEIGHTS, self._learner.weights())
        self.publish()
        limit_s = self._playing.timeout_s if self._playing.episodes else math.inf
        with suppress(QueueClosed):
            with anyio.move_on_after(limit_s):
                await self._play()
            missing = self._episodes.waiting_for
            self._context.log.error("evaluation_timed_out", seconds=limit_s, missing=missing, notice=True)
            self._timed_out = True
            self.publish()
            while True:  # the stages before this one can send what they hold, and stop
                self._count(await self._links.receiver.get())

    async def _play(self) -> None:
        progress, name = self._context.progress, self._links.behavior
        while True:
            missing = self._playing.episodes and not self._episodes.complete
            text = self._episodes.waiting_for if missing else ""
            progress.waits(ALL, f"segments/{name}", *self._context.run.assemblies, text=text)
            segments = await self._links.receiver.get()
            progress.works()
            self._count(segments)
            key = (segments.origin, segments.source)
            if self._playing.episodes and self._stream not in (None, key):
                raise ServiceError(
                    f"got steps of {key} after those of {self._stream}: a service has restarted, and episodes are "
                    "missing; expected the same services to the last episode; evaluate again"
                )
            self._stream = key
            if self._recorder is not None:
                await self._context.compute(partial(self._recorder.add, segments))
            if missing:
                self._episodes.add(segments.episodes)
            progress.passed(f"episodes/{name}", len(segments.log_probs))
            self.publish()

    def _count(self, segments: Segments) -> None:
        self._intake.add(segments)
        self._played += len(segments.log_probs)

    def publish(self) -> None:
        """Publishes the state, in which all steps that arrived are done.

        An evaluation is done when all its episodes have arrived, and all segments of recorded ones.
        """
        waiting = self._recorder is not None and self._recorder.waiting
        arrived = self._playing.episodes > 0 and self._episodes.complete and not waiting
        state = LearnerState(
            behavior=self._links.behavior,
            start=self._context.start,
            version=self._learner.version,
            updates=0,
            trained=0,
            ghost=self._played,
            done=arrived or self._timed_out,
            **self._intake.to_plain(),
        )
        self._links.topic.publish(LEARNER_STATE, state)

    def refresh(self) -> None:
        """Updates the gauges."""
        registry, name = self._context.registry, self._links.behavior
        registry.gauge(f"version/{name}", self._learner.version)
        registry.reach(f"played/{name}", self._played)
        if self._playing.episodes:
            registry.gauge(f"evaluated/{name}", self._episodes.count)

    async def finish(self) -> None:
        """Counts the segments that wait in the queue, and writes the episodes and their recordings."""
        while not self._links.receiver.empty():
            self._count(self._links.receiver.get_nowait())
        await self._context.compute(self._write)
        self.publish()

    def _write(self) -> None:
        directory = self._context.run.directory
        if self._recorder is not None:
            self._recorder.flush()
            files = [str(path.relative_to(directory)) for path in self._recorder.files]
            self._context.log.info("episodes_recorded", episodes=self._recorder.episodes, files=files, notice=True)
        if self._playing.episodes:
            folder = directory / self._links.behavior
            folder.mkdir(exist_ok=True)
            write_episodes(folder / EPISODES_FILE, self._episodes.columns())


def spec_timeout(settings: Settings, playing: Playback) -> tuple[float, str]:
    """Returns the seconds within which a simulator with the behavior must connect, and the remedy.

    A simulator that the supervisor does not start may take as long as all episodes.
    """
    if not playing.episodes:
        return math.inf, ""
    if settings.launched and not started_by_hand(settings):
        limit_s = settings.pipeline.simulator_timeout_s
        return limit_s, "list a simulator that has it, or raise pipeline.simulator_timeout_s"
    return playing.timeout_s, "start one that has it, or raise --timeout"


async def open_player(context: Context, playing: Playback, links: LearnerLinks) -> CheckpointPlayer:
    """Loads the checkpoint, once a simulator has named the behavior.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another behavior, spec or network.
        ServiceError: no simulator with the behavior has connected in time.
    """
    name, run, spec = links.behavior, context.run, None
    limit_s, remedy = spec_timeout(run.settings, playing)
    with anyio.move_on_after(limit_s):
        spec, _ = await spec_of(context, links.coordination, name)
    if spec is None:
        raise ServiceError(f"got no simulator with {name!r} in {limit_s:g} s; expected one, to evaluate it; {remedy}")
    checkpoint: Checkpoint = await context.compute(partial(load, Path(playing.checkpoints[name])))
    settings = run.settings.behaviors[name]
    learner = await context.compute(partial(Learner, name, spec, settings, run.seed, learns=False))
    try:
        learner.restore(checkpoint)
    except CheckpointError as error:
        remedy = "play it with the network_settings and the simulator that it was trained with"
        raise CheckpointError(got=error.got, expected=error.expected, remedy=remedy) from error
    context.log.info("playback_started", checkpoint=playing.checkpoints[name], trained=learner.trained, notice=True)
    limit = settings.network_settings.action_limit
    recorder = Recorder(run.directory / name, name, spec, playing.episodes, limit) if playing.record else None
    return CheckpointPlayer(context, playing, links, learner, recorder)
