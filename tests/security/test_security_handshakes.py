"""Before its Hello a peer has little time, few bytes and few connections."""

from __future__ import annotations

import anyio
import pytest

from sparring.pipeline.messages.codec import to_bytes
from sparring.pipeline.messages.simulator import (
    Ping,
)
from sparring.services.endpoint.admission import host_of
from tests.security.security_endpoint import End, endpoint, goal_step, hello

pytestmark = pytest.mark.anyio


async def test_a_connection_without_hello_is_closed_after_the_handshake_timeout() -> None:
    """A slow loris, which sends a byte now and then, gains no time by it."""
    async with endpoint(limits={"handshake_timeout_s": 3.0}) as server:
        peer, began = server.connect(), anyio.current_time()
        await peer.send((2**17).to_bytes(4, "little") + (2**10).to_bytes(4, "little"))
        await peer.send_repeatedly(b"\1", pause_s=0.5)
        assert 3 <= anyio.current_time() - began <= 4.5  # a second for the final report
        assert not server.acceptor.pending
        assert server.counter("rejections.timeout") == 1


async def test_half_open_connections_are_bounded_and_an_honest_newcomer_is_admitted() -> None:
    async with endpoint(limits={"handshakes": 20}) as server:
        for number in range(300):
            server.connect(f"192.0.2.{number % 3}")
            await anyio.sleep(0.001)
            assert len(server.acceptor.pending) <= 20
        honest = server.connect()
        await honest.handshake()
        assert server.counter("rejections.evicted") == 300 - 20 + 1
        assert len(server.log_lines("simulator_rejected")) == 3  # one for each address


async def test_many_connections_from_one_address_evict_only_their_own() -> None:
    """An address that opens connections without end does not evict those of another address."""
    async with endpoint(limits={"handshakes": 10}) as server:
        slow = server.connect("198.51.100.7")
        for _ in range(100):
            server.connect("192.0.2.1")
            await anyio.sleep(0.001)
        await slow.handshake()


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (to_bytes(Ping()), "unexpected_message"),
        (to_bytes(goal_step()), "unexpected_message"),
        ((2**20).to_bytes(4, "little") + (2**10).to_bytes(4, "little"), "too_large"),
        (b"\xff" * 64, "too_large"),
        ((64).to_bytes(4, "little") + (50).to_bytes(4, "little") + bytes(56), "malformed"),
    ],
)
async def test_an_unauthenticated_peer_may_send_only_a_small_hello(sent: bytes, code: str) -> None:
    async with endpoint() as server:
        peer = server.connect()
        await peer.send(sent)
        assert (await peer.receive_fault()).code == code
        assert server.counter(f"rejections.{code}") == 1


@pytest.mark.parametrize(
    ("limits", "hosts", "refused"),
    [
        ({"connections": 3}, ["a", "b", "c", "d"], "pipeline.limits.connections"),
        ({"connections_per_host": 2}, ["a", "a", "b", "a"], "pipeline.limits.connections_per_host"),
    ],
)
async def test_connections_are_limited_in_total_and_per_address(
    limits: dict[str, int], hosts: list[str], refused: str
) -> None:
    async with endpoint(limits=limits) as server:
        peers = [server.connect(host) for host in hosts]
        for peer in peers[:-1]:
            await peer.handshake()
        await peers[-1].send(hello())
        fault = await peers[-1].receive_fault()
        assert (fault.code, refused in fault.remedy) == ("busy", True)
        await peers[0].stream.aclose()
        await anyio.sleep(1)
        again = server.connect(hosts[0])
        await again.handshake()


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
async def test_a_peer_is_identified_by_its_ipv4_address_or_its_ipv6_network(address: str, host: str) -> None:
    assert host_of(End(None, None, address)) == host
