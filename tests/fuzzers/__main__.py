"""Fuzzes one target.

    scripts/fuzz TARGET [--minutes M] [--inputs N] [--corpus DIR] [--seed S] [--guided]

simulator   streams of a simulator: frame reader and codec
services    messages of another service: frames, codec, rules of queues and topics
protocol    sequences of well- and ill-formed messages from simulators, against the code that serves them
unity       messages of a Unity player
http2       the connection that carries them

Without --guided, inputs are random changes to valid messages: fast, and the same for the same seed. With it, atheris
(the extra `fuzz`) looks for inputs that reach new code. A finding is printed with its input and written to --corpus;
the exit status is then 1, or 77 from atheris.
"""

from __future__ import annotations

import argparse
import importlib
import math
import resource
import sys
import warnings
from pathlib import Path
from typing import Final

from tests.fuzzers import engine
from tests.fuzzers.target import Target

TARGETS: Final = ("http2", "protocol", "services", "simulator", "unity")
_ADDRESSES: Final = 8 * 2**30
"""Bytes that the process may allocate, so that a trusted length claim fails instead of filling the machine."""


def load(name: str) -> Target:
    """Returns the target of a name."""
    target: Target = importlib.import_module(f"tests.fuzzers.{name}").TARGET
    return target


def main() -> int:
    """Runs the target of the command line; returns the exit status."""
    arguments = _arguments()
    seconds = arguments.minutes * 60 if arguments.minutes else math.inf
    inputs = arguments.inputs or (2**31 - 1 if arguments.minutes else 100_000)
    warnings.simplefilter("error")
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESSES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    if arguments.guided:
        target = engine.instrumented(lambda: load(arguments.target))
        corpus = arguments.corpus or Path("results/fuzz") / arguments.target
        engine.guided(target, inputs=inputs, seconds=seconds, corpus=corpus, seed=arguments.seed)
        return 0
    target = load(arguments.target)
    report = engine.search(
        target,
        inputs=inputs,
        seconds=seconds,
        seed=arguments.seed,
        corpus=arguments.corpus,
        progress=lambda report: _print(report) if report.inputs and not report.inputs % 100_000 else None,
    )
    sys.stdout.write(f"{arguments.target}, one input is one {target.unit}: {report}\n")
    return 1 if report.findings else 0


def _print(report: engine.Report) -> None:
    sys.stderr.write(f"{report}\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--inputs", type=int, default=0)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--guided", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
