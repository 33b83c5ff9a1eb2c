"""A learner that says what it takes and trains on, and whose updates cost nothing unless they are wanted."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol

import numpy as np
import torch

from sparring.pipeline.learning.checkpoints import Checkpoint
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.learning.report import UpdateReport, lags
from sparring.pipeline.messages.segments import Segments
from tests.world import world_game


class Training(Protocol):
    """Hears what learners do."""

    real: bool

    def taken(self, learner: TallyLearner, record: Segments, numbers: Any, matches: Any) -> None:
        """A learner has segments, whose rows are decisions of these numbers."""

    def trained(self, learner: TallyLearner, numbers: Any) -> None:
        """A learner has trained on decisions of these numbers."""

    def kept(self, learner: TallyLearner, checkpoint: Checkpoint) -> None:
        """A checkpoint was made."""

    def restored(self, learner: TallyLearner, checkpoint: Checkpoint) -> None:
        """A checkpoint was loaded."""


TRAINING: ContextVar[Training] = ContextVar("training")


class TallyLearner(Learner):
    """The real learner with its buffers and checkpoints; its update may be a stub.

    Attributes:
        lineage: numbers of the decisions that the present weights have been trained on.
    """

    def __init__(self, *arguments: Any, **values: Any) -> None:
        super().__init__(*arguments, **values)
        self.lineage: set[int] = set()
        self.training = TRAINING.get()

    def add(self, record: Segments) -> None:
        super().add(record)
        self.training.taken(self, record, *world_game.read(record.observations[0]))

    def update(self, everything: bool = False) -> UpdateReport:
        size = self._buffer.steps if everything else self.settings.hyperparameters.buffer_size
        take: Callable[[int], Any] = self._buffer.take
        seen: list[Any] = []

        def spied(steps: int) -> Any:
            seen.append(take(steps))
            return seen[0]

        self._buffer.take = spied  # type: ignore[method-assign]
        try:
            report = super().update(everything) if self.training.real else self._stub(size)
        finally:
            del self._buffer.take  # type: ignore[method-assign]
        observations = (seen[0].own if hasattr(seen[0], "own") else seen[0]).observations
        self.training.trained(self, world_game.read(observations[0])[0])
        return report

    def _stub(self, size: int) -> UpdateReport:
        batch = self._buffer.take(size)
        with torch.no_grad():
            first = next(iter(self._algorithm.actor.parameters()))
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
        self.training.kept(self, made)
        return made

    def restore(self, checkpoint: Checkpoint) -> None:
        super().restore(checkpoint)
        self.training.restored(self, checkpoint)
