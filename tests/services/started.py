"""Starts the `sparring` command as a process that is forked from one that has imported what it needs (`warm.py`)."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO
from unittest import mock

from sparring.services.process import lifeline
from sparring.services.process.forking import ForkedProcess, ForkServer

ROOT = Path(__file__).parents[2]

SAME_EVERYWHERE = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
}
"""Arithmetic of the oldest CPUs: wider vector units round differently, and a short run that learns on one machine
might not learn on another."""


class Started:
    """A forked command, with the members of `subprocess.Popen` that tests need."""

    def __init__(self, process: ForkedProcess, output: IO[str]) -> None:
        self.pid = process.pid
        self.stdout = output
        self._process = process

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end; returns its exit status. Raises TimeoutExpired."""
        return self._process.wait(timeout)

    def poll(self) -> int | None:
        """Returns its exit status; None while it runs."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # the fork server reaps it, between the two lines as well
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it at once."""
        self.send_signal(signal.SIGKILL)


def start(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Started:
    """Starts `sparring ARGUMENTS` with the arithmetic of the oldest CPUs; output and errors go to one pipe.

    Args:
        arguments: of the command.
        environment: variables in addition to those of this process.
    """
    server, lifeline_reader = _server()
    reader, writer = os.pipe()
    try:
        process = server.fork(arguments, environment or {}, [writer, writer, lifeline_reader])
    finally:
        os.close(writer)
    return Started(process, os.fdopen(reader, encoding="utf-8", errors="replace"))


@functools.cache
def _server() -> tuple[ForkServer, int]:
    """Returns the fork server of this process, and the pipe at whose end its processes end."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with mock.patch.dict(os.environ, {**SAME_EVERYWHERE, "PYTHONPATH": path}):
        server = ForkServer(["tests.services.warm"])
    lifeline._control(lifeline._ADOPT, 0)  # the orphans of a run are not those of the tests
    atexit.register(server.close)
    return server, os.pipe()[0]
