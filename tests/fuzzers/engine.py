"""Runs a target with random changes to a corpus, or guided by coverage where atheris is installed."""

from __future__ import annotations

import faulthandler
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, Final

from tests.fuzzers.target import Target

HANG_S: Final = 5.0
"""CPU seconds that one input may take."""
GROWTH: Final = 256 * 2**20
"""Bytes by which the process may grow after the warm-up."""
_WARM_UP: Final = 2000
"""Inputs after which memory is measured, as caches are full by then."""
_LARGEST_CORPUS: Final = 4096
_CHECK_INTERVAL: Final = 10
"""Inputs between two restarts of the timer that no input can block."""


class Hang(BaseException):
    """An input takes longer than `HANG_S`."""


@dataclass
class Report:
    """The result of a run.

    Attributes:
        seconds: duration of the run.
        longest_s: most CPU seconds of one input.
        warm_bytes: peak memory at the end of the warm-up; `peak_bytes` is that of the run.
        findings: inputs that broke a rule, by exception and place.
    """

    inputs: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0
    warm_bytes: int = 0
    peak_bytes: int = 0
    findings: dict[str, bytes] = field(default_factory=dict)

    def __str__(self) -> str:
        rate = self.inputs / self.seconds if self.seconds else 0.0
        grown = (self.peak_bytes - self.warm_bytes) / 2**20
        return (
            f"{self.inputs} inputs in {self.seconds:.0f} s, {rate:.0f} a second; longest input {self.longest_s:.3f} s; "
            f"peak memory {self.peak_bytes / 2**20:.0f} MiB, {grown:.1f} MiB more than when warm; "
            f"{len(self.findings)} findings"
        )


class Watch:
    """Feeds a target with inputs, and measures time and memory into `report`."""

    def __init__(self, one_input: Callable[[bytes], None], report: Report) -> None:
        self._one_input = one_input
        self.report = report
        self._began = time.perf_counter()

    def feed(self, data: bytes) -> None:
        """Feeds one input, whose exceptions propagate."""
        report, start = self.report, time.process_time()
        signal.setitimer(signal.ITIMER_PROF, HANG_S)
        try:
            self._one_input(data)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            now = time.process_time()
            report.inputs += 1
            report.longest_s = max(report.longest_s, now - start)
            report.seconds = time.perf_counter() - self._began
            self._measure_memory()

    def _measure_memory(self) -> None:
        report = self.report
        report.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if report.inputs <= _WARM_UP:
            report.warm_bytes = report.peak_bytes
        elif report.peak_bytes > report.warm_bytes + GROWTH:
            raise MemoryError(f"{report.peak_bytes - report.warm_bytes} bytes more than when warm")


@contextmanager
def hang_detection() -> Iterator[None]:
    """Raises `Hang` for an input that takes too long; one that cannot be interrupted ends the process with a trace."""

    def raise_hang(_signal: int, _frame: FrameType | None) -> None:
        raise Hang(f"more than {HANG_S} s")

    before = signal.signal(signal.SIGPROF, raise_hang)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        faulthandler.cancel_dump_traceback_later()


def search(
    target: Target,
    *,
    inputs: int,
    seconds: float,
    seed: int = 0,
    corpus: Path | None = None,
    progress: Callable[[Report], None] = lambda _: None,
) -> Report:
    """Feeds seeds, then random changes of them; changes that raise nothing join the corpus.

    Args:
        target: to feed.
        inputs: how many at most.
        seconds: how long at most.
        seed: determines the inputs.
        corpus: folder of further seeds; findings are written there.
        progress: called every 10 inputs.
    """
    rng, report = Random(seed), Report()
    watch, pool = Watch(target.one_input, report), [*target.seeds(), *_files(corpus)]
    with hang_detection():
        while report.inputs < inputs and report.seconds < seconds:
            number = report.inputs
            if not number % _CHECK_INTERVAL:
                faulthandler.dump_traceback_later(20 * _CHECK_INTERVAL * HANG_S, exit=True)
                progress(report)
            data = pool[number] if number < len(pool) and number < _LARGEST_CORPUS else _next_input(target, rng, pool)
            try:
                watch.feed(data)
            except (Exception, Hang):
                _record(report, data, corpus)
            else:
                if not rng.randrange(64):
                    _keep(pool, data, rng)
    return report


def _next_input(target: Target, rng: Random, pool: list[bytes]) -> bytes:
    data = rng.choice(pool)
    return target.mutate(data, rng, pool)


def _keep(pool: list[bytes], data: bytes, rng: Random) -> None:
    """Adds an input to the corpus, which keeps most seeds."""
    if len(pool) < _LARGEST_CORPUS:
        pool.append(data)
    else:
        pool[rng.randrange(_LARGEST_CORPUS // 2, _LARGEST_CORPUS)] = data


def _files(corpus: Path | None) -> list[bytes]:
    if corpus is None or not corpus.is_dir():
        return []
    return [path.read_bytes() for path in sorted(corpus.iterdir()) if path.is_file()]


def _record(report: Report, data: bytes, corpus: Path | None) -> None:
    """Keeps the shortest input of each kind of failure, identified by where it was raised."""
    _, error, trace = sys.exc_info()
    where = traceback.extract_tb(trace)[-1]
    kind = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno} {where.name}"
    known = report.findings.get(kind)
    if known is None:
        sys.stderr.write(f"{kind}\n{traceback.format_exc()[-3000:]}\n{data!r:.2000}\n")
    if known is None or len(data) < len(known):
        report.findings[kind] = data
        if corpus is not None:
            corpus.mkdir(parents=True, exist_ok=True)
            name = "".join(letter if letter.isalnum() else "-" for letter in kind)
            (corpus / f"finding-{name}").write_bytes(data)


def guided(target: Target, *, inputs: int, seconds: float, corpus: Path, seed: int = 0) -> None:
    """Feeds inputs guided by coverage; libFuzzer ends the process, with status 77 after a finding.

    Raises:
        ImportError: atheris is not installed.
    """
    import atheris

    report = Report()
    watch = Watch(target.one_input, report)
    folder = corpus / "corpus"
    folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(target.seeds()):
        (folder / f"seed-{number:04d}").write_bytes(data)

    def changed(data: bytes, most: int, seed_of_change: int) -> bytes:
        rng = Random(seed_of_change)
        made: bytes = target.mutate(data, rng, ()) if rng.random() < 0.5 else atheris.Mutate(data, most)
        return made[:most]

    def feed(data: bytes) -> None:
        try:
            watch.feed(data)
        finally:
            if not report.inputs % 100_000:
                sys.stderr.write(f"{report}\n")

    options = [
        f"-runs={inputs}",
        f"-max_total_time={int(min(seconds, 2**31 - 1))}",
        f"-seed={seed + 1}",
        "-max_len=8192",
        f"-timeout={int(HANG_S)}",
        f"-artifact_prefix={corpus}/",
        "-print_final_stats=1",
        "-verbosity=1",
    ]
    atheris.Setup([sys.argv[0], *options, str(folder)], feed, custom_mutator=changed)
    with hang_detection():
        atheris.Fuzz()


def instrumented(load: Callable[[], Any]) -> Any:
    """Returns the result of `load` with atheris' counters in its imports, the HTTP/2 library included."""
    import atheris

    with atheris.instrument_imports(include=["pipeline", "h2", "hpack", "hyperframe"]):
        return load()
