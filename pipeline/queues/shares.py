"""Who may use which share of a receiver's capacity.

The capacity is cut into `Capacity.senders` equal shares. What arrives is charged to the share its
sender owns and stays charged until it is acknowledged, also when the sender is gone: the next owner
of the share is granted only what is left of it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from sparring.pipeline.errors import QueueError
from sparring.pipeline.queues.interface import Capacity


@dataclass(slots=True, eq=False)
class Share:
    """One share.

    Attributes:
        owner: id of the sender that may fill it, "" for none.
        tenure: counts its owners; what was charged in an earlier tenure is inherited.
        messages: charged to it, `steps` steps in them.
        inherited_messages: of these, what earlier owners left, `inherited_steps` steps in them.
    """

    owner: str = ""
    tenure: int = 0
    messages: int = 0
    steps: int = 0
    inherited_messages: int = 0
    inherited_steps: int = 0


class Shares:
    """The shares of one receiver.

    Raises:
        QueueError: a share would hold no message or no step.
    """

    def __init__(self, capacity: Capacity) -> None:
        if capacity.senders < 1 or min(capacity.messages, capacity.steps) < capacity.senders:
            raise QueueError(
                f"got {capacity}; expected at least one sender, and a message and a step for each; "
                "raise messages and steps or lower senders"
            )
        self.share_messages = capacity.messages // capacity.senders
        self.share_steps = capacity.steps // capacity.senders
        self.messages = 0
        self.steps = 0
        self.fullest_messages = 0
        self.fullest_steps = 0
        self._shares = [Share() for _ in range(capacity.senders)]
        self._waiting: deque[str] = deque()

    def claim(self, sender: str, *, first: bool = False) -> Share | None:
        """The emptiest free share for a sender, or None: then it waits, behind all others unless `first`."""
        free = [share for share in self._shares if not share.owner]
        if not free:
            self._waiting.appendleft(sender) if first else self._waiting.append(sender)
            return None
        share = min(free, key=lambda share: (share.messages, share.steps))
        self._hand_over(share, sender)
        return share

    def withdraw(self, sender: str) -> None:
        """A sender no longer waits for a share."""
        if sender in self._waiting:
            self._waiting.remove(sender)

    def release(self, share: Share) -> str:
        """A share loses its owner. Returns the waiting sender that owns it now, or ""."""
        self._hand_over(share, self._waiting.popleft() if self._waiting else "")
        return share.owner

    def _hand_over(self, share: Share, owner: str) -> None:
        share.owner = owner
        share.tenure += 1
        share.inherited_messages, share.inherited_steps = share.messages, share.steps

    def granted(self, share: Share | None) -> tuple[int, int]:
        """Messages and steps that the owner may have unacknowledged."""
        if share is None:
            return 0, 0
        return self.share_messages - share.inherited_messages, self.share_steps - share.inherited_steps

    def charge(self, share: Share | None, steps: int) -> bool:
        """Charges one message, or returns False if it does not fit."""
        if share is None or share.messages >= self.share_messages or share.steps + steps > self.share_steps:
            return False
        share.messages += 1
        share.steps += steps
        self.messages += 1
        self.steps += steps
        self.fullest_messages = max(self.fullest_messages, self.messages)
        self.fullest_steps = max(self.fullest_steps, self.steps)
        return True

    def discharge(self, share: Share, tenure: int, steps: int) -> None:
        """Gives back what one message took that was charged in `tenure`."""
        share.messages -= 1
        share.steps -= steps
        self.messages -= 1
        self.steps -= steps
        if share.tenure != tenure:
            share.inherited_messages -= 1
            share.inherited_steps -= steps
