"""Simulators authenticate; unauthenticated peers learn nothing, and a simulator can do nothing but simulate."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgpack
import pytest

import sparring.pipeline.messages.segments
from sparring.pipeline.errors import CodecError, RemoteProtocolError
from sparring.pipeline.messages.codec import from_bytes, to_bytes
from sparring.pipeline.messages.schema import TAGS
from sparring.pipeline.messages.simulator import (
    Bye,
    Reset,
)
from sparring.pipeline.security import client_tls, token
from sparring.pipeline.simulation.encrypted import encrypt
from sparring.pipeline.stepping.settings import Accepted
from tests.security.security_endpoint import SPECS, endpoint, hello
from tests.security.security_guarded_endpoint import GuardedEndpoint, guarded_endpoint

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


# ---------------------------------------------------------------- admission


@pytest.mark.parametrize(
    ("accepted", "certificate"),
    [("either", "arcade"), ("either", ""), ("certificate", "arcade"), ("token", "")],
)
async def test_a_simulator_with_valid_keys_connects_over_tls(keys: Path, accepted: Accepted, certificate: str) -> None:
    async with guarded_endpoint(keys, accepted) as guarded:
        client = await guarded.connect(keys, certificate)
        assert isinstance(await anyio.to_thread.run_sync(client.begin), Reset)
        (peer,) = guarded.endpoint.simulators.peers.values()
        assert peer.identity == certificate
        await anyio.to_thread.run_sync(client.close)
        (line,) = guarded.endpoint.log_lines("simulator_connected")
        assert line["peer"].startswith(f"127.0.0.1 {certificate}".rstrip())


async def test_a_number_needs_the_certificate_of_that_simulator(keys: Path) -> None:
    """Otherwise any simulator could keep another one of the run out for good."""
    async with guarded_endpoint(keys) as guarded:
        for certificate, number in (("", 0), ("arcade", 0), ("simulator-0", 1)):
            error = await guarded.connect_refused(keys, certificate, "", number)
            assert error.code == "number"
            assert f"expected the certificate simulator-{number}" in str(error)
        for certificate, number in (("simulator-0", 0), ("arcade", 1), ("", 2)):
            client = await guarded.connect(keys, certificate, "", number)
            await anyio.to_thread.run_sync(client.close)


async def test_a_token_alone_is_enough_on_loopback_if_encrypt_is_off(keys: Path) -> None:
    async with guarded_endpoint(keys, encrypt=False) as guarded:
        client = await guarded.connect("", "", token(keys))
        await anyio.to_thread.run_sync(client.close)
        assert (await guarded.connect_refused("", "", "guess")).code == "credential"
        assert (await guarded.connect_refused("")).code == "credential"


@pytest.mark.parametrize(
    ("accepted", "credential"), [("either", "guess"), ("either", "naïve"), ("certificate", "the token")]
)
async def test_a_wrong_token_is_refused_and_so_is_any_token_if_only_certificates_are_accepted(
    keys: Path, accepted: Accepted, credential: str
) -> None:
    async with guarded_endpoint(keys, accepted) as guarded:
        credential = token(keys) if credential == "the token" else credential
        error = await guarded.connect_refused(keys, "", credential)
        assert error.code == "credential"
        assert credential not in str(error)
        assert guarded.endpoint.counter("rejections.credential") == 1


async def test_a_certificate_of_another_authority_is_refused_on_both_sides(keys: Path, others: Path) -> None:
    """The client fails at once and does not reconnect."""
    async with guarded_endpoint(keys) as guarded:
        error = await guarded.connect_refused(others, "arcade")  # does not trust our server
        assert error.code == "credential"
        mixed = client_tls(keys)
        mixed.load_cert_chain(others / "tls" / "arcade.pem", others / "tls" / "arcade.key")
        assert await guarded.exchange(mixed, to_bytes(hello())) == b""
        assert guarded.endpoint.counter("rejections.handshake") == 2
        assert len(guarded.endpoint.log_lines("simulator_rejected")) == 1
        assert not guarded.endpoint.log_lines("simulator_connected")


async def test_an_endpoint_at_an_address_that_its_keys_do_not_name_is_refused_with_a_remedy(keys: Path) -> None:
    async with guarded_endpoint(keys) as guarded:

        def connect() -> None:
            encrypt(socket.create_connection(guarded.address, 20), client_tls(keys), "10.0.0.9")

        with pytest.raises(RemoteProtocolError, match=r"for other addresses .*10\.0\.0\.9.* --hosts"):
            await anyio.to_thread.run_sync(connect)


async def test_the_certificates_of_endpoint_and_simulator_are_not_interchangeable(keys: Path, tmp_path: Path) -> None:
    async with guarded_endpoint(keys) as guarded:
        impostor = client_tls(keys)
        impostor.load_cert_chain(keys / "tls" / "server.pem", keys / "tls" / "server.key")
        assert await guarded.exchange(impostor, to_bytes(hello())) == b""
        assert guarded.endpoint.counter("rejections.handshake") == 1
    stolen = tmp_path / "stolen"
    shutil.copytree(keys, stolen)
    for ending in ("pem", "key"):
        shutil.copyfile(keys / "tls" / f"arcade.{ending}", stolen / "tls" / f"server.{ending}")
    async with guarded_endpoint(stolen) as guarded:
        assert (await guarded.connect_refused(keys, "arcade")).code == "credential"


async def test_a_name_that_was_removed_from_the_list_is_refused(keys: Path, tmp_path: Path) -> None:
    own = tmp_path / "keys"
    shutil.copytree(keys, own)
    listed = (own / "allowed.yaml").read_text()
    assert "arcade, " in listed
    (own / "allowed.yaml").write_text(listed.replace("arcade, ", ""))
    async with guarded_endpoint(own) as guarded:
        assert (await guarded.connect_refused(keys, "arcade")).code == "credential"


# ---------------------------------------------------------------- unauthenticated peers


FOREIGN_BYTES = {
    "hello in the clear": to_bytes(hello()),
    "garbage": bytes(range(256)),
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("kind", FOREIGN_BYTES)
async def test_a_peer_without_tls_learns_nothing(keys: Path, kind: str) -> None:
    async with guarded_endpoint(keys) as guarded:
        received = await guarded.exchange(None, FOREIGN_BYTES[kind])
        assert len(received) <= 7  # a TLS alert
        assert guarded.endpoint.counter("rejections") == 1


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (to_bytes(hello()), "credential"),
        (to_bytes(hello(version=99)), "credential"),
        (to_bytes(hello(behaviors={"Nope": SPECS["Goal?team=0"]})), "credential"),
        (bytes(range(64)), ""),
        (to_bytes(Bye()), ""),
    ],
)
async def test_a_peer_without_credential_learns_over_tls_only_that_it_needs_one(
    keys: Path, sent: bytes, code: str
) -> None:
    async with guarded_endpoint(keys) as guarded:
        received = await guarded.exchange(client_tls(keys), sent)
        assert (from_bytes(received).code if received else "") == code
        assert "Goal" not in str(received)


async def test_a_recorded_conversation_cannot_be_replayed(keys: Path) -> None:
    """A relay records a whole conversation, which the test then sends again unchanged."""
    async with guarded_endpoint(keys) as guarded:
        recorded = bytearray()
        with Relay(guarded.address, recorded.extend) as relay:
            relayed = GuardedEndpoint(guarded.endpoint, relay.address)
            client = await relayed.connect(keys, "arcade")
            await anyio.to_thread.run_sync(client.close)
        assert len(guarded.endpoint.log_lines("simulator_connected")) == 1
        received = await guarded.exchange(None, bytes(recorded))
        assert len(guarded.endpoint.log_lines("simulator_connected")) == 1
        assert guarded.endpoint.counter("rejections.handshake") == 1
        with pytest.raises(CodecError):
            from_bytes(received)


class Relay:
    """Forwards the bytes of one connection and passes those of the caller to `record`."""

    def __init__(self, target: tuple[str, int], record: Callable[[bytes], Any]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = ("127.0.0.1", self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._run, args=(target, record))]

    def __enter__(self) -> Relay:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._threads[0].join(20)
        self._listener.close()

    def _run(self, target: tuple[str, int], record: Callable[[bytes], Any]) -> None:
        near, far = self._listener.accept()[0], socket.create_connection(target)
        with near, far:
            back = threading.Thread(target=self._forward, args=(far, near, len))
            back.start()
            self._forward(near, far, record)
            with contextlib.suppress(OSError):  # the other side has closed it
                far.shutdown(socket.SHUT_RDWR)
            back.join(20)

    def _forward(self, source: socket.socket, target: socket.socket, record: Callable[[bytes], Any]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                record(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


# ---------------------------------------------------------------- a simulator can do nothing but simulate


@pytest.mark.parametrize(
    "tag", sorted(tag for tag, cls in TAGS.items() if cls.__module__ != "sparring.pipeline.messages.simulator")
)
async def test_records_of_services_are_refused_from_a_simulator(tag: str) -> None:
    """Weights, allowances, assignments and state are refused, however well formed they are."""
    async with endpoint() as context:
        peer = context.connect()
        await peer.handshake()
        header = msgpack.packb({"type": tag, "body": {}, "arrays": []})
        await peer.send((8 + len(header) + -len(header) % 8).to_bytes(4, "little") + len(header).to_bytes(4, "little"))
        await peer.send(header + bytes(-len(header) % 8))
        assert (await peer.receive_fault()).code in ("malformed", "unexpected_message")
    assert sparring.pipeline.messages.segments.__name__ in {cls.__module__ for cls in TAGS.values()}
