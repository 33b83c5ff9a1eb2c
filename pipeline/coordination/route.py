"""The way of segments through coordination: what assembly still keeps, and what learners have taken."""

from __future__ import annotations

from collections import deque
from typing import Final

from pipeline.coordination.ledger import Ledger
from pipeline.queues.interface import Delivery, ReceivingQueue, SendingQueue

LAST_EPISODES: Final = 100


class Route:
    """One behavior's way from assembly to its learner.

    Attributes:
        held: deliveries that assembly still keeps, oldest first.
        taken_before: steps its learners had taken before this start of coordination.
        taken: steps its learners have taken in all.
    """

    def __init__(self, name: str, ledger: Ledger, receiver: ReceivingQueue, sender: SendingQueue) -> None:
        self.name = name
        self.ledger = ledger
        self.receiver = receiver
        self.sender = sender
        self.held: deque[Delivery] = deque()
        self.taken_before = 0
        self.taken = 0
        self.last_returns: deque[float] = deque(maxlen=LAST_EPISODES)
        self.episodes = 0
        self.done = False
        self._acknowledged = 0
        self._released = 0
        sender.on_acknowledged(self._note_acknowledged)

    @property
    def steps(self) -> int:
        """Steps that have come and that the learner has not acknowledged."""
        return sum(delivery.steps for delivery in self.held) + self.receiver.statistics().queued_steps

    @property
    def releasable(self) -> int:
        """Deliveries that the learner has acknowledged and assembly still keeps."""
        return self._acknowledged - self._released

    def release(self, count: int) -> None:
        """Acknowledges the oldest `count` deliveries to assembly."""
        for _ in range(count):
            self.held.popleft().acknowledge()
        self._released += count

    def _note_acknowledged(self, messages: int, steps: int) -> None:
        self._acknowledged = messages
        self.taken = self.taken_before + steps
