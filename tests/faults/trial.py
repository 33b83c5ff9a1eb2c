"""One real run: its configuration, observations of it while it runs, and faults of its processes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from sparring.pipeline.learning.checkpoints import CheckpointFolder
from tests.services.services_helpers import Training
from tests.services.started import SAME_EVERYWHERE

BEHAVIOR = "Balance"
LEARNER = f"learning-{BEHAVIOR}"
SERVICES = ("stepping-0", "assembly", "coordination", LEARNER, "monitor")
SIMULATORS, AREAS = 2, 8
AGENTS = SIMULATORS * AREAS
BUFFER = 1024
SLOW_MS = 12.0
"""Longest pause of a simulator before a step, which limits the speed of a run and its use of the CPU."""
STEPS_PER_S = 2000
"""Approximate speed of a run, which converts its intended duration into steps."""
SILENCE_S = 6.0
"""Silence after which a simulator and its trainer disconnect."""
RECOVERY_S = 5.0
LONG_S = 300.0
"""Deadline for what takes seconds on an idle machine."""


class Violation(AssertionError):
    """A run broke a condition."""


def in_flight(mode: str) -> int:
    """Returns the most steps that can be in no published update; the frame that reaches the budget may exceed it."""
    return (2 if mode == "overlap" else 1) * BUFFER + AGENTS


def configuration(
    mode: str,
    seconds: float,
    *,
    simulator: Sequence[str] = (),
    budget: int = 50,
    patience_s: float = LONG_S,
    transport: str = "auto",
) -> dict[str, Any]:
    """Returns the settings of a run.

    Args:
        mode: `overlap` or `lockstep`.
        seconds: approximate duration without start-up and faults.
        simulator: arguments before and after those of the built-in simulator, separated by "...".
        budget: number of restarts.
        patience_s: stall timeout.
        transport: transport between services.
    """
    split = list(simulator).index("...") if "..." in simulator else 0
    command = [sys.executable, "-m", "sparring", "simulator", "balance", "--areas", str(AREAS), "--slow", str(SLOW_MS)]
    command += ["--timeout", str(LONG_S)]
    return {
        "behaviors": {
            BEHAVIOR: {
                "hyperparameters": {
                    "batch_size": 128,
                    "buffer_size": BUFFER,
                    "learning_rate": 0.0003,
                    "num_epoch": 3,
                },
                "network_settings": {"hidden_units": 32, "num_layers": 1},
                "max_steps": int(seconds * STEPS_PER_S),
                "time_horizon": 64,
                "summary_freq": BUFFER,
                "checkpoint_interval": 8 * BUFFER,
            }
        },
        "simulators": [{"command": [*simulator[:split], *command, *simulator[split + 1 :]], "count": SIMULATORS}],
        "pipeline": {
            "mode": mode,
            "transport": transport,
            "recovery_interval": RECOVERY_S,
            "heartbeat_s": 1.0,
            "simulator_timeout_s": SILENCE_S,
            "restarts": {"budget": budget, "backoff_s": 0.2, "backoff_max_s": 2.0},
            "stall_timeout_s": patience_s,
        },
    }


class Trial:
    """One real run with its folder.

    Args:
        folder: folder for its configuration and results.
        mode: `overlap` or `lockstep`.
        seconds: intended duration.
        seed: seed of the run and of the time of the fault.
        results: folder of results; None for one below `folder`.
        prefix: arguments before its command.
        **settings: further arguments of `configuration`.
    """

    def __init__(
        self,
        folder: Path,
        mode: str,
        seconds: float,
        seed: int,
        *,
        results: Path | None = None,
        prefix: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        self.mode = mode
        self.seconds = seconds
        self.max_steps = int(seconds * STEPS_PER_S)
        self.random = random.Random(seed)
        self._file = folder / "config.yaml"
        self._file.write_text(yaml.safe_dump(configuration(mode, seconds, **settings), sort_keys=False))
        self._results = results or folder / "results"
        self._seed = seed
        self._prefix = prefix
        self.training = self._start()
        self.directory = self.training.directory
        self.folder = CheckpointFolder(self.directory, BEHAVIOR)
        self.versions: list[tuple[float, int]] = []
        self.recovery_s: float | None = None
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _start(self, *arguments: str) -> Training:
        own = ["--seed", str(self._seed), *arguments]
        return Training(
            self._results, str(self._file), *own, environment=SAME_EVERYWHERE, apart=True, prefix=self._prefix
        )

    def resume(self) -> None:
        """Resumes a run that has ended."""
        self.training = self._start("--resume")

    def close(self) -> list[str]:
        """Kills all processes that still run and returns those that should have ended."""
        self._ended.set()
        self._watcher.join(10)
        left = self.family() if self.training.process.poll() is None else self.remains()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.training.process.poll() is None:
            self.training.process.kill()
        return [str(process) for process in left]

    # ---------------------------------------------------------------- observations

    def _watch(self) -> None:
        """Records every change of the published version."""
        while not self._ended.wait(0.02):
            try:
                text = (self.folder.path / "version").read_text()
            except OSError:
                continue
            if text.isdigit() and (not self.versions or self.versions[-1][1] != int(text)):
                self.versions.append((time.monotonic(), int(text)))

    @property
    def version(self) -> int:
        """The version that was published last."""
        return self.versions[-1][1] if self.versions else 0

    def log(self, service: str, *events: str) -> list[dict[str, Any]]:
        """Returns the lines of a service's log: all, or those of the given events."""
        path = self.directory / "logs" / f"{service}.jsonl"
        if not path.exists():
            return []
        lines = []
        for text in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):  # half a line of a process that was killed or whose disk was full
                line = json.loads(text)
                if not events or line["event"] in events:
                    lines.append(line)
        return lines

    def pid(self, part: str) -> int:
        """Returns the process id of a part's current incarnation; for a simulator, not that of its watcher."""
        pid = self.training.pid(part)
        if part.startswith("simulator"):
            deadline = time.monotonic() + 20
            while not (inner := psutil.Process(pid).children(recursive=True)):
                if time.monotonic() > deadline:
                    raise Violation(f"{part} was not started by its watcher")
                time.sleep(0.05)
            return inner[-1].pid
        return pid

    def family(self) -> list[psutil.Process]:
        """Returns all processes of the run."""
        own = psutil.Process(self.training.process.pid)
        return [own, *own.children(recursive=True)]

    def remains(self) -> list[psutil.Process]:
        """Returns processes that still name the run's folder in their command or environment after its end."""

        def texts(process: psutil.Process) -> Iterator[str]:
            yield from process.info["cmdline"] or ()
            yield from (process.info["environ"] or {}).values()

        every = psutil.process_iter(["cmdline", "environ"])
        return [process for process in every if any(str(self.directory) in text for text in texts(process))]

    def restored(self) -> list[dict[str, Any]]:
        """Returns the log lines of what restarted learners resumed from."""
        return self.log(LEARNER, "restored", "nothing_to_restore")

    def endpoints(self) -> dict[str, str]:
        """Returns the addresses of the queues and topics between services."""
        return dict(json.loads((self.directory / "run.json").read_text())["endpoints"])

    def trained(self) -> int:
        """Returns the steps in the newest weights; at most the last update may be missing."""
        return max(0, self.version - 1) * BUFFER

    # ---------------------------------------------------------------- waiting

    def wait(self, held: Callable[[], Any], what: str, timeout_s: float = LONG_S) -> None:
        """Returns once `held()` is true; raises Violation at the end of the run or at the deadline."""
        deadline = time.monotonic() + timeout_s
        while not held():
            if self.training.process.poll() is not None and not held():
                raise Violation(f"{what}: not before the run's end")
            if time.monotonic() > deadline:
                raise Violation(f"{what}: not within {timeout_s:g} s")
            time.sleep(0.02)

    def under_way(self, seconds: float | None = None) -> None:
        """Returns at a time that the seed chooses within the first half of the run, or of its first `seconds`."""
        self.wait(lambda: self.version >= 3, "first updates", LONG_S)
        updates = int((seconds or self.seconds) * STEPS_PER_S / BUFFER)
        version = self.random.randrange(4, max(5, updates // 2))
        self.wait(lambda: self.version >= version, f"version {version}", LONG_S)
        time.sleep(self.random.uniform(0, 0.5))

    @contextlib.contextmanager
    def recovering(self, timeout_s: float = LONG_S) -> Iterator[None]:
        """Surrounds a fault and returns once updates are published again from data after it."""
        began = time.monotonic()
        yield
        # Data in flight at the fault may give two more versions, and a learner that restarts one more.
        wanted = self.version + 4
        self.wait(lambda: self.version >= wanted or self.nearly_done(), "training after the fault", timeout_s)
        self.recovery_s = time.monotonic() - began

    def nearly_done(self) -> bool:
        """Returns whether the run has written its summary."""
        return (self.directory / "summary.json").exists()

    def end(self, timeout_s: float = LONG_S) -> int:
        """Waits for the end of the run and returns its exit status."""
        try:
            return self.training.end(timeout_s)
        except AssertionError as error:
            raise Violation(str(error)) from None

    # ---------------------------------------------------------------- faults

    def kill(self, part: str) -> None:
        """Sends SIGKILL to a process."""
        os.kill(self.pid(part), signal.SIGKILL)

    def stop(self, part: str) -> int:
        """Sends SIGSTOP to a process and returns the process id to continue."""
        pid = self.pid(part)
        os.kill(pid, signal.SIGSTOP)
        return pid

    def interrupt(self) -> None:
        """Sends SIGINT to the run, as Ctrl-C does."""
        self.training.process.send_signal(signal.SIGINT)


def continue_process(pid: int) -> None:
    """Sends SIGCONT to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
