"""A seeded network that loses, delays, repeats, reorders, damages and blocks messages.

The ends and frames are those of the ZeroMQ transport, so the real decoder reads damaged messages. A damaged message is
never another valid one, because CURVE and the checksums of TCP would detect that, not the queues.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final, Protocol

import trio

from sparring.pipeline.errors import CodecError
from sparring.pipeline.messages.codec import Buffer
from sparring.pipeline.queues.ends import Timer
from sparring.pipeline.queues.wire import Data, Packed, TopicUpdate, decode
from tests.world.world_schedule import RunQueue

LATENCY_S: Final = 0.0005
GRID_S: Final = 0.001
Deliver = Callable[[Sequence[Buffer]], None]


@dataclass(frozen=True, kw_only=True)
class LinkConditions:
    """The effects of a link on messages.

    Attributes:
        lost: share of messages that never arrive; `repeated` arrive twice, `damaged` arrive broken.
        delay_s: longest delay beyond the usual one.
        disorder: whether later messages may overtake earlier ones.
        down: whether nothing passes; `held` messages arrive once the link is up again, others are lost.
    """

    lost: float = 0.0
    repeated: float = 0.0
    damaged: float = 0.0
    delay_s: float = 0.0
    disorder: bool = False
    down: bool = False
    held: bool = False


CALM = LinkConditions()


class Watcher(Protocol):
    """Receives every event of the network."""

    def event(self, kind: str, *about: Any) -> None:
        """Records an event."""

    def sent(self, source: str, target: str, frames: Sequence[Buffer]) -> None:
        """Records a message that is sent."""


class Lane:
    """One direction between two ends, which keeps the order unless conditions say otherwise."""

    def __init__(self, source: str, target: str) -> None:
        self.source = source
        self.target = target
        self.latest = 0.0


class Network:
    """All links of a world.

    Args:
        chance: random source for the effects on each message.
        watcher: receives each event.
        queue: run queue of the scheduler, which knows the parts that hang.
    """

    def __init__(self, chance: Random, watcher: Watcher, queue: RunQueue) -> None:
        self.chance = chance
        self.watcher = watcher
        self.queue = queue
        self.conditions: dict[frozenset[str], LinkConditions] = {}
        self.listening: dict[str, Any] = {}  # links of receivers and publishers by name
        self.connected: dict[str, list[Any]] = {}  # senders and subscriptions by name
        self._waiting: dict[str, list[tuple[Callable[[Any], None], list[Buffer]]]] = {}
        self._numbers = itertools.count()
        self._flying: list[tuple[float, int, Lane, Deliver, Sequence[Buffer], bool]] = []
        self._held: list[tuple[frozenset[str], Lane, Deliver, Sequence[Buffer]]] = []
        self.timer = Timer(trio.current_time, self._due, self._land)

    def between(self, first: str, second: str) -> LinkConditions:
        """Returns the conditions between two parts."""
        if not self.conditions:
            return CALM
        return self.conditions.get(frozenset((first, second))) or self.conditions.get(frozenset()) or CALM

    def clear(self, pair: frozenset[str]) -> None:
        """Restores the link of a pair and sends what was held."""
        self.conditions.pop(pair, None)
        held, self._held = self._held, []
        for key, lane, deliver, frames in held:
            if key == pair:
                self._fly(lane, deliver, frames, LATENCY_S, CALM, damaged=False)
            else:
                self._held.append((key, lane, deliver, frames))

    def post(self, lane: Lane, deliver: Deliver, frames: Sequence[Buffer]) -> None:
        """Sends a message on its way."""
        self.watcher.sent(lane.source, lane.target, frames)
        conditions = self.between(lane.source, lane.target)
        if conditions is CALM:
            self._fly(lane, deliver, frames, LATENCY_S, conditions, damaged=False)
            return
        if conditions.down:
            if conditions.held:
                key = frozenset((lane.source, lane.target))
                self._held.append((key if key in self.conditions else frozenset(), lane, deliver, frames))
            else:
                self.watcher.event("blocked", lane.source, lane.target)
            return
        copies = 1 + (self.chance.random() < conditions.repeated)
        if self.chance.random() < conditions.lost:
            self.watcher.event("lost", lane.source, lane.target)
            copies -= 1
        for _ in range(copies):
            delay = LATENCY_S + self.chance.random() * conditions.delay_s
            self._fly(lane, deliver, frames, delay, conditions, damaged=self.chance.random() < conditions.damaged)

    def _fly(
        self,
        lane: Lane,
        deliver: Deliver,
        frames: Sequence[Buffer],
        delay: float,
        conditions: LinkConditions,
        *,
        damaged: bool,
    ) -> None:
        due = (
            math.ceil((trio.current_time() + delay) / GRID_S) * GRID_S
        )  # a grid has fewer times with more messages at each
        if not conditions.disorder:
            due = lane.latest = max(due, lane.latest)
        heapq.heappush(self._flying, (due, next(self._numbers), lane, deliver, frames, damaged))
        self.timer.advance(due)

    def fly(self, lane: Lane, deliver: Deliver, frames: Sequence[Buffer], delay: float) -> None:
        """Sends bytes of a stream, which arrive in order; a link that is down holds them until it is up again."""
        conditions = self.between(lane.source, lane.target)
        if conditions.down:
            key = frozenset((lane.source, lane.target))
            self._held.append((key if key in self.conditions else frozenset(), lane, deliver, frames))
        else:
            self._fly(lane, deliver, frames, delay, CALM, damaged=False)

    def _due(self) -> float:
        return self._flying[0][0] if self._flying else float("inf")

    def _land(self) -> None:
        now = trio.current_time()
        while self._flying and self._flying[0][0] <= now:
            _, _, lane, deliver, frames, damaged = heapq.heappop(self._flying)
            if damaged:
                frames = damage(frames, self.chance)
                self.watcher.event("damaged", lane.source, lane.target)
            if self.queue.hangs(lane.target):
                self.queue.keep(lane.target, lambda deliver=deliver, frames=frames: deliver(frames))  # type: ignore[misc]
            else:
                deliver(frames)

    # ---------------------------------------------------------------- listening ends

    def later(self, key: str, post: Callable[[Any], None], frames: list[Buffer]) -> None:
        """Keeps frames for `key`, at which no end listens yet, as the sender's socket would."""
        self._waiting.setdefault(key, []).append((post, frames))

    def opened(self, key: str) -> None:
        """Delivers what was kept for `key` to the end that listens now, to which all others connect."""
        for post, frames in self._waiting.pop(key, []):
            post(frames)
        for end in self.connected.get(key, ()):
            lane = Lane(self.listening[key].transport.part, end._link.transport.part)
            if not self.between(lane.source, lane.target).down:
                self._fly(lane, end._link.reconnected, (), LATENCY_S, CALM, damaged=False)


def damage(frames: Sequence[Buffer], chance: Random) -> list[Buffer]:
    """Returns a damaged message that cannot be decoded."""
    broken = [bytearray(frame) for frame in frames]
    kind = chance.randrange(5)
    at = chance.randrange(len(broken))
    if kind == 0 and len(broken) > 1:
        del broken[1:]
    elif kind == 1:
        broken.append(bytearray(chance.randbytes(8)))
    elif kind == 2:
        del broken[at][chance.randrange(len(broken[at]) + 1) :]
    elif kind == 3:
        start = chance.randrange(len(broken[at]) + 1)
        broken[at][start : start + 8] = chance.randbytes(8)
    else:
        broken = [bytearray(chance.randbytes(chance.randrange(40)))]
    parts: list[Buffer] = [bytes(frame) for frame in broken]
    is_whole = parts == [bytes(frame) for frame in frames] or _reads(parts)
    return [bytes(frames[0][: len(frames[0]) // 2])] if is_whole else parts


def _reads(frames: Sequence[Buffer]) -> bool:
    """Returns whether an end would decode a message; errors other than CodecError count as decoded."""
    try:
        message = decode(frames)
        if isinstance(message, Data | TopicUpdate) and message.payload != Packed(()):
            message.payload.unpack(object)
    except CodecError:
        return False
    except Exception:
        return False
    return True
