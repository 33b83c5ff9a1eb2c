"""Attacks on a real run, one after the other: `python scripts/bench/strangers.py [--seconds 6] [--half-open 10000]`.

A run with keys trains with two simulators of its own, services over TCP. Each attack goes on for some seconds; the
steps per second before and during it are read from the run's status. Printed for each: what the attacker got, the
rates, and what stepping logged meanwhile and of what others warned. At the end: whether the books balance and nothing
restarted.

The attackers share the machine with the run, so a rate says what an attack takes from it all, processor included.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgpack
import zmq
from besieged import SPECS, Besieged

from sparring.pipeline.messages.codec import PREFIX, FrameReader, to_bytes
from sparring.pipeline.messages.simulator import VERSION, Fault, Hello, Ping
from sparring.pipeline.security import client_tls, making
from sparring.services.endpoint.listening import allow_descriptors

STEPPING = "stepping-0"
PARTS = (STEPPING, "assembly", "coordination", "learning-Balance", "monitor", "supervisor")
SIMULATOR_TIMEOUT_S = 8.0
HANDSHAKE_S = 4.0


@dataclass
class Target:
    """What is attacked.

    Attributes:
        endpoints: of services, by name.
        half_open: connections of that attack.
    """

    address: tuple[str, int]
    endpoints: dict[str, str]
    keys: Path
    others: Path
    seconds: float
    half_open: int
    recorded: bytearray = field(default_factory=bytearray)

    @property
    def until(self) -> float:
        """When an attack that begins now ends."""
        return time.monotonic() + self.seconds

    def connect(self, context: ssl.SSLContext | None = None, address: tuple[str, int] | None = None) -> socket.socket:
        """A connection, encrypted where a context is given."""
        connected = socket.create_connection(address or self.address, 60)
        return connected if context is None else context.wrap_socket(connected, server_hostname="127.0.0.1")

    def inside(self) -> tuple[socket.socket, FrameReader]:
        """A connection of a simulator that was welcomed."""
        stream, reader = self.connect(client_tls(self.keys, "traitor")), FrameReader()
        stream.sendall(HELLO)
        for _ in range(2):
            hear(stream, reader)
        return stream, reader


HELLO = to_bytes(Hello(version=VERSION, name="traitor", behaviors=SPECS))


def hear(stream: socket.socket, reader: FrameReader) -> Any:
    """The next message.

    Raises:
        ConnectionError: there is none.
    """
    while (message := reader.next()) is None:
        data = stream.recv(2**16)
        if not data:
            raise ConnectionError("closed")
        reader.feed(data)
    return message


def again_and_again(target: Target, attack: Callable[[], str]) -> str:
    """What an attack got, each time, and how often."""
    got, end = Counter[str](), target.until
    while time.monotonic() < end:
        try:
            got[attack()] += 1
        except OSError as error:
            got[f"{type(error).__name__} {getattr(error, 'reason', None) or error.strerror or error}"] += 1
        time.sleep(0.05)
    return ", ".join(f"{count} x {what}" for what, count in got.most_common(4))


def said_to(stream: socket.socket, data: bytes) -> str:
    """What is answered to some bytes."""
    with stream:
        stream.sendall(data)
        answer = b""
        while more := stream.recv(2**16):
            answer += more
    if not answer:
        return "closed without a word"
    reader = FrameReader()
    with contextlib.suppress(Exception):
        reader.feed(answer)
        message = reader.next()
        return f"fault {message.code}" if isinstance(message, Fault) else type(message).__name__
    return f"{len(answer)} bytes that are no message"


# ---------------------------------------------------------------- attacks


def wrong_key(target: Target) -> str:
    """A certificate of another authority, with a name that is known here."""
    context = client_tls(target.keys)
    context.load_cert_chain(target.others / "tls" / "simulator-0.pem", target.others / "tls" / "simulator-0.key")
    return again_and_again(target, lambda: said_to(target.connect(context), HELLO))


def no_key(target: Target) -> str:
    """TLS without a certificate and without the token."""
    return again_and_again(target, lambda: said_to(target.connect(client_tls(target.keys)), HELLO))


def in_the_clear(target: Target) -> str:
    """No TLS at all."""
    return again_and_again(target, lambda: said_to(target.connect(), HELLO))


def simulators_key_on_a_service(target: Target) -> str:
    """A simulator's certificate, then its messages, on the endpoint of a queue."""
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
                heard = b"".join(iter(lambda: stream.recv(2**12), b""))
                return f"{tls}; messages: {len(heard)} bytes of greeting, then closed"
            except TimeoutError:
                return f"{tls}; messages: no answer"

    return again_and_again(target, attack)


def own_curve_key_on_a_service(target: Target) -> str:
    """A CURVE pair of one's own, with the endpoint's public key; then no CURVE at all."""
    public, secret = zmq.curve_keypair()
    server = (target.keys / "curve" / "assembly.public").read_bytes().strip()
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
    """The bytes of another's whole conversation, again."""
    return again_and_again(target, lambda: said_to(target.connect(), bytes(target.recorded)))


def oversize(target: Target) -> str:
    """A simulator that claims a message of 4 GB."""

    def attack() -> str:
        stream, _ = target.inside()
        return said_to(stream, PREFIX.pack(2**32 - 8, 100) + bytes(2**16))

    return again_and_again(target, attack)


def endless(target: Target) -> str:
    """A simulator whose message has thirty thousand arrays; and one whose message never ends."""
    header = msgpack.packb({"type": "step", "body": {}, "arrays": [["<f4", [0]]] * 30_000})
    many = PREFIX.pack(PREFIX.size + len(header) + -len(header) % 8, len(header)) + header + bytes(-len(header) % 8)
    stream, reader = target.inside()
    with stream:
        stream.sendall(many)
        try:
            first = hear(stream, reader).code
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
    return f"arrays: {first}; endless: put out after {time.monotonic() - began:.1f} s and {sent} bytes"


def slow_loris(target: Target) -> str:
    """A hundred connections that send a byte of TLS every half a second."""
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
    return f"{len(ended)} of 100 put out, the last after {max(ended, default=0.0):.1f} s"


def half_open(target: Target) -> str:
    """Thousands of connections that say nothing, and an honest simulator that comes in among them."""
    streams = []
    began = time.monotonic()
    for _ in range(target.half_open):
        try:
            stream = socket.socket()
            stream.setblocking(False)
            streams.append(stream)
            stream.connect(target.address)
        except BlockingIOError:  # as it should be
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
    """A simulator that asks as fast as it can and reads no answer."""
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
    """What a client of TLS says first."""
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


# ---------------------------------------------------------------- the run


def record(target: Target) -> None:
    """Takes down what an honest simulator says on its way."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relayed = Target(("127.0.0.1", listener.getsockname()[1]), {}, target.keys, target.others, 0, 0)
        speaker = threading.Thread(target=lambda: relayed.inside()[0].close())
        speaker.start()
        near, far = listener.accept()[0], socket.create_connection(target.address)
        back = threading.Thread(target=_hand_on, args=(far, near, bytearray()))
        back.start()
        _hand_on(near, far, target.recorded)
        speaker.join()
        back.join()


def _hand_on(source: socket.socket, drain: socket.socket, copy: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(2**16):
            copy += data
            drain.sendall(data)
        drain.shutdown(socket.SHUT_WR)


def main() -> int:
    """Runs all attacks; 0 where the run went on undisturbed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each attack")
    parser.add_argument("--half-open", type=int, default=10_000, help="connections that say nothing")
    parser.add_argument("--only", nargs="+", choices=[attack.__name__ for attack in ATTACKS], help="of the attacks")
    args = parser.parse_args()
    allow_descriptors(args.half_open + 500)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        keys, others = folder / "keys", folder / "others"
        making.make(keys, ["simulator-0", "simulator-1", "traitor"])
        making.make(others, ["simulator-0"])
        pipeline = {
            "keys": str(keys),
            "transport": "tcp",
            "simulator_timeout_s": SIMULATOR_TIMEOUT_S,
            "heartbeat_s": 2,
            "limits": {"handshake_timeout_s": HANDSHAKE_S},
        }
        with Besieged(folder, [{"name": "balance", "count": 2, "areas": 8}], pipeline, buffer=4096) as run:
            run.wait(3)
            chosen = [attack for attack in ATTACKS if not args.only or attack.__name__ in args.only]
            endpoints = run.plan["endpoints"]
            target = Target(run.address, endpoints, keys, others, args.seconds, args.half_open)
            record(target)
            first = {"rss_mb": run.stepping.memory_info().rss / 1e6, "descriptors": run.stepping.num_fds()}
            for attack in chosen:
                _one(attack, target, run)
            time.sleep(min(SIMULATOR_TIMEOUT_S, 2 * args.seconds))
            last = {"rss_mb": run.stepping.memory_info().rss / 1e6, "descriptors": run.stepping.num_fds()}
        summary = json.loads((run.directory / "summary.json").read_text())
        starts = [line for line in run.log("supervisor") if line["event"] == "started"]
        secrets = _secrets_found(keys, folder / "run")
    step_counts = summary["behaviors"]["Balance"]["step_counts"]
    balanced = step_counts["produced"] == sum(value for term, value in step_counts.items() if term != "produced")
    figures = {
        "stepping_before": first,
        "stepping_after": last,
        "step_counts": step_counts,
        "balanced": balanced,
        "restarted": [line["part"] for line in starts if line["start"] > 1],
        "secrets_in_the_run_folder": secrets,
        "exit_status": run.status,
    }
    print(json.dumps(figures, indent=1))
    return 0 if balanced and not figures["restarted"] and not secrets and run.status == 0 else 1


def _one(attack: Callable[[Target], str], target: Target, run: Besieged) -> None:
    before = run.rate(target.seconds)
    lines, began, steps = {part: len(run.log(part)) for part in PARTS}, time.monotonic(), run.produced()
    got = attack(target)
    during = (run.produced() - steps) / (time.monotonic() - began)
    fresh = [(part, line) for part in PARTS for line in run.log(part)[lines[part] :]]
    told = [(part, line) for part, line in fresh if part == STEPPING or line["level"] == "warning"]
    logged = Counter(" ".join(filter(None, (part, line["event"], line.get("kind")))) for part, line in told)
    print(f"{attack.__name__}: {(attack.__doc__ or '').strip()}")
    print(f"    got: {got}")
    print(f"    steps/s: {before:.0f} before, {during:.0f} during; logged: {dict(logged)}", flush=True)


def _secrets_found(keys: Path, directory: Path) -> list[str]:
    """Files of the run in which a secret stands."""
    private = [path.read_text().splitlines()[1] for path in (keys / "tls").glob("*.key")]
    curves = [path.read_text().strip() for path in (keys / "curve").glob("*.secret")]
    secrets = [(keys / "token").read_text().strip(), *private, *curves]
    files = [path for path in directory.rglob("*") if path.is_file()]
    return [path.name for path in files if any(secret.encode() in path.read_bytes() for secret in secrets)]


if __name__ == "__main__":
    sys.exit(main())
