"""Defines the messages between the ends of a queue or topic, and the intervals at which they are sent.

    sender -> receiver       SenderHello, Data
    receiver -> sender       Grant
    subscriber -> publisher  SubscriberStatus
    publisher -> subscriber  TopicUpdate

`Data` and `TopicUpdate` precede what was put or published, which is packed once, however often it is sent, and whose
receiver knows what it belongs to even if it cannot be read. For speed their heads are a byte and a MessagePack list;
the other messages are records of the codec, which begin with another byte.

Each end has its own id, `incarnation#opened~index`, such as `stepping-0.2#18a3bc~0`. All
incarnations of a service share a name (`stepping-0~0`) and have an order (2, 0x18a3bc), so that a
later one replaces an earlier one and never the reverse.
"""

import re
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

import msgpack

from sparring.pipeline.errors import CodecError, QueueError
from sparring.pipeline.messages import codec
from sparring.pipeline.messages.codec import Buffer
from sparring.pipeline.messages.schema import Value, record, shorten

LARGE: Final = 262144
"""Bytes from which the arrays of a record have frames of their own, which are shared with the socket, not copied."""

T = TypeVar("T")


class Timing(NamedTuple):
    """Sets the intervals between messages, in seconds.

    Attributes:
        heartbeat: between two Hellos of a sender, and between two statuses of a subscriber.
        retry: after which a sender that waits for a reply repeats its Hello.
        peer_timeout: after which a silent end is considered gone; longer than any pause of a running process.
        acknowledge: longest delay of an acknowledgement. Shorter frees credit earlier, longer needs fewer messages.
    """

    heartbeat: float = 1.0
    retry: float = 0.25
    peer_timeout: float = 10.0
    acknowledge: float = 0.01


DEFAULT_TIMING: Final = Timing()
_NUMBER: Final = re.compile("(?<![0-9])[0-9]+$")  # tried once for each run of digits, however long


class EndId(NamedTuple):
    """Holds the parts of an end's id.

    Attributes:
        name: the same for all incarnations of one end; a later one replaces an earlier one.
        order: rises with each incarnation of a name.
        incarnation: incarnation of the service that opened the end.
    """

    name: str
    order: tuple[int, int]
    incarnation: str


def make_id(incarnation: str, opened: int, index: int = 0) -> str:
    """Returns the id of an end.

    Args:
        incarnation: incarnation of the service, such as "stepping-0.2" or "stepping-0.5f3a-2": its name, a dot, and a
            label that ends with its number.
        opened: rises with each end that this service opens.
        index: distinguishes the ends that one transport has open on one queue at the same time.

    Raises:
        QueueError: `incarnation` is empty or contains "#".
    """
    if not incarnation or "#" in incarnation:
        raise QueueError(
            f"got service incarnation {incarnation!r}; expected a name without '#' such as 'stepping-0.1'; "
            "pass the name of the service and the number of its incarnation"
        )
    return f"{incarnation}#{opened:x}~{index}"


def parse_id(text: str) -> EndId:
    """Parses the id of an end.

    Raises:
        ValueError: this is not an id.
    """
    incarnation, _, tail = text.rpartition("#")
    opened, _, index = tail.partition("~")
    service, dot, label = incarnation.rpartition(".")
    if not incarnation:
        raise ValueError(text)
    number = _NUMBER.search(label if dot else "")
    order = (int(number[0]) if number else 0, int(opened, 16))
    return EndId(f"{service if dot else incarnation}~{int(index)}", order, incarnation)


@record("queue_hello")
class SenderHello:
    """A sender introduces itself, and asks the receiver what has arrived.

    Attributes:
        sender: id of the sender.
        serial: counts the Hellos of this sender from 1.
        oldest: sequence number of the oldest message that is not acknowledged.
        receiver: id of the receiver that the sender knows, "" before the first: another one takes none of its messages,
            which were sent to its predecessor and are dropped.
        leaving: the sender closes in order.
    """

    sender: str
    serial: int
    oldest: int
    receiver: str = ""
    leaving: bool = False


class Payload(Protocol):
    """Holds a record between two ends, as its transport carries it."""

    @property
    def size(self) -> int:
        """Returns the bytes of the record, 0 where it is not packed."""

    def unpack(self, kind: type[T]) -> T:
        """Returns the record.

        Raises:
            CodecError: it is damaged, exceeds the limits, or is of another kind.
        """


class Packed(NamedTuple):
    """Holds a packed record: the codec's frames, and the bytes in them."""

    frames: Sequence[Buffer]
    size: int = 0

    def unpack(self, kind: type[T]) -> T:
        """Returns the record, whose arrays are views of the frames; see `Payload.unpack`."""
        frames = self.frames
        value = codec.from_bytes(frames[0], codec.SERVICES) if len(frames) == 1 else codec.decode(frames)
        return of_kind(value, kind)


def pack(record: T) -> Packed:
    """Packs a record: a large one without copying its arrays, a small one as one frame instead of many.

    Raises:
        CodecError: a field's value does not match its annotation.
    """
    frames = codec.encode(record)
    size = sum(map(len, frames))
    return Packed(frames if size >= LARGE else [codec.join(frames)], size)


def of_kind(value: Value, kind: type[T]) -> T:
    """Returns a decoded record of this kind.

    Raises:
        CodecError: it is of another kind.
    """
    if not isinstance(value, kind):
        raise CodecError(
            got=f"a record of type {type(value).__name__}",
            expected=kind.__name__,
            remedy="send each record through the queue or topic of its type",
        )
    return value


class Data(NamedTuple):
    """A sender sends one record.

    Attributes:
        sender: id of the sender.
        sequence: counts the messages of this sender from 0.
        steps: agent-steps in the message.
        payload: the record.
    """

    sender: str
    sequence: int
    steps: int
    payload: Payload


@record("queue_grant")
class Grant:
    """A receiver reports to a sender its share, and which messages have arrived.

    Attributes:
        receiver: id of the receiver.
        largest: steps of the largest message.
        echo: serial of the latest Hello from this sender, 0 if there was none.
        messages: messages that the sender may have unacknowledged: what is left of its share.
        steps: agent-steps in them.
        received: sequence number expected next.
        acknowledged: all messages before this sequence number are acknowledged.
        ask: the sender must send a Hello, because the receiver does not know it or saw a gap.
        superseded: a later incarnation of the same sender has replaced it.
    """

    receiver: str
    largest: int
    echo: int = 0
    messages: int = 0
    steps: int = 0
    received: int = 0
    acknowledged: int = 0
    ask: bool = False
    superseded: bool = False


@record("topic_status")
class SubscriberStatus:
    """A subscriber reports the updates that it has.

    Attributes:
        serial: counts the statuses of this subscriber from 1.
        publisher: id of the publisher that sent to it last, "" for none.
        revision: it has all updates of that publisher up to this revision.
        answer: the status is a ping, which the publisher must answer.
        keys: of the topics that it reads; none for all of them.
        leaving: the subscriber closes.
    """

    serial: int
    publisher: str
    revision: int
    answer: bool
    keys: tuple[str, ...] = ()
    leaving: bool = False


class TopicUpdate(NamedTuple):
    """A publisher sends the latest record of a topic or, without a record, answers a ping.

    Attributes:
        publisher: id of the publisher.
        echo: serial of the latest status of this subscriber.
        after: revision pushed to this subscriber before, 0 for none.
        revision: counts the publications of this publisher from 1, over all topics; 0 for none.
        key: key of the topic.
        is_last: the publisher waits for the confirmation in order to close.
        payload: the record.
    """

    publisher: str
    echo: int
    after: int = 0
    revision: int = 0
    key: str = ""
    is_last: bool = False
    payload: Payload = Packed(())


Message = SenderHello | Data | Grant | SubscriberStatus | TopicUpdate


_HEADS: Final = {b"D": (Data, [str, int, int]), b"U": (TopicUpdate, [str, int, int, int, str, bool])}
"""Messages with a record beside them by the first byte of their heads, and the types of what follows it."""


def encode(message: Message) -> list[Buffer]:
    """Encodes a message as frames; the payload of one with a record is `Packed`."""
    if isinstance(message, Data | TopicUpdate):
        *head, payload = message
        first = b"D" if isinstance(message, Data) else b"U"
        return [first + msgpack.packb(head), *of_kind(payload, Packed).frames]
    return codec.encode(message)


def decode(frames: Sequence[Buffer]) -> Message:
    """Decodes a message, but not yet the record beside it.

    Raises:
        CodecError: this is not a message.
    """
    first = bytes(frames[0][:1]) if frames else b""
    if first in _HEADS:
        kind, types = _HEADS[first]
        head = codec.unpack(frames[0][1:], codec.SERVICES)
        if isinstance(head, list) and [*map(type, head)] == types:
            message: Message = kind(*head, Packed(frames[1:]))
            return message
    elif isinstance(head := codec.decode(frames), SenderHello | Grant | SubscriberStatus):
        return head
    raise CodecError(
        got=f"{shorten(head)} at the head of a message",
        expected="the head of a message between the ends of queues or topics",
        remedy="speak the same version",
    )


def misdirected(message: Message) -> CodecError:
    """Returns the error of an end that such a message is not for."""
    return CodecError(
        got=f"a message of type {type(message).__name__}",
        expected="one for this end",
        remedy="connect each kind of end to the endpoint of its counterpart",
    )


class Capacity(NamedTuple):
    """Bounds what a receiving queue holds.

    Attributes:
        messages: from all senders together.
        steps: agent-steps in them.
        senders: most senders that share the capacity; each gets an equal share.
    """

    messages: int
    steps: int
    senders: int = 1

    @property
    def largest(self) -> int:
        """Returns the steps of the largest message: a quarter of the queue, or a sender's share if that is less."""
        return max(1, min(self.steps // 4, self.steps // self.senders))
