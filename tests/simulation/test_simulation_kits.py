"""The client kits in C++ and JavaScript report mistakes of either side; `tests/test_examples.py` trains with them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from sparring.pipeline.messages.codec import to_bytes
from sparring.pipeline.messages.simulator import Act, Bye, Fault, Reset, Step, Welcome
from tests.services.services_helpers import Training
from tests.services.started import start
from tests.simulation.simulation_helpers import DEADLINE_S, Peer, act_for

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
NODE = ["node", str(EXAMPLES / "js" / "corridor.mjs")]
WITH_WEBSOCKET = ["node", "--experimental-websocket", "--no-warnings", *NODE[1:]]
"""Node 20 has a WebSocket behind a flag; later ones accept the flag and need none."""
KITS = ("cpp", "js")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the example in C++, compiled without a warning."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("cpp")
    flags = ["-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", "-pthread"]
    source = EXAMPLES / "cpp" / "corridor.cpp"
    subprocess.run(["c++", *flags, str(source), "-o", str(folder / "corridor")], check=True, timeout=250)
    return folder


@pytest.fixture
def program(request: pytest.FixtureRequest) -> list[str]:
    """The words that start the corridor of a kit."""
    if request.param == "cpp":
        return [str(request.getfixturevalue("compiled") / "corridor")]
    if shutil.which("node") is None:
        pytest.skip("no node")
    return WITH_WEBSOCKET if request.param == "websocket" else NODE


of_kits = pytest.mark.parametrize("program", KITS, indirect=True)


@pytest.mark.parametrize("program", ["websocket"], indirect=True)
def test_the_kit_in_javascript_keeps_every_rule_of_the_protocol_over_a_websocket(program: list[str]) -> None:
    checked = start(["compliance", "--websocket", "--json", "--timeout", "5", "--", *program])
    with checked.stdout:
        verdicts = json.loads(checked.stdout.read())
        assert checked.wait(DEADLINE_S) == 0
    assert [verdict for verdict in verdicts if verdict["status"] != "PASS"] == []
    assert len(verdicts) > 25


# ---------------------------------------------------------------- conversations


@contextlib.contextmanager
def conversation(program: list[str], path: Path | None = None) -> Iterator[tuple[Peer, subprocess.Popen[str]]]:
    """Starts a simulator that connects to this side, at a Unix socket if a path is given."""
    family = socket.AF_INET if path is None else socket.AF_UNIX
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0) if path is None else str(path))
        listener.listen()
        listener.settimeout(DEADLINE_S)
        address = f"unix://{path}" if path else f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        command = [*program, address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                connected = listener.accept()[0]
                with connected:
                    yield Peer(connected), process
            finally:
                process.kill()


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Returns exit status and output of a process that ends by itself."""
    output, _ = process.communicate(timeout=DEADLINE_S)
    return process.returncode, output


@of_kits
def test_a_simulator_of_a_kit_converses_over_a_unix_socket_and_ends_with_its_bye(
    program: list[str], tmp_path: Path
) -> None:
    with conversation(program, tmp_path / "s") as (peer, process):
        hello = peer.greet()
        step = peer.receive(Step)
        for _ in range(3):
            peer.send(act_for(step, hello), piece=7)
            step = peer.receive(Step)
        peer.send(Bye(reason="enough"))
        assert dict(peer.receive(Bye).steps) == {"Corridor": 24}
        assert peer.next() is None
        assert end_of(process) == (0, "ended after 24 steps: enough\n")


@of_kits
def test_sigterm_makes_a_simulator_of_a_kit_say_bye(program: list[str]) -> None:
    with conversation(program) as (peer, process):
        peer.greet()
        peer.receive(Step)
        process.send_signal(signal.SIGTERM)
        assert peer.receive(Bye).reason == "stopped"
        peer.close()
        assert end_of(process)[0] == 0


@of_kits
def test_a_fault_of_the_trainer_ends_a_simulator_of_a_kit_with_its_text(program: list[str]) -> None:
    with conversation(program) as (peer, process):
        peer.greet()
        peer.receive(Step)
        peer.send(Fault(code="specs", got="a", expected="b", remedy="do c"))
        assert peer.next() is None
        assert end_of(process) == (3, "specs: got a; expected b; do c\n")


def changed(act: Act, **columns: Any) -> Act:
    return dataclasses.replace(act, actions=(dataclasses.replace(act.actions[0], **columns),))


def framed(header: bytes, arrays: bytes = b"") -> bytes:
    padded = header + bytes(-(8 + len(header)) % 8) + arrays
    return (8 + len(padded)).to_bytes(4, "little") + len(header).to_bytes(4, "little") + padded


MISTAKES: dict[str, tuple[str, Callable[[Act], Any]]] = {
    "another number": ("sequence", lambda act: dataclasses.replace(act, sequence=7)),
    "other agents": ("unknown_agent", lambda act: changed(act, agents=act.actions[0].agents + 1)),
    "a choice that is not there": ("shape", lambda act: changed(act, discrete=act.actions[0].discrete + 3)),
    "a row too few": ("shape", lambda act: changed(act, discrete=act.actions[0].discrete[1:])),
    "another dtype": ("malformed", lambda act: to_bytes(act).replace(b"<i4", b"<i3")),
    "no actions": ("shape", lambda act: dataclasses.replace(act, actions=())),
    "a script that is not there": ("scripts", lambda act: changed(act, scripts=np.ones(8, np.int32))),
    "welcome": ("unexpected_message", lambda _: Welcome(version=1, connection=1, heartbeat_s=1.0, timeout_s=1.0)),
    "a gigabyte": ("too_large", lambda _: (2**30).to_bytes(4, "little") + (8).to_bytes(4, "little")),
    "lengths that contradict": ("malformed", lambda _: (16).to_bytes(4, "little") + (16).to_bytes(4, "little")),
    "no MessagePack": ("malformed", lambda _: framed(b"\xc1" * 8)),
    "a cut header": ("malformed", lambda _: framed(b"\x83\xa4type")),
    "a deep header": ("malformed", lambda _: framed(b"\x91" * 1000 + b"\xc0")),
    "a list of many": ("malformed", lambda _: framed(b"\xdd\xff\xff\xff\xff")),
    "an array beyond the end": (
        "malformed",
        lambda _: framed(b"\x83\xa4type\xa3act\xa4body\x80\xa6arrays\x91\x92\xa3<f4\x91\xce\x00\x00\xff\xff"),
    ),
    "an array of a negative length": (
        "malformed",
        lambda _: framed(b"\x83\xa4type\xa3act\xa4body\x80\xa6arrays\x91\x92\xa3<f4\x91\xff"),
    ),
    "bytes too many": (
        "malformed",
        lambda _: framed(b"\x83\xa4type\xa3act\xa4body\x80\xa6arrays\x90", bytes(8)),
    ),
}


@of_kits
def test_a_mistake_of_the_trainer_gets_a_fault_and_ends_a_simulator_of_a_kit(program: list[str]) -> None:
    for name, (code, mistake) in MISTAKES.items():
        with conversation(program) as (peer, process):
            hello = peer.greet()
            wrong = mistake(act_for(peer.receive(Step), hello))
            peer.socket.sendall(wrong if isinstance(wrong, bytes) else to_bytes(wrong))
            fault = peer.receive(Fault)
            assert fault.code == code, (name, fault)
            assert fault.got, name
            assert fault.expected, name
            peer.close()
            status, output = end_of(process)
            assert status == 3, name
            assert output.startswith(f"{code}: got "), name


@of_kits
def test_a_kit_refuses_another_version_and_an_address_that_it_cannot_read(program: list[str]) -> None:
    with conversation(program) as (peer, process):
        peer.next()
        peer.send(Welcome(version=2, connection=1, heartbeat_s=1.0, timeout_s=1.0))
        assert peer.receive(Fault).code == "version"
        peer.close()
        assert end_of(process)[0] == 3
    ended = subprocess.run([*program, "udp://nowhere"], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 3
    assert ended.stderr.startswith("settings: got address ")


@of_kits
def test_a_lost_connection_is_replaced_and_the_steps_go_on_counting(program: list[str]) -> None:
    """Also where the trainer is silent although the connection is open."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE_S)
        command = [*program, f"tcp://127.0.0.1:{listener.getsockname()[1]}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                for connection in range(3):
                    with listener.accept()[0] as connected:
                        peer = Peer(connected)
                        hello = peer.greet(Reset(seed=None), heartbeat_s=0.05, timeout_s=0.3)
                        assert dict(hello.steps) == ({"Corridor": 8 * connection} if connection else {})
                        peer.send(act_for(peer.receive(Step), hello))
                        assert peer.receive(Step).sequence == 1
                        if connection == 1:  # it pings, gets no answer, and closes
                            while (message := peer.next()) is not None:
                                assert type(message).__name__ == "Ping"
                        elif connection == 2:
                            peer.send(Bye(reason="enough"))
                            assert peer.receive(Bye).steps["Corridor"] == 24
                            assert end_of(process)[0] == 0
            finally:
                process.kill()


# ---------------------------------------------------------------- training


@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
def test_the_corridor_in_javascript_trains_over_tcp_and_over_a_websocket(tmp_path: Path, free_port: int) -> None:
    plain = yaml.safe_load((EXAMPLES / "js" / "corridor.yaml").read_text())
    address = f"tcp://127.0.0.1:{free_port}"
    plain["simulators"] = [{"command": NODE}, {"command": [*WITH_WEBSOCKET, address.replace("tcp", "ws")]}]
    plain["pipeline"] = {"websocket_address": address}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(plain))
    training = Training(tmp_path, str(file), "--in-process", "--max-steps", "6000")
    assert training.end() == 0, "\n".join(training.lines)
    for number in range(2):
        (said,) = (training.directory / "logs" / f"simulator-{number}.stderr").read_text().splitlines()
        steps = int(said.removeprefix("ended after ").partition(" steps: ")[0])
        assert steps > 1000, "each of the two has trained it"


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
