"""Writes event files for TensorBoard: one folder for each behavior, under the names that users of ML-Agents know.

They are encoded with TensorBoard's own records; neither TensorFlow nor torch is loaded.
"""

import io
import os
import platform
from collections.abc import Mapping

from sparring.pipeline.files import Json, append
from sparring.pipeline.monitoring.logs import file_name
from sparring.pipeline.monitoring.writers import Event, RunInfo, Writer


class TensorBoardWriter(Writer):
    """Appends the numbers of each interval to an event file in the behavior's folder."""

    def open(self, run: RunInfo) -> None:
        """Begins; the files follow with the first events."""
        self._folder = run.folder
        self._name = ""
        self._steps: dict[str, int] = {}

    def write(self, event: Event) -> None:
        """Appends the numbers of an interval.

        Raises:
            OSError: they cannot be written.
        """
        if event.kind == "interval":
            line = event.values
            self.append(file_name(line["behavior"]), event.scalars, line["step"], line["time_s"])

    def append(self, folder: str, values: Mapping[str, float], step: int, time_s: float) -> None:
        """Appends numbers to this writer's event file in a folder of the run.

        Raises:
            OSError: they cannot be written.
        """
        self._name = self._name or f"events.out.tfevents.{int(time_s):010d}.{platform.node()}.{os.getpid()}"
        path, data = self._folder / folder / self._name, event(values, step, time_s)
        if step < self._steps.get(folder, step + 1):
            data = restart(step, time_s) + data
        if folder not in self._steps:
            path.parent.mkdir(exist_ok=True)
            data = opening(time_s) + data
        append(path, data)
        self._steps[folder] = step


def opening(time_s: float) -> bytes:
    """Returns the first bytes of an event file."""
    return _record({"file_version": "brain.Event:2"}, time_s)


def restart(step: int, time_s: float) -> bytes:
    """Encodes a continuation from an earlier step: TensorBoard drops its values from `step` on."""
    return _record({"step": step, "session_log": {"status": "START"}}, time_s)


def event(values: Mapping[str, float], step: int, time_s: float) -> bytes:
    """Encodes one event with all `values` at `step`."""
    tagged = [{"tag": name, "simple_value": value} for name, value in sorted(values.items())]
    return _record({"step": step, "summary": {"value": tagged}}, time_s)


def _record(content: dict[str, Json], time_s: float) -> bytes:
    """Encodes one event, with its length and checksums, from the fields of TensorBoard's own record."""
    from tensorboard.compat.proto.event_pb2 import Event as Record
    from tensorboard.summary.writer.record_writer import RecordWriter

    stream = io.BytesIO()
    RecordWriter(stream).write(Record(wall_time=time_s, **content).SerializeToString())
    return stream.getvalue()
