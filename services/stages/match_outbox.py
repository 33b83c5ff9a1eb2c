"""Stepping reports the results of matches to coordination, until coordination has them on disk."""

from collections import deque

import anyio

from sparring.pipeline.messages.matches import Results
from sparring.pipeline.monitoring.progress import CREDIT
from sparring.pipeline.queues.interface import Sender
from sparring.pipeline.stepping.matches import Matches
from sparring.services.process.runtime import MATCHES, Context


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
