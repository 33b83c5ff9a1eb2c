"""Assigns shares of a receiver's capacity to its senders.

The capacity is divided into `Capacity.senders` equal shares. A message is charged to the share that
its sender owns until it is acknowledged, even after the sender has left: the next owner of the share
is granted only what remains.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from sparring.pipeline.errors import QueueError
from sparring.pipeline.queues.interface import Capacity


@dataclass(slots=True, eq=False)
class Share:
    """Counts the messages that are charged to one share of a receiver's capacity.

    Attributes:
        owner: id of the sender that may fill the share, "" for none.
        tenure: number of owners so far; messages charged in an earlier tenure are inherited.
        messages: messages charged to the share, with `steps` steps in them.
        inherited_messages: messages that earlier owners left, with `inherited_steps` steps in them.
    """

    owner: str = ""
    tenure: int = 0
    messages: int = 0
    steps: int = 0
    inherited_messages: int = 0
    inherited_steps: int = 0


class Shares:
    """Divides one receiver's capacity into shares.

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
        """Gives a sender the emptiest free share; None makes it wait, behind all others unless `first`."""
        free = [share for share in self._shares if not share.owner]
        if not free:
            self._waiting.appendleft(sender) if first else self._waiting.append(sender)
            return None
        share = min(free, key=lambda share: (share.messages, share.steps))
        self._assign(share, sender)
        return share

    def withdraw(self, sender: str) -> None:
        """Removes a sender from those that wait for a share."""
        if sender in self._waiting:
            self._waiting.remove(sender)

    def release(self, share: Share) -> str:
        """Frees a share; returns the waiting sender that owns it from now on, or ""."""
        self._assign(share, self._waiting.popleft() if self._waiting else "")
        return share.owner

    def _assign(self, share: Share, owner: str) -> None:
        share.owner = owner
        share.tenure += 1
        share.inherited_messages, share.inherited_steps = share.messages, share.steps

    def granted(self, share: Share | None) -> tuple[int, int]:
        """Returns the messages and steps that the owner may have unacknowledged."""
        if share is None:
            return 0, 0
        return self.share_messages - share.inherited_messages, self.share_steps - share.inherited_steps

    def charge(self, share: Share | None, steps: int) -> bool:
        """Charges one message to a share; returns False if it does not fit."""
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
        """Returns the credit of one message that was charged in `tenure`."""
        share.messages -= 1
        share.steps -= steps
        self.messages -= 1
        self.steps -= steps
        if share.tenure != tenure:
            share.inherited_messages -= 1
            share.inherited_steps -= steps
