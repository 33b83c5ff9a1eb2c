"""A network that does its worst, from one seed: messages are lost, late, repeated, out of order, damaged, cut off.

The ends are the real ones, and what travels are the frames that would travel over ZeroMQ: what arrives damaged meets
the real decoder. A damaged message never reads as another valid one: finding that out is the business of CURVE and of
TCP's checksums, not of the queues.
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
from sparring.pipeline.messages.codec import SERVICES, Buffer
from sparring.pipeline.queues import frames as framing
from sparring.pipeline.queues.receiving_end import ReceivingEnd
from sparring.pipeline.queues.sending_end import SendingEnd
from sparring.pipeline.queues.timer import Timer
from sparring.pipeline.queues.topic_ends import TopicEnd
from tests.world.world_schedule import RunQueue

LATENCY_S: Final = 0.0005
GRID_S: Final = 0.001
Deliver = Callable[[Sequence[Buffer]], None]


@dataclass(frozen=True, kw_only=True)
class Weather:
    """What a link does to messages.

    Attributes:
        lost: share of messages that never arrive; `repeated` arrive twice, `damaged` arrive broken.
        delay_s: longest delay beside the usual one.
        disorder: later messages may overtake.
        cut: nothing passes; `held`: it arrives when the link is whole again, else it is lost.
    """

    lost: float = 0.0
    repeated: float = 0.0
    damaged: float = 0.0
    delay_s: float = 0.0
    disorder: bool = False
    cut: bool = False
    held: bool = False


CALM = Weather()


class Watcher(Protocol):
    """Hears of everything that happens on the network."""

    def event(self, kind: str, *about: Any) -> None:
        """Something happened."""

    def sent(self, source: str, target: str, frames: Sequence[Buffer]) -> None:
        """A message goes out."""


class Lane:
    """One direction between two ends; in order as long as the weather allows."""

    def __init__(self, source: str, target: str) -> None:
        self.source = source
        self.target = target
        self.latest = 0.0


class Network:
    """All links of a world.

    Args:
        chance: decides the fate of each message.
        watcher: hears of each.
        queue: of the scheduler: says who hangs.
    """

    def __init__(self, chance: Random, watcher: Watcher, queue: RunQueue) -> None:
        self.chance = chance
        self.watcher = watcher
        self.queue = queue
        self.weather: dict[frozenset[str], Weather] = {}
        self.receivers: dict[str, tuple[ReceivingEnd, Any]] = {}
        self.topics: dict[str, tuple[TopicEnd, Any]] = {}
        self.senders: dict[str, list[SendingEnd]] = {}
        self._waiting: dict[str, list[tuple[Callable[[Any], None], list[Buffer]]]] = {}
        self._numbers = itertools.count()
        self._flying: list[tuple[float, int, Lane, Deliver, Sequence[Buffer], bool]] = []
        self._held: list[tuple[frozenset[str], Lane, Deliver, Sequence[Buffer]]] = []
        self.timer = Timer(trio.current_time, self._due, self._land)

    def between(self, one: str, other: str) -> Weather:
        """The weather between two parts."""
        if not self.weather:
            return CALM
        return self.weather.get(frozenset((one, other))) or self.weather.get(frozenset()) or CALM

    def clear(self, pair: frozenset[str]) -> None:
        """The weather of a pair is calm again; what was held goes out."""
        self.weather.pop(pair, None)
        held, self._held = self._held, []
        for key, lane, deliver, frames in held:
            if key == pair:
                self._fly(lane, deliver, frames, LATENCY_S, CALM, damaged=False)
            else:
                self._held.append((key, lane, deliver, frames))

    def post(self, lane: Lane, deliver: Deliver, frames: Sequence[Buffer]) -> None:
        """Sends a message on its way."""
        self.watcher.sent(lane.source, lane.target, frames)
        weather = self.between(lane.source, lane.target)
        if weather is CALM:
            self._fly(lane, deliver, frames, LATENCY_S, weather, damaged=False)
            return
        if weather.cut:
            if weather.held:
                key = frozenset((lane.source, lane.target))
                self._held.append((key if key in self.weather else frozenset(), lane, deliver, frames))
            else:
                self.watcher.event("cut off", lane.source, lane.target)
            return
        copies = 1 + (self.chance.random() < weather.repeated)
        if self.chance.random() < weather.lost:
            self.watcher.event("lost", lane.source, lane.target)
            copies -= 1
        for _ in range(copies):
            delay = LATENCY_S + self.chance.random() * weather.delay_s
            self._fly(lane, deliver, frames, delay, weather, damaged=self.chance.random() < weather.damaged)

    def _fly(
        self, lane: Lane, deliver: Deliver, frames: Sequence[Buffer], delay: float, weather: Weather, *, damaged: bool
    ) -> None:
        due = math.ceil((trio.current_time() + delay) / GRID_S) * GRID_S  # fewer moments, more at each
        if not weather.disorder:
            due = lane.latest = max(due, lane.latest)
        heapq.heappush(self._flying, (due, next(self._numbers), lane, deliver, frames, damaged))
        self.timer.advance(due)

    def fly(self, lane: Lane, deliver: Deliver, frames: Sequence[Buffer], delay: float) -> None:
        """Sends bytes of a stream, which come in order; where the link is cut, when it is whole again."""
        weather = self.between(lane.source, lane.target)
        if weather.cut:
            key = frozenset((lane.source, lane.target))
            self._held.append((key if key in self.weather else frozenset(), lane, deliver, frames))
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

    # ---------------------------------------------------------------- who is there

    def later(self, key: str, post: Callable[[Any], None], frames: list[Buffer]) -> None:
        """Nobody listens at `key`: what is said waits for whoever will, as in the socket of who says it."""
        self._waiting.setdefault(key, []).append((post, frames))

    def opened(self, key: str) -> None:
        """Somebody listens."""
        for post, frames in self._waiting.pop(key, []):
            post(frames)


def damage(frames: Sequence[Buffer], chance: Random) -> list[Buffer]:
    """A message that does not read any more."""
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
    return [bytes(frames[0][: len(frames[0]) // 2])] if _reads(parts) else parts


def _reads(frames: Sequence[Buffer]) -> bool:
    """Whether an end would take a message for a valid one. Anything but a CodecError is for the end to meet."""
    try:
        if framing.is_large(frames[0]) or frames[0][:1] == b"D":
            framing.unpack(framing.from_sender(frames).payload, SERVICES)  # type: ignore[union-attr]
        else:
            framing.codec.decode(frames[:1])
            if len(frames) > 1:
                framing.unpack(framing.Payload(frames[1:], 0), SERVICES)
    except CodecError:
        return False
    except Exception:
        return False
    return True
