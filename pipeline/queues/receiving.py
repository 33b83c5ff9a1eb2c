"""Implements the receiver's half of a queue without I/O; `sending` explains the rules."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from sparring.pipeline.errors import CodecError, Empty, QueueError
from sparring.pipeline.queues.ends import Waits
from sparring.pipeline.queues.wire import Capacity, Data, EndId, Grant, Payload, SenderHello, Timing, parse_id

REMEMBERED: Final = 64
"""Departed senders that are remembered: one may have been silent only, or its messages may arrive late."""
MOST_SENDERS: Final = 1024
"""Senders present at once, with a share or waiting for one."""
READINGS: Final = 3
"""Unreadable copies of a message after which the error is logged, and only Hellos cause further copies."""

T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class ReceiverStatistics(Waits):
    """Counts the messages of a receiving end since it was opened.

    Attributes:
        queued_messages: messages that have arrived and are not handed out, with `queued_steps` steps in them.
        held_messages: these, and messages handed out and not acknowledged, with `held_steps` steps in them.
        got_messages: messages handed out.
        duplicates: messages dropped because they had been seen.
        discarded: copies that could not be decoded; requested again, and logged after several failures.
        refused: messages that were early, from an unknown sender, or beyond its sender's share.
        senders: senders present now.
        waits: gets that had to wait, for `waited_s` seconds in total.
        fullest_messages: most messages ever held at once; never above the capacity.
    """

    queued_messages: int = 0
    queued_steps: int = 0
    held_messages: int = 0
    held_steps: int = 0
    got_messages: int = 0
    got_steps: int = 0
    duplicates: int = 0
    discarded: int = 0
    refused: int = 0
    senders: int = 0
    fullest_messages: int = 0
    fullest_steps: int = 0


@dataclass(slots=True, eq=False)
class KnownSender(Generic[T]):
    """Holds a receiver's view of a sender.

    Attributes:
        route: address of its Grants; opaque here.
        expected: sequence number accepted next.
        introduced: it has named this receiver in a Hello; earlier messages were sent to a predecessor.
        present: it has sent a message lately.
        gone: it will not return, because it closed or a later incarnation replaced it.
        echo: serial of its latest Hello.
        share: those whose messages are charged to the same share as its own; the present owner of the share is last.
        pending: messages that arrived and are not acknowledged, in sequence; `queue` holds those not handed out.
        pending_steps: steps in them.
        fresh_messages: messages of credit returned since the last Grant, `fresh_steps` the steps.
        due: time of the next Grant.
        unreadable: times in a row that the message expected next has arrived and could not be decoded.
    """

    id: str
    end_id: EndId
    route: Hashable
    last_seen_at: float
    expected: int = 0
    introduced: bool = False
    present: bool = True
    gone: bool = False
    echo: int = 0
    ask: bool = False
    share: list[KnownSender[T]] = field(default_factory=list)
    pending: deque[ReceivedMessage[T]] = field(default_factory=deque)
    pending_steps: int = 0
    queue: deque[ReceivedMessage[T]] = field(default_factory=deque)
    fresh_messages: int = 0
    fresh_steps: int = 0
    due: float = math.inf
    unreadable: int = 0


@dataclass(slots=True, eq=False)
class ReceivedMessage(Generic[T]):
    """Holds a message that has arrived."""

    peer: KnownSender[T]
    steps: int
    record: T
    acknowledged: bool = False


@dataclass(eq=False)
class ReceiverState(Generic[T]):
    """Accepts, queues and acknowledges the messages of all senders of a queue.

    Attributes:
        receiver: id of this end.
        record: type of the records; any other is unreadable, and sent again until it can be read.
        capacity: bounds the messages held here together with those that present senders have sent.
        timing: intervals.
        on_discard: called with the sender's id and the error, once per message with several unreadable copies.

    Raises:
        QueueError: a sender's share would hold no message or no step.
    """

    receiver: str
    record: type[T]
    capacity: Capacity
    timing: Timing
    on_discard: Callable[[str, CodecError], None] = lambda _sender, _error: None

    def __post_init__(self) -> None:
        capacity = self.capacity
        if capacity.senders < 1 or min(capacity.messages, capacity.steps) < capacity.senders:
            raise QueueError(
                f"got {capacity}; expected at least one sender, and a message and a step for each; "
                "raise messages and steps or lower senders"
            )
        self.counts = ReceiverStatistics()
        self._share_messages = capacity.messages // capacity.senders
        self._share_steps = capacity.steps // capacity.senders
        self._shares: list[list[KnownSender[T]]] = [[] for _ in range(capacity.senders)]
        self._peers: dict[str, KnownSender[T]] = {}  # the latest of each name, present or remembered
        self._orphaned: deque[KnownSender[T]] = deque()  # departed, with messages in their queues
        self._ring: deque[KnownSender[T]] = deque()  # present, with messages in their queues; next turn first
        self._replies_to_unknown: dict[Hashable, Grant] = {}

    @property
    def senders(self) -> int:
        """Returns the number of present senders."""
        return sum(peer.present for peer in self._peers.values())

    @property
    def deadline(self) -> float:
        """Returns the latest time at which `tick` or `outgoing` has something to do, if nothing else happens."""
        if self._replies_to_unknown:
            return -math.inf
        present, timeout = (peer for peer in self._peers.values() if peer.present), self.timing.peer_timeout
        return min((min(peer.due, peer.last_seen_at + timeout) for peer in present), default=math.inf)

    # ------------------------------------------------------------ events

    def on_hello(self, now: float, hello: SenderHello, route: Hashable) -> None:
        """Handles a sender's introduction, question or last message."""
        peer = self._peers.get(hello.sender)
        if hello.leaving:
            if peer is not None:
                self._depart(peer, permanently=True)
                self._assign_shares(now, self._peers.values())
            return
        peer = peer or self._register(now, hello, route)
        if peer is None:
            return
        if peer.gone:
            self._reject(route, superseded=True)
            return
        peer.present, peer.last_seen_at, peer.route = True, now, route
        if hello.receiver == self.receiver:
            peer.introduced = True
            peer.expected = max(peer.expected, hello.oldest)
        peer.echo = max(peer.echo, hello.serial)
        self._assign_shares(now, [peer, *self._peers.values()])
        self._schedule(peer, now)

    def _register(self, now: float, hello: SenderHello, route: Hashable) -> KnownSender[T] | None:
        """Adds a sender in its predecessor's place; returns None for one that is no longer the latest."""
        try:
            end_id = parse_id(hello.sender)
        except ValueError:
            self.counts.refused += 1
            return None
        former = next((peer for peer in self._peers.values() if peer.end_id.name == end_id.name), None)
        if former is not None:
            if former.end_id.order >= end_id.order:
                self._reject(route, superseded=True)
                return None
            self._depart(former, permanently=True)
            del self._peers[former.id]
        if self.senders >= MOST_SENDERS:
            self.counts.refused += 1
            return None
        departed = [peer.id for peer in self._peers.values() if not (peer.present or peer.pending)]
        for id_ in departed[:-REMEMBERED]:
            del self._peers[id_]
        self._peers[hello.sender] = KnownSender(hello.sender, end_id, route, now)
        return self._peers[hello.sender]

    def on_data(self, now: float, data: Data, route: Hashable) -> bool:
        """Handles a message; returns whether it was new and in sequence, and is now held here."""
        peer = self._peers.get(data.sender)
        if peer is None or not peer.present:
            self.counts.refused += 1
            self._reject(route, superseded=False)
            return False
        peer.last_seen_at = now
        if peer.introduced and data.sequence < peer.expected:
            self.counts.duplicates += 1
            self._schedule(peer, now)
            return False
        if not peer.introduced or data.sequence > peer.expected or not self._has_room(peer, data.steps):
            self._ask_again(now, peer)
            return False
        return self._read(now, peer, data.steps, data.payload)

    def _has_room(self, peer: KnownSender[T], steps: int) -> bool:
        most_messages, most_steps = self._granted(peer)
        return len(peer.pending) < most_messages and 0 <= steps <= most_steps - peer.pending_steps

    def _granted(self, peer: KnownSender[T]) -> tuple[int, int]:
        """Returns the messages and steps that a sender may have unacknowledged: what others left of its share."""
        if not (peer.share and peer.share[-1] is peer):
            return 0, 0
        former = peer.share[:-1]
        messages = self._share_messages - sum(len(one.pending) for one in former)
        return messages, self._share_steps - sum(one.pending_steps for one in former)

    def _read(self, now: float, peer: KnownSender[T], steps: int, payload: Payload) -> bool:
        """Queues a readable message; an unreadable one is requested again forever, or its steps would go uncounted."""
        try:
            entry = ReceivedMessage(peer, steps, payload.unpack(self.record))
        except CodecError as error:
            self.counts.discarded += 1
            peer.unreadable += 1
            if peer.unreadable == READINGS:
                self.on_discard(peer.id, error)
            self._ask_again(now, peer)
            return False
        peer.unreadable = 0
        peer.expected += 1
        if not peer.queue:
            self._ring.append(peer)
        peer.pending.append(entry)
        peer.queue.append(entry)
        peer.pending_steps += steps
        counts = self.counts
        counts.queued_messages += 1
        counts.queued_steps += steps
        counts.held_messages += 1
        counts.held_steps += steps
        counts.fullest_messages = max(counts.fullest_messages, counts.held_messages)
        counts.fullest_steps = max(counts.fullest_steps, counts.held_steps)
        return True

    def _ask_again(self, now: float, peer: KnownSender[T]) -> None:
        self.counts.refused += 1
        if peer.unreadable < READINGS:  # else the sender's next Hello causes another copy
            peer.ask = True
            self._schedule(peer, now)

    def tick(self, now: float) -> None:
        """Removes senders that were silent for too long; a Hello brings one back.

        Deliver all arrived messages first: a busy receiver must not lose its senders.
        """
        timeout = self.timing.peer_timeout
        for peer in [peer for peer in self._peers.values() if peer.present and peer.last_seen_at + timeout <= now]:
            self._depart(peer, permanently=False)
        self._assign_shares(now, self._peers.values())

    def _depart(self, peer: KnownSender[T], *, permanently: bool) -> None:
        """Marks a sender that has left; its queued messages stay and are handed out first."""
        peer.gone |= permanently
        peer.present = False
        peer.due = math.inf
        if peer in self._ring:
            self._ring.remove(peer)
            self._orphaned.append(peer)

    def _assign_shares(self, now: float, peers: Iterable[KnownSender[T]]) -> None:
        """Gives the emptiest free shares to those of these senders that wait for one."""
        for peer in peers:
            if not peer.present or (peer.share and peer.share[-1] is peer):
                continue
            free = [share for share in self._shares if not (share and share[-1].present)]
            if not free:
                return
            peer.share = min(free, key=lambda share: sum(len(one.pending) for one in share))
            peer.share[:] = [*(one for one in peer.share if one.pending and one is not peer), peer]
            self._schedule(peer, now)

    # ------------------------------------------------------------ handing out

    def take(self) -> ReceivedMessage[T]:
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
            self._ring.append(peer) if peer.present else self._orphaned.appendleft(peer)
        self.counts.queued_messages -= 1
        self.counts.queued_steps -= entry.steps
        self.counts.got_messages += 1
        self.counts.got_steps += entry.steps
        return entry

    def acknowledge(self, now: float, entry: ReceivedMessage[T]) -> None:
        """Acknowledges a message, which takes effect when all earlier ones of its sender are acknowledged."""
        entry.acknowledged = True
        peer = entry.peer
        while peer.pending and peer.pending[0].acknowledged:
            steps = peer.pending.popleft().steps
            peer.pending_steps -= steps
            self.counts.held_messages -= 1
            self.counts.held_steps -= steps
            self._credit(now, peer.share[-1], steps)
            if peer is not peer.share[-1]:
                self._credit(now, peer, steps)

    def _credit(self, now: float, peer: KnownSender[T], steps: int) -> None:
        """Schedules the Grant of returned credit: at once from a quarter of a share, else shortly."""
        if peer.present:
            peer.fresh_messages += 1
            peer.fresh_steps += steps
            urgent = 4 * peer.fresh_messages >= self._share_messages or 4 * peer.fresh_steps >= self._share_steps
            self._schedule(peer, now if urgent else now + self.timing.acknowledge)

    # ------------------------------------------------------------ grants

    def outgoing(self, now: float) -> list[tuple[Hashable, Grant]]:
        """Returns the Grants to send now, each with its route; an infinite `now` returns all that are not sent yet."""
        out: list[tuple[Hashable, Grant]] = list(self._replies_to_unknown.items())
        self._replies_to_unknown.clear()
        due = [peer for peer in self._peers.values() if peer.due <= now and peer.due < math.inf]
        return out + [(peer.route, self._grant(peer)) for peer in due]

    def _grant(self, peer: KnownSender[T]) -> Grant:
        messages, steps = self._granted(peer)
        ask, peer.ask = peer.ask, False
        peer.fresh_messages = peer.fresh_steps = 0
        peer.due = math.inf
        return Grant(
            receiver=self.receiver,
            echo=peer.echo,
            messages=messages,
            steps=steps,
            largest=self.capacity.largest,
            received=peer.expected,
            acknowledged=peer.expected - len(peer.pending),
            ask=ask,
        )

    def _schedule(self, peer: KnownSender[T], due: float) -> None:
        peer.due = min(peer.due, due)

    def _reject(self, route: Hashable, *, superseded: bool) -> None:
        """Replies to a sender that is unknown, or no longer the latest of its name."""
        self._replies_to_unknown[route] = Grant(
            receiver=self.receiver, largest=self.capacity.largest, ask=not superseded, superseded=superseded
        )
