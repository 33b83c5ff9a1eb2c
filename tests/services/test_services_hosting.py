"""Reports of how a process ended."""

from __future__ import annotations

import asyncio
import errno
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest

from sparring.pipeline.errors import DISK_FULL
from sparring.services.process import hosting
from sparring.services.process.hosting import Process, ProcessHost, Task, group_cpu_s
from sparring.services.process.lifeline import CORES_VARIABLE, PIPE_VARIABLE
from sparring.services.process.runtime import in_thread
from sparring.services.supervision.topology import usable_cores

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[ProcessHost]:
    made = ProcessHost(tmp_path)
    yield made
    made.close()


def start(host: ProcessHost, code: str) -> Process:
    return host.start("one", [sys.executable, "-c", code], {})


async def test_final_report_is_that_of_the_current_incarnation(host: ProcessHost) -> None:
    assert await start(host, "raise SystemExit('no such file')").wait() == "exit status 1: no such file"
    assert await start(host, "import os; os.kill(os.getpid(), 9)").wait() == "signal SIGKILL"


async def test_error_of_node_is_named_without_the_stack_that_follows_it(host: ProcessHost) -> None:
    written = (
        "file:///own/game.mjs:19\n    throw new Error('no texture');\n    ^\n\nError: no texture\n"
        "    at step (file:///own/game.mjs:19:53)\n    at run (file:///own/kit.js:830:12) {\n"
        "  code: 'x',\n}\n\nNode.js v20.20.2"
    )
    assert await start(host, f"raise SystemExit({written!r})").wait() == "exit status 1: Error: no texture"
    assert await start(host, "raise SystemExit('Node.js v20.20.2')").wait() == "exit status 1: Node.js v20.20.2"
    grouped = "raise ExceptionGroup('several', [ValueError('the first'), KeyError('the last')])"
    assert await start(host, grouped).wait() == "exit status 1: KeyError: 'the last'"


async def test_process_starts_without_the_file_for_its_errors(tmp_path: Path) -> None:
    """Users remove folders and replace files of a run that goes on."""
    logs = tmp_path / "logs"
    host = ProcessHost(logs)
    assert await start(host, "raise SystemExit('no such file')").wait() == "exit status 1: no such file"
    (logs / "one.stderr").unlink()
    (logs / "one.stderr").mkdir()
    assert await start(host, "raise SystemExit('no such file')").wait() == "exit status 1"
    host.close()


async def test_watched_program_does_not_follow_the_pipe_of_its_watcher(host: ProcessHost) -> None:
    process = host.watched("one", [sys.executable, "-c", f"import os; os.environ['{PIPE_VARIABLE}']"], {})
    assert "KeyError" in await process.wait()


@pytest.mark.skipif(not usable_cores(), reason="the system cannot place processes on cores")
async def test_watched_program_runs_on_its_cores(host: ProcessHost) -> None:
    """The program does not see the variable, so that processes of its own are placed by nobody."""
    core = usable_cores()[-1]
    code = f"import os; assert '{CORES_VARIABLE}' not in os.environ; raise SystemExit(str(os.sched_getaffinity(0)))"
    process = host.watched("one", [sys.executable, "-c", code], {CORES_VARIABLE: str(core)})
    assert await process.wait() == f"exit status 1: {{{core}}}"


async def test_ending_of_a_watched_simulator_is_its_own(host: ProcessHost) -> None:
    for code, ending in (("os.kill(os.getpid(), 9)", "signal SIGKILL"), ("os._exit(3)", "exit status 3"), ("0", "")):
        process = host.watched("one", [sys.executable, "-c", f"import os; {code}"], {})
        with anyio.fail_after(30):
            assert await process.wait() == ending


async def test_process_stopped_before_it_handles_signals_has_not_failed(host: ProcessHost) -> None:
    process = start(host, "import time; time.sleep(50)")
    process.stop()
    with anyio.fail_after(30):
        assert await process.wait() == ""
    other = start(host, "import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert await other.wait() == "signal SIGTERM"


async def test_process_without_disk_space_is_reported_and_not_restarted(host: ProcessHost) -> None:
    process = start(host, f"raise SystemExit({DISK_FULL})")
    assert await process.wait() == "exit status 28, could not write its files (no room on the disk?)"
    assert process.hopeless


async def test_service_that_finds_a_folder_in_place_of_a_file_is_not_restarted(tmp_path: Path) -> None:
    async def work(_: anyio.Event) -> None:
        async with anyio.create_task_group():
            raise IsADirectoryError(errno.EISDIR, "Is a directory", str(tmp_path))

    task = Task("one")
    await task.run(work)
    assert task.hopeless
    assert await task.wait() == f"got a folder at {tmp_path}; expected a file; move it away"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
async def test_process_that_shares_its_core_is_starved_for_some_time(tmp_path: Path) -> None:
    core = usable_cores()[0]
    burns = "began = time.process_time()\nwhile time.process_time() - began < 0.3: pass\n"
    program = f"import os, time\nos.sched_setaffinity(0, [{core}])\ninput()\n{burns}print(flush=True)\ninput()"
    popen = partial(subprocess.Popen, [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    started = [Process(popen(), tmp_path / "none") for _ in range(2)]
    inputs, outputs = zip(*((one.process.stdin, one.process.stdout) for one in started), strict=True)
    for step in ("burn", "end"):
        for each in inputs:
            each.write(b"\n")
            each.flush()
        if step == "burn":
            assert [each.readline() for each in outputs] == [b"\n"] * 2
            starved_s = sum(one.starved_s for one in started)
    assert [await one.wait() for one in started] == ["", ""]
    for each in (*inputs, *outputs):
        each.close()
    assert starved_s >= 0.2, "one runs while the other waits"
    assert started[0].starved_s == 0.0, "it has ended"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
async def test_process_is_starved_whose_threads_wait_for_a_core_though_its_main_thread_does_not(tmp_path: Path) -> None:
    """A thread of its own carries its messages."""
    program = f"""
import hashlib, os, threading, time
os.sched_setaffinity(0, [{usable_cores()[0]}])
data, over, burnt = bytes(2**20), threading.Event(), threading.Barrier(3)
def burn():
    while time.thread_time() < 0.2:
        hashlib.sha256(data)  # without the lock of the interpreter
    burnt.wait()
    over.wait()
for _ in range(2):
    threading.Thread(target=burn).start()
burnt.wait()
print(flush=True)
input()
over.set()
"""
    popen = partial(subprocess.Popen, [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with popen() as burns:
        assert burns.stdout is not None
        assert burns.stdout.readline() == b"\n"
        starved_s = Process(burns, tmp_path / "none").starved_s
        burns.communicate(b"\n")
    assert starved_s >= 0.1


async def test_a_wait_for_a_core_is_counted_while_it_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system counts it once it is over."""
    (tmp_path / "7").mkdir()
    now = 0.0
    monkeypatch.setattr(hosting, "Path", lambda _: tmp_path)
    monkeypatch.setattr(hosting, "time", SimpleNamespace(monotonic=lambda: now))
    process = Process(SimpleNamespace(pid=1), tmp_path)  # type: ignore[arg-type]
    looks = [
        (0.0, "R", 1, 1.0),  # second, state, seconds that the system has counted, and the expected ones
        (4.0, "R", 1, 5.0),
        (5.0, "S", 6, 6.0),
        (9.0, "S", 6, 6.0),
        (9.5, "R", 6, 6.0),  # it may have slept until now
        (10.0, "R", 6, 6.5),
        (11.0, "R", 6, 7.5),
        (12.0, "D", 6, 6.0),
    ]
    for now, state, counted_s, expected in looks:
        (tmp_path / "7" / "stat").write_text(f"7 (a) R) {state} 1 7")
        (tmp_path / "7" / "schedstat").write_text(f"{counted_s} {counted_s}000000000 9")
        assert process.starved_s == expected, now


async def test_cpu_time_of_a_group_is_that_of_all_its_processes() -> None:
    burns = "import time\nwhile time.process_time() < 0.1: pass\n"
    program = f"{burns}import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burns + 'print(); input()'!r}])"
    async with await anyio.open_process([sys.executable, "-c", program], start_new_session=True) as process:
        assert process.stdout is not None
        await process.stdout.receive()
        used = group_cpu_s([process.pid, 2**30])
        assert process.stdin is not None
        await process.stdin.send(b"\n")
        await process.wait()
    assert used[process.pid] >= 0.18  # the clock of the kernel is coarse
    assert used[2**30] == 0


class Silent(Exception):
    """An error of a plug-in without a text."""

    def __str__(self) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()])
async def test_whatever_a_plug_in_raises_in_a_thread_is_a_failure_with_its_place(error: BaseException) -> None:
    def work() -> None:
        raise error

    with pytest.raises(RuntimeError, match=f"^{type(error).__name__}") as raised:
        await in_thread(work)
    assert raised.value.__cause__ is error


async def test_task_ends_alone_where_a_plug_in_exits_or_its_error_has_no_text() -> None:
    async def work(stop: anyio.Event, error: BaseException) -> None:
        async with anyio.create_task_group():
            raise error

    for error, text in ((SystemExit(3), "SystemExit: 3"), (Silent(), "Silent")):
        task = Task("learning-A")
        await task.run(partial(work, error=error))
        assert (await task.wait()).startswith(text)
