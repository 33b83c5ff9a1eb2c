"""A port found for a service stays reserved for it until the run ends."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
import zmq

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.queues.endpoints import socket_folder
from sparring.pipeline.settings import Settings
from sparring.services.endpoint.sockets import listen
from sparring.services.supervision.ports import Ports, addresses_of

HOST = "127.0.0.1"
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot listen on a reserved port")


def bind(port: int) -> None:
    with socket.socket() as one:
        one.bind((HOST, port))


@linux_only
def test_port_is_reserved_until_the_run_ends() -> None:
    with Ports() as ports:
        port = ports.find(HOST)
        with pytest.raises(OSError, match="in use"):
            bind(port)
    bind(port)


def test_port_beyond_the_last_is_refused() -> None:
    """A second stepping process listens at the next port."""
    with Ports() as ports, pytest.raises(SettingsError, match="the last port is 65535"):
        ports.find(HOST, 65536)


@linux_only
@pytest.mark.asyncio
async def test_owner_of_a_port_can_listen_on_it_repeatedly() -> None:
    with Ports() as ports:
        port = ports.find(HOST)
        for _ in range(2):
            async with await listen(f"tcp://{HOST}:{port}"):
                await (await anyio.connect_tcp(HOST, port)).aclose()


@linux_only
def test_queue_can_listen_on_its_port() -> None:
    with Ports() as ports, zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(f"tcp://{HOST}:{ports.find(HOST)}")


def test_port_in_use_is_refused_with_a_remedy() -> None:
    with socket.create_server((HOST, 0)) as taken, Ports() as ports:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"got port {port} .*expected a free port; stop what uses it"):
            ports.find(HOST, port)
        with pytest.raises(SettingsError, match="not free"):  # again: the first failure reserves nothing
            ports.find(HOST, port)
    bind(port)


def test_path_of_a_file_or_of_a_living_socket_is_refused_and_nothing_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "own"

    def refused(path: Path = path) -> bool:
        settings = Settings.model_validate({"behaviors": {"Ball": {}}, "pipeline": {"address": f"unix://{path}"}})
        with Ports() as ports:
            try:
                addresses_of(settings, ["stepping-0"], ports)
            except SettingsError as error:
                return f"a socket at {path}, which cannot be used" in str(error)
            return False

    path.write_text("precious")
    assert refused()
    assert path.read_text() == "precious"
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    assert refused()
    path.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        assert not refused(), "nobody listens"
        server.listen()
        assert refused()
    assert not refused(), "its process is gone"
    assert refused(tmp_path / "none" / "own")


KEEPER = """
import sys
from sparring.pipeline.queues.endpoints import socket_folder
with socket_folder() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_socket_folder_of_a_killed_process_is_removed_by_the_next_and_that_of_a_living_one_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    others = tmp_path / "sparring-results", tmp_path / "sparring-12345678"
    for other in others:
        (other / "logs").mkdir(parents=True)
        (other / "lock").touch()
    (others[1] / "sockets.lock").touch()  # also where somebody keeps files in one
    command = [sys.executable, "-c", f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}{KEEPER}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None
        folder = Path(keeper.stdout.readline().strip())
        assert folder.stat().st_mode & 0o777 == 0o700
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(folder / "0"))
            with socket_folder() as own:
                assert folder.exists(), "its process lives"
            keeper.kill()
            keeper.wait()
            with socket_folder() as own:
                assert not folder.exists()
                assert own.exists()
    assert sorted(tmp_path.iterdir()) == sorted(others)
    assert all((other / "logs").exists() for other in others)
