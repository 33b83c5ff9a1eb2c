"""The path of segments through coordination: what assembly still keeps, and what learners have acknowledged."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

from sparring.pipeline.coordination.ledger import StepLedger
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.state import StreamPositions
from sparring.pipeline.queues.interface import Delivery, ReceivingQueue, SendingQueue

LAST_EPISODES: Final = 100


class Route:
    """One behavior's path from assembly to its learner.

    Attributes:
        held: deliveries that assembly still keeps, oldest first.
        latest: how far the present learner has taken the segments.
    """

    def __init__(self, name: str, ledger: StepLedger, receiver: ReceivingQueue, sender: SendingQueue) -> None:
        self.name = name
        self.ledger = ledger
        self.receiver = receiver
        self.sender = sender
        self.held: deque[Delivery] = deque()
        self.latest: StreamPositions = {}
        self.last_returns: deque[float] = deque(maxlen=LAST_EPISODES)
        self.episodes = 0
        self.done = False
        self._acknowledged = 0
        self._released = 0
        sender.on_acknowledged(self._note_acknowledged)
        sender.on_receiver(lambda _starts: ledger.serve(sender.receiver))

    @property
    def reward_mean(self) -> float | None:
        """Mean return of the last episodes; None before the first."""
        return sum(self.last_returns) / len(self.last_returns) if self.last_returns else None

    @property
    def steps(self) -> int:
        """Steps that have arrived and that the learner has not taken.

        Segments sent again after a restart of coordination count as long as they are queued.
        """
        return sum(map(self._untaken, self.held)) + self.receiver.statistics().queued_steps

    def empty(self) -> None:
        """Holds all that is queued, so that `steps` is exact; nothing is forwarded afterwards."""
        while not self.receiver.empty():
            self.held.append(self.receiver.receive_nowait())

    def _untaken(self, delivery: Delivery) -> int:
        segments: Segments = delivery.record
        taken = self.latest.get(segments.origin, {}).get(segments.source)
        return 0 if taken is not None and segments.sequence <= taken.sequence else delivery.steps

    @property
    def releasable(self) -> int:
        """Deliveries that the learner has acknowledged and assembly still keeps."""
        return self._acknowledged - self._released

    def release(self, count: int) -> None:
        """Acknowledges the oldest `count` deliveries to assembly."""
        for _ in range(count):
            self.held.popleft().acknowledge()
        self._released += count

    def gauges(self) -> Iterator[tuple[str, float]]:
        """Yields name and value of each gauge."""
        step_counts = self.ledger.step_counts()
        for term in ("produced", "trained", "ghost", "stale", "lost", "open"):
            yield f"step_counts.{term}/{self.name}", getattr(step_counts, term)
        yield f"in_flight/{self.name}", self.ledger.in_flight
        yield f"budget/{self.name}", self.ledger.budget
        yield f"episodes/{self.name}", self.episodes
        if self.reward_mean is not None:
            yield f"reward_mean_last100/{self.name}", self.reward_mean

    def to_plain(self) -> dict[str, Any]:
        """Returns all that a restart needs, as plain JSON values."""
        return {
            "ledger": self.ledger.to_plain(),
            "episodes": self.episodes,
            "last_returns": list(self.last_returns),
        }

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Continues from what `to_plain` returned."""
        self.ledger.restore(plain["ledger"])
        if self.sender.receiver:
            self.ledger.serve(self.sender.receiver)
        self.episodes = plain["episodes"]
        self.last_returns.extend(plain["last_returns"])

    def _note_acknowledged(self, messages: int, _steps: int) -> None:
        for delivery in islice(self.held, self._acknowledged - self._released, messages - self._released):
            self.ledger.on_delivered(delivery.record)
        self._acknowledged = messages
