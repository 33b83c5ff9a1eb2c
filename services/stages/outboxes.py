"""Stepping sends steps to assembly, those of several ticks in one message, and results of matches to coordination."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import anyio
import numpy as np

from sparring.pipeline.messages.matches import Results
from sparring.pipeline.messages.steps import BehaviorSteps, StepBatch
from sparring.pipeline.monitoring.progress import ALL, CREDIT
from sparring.pipeline.queues.interface import Sender
from sparring.pipeline.settings.model import BehaviorSettings
from sparring.pipeline.stepping.acting import TickResult
from sparring.pipeline.stepping.matches import Matches
from sparring.pipeline.stepping.settings import GATHERED_BYTES, GATHERED_STEPS, GATHERING_MOST_S, GATHERING_S
from sparring.pipeline.stepping.stepper import Stepper
from sparring.services.process.runtime import MATCHES, Context


def share_of_update(behavior: BehaviorSettings) -> int:
    """Returns the steps of a behavior that are a large part of its update."""
    return max(1, behavior.hyperparameters.update_steps // 16)


class StepOutbox:
    """A StepOutbox sends the steps of a stepper through the queue "steps".

    Args:
        context: of the service.
        stepper: source of the steps.
        sender: end of the queue.
        behaviors: settings by behavior name, which may grow.
        on_room: called once gathered steps are sent, so that the next tick can run.

    Attributes:
        rows: gathered rows that are not sent yet.
        is_full: gathered steps must be sent before the next tick; they may wait for credit.
    """

    def __init__(
        self,
        context: Context,
        stepper: Stepper,
        sender: Sender[StepBatch],
        behaviors: Mapping[str, BehaviorSettings],
        on_room: Callable[[], None],
    ) -> None:
        self._on_room = on_room
        self.rows = 0
        self.is_full = False
        self._context = context
        self._stepper = stepper
        self._sender = sender
        self._behaviors = behaviors
        self._bytes = 0  # of the observations of `rows`
        self._gathered = anyio.Event()
        self._due = anyio.Event()
        self._sent = anyio.Event()

    def gather(self, result: TickResult) -> None:
        """Counts the steps of a tick."""
        if self._stepper.has_steps:
            self.rows += max(1, result.rows)
            self._bytes += result.bytes
            self._gathered.set()
        if self.rows >= GATHERED_STEPS or self._bytes >= GATHERED_BYTES:
            self.flush()

    def flush(self) -> None:
        """Requests that gathered steps are sent before the next tick."""
        if self._stepper.has_steps:
            self.is_full = True
            self._due.set()

    async def drain(self) -> None:
        """Waits until all gathered steps are sent."""
        while self.is_full or self._stepper.has_steps:
            self.flush()
            await self._sent.wait()

    async def run(self) -> None:
        """Sends gathered steps, when they are due or after a short time, however few they are, until cancelled.

        A message costs the services a millisecond, whatever its size; a learner with a small buffer waits for each of
        its steps.
        """
        while True:
            await self._gathered.wait()
            share = min(map(share_of_update, self._behaviors.values()))
            for wait_s in (GATHERING_S, GATHERING_MOST_S - GATHERING_S):
                with anyio.move_on_after(wait_s):
                    await self._due.wait()
                if self.rows >= share:
                    break
            await self._send()

    async def _send(self) -> None:
        run, self.is_full = self._context.run, True
        while self._stepper.has_steps:
            introduces, rows = self._stepper.introduced, self.rows
            parts = self._stepper.take_steps()
            self.rows = self._bytes = 0
            self._context.progress.waits(ALL, "credit.steps", run.assembly_of(self._context.service))
            await self._sender.put(StepBatch(source=self._context.start, parts=parts, introduces=introduces), rows)
            self._context.progress.works()
        self.is_full = False
        self._sent.set()
        self._gathered, self._due, self._sent = anyio.Event(), anyio.Event(), anyio.Event()
        self._on_room()

    async def introduce(self, behaviors: Iterable[str]) -> None:
        """Announces this incarnation to assembly, which then closes what a former one left open."""
        none, no_rows = np.empty(0, np.int64), np.empty((0, 5), np.int32)
        no_steps = partial(BehaviorSteps, produced_before=0, ticks=none, completed=none, rows=no_rows)
        parts = tuple(no_steps(behavior=name) for name in behaviors)
        await self._sender.put(StepBatch(source=self._context.start, parts=parts, introduces=True), 0)


class MatchOutbox:
    """A MatchOutbox sends results through the queue "matches", and sends them again to a restarted coordination.

    Args:
        context: of the service.
        matches: whose results are sent.
        sender: end of the queue; it acknowledges what is on disk.
    """

    def __init__(self, context: Context, matches: Matches, sender: Sender[Results]) -> None:
        self._context = context
        self._matches = matches
        self._sender = sender
        self._unsaved: deque[Results] = deque()
        self._put = 0  # of these, those put since the present coordination started
        self._acknowledged = 0
        self._ended = anyio.Event()
        self._saved = anyio.Event()
        self._turn = anyio.CancelScope()
        sender.on_acknowledged(self._forget)
        sender.on_receiver(self._begin_again)

    def gather(self) -> None:
        """Takes the results of matches that have ended."""
        if results := self._matches.take(self._context.start):
            self._unsaved += results
            self._ended.set()

    async def send(self) -> None:
        """Sends results until cancelled."""
        while True:
            with anyio.CancelScope() as self._turn:
                await self._send_to_present()

    async def drain(self) -> None:
        """Waits until all results are on disk."""
        while self._unsaved:
            self._saved = anyio.Event()
            await self._saved.wait()

    async def _send_to_present(self) -> None:
        while True:
            while self._put < len(self._unsaved):
                results = self._unsaved[self._put]
                self._context.progress.waits(MATCHES, f"{CREDIT}{MATCHES}", "coordination")
                await self._sender.put(results, len(results.numbers))
                self._context.progress.works(MATCHES)
                self._put += 1
            self._ended = anyio.Event()
            await self._ended.wait()

    def _forget(self, messages: int, _steps: int) -> None:
        for _ in range(messages - self._acknowledged):
            self._unsaved.popleft()
            self._put -= 1
        self._acknowledged = messages
        self._saved.set()

    def _begin_again(self, _receivers: int) -> None:
        """Sends all from the first on: a result that waits for credit must not overtake those before it."""
        self._put = 0
        self._turn.cancel()
