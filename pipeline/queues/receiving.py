"""Implements the receiver's half of a queue without I/O; `credit` explains the rules."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from sparring.pipeline.errors import CodecError, Empty
from sparring.pipeline.queues.interface import Capacity
from sparring.pipeline.queues.shares import Share, Shares
from sparring.pipeline.queues.wire import Data, EndId, Grant, SenderBye, SenderHello, Timing, parse_id

REMEMBERED: Final = 64
"""Departed senders that are remembered: one may have been silent only, or its messages may arrive late."""
READINGS: Final = 3
"""UnreadableData copies of a message after which the error is logged, and only Hellos cause further copies."""


@dataclass(slots=True, eq=False)
class KnownSender:
    """Holds a receiver's view of a sender.

    Attributes:
        route: address of its Grants; opaque here.
        expected: sequence number accepted next.
        introduced: it has named this receiver in a Hello; earlier messages were sent to a predecessor.
        present: it has sent a message lately.
        gone: it will not return, because it closed or a later incarnation replaced it.
        echo: serial of its latest Hello, which reported `sent`.
        share: share that it may fill, None while it waits for one.
        pending: messages that arrived and are not acknowledged, in sequence; `queue` holds those not handed out.
        fresh_messages: messages of credit returned since the last Grant, `fresh_steps` the steps.
        due: time of the next Grant.
        unreadable: times in a row that the message expected next has arrived and could not be decoded.
    """

    id: str
    end_id: EndId
    route: Any
    expected: int
    last_seen_at: float
    introduced: bool = False
    present: bool = True
    gone: bool = False
    echo: int = 0
    sent: int = 0
    ask: bool = False
    share: Share | None = None
    pending: deque[ReceivedMessage] = field(default_factory=deque)
    queue: deque[ReceivedMessage] = field(default_factory=deque)
    fresh_messages: int = 0
    fresh_steps: int = 0
    due: float = math.inf
    unreadable: int = 0


@dataclass(slots=True, eq=False)
class ReceivedMessage:
    """Holds a message that has arrived and is charged to `share` in `tenure`."""

    peer: KnownSender
    steps: int
    record: Any
    share: Share
    tenure: int
    acknowledged: bool = False


class ReceiverState:
    """Accepts, queues and acknowledges the messages of all senders of a queue.

    Args:
        receiver: id of this end.
        capacity: bounds the messages held here together with those that present senders have sent.
        timing: intervals.
        unpack: turns a payload into a record; after a CodecError the message is sent again until it can be read.
        on_discard: called with the sender's id and the error, once per message with several unreadable copies.

    Raises:
        QueueError: a sender's share would hold no message or no step.
    """

    def __init__(
        self,
        receiver: str,
        capacity: Capacity,
        timing: Timing,
        unpack: Callable[[Any], Any] = lambda payload: payload,
        on_discard: Callable[[str, CodecError], None] = lambda _sender, _error: None,
    ) -> None:
        self.receiver = receiver
        self.capacity = capacity
        self.shares = Shares(capacity)
        self._timing = timing
        self._unpack = unpack
        self._on_discard = on_discard
        self.queued_messages = 0
        self.queued_steps = 0
        self.got_messages = 0
        self.got_steps = 0
        self.duplicates = 0
        self.discarded = 0
        self.refused = 0  # early, damaged, from an unknown sender, or beyond its sender's share
        self._peers: dict[str, KnownSender] = {}  # present or remembered
        self._latest: dict[str, KnownSender] = {}  # by name
        self._departed: dict[str, None] = {}  # oldest first
        self._orphaned: deque[KnownSender] = deque()  # departed, with messages in their queues
        self._ring: deque[KnownSender] = deque()  # present, with messages in their queues; next turn first
        self._due: dict[str, KnownSender] = {}
        self._replies_to_unknown: dict[Any, Grant] = {}
        self._next_due = math.inf

    @property
    def senders(self) -> int:
        """Returns the number of present senders."""
        return sum(peer.present for peer in self._peers.values())

    @property
    def deadline(self) -> float:
        """Returns the latest time at which `tick` or `outgoing` has something to do, if nothing else happens."""
        oldest = min((peer.last_seen_at for peer in self._peers.values() if peer.present), default=math.inf)
        return min(self.next_grant, oldest + self._timing.peer_timeout)

    @property
    def next_grant(self) -> float:
        """Returns the latest time at which `outgoing` has a Grant, if nothing else happens."""
        return -math.inf if self._replies_to_unknown else self._next_due

    # ------------------------------------------------------------ events

    def on_hello(self, now: float, hello: SenderHello, route: Any) -> None:
        """Handles a sender's introduction or question."""
        peer = self._peers.get(hello.sender) or self._register(now, hello, route)
        if peer is None:
            return
        if peer.gone:
            self._reject(route, superseded=True)
            return
        if not peer.present:
            peer.present = True
            del self._departed[peer.id]
            self._move(peer, self._orphaned, self._ring)
            peer.share = self.shares.claim(peer.id)
        peer.last_seen_at = now
        peer.route = route
        if hello.receiver == self.receiver:
            peer.introduced = True
            peer.expected = max(peer.expected, hello.oldest)
        if hello.serial > peer.echo:
            peer.echo, peer.sent = hello.serial, hello.sent if peer.introduced else 0
        self._schedule(peer, now)

    def _register(self, now: float, hello: SenderHello, route: Any) -> KnownSender | None:
        """Adds a sender in its predecessor's place; returns None for one that is no longer the latest."""
        try:
            end_id = parse_id(hello.sender)
        except ValueError:
            self.refused += 1
            return None
        former = self._latest.get(end_id.name)
        if former is not None and former.end_id.order >= end_id.order:
            self._reject(route, superseded=True)
            return None
        peer = KnownSender(hello.sender, end_id, route, 0, now)
        self._peers[peer.id] = self._latest[end_id.name] = peer
        peer.share = self.shares.claim(peer.id, first=former is not None)
        if former is not None:
            self._depart(former, permanently=True)
        return peer

    def on_data(self, now: float, data: Data, route: Any) -> bool:
        """Handles a message; returns whether it was new and in sequence, and is now held here."""
        peer = self._peers.get(data.sender)
        if peer is None or not peer.present:
            self.refused += 1
            self._reject(route, superseded=False)
            return False
        peer.last_seen_at = now
        if not peer.introduced:
            self._ask_again(now, peer)
            return False
        if data.sequence < peer.expected:
            self.duplicates += 1
            self._schedule(peer, now)
            return False
        if data.sequence > peer.expected or not self.shares.charge(peer.share, data.steps):
            self._ask_again(now, peer)
            return False
        assert peer.share is not None
        return self._read(now, ReceivedMessage(peer, data.steps, None, peer.share, peer.share.tenure), data.payload)

    def _read(self, now: float, entry: ReceivedMessage, payload: Any) -> bool:
        """Queues a readable message; an unreadable one is requested again forever, or its steps would go uncounted."""
        peer = entry.peer
        try:
            entry.record = self._unpack(payload)
        except CodecError as error:
            self.discarded += 1
            peer.unreadable += 1
            if peer.unreadable == READINGS:
                self._on_discard(peer.id, error)
            self.shares.discharge(entry.share, entry.tenure, entry.steps)
            self._ask_again(now, peer)
            return False
        peer.unreadable = 0
        peer.expected += 1
        peer.pending.append(entry)
        self._queue(entry)
        return True

    def _queue(self, entry: ReceivedMessage) -> None:
        peer = entry.peer
        if not peer.queue:
            self._ring.append(peer)
        peer.queue.append(entry)
        self.queued_messages += 1
        self.queued_steps += entry.steps

    def _ask_again(self, now: float, peer: KnownSender) -> None:
        self.refused += 1
        if peer.unreadable < READINGS:  # else the sender's next Hello causes another copy
            peer.ask = True
            self._schedule(peer, now)

    def on_bye(self, bye: SenderBye) -> None:
        """Handles the orderly end of a sender."""
        peer = self._peers.get(bye.sender)
        if peer is not None:
            self._depart(peer, permanently=True)

    def tick(self, now: float) -> None:
        """Removes senders that were silent for too long; a Hello brings one back.

        Deliver all arrived messages first: a busy receiver must not lose its senders.
        """
        timeout = self._timing.peer_timeout
        for peer in [peer for peer in self._peers.values() if peer.present and peer.last_seen_at + timeout <= now]:
            self._depart(peer, permanently=False)

    # ------------------------------------------------------------ handing out

    def take(self) -> ReceivedMessage:
        """Returns the next message: first those of departed senders, then one of each sender in turn.

        Raises:
            Empty: no message has arrived.
        """
        waiting = self._orphaned or self._ring
        if not waiting:
            raise Empty("got no message; expected one that has arrived; wait with get() instead")
        peer = waiting.popleft()
        entry = peer.queue.popleft()
        if peer.queue:
            waiting.append(peer) if peer.present else waiting.appendleft(peer)
        self.queued_messages -= 1
        self.queued_steps -= entry.steps
        self.got_messages += 1
        self.got_steps += entry.steps
        return entry

    def acknowledge(self, now: float, entry: ReceivedMessage) -> None:
        """Acknowledges a message, which takes effect when all earlier ones of its sender are acknowledged."""
        entry.acknowledged = True
        peer = entry.peer
        while peer.pending and peer.pending[0].acknowledged:
            done = peer.pending.popleft()
            self.shares.discharge(done.share, done.tenure, done.steps)
            owner = self._peers.get(done.share.owner)
            if owner is not None:
                self._freed(now, owner, done.steps)
            if peer.present and owner is not peer:
                self._freed(now, peer, done.steps)

    def _freed(self, now: float, peer: KnownSender, steps: int) -> None:
        """Schedules the Grant of returned credit: at once from a quarter of a share, else shortly."""
        peer.fresh_messages += 1
        peer.fresh_steps += steps
        urgent = (
            4 * peer.fresh_messages >= self.shares.share_messages or 4 * peer.fresh_steps >= self.shares.share_steps
        )
        self._schedule(peer, now if urgent else now + self._timing.acknowledge)

    # ------------------------------------------------------------ grants

    def outgoing(self, now: float) -> list[tuple[Any, Grant]]:
        """Returns the Grants to send now, each with its route; an infinite `now` returns all that are not sent yet."""
        out = list(self._replies_to_unknown.items())
        self._replies_to_unknown.clear()
        if self._next_due <= now:
            for peer in [peer for peer in self._due.values() if peer.due <= now]:
                out.append((peer.route, self._grant(peer)))
                del self._due[peer.id]
            self._next_due = min((peer.due for peer in self._due.values()), default=math.inf)
        return out

    def _grant(self, peer: KnownSender) -> Grant:
        messages, steps = self.shares.granted(peer.share)
        ask, peer.ask = peer.ask, False
        peer.fresh_messages = peer.fresh_steps = 0
        peer.due = math.inf
        return Grant(
            receiver=self.receiver,
            echo=peer.echo,
            messages=messages,
            steps=steps,
            largest=self.capacity.largest,
            whole=self.shares.share_steps,
            received=peer.expected,
            acknowledged=peer.expected - len(peer.pending),
            missing=peer.expected < peer.sent,
            ask=ask,
        )

    def _schedule(self, peer: KnownSender, due: float) -> None:
        if due < peer.due:
            peer.due = due
            self._due[peer.id] = peer
            self._next_due = min(self._next_due, due)

    def _reject(self, route: Any, *, superseded: bool) -> None:
        """Replies to a sender that is unknown, or no longer the latest of its name."""
        self._replies_to_unknown[route] = Grant(
            receiver=self.receiver,
            echo=0,
            messages=0,
            steps=0,
            largest=self.capacity.largest,
            whole=self.shares.share_steps,
            received=0,
            acknowledged=0,
            ask=not superseded,
            superseded=superseded,
        )

    # ------------------------------------------------------------ departures

    def _depart(self, peer: KnownSender, *, permanently: bool) -> None:
        """Frees the share of a sender that has left; its queued messages stay and are handed out first."""
        peer.gone |= permanently
        if not peer.present:
            return
        peer.present = False
        peer.due = math.inf
        self._due.pop(peer.id, None)
        self._move(peer, self._ring, self._orphaned)
        self._vacate(peer)
        self._departed[peer.id] = None
        for id_ in [*self._departed][:-REMEMBERED]:
            if not self._peers[id_].pending:
                self._forget(self._peers[id_])

    def _vacate(self, peer: KnownSender) -> None:
        self.shares.withdraw(peer.id)
        if peer.share is None:
            return
        share, peer.share = peer.share, None
        successor = self._peers.get(self.shares.release(share))
        if successor is not None:
            successor.share = share
            self._schedule(successor, -math.inf)

    def _move(self, peer: KnownSender, source: deque[KnownSender], target: deque[KnownSender]) -> None:
        if peer.queue:
            source.remove(peer)
            target.append(peer)

    def _forget(self, peer: KnownSender) -> None:
        del self._peers[peer.id], self._departed[peer.id]
        if self._latest.get(peer.end_id.name) is peer:
            del self._latest[peer.end_id.name]
