"""The states of both ends hold the rules of a queue without I/O: credit, acknowledgement, resending, fairness.

`SenderState` and `ReceiverState` never wait, send or read a clock. An end passes them the time and
the messages that arrive, and sends what `outgoing` returns at `deadline` at the latest. The link
between them may lose, delay, duplicate and reorder messages; a message is still handed out once and
in its sender's order, as long as both ends run.

A receiver grants each sender one of `Capacity.senders` equal shares. A share bounds what its sender
has put and the receiver has not acknowledged, so the messages that are queued, handed out and in
transit never exceed the capacity together.

A receiver accepts a sender's messages in sequence only. One that arrives early reveals a loss: the
receiver asks for a Hello, and the Grant that replies to a Hello sent after the lost messages
(`missing`) makes the sender repeat them. Tying the repetition to that reply prevents messages that
crossed on the link from being sent twice.
"""

from __future__ import annotations

from sparring.pipeline.queues.receiving import ReceivedMessage, ReceiverState
from sparring.pipeline.queues.sending import SenderState

__all__ = ["ReceivedMessage", "ReceiverState", "SenderState"]
