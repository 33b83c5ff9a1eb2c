"""Attacks on the endpoint for simulators and on the queues between services, for `unauthenticated.py`."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import zmq
from live_run import SPECS

from sparring.pipeline.messages.codec import PREFIX, FrameReader, to_bytes
from sparring.pipeline.messages.simulator import VERSION, Fault, Hello, Ping
from sparring.pipeline.security import KEY_FILE, client_tls

SIMULATOR_TIMEOUT_S = 8.0


@dataclass
class Target:
    """The run that is attacked.

    Attributes:
        address: for simulators.
        endpoints: of services, by name.
        run: folder of the run.
        keys: folder of the run's keys.
        others: folder of the keys of another run.
        seconds: duration of each attack.
        half_open: number of connections of that attack.
        recorded: bytes that an honest simulator has sent.
    """

    address: tuple[str, int]
    endpoints: dict[str, str]
    run: Path
    keys: Path
    others: Path
    seconds: float
    half_open: int
    recorded: bytearray = field(default_factory=bytearray)

    @property
    def until(self) -> float:
        """The end of an attack that begins now."""
        return time.monotonic() + self.seconds

    def connect(self, context: ssl.SSLContext | None = None, address: tuple[str, int] | None = None) -> socket.socket:
        """Connects, encrypted where a context is given."""
        connected = socket.create_connection(address or self.address, 60)
        return connected if context is None else context.wrap_socket(connected, server_hostname="127.0.0.1")

    def inside(self) -> tuple[socket.socket, FrameReader]:
        """Connects as an accepted simulator."""
        stream, reader = self.connect(client_tls(self.keys, "traitor")), FrameReader()
        stream.sendall(HELLO)
        for _ in range(2):
            receive_message(stream, reader)
        return stream, reader


HELLO = to_bytes(Hello(version=VERSION, name="traitor", behaviors=SPECS))


def receive_message(stream: socket.socket, reader: FrameReader) -> Any:
    """Receives the next message.

    Raises:
        ConnectionError: the connection was closed.
    """
    while (message := reader.next()) is None:
        data = stream.recv(2**16)
        if not data:
            raise ConnectionError("closed")
        reader.feed(data)
    return message


def repeat(target: Target, attack: Callable[[], str]) -> str:
    """Repeats an attack for its time; returns its results and how often each came."""
    got, end = Counter[str](), target.until
    while time.monotonic() < end:
        try:
            got[attack()] += 1
        except OSError as error:
            got[f"{type(error).__name__} {getattr(error, 'reason', None) or error.strerror or error}"] += 1
        time.sleep(0.05)
    return ", ".join(f"{count} x {what}" for what, count in got.most_common(4))


def answer_to(stream: socket.socket, data: bytes) -> str:
    """Sends some bytes and returns the answer."""
    with stream:
        stream.sendall(data)
        answer = b""
        while more := stream.recv(2**16):
            answer += more
    if not answer:
        return "closed without an answer"
    reader = FrameReader()
    with contextlib.suppress(Exception):
        reader.feed(answer)
        message = reader.next()
        return f"fault {message.code}" if isinstance(message, Fault) else type(message).__name__
    return f"{len(answer)} bytes that are no message"


# ---------------------------------------------------------------- attacks


def wrong_key(target: Target) -> str:
    """Shows a certificate of another authority, with a name that is known here."""
    context = client_tls(target.keys)
    context.load_cert_chain(target.others / "tls" / "simulator-0.pem", target.others / "tls" / "simulator-0.key")
    return repeat(target, lambda: answer_to(target.connect(context), HELLO))


def no_key(target: Target) -> str:
    """Connects over TLS without a certificate and without the token."""
    return repeat(target, lambda: answer_to(target.connect(client_tls(target.keys)), HELLO))


def in_the_clear(target: Target) -> str:
    """Connects without TLS."""
    return repeat(target, lambda: answer_to(target.connect(), HELLO))


def simulators_key_on_a_service(target: Target) -> str:
    """Shows a simulator's certificate, then sends its messages, to the endpoint of a queue."""
    host, _, port = target.endpoints["steps"].removeprefix("tcp://").rpartition(":")
    service = (host, int(port))

    def attack() -> str:
        try:
            target.connect(client_tls(target.keys, "traitor"), service)
        except OSError as error:
            tls = f"TLS: {type(error).__name__}"
        with target.connect(None, service) as stream:
            stream.settimeout(1.0)
            stream.sendall(HELLO)
            try:
                received = b"".join(iter(lambda: stream.recv(2**12), b""))
                return f"{tls}; messages: {len(received)} bytes of greeting, then closed"
            except TimeoutError:
                return f"{tls}; messages: no answer"

    return repeat(target, attack)


def own_curve_key_on_a_service(target: Target) -> str:
    """Connects to a queue with an unknown CURVE key and the endpoint's public key; then without CURVE."""
    public, secret = zmq.curve_keypair()
    server = zmq.curve_public((target.run / KEY_FILE).read_bytes())
    got, end = Counter[str](), target.until
    with zmq.Context() as context:
        for curve in (True, False):
            with context.socket(zmq.DEALER) as peer:
                peer.linger = 0
                if curve:
                    peer.curve_publickey, peer.curve_secretkey, peer.curve_serverkey = public, secret, server
                with peer.get_monitor_socket() as monitor:
                    peer.connect(target.endpoints["steps"])
                    while time.monotonic() < end - (target.seconds / 2 if curve else 0):
                        with contextlib.suppress(zmq.ZMQError):
                            peer.send_multipart([b"hello", b"x"], zmq.NOBLOCK)
                        if monitor.poll(100):
                            event = zmq.Event(int.from_bytes(monitor.recv_multipart()[0][:2], "little"))
                            got[f"{'own key' if curve else 'no key'}: {event.name}"] += 1
                    if peer.poll(0):
                        got["ANSWERED"] += 1
                    peer.disable_monitor()
    failed = {
        what: count for what, count in got.items() if "HANDSHAKE" in what or "DISCONNECTED" in what or "ANS" in what
    }
    return ", ".join(f"{count} x {what}" for what, count in sorted(failed.items())) or "no handshake"


def replay(target: Target) -> str:
    """Replays the bytes of another simulator's whole conversation."""
    return repeat(target, lambda: answer_to(target.connect(), bytes(target.recorded)))


def oversize(target: Target) -> str:
    """Announces a message of 4 GB, as an accepted simulator."""

    def attack() -> str:
        stream, _ = target.inside()
        return answer_to(stream, PREFIX.pack(2**32 - 8, 100) + bytes(2**16))

    return repeat(target, attack)


def endless(target: Target) -> str:
    """Sends a message of thirty thousand arrays, then one that never ends, as an accepted simulator."""
    header = msgpack.packb({"type": "step", "body": {}, "arrays": [["<f4", [0]]] * 30_000})
    many = PREFIX.pack(PREFIX.size + len(header) + -len(header) % 8, len(header)) + header + bytes(-len(header) % 8)
    stream, reader = target.inside()
    with stream:
        stream.sendall(many)
        try:
            first = receive_message(stream, reader).code
        except OSError as error:
            first = type(error).__name__
    stream, _ = target.inside()
    sent, began = 0, time.monotonic()
    with stream:
        stream.sendall(PREFIX.pack(2**26, 2**10))
        with contextlib.suppress(OSError):
            while time.monotonic() < began + 3 * SIMULATOR_TIMEOUT_S:
                stream.sendall(bytes(1000))
                sent += 1000
                time.sleep(0.05)
    return f"arrays: {first}; endless: disconnected after {time.monotonic() - began:.1f} s and {sent} bytes"


def slow_loris(target: Target) -> str:
    """Opens a hundred connections that send a byte of TLS every half second."""
    hello = tls_hello()
    streams = [target.connect() for _ in range(100)]
    ended: list[float] = []
    began = time.monotonic()
    for at in range(len(hello)):
        for stream in list(streams):
            try:
                stream.sendall(hello[at : at + 1])
                stream.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    if not stream.recv(100):
                        raise ConnectionResetError
            except OSError:
                ended.append(time.monotonic() - began)
                streams.remove(stream)
                stream.close()
        if not streams:
            break
        time.sleep(0.5)
    return f"{len(ended)} of 100 disconnected, the last after {max(ended, default=0.0):.1f} s"


def half_open(target: Target) -> str:
    """Opens thousands of silent connections, and connects an honest simulator meanwhile."""
    streams = []
    began = time.monotonic()
    for _ in range(target.half_open):
        try:
            stream = socket.socket()
            stream.setblocking(False)
            streams.append(stream)
            stream.connect(target.address)
        except BlockingIOError:  # expected: the connection is under way
            continue
    opened = time.monotonic() - began
    stream, _ = target.inside()
    honest = time.monotonic() - began - opened
    stream.close()
    time.sleep(max(0.0, began + target.seconds - time.monotonic()))
    still = 0
    for stream in streams:
        try:
            still += stream.recv(1) != b""
        except BlockingIOError:
            still += 1
        except OSError:
            continue
        finally:
            stream.close()
    through = f"an honest one was welcomed in {honest:.1f} s"
    return f"{len(streams)} opened in {opened:.1f} s; {through}; open at the end: {still}"


def pings(target: Target) -> str:
    """Sends Pings as fast as possible and reads no answer, as an accepted simulator."""
    stream, _ = target.inside()
    flood, sent, end = to_bytes(Ping()) * 1000, 0, target.until
    with stream:
        stream.settimeout(0.5)
        while time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                try:
                    sent += stream.send(flood)
                except ConnectionError as error:
                    return f"{sent / 1e6:.1f} MB taken, then {type(error).__name__}"
    return f"{sent / 1e6:.1f} MB taken"


def tls_hello() -> bytes:
    """Returns the first message of a TLS client."""
    into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(into, out, server_hostname="127.0.0.1").do_handshake()
    return out.read()


ATTACKS = (
    wrong_key,
    no_key,
    in_the_clear,
    simulators_key_on_a_service,
    own_curve_key_on_a_service,
    replay,
    oversize,
    endless,
    slow_loris,
    half_open,
    pings,
)


def record_conversation(target: Target) -> None:
    """Records what an honest simulator sends, through a relay."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relayed = Target(("127.0.0.1", listener.getsockname()[1]), {}, target.run, target.keys, target.others, 0, 0)
        speaker = threading.Thread(target=lambda: relayed.inside()[0].close())
        speaker.start()
        near, far = listener.accept()[0], socket.create_connection(target.address)
        back = threading.Thread(target=_relay, args=(far, near, bytearray()))
        back.start()
        _relay(near, far, target.recorded)
        speaker.join()
        back.join()


def _relay(source: socket.socket, drain: socket.socket, copy: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(2**16):
            copy += data
            drain.sendall(data)
        drain.shutdown(socket.SHUT_WR)
