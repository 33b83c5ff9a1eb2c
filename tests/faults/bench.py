"""The bench on which a row runs, and its outcome."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.judge import AllowedEffects, expect, judge
from tests.faults.trial import (
    SILENCE_S,
    Trial,
)

PAUSE_S = 3.0
"""A pause that is shorter than any deadline."""
ABSENCE_S = SILENCE_S + 3.0
"""A pause that is longer than simulators and trainer wait for each other."""


@dataclass(frozen=True)
class Outcome:
    """The result of a run that passed.

    Attributes:
        lost: number of steps.
        recovery_s: time from the fault until training continue_process; None if the row has no recovery.
    """

    lost: int
    recovery_s: float | None = None


@dataclass(frozen=True)
class Bench:
    """The folder and settings with which a row runs.

    Attributes:
        folder: an empty folder.
        mode: `overlap` or `lockstep`.
        seconds: intended duration of a run.
        seed: seed of the run and of the time of its fault.
    """

    folder: Path
    mode: str
    seconds: float
    seed: int

    @contextlib.contextmanager
    def trial(self, extra_s: float = 0.0, **settings: Any) -> Iterator[Trial]:
        """Starts a run, and checks afterwards that none of its processes is left."""
        trial = Trial(self.folder, self.mode, self.seconds + extra_s, self.seed, **settings)
        try:
            yield trial
        except BaseException:
            (self.folder / "console.txt").write_text("\n".join(trial.training.lines))
            trial.close()
            raise
        left = trial.close()
        expect(not left, f"processes outlived the run: {left}")


def complete(trial: Trial, allowed: AllowedEffects) -> Outcome:
    """Waits until the run has completed and judges it."""
    status = trial.end()
    expect(status == 0, f"exit status {status}: {trial.training.lines[-3:]}")
    return Outcome(judge(trial, allowed), trial.recovery_s)
