"""A learner that reports its segments and updates, and whose updates may be a cheap stub."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol

import numpy as np
import torch

from sparring.pipeline.learning.checkpoints import Checkpoint
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.learning.losses import UpdateReport, lags
from sparring.pipeline.messages.segments import Segments
from tests.world import world_game


class Training(Protocol):
    """Receives the actions of learners."""

    real: bool

    def on_segments(self, learner: RecordingLearner, record: Segments, numbers: Any, matches: Any) -> None:
        """Receives the segments of a learner and the numbers of their decisions and matches."""

    def on_update(self, learner: RecordingLearner, numbers: Any) -> None:
        """Receives the numbers of the decisions of an update."""

    def on_checkpoint(self, learner: RecordingLearner, checkpoint: Checkpoint) -> None:
        """Receives a checkpoint that was made."""

    def on_restore(self, learner: RecordingLearner, checkpoint: Checkpoint) -> None:
        """Receives a checkpoint that was restored."""


TRAINING: ContextVar[Training] = ContextVar("training")


class RecordingLearner(Learner):
    """The real learner with its buffers and checkpoints, whose update may be a stub.

    Attributes:
        lineage: numbers of the decisions that the current weights were trained on.
    """

    def __init__(self, *arguments: Any, **values: Any) -> None:
        super().__init__(*arguments, **values)
        self.lineage: set[int] = set()
        self.training = TRAINING.get()

    def add(self, record: Segments) -> None:
        super().add(record)
        self.training.on_segments(self, record, *world_game.read(record.observations[0]))

    def update(self, everything: bool = False) -> UpdateReport:
        size = self._buffer.steps if everything else self.settings.hyperparameters.buffer_size
        take: Callable[[int], Any] = self._buffer.take
        batches: list[Any] = []

        def take_and_record(steps: int) -> Any:
            batches.append(take(steps))
            return batches[0]

        self._buffer.take = take_and_record  # type: ignore[method-assign]
        try:
            report = super().update(everything) if self.training.real else self._stub(size)
        finally:
            del self._buffer.take  # type: ignore[method-assign]
        observations = (batches[0].own if hasattr(batches[0], "own") else batches[0]).observations
        self.training.on_update(self, world_game.read(observations[0])[0])
        return report

    def _stub(self, size: int) -> UpdateReport:
        batch = self._buffer.take(size)
        with torch.no_grad():
            first = next(iter(self._algorithm.networks.actor.parameters()))
            first.add_(torch.full_like(first, 1e-3))
        report = UpdateReport(
            statistics={},
            steps=batch.steps,
            minibatches=1,
            skipped=0,
            lags=lags(self.version, np.asarray(batch.versions)),
            group_rewards=False,
        )
        self.version += 1
        self.updates += 1
        self.trained += report.steps
        return report

    def checkpoint(self) -> Checkpoint:
        made = super().checkpoint()
        self.training.on_checkpoint(self, made)
        return made

    def restore(self, checkpoint: Checkpoint) -> None:
        super().restore(checkpoint)
        self.training.on_restore(self, checkpoint)
