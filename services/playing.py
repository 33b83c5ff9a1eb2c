"""The process in a learner's place where nothing is learned.

consumes       Segments from "updates:NAME"; the behavior's spec from coordination
produces       PolicyWeights of a checkpoint on the board "policy-NAME"; its state on its own; `episodes.csv` and
               recorded episodes in the run folder
waits for      the spec, then segments
unblocked by   coordination, which cuts open segments whenever a whole buffer waits

Steps that are played are "ghost" in the books: nobody learns from them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import anyio

from pipeline.errors import Closed, ServiceError
from pipeline.learning.checkpoints import Checkpoint, load
from pipeline.learning.learner import Learner
from pipeline.messages.service import LearnerState, Segments
from pipeline.playing.episodes import EPISODES_FILE, FirstEpisodes, write_episodes
from pipeline.playing.recording import Recorder
from pipeline.queues.interface import Board, ReceivingQueue
from pipeline.runtime import Context, Playing, cancel_at_stop, publish_metrics, spec_of


class Player:
    """A checkpoint with its board, and what is played with it.

    Args:
        context: of the service.
        playing: what is asked for.
        learner: holds the checkpoint's weights; never updated.
        board: of the service.
        recorder: keeps episodes, if they are to be kept.
    """

    def __init__(
        self, context: Context, playing: Playing, learner: Learner, board: Board, recorder: Recorder | None
    ) -> None:
        self._context = context
        self._learner = learner
        self._board = board
        self._wanted = playing.episodes
        self._recorder = recorder
        self._episodes = FirstEpisodes(playing.episodes)
        self._folder = context.run.directory / learner.behavior
        self._from: tuple[str, str] | None = None
        self._seen: dict[tuple[str, str], int] = {}
        self._played = 0
        self._duplicate = 0

    @property
    def done(self) -> bool:
        """Whether all episodes that were asked for have come."""
        return self._wanted > 0 and self._episodes.complete

    async def take(self, segments: Segments) -> None:
        """Counts what was played.

        Raises:
            ServiceError: a service was started anew, and episodes of before are missing.
        """
        key = (segments.origin, segments.source)
        if segments.sequence <= self._seen.get(key, 0):
            self._duplicate += len(segments.log_probs)
            return
        self._seen[key] = segments.sequence
        self._played += len(segments.log_probs)
        if self._wanted and self._from not in (None, key):
            raise ServiceError(
                f"got steps of {key} after those of {self._from}: a service was started anew, and episodes are "
                "missing; expected the same services to the last episode; evaluate again"
            )
        self._from = key
        if self._recorder is not None:
            await self._context.compute(partial(self._recorder.add, segments))
        if self._wanted and not self.done:
            self._episodes.add(segments.episodes)

    def publish(self) -> None:
        """Publishes the state: all steps that came are done with."""
        self._board.publish(
            "state",
            LearnerState(
                behavior=self._learner.behavior,
                start=self._context.start,
                version=self._learner.version,
                updates=0,
                trained=0,
                taken=self._played,
                ghost=self._played,
                duplicate=self._duplicate,
                done=self.done,
            ),
        )

    def refresh(self) -> None:
        """Brings gauges up to date."""
        registry, name = self._context.registry, self._learner.behavior
        registry.gauge(f"version/{name}", self._learner.version)
        registry.reach(f"played/{name}", self._played)
        if self._wanted:
            registry.gauge(f"evaluated/{name}", self._episodes.count)

    def finish(self) -> None:
        """Writes the episodes, and what is recorded of them."""
        if self._recorder is not None:
            self._recorder.flush()
            files = [str(path.relative_to(self._context.run.directory)) for path in self._recorder.files]
            self._context.log.info("recorded", episodes=self._recorder.episodes, files=files, notice=True)
        if self._wanted:
            self._folder.mkdir(exist_ok=True)
            write_episodes(self._folder / EPISODES_FILE, self._episodes.columns())


async def run(context: Context) -> None:
    """Plays until stopped; then writes what came of it.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another behavior, spec or network.
        ServiceError: started anew in an evaluation.
    """
    playing, name = context.run.playing, context.service.partition("-")[2]
    assert playing is not None
    if playing.episodes and not context.first:
        raise ServiceError(f"{context.service} was started anew: episodes are missing; evaluate again")
    board = await context.transport.board(context.service)
    policies = await context.transport.board(f"policy-{name}")
    receiver = await context.transport.receiver(f"updates:{name}", context.run.capacities[f"updates:{name}"], name)
    coordination = await context.transport.subscribe("coordination")
    player: Player | None = None

    def refresh() -> None:
        if player is not None:
            player.refresh()
        context.note_receiver(f"updates:{name}", receiver)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(publish_metrics, context, board, refresh)
        tasks.start_soon(cancel_at_stop, context, tasks)
        spec, _ = await spec_of(context, coordination, name)
        checkpoint: Checkpoint = await context.compute(partial(load, Path(playing.checkpoints[name])))
        settings = context.run.settings.behaviors[name]
        learner = await context.compute(partial(Learner, name, spec, settings, context.run.seed))
        learner.restore(checkpoint)
        context.log.info("plays", checkpoint=playing.checkpoints[name], trained=learner.trained, notice=True)
        folder = context.run.directory / name
        recorder = Recorder(folder, name, spec, playing.episodes) if playing.record else None
        player = Player(context, playing, learner, board, recorder)
        policies.publish("weights", learner.weights())
        player.publish()
        await _play(context, player, receiver)
    if player is not None:
        with anyio.CancelScope(shield=True):
            await context.compute(player.finish)
            refresh()
            player.publish()
    board.publish("metrics", context.registry.snapshot(context.wall_clock()))


async def _play(context: Context, player: Player, receiver: ReceivingQueue) -> None:
    context.waiting_for = "segments"
    try:
        while True:
            await player.take(await receiver.get())
            player.publish()
    except Closed:
        return
