"""Writes the monitor's files in the folder of a run."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from sparring.pipeline.files import append
from sparring.pipeline.monitoring import curves, events
from sparring.pipeline.monitoring.rotation import RotatingFile

_INTERVAL: Final = '{"type": "interval"'


class RunFiles:
    """Holds the monitor's files in the folder of a run.

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
        self._services = RotatingFile(folder / "services.jsonl", most_bytes, kept)
        self._intervals = RotatingFile(folder / "metrics.jsonl", most_bytes, kept)
        with self._intervals.path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # an earlier monitor was killed within a line
                    file.write(b"\n")

    def append(self, record: Mapping[str, Any]) -> None:
        """Appends a line to `metrics.jsonl`; rotation deletes the oldest ones."""
        data = f"{to_json(record)}\n".encode()
        self._intervals.rotate_if_full(len(data))
        append(self._intervals.path, data)

    def append_service(self, record: Mapping[str, Any]) -> None:
        """Appends a line to `services.jsonl`; rotation deletes the oldest ones."""
        self._services.append(to_json(record) + "\n")

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

    def replace(self, name: str, text: str) -> None:
        """Replaces a file so that a reader sees the old or the new content, never a part."""
        path, new = self._folder / name, self._folder / f".{name}.new"
        new.write_text(text, encoding="utf-8")
        new.replace(path)

    def read(self, name: str) -> str | None:
        """Returns the content of a file, None if there is none."""
        path = self._folder / name
        return path.read_text(encoding="utf-8") if path.exists() else None

    def plot_curves(self, title: str) -> None:
        """Writes `curves.png` from the intervals in `metrics.jsonl` and its rotated files."""
        data = curves.picture(curves.lineages(self._read_intervals()), title)
        (self._folder / "curves.png").write_bytes(data)

    def _read_intervals(self) -> Iterator[Mapping[str, Any]]:
        for path in self._intervals.parts():
            with path.open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    record = _parse(line) if line.startswith(_INTERVAL) else None
                    if record is not None:
                        yield record


def _parse(line: str) -> Mapping[str, Any] | None:
    """Returns the record of a line, None for an incomplete line of a killed monitor."""
    try:
        record: Mapping[str, Any] = json.loads(line)
    except ValueError:
        return None
    return record


def to_json(content: Any) -> str:
    """Returns `content` as JSON, with null for NaN and infinity."""
    try:
        return json.dumps(content, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(content), allow_nan=False)


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
