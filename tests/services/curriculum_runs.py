"""Real runs with a curriculum of three lessons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.services.services_helpers import Training, config, json_lines

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
