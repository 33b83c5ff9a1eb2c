"""Defines what queues and topics guarantee, whatever carries them.

A queue moves records from one or more senders to one receiver, in each sender's order. The
receiver's capacity is exact, in messages and in agent-steps: it is divided among the senders as
credit, and what a sender has put and the receiver has not acknowledged never exceeds it. `get`
acknowledges; arrival does not; `receive` hands out the record and leaves the acknowledgement to
the caller. While both ends live, delivery is once and in order: a sender keeps what is not acknowledged
and sends it again after a loss. What an incarnation of the receiver has not acknowledged when another
takes its place is dropped and counted: a stage that must not lose it puts it again.

A topic is for state: subscribers get the publisher's latest record, never a history, and a late or restarted
subscriber gets it at once. `messages.channels` names the queues and topics, and the type of the records of each.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import anyio

from sparring.pipeline.messages.channels import Queue, Topic
from sparring.pipeline.queues.ends import End, EndLink
from sparring.pipeline.queues.receiving_end import Delivery, Receiver
from sparring.pipeline.queues.sending import Sender
from sparring.pipeline.queues.topic import Publisher, Subscription
from sparring.pipeline.queues.wire import Capacity, Timing, make_id

__all__ = ["Capacity", "Delivery", "Publisher", "Receiver", "Sender", "Subscription", "Transport"]

T = TypeVar("T")

_CONFIRMED_S: Final = 2.0
"""The time in which subscribers have to confirm what a service published last."""


class Transport(ABC):
    """Opens the ends of a run's queues and topics for one incarnation of a service, over memory or ZeroMQ.

    Each end belongs to the task group in which the transport was entered, and is open until closed.

    Args:
        start: this incarnation of the service, such as "stepping-0.1"; a later one has a higher number.
        timing: intervals.
        clock: gives rising seconds.
        opened: gives numbers that rise with each end opened, over all incarnations of the service.

    Raises:
        QueueError: `start` is empty or contains "#".
    """

    def __init__(self, start: str, timing: Timing, clock: Callable[[], float], opened: Callable[[], int]) -> None:
        make_id(start, 0)  # rejects a malformed incarnation
        self.start = start
        self._timing = timing
        self._clock = clock
        self._opened = opened
        self._ends: list[End] = []
        self._failure: Exception | None = None

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self._tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.push_async_exit(self._end)
            self._exit = stack.pop_all()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        handled = await self._exit.__aexit__(exc_type, exc, traceback)
        if self._failure is not None:
            raise self._failure
        return handled

    async def _end(self, exc_type: type[BaseException] | None, *_: object) -> None:
        """Closes all ends; in order, once subscribers have confirmed what was published last."""
        try:
            with anyio.move_on_after(_CONFIRMED_S if exc_type is None else 0):
                for end in self._ends:
                    if isinstance(end, Publisher):
                        await end.confirmed()
        finally:
            self._close()

    def abandon(self) -> None:
        """Drops all ends without notifying their peers, as a crash would."""
        self._close(notify_peers=False)

    def _close(self, *, notify_peers: bool = True) -> None:
        for end in self._ends:
            end.close(notify_peers=notify_peers)

    def _fail(self, error: Exception) -> None:
        """Cancels the task group, which then raises a failure from outside any task."""
        self._failure = error
        self._tasks.cancel_scope.cancel()

    # ------------------------------------------------------------ ends

    async def sender(self, queue: Queue[T]) -> Sender[T]:
        """Opens a sending end of a queue; ends open at the same time are different senders.

        Raises:
            QueueError: the queue cannot be connected to.
        """
        open_ids = {end.id.rpartition("~")[2] for end in self._ends if end.name == queue.name and not end.closed}
        index = next(index for index in itertools.count() if str(index) not in open_ids)
        end: Sender[T] = Sender(queue.name, self._id(index), self._timing, self._clock)
        self._open(end, self._connect(end))
        return end

    async def receiver(self, queue: Queue[T], capacity: Capacity) -> Receiver[T]:
        """Opens the receiving end of a queue, which `capacity` bounds exactly.

        Raises:
            QueueError: another end listens there, the address cannot be used, or a sender's share would hold nothing.
        """
        end = Receiver(queue.name, self._id(), queue.record, capacity, self._timing, self._clock)
        self._open(end, await self._listen(end))
        return end

    async def publisher(self, service: str) -> Publisher:
        """Opens the publishing end of `service`'s topics, or returns that which is open here.

        Raises:
            QueueError: another process listens there, or the address cannot be used.
        """
        for open_end in self._ends:
            if isinstance(open_end, Publisher) and open_end.name == f"topic:{service}" and not open_end.closed:
                return open_end
        end = Publisher(f"topic:{service}", self._id(), self._timing, self._clock)
        self._open(end, await self._listen(end))
        return end

    async def subscribe(self, service: str, *topics: Topic[Any], pace: float = 0.0) -> Subscription:
        """Opens a subscription to these topics of `service`, or to all, with updates at most every `pace` seconds.

        Raises:
            QueueError: the topics cannot be connected to.
        """
        end = Subscription(
            f"topic:{service}", self._id(), self._timing, self._clock, pace, tuple(topic.key for topic in topics)
        )
        self._open(end, self._connect(end))
        return end

    def _id(self, index: int = 0) -> str:
        return make_id(self.start, self._opened(), index)

    def _open(self, end: End, link: EndLink) -> None:
        self._ends = [one for one in self._ends if not one.closed] + [end]
        end.open(link)
        self._tasks.start_soon(end.timer.run)

    @abstractmethod
    def _connect(self, end: End) -> EndLink:
        """Returns a link from a sender or subscription to the end that listens under its name."""

    @abstractmethod
    async def _listen(self, end: End) -> EndLink:
        """Returns a link from a receiver or publisher to all ends that connect to its name."""
