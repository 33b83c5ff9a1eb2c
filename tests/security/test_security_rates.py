"""The parts that bound an endpoint: rates, the shared buffer, the rejection log and the listener."""

from __future__ import annotations

import errno
from typing import Any, cast

import anyio
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from sparring.pipeline.messages.codec import FrameReader, to_bytes
from sparring.pipeline.monitoring.metrics import Registry
from sparring.pipeline.queues.rejections import INTERVAL_S, PEERS, RejectionLog
from sparring.services.endpoint.sockets import ACCEPTS_PER_S, PacedListener
from sparring.services.endpoint.throttling import LeakyBucket, Pool
from tests.security.security_endpoint import hello

pytestmark = pytest.mark.anyio


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0.1, 50)), max_size=60), st.floats(1, 100), st.floats(1, 100))
def test_a_rate_limit_holds_for_any_arrivals(arrivals: list[tuple[float, float]], rate: float, burst: float) -> None:
    """A caller that waits as asked takes at most the burst, the rate times the elapsed time, and its last amount."""
    bucket, now, taken, last = LeakyBucket(rate, burst, 0.0), 0.0, 0.0, 0.0
    for pause, units in arrivals:
        now += pause
        assert taken <= burst + rate * now + last + 1e-6
        now += bucket.take(units, now)
        taken, last = taken + units, units


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 9), st.integers(1, 5)), max_size=30), st.integers(1, 10))
def test_the_pool_is_never_exceeded_and_every_caller_is_served(holds: list[tuple[int, int, int]], size: int) -> None:
    served: list[int] = []

    async def run_callers() -> None:
        pool = Pool(size)
        async with trio.open_nursery() as nursery:
            for number, (much, after, patience) in enumerate(holds):
                nursery.start_soon(_hold, pool, number, much, after, patience)
        assert pool.taken == 0

    async def _hold(pool: Pool, number: int, much: int, after: int, patience: int) -> None:
        await trio.sleep(after)
        if patience == 1:  # gives up, perhaps while it waits
            with trio.move_on_after(0.5):
                await pool.take(much)
                pool.give(much)
            return
        await pool.take(much)
        assert pool.taken <= max(size, much)
        await trio.sleep(1)
        pool.give(much)
        served.append(number)

    trio.run(run_callers, clock=MockClock(autojump_threshold=0))
    assert sorted(served) == [number for number, (_, _, patience) in enumerate(holds) if patience != 1]


class RecordedLog:
    """A log that keeps its lines in memory."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def warning(self, event: str, **facts: Any) -> None:
        self.lines.append((event, facts))

    info = warning


async def test_a_rejection_is_logged_once_per_peer_and_interval_and_always_counted() -> None:
    now, log, registry = [0.0], RecordedLog(), Registry("s", "s.1")
    rejections = RejectionLog(log, lambda: now[0], registry.add)
    for _ in range(100):
        rejections.reject("malformed", "a", got="x")
        rejections.reject("malformed", "b", got="y")
        rejections.reject("timeout", "a", got="z")
    assert [(event, facts["peer"], facts["kind"]) for event, facts in log.lines] == [
        ("simulator_rejected", "a", "malformed"),
        ("simulator_rejected", "b", "malformed"),
        ("simulator_rejected", "a", "timeout"),
    ]
    now[0] = INTERVAL_S
    rejections.reject("malformed", "a", got="later")
    again, line = log.lines[3:5]
    assert (again[0], again[1]["times"], again[1]["peer"]) == ("simulator_rejected_again", 99, "a")
    assert (line[0], line[1]["got"]) == ("simulator_rejected", "later")
    rejections.summarize()
    assert [facts["times"] for event, facts in log.lines if event.endswith("again")] == [99, 99, 99]
    assert registry.snapshot(0.0).counters["rejections.malformed"] == 201
    assert registry.snapshot(0.0).counters["rejections"] == 301


async def test_the_memory_of_the_rejection_log_is_bounded_for_any_number_of_peers() -> None:
    log = RecordedLog()
    rejections = RejectionLog(log, lambda: 0.0)
    for number in range(3 * PEERS):
        rejections.reject("malformed", f"peer {number}" + "x" * 500)
    assert len(log.lines) == PEERS + 1
    rejections.summarize(at_end=True)
    assert log.lines[-1][1]["times"] == 2 * PEERS - 1
    assert max(len(str(line)) for line in log.lines) < 500


class FloodedListener(PacedListener):
    """A listener that always has a pending connection and fails to accept every third."""

    accepts = 0

    async def accept(self, _one: Any) -> Any:
        await trio.lowlevel.checkpoint()
        self.accepts += 1
        if self.accepts % 3 == 0:
            raise OSError(errno.EMFILE, "too many open files")
        return None


async def test_connections_are_accepted_at_a_bounded_rate_and_an_error_does_not_end_the_listener() -> None:
    """File descriptors become free again; until then connections wait in the backlog of the operating system."""
    listener, accepted = FloodedListener(cast("Any", None)), []

    async def accept(_stream: Any) -> None:
        accepted.append(anyio.current_time())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, accept)
        await anyio.sleep(30)
        tasks.cancel_scope.cancel()
    assert listener.failures == listener.accepts // 3 > 100
    assert "EMFILE" in listener.cause or "too many" in listener.cause
    assert 500 < len(accepted) <= ACCEPTS_PER_S * 30


async def test_a_reader_reports_the_size_of_the_message_that_has_begun() -> None:
    reader, message = FrameReader(), to_bytes(hello())
    reader.feed(message[:7])
    assert reader.begun == 0
    reader.feed(message[7:20])
    assert reader.begun == len(message)
    reader.feed(message[20:] + message[:8])
    assert reader.next() is not None
    assert reader.begun == len(message)
