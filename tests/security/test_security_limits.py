"""Limits of one simulator hold before and after it has shown who it is, and cost the others nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
from collections import Counter
from random import Random
from typing import Any

import anyio
import numpy as np
import pytest
import trio
from anyio.abc import SocketListener
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.messages.codec import FrameReader, to_bytes
from sparring.pipeline.messages.simulator import (
    BehaviorReport,
    Behaviors,
    Bye,
    Decisions,
    Fault,
    Ping,
    Pong,
    Statistic,
    Step,
)
from sparring.pipeline.monitoring.metrics import Registry
from sparring.pipeline.settings import parse_settings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from sparring.pipeline.stepping.limits import LimitSettings, check_behaviors
from sparring.services.endpoint.admission import host_of
from sparring.services.endpoint.flow import OWN_BYTES, LeakyBucket, Pool
from sparring.services.endpoint.listening import ACCEPTS_PER_S, PacedListener
from sparring.services.endpoint.refusals import INTERVAL_S, PEERS, RejectionLog
from sparring.services.endpoint.simulators import DefaultBehaviors
from tests.security.security_house import SPECS, End, Endpoint, endpoint, hello

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return ("trio", {"clock": MockClock(autojump_threshold=0)})


def step(agents: int = 2, sequence: int = 0, statistics: tuple[Statistic, ...] = ()) -> Step:
    """A Step of so many agents of "Goal"."""
    rows = Decisions(
        agents=np.arange(agents),
        observations=(np.ones((agents, 1), np.float32),),
        rewards=np.zeros(agents, np.float32),
    )
    report = BehaviorReport(behavior="Goal?team=0", decisions=rows)
    return Step(sequence=sequence, reports=(report,), statistics=statistics)


# ---------------------------------------------------------------- before Hello


async def test_who_says_nothing_is_put_out_after_the_time_of_a_handshake() -> None:
    """A slow loris, which sends a byte now and then, gains no more time by it."""
    async with endpoint(limits={"handshake_timeout_s": 3.0}) as context:
        peer, began = context.connect(), anyio.current_time()
        await peer.say((2**17).to_bytes(4, "little") + (2**10).to_bytes(4, "little"))
        await peer.pour(b"\1", pause_s=0.5)
        assert 3 <= anyio.current_time() - began <= 4.5  # a second for the last word
        assert context.gate.pending == 0
        assert context.counted("strangers.timeout") == 1


async def test_half_open_connections_are_bounded_and_an_honest_newcomer_gets_in() -> None:
    async with endpoint(limits={"handshakes": 20}) as context:
        for number in range(300):
            context.connect(f"192.0.2.{number % 3}")
            await anyio.sleep(0.001)
            assert context.gate.pending <= 20
        honest = context.connect()
        await honest.come_in()
        assert context.counted("strangers.evicted") == 300 - 20 + 1
        assert len(context.lines("simulator_refused")) == 3  # one for each address


async def test_a_crowd_from_one_address_pushes_out_its_own() -> None:
    """Whoever opens connections without end does not push out those of another address."""
    async with endpoint(limits={"handshakes": 10}) as context:
        slow = context.connect("198.51.100.7")
        for _ in range(100):
            context.connect("192.0.2.1")
            await anyio.sleep(0.001)
        await slow.come_in()


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (to_bytes(Ping()), "unexpected_message"),
        (to_bytes(step()), "unexpected_message"),
        ((2**20).to_bytes(4, "little") + (2**10).to_bytes(4, "little"), "too_large"),
        (b"\xff" * 64, "too_large"),
        ((64).to_bytes(4, "little") + (50).to_bytes(4, "little") + bytes(56), "malformed"),
    ],
)
async def test_nothing_but_a_small_hello_is_taken_from_a_stranger(sent: bytes, code: str) -> None:
    async with endpoint() as context:
        peer = context.connect()
        await peer.say(sent)
        assert (await peer.refused()).code == code
        assert context.counted(f"strangers.{code}") == 1


@pytest.mark.parametrize(
    ("limits", "hosts", "refused"),
    [
        ({"connections": 3}, ["a", "b", "c", "d"], "pipeline.limits.connections"),
        ({"connections_per_host": 2}, ["a", "a", "b", "a"], "pipeline.limits.connections_per_host"),
    ],
)
async def test_connections_are_counted_in_all_and_by_address(
    limits: dict[str, int], hosts: list[str], refused: str
) -> None:
    async with endpoint(limits=limits) as context:
        peers = [context.connect(host) for host in hosts]
        for peer in peers[:-1]:
            await peer.come_in()
        await peers[-1].say(hello())
        fault = await peers[-1].refused()
        assert (fault.code, refused in fault.remedy) == ("busy", True)
        await peers[0].stream.aclose()
        await anyio.sleep(1)
        again = context.connect(hosts[0])
        await again.come_in()


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("192.0.2.9", "192.0.2.9"),
        ("::ffff:192.0.2.9", "192.0.2.9"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::1"),
        ("", "here"),
    ],
)
async def test_a_peer_is_told_by_its_address_and_in_ipv6_by_its_network(address: str, host: str) -> None:
    assert host_of(End(None, None, address)) == host


# ---------------------------------------------------------------- after Hello


async def test_a_flood_of_pings_is_read_slowly_and_nobody_is_put_out() -> None:
    async with endpoint(limits={"asides_per_s": 10.0}) as context:
        peer, pongs = context.connect(), 0
        await peer.come_in()
        began = anyio.current_time()

        async def flood() -> None:
            for number in range(200):
                await peer.say(Ping(number=number))

        context.tasks.start_soon(flood)
        while pongs < 200:
            assert await peer.hear() is not None
            pongs += 1
            assert pongs <= 10 * (anyio.current_time() - began) + 10 + 3  # its burst, its Hello and rounding
        assert 18 <= anyio.current_time() - began <= 20
        assert len(context.lines("simulator_slowed_down")) <= 50
        assert context.counted("slowed_down_s") > 15


async def test_who_asks_and_does_not_listen_is_not_read_and_given_up() -> None:
    """Otherwise its answers would be kept here without end."""
    settings = {"limits": {"sending_bytes": 1024, "asides_per_s": 1e6}, "simulator_timeout_s": 30.0}
    async with endpoint(**settings) as context:
        peer = context.connect()
        await peer.come_in()
        await peer.pour(to_bytes(Ping()) * 50)
        assert context.counted("received_bytes") < 10_000
        assert len(context.lines("simulator_silent")) == 1


async def test_a_message_that_does_not_end_has_a_deadline() -> None:
    """A byte now and then is no sign of life."""
    async with endpoint(simulator_timeout_s=20.0) as context:
        peer = context.connect()
        await peer.come_in()
        began = anyio.current_time()
        await peer.say((2**25).to_bytes(4, "little") + (2**10).to_bytes(4, "little"))
        await peer.pour(bytes(100), pause_s=1)
        assert 20 <= anyio.current_time() - began <= 25
        assert len(context.lines("simulator_silent")) == 1


async def test_large_messages_of_all_simulators_share_one_room() -> None:
    """The second waits for the first; both arrive, whole."""
    size = 4 * OWN_BYTES
    agents = size // 4
    async with endpoint(limits={"receiving_bytes": 5 * size, "agents": agents}) as context:
        peers = [context.connect() for _ in range(2)]
        for peer in peers:
            await peer.come_in()
        message = to_bytes(step(agents))
        assert len(message) > 3 * size
        sent = [0, 0]

        async def send(number: int) -> None:
            for at in range(0, len(message), OWN_BYTES):
                await peers[number].stream.send(message[at : at + OWN_BYTES])
                sent[number] += 1
                await anyio.sleep(1)

        pool = context.simulators.guard.pool
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send, 0)
            await anyio.sleep(0.5)
            tasks.start_soon(send, 1)
            await anyio.sleep(5)
            assert pool.taken == len(message)
            assert sent[1] <= 6  # what fits into the stream, and no more was read
        await anyio.sleep(1)
        frames = [connection.frame for connection in context.stepper.connections.values()]
        assert [frame is not None for frame in frames] == [True, True]
        for peer in peers:
            await peer.say(Ping())  # a message with which its room goes back
            assert isinstance(await peer.hear(), Pong)
        assert pool.taken == 0


async def refused_after_hello(context: Endpoint, message: Any) -> Fault:
    """What a simulator is told that says `message` when asked for a Step."""
    peer = context.connect()
    await peer.come_in()
    for at in range(0, len(data := to_bytes(message)), OWN_BYTES):
        await peer.stream.send(data[at : at + OWN_BYTES])
    return await peer.refused()


def spec(**changes: Any) -> BehaviorSpec:
    return dataclasses.replace(SPECS["Goal?team=0"], **changes)


OBSERVED = ObservationSpec(name="much", shape=(2**19,))


@pytest.mark.parametrize(
    ("limits", "message", "key"),
    [
        ({"agents": 1}, step(2), "agents"),
        ({"message_bytes": 4096}, step(1000), "the limit"),
        ({"arrays": 16}, Step(sequence=0, reports=(step().reports[0],) * 6), "the limit"),
        ({"behaviors": 1}, Behaviors(behaviors={"Goal?team=1": spec()}), "behaviors"),
    ],
)
async def test_more_than_a_simulator_may_ask_for_is_refused(limits: dict[str, int], message: Any, key: str) -> None:
    async with endpoint(limits=limits) as context:
        fault = await refused_after_hello(context, message)
        assert fault.code == "too_large"
        assert key in fault.remedy
        assert context.counted("faults.too_large") == 1
        assert len(context.lines("simulator_fault")) == 1
        await context.connect().come_in()


@pytest.mark.parametrize(
    "asked",
    [
        {"Goal": spec(observations=(OBSERVED,))},
        {"Goal": spec(observations=tuple(dataclasses.replace(OBSERVED, name=str(n), shape=(1,)) for n in range(20)))},
        {"Goal": spec(actions=ActionSpec(continuous=10**9))},
        {"Goal": spec(actions=ActionSpec(discrete=(2**12, 1)))},
        {f"Goal?team={team}": spec() for team in range(65)},
    ],
    ids=["an eye of 2 MiB", "many observations", "many actions", "many choices", "many teams"],
)
async def test_a_spec_from_which_too_much_would_be_built_is_refused(asked: dict[str, BehaviorSpec]) -> None:
    with pytest.raises(RemoteProtocolError) as told:
        check_behaviors(asked, 0, LimitSettings(arrays=16))
    assert told.value.code == "too_large"
    check_behaviors(SPECS, 63, LimitSettings())


@pytest.mark.parametrize("number", [-1, 2**20, 2**31, 2**63])
async def test_a_number_that_no_column_could_hold_is_refused(number: int) -> None:
    async with endpoint() as context:
        peer = context.connect()
        await peer.say(hello(number=number))
        assert (await peer.refused()).code == "number"


async def test_names_of_numbers_are_bounded_and_the_rest_is_counted() -> None:
    async with endpoint(limits={"statistics": 10}) as context:
        peer = context.connect()
        await peer.come_in()
        numbers = [Statistic(name=f"n{number % 40}", value=1.0, aggregation="sum") for number in range(80)]
        await peer.say(step(statistics=(*numbers, Statistic(name="x" * 300, value=1.0))))
        await anyio.sleep(1)
        assert sum(name.startswith("simulator.") for name in context.registry.snapshot(0.0).counters) == 10
        assert context.counted("simulator.n3.total") == 2
        assert context.counted("statistics_refused") == 61
        assert len(context.lines("statistic_refused")) == 1


async def test_numbers_of_simulators_are_added_up_as_they_ask() -> None:
    """Means and sums of all; the latest value of the first alone, as ML-Agents has it."""
    async with endpoint() as context:
        for number, value in ((1, 4.0), (0, 2.0)):
            peer = context.connect()
            await peer.come_in(number=number)
            kinds = {"mean": "average", "spread": "histogram", "sum": "sum", "last": "most_recent"}
            said = [Statistic(name=name, value=value, aggregation=kind) for name, kind in kinds.items()]
            await peer.say(step(statistics=(*said, *said)))
            await anyio.sleep(1)
        told = context.registry.snapshot(0.0)
        own = {name: value for name, value in told.counters.items() if name.startswith("simulator.")}
        moments = {"sum": 12.0, "sumsq": 40.0, "count": 4.0}
        assert own == {
            **{f"simulator.{name}.{what}": value for name in ("mean", "spread") for what, value in moments.items()},
            "simulator.sum.total": 12.0,
        }
        assert {name: value for name, value in told.gauges.items() if name.startswith("simulator.")} == {
            "simulator.last": 2.0
        }


async def test_long_words_of_a_simulator_are_cut_in_the_log() -> None:
    async with endpoint() as context:
        peer = context.connect()
        await peer.come_in(name="n" * 10_000)
        await peer.say(Fault(code="c" * 10_000, got="g" * 10_000, expected="", remedy="r" * 10_000))
        assert await peer.hear() is None
        for line in context.logged:
            assert len(str(line)) < 2000


async def test_a_stranger_does_not_take_the_place_of_a_simulator_by_its_number() -> None:
    """Not even while that one is silent, unless it shows the same certificate."""
    async with endpoint() as context:
        first, second = context.connect(), context.connect()
        await first.come_in(number=3)
        next(iter(context.simulators._peers.values())).candidate.identity = "arcade-1"
        await anyio.sleep(8)  # longer than a heartbeat
        await second.say(hello(number=3))
        assert (await second.refused()).code == "number"
        await first.say(Ping(number=1))
        assert isinstance(await first.hear(), Pong)


async def test_the_end_waits_for_a_simulator_that_had_gone_and_came_back() -> None:
    """What it has sent before it hears of the end counts, and so does its Bye."""
    async with endpoint() as context:
        gone, back = context.connect(), context.connect()
        await gone.come_in(number=0)
        await gone.stream.aclose()
        await anyio.sleep(1)
        assert not context.simulators._peers
        await back.come_in(number=0)
        over = anyio.Event()

        async def part() -> None:
            await context.simulators.part()
            over.set()

        context.tasks.start_soon(part)
        assert isinstance(await back.hear(), Bye)
        await anyio.sleep(1)
        assert not over.is_set()
        await back.say(Bye())
        await over.wait()


async def test_simulators_that_come_and_go_leave_nothing_behind_and_disturb_nobody() -> None:
    """Whenever they go: in TLS's place, in mid-Hello, in a message, with a Bye, or while they are owed an answer."""
    random = Random(1)
    first, one = to_bytes(hello()), to_bytes(step())
    whole = first + one + to_bytes(Ping()) + to_bytes(Bye())
    async with endpoint(limits={"handshakes": 10}) as context:
        stays = context.connect("192.0.2.2")
        await stays.come_in(number=0)

        async def visit() -> None:
            await anyio.sleep(random.uniform(0, 10))
            peer, length = context.connect(room=20), random.choice([0, random.randrange(len(whole)), len(whole)])
            said = random.randrange(1, 400)
            for at in range(0, length, said):
                with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                    await peer.stream.send(whole[at : min(length, at + said)])
                await anyio.sleep(random.uniform(0, 0.2))
            await peer.stream.aclose()

        async with anyio.create_task_group() as tasks:
            for _ in range(200):
                tasks.start_soon(visit)
        await anyio.sleep(1)
        await stays.say(Ping())
        assert isinstance(await stays.hear(), Pong)
        context.stepper.wake(anyio.current_time())
        assert [connection.number for connection in context.stepper.connections.values()] == [0]
        assert len(context.simulators._peers) == 1
        assert context.gate.pending == 0
        assert dict(context.gate._inside) == {"192.0.2.2": 1}
        assert context.simulators.guard.pool.taken == 0
        assert context.stepper.behaviors["Goal"].table.taken == 0
        assert context.counted("simulators.connected") > 50
        assert max(Counter(line["event"] for line in context.logged).values()) <= 50 + 1


# ---------------------------------------------------------------- the parts


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0.1, 50)), max_size=60), st.floats(1, 100), st.floats(1, 100))
def test_a_rate_holds_whatever_comes_when(arrivals: list[tuple[float, float]], rate: float, burst: float) -> None:
    """Who waits as told never takes more than the burst, the rate's share of the time, and its last bite."""
    bucket, now, taken, last = LeakyBucket(rate, burst, 0.0), 0.0, 0.0, 0.0
    for pause, units in arrivals:
        now += pause
        assert taken <= burst + rate * now + last + 1e-6
        now += bucket.take(units, now)
        taken, last = taken + units, units


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 9), st.integers(1, 5)), max_size=30), st.integers(1, 10))
def test_the_room_is_never_passed_and_everybody_gets_a_turn(holds: list[tuple[int, int, int]], size: int) -> None:
    served: list[int] = []

    async def scene() -> None:
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

    trio.run(scene, clock=MockClock(autojump_threshold=0))
    assert sorted(served) == [number for number, (_, _, patience) in enumerate(holds) if patience != 1]


class Lines:
    """A log that is read."""

    def __init__(self) -> None:
        self.all: list[tuple[str, dict[str, Any]]] = []

    def warning(self, event: str, **facts: Any) -> None:
        self.all.append((event, facts))

    info = warning


async def test_a_refusal_is_logged_once_for_each_peer_and_interval_and_counted_always() -> None:
    now, log, registry = [0.0], Lines(), Registry("s", "s.1")
    refusals = RejectionLog(registry, log, lambda: now[0])
    for _ in range(100):
        refusals.refuse("malformed", "a", got="x")
        refusals.refuse("malformed", "b", got="y")
        refusals.refuse("timeout", "a", got="z")
    assert [(event, facts["peer"], facts["kind"]) for event, facts in log.all] == [
        ("simulator_refused", "a", "malformed"),
        ("simulator_refused", "b", "malformed"),
        ("simulator_refused", "a", "timeout"),
    ]
    now[0] = INTERVAL_S
    refusals.refuse("malformed", "a", got="later")
    again, line = log.all[3:5]
    assert (again[0], again[1]["times"], again[1]["peer"]) == ("simulator_refused_again", 99, "a")
    assert (line[0], line[1]["got"]) == ("simulator_refused", "later")
    refusals.sum_up()
    assert [facts["times"] for event, facts in log.all if event.endswith("again")] == [99, 99, 99]
    assert registry.snapshot(0.0).counters["strangers.malformed"] == 201
    assert registry.snapshot(0.0).counters["strangers"] == 301


async def test_the_log_of_peers_takes_no_more_memory_the_more_of_them_there_are() -> None:
    log = Lines()
    refusals = RejectionLog(Registry("s", "s.1"), log, lambda: 0.0)
    for number in range(3 * PEERS):
        refusals.refuse("malformed", f"peer {number}" + "x" * 500)
    assert len(log.all) == PEERS + 1
    refusals.sum_up(at_end=True)
    assert log.all[-1][1]["times"] == 2 * PEERS - 1
    assert max(len(str(line)) for line in log.all) < 500


class Flooded(SocketListener):
    """A listener that always has a connection; to take every third fails."""

    def __init__(self) -> None:
        self.asked = 0

    @property
    def _raw_socket(self) -> Any:
        raise NotImplementedError

    async def accept(self) -> Any:
        await trio.lowlevel.checkpoint()
        self.asked += 1
        if self.asked % 3 == 0:
            raise OSError(errno.EMFILE, "too many open files")
        return None

    async def aclose(self) -> None:
        pass


async def test_connections_are_taken_at_a_bounded_rate_and_what_fails_ends_nothing() -> None:
    """Descriptors that have run out come back; until then the others wait in the system's queue."""
    flooded, taken = Flooded(), []

    async def take(_stream: Any) -> None:
        taken.append(anyio.current_time())

    listener = PacedListener(flooded)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, take)
        await anyio.sleep(30)
        tasks.cancel_scope.cancel()
    assert listener.untaken == flooded.asked // 3 > 100
    assert "EMFILE" in listener.cause or "too many" in listener.cause
    assert 500 < len(taken) <= ACCEPTS_PER_S * 30


async def test_a_reader_tells_how_large_the_message_is_that_has_begun() -> None:
    reader, message = FrameReader(), to_bytes(hello())
    reader.feed(message[:7])
    assert reader.begun == 0
    reader.feed(message[7:20])
    assert reader.begun == len(message)
    reader.feed(message[20:] + message[:8])
    assert reader.next() is not None
    assert reader.begun == len(message)


# ---------------------------------------------------------------- behaviors that the configuration does not name

OTHER = BehaviorSpec(observations=(ObservationSpec(name="x", shape=(1,)),), actions=ActionSpec(continuous=1))


def counting_for_all(*scripts: str) -> DefaultBehaviors:
    """As `default_settings: {}`."""
    settings = parse_settings("default_settings: {}", "test").settings.unnamed
    return DefaultBehaviors(settings=settings, scripts=frozenset(scripts))


async def test_simulators_add_no_more_behaviors_than_the_limit_and_what_is_refused_adds_none() -> None:
    """The limit is of all simulators together; a name that is known counts once."""
    unnamed = counting_for_all()
    async with endpoint(unnamed=unnamed, limits={"unnamed_behaviors": 2}) as context:
        await context.connect().come_in(behaviors={"A?team=0": OTHER, "A?team=1": OTHER, "Goal?team=0": OTHER})
        second = context.connect()
        await second.say(hello(behaviors={"A": OTHER, "B": OTHER, "C": OTHER}))
        fault = await second.refused()
        assert (fault.code, fault.got) == ("too_large", "behavior 'C' beside 2 that the configuration does not name")
        assert fault.remedy.endswith("below `behaviors`, or raise pipeline.limits.unnamed_behaviors")
        assert unnamed.added == {"A"}
        await context.connect().come_in(behaviors={"B": OTHER})
        assert unnamed.added == {"A", "B"}
        assert [*context.stepper.behaviors] == ["A", "Goal", "B"]


@pytest.mark.parametrize("name", ["../up", ".hidden", "a/b", "a#1", " ", "x" * 101, "a\nb", "logs", "run.json"])
async def test_a_name_that_no_folder_can_have_gets_no_learner(name: str) -> None:
    unnamed = counting_for_all()
    async with endpoint(unnamed=unnamed) as context:
        peer = context.connect()
        await peer.say(hello(behaviors={name: OTHER}))
        fault = await peer.refused()
        assert (fault.code, fault.expected[:42]) == ("specs", "a name that a folder of the run can have: ")
        assert not unnamed.added


async def test_one_that_no_network_reads_or_that_lacks_a_script_is_refused_as_any_other() -> None:
    small = BehaviorSpec(
        observations=(ObservationSpec(name="x", shape=(1, 2, 2), kind="image"),), actions=ActionSpec(continuous=1)
    )
    unnamed = counting_for_all("guard")
    async with endpoint(unnamed=unnamed) as context:
        for spec, scripts, code in ((small, ["guard"], "specs"), (OTHER, [], "scripts")):
            peer = context.connect()
            await peer.say(hello(behaviors={"A": spec}, scripts={"A": scripts}))
            assert (await peer.refused()).code == code
        assert not unnamed.added
        await context.connect().come_in(behaviors={"A": OTHER}, scripts={"A": ["guard"]})
        assert unnamed.added == {"A"}
