"""One real run: its configuration, what is seen of it while it runs, and the faults that are done to it."""

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
from tests.services.services_helpers import SAME_EVERYWHERE, Training

BEHAVIOR = "Balance"
LEARNER = f"learning-{BEHAVIOR}"
SERVICES = ("stepping-0", "assembly", "coordination", LEARNER, "monitor")
SIMULATORS, AREAS = 2, 8
AGENTS = SIMULATORS * AREAS
BUFFER = 1024
SLOW_MS = 12.0
"""Most a simulator waits before a step, so that a run takes a time and not all of the machine."""
STEPS_PER_S = 2000
"""That come of it, about: what a run is meant to last is told in seconds."""
SILENCE_S = 6.0
"""After which a simulator and its trainer give each other up."""
RECOVERY_S = 5.0
LONG_S = 300.0
"""For whatever takes seconds on a machine that does nothing else."""


class Violation(AssertionError):
    """A run did what it must not."""


def in_flight(mode: str) -> int:
    """Most steps that are in no published update; the frame that reaches the budget may go over it."""
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
    """Settings of a run.

    Args:
        mode: `overlap` or `lockstep`.
        seconds: that it takes about, without its start and without faults.
        simulator: arguments before and after those of the built-in simulator, divided by "...".
        budget: of restarts.
        patience_s: with a run that does not go on.
        transport: between services.
    """
    cut = list(simulator).index("...") if "..." in simulator else 0
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
        "simulators": [{"command": [*simulator[:cut], *command, *simulator[cut + 1 :]], "count": SIMULATORS}],
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
    """One run with its folder.

    Args:
        folder: for its configuration and results.
        mode: `overlap` or `lockstep`.
        seconds: that it is meant to take.
        seed: of the run and of the moment of the fault.
        results: where its folder is; None for one below `folder`.
        prefix: what its command begins with.
        **settings: as of `configuration`.
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
        """Goes on with a run that has ended."""
        self.training = self._start("--resume")

    def close(self) -> list[str]:
        """Ends what still runs; returns what did though it should not."""
        self._ended.set()
        self._watcher.join(10)
        left = self.family() if self.training.process.poll() is None else self.remains()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.training.process.poll() is None:
            self.training.process.kill()
        return [str(process) for process in left]

    # ---------------------------------------------------------------- what is seen

    def _watch(self) -> None:
        """Notes every change of the version that was given out."""
        while not self._ended.wait(0.02):
            try:
                text = (self.folder.path / "version").read_text()
            except OSError:
                continue
            if text.isdigit() and (not self.versions or self.versions[-1][1] != int(text)):
                self.versions.append((time.monotonic(), int(text)))

    @property
    def version(self) -> int:
        """Given out last."""
        return self.versions[-1][1] if self.versions else 0

    def log(self, service: str, *events: str) -> list[dict[str, Any]]:
        """Lines of a service's log; all, or of these events."""
        path = self.directory / "logs" / f"{service}.jsonl"
        if not path.exists():
            return []
        lines = []
        for text in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):  # half a line, of one that was killed or whose disk was full
                line = json.loads(text)
                if not events or line["event"] in events:
                    lines.append(line)
        return lines

    def pid(self, part: str) -> int:
        """Of the present start of a part; of a simulator the program itself, not what watches it."""
        pid = self.training.pid(part)
        if part.startswith("simulator"):
            deadline = time.monotonic() + 20
            while not (inner := psutil.Process(pid).children(recursive=True)):
                if time.monotonic() > deadline:
                    raise Violation(f"{part} was not started by what watches it")
                time.sleep(0.05)
            return inner[-1].pid
        return pid

    def family(self) -> list[psutil.Process]:
        """All processes of the run."""
        own = psutil.Process(self.training.process.pid)
        return [own, *own.children(recursive=True)]

    def remains(self) -> list[psutil.Process]:
        """Processes that name the run's folder, or were told it as simulators are, after its end."""
        every = psutil.process_iter(["cmdline", "environ"])
        words = ((one, (*(one.info["cmdline"] or ()), *(one.info["environ"] or {}).values())) for one in every)
        return [process for process, told in words if any(str(self.directory) in word for word in told)]

    def restored(self) -> list[dict[str, Any]]:
        """What learners that were started anew went on from."""
        return self.log(LEARNER, "restored", "nothing_to_restore")

    def endpoints(self) -> dict[str, str]:
        """Addresses of the queues and boards between services."""
        return dict(json.loads((self.directory / "run.json").read_text())["endpoints"])

    def trained(self) -> int:
        """Steps in the newest weights, of which at most the last update may be missing."""
        return max(0, self.version - 1) * BUFFER

    # ---------------------------------------------------------------- waiting

    def wait(self, held: Callable[[], Any], what: str, timeout_s: float = LONG_S) -> None:
        """Returns once `held()`. Raises Violation at the end of the run or the deadline."""
        deadline = time.monotonic() + timeout_s
        while not held():
            if self.training.process.poll() is not None and not held():
                raise Violation(f"{what}: not before the run's end")
            if time.monotonic() > deadline:
                raise Violation(f"{what}: not within {timeout_s:g} s")
            time.sleep(0.02)

    def under_way(self, seconds: float | None = None) -> None:
        """Returns at a moment in the first half of the run, or of so many seconds of it, drawn by its seed."""
        self.wait(lambda: self.version >= 3, "first updates", LONG_S)
        updates = int((seconds or self.seconds) * STEPS_PER_S / BUFFER)
        moment = self.random.randrange(4, max(5, updates // 2))
        self.wait(lambda: self.version >= moment, f"version {moment}", LONG_S)
        time.sleep(self.random.uniform(0, 0.5))

    @contextlib.contextmanager
    def recovering(self, timeout_s: float = LONG_S) -> Iterator[None]:
        """Around a fault: what goes on after it, and what has come of the data in flight, is training again."""
        began = time.monotonic()
        yield
        # What was in flight at the fault may give two versions more, and a learner that restarts one.
        wanted = self.version + 4
        self.wait(lambda: self.version >= wanted or self.nearly_done(), "training after the fault", timeout_s)
        self.recovery_s = time.monotonic() - began

    def nearly_done(self) -> bool:
        """Whether the run has reached its end."""
        return (self.directory / "summary.json").exists()

    def end(self, timeout_s: float = LONG_S) -> int:
        """Exit status of the run."""
        try:
            return self.training.end(timeout_s)
        except AssertionError as error:
            raise Violation(str(error)) from None

    # ---------------------------------------------------------------- faults

    def kill(self, part: str) -> None:
        """kill -9."""
        os.kill(self.pid(part), signal.SIGKILL)

    def stop(self, part: str) -> int:
        """SIGSTOP; returns whom to continue."""
        pid = self.pid(part)
        os.kill(pid, signal.SIGSTOP)
        return pid

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.training.process.send_signal(signal.SIGINT)


def resumed(pid: int) -> None:
    """SIGCONT to a process, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
