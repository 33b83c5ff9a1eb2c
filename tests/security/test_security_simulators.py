"""Simulators show who they are; strangers learn nothing, and a simulator can do nothing but simulate."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgpack
import numpy as np
import pytest
from anyio.abc import SocketAttribute

import sparring.pipeline.messages.segments
from sparring.pipeline.errors import CodecError, RemoteProtocolError, SettingsError
from sparring.pipeline.messages.codec import FrameReader, from_bytes, to_bytes
from sparring.pipeline.messages.schema import TAGS
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
from sparring.pipeline.security import client_tls, making, server_tls, token
from sparring.pipeline.settings import parse_settings
from sparring.pipeline.simulation import Client
from sparring.pipeline.simulation.encrypted import credential_of, encrypt
from sparring.pipeline.stepping.settings import Accepted
from sparring.services.commands.record_simulator import lone_simulator
from sparring.services.endpoint.credentials import Credentials, credentials
from sparring.services.endpoint.listening import listen
from sparring.services.endpoint.outgoing import Outgoing
from sparring.services.supervision.topology import shown
from tests.security.security_house import SPECS, Endpoint, endpoint, hello, secrets_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys with two simulators."""
    folder = tmp_path_factory.mktemp("security") / "keys"
    making.make(folder, ["arcade", "simulator-0"])
    return folder


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of somebody else, who knows our names."""
    folder = tmp_path_factory.mktemp("security") / "others"
    making.make(folder, ["arcade"])
    return folder


@dataclass
class GuardedEndpoint:
    """An endpoint on loopback."""

    context: Endpoint
    address: tuple[str, int]

    @property
    def text(self) -> str:
        return f"tcp://127.0.0.1:{self.address[1]}"

    async def visit(
        self, keys: Path | str, certificate: str = "", credential: str = "", number: int | None = None
    ) -> Client:
        """A client of the kit that was welcomed."""

        def call() -> Client:
            return Client.connect(
                self.text,
                name="visitor",
                behaviors=SPECS,
                keys=keys,
                certificate=certificate,
                credential=credential,
                number=number,
                connect_timeout_s=20,
                reconnect=False,
            )

        return await anyio.to_thread.run_sync(call)

    async def refused(self, *shown: Any) -> RemoteProtocolError:
        """Why a client was refused."""
        with pytest.raises(RemoteProtocolError) as told:
            await self.visit(*shown)
        return told.value

    async def raw(self, context: ssl.SSLContext | None, first: bytes) -> bytes:
        """All that a stranger gets to hear that says `first`, within TLS where it has a context for that."""

        def call() -> bytes:
            connected = socket.create_connection(self.address, 20)
            heard = b""
            with connected, contextlib.suppress(OSError):
                stream = connected if context is None else context.wrap_socket(connected, server_hostname="127.0.0.1")
                with stream:
                    stream.sendall(first)
                    while data := stream.recv(2**16):
                        heard += data
            return heard

        return await anyio.to_thread.run_sync(call)


@asynccontextmanager
async def door(
    keys: Path | None, accepted: Accepted = "either", *, encrypt: bool = True
) -> AsyncIterator[GuardedEndpoint]:
    """An endpoint that asks for keys."""
    asked = credentials("tcp://127.0.0.1:1", keys, accepted, encrypt=encrypt)
    async with endpoint(asked) as context:
        listener = await listen("tcp://127.0.0.1:0")
        address = listener.extra(SocketAttribute.local_address)
        context.tasks.start_soon(context.gate.run, listener, context.tasks)
        yield GuardedEndpoint(context, ("127.0.0.1", address[1]))


# ---------------------------------------------------------------- who comes in


@pytest.mark.parametrize(
    ("accepted", "certificate"),
    [("either", "arcade"), ("either", ""), ("certificate", "arcade"), ("token", "")],
)
async def test_a_simulator_with_its_keys_comes_in_encrypted(keys: Path, accepted: Accepted, certificate: str) -> None:
    async with door(keys, accepted) as there:
        client = await there.visit(keys, certificate)
        assert isinstance(await anyio.to_thread.run_sync(client.begin), Reset)
        (peer,) = there.context.simulators._peers.values()
        assert peer.candidate.identity == certificate
        await anyio.to_thread.run_sync(client.close)
        (line,) = there.context.lines("simulator_connected")
        assert line["peer"].startswith(f"127.0.0.1 {certificate}".rstrip())


async def test_a_number_is_for_who_has_its_certificate(keys: Path) -> None:
    """Else any simulator could keep another of the run's out, for good."""
    async with door(keys) as there:
        for certificate, number in (("", 0), ("arcade", 0), ("simulator-0", 1)):
            told = await there.refused(keys, certificate, "", number)
            assert told.code == "number"
            assert f"expected the certificate simulator-{number}" in str(told)
        for certificate, number in (("simulator-0", 0), ("arcade", 1), ("", 2)):
            client = await there.visit(keys, certificate, "", number)
            await anyio.to_thread.run_sync(client.close)


async def test_a_token_alone_is_enough_on_loopback_where_encrypt_is_off(keys: Path) -> None:
    async with door(keys, encrypt=False) as there:
        client = await there.visit("", "", token(keys))
        await anyio.to_thread.run_sync(client.close)
        assert (await there.refused("", "", "guess")).code == "credential"
        assert (await there.refused("")).code == "credential"


@pytest.mark.parametrize(
    ("accepted", "credential"), [("either", "guess"), ("either", "naïve"), ("certificate", "the token")]
)
async def test_a_wrong_token_is_refused_and_so_is_the_right_one_where_none_is_accepted(
    keys: Path, accepted: Accepted, credential: str
) -> None:
    async with door(keys, accepted) as there:
        credential = token(keys) if credential == "the token" else credential
        told = await there.refused(keys, "", credential)
        assert told.code == "credential"
        assert credential not in str(told)
        assert there.context.counted("strangers.credential") == 1


async def test_a_certificate_of_another_authority_is_refused_on_both_sides(keys: Path, others: Path) -> None:
    """The client hears at once, for good: it does not dial in again and again."""
    async with door(keys) as there:
        told = await there.refused(others, "arcade")  # which does not trust our server
        assert told.code == "credential"
        mixed = client_tls(keys)
        mixed.load_cert_chain(others / "tls" / "arcade.pem", others / "tls" / "arcade.key")
        assert await there.raw(mixed, to_bytes(hello())) == b""
        assert there.context.counted("strangers.handshake") == 2
        assert len(there.context.lines("simulator_refused")) == 1
        assert not there.context.lines("simulator_connected")


async def test_an_endpoint_that_is_called_by_another_address_than_its_keys_name_says_how_to_make_them(
    keys: Path,
) -> None:
    async with door(keys) as there:

        def call() -> None:
            encrypt(socket.create_connection(there.address, 20), client_tls(keys), "10.0.0.9")

        with pytest.raises(RemoteProtocolError, match=r"for other addresses .*10\.0\.0\.9.* --hosts"):
            await anyio.to_thread.run_sync(call)


async def test_the_endpoints_own_certificate_and_a_simulators_do_not_pass_for_each_other(
    keys: Path, tmp_path: Path
) -> None:
    async with door(keys) as there:
        posing = client_tls(keys)
        posing.load_cert_chain(keys / "tls" / "server.pem", keys / "tls" / "server.key")
        assert await there.raw(posing, to_bytes(hello())) == b""
        assert there.context.counted("strangers.handshake") == 1
    stolen = tmp_path / "stolen"
    shutil.copytree(keys, stolen)
    for ending in ("pem", "key"):
        shutil.copyfile(keys / "tls" / f"arcade.{ending}", stolen / "tls" / f"server.{ending}")
    async with door(stolen) as there:
        assert (await there.refused(keys, "arcade")).code == "credential"


async def test_a_name_that_was_removed_from_the_list_is_locked_out(keys: Path, tmp_path: Path) -> None:
    own = tmp_path / "keys"
    shutil.copytree(keys, own)
    listed = (own / "allowed.yaml").read_text()
    assert "arcade, " in listed
    (own / "allowed.yaml").write_text(listed.replace("arcade, ", ""))
    async with door(own) as there:
        assert (await there.refused(keys, "arcade")).code == "credential"


# ---------------------------------------------------------------- strangers


STRANGE = {
    "hello in the clear": to_bytes(hello()),
    "garbage": bytes(range(256)),
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("said", STRANGE)
async def test_a_stranger_in_the_clear_learns_nothing(keys: Path, said: str) -> None:
    async with door(keys) as there:
        heard = await there.raw(None, STRANGE[said])
        assert len(heard) <= 7  # an alert of TLS
        assert there.context.counted("strangers") == 1


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (to_bytes(hello()), "credential"),
        (to_bytes(hello(version=99)), "credential"),
        (to_bytes(hello(behaviors={"Nope": SPECS["Goal?team=0"]})), "credential"),
        (bytes(range(64)), ""),
        (to_bytes(Bye()), ""),
    ],
)
async def test_within_tls_it_learns_that_it_has_no_credential_and_no_more(keys: Path, said: bytes, told: str) -> None:
    async with door(keys) as there:
        heard = await there.raw(client_tls(keys), said)
        assert (from_bytes(heard).code if heard else "") == told
        assert "Goal" not in str(heard)


async def test_what_a_simulator_said_once_says_nothing_when_it_is_said_again(keys: Path) -> None:
    """A whole conversation is recorded on its way, and replayed byte by byte."""
    async with door(keys) as there:
        recorded = bytearray()
        with Relay(there.address, recorded.extend) as relay:
            visitor = GuardedEndpoint(there.context, relay.address)
            client = await visitor.visit(keys, "arcade")
            await anyio.to_thread.run_sync(client.close)
        assert len(there.context.lines("simulator_connected")) == 1
        heard = await there.raw(None, bytes(recorded))
        assert len(there.context.lines("simulator_connected")) == 1
        assert there.context.counted("strangers.handshake") == 1
        with pytest.raises(CodecError):
            from_bytes(heard)


class Relay:
    """Hands the bytes of one connection on and shows those of the caller."""

    def __init__(self, target: tuple[str, int], heard: Callable[[bytes], Any]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = ("127.0.0.1", self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._run, args=(target, heard))]

    def __enter__(self) -> Relay:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._threads[0].join(20)
        self._listener.close()

    def _run(self, target: tuple[str, int], heard: Callable[[bytes], Any]) -> None:
        near, far = self._listener.accept()[0], socket.create_connection(target)
        with near, far:
            back = threading.Thread(target=self._hand_on, args=(far, near, len))
            back.start()
            self._hand_on(near, far, heard)
            with contextlib.suppress(OSError):  # the other side has closed it
                far.shutdown(socket.SHUT_RDWR)
            back.join(20)

    def _hand_on(self, source: socket.socket, target: socket.socket, heard: Callable[[bytes], Any]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                heard(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


# ---------------------------------------------------------------- a simulator can do nothing but simulate


@pytest.mark.parametrize(
    "tag", sorted(tag for tag, cls in TAGS.items() if cls.__module__ != "sparring.pipeline.messages.simulator")
)
async def test_what_services_say_to_each_other_is_nothing_a_simulator_may_say(tag: str) -> None:
    """Weights, permits, assignments, state: none of them is taken from a simulator, however well it is made."""
    async with endpoint() as context:
        peer = context.connect()
        await peer.come_in()
        header = msgpack.packb({"type": tag, "body": {}, "arrays": []})
        await peer.say((8 + len(header) + -len(header) % 8).to_bytes(4, "little") + len(header).to_bytes(4, "little"))
        await peer.say(header + bytes(-len(header) % 8))
        assert (await peer.refused()).code in ("malformed", "unexpected_message")
    assert sparring.pipeline.messages.segments.__name__ in {cls.__module__ for cls in TAGS.values()}


# ---------------------------------------------------------------- secrets


async def test_secrets_stand_in_no_log_and_no_message(keys: Path) -> None:
    secret = token(keys)
    assert secret not in repr(hello(credential=secret))
    assert secret not in repr(Credentials(token=secret))
    async with door(keys) as there:
        for credential in (secret, [secret], {secret: 1}):
            body = {"version": VERSION, "name": "x", "behaviors": {}, "credential": credential, "scripts": 1}
            header = msgpack.packb({"type": "hello", "body": body, "arrays": []})
            size = 8 + len(header) + -(8 + len(header)) % 8
            said = (
                size.to_bytes(4, "little") + len(header).to_bytes(4, "little") + header + bytes(-(8 + len(header)) % 8)
            )
            heard = await there.raw(client_tls(keys), said)
            assert secret.encode() not in heard
        client = await there.visit(keys)
        await anyio.to_thread.run_sync(client.close)
        written = str(there.context.logged)
        assert there.context.lines("simulator_refused")
        for secret in secrets_of(keys):
            assert secret not in written


async def test_a_secret_of_a_wrong_type_is_not_shown_by_the_decoder() -> None:
    header = msgpack.packb({"type": "hello", "body": {"credential": ["sesame"]}, "arrays": []})
    data = (8 + len(header)).to_bytes(4, "little") + len(header).to_bytes(4, "little") + header
    data = data + bytes(-len(data) % 8)
    with pytest.raises(CodecError) as told:
        from_bytes((len(data)).to_bytes(4, "little") + data[4:])
    assert "hello.credential" in str(told.value)
    assert "sesame" not in str(told.value)


# ---------------------------------------------------------------- both ends of TLS


async def test_nothing_is_written_past_the_encryption(keys: Path) -> None:
    """Messages usually go to the socket directly: under TLS that would be plain text."""
    async with door(keys) as there:
        client = await there.visit(keys, "arcade")
        (peer,) = there.context.simulators._peers.values()
        assert isinstance(peer.outgoing, Outgoing)
        assert peer.outgoing._direct is None
        await anyio.to_thread.run_sync(client.close)


def test_large_messages_pass_both_ways_while_the_heartbeat_beats(keys: Path) -> None:
    """Records of TLS are cut elsewhere than messages, and two threads write."""
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


# ---------------------------------------------------------------- what a simulator is given


def test_a_simulator_shows_what_its_variables_say(keys: Path) -> None:
    secret, tcp = token(keys), "tcp://127.0.0.1:1"
    assert credential_of(tcp, None, "", "", {}) == (None, "")
    assert credential_of(tcp, None, "", "", {"SPARRING_CREDENTIAL": "x"}) == (None, "x")
    variables = {"SPARRING_KEYS": str(keys)}
    assert credential_of(tcp, None, "", "", variables)[1] == secret
    assert credential_of(tcp, None, "", "", {**variables, "SPARRING_NAME": "arcade"})[1] == ""
    assert credential_of(tcp, "", "", "", variables) == (None, "")
    assert credential_of("unix:///x", None, "", "", variables) == (None, "")
    with pytest.raises(SettingsError, match="without keys"):
        credential_of(tcp, None, "arcade", "", {})
    with pytest.raises(SettingsError, match="nobody"):
        credential_of(tcp, keys, "nobody", "", {})


@pytest.mark.parametrize(
    ("pipeline_section", "number", "wanted"),
    [
        ("keys: KEYS", 0, {"SPARRING_KEYS": "KEYS", "SPARRING_NAME": "simulator-0"}),
        ("keys: KEYS", 7, {"SPARRING_KEYS": "KEYS", "SPARRING_NAME": ""}),
        ("keys: KEYS, credentials: token", 0, {"SPARRING_KEYS": "KEYS", "SPARRING_NAME": ""}),
        (
            "keys: KEYS, encrypt: false",
            0,
            {"SPARRING_KEYS": "", "SPARRING_NAME": "", "SPARRING_CREDENTIAL": "TOKEN"},
        ),
        ("mode: overlap", 0, {}),
    ],
)
def test_the_supervisor_gives_its_simulators_what_to_show(
    keys: Path, monkeypatch: pytest.MonkeyPatch, pipeline_section: str, number: int, wanted: dict[str, str]
) -> None:
    monkeypatch.delenv("SPARRING_KEYS", raising=False)
    text = f"behaviors: {{Goal: }}\npipeline: {{{pipeline_section.replace('KEYS', str(keys))}}}"
    found = shown(parse_settings(text, "test").settings, "tcp://127.0.0.1:1", number)
    known = {"KEYS": str(keys), "TOKEN": token(keys)}
    assert found == {name: known.get(value, value) for name, value in wanted.items()}
    assert shown(parse_settings(text, "test").settings, "unix:///x", number) == {}


@pytest.mark.parametrize(
    "section", ["encrypt: false, credentials: certificate", "encrypt: false, address: 'tcp://0.0.0.0:1'"]
)
def test_nothing_but_a_token_on_loopback_is_shown_in_the_clear(section: str) -> None:
    with pytest.raises(SettingsError, match="encrypt: false"):
        parse_settings(f"behaviors: {{Goal: }}\npipeline: {{{section}}}", "test")


def test_where_services_are_spread_over_machines_a_token_is_not_shown_in_the_clear_either(keys: Path) -> None:
    """The address of stepping is then that of its machine, whatever pipeline.address says."""
    with pytest.raises(SettingsError, match="encrypt: false"):
        credentials("tcp://10.0.0.2:5005", keys, "either", encrypt=False)
    assert not credentials("tcp://10.0.0.2:5005", None, "either", encrypt=False).asked


def test_a_recording_which_is_not_encrypted_is_made_on_this_machine_only() -> None:
    settings = parse_settings("behaviors: {Goal: }\npipeline: {address: 'tcp://0.0.0.0:0'}", "test").settings
    with pytest.raises(SettingsError, match="expected loopback"), lone_simulator(settings, seed=1):
        pass
