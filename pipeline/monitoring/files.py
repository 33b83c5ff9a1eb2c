"""Writes the monitor's files in the folder of a run."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path

import pydantic_core

from sparring.pipeline.files import Json, append
from sparring.pipeline.monitoring import curves, events
from sparring.pipeline.monitoring.rotation import RotatingFile


class RunFiles:
    """Holds the monitor's files in the folder of a run.

    Attributes:
        intervals: `metrics.jsonl`.
        services: `services.jsonl`.

    Args:
        folder: existing folder of the run.
        time_s: seconds since the epoch at which this monitor started.
        most_bytes: size at which `services.jsonl` and `metrics.jsonl` are rotated.
        kept: number of rotated files of each that are kept.
    """

    def __init__(self, folder: Path, time_s: float, most_bytes: int = 16 * 2**20, kept: int = 3) -> None:
        self._folder = folder
        self._events_name = f"events.out.tfevents.{int(time_s):010d}.{platform.node()}.{os.getpid()}"
        self._steps: dict[str, int] = {}
        self.services = RotatingFile(folder / "services.jsonl", most_bytes, kept)
        self.intervals = RotatingFile(folder / "metrics.jsonl", most_bytes, kept)
        with self.intervals.path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # an earlier monitor was killed within a line
                    file.write(b"\n")

    def add_events(self, folder: str, values: Mapping[str, float], step: int, time_s: float) -> None:
        """Appends an event to this monitor's TensorBoard file in a behavior's folder of the run."""
        path = self._folder / folder / self._events_name
        data = events.event(values, step, time_s)
        if step < self._steps.get(folder, step + 1):
            data = events.restart(step, time_s) + data
        if folder not in self._steps:
            path.parent.mkdir(exist_ok=True)
            data = events.opening(time_s) + data
        append(path, data)
        self._steps[folder] = step

    def replace(self, name: str, data: bytes) -> None:
        """Replaces a file so that a reader sees the old or the new content, never a part."""
        path, new = self._folder / name, self._folder / f".{name}.new"
        new.write_bytes(data)
        new.replace(path)

    def plot_curves(self, title: str) -> None:
        """Writes `curves.png` from the intervals in `metrics.jsonl` and its rotated files."""
        data = curves.picture(curves.lineages(self._read_intervals()), title)
        (self._folder / "curves.png").write_bytes(data)

    def _read_intervals(self) -> Iterator[Mapping[str, Json]]:
        for path in self.intervals.parts():
            with path.open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    try:
                        yield json.loads(line)
                    except ValueError:  # an incomplete line of a killed monitor
                        continue


def to_json(content: Json) -> bytes:
    """Returns `content` as JSON, with null for NaN and infinity."""
    return pydantic_core.to_json(content, inf_nan_mode="null")
