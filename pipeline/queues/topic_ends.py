"""The ends of a board: what waits, on top of the rules in `topic`. Memory and ZeroMQ use the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel

from sparring.pipeline.errors import Closed
from sparring.pipeline.queues.timer import Timer
from sparring.pipeline.queues.topic import PublisherState, SubscriberState
from sparring.pipeline.queues.wire import PublisherHeartbeat, SubscriberStatus, Timing, TopicUpdate, start_of


class TopicEnd:
    """The publisher's end of a board.

    Args:
        publisher: id of this end.
        timing: intervals.
        clock: seconds, rising.
        pack: turns a record into a payload, once for all subscribers.
        transmit: sends one message and its payload along a route, or loses it; never waits.
        poll: hands over what has arrived; called after sending, which may have hidden an arrival.
        release: frees what the shell holds for this end; called once, when it closes.
    """

    def __init__(
        self,
        publisher: str,
        timing: Timing,
        clock: Callable[[], float],
        pack: Callable[[Any], Any],
        transmit: Callable[[Any, TopicUpdate | PublisherHeartbeat, Any], None],
        poll: Callable[[], None],
        release: Callable[[], None],
    ) -> None:
        self._state = PublisherState(publisher, timing)
        self._clock = clock
        self._pack = pack
        self._transmit = transmit
        self._poll = poll
        self._release = release
        self._closed = False

    @property
    def subscribers(self) -> int:
        """Subscribers heard of lately."""
        return self._state.subscribers

    @property
    def closed(self) -> bool:
        """Whether this end is closed."""
        return self._closed

    def publish(self, key: str, record: Any) -> None:
        """Makes `record` the latest of `key`, for all subscribers. Never waits.

        Its arrays must not change until the key is published again and long after: hand over copies.

        Raises:
            Closed: this end is closed.
            CodecError: the record does not hold what its annotations say.
        """
        if self._closed:
            raise Closed(
                f"got {key!r} for {self._state.publisher}, which is closed; expected an open end; open a new one"
            )
        self._state.publish(key, self._pack(record))
        self.settle()

    def received(self, have: SubscriberStatus, route: Any) -> None:
        """Something arrived; call `settle` when that was all for now."""
        self._state.on_have(self._clock(), have, route)

    def settle(self) -> None:
        """Sends what is due."""
        for route, message, payload in self._state.outgoing(self._clock()):
            self._transmit(route, message, payload)
        self._poll()

    def close(self, *, farewell: bool = True) -> None:
        """Closes this end at once; without `farewell` as a crash would, without the last words."""
        if self._closed:
            return
        if farewell:
            for route, message, payload in self._state.farewell():
                self._transmit(route, message, payload)
        self._closed = True
        self._release()

    async def aclose(self) -> None:
        """Closes this end; subscribers keep what they have."""
        self.close()
        await anyio.lowlevel.checkpoint()


class SubscriptionEnd:
    """One subscriber's end of one board.

    Args:
        timing: intervals.
        clock: seconds, rising.
        transmit: sends one message to the publisher, or loses it; never waits.
        poll: hands over what has arrived; called after sending, which may have hidden an arrival.
        release: frees what the shell holds for this end; called once, when it closes.
        pace: seconds between updates at least.
    """

    def __init__(
        self,
        timing: Timing,
        clock: Callable[[], float],
        transmit: Callable[[SubscriberStatus], None],
        poll: Callable[[], None],
        release: Callable[[], None],
        pace: float = 0.0,
    ) -> None:
        self._state = SubscriberState(timing, pace)
        self._clock = clock
        self._transmit = transmit
        self._poll = poll
        self._release = release
        self._closed = False
        self._fresh = anyio.Event()
        self.timer = Timer(clock, lambda: self._state.deadline, self.flush)

    @property
    def latest(self) -> dict[str, Any]:
        """The latest record of each key seen so far; not to be changed."""
        return self._state.latest

    @property
    def publisher(self) -> str:
        """Service start of the publisher as given to its transport, "" until one was heard."""
        return start_of(self._state.publisher)

    @property
    def heard_age(self) -> float:
        """Seconds since the publisher last answered; infinite until it did."""
        return self._clock() - self._state.heard_at

    @property
    def closed(self) -> bool:
        """Whether this end is closed."""
        return self._closed

    async def changed(self) -> None:
        """Returns when some record arrived since this was last called (at once if one has).

        Raises:
            Closed: this end is closed.
        """
        await anyio.lowlevel.checkpoint()
        await self._fresh.wait()
        if self._closed:
            raise Closed("got a wait on a subscription that is closed; expected an open end; subscribe again")
        self._fresh = anyio.Event()

    def received(self, message: TopicUpdate | PublisherHeartbeat, record: Any) -> None:
        """Something arrived; call `flush` when that was all for now."""
        now = self._clock()
        if isinstance(message, PublisherHeartbeat):
            self._state.on_alive(now, message)
        elif self._state.on_update(now, message, record):
            self._fresh.set()

    def linked(self) -> None:
        """The link to a publisher came up, perhaps again."""
        self._state.linked()
        self.flush()

    def flush(self) -> None:
        """Sends what is due."""
        if self._closed:
            return
        have = self._state.outgoing(self._clock())
        if have is not None:
            self._transmit(have)
            self._poll()
        self.timer.advance(self._state.deadline)

    def close(self, *, farewell: bool = True) -> None:
        """Closes this end at once; without `farewell` as a crash would."""
        if self._closed:
            return
        if farewell:
            self._transmit(SubscriberStatus(serial=0, publisher="", revision=0, answer=False, leaving=True))
        self._closed = True
        self.timer.stop()
        self._release()
        self._fresh.set()

    async def aclose(self) -> None:
        """Closes this end."""
        self.close()
        await anyio.lowlevel.checkpoint()
