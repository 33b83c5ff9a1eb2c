"""The rules of a board without I/O: the latest of each key wins, everyone gets it, nobody is flooded.

Each publication has a revision. A subscriber says the last revision it has (`SubscriberStatus`): at its start,
after what it received, and as a ping. The publisher pushes what is newer in the order of revisions,
and nothing more to that subscriber until it has said that it has it all: so a slow subscriber costs
one copy of each key at most and skips what was replaced meanwhile. Each update names the one it
follows, so that a subscriber takes none after a gap; what two pings have not found there is sent
again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sparring.pipeline.queues.wire import PublisherHeartbeat, SubscriberStatus, Timing, TopicUpdate


@dataclass(slots=True, eq=False)
class Subscriber:
    """A subscriber as its publisher knows it.

    Attributes:
        has: the revision it has; `sent` the last one pushed to it.
        missed: pings that found it without the last push.
        echo: serial of its latest Have.
        answer: it waits for an answer.
    """

    heard_at: float
    has: int = 0
    sent: int = 0
    missed: int = 0
    echo: int = 0
    answer: bool = False


class PublisherState:
    """The publisher's half of a board.

    Args:
        publisher: id of this end.
        timing: intervals.
    """

    def __init__(self, publisher: str, timing: Timing) -> None:
        self.publisher = publisher
        self._timing = timing
        self._revision = 0
        self._latest: dict[str, tuple[int, Any]] = {}  # key: revision and payload, in the order of revisions
        self._followers: dict[Any, Subscriber] = {}
        self._ready: dict[Any, Subscriber] = {}  # those that may have something to hear

    @property
    def subscribers(self) -> int:
        """Subscribers heard of lately."""
        return len(self._followers)

    def publish(self, key: str, payload: Any) -> None:
        """Makes `payload` the latest of `key`."""
        self._revision += 1
        self._latest.pop(key, None)
        self._latest[key] = self._revision, payload
        self._ready.update(self._followers)

    def on_have(self, now: float, have: SubscriberStatus, route: Any) -> None:
        """A subscriber said what it has."""
        if have.leaving:
            self._followers.pop(route, None)
            self._ready.pop(route, None)
            return
        follower = self._followers.setdefault(route, Subscriber(now))
        if have.serial <= follower.echo:
            return
        follower.heard_at = now
        follower.echo = have.serial
        follower.has = have.revision if have.publisher == self.publisher else 0
        follower.answer |= have.answer
        if follower.has < follower.sent:
            follower.missed += have.answer  # the first may have crossed the push on the link
        if follower.has >= follower.sent or follower.missed > 1:
            follower.sent = follower.has
        self._ready[route] = follower

    def outgoing(self, now: float) -> list[tuple[Any, TopicUpdate | PublisherHeartbeat, Any]]:
        """Route, message and payload (None with Alive) of what to send now."""
        out: list[tuple[Any, TopicUpdate | PublisherHeartbeat, Any]] = []
        for route, follower in self._ready.items():
            if now - follower.heard_at >= self._timing.peer_timeout:
                del self._followers[route]
                continue
            pushed = [] if follower.sent > follower.has else self._push(route, follower)
            if follower.answer and not pushed:
                out.append((route, PublisherHeartbeat(publisher=self.publisher, echo=follower.echo), None))
            follower.answer = False
            out += pushed
        self._ready.clear()
        return out

    def farewell(self) -> list[tuple[Any, TopicUpdate | PublisherHeartbeat, Any]]:
        """The last words, to be sent before this end closes: nothing waits for a word from subscribers any more.

        What was pushed and not confirmed may be lost, so it comes once more: nobody will be there to be asked for it.
        """
        for follower in self._followers.values():
            follower.sent = follower.has
        return [pushed for route, follower in self._followers.items() for pushed in self._push(route, follower)]

    def _push(self, route: Any, follower: Subscriber) -> list[tuple[Any, TopicUpdate | PublisherHeartbeat, Any]]:
        """What is newer than what was sent."""
        news = [(key, *entry) for key, entry in self._latest.items() if entry[0] > follower.sent]
        pushed: list[tuple[Any, TopicUpdate | PublisherHeartbeat, Any]] = []
        for key, revision, payload in news:
            update = TopicUpdate(
                publisher=self.publisher, echo=follower.echo, after=follower.sent, revision=revision, key=key
            )
            pushed.append((route, update, payload))
            follower.sent, follower.missed = revision, 0
        return pushed


class SubscriberState:
    """A subscriber's half of a board.

    Args:
        timing: intervals.
        pace: seconds from an update to the word that lets the next one come: 0 for all there is,
            more for a reader that only now and then looks.
    """

    def __init__(self, timing: Timing, pace: float = 0.0) -> None:
        self._timing = timing
        self._pace = pace
        self.publisher = ""
        self.latest: dict[str, Any] = {}
        self.heard_at = -math.inf
        self._revision = 0
        self._serial = 0
        self._believed = 0  # another publisher is believed only if it echoes a later Have than this
        self._said_at = -math.inf
        self._confirm_at = math.inf

    @property
    def deadline(self) -> float:
        """When `outgoing` has something at the latest, if nothing else happens."""
        return min(self._confirm_at, self._said_at + self._timing.heartbeat)

    def linked(self) -> None:
        """The link came up."""
        self._said_at = -math.inf

    def on_alive(self, now: float, message: PublisherHeartbeat | TopicUpdate) -> bool:
        """The publisher was heard. Returns whether it is the present one."""
        if message.publisher != self.publisher:
            if message.echo <= self._believed:
                return False
            self._believed = self._serial
            self.publisher = message.publisher
            self._revision = 0
        self.heard_at = now
        return True

    def on_update(self, now: float, update: TopicUpdate, record: Any) -> bool:
        """A record arrived. Returns whether it is new."""
        if not self.on_alive(now, update):
            return False
        self._confirm_at = min(self._confirm_at, now + self._pace)
        if update.revision <= self._revision or update.after > self._revision:
            return False
        self._revision = update.revision
        self.latest[update.key] = record
        return True

    def outgoing(self, now: float) -> SubscriberStatus | None:
        """What to send now."""
        ping = self._said_at + self._timing.heartbeat <= now
        if not ping and self._confirm_at > now:
            return None
        self._confirm_at = math.inf
        self._serial += 1
        if ping:
            self._said_at = now
        return SubscriberStatus(serial=self._serial, publisher=self.publisher, revision=self._revision, answer=ping)
