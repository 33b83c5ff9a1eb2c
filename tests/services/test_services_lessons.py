"""Real runs with a curriculum: a seed repeats the weights bit for bit, and lessons survive a killed supervisor."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.services.services_helpers import Training, balanced, config, json_lines

pytestmark = pytest.mark.slow

CURRICULUM = """
environment_parameters:
  gravity:
    curriculum:
      - first:
          completion_criteria: {measure: reward, behavior: Balance, threshold: 0.5, min_lesson_length: 20}
          value: 3.0
      - second:
          completion_criteria: {measure: progress, behavior: Balance, threshold: 0.5, require_reset: true}
          value: {sampler_type: uniform, sampler_parameters: {min_value: 4, max_value: 8}}
      - third:
          value: {sampler_type: gaussian, sampler_parameters: {mean: 9, st_dev: 1}}
"""


def with_curriculum(folder: Path, **values: Any) -> Path:
    """Writes a small configuration with a curriculum and returns its path."""
    file = config(folder, **values)
    file.write_text(file.read_text() + CURRICULUM)
    return file


def lessons(run: Training) -> list[str]:
    """Returns the lessons that coordination logged, in order."""
    lines = json_lines(run.directory / "logs" / "coordination.jsonl")
    return [line["lesson"] for line in lines if line["event"] == "lesson"]


def saved(run: Training) -> dict[str, Any]:
    """Returns the content of `coordination.json`."""
    return dict(json.loads((run.directory / "coordination.json").read_text()))


def lesson(run: Training) -> int:
    """Returns the number of the saved lesson."""
    return int(saved(run)["lessons"]["progress"]["gravity"]["number"])


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    """A run of many processes and a run in one process have the same weights."""
    file = with_curriculum(tmp_path, mode="lockstep", count=2, max_steps=12_000, buffer_size=512)
    digests = []
    for run_id, arguments in (("first", []), ("second", ["--in-process"])):
        run = Training(tmp_path, str(file), "--seed", "5", *arguments, run_id=run_id)
        assert run.end() == 0, "\n".join(run.lines)
        result = run.summary["behaviors"]["Balance"]
        assert balanced(result["step_counts"])
        assert result["step_counts"]["produced"] == run.simulator_steps()
        assert lesson(run) == 2
        digests.append(result["weights_sha256"])
    assert len(set(digests)) == 1


def test_killed_run_resumes_in_its_lesson(tmp_path: Path) -> None:
    """The supervisor is killed in the second lesson; the resumed run begins in it and reaches the third.

    The second lesson lasts for half of `max_steps`, which the first run cannot reach before it is killed.
    """
    file = with_curriculum(tmp_path, max_steps=10_000_000)
    run = Training(tmp_path, str(file), "--seed", "5")
    run.wait_for(lambda lines: any("lesson gravity 1" in line for line in lines))
    os.kill(run.process.pid, signal.SIGKILL)
    run.end()
    assert lesson(run) == 1
    sources = saved(run)["behaviors"]["Balance"]["sources"]
    steps = 3 * sum(source["produced"] for source in sources.values()) + 12_000
    again = Training(tmp_path, str(file), "--resume", "--max-steps", str(steps))
    assert again.end() == 0, "\n".join(again.lines)
    assert lesson(again) == 2
    assert lessons(again) == ["second", "third"]  # of both runs: no lesson began twice
    assert balanced(again.summary["behaviors"]["Balance"]["step_counts"])
