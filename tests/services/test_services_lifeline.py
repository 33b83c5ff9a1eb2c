"""A service ends with its supervisor, even while it is still loading."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sparring import __main__
from sparring.services import main as command
from sparring.services.process import interrupts
from sparring.services.process.hosting import ProcessHost
from sparring.services.process.lifeline import PIPE_VARIABLE, adopt_orphans


def test_service_watches_its_supervisor_before_it_loads_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def load(name: str) -> None:
        order.append(name)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "end_with_supervisor", lambda: order.append("tied"))
    monkeypatch.setattr(command.importlib, "import_module", load)
    with pytest.raises(KeyboardInterrupt):
        command.main(["service", "assembly"])
    assert order == ["tied", "sparring.services.commands.service"]


def test_interrupt_that_no_command_handles_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(interrupts, "watch", lambda: None)
    monkeypatch.setattr(command, "main", interrupted)
    assert __main__.main() == 130


def test_interrupt_at_the_exit_of_a_command_ends_without_a_traceback() -> None:
    """Python waits for threads and calls functions there, from which an exception would be printed."""
    program = "import atexit, signal, sys; from sparring import __main__; "
    program += "atexit.register(signal.raise_signal, signal.SIGINT); sys.argv = ['sparring', '--version']; "
    program += "sys.exit(__main__.main())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=40, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_interrupt_that_a_library_turns_into_an_error_is_no_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_given: object) -> int:
        raise ValueError("Error building a serializer: KeyboardInterrupt")

    monkeypatch.setattr(command, "_run", interrupted)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert command.main(["train"]) == 1
    monkeypatch.setattr(interrupts, "_has_come", True)
    assert command.main(["train"]) == 130


def test_first_process_of_a_container_ends_by_a_signal_that_the_kernel_would_withhold() -> None:
    program = "import os, signal, sys; from sparring.services.process import interrupts; os.getpid = lambda: 1; "
    program += "interrupts.watch(); signal.raise_signal(signal.SIGTERM); sys.exit(0)"
    assert subprocess.run([sys.executable, "-c", program], timeout=40, check=False).returncode == 143


@pytest.mark.skipif(sys.platform != "linux", reason="the watcher needs it")
def test_ends_of_children_are_seen_though_the_caller_ignores_them(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("{behaviors: {A: }, simulators: [{command: [sh, -c, exit 7]}], pipeline: {export: false}}")
    words = [sys.executable, "-m", "sparring", "train", str(file), "--results-dir", str(tmp_path)]
    ignore = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-c", ignore, *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 1
    assert re.search("simulator-0 failed.*: exit status 7", ended.stderr), ended.stderr


@pytest.mark.parametrize("value", ["abc", "99", "-1", "9" * 30])
def test_pipe_that_no_supervisor_has_opened_is_refused_in_words(value: str) -> None:
    command = [sys.executable, "-m", "sparring", "--help"]
    environment = {**os.environ, PIPE_VARIABLE: value}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=40, check=False)
    assert done.returncode == 2
    assert done.stderr == f"sparring: got {PIPE_VARIABLE}={value!r}, which only a supervisor sets; unset it\n"


def test_process_without_a_supervisor_ends_at_once(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(writer)
    code = "from sparring.services.process.lifeline import end_with_supervisor as tie; tie(); "
    code += "import threading; threading.Event().wait(50)"
    process = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, PIPE_VARIABLE: str(reader)}, pass_fds=(reader,), timeout=40
    )
    os.close(reader)
    assert process.returncode == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux wakes a process when its parent ends")
def test_stopped_watcher_ends_with_its_supervisor_and_takes_its_program_along(tmp_path: Path) -> None:
    code = """
import os, signal, sys, time
from pathlib import Path
from sparring.services.process.hosting import ProcessHost
host = ProcessHost(Path(sys.argv[1]))
program = "import os, time; print(os.getpid(), flush=True); time.sleep(500)"
watcher = host.watched("one", [sys.executable, "-c", program], {})
while not watcher.last_lines():
    time.sleep(0.01)
print(watcher.pid, watcher.last_lines(), flush=True)
os.kill(watcher.pid, signal.SIGSTOP)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=50)
    left = [psutil.Process(int(pid)) for pid in ended.stdout.split() if psutil.pid_exists(int(pid))]
    _, alive = psutil.wait_procs(left, timeout=20.0)
    for one in alive:
        one.kill()
    assert not alive


PARENT = """
import subprocess, sys, time
sleeping = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print(subprocess.Popen(["true"]).pid, sleeping.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt others")
@pytest.mark.parametrize("way", ["itself", "SIGTERM", "SIGKILL", "SIGHUP"])
def test_children_of_a_simulator_end_with_it_although_they_have_a_session_of_their_own(
    tmp_path: Path, way: str
) -> None:
    host = ProcessHost(tmp_path)
    watcher = host.watched("one", [sys.executable, "-c", PARENT, "0" if way == "itself" else "1000"], {})
    while not (pids := watcher.last_lines().split()):
        time.sleep(0.01)
    if way == "SIGHUP":  # of a process group with a stopped process, when the supervisor ends
        os.kill(watcher.pid, signal.SIGHUP)
    if way in ("SIGTERM", "SIGHUP"):
        watcher.stop()
    elif way == "SIGKILL":
        watcher.kill()
    ended = watcher.join(40.0)
    host.close()
    assert ended == ("signal SIGKILL: " + " ".join(pids) if way == "SIGKILL" else "")
    children = [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]
    _, alive = psutil.wait_procs(children, timeout=20.0)
    for one in alive:
        one.kill()
    assert not alive


DETACHED = """
import os, subprocess, time
sleeping = subprocess.Popen(["sleep", "1000"], start_new_session=True)
with open("pids", "w") as file:
    print(os.getppid(), sleeping.pid, file=file)
time.sleep(1000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt others")
def test_children_of_a_simulator_end_with_the_command_although_its_watcher_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sparring", "compliance", "--timeout", "300", "--", sys.executable, "-c", DETACHED]
    checking = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    while not (tmp_path / "pids").exists() or not (pids := (tmp_path / "pids").read_text()).endswith("\n"):
        time.sleep(0.01)
    watcher, sleeping = map(int, pids.split())
    os.kill(watcher, signal.SIGKILL)
    assert checking.wait(60) == 1
    assert not psutil.pid_exists(sleeping)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt others")
def test_processes_that_a_simulator_has_forgotten_are_reaped_while_it_runs(tmp_path: Path) -> None:
    adopt_orphans()  # as a supervisor
    host = ProcessHost(tmp_path)
    program = "import os, time; os.system('sleep 0 & echo $! >&2'); time.sleep(1000)"
    watcher = host.watched("one", [sys.executable, "-c", program], {})
    while not (pid := watcher.last_lines()):
        time.sleep(0.01)
    deadline = time.monotonic() + 20.0
    while (is_left := psutil.pid_exists(int(pid))) and time.monotonic() < deadline:  # `wait_procs` would reap it
        time.sleep(0.01)
    watcher.kill()
    watcher.join(40.0)
    host.close()
    assert not is_left


@pytest.mark.skipif(sys.platform != "linux", reason="there is a fork server on Linux only")
def test_stopped_service_whose_fork_server_died_ends_with_the_supervisor() -> None:
    """The supervisor has adopted it: the death of each of its parents wakes it, and then it reads its pipe."""
    code = """
import os, signal, time
import psutil
from sparring.services.process.forking import ForkServer
server = ForkServer(["sparring.services.main"])
reader, writer = os.pipe()
child = server.fork(["simulator", "goal", "--connect", "tcp://127.0.0.1:9"], {}, [1, 2, reader])
print(child.pid, flush=True)
while "goal" not in psutil.Process(child.pid).cmdline()[0]:  # the title of its command
    time.sleep(0.01)
server.kill()
while psutil.Process(child.pid).ppid() != os.getpid():
    time.sleep(0.01)
os.kill(child.pid, signal.SIGSTOP)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=50)
    pid = int(ended.stdout.split()[0])
    _, alive = psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=20.0)
    for one in alive:
        one.kill()
    assert not alive
