"""What the ends of a queue or board say to each other, and how long they wait.

    sender -> receiver       Hello, Data, Bye
    receiver -> sender       Grant
    subscriber -> publisher  Have
    publisher -> subscriber  Update, Alive

Every end has an id of its own at each start: `start#opened~index`, as `stepping-0.2#18a3bc~0`.
Starts of one service have one name (`stepping-0~0`) and an order (2, 0x18a3bc), so that a later
start takes the place of an earlier one and never the other way round.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sparring.pipeline.errors import QueueError
from sparring.pipeline.messages.schema import record


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Intervals in seconds.

    Attributes:
        heartbeat: a sender says Hello this often, a subscriber Have.
        retry: a sender that waits for news says Hello again after this long.
        peer_timeout: an end silent for this long is gone; longer than any pause of a living process.
        acknowledge: an acknowledgement is sent at the latest this long after it was made. Shorter
            frees credit earlier, longer needs fewer messages.
    """

    heartbeat: float = 1.0
    retry: float = 0.25
    peer_timeout: float = 10.0
    acknowledge: float = 0.01


DEFAULT_TIMING: Final = Timing()
_NUMBER: Final = re.compile("(?<![0-9])[0-9]+$")  # tried once for each run of digits, however long


class EndId(NamedTuple):
    """An id in its parts.

    Attributes:
        name: the same for all starts of one end; a later start takes the place of an earlier one.
        order: rises with each start of a name.
        start: the service start that opened the end, as given to its transport.
    """

    name: str
    order: tuple[int, int]
    start: str


def make_id(start: str, opened: int, index: int = 0) -> str:
    """The id of an end.

    Args:
        start: this start of the service, as "stepping-0.2" or "stepping-0.5f3a-2": the name, a dot, and what tells
            starts of one name apart. Digits at the end are its number.
        opened: rises with each opening of an end of this service.
        index: tells apart ends that one transport has open on one queue at a time.

    Raises:
        QueueError: `start` is empty or holds "#".
    """
    if not start or "#" in start:
        raise QueueError(
            f"got service start {start!r}; expected a name without '#' such as 'stepping-0.1'; "
            "pass the name of the service and the number of its start"
        )
    return f"{start}#{opened:x}~{index}"


def parse_id(text: str) -> EndId:
    """The parts of an id.

    Raises:
        ValueError: this is no id.
    """
    start, _, tail = text.rpartition("#")
    opened, _, index = tail.partition("~")
    service, dot, label = start.rpartition(".")
    if not start:
        raise ValueError(text)
    number = _NUMBER.search(label if dot else "")
    order = (int(number[0]) if number else 0, int(opened, 16))
    return EndId(f"{service if dot else start}~{int(index)}", order, start)


def start_of(text: str) -> str:
    """The service start in an id, "" for an empty id."""
    return text.rpartition("#")[0]


@record("queue_hello")
class SenderHello:
    """A sender introduces itself, and asks what has arrived.

    Attributes:
        sender: id.
        serial: counts the Hellos of this sender from 1.
        oldest: sequence number of the oldest message not acknowledged.
        sent: sequence number after the last message sent to the present receiver.
    """

    sender: str
    serial: int
    oldest: int
    sent: int


class Data(NamedTuple):
    """One message; over ZeroMQ a head and the codec's frames.

    Attributes:
        sender: id.
        sequence: counts the messages of this sender from 0.
        steps: agent-steps in it.
        payload: what the sender's end packed and the receiver's end unpacks.
    """

    sender: str
    sequence: int
    steps: int
    payload: Any


@record("queue_bye")
class SenderBye:
    """A sender closed in order."""

    sender: str


@record("queue_grant")
class Grant:
    """A receiver tells a sender its share and what has arrived.

    Attributes:
        receiver: id.
        echo: serial of the latest Hello from this sender, 0 if it heard none.
        messages: messages the sender may have unacknowledged.
        steps: agent-steps in them.
        largest: steps of the largest message.
        whole: steps of a share with nothing inherited in it; a message above that would wait for ever.
        received: sequence number expected next.
        acknowledged: all before this sequence number are acknowledged.
        missing: some messages sent before the echoed Hello did not arrive: send them again.
        ask: the receiver does not know the sender, or saw a gap: say Hello.
        superseded: a later start of the same sender has taken its place.
    """

    receiver: str
    echo: int
    messages: int
    steps: int
    largest: int
    whole: int
    received: int
    acknowledged: int
    missing: bool = False
    ask: bool = False
    superseded: bool = False


@record("board_have")
class SubscriberStatus:
    """A subscriber says what it has.

    Attributes:
        serial: counts the Haves of this subscriber from 1.
        publisher: id of the publisher it heard last, "" for none.
        revision: it has all that publisher pushed up to this revision.
        answer: it wants to hear something: a ping.
        leaving: it closes.
    """

    serial: int
    publisher: str
    revision: int
    answer: bool
    leaving: bool = False


@record("board_update")
class TopicUpdate:
    """Introduces the latest record of a key, which follows; over ZeroMQ as the codec's frames.

    Attributes:
        publisher: id.
        echo: serial of the latest Have of this subscriber.
        after: revision pushed to this subscriber before it, 0 for none.
        revision: counts the publications of this publisher from 1, over all keys.
        key: what the record is the latest of.
    """

    publisher: str
    echo: int
    after: int
    revision: int
    key: str


@record("board_alive")
class PublisherHeartbeat:
    """A publisher answers a ping when it has nothing to push; fields as in Update."""

    publisher: str
    echo: int
