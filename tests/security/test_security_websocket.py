"""A WebSocket has the limits of any other connection, and only pages of allowed origins may open one."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import anyio
import pytest
from websockets.frames import Frame, Opcode

from sparring.pipeline.messages.codec import to_bytes
from sparring.pipeline.messages.simulator import Bye, Ping, Pong
from sparring.pipeline.security import token
from sparring.pipeline.stepping.limits import HELLO
from sparring.services.endpoint.admission import Credentials
from sparring.services.endpoint.throttling import OWN_BYTES
from tests.security.security_endpoint import Peer, endpoint, goal_step, hello
from tests.security.security_websocket import WebSocketClient, connect

pytestmark = pytest.mark.anyio
PAGE = "http://localhost:8000"


@pytest.mark.parametrize("origin", [None, PAGE])
async def test_a_simulator_converses_over_a_websocket_as_over_a_socket(origin: str | None) -> None:
    async with endpoint() as server:
        server.accept_websockets(PAGE)
        peer, _ = await connect(server, origin)
        await peer.handshake()
        await peer.send(goal_step())
        await peer.send(Ping(number=3))
        assert await pong(peer) == 3
        ((_, connection),) = server.stepper.connections.items()
        assert connection.frame is not None
        await peer.send(Bye())
        assert await peer.receive() is None
        assert not server.simulators.peers
        assert not server.log_lines("simulator_lost")


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:8001", "https://localhost:8000"])
async def test_a_page_of_another_origin_is_refused_before_it_can_send_anything(origin: str) -> None:
    """Any page that a browser shows can reach loopback; its script cannot hide where it comes from."""
    async with endpoint() as server:
        server.accept_websockets(PAGE)
        for _ in range(3):
            answer = await WebSocketClient(server.connect().stream, origin).connect()
            assert (answer.status_code, PAGE in str(answer)) == (403, False)
            await anyio.sleep(0.1)
        assert server.counter("rejections.origin") == 3
        (line,) = server.log_lines("simulator_rejected")
        assert origin in line["got"]
        assert not server.acceptor.pending


async def test_without_origins_no_page_may_connect_and_other_programs_may() -> None:
    async with endpoint() as server:
        server.accept_websockets()
        assert (await WebSocketClient(server.connect().stream, PAGE).connect()).status_code == 403
        peer, _ = await connect(server)
        await peer.handshake()


async def test_a_websocket_needs_the_token_where_sockets_need_it(keys: Path) -> None:
    async with endpoint(Credentials(token=token(keys))) as server:
        server.accept_websockets()
        refused, _ = await connect(server)
        await refused.send(hello(credential="guessed"))
        assert (await refused.receive_fault()).code == "credential"
        peer, _ = await connect(server)
        await peer.handshake(credential=token(keys))


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: trainer\r\n", b"GET /", to_bytes(hello())])
async def test_a_handshake_that_never_ends_is_closed_after_its_timeout(sent: bytes) -> None:
    async with endpoint(limits={"handshake_timeout_s": 3.0}) as server:
        server.accept_websockets()
        peer, began = server.connect(), anyio.current_time()
        if sent:
            await peer.send(sent)
        with pytest.raises(anyio.EndOfStream):  # and no byte of another protocol before
            await peer.stream.receive()
        assert 3 <= anyio.current_time() - began <= 4
        assert server.counter("rejections.timeout") == 1
        assert not server.acceptor.pending


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (b"POST / HTTP/1.1\r\nHost: trainer\r\n\r\n", "malformed"),
        (b"GET / HTTP/1.1\r\nHost: trainer\r\n\r\n", "malformed"),
        (b"\n" * 100, "malformed"),
        (b"GET / HTTP/1.1\r\n" + b"a: " + b"b" * 10_000 + b"\r\n", "malformed"),
    ],
    ids=["POST", "no upgrade", "no request", "long header"],
)
async def test_what_is_no_handshake_is_refused(sent: bytes, kind: str) -> None:
    async with endpoint() as server:
        server.accept_websockets()
        peer = server.connect()
        await peer.send(sent)
        await anyio.sleep(0.1)
        assert server.counter(f"rejections.{kind}") == 1
        assert not server.acceptor.pending


async def test_bytes_without_end_before_hello_are_refused() -> None:
    """Neither headers nor control frames gain more than twice the bytes of Hello."""
    async with endpoint() as server:
        server.accept_websockets()
        peer, line = server.connect(), b"a: " + b"b" * 8000 + b"\r\n"
        await peer.send(b"GET / HTTP/1.1\r\n")
        for _ in range(2 * HELLO.total // len(line)):
            await peer.send(line)
        assert server.counter("rejections.too_large") == 0
        await peer.send_repeatedly(line, 0.001)
        assert server.counter("rejections.too_large") == 1
        _, client = await connect(server)

        async def read_pongs() -> None:
            with contextlib.suppress(anyio.EndOfStream, anyio.ClosedResourceError):
                while True:
                    await client.stream.receive(2**20)

        server.tasks.start_soon(read_pongs)
        await Peer(client.stream).send_repeatedly(ping() * 5000, 0.001)
        assert server.counter("rejections.too_large") == 2


async def pong(peer: Peer) -> int:
    """Returns the number of the Pong that comes next."""
    message = await peer.receive()
    assert isinstance(message, Pong)
    return message.number


def ping() -> bytes:
    return Frame(Opcode.PING, b"").serialize(mask=True)


async def test_many_connections_evict_the_oldest_handshakes_of_their_address() -> None:
    async with endpoint(limits={"handshakes": 10}) as server:
        server.accept_websockets()
        slow, _ = await connect(server, host="198.51.100.7")
        for _ in range(100):
            server.connect("192.0.2.1")
            await anyio.sleep(0.001)
            assert len(server.acceptor.pending) <= 10
        await slow.handshake()
        assert server.counter("rejections.evicted") == 100 + 1 - 10


async def test_a_text_message_is_refused_and_disturbs_no_other() -> None:
    async with endpoint() as server:
        server.accept_websockets()
        other, _ = await connect(server)
        await other.handshake()
        peer, client = await connect(server)
        await peer.handshake()
        client.protocol.send_text(b"step")
        await client.flush()
        assert await peer.receive() is None
        await anyio.sleep(0.1)
        closed = client.protocol.close_rcvd
        assert closed is not None
        assert (closed.code, closed.reason) == (1003, "a text message")
        assert server.counter("faults.malformed") == 1
        (line,) = server.log_lines("simulator_fault")
        assert "text" in line["got"]
        await other.send(Ping(number=1))
        assert await pong(other) == 1


@pytest.mark.parametrize("claimed", [2**16 + 1, 2**40])
async def test_a_message_beyond_the_limit_is_refused_by_its_length(claimed: int) -> None:
    async with endpoint(limits={"message_bytes": 2**16}) as server:
        server.accept_websockets()
        peer, client = await connect(server)
        await peer.handshake()
        await client.stream.send(b"\x82\xff" + claimed.to_bytes(8, "big") + bytes(4))
        assert await peer.receive() is None
        await anyio.sleep(0.1)
        closed = client.protocol.close_rcvd
        assert closed is not None
        assert closed.code == 1009
        assert server.counter("faults.too_large") == 1


async def test_fragments_without_end_are_refused_at_the_limit() -> None:
    async with endpoint(limits={"message_bytes": 2**16, "asides_per_s": 1e9}) as server:
        server.accept_websockets()
        peer, client = await connect(server)
        await peer.handshake()
        first = Frame(Opcode.BINARY, b"", fin=False).serialize(mask=True)
        await client.stream.send(first)
        empty = Frame(Opcode.CONT, b"", fin=False).serialize(mask=True)
        await Peer(client.stream).send_repeatedly(empty * 1000, 0.001)
        assert server.counter("faults.too_large") == 1


@pytest.mark.parametrize("damage", ["unmasked", "reserved", "opcode", "continuation"])
async def test_garbage_after_the_handshake_ends_that_connection_alone(damage: str) -> None:
    async with endpoint() as server:
        server.accept_websockets()
        peer, client = await connect(server)
        await peer.handshake()
        garbage = {
            "unmasked": b"\x82\x01x",
            "reserved": b"\xf2\x81",
            "opcode": b"\x8f\x80",
            "continuation": b"\x80\x80",
        }
        await client.stream.send(garbage[damage] + bytes(8))
        assert await peer.receive() is None
        await anyio.sleep(0.1)
        assert server.counter("faults.malformed") == 1
        again, _ = await connect(server)
        await again.handshake()


@pytest.mark.parametrize("payload", [b"", b"1234567", to_bytes(Ping()) * 2, to_bytes(Ping())[:-8]])
async def test_a_binary_message_holds_one_message_of_the_protocol(payload: bytes) -> None:
    async with endpoint() as server:
        server.accept_websockets()
        peer, _ = await connect(server)
        await peer.handshake()
        await peer.send(payload)
        fault = await peer.receive_fault()
        assert fault.code == "malformed"
        assert f"a binary message of {len(payload)} bytes" in fault.got


async def test_a_message_may_arrive_in_fragments_and_byte_by_byte() -> None:
    async with endpoint() as server:
        server.accept_websockets()
        peer, client = await connect(server)
        await peer.handshake()
        message = to_bytes(Ping(number=9))
        client.protocol.send_binary(message[:5], fin=False)
        client.protocol.send_ping(b"between")
        client.protocol.send_continuation(message[5:], fin=True)
        for byte in b"".join(client.protocol.data_to_send()):
            await client.stream.send(bytes([byte]))
        assert await pong(peer) == 9
        assert client.pongs == 1


async def test_a_flood_of_websocket_pings_is_read_slowly() -> None:
    async with endpoint(limits={"asides_per_s": 10.0}) as server:
        server.accept_websockets()
        peer, client = await connect(server)
        await peer.handshake()
        began = anyio.current_time()

        async def flood() -> None:
            for _ in range(200):
                await client.stream.send(ping())
            await peer.send(Ping(number=1))

        server.tasks.start_soon(flood)
        assert await pong(peer) == 1
        assert client.pongs == 200
        assert 18 <= anyio.current_time() - began <= 21
        assert len(server.log_lines("simulator_slowed_down")) <= 50


async def test_a_peer_that_does_not_read_is_not_read_and_then_disconnected() -> None:
    settings = {"limits": {"sending_bytes": 1024, "asides_per_s": 1e6}, "simulator_timeout_s": 30.0}
    async with endpoint(**settings) as server:
        server.accept_websockets()
        peer, client = await connect(server)
        await peer.handshake()
        began = anyio.current_time()
        client.protocol.send_binary(to_bytes(Ping()))
        (one,) = client.protocol.data_to_send()
        await Peer(client.stream).send_repeatedly((one + ping()) * 50)
        assert anyio.current_time() - began <= 60
        assert server.counter("received_bytes") < 20_000
        assert len(server.log_lines("simulator_silent")) == 1


async def test_large_messages_of_websockets_wait_for_the_shared_buffer() -> None:
    """The length of an incoming one is masked, so that the largest possible is reserved."""
    agents = OWN_BYTES // 4
    message = to_bytes(goal_step(agents))
    most = 8 * OWN_BYTES
    assert 3 * OWN_BYTES < len(message) < most
    async with endpoint(limits={"receiving_bytes": most, "message_bytes": most, "agents": agents}) as server:
        server.accept_websockets()
        peers = [await connect(server) for _ in range(2)]
        sent = [0, 0]

        async def send(number: int) -> None:
            client = peers[number][1]
            client.protocol.send_binary(message)
            data = b"".join(client.protocol.data_to_send())
            for at in range(0, len(data), 2**15):
                await client.stream.send(data[at : at + 2**15])
                sent[number] += 2**15
                await anyio.sleep(0.1)

        for peer, _ in peers:
            await peer.handshake()
        pool = server.simulators.pool
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send, 0)
            await anyio.sleep(0.05)
            tasks.start_soon(send, 1)
            await anyio.sleep(0.1 * math.ceil(1.5 * OWN_BYTES / 2**15))
            assert pool.taken == most
            await anyio.sleep(1)
            assert sent[0] > sent[1]
            assert sent[1] <= OWN_BYTES + 8 * 2**15  # what is its own, and what fits into the stream
        await anyio.sleep(1)
        for peer, _ in peers:
            await peer.send(Ping())
            assert isinstance(await peer.receive(), Pong)
        assert pool.taken == 0
        assert all(connection.frame is not None for connection in server.stepper.connections.values())


async def test_a_peer_that_disconnects_within_a_message_is_lost_alone() -> None:
    async with endpoint() as server:
        server.accept_websockets()
        peer, client = await connect(server)
        await peer.handshake()
        await client.stream.send(b"\x82\xfe")
        await client.stream.aclose()
        await anyio.sleep(1)
        assert not server.simulators.peers
        assert len(server.log_lines("simulator_lost")) == 1
