"""After its Hello a simulator stays within its limits and costs the other simulators nothing."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from random import Random
from typing import Any

import anyio
import pytest
import trio
from trio.testing import MockClock

from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.messages.codec import to_bytes
from sparring.pipeline.messages.simulator import (
    Behaviors,
    Bye,
    Fault,
    Ping,
    Player,
    Pong,
    Statistic,
    Step,
)
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from sparring.pipeline.stepping.limits import LimitSettings, check_behaviors
from sparring.services.endpoint.throttling import OWN_BYTES
from tests.security.security_endpoint import SPECS, Endpoint, endpoint, goal_step, hello

pytestmark = pytest.mark.anyio


async def test_a_flood_of_pings_is_read_slowly_and_no_simulator_is_disconnected() -> None:
    async with endpoint(limits={"asides_per_s": 10.0}) as server:
        peer, pongs = server.connect(), 0
        await peer.handshake()
        began = anyio.current_time()

        async def flood() -> None:
            for number in range(200):
                await peer.send(Ping(number=number))

        server.tasks.start_soon(flood)
        while pongs < 200:
            assert await peer.receive() is not None
            pongs += 1
            assert pongs <= 10 * (anyio.current_time() - began) + 10 + 3  # burst, Hello and rounding
        assert 18 <= anyio.current_time() - began <= 20
        assert len(server.log_lines("simulator_slowed_down")) <= 50
        assert server.counter("slowed_down_s") > 15


async def test_a_simulator_that_sends_but_does_not_read_is_throttled_and_then_disconnected() -> None:
    """Otherwise its answers would be buffered here without end."""
    settings = {"limits": {"sending_bytes": 1024, "asides_per_s": 1e6}, "simulator_timeout_s": 30.0}
    async with endpoint(**settings) as server:
        peer = server.connect()
        await peer.handshake()
        await peer.send_repeatedly(to_bytes(Ping()) * 50)
        assert server.counter("received_bytes") < 10_000
        assert len(server.log_lines("simulator_silent")) == 1


async def test_a_pause_of_this_process_is_no_silence_of_its_simulators() -> None:
    """What they sent meanwhile waits in their sockets, and is read only after the pause has been noticed."""
    async with endpoint(simulator_timeout_s=20.0, heartbeat_s=5.0) as server:
        peer = server.connect()
        await peer.handshake()
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, MockClock)
        clock.jump(60)
        await anyio.sleep(10)
        assert not server.log_lines("simulator_silent")
        await anyio.sleep(15)
        assert len(server.log_lines("simulator_silent")) == 1


async def test_an_incomplete_message_has_a_deadline() -> None:
    """A byte now and then does not count as a heartbeat."""
    async with endpoint(simulator_timeout_s=20.0) as server:
        peer = server.connect()
        await peer.handshake()
        began = anyio.current_time()
        await peer.send((2**25).to_bytes(4, "little") + (2**10).to_bytes(4, "little"))
        await peer.send_repeatedly(bytes(100), pause_s=1)
        assert 20 <= anyio.current_time() - began <= 25
        assert len(server.log_lines("simulator_silent")) == 1


async def test_large_messages_of_all_simulators_share_one_buffer() -> None:
    """The second message waits for the first; both arrive whole."""
    size = 4 * OWN_BYTES
    agents = size // 4
    async with endpoint(limits={"receiving_bytes": 5 * size, "agents": agents}) as server:
        peers = [server.connect() for _ in range(2)]
        for peer in peers:
            await peer.handshake()
        message = to_bytes(goal_step(agents))
        assert len(message) > 3 * size
        sent = [0, 0]

        async def send(number: int) -> None:
            for at in range(0, len(message), OWN_BYTES):
                await peers[number].stream.send(message[at : at + OWN_BYTES])
                sent[number] += 1
                await anyio.sleep(1)

        pool = server.simulators.pool
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send, 0)
            await anyio.sleep(0.5)
            tasks.start_soon(send, 1)
            await anyio.sleep(5)
            assert pool.taken == len(message)
            assert sent[1] <= 6  # what fits into the stream; no more was read
        await anyio.sleep(1)
        frames = [connection.frame for connection in server.stepper.connections.values()]
        assert [frame is not None for frame in frames] == [True, True]
        for peer in peers:
            await peer.send(Ping())  # a complete message releases the buffer
            assert isinstance(await peer.receive(), Pong)
        assert pool.taken == 0


async def fault_after_hello(server: Endpoint, message: Any) -> Fault:
    """Returns the Fault that a simulator receives when it sends `message` instead of a Step."""
    peer = server.connect()
    await peer.handshake()
    for at in range(0, len(data := to_bytes(message)), OWN_BYTES):
        await peer.stream.send(data[at : at + OWN_BYTES])
    return await peer.receive_fault()


def spec(**changes: Any) -> BehaviorSpec:
    return dataclasses.replace(SPECS["Goal?team=0"], **changes)


OBSERVED = ObservationSpec(name="much", shape=(2**19,))


@pytest.mark.parametrize(
    ("limits", "message", "key"),
    [
        ({"agents": 1}, goal_step(2), "agents"),
        ({"message_bytes": 4096}, goal_step(1000), "the limit"),
        ({"arrays": 16}, Step(sequence=0, reports=(goal_step().reports[0],) * 6), "the limit"),
        ({"behaviors": 1}, Behaviors(behaviors={"Goal?team=1": spec()}), "behaviors"),
    ],
)
async def test_a_message_beyond_the_limits_of_a_simulator_is_refused(
    limits: dict[str, int], message: Any, key: str
) -> None:
    async with endpoint(limits=limits) as server:
        fault = await fault_after_hello(server, message)
        assert fault.code == "too_large"
        assert key in fault.remedy
        assert server.counter("faults.too_large") == 1
        assert len(server.log_lines("simulator_fault")) == 1
        await server.connect().handshake()


@pytest.mark.parametrize(
    "behaviors",
    [
        {"Goal": spec(observations=(OBSERVED,))},
        {"Goal": spec(observations=tuple(dataclasses.replace(OBSERVED, name=str(n), shape=(1,)) for n in range(20)))},
        {"Goal": spec(actions=ActionSpec(continuous=10**9))},
        {"Goal": spec(actions=ActionSpec(discrete=(2**12, 1)))},
        {f"Goal?team={team}": spec() for team in range(65)},
    ],
    ids=["one observation of 2 MiB", "many observations", "many actions", "many choices", "many teams"],
)
async def test_a_spec_that_would_need_too_large_a_network_is_refused(behaviors: dict[str, BehaviorSpec]) -> None:
    with pytest.raises(RemoteProtocolError) as error:
        check_behaviors(behaviors, 0, LimitSettings(arrays=16))
    assert error.value.code == "too_large"
    check_behaviors(SPECS, 63, LimitSettings())


@pytest.mark.parametrize("number", [-1, 2**20, 2**31, 2**63])
async def test_a_simulator_number_that_no_column_can_hold_is_refused(number: int) -> None:
    async with endpoint() as server:
        peer = server.connect()
        await peer.send(hello(number=number))
        assert (await peer.receive_fault()).code == "number"


async def test_the_number_of_statistics_is_bounded_and_the_rest_are_counted() -> None:
    async with endpoint(limits={"statistics": 10}) as server:
        peer = server.connect()
        await peer.handshake()
        numbers = [Statistic(name=f"n{number % 40}", value=1.0, aggregation="sum") for number in range(80)]
        await peer.send(goal_step(statistics=(*numbers, Statistic(name="x" * 300, value=1.0))))
        await anyio.sleep(1)
        assert sum(name.startswith("simulator.") for name in server.registry.snapshot(0.0).counters) == 10
        assert server.counter("simulator.n3.total") == 2
        assert server.counter("statistics_rejected") == 61
        assert len(server.log_lines("statistic_rejected")) == 1


async def test_statistics_of_simulators_are_aggregated_as_requested() -> None:
    """Averages and sums cover all simulators; the most recent value is that of the first alone, as in ML-Agents."""
    async with endpoint() as server:
        for number, value in ((1, 4.0), (0, 2.0)):
            peer = server.connect()
            await peer.handshake(number=number)
            kinds = {"mean": "average", "spread": "histogram", "sum": "sum", "last": "most_recent"}
            statistics = [Statistic(name=name, value=value, aggregation=kind) for name, kind in kinds.items()]
            await peer.send(goal_step(statistics=(*statistics, *statistics)))
            await anyio.sleep(1)
        snapshot = server.registry.snapshot(0.0)
        own = {name: value for name, value in snapshot.counters.items() if name.startswith("simulator.")}
        sums = {"sum": 12.0, "sumsq": 40.0, "count": 4.0}
        assert own == {
            **{f"simulator.{name}.{what}": value for name in ("mean", "spread") for what, value in sums.items()},
            "simulator.sum.total": 12.0,
        }
        assert {name: value for name, value in snapshot.gauges.items() if name.startswith("simulator.")} == {
            "simulator.last": 2.0
        }


async def test_long_texts_of_a_simulator_are_truncated_in_the_log() -> None:
    async with endpoint() as server:
        peer = server.connect()
        await peer.handshake(name="n" * 10_000)
        await peer.send(Fault(code="c" * 10_000, got="g" * 10_000, expected="", remedy="r" * 10_000))
        assert await peer.receive() is None
        for line in server.logged:
            assert len(str(line)) < 2000


async def test_a_connection_cannot_replace_a_simulator_by_claiming_its_number() -> None:
    """This holds even while that simulator is silent, unless the new one shows the same certificate."""
    async with endpoint() as server:
        first, second = server.connect(), server.connect()
        await first.handshake(number=3)
        next(iter(server.simulators.peers.values())).identity = "arcade-1"
        await anyio.sleep(8)  # longer than a heartbeat
        await second.send(hello(number=3))
        assert (await second.receive_fault()).code == "number"
        await first.send(Ping(number=1))
        assert isinstance(await first.receive(), Pong)


async def test_the_end_of_the_run_waits_for_a_simulator_that_reconnected() -> None:
    """What it sends before it receives the Bye counts, and so does its own Bye."""
    async with endpoint() as server:
        first, second = server.connect(), server.connect()
        await first.handshake(number=0)
        await first.stream.aclose()
        await anyio.sleep(1)
        assert not server.simulators.peers
        await second.handshake(number=0)
        over = anyio.Event()

        async def part() -> None:
            await server.simulators.disconnect_all()
            over.set()

        server.tasks.start_soon(part)
        assert isinstance(await second.receive(), Bye)
        await anyio.sleep(1)
        assert not over.is_set()
        await second.send(Bye())
        await over.wait()


async def test_simulators_that_connect_and_disconnect_leave_nothing_behind_and_disturb_no_other() -> None:
    """They disconnect before Hello, amid Hello, amid a message, with a Bye, or while they wait for an answer."""
    random = Random(1)
    whole = b"".join(to_bytes(message) for message in (hello(), goal_step(), Ping(), Bye()))
    async with endpoint(limits={"handshakes": 10}) as server:
        permanent = server.connect("192.0.2.2")
        await permanent.handshake(number=0)

        async def visit() -> None:
            await anyio.sleep(random.uniform(0, 10))
            peer, length = server.connect(capacity=20), random.choice([0, random.randrange(len(whole)), len(whole)])
            chunk = random.randrange(1, 400)
            for at in range(0, length, chunk):
                with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                    await peer.stream.send(whole[at : min(length, at + chunk)])
                await anyio.sleep(random.uniform(0, 0.2))
            await peer.stream.aclose()

        async with anyio.create_task_group() as tasks:
            for _ in range(200):
                tasks.start_soon(visit)
        await anyio.sleep(1)
        await permanent.send(Ping())
        assert isinstance(await permanent.receive(), Pong)
        server.stepper.tick(anyio.current_time())
        assert [connection.number for connection in server.stepper.connections.values()] == [0]
        assert len(server.simulators.peers) == 1
        assert not server.acceptor.pending
        assert server.acceptor.connected == {"192.0.2.2": 1}
        assert server.simulators.pool.taken == 0
        assert server.stepper.behaviors["Goal"].table.taken == 0
        assert server.counter("simulators.connected") > 50
        assert max(Counter(line["event"] for line in server.logged).values()) <= 50 + 1


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"port": 65536}, "0 to 65535"),
        ({"port": -1}, "0 to 65535"),
        ({"areas": 2**31}, "1 to 1048576"),
        ({"settings": "zz"}, "pairs of hexadecimal digits"),
    ],
)
async def test_a_player_that_cannot_be_served_ends_its_own_connection_only(
    values: dict[str, Any], expected: str
) -> None:
    player = {"protocol": "unity", "port": 0, "settings": "00", "areas": 1, "connect_s": 1.0, "timeout_s": 1.0}
    async with endpoint() as server:
        peer = server.connect(host="127.0.0.1")
        await peer.send(hello(player=Player(**{**player, **values})))
        fault = await peer.receive_fault()
        assert (fault.code, fault.expected) == ("specs", expected)
        await server.connect().handshake()
