"""The rules of a queue, one at a time."""

from __future__ import annotations

from typing import Any

import pytest

from sparring.pipeline.errors import CodecError, QueueError
from sparring.pipeline.queues.memory import Reference
from sparring.pipeline.queues.receiving import READINGS, ReceiverState
from sparring.pipeline.queues.sending import SenderState
from sparring.pipeline.queues.wire import Capacity, Data, SenderHello, Timing, make_id, parse_id

TIMING = Timing(heartbeat=1.0, retry=0.25, peer_timeout=4.0, acknowledge=0.01)
EIGHT = Capacity(messages=8, steps=80)


class Unreadable(Reference[str]):
    """A record that cannot be decoded, or only after several times."""

    def __init__(self, record: str, times: int = 1000) -> None:
        super().__init__(record)
        self._times = times

    def unpack(self, kind: type[Any]) -> Any:
        self._times -= 1
        if self._times >= 0:
            raise CodecError(got="half of it", expected="all of it", remedy="send it again")
        return super().unpack(kind)


def pair(capacity: Capacity = EIGHT) -> tuple[SenderState, ReceiverState]:
    """Returns a sender and a receiver after their first exchange."""
    sender, receiver = SenderState("a.1#1~0", TIMING), ReceiverState("r.1#1~0", object, capacity, TIMING)
    exchange(sender, receiver, 0.0)
    return sender, receiver


def exchange(sender: SenderState, receiver: ReceiverState, now: float) -> int:
    """Carries everything both ways until nothing is due; returns the number of Grants."""
    grants = 0
    while True:
        up = sender.outgoing(now)
        for message in up:
            if isinstance(message, SenderHello):
                receiver.on_hello(now, message, "route")
            else:
                receiver.on_data(now, message, "route")
        down = receiver.outgoing(now)
        for _, grant in down:
            sender.on_grant(now, grant)
        grants += len(down)
        if not up and not down:
            return grants


def test_a_new_sender_has_no_credit_before_the_first_grant() -> None:
    sender = SenderState("a.1#1~0", TIMING)
    assert not sender.fits(0)
    assert [type(message) for message in sender.outgoing(0.0)] == [SenderHello]


def test_acknowledgements_are_gathered_into_few_grants() -> None:
    """64 messages acknowledged singly within the delay cause one Grant per quarter of the share."""
    sender, receiver = pair(Capacity(messages=64, steps=6400))
    grants = 0
    for index in range(64):
        sender.put(1, Reference(index))
        grants += exchange(sender, receiver, 0.001)
        receiver.acknowledge(0.001, receiver.take())
        grants += exchange(sender, receiver, 0.001)
    assert grants == 4


def test_the_last_acknowledgements_go_out_after_a_short_delay() -> None:
    sender, receiver = pair()
    sender.put(1, Reference("x"))
    exchange(sender, receiver, 1.0)
    receiver.acknowledge(1.0, receiver.take())
    assert exchange(sender, receiver, 1.0) == 0
    assert receiver.deadline == pytest.approx(1.0 + TIMING.acknowledge)
    exchange(sender, receiver, receiver.deadline)
    assert sender.counts.unacknowledged_messages == 0


def test_acknowledging_early_waits_for_the_earlier_ones() -> None:
    sender, receiver = pair()
    for index in range(3):
        sender.put(1, Reference(index))
    exchange(sender, receiver, 0.0)
    first, second, third = (receiver.take() for _ in range(3))
    receiver.acknowledge(0.0, third)
    receiver.acknowledge(0.0, second)
    exchange(sender, receiver, 1.0)
    assert (sender.counts.unacknowledged_messages, receiver.counts.held_messages) == (3, 3)
    receiver.acknowledge(1.0, first)
    exchange(sender, receiver, 2.0)
    assert (sender.counts.unacknowledged_messages, receiver.counts.held_messages) == (0, 0)


def test_an_unreadable_message_is_reported_once_and_resent_with_every_hello() -> None:
    """It is never skipped, as later messages depend on it."""

    reported: list[str] = []
    receiver = ReceiverState("r.1#1~0", object, EIGHT, TIMING, lambda who, _: reported.append(who))
    sender = SenderState("a.1#1~0", TIMING)
    exchange(sender, receiver, 0.0)
    for payload in (Reference("food"), Unreadable("poison"), Reference("more")):
        sender.put(1, payload)
    exchange(sender, receiver, 0.0)
    at_once = receiver.counts.discarded
    assert READINGS <= at_once <= READINGS + 1  # the last one was requested before
    exchange(sender, receiver, TIMING.retry / 2)
    assert receiver.counts.discarded == at_once
    for turn in range(1, 9):
        exchange(sender, receiver, turn * TIMING.retry)
    assert at_once + 2 <= receiver.counts.discarded <= at_once + 8
    assert reported == ["a.1#1~0"]
    assert [receiver.take().record for _ in range(receiver.counts.queued_messages)] == ["food"]
    assert (receiver.counts.held_messages, sender.counts.unacknowledged_messages) == (1, 3)


def test_a_damaged_message_is_sent_again() -> None:
    receiver = ReceiverState("r.1#1~0", object, EIGHT, TIMING)
    sender = SenderState("a.1#1~0", TIMING)
    exchange(sender, receiver, 0.0)
    for payload in (Reference("whole"), Unreadable("hurt", times=1), Reference("more")):
        sender.put(1, payload)
    exchange(sender, receiver, 0.0)
    assert [receiver.take().record for _ in range(receiver.counts.queued_messages)] == ["whole", "hurt", "more"]
    assert (receiver.counts.discarded, receiver.counts.held_messages) == (1, 3)


def test_a_message_beyond_the_share_is_refused_and_not_held() -> None:
    _, receiver = pair(Capacity(messages=2, steps=8))
    for sequence, steps in ((0, 8), (1, 1)):
        receiver.on_data(0.0, Data(sender="a.1#1~0", sequence=sequence, steps=steps, payload=Reference("x")), "route")
    assert (receiver.counts.held_messages, receiver.counts.held_steps, receiver.counts.refused) == (1, 8, 1)


def test_only_a_later_incarnation_supersedes_an_earlier_one() -> None:
    sender, receiver = pair()
    later = SenderState("a.2#5~0", TIMING)
    exchange(later, receiver, 0.0)
    assert later.counts.share_messages == 8
    sender.linked()
    exchange(sender, receiver, 0.0)
    assert sender.superseded
    assert not later.superseded
    assert receiver.senders == 1


def test_a_new_incarnation_gets_what_the_old_one_leaves_of_its_share() -> None:
    """Messages of the old incarnation count until they are acknowledged."""
    sender, receiver = pair(Capacity(messages=4, steps=40))
    for index in range(3):
        sender.put(10, Reference(index))
    exchange(sender, receiver, 0.0)
    later = SenderState("a.2#5~0", TIMING)
    exchange(later, receiver, 0.0)
    assert (later.counts.share_messages, later.counts.share_steps) == (1, 10)
    receiver.acknowledge(0.0, receiver.take())
    exchange(later, receiver, 1.0)
    assert (later.counts.share_messages, later.counts.share_steps) == (2, 20)


def test_a_sender_beyond_the_number_waits_for_a_share() -> None:
    sender, receiver = pair()
    other = SenderState("b.1#9~0", TIMING)
    exchange(other, receiver, 0.0)
    assert (other.counts.share_messages, other.largest) == (0, 20)
    receiver.on_hello(0.0, sender.hello(leaving=True), "route")
    exchange(other, receiver, 0.0)
    assert other.counts.share_messages == 8


def test_a_silent_sender_loses_its_share_and_returns_without_repetition() -> None:
    sender, receiver = pair()
    sender.put(1, Reference("once"))
    exchange(sender, receiver, 0.0)
    receiver.acknowledge(0.0, receiver.take())
    receiver.tick(TIMING.peer_timeout)
    assert receiver.senders == 0
    sender.put(1, Reference("twice"))
    exchange(sender, receiver, TIMING.peer_timeout)
    assert receiver.senders == 1
    assert receiver.take().record == "twice"
    assert receiver.counts.queued_messages == 0


def test_no_sender_waits_for_more_than_one_round() -> None:
    receiver = ReceiverState("r.1#1~0", object, Capacity(messages=40, steps=400, senders=4), TIMING)
    senders = [SenderState(f"s-{index}.1#{index}~0", TIMING) for index in range(4)]
    for sender in senders:
        exchange(sender, receiver, 0.0)
        for _ in range(5):
            sender.put(1, Reference(sender.sender))
    for sender in senders:
        exchange(sender, receiver, 0.0)
    rounds = [[receiver.take().record for _ in senders] for _ in range(5)]
    assert all(sorted(one) == sorted(sender.sender for sender in senders) for one in rounds)


def test_a_late_grant_of_an_earlier_receiver_changes_nothing() -> None:
    sender, old = pair()
    sender.put(1, Reference("x"))
    exchange(sender, old, 0.0)
    old.acknowledge(0.0, old.take())
    ((_, late),) = old.outgoing(1.0)
    new = ReceiverState("r.2#7~0", object, EIGHT, TIMING)
    exchange(sender, new, 1.0)
    assert sender.receiver == "r.2#7~0"
    sender.on_grant(1.0, late)
    assert (sender.receiver, sender.counts.receivers, sender.counts.unacknowledged_messages) == ("r.2#7~0", 2, 0)
    assert (sender.counts.acknowledged_messages, sender.counts.dropped_messages, sender.counts.dropped_steps) == (
        0,
        1,
        1,
    )


@pytest.mark.parametrize(
    "capacity",
    [
        Capacity(messages=2, steps=30, senders=3),
        Capacity(messages=30, steps=2, senders=3),
        Capacity(messages=1, steps=1, senders=0),
    ],
)
def test_a_capacity_without_a_message_and_a_step_for_each_sender_is_refused(capacity: Capacity) -> None:
    with pytest.raises(QueueError, match="expected at least one sender"):
        ReceiverState("r.1#1~0", object, capacity, TIMING)


def test_ids_of_one_service_share_a_name_and_rise() -> None:
    """Ids from the supervisor, which include the session, do so too."""
    for label in ("", "5f3a-", "097867-", "57-"):
        incarnations = (f"a-0.{label}1", 9), (f"a-0.{label}10", 3), (f"a-0.{label}10", 4, 1)
        first, later, second_end = (parse_id(make_id(*given)) for given in incarnations)
        assert first.name == later.name != second_end.name
        assert first.order < later.order
        assert later.incarnation == f"a-0.{label}10"


@pytest.mark.parametrize("text", ["", "a", "a#", "a#1", "a#x~0", "#1~0", "a#1~b"])
def test_an_invalid_id_is_refused(text: str) -> None:
    receiver = ReceiverState("r.1#1~0", object, EIGHT, TIMING)
    receiver.on_hello(0.0, SenderHello(sender=text, serial=1, oldest=0), "route")
    assert (receiver.senders, receiver.counts.refused, receiver.outgoing(0.0)) == (0, 1, [])
