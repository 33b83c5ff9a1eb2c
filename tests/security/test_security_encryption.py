"""Secrets appear in no log or message, and nothing bypasses TLS."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgpack
import numpy as np
import pytest
from websockets.sync.client import connect as sync_connect

from sparring.pipeline.errors import CodecError
from sparring.pipeline.messages.codec import FrameReader, from_bytes, to_bytes
from sparring.pipeline.messages.simulator import (
    VERSION,
    Act,
    BehaviorActions,
    BehaviorReport,
    Bye,
    Decisions,
    Hello,
    Reset,
    Step,
    Welcome,
)
from sparring.pipeline.security import client_tls, server_tls, token
from sparring.pipeline.simulation import Client
from sparring.services.endpoint.admission import Credentials
from sparring.services.endpoint.sockets import Outgoing
from tests.security.security_endpoint import SPECS, hello, secrets_of
from tests.security.security_guarded_endpoint import guarded_endpoint

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


# ---------------------------------------------------------------- secrets


async def test_secrets_appear_in_no_log_and_no_message(keys: Path) -> None:
    secret = token(keys)
    assert secret not in repr(hello(credential=secret))
    assert secret not in repr(Credentials(token=secret))
    async with guarded_endpoint(keys) as guarded:
        for credential in (secret, [secret], {secret: 1}):
            body = {"version": VERSION, "name": "x", "behaviors": {}, "credential": credential, "scripts": 1}
            header = msgpack.packb({"type": "hello", "body": body, "arrays": []})
            size = 8 + len(header) + -(8 + len(header)) % 8
            sent = (
                size.to_bytes(4, "little") + len(header).to_bytes(4, "little") + header + bytes(-(8 + len(header)) % 8)
            )
            received = await guarded.exchange(client_tls(keys), sent)
            assert secret.encode() not in received
        client = await guarded.connect(keys)
        await anyio.to_thread.run_sync(client.close)
        log = str(guarded.endpoint.logged)
        assert guarded.endpoint.log_lines("simulator_rejected")
        for secret in secrets_of(keys):
            assert secret not in log


async def test_the_decoder_does_not_show_a_secret_of_a_wrong_type() -> None:
    header = msgpack.packb({"type": "hello", "body": {"credential": ["sesame"]}, "arrays": []})
    data = (8 + len(header)).to_bytes(4, "little") + len(header).to_bytes(4, "little") + header
    data = data + bytes(-len(data) % 8)
    with pytest.raises(CodecError) as error:
        from_bytes((len(data)).to_bytes(4, "little") + data[4:])
    assert "hello.credential" in str(error.value)
    assert "sesame" not in str(error.value)


# ---------------------------------------------------------------- both ends of TLS


async def test_nothing_bypasses_the_encryption(keys: Path) -> None:
    """Messages usually go to the socket directly, which under TLS would send plain text."""
    async with guarded_endpoint(keys) as guarded:
        client = await guarded.connect(keys, "arcade")
        (peer,) = guarded.endpoint.simulators.peers.values()
        assert isinstance(peer.outgoing, Outgoing)
        assert peer.outgoing._direct is None
        await anyio.to_thread.run_sync(client.close)


def test_large_messages_pass_both_ways_amid_heartbeats(keys: Path) -> None:
    """TLS records have other boundaries than messages, and two threads write."""
    agents = np.arange(40_000)
    rows = Decisions(
        agents=agents, observations=(np.ones((len(agents), 1), np.float32),), rewards=np.zeros(40_000, "f4")
    )
    frames: list[Any] = []

    def trainer(listener: socket.socket) -> None:
        raw, _ = listener.accept()
        with server_tls(keys).wrap_socket(raw, server_side=True) as stream:
            reader = FrameReader()
            while True:
                while (message := reader.next()) is None:
                    if not (data := stream.recv(2**14)):
                        return
                    reader.feed(data)
                frames.append(message)
                if isinstance(message, Hello):
                    welcome = Welcome(version=VERSION, connection=1, heartbeat_s=0.002, timeout_s=30)
                    stream.sendall(to_bytes(welcome) + to_bytes(Reset()))
                if isinstance(message, Step):
                    moves = np.full((len(agents), 1), 0.25, np.float32)
                    none = np.zeros((len(agents), 0), np.int32)
                    action = BehaviorActions(behavior="Goal?team=0", agents=agents, continuous=moves, discrete=none)
                    stream.sendall(to_bytes(Act(sequence=message.sequence, actions=(action,))))

    with listener_on_loopback() as listener:
        served = threading.Thread(target=trainer, args=(listener,))
        served.start()
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with Client.connect(address, name="x", behaviors=SPECS, keys=keys, certificate="arcade") as client:
            assert isinstance(client.begin(), Reset)
            for _ in range(5):
                answer = client.exchange([BehaviorReport(behavior="Goal?team=0", decisions=rows)])
                assert not isinstance(answer, Reset | Bye)
                assert answer["Goal?team=0"].continuous.sum() == len(agents) / 4
        served.join(20)
    assert [type(frame).__name__ for frame in frames if isinstance(frame, Hello | Step | Bye)] == [
        "Hello",
        *["Step"] * 5,
        "Bye",
    ]


@contextlib.contextmanager
def listener_on_loopback() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        yield listener


@pytest.mark.parametrize("certificate", ["arcade", ""])
async def test_a_websocket_beyond_loopback_is_encrypted_and_needs_a_certificate_or_the_token(
    keys: Path, certificate: str
) -> None:
    async with guarded_endpoint(keys) as guarded:
        guarded.endpoint.accept_websockets()
        port = guarded.address[1]

        def converse() -> tuple[str, str]:
            """Returns the types of the answers to Hello without and with a credential."""
            found = []
            for name, credential in (("", ""), (certificate, "" if certificate else token(keys))):
                context = client_tls(keys, name)
                with sync_connect(f"wss://127.0.0.1:{port}", ssl=context, compression=None) as socket:
                    socket.send(to_bytes(hello(credential=credential)))
                    found.append(type(from_bytes(socket.recv(timeout=20))).__name__)
            return found[0], found[1]

        assert await anyio.to_thread.run_sync(converse) == ("Fault", "Welcome")
        assert b"HTTP" not in await guarded.exchange(None, b"GET / HTTP/1.1\r\n\r\n")
