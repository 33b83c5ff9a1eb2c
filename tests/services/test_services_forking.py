"""A server that forks processes, whatever dies first: the process, the server, or their supervisor."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from sparring.services.process import forking
from sparring.services.process.forking import ForkedProcess, ForkServer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is a fork server on Linux only")

LIMIT_S = 60.0

COMMANDS = """
import os, random, sys, time
import numpy.random

def run(arguments=None):
    text = sys.argv[1]
    sys.argv[1:] = []
    exec(text)
    return 0

from sparring.services import main
main.main = run
"""
"""A module for the server to import: the command of its children is the text that they are given."""


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a child run the text that it gets in place of a command."""
    forking.end()  # that of a test before
    (tmp_path / "forked_commands.py").write_text(COMMANDS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(forking, "MODULES", ("forked_commands",))


@pytest.fixture
def server(commands: None) -> Iterator[ForkServer]:
    made = ForkServer(forking.MODULES)
    yield made
    made.close()


@pytest.fixture
def lifeline() -> Iterator[tuple[int, int]]:
    """A pipe whose writing end only the supervisor has."""
    ends = os.pipe()
    yield ends
    for one in ends:
        os.close(one)


def start(
    server: ForkServer, text: str, folder: Path, lifeline: tuple[int, int], *, watched: bool = False
) -> ForkedProcess:
    """Forks a process with files as its output."""
    with (folder / "out").open("ab") as out, (folder / "err").open("ab") as errors:
        descriptors = [out.fileno(), errors.fileno(), lifeline[0]]
        return server.fork([text], {"GREETING": "hello"}, descriptors, watched=watched)


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("raise ValueError('no')", 1),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("time.sleep(0.2); os.kill(os.getpid(), 15)", -signal.SIGTERM),
    ],
)
def test_status_is_that_of_the_process(
    server: ForkServer, tmp_path: Path, lifeline: tuple[int, int], text: str, status: int, watched: bool
) -> None:
    assert start(server, text, tmp_path, lifeline, watched=watched).wait(LIMIT_S) == status


@pytest.mark.parametrize(("way", "status"), [("itself", 0), ("SIGTERM", -signal.SIGTERM), ("server", None)])
def test_watched_process_takes_along_what_it_has_started(
    server: ForkServer, tmp_path: Path, lifeline: tuple[int, int], way: str, status: int | None
) -> None:
    """The watcher, whose status counts, is its parent, and adopts what has a session of its own."""
    text = "import subprocess; child = subprocess.Popen(['sleep', '1000'], start_new_session=True)"
    text += f"; print(os.getppid(), os.getpid(), child.pid, flush=True); time.sleep({0 if way == 'itself' else 1000})"
    watcher = start(server, text, tmp_path, lifeline, watched=True)
    while not (pids := (tmp_path / "out").read_text().split()):
        time.sleep(0.01)
    left = [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]
    if way == "SIGTERM":
        watcher.terminate()
    elif way == "server":
        server.close()
    assert int(pids[0]) == watcher.pid
    assert status in (None, watcher.wait(LIMIT_S))
    _, alive = psutil.wait_procs(left, timeout=LIMIT_S)
    assert not alive


def test_processes_draw_numbers_of_their_own(server: ForkServer, tmp_path: Path, lifeline: tuple[int, int]) -> None:
    """The sources of Python and NumPy that have no seed are those of the server otherwise."""
    for _ in range(2):
        text = "print(random.random(), numpy.random.random())"
        assert start(server, text, tmp_path, lifeline).wait(LIMIT_S) == 0
    assert len(set((tmp_path / "out").read_text().split())) == 4


def test_threads_of_libraries_are_limited_in_the_server_alone(
    commands: None, tmp_path: Path, lifeline: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulator may start programs of its own."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    made = ForkServer(forking.MODULES)
    try:
        assert start(made, "print(os.environ['OMP_NUM_THREADS'])", tmp_path, lifeline).wait(LIMIT_S) == 0
    finally:
        made.close()
    assert (tmp_path / "out").read_text() == "3\n"


def test_process_has_its_own_variables_output_group_and_title_and_no_folder_of_the_user(
    server: ForkServer, tmp_path: Path, lifeline: tuple[int, int]
) -> None:
    text = "print(os.environ['GREETING'], os.getpgrp() == os.getpid(), '' in sys.path); print('bad', file=sys.stderr)"
    text += "; print(open('/proc/self/cmdline').read())"
    assert start(server, text, tmp_path, lifeline).wait(LIMIT_S) == 0
    assert (tmp_path / "out").read_text().startswith("hello True False\nsparring print(")
    assert (tmp_path / "err").read_text() == "bad\n"


def test_interrupt_while_a_server_imports_shows_nothing(
    commands: None, tmp_path: Path, lifeline: tuple[int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    """Its own imports are Python's, too, which would show a traceback."""
    made = ForkServer(forking.MODULES)
    try:
        for _ in range(50):
            os.kill(made._server.pid, signal.SIGINT)
        assert start(made, "pass", tmp_path, lifeline).wait(LIMIT_S) == 0
    finally:
        made.close()
    assert capfd.readouterr().err == ""


def test_process_may_have_arguments_that_are_no_text(
    server: ForkServer, tmp_path: Path, lifeline: tuple[int, int]
) -> None:
    """As the path of a folder with a name of former times."""
    with (tmp_path / "out").open("wb") as out:
        arguments = ["print(open('/proc/self/cmdline').read())", "caf\udce9"]
        forked = server.fork(arguments, {}, [out.fileno(), out.fileno(), lifeline[0]])
        assert forked.wait(LIMIT_S) == 0, (tmp_path / "out").read_text()
    assert "caf\ufffd" in (tmp_path / "out").read_text()


def test_process_leaves_a_working_folder_that_was_removed(
    commands: None, tmp_path: Path, lifeline: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries cannot be loaded there; one that exists stays."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    made = ForkServer(forking.MODULES)
    try:
        assert start(made, "print(os.getcwd())", tmp_path, lifeline).wait(LIMIT_S) == 0
        folder.rmdir()
        assert start(made, "print(os.getcwd())", tmp_path, lifeline).wait(LIMIT_S) == 0
    finally:
        made.close()
    assert (tmp_path / "out").read_text() == f"{folder}\n/\n"


def test_wait_has_a_limit(server: ForkServer, tmp_path: Path, lifeline: tuple[int, int]) -> None:
    process = start(server, "time.sleep(1000)", tmp_path, lifeline)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.0)
    process.terminate()
    assert process.wait(LIMIT_S) == -signal.SIGTERM


def test_several_threads_may_wait(server: ForkServer, tmp_path: Path, lifeline: tuple[int, int]) -> None:
    with ThreadPoolExecutor(4) as threads:
        for _ in range(20):
            process = start(server, "time.sleep(0.01); sys.exit(3)", tmp_path, lifeline)
            assert list(threads.map(process.wait, [LIMIT_S] * 4)) == [3] * 4
            assert process.wait(0.0) == 3


def test_stopped_server_still_tells_how_a_process_has_ended(
    server: ForkServer, tmp_path: Path, lifeline: tuple[int, int]
) -> None:
    process = start(server, "time.sleep(1000)", tmp_path, lifeline)
    os.kill(server._server.pid, signal.SIGSTOP)
    process.terminate()
    assert process.wait(LIMIT_S) == -signal.SIGTERM


def test_what_a_process_has_left_behind_is_reaped_and_ends_with_the_server(
    server: ForkServer, tmp_path: Path, lifeline: tuple[int, int]
) -> None:
    text = "import subprocess; left = subprocess.Popen(['sleep', '1000'], start_new_session=True)"
    text += "; ended = subprocess.Popen(['true']); print(left.pid, ended.pid)"
    assert start(server, text, tmp_path, lifeline).wait(LIMIT_S) == 0
    left, ended = (int(pid) for pid in (tmp_path / "out").read_text().split())
    sleeping = psutil.Process(left)
    _, zombies = psutil.wait_procs([psutil.Process(ended)] if psutil.pid_exists(ended) else [], LIMIT_S)
    assert not zombies
    server.close()
    assert not sleeping.is_running()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_children_outlive_a_dead_server_and_the_next_process_gets_another(
    commands: None, tmp_path: Path, lifeline: tuple[int, int], monkeypatch: pytest.MonkeyPatch, end: signal.Signals
) -> None:
    monkeypatch.setattr(forking, "_ANSWER_S", 0.5)
    first = forking.server()
    try:
        child = start(first, "time.sleep(1000)", tmp_path, lifeline)
        os.kill(first._server.pid, end)
        with (tmp_path / "out").open("ab") as out:
            other = forking.fork(["sys.exit(7)"], {}, [out.fileno(), out.fileno(), lifeline[0]])
        assert other.wait(LIMIT_S) == 7
        assert forking.server() is not first
        assert psutil.Process(child.pid).is_running()
        child.terminate()
        assert child.wait(LIMIT_S) == -signal.SIGTERM
    finally:
        forking.end()


SUPERVISOR = """
import os, signal, sys, time
from sparring.services.process.forking import ForkServer
server = ForkServer(("forked_commands",))
reader, writer = os.pipe()
children = [server.fork(["time.sleep(1000)"], {}, [1, 2, reader]) for _ in range(2)]
os.kill(children[0].pid, signal.SIGSTOP)
if sys.argv[1] == "stopped":
    os.kill(server._server.pid, signal.SIGSTOP)
print(server._server.pid, *[one.pid for one in children], flush=True)
time.sleep(1000)
"""


def test_all_processes_start_that_several_threads_ask_a_dead_server_for(
    commands: None, tmp_path: Path, lifeline: tuple[int, int]
) -> None:
    with (tmp_path / "out").open("ab") as out, ThreadPoolExecutor(8) as threads:
        descriptors = [out.fileno(), out.fileno(), lifeline[0]]
        for _ in range(3):
            forking.server().kill()
            asked = [threads.submit(forking.fork, ["pass"], {}, descriptors) for _ in range(8)]
            assert [one.result(LIMIT_S).wait(LIMIT_S) for one in asked] == [0] * 8
    forking.end()


@pytest.mark.parametrize("kind", ["running", "stopped"])
def test_nothing_outlives_the_supervisor_though_it_be_stopped(commands: None, kind: str) -> None:
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, kind], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    with supervisor.stdout as output:
        processes = [psutil.Process(int(pid)) for pid in output.readline().split()]
        supervisor.kill()
        supervisor.wait(LIMIT_S)
        _, alive = psutil.wait_procs(processes, LIMIT_S)
    assert len(processes) == 3
    assert not alive


class Unheard:
    """The socket of a server that dies after it has forked, and before anybody hears its answer."""

    def __init__(self, real: socket.socket, server: int) -> None:
        self._real, self._server = real, server

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def recv(self, most: int) -> bytes:
        assert self._real.recv(most)
        os.kill(self._server, signal.SIGKILL)
        return self._real.recv(most)


def test_server_whose_supervisor_dies_during_its_imports_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "never_imported.py").write_text("import threading\n\nthreading.Event().wait()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    made = ForkServer(["never_imported"])
    made._socket.close()  # as the system does it for a process that dies
    assert made._server.wait(60) == 0


def test_process_that_its_supervisor_does_not_know_does_nothing(
    server: ForkServer, tmp_path: Path, lifeline: tuple[int, int]
) -> None:
    """Another server starts the same service: the two would listen at the same addresses."""
    before = {*psutil.Process().children()}  # those of other tests among them
    server._socket = Unheard(server._socket, server._server.pid)  # type: ignore[assignment]
    with pytest.raises(OSError, match="the fork server has ended"):
        start(server, "print('here')", tmp_path, lifeline)
    server.kill()
    (adopted,) = {*psutil.Process().children()} - before
    assert os.waitstatus_to_exitcode(os.waitpid(adopted.pid, 0)[1]) == 0
    assert (tmp_path / "out").read_text() == ""


def test_interrupted_server_goes_on_and_its_processes_can_be_interrupted(
    server: ForkServer, tmp_path: Path, lifeline: tuple[int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    """SIGINT to the server alone, from a tool that signals every process of a run."""
    assert start(server, "pass", tmp_path, lifeline).wait(LIMIT_S) == 0
    os.kill(server._server.pid, signal.SIGINT)
    process = start(server, "os.kill(os.getpid(), 2); time.sleep(60)", tmp_path, lifeline)
    assert process.wait(LIMIT_S) == 130
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("commands")
def test_start_that_waits_for_imports_without_end_can_be_abandoned(lifeline: tuple[int, int]) -> None:
    """No other server takes over then, whose imports would hang as well."""
    server = forking.server()
    os.kill(server._server.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(forking.fork, ["pass"], {}, [1, 2, lifeline[0]])
        forking.abandon()
        with pytest.raises(forking.Abandoned):
            started.result(LIMIT_S)
    assert forking.server() is server
    forking.end()
