"""Stepping gathers the steps of several ticks and sends them to assembly in one message."""

from collections.abc import Callable, Iterable

import anyio
import numpy as np

from sparring.pipeline.messages.steps import BehaviorSteps, StepBatch
from sparring.pipeline.monitoring.progress import ALL
from sparring.pipeline.queues.interface import Sender
from sparring.pipeline.stepping.acting import TickResult
from sparring.pipeline.stepping.settings import GATHERED_BYTES, GATHERED_STEPS, GATHERING_MOST_S, GATHERING_S
from sparring.pipeline.stepping.stepper import Stepper
from sparring.services.process.runtime import Context


class StepOutbox:
    """A StepOutbox sends the steps of a stepper through the queue "steps".

    Args:
        context: of the service.
        stepper: source of the steps.
        sender: end of the queue.
        share_of_update: returns the number of steps that are a large part of the smallest update.

    Attributes:
        turn: lock that a tick and `send` hold.
        rows: gathered rows that assembly has not received.
    """

    def __init__(
        self, context: Context, stepper: Stepper, sender: Sender[StepBatch], share_of_update: Callable[[], int]
    ) -> None:
        self.turn = anyio.Lock(fast_acquire=True)
        self.rows = 0
        self._context = context
        self._stepper = stepper
        self._sender = sender
        self._share_of_update = share_of_update
        self._bytes = 0  # of the observations of `rows`
        self._unsent: tuple[StepBatch, int] | None = None  # waits for credit
        self._filled = anyio.Event()

    @property
    def is_full(self) -> bool:
        """Returns whether enough has gathered for one message."""
        return self.rows >= GATHERED_STEPS or self._bytes >= GATHERED_BYTES

    def gather(self, result: TickResult) -> None:
        """Counts the steps of a tick."""
        if self._stepper.has_steps:
            self.rows += max(1, result.rows)
            self._bytes += result.bytes
            self._filled.set()

    async def send(self) -> None:
        """Sends all gathered steps; the caller holds `turn`."""
        while self._unsent is not None or self._stepper.has_steps:
            if self._unsent is None:
                introduces, rows = self._stepper.introduced, self.rows
                parts = self._stepper.take_steps()
                self._unsent = StepBatch(source=self._context.start, parts=parts, introduces=introduces), rows
                self.rows = self._bytes = 0
            self._context.progress.waits(ALL, "credit.steps", "assembly")
            await self._sender.put(*self._unsent)
            self._unsent = None
            self._context.progress.works()

    async def send_in_time(self) -> None:
        """Sends gathered steps after a short time at the latest, however few they are, until cancelled.

        A message costs the services a millisecond, whatever its size; a learner with a small buffer waits for each of
        its steps.
        """
        while True:
            await self._filled.wait()
            share = self._share_of_update()
            await anyio.sleep(GATHERING_S)
            if self.rows < share:
                await anyio.sleep(GATHERING_MOST_S - GATHERING_S)
            self._filled = anyio.Event()
            async with self.turn:
                await self.send()

    async def introduce(self, behaviors: Iterable[str]) -> None:
        """Announces this incarnation to assembly, which then closes what a former one left open."""
        parts = tuple(_no_steps(name) for name in behaviors)
        await self._sender.put(StepBatch(source=self._context.start, parts=parts, introduces=True), 0)


def _no_steps(behavior: str) -> BehaviorSteps:
    """Returns the steps of a behavior before its first tick."""
    empty = np.empty(0, np.int64)
    return BehaviorSteps(
        behavior=behavior, produced_before=0, ticks=empty, completed=empty, rows=np.empty((0, 5), np.int32)
    )
