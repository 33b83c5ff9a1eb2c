"""The rules of a queue without I/O: credit, acknowledgement, resending, duplicates, fairness.

`SenderState` and `ReceiverState` never wait, send or look at a clock. A shell hands them what
arrives with the time, and sends what `outgoing` returns at the latest at `deadline`. The link
between them may lose, delay, duplicate and reorder; a message is handed out once and in its
sender's order all the same, as long as both ends live.

What a receiver grants is one of `Capacity.senders` equal shares. Each share bounds what its sender
has put and the receiver has not acknowledged, so that what is queued, handed out and on its way
never exceeds the capacity, whichever of the two is where.

A receiver accepts a sender's messages in sequence only. One that comes early tells it that
something was lost: it asks for a Hello, and the reply to a Hello that came after lost messages
(`missing`) has them sent again. Tying that to the reply keeps news that crossed on the link from
sending things twice.
"""

from __future__ import annotations

from sparring.pipeline.queues.receiving import ReceivedMessage, ReceiverState
from sparring.pipeline.queues.sending import SenderState

__all__ = ["ReceivedMessage", "ReceiverState", "SenderState"]
