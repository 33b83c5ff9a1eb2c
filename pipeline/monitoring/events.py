"""Encodes intervals as TensorBoard events, under the names that users of ML-Agents know.

The caller appends the bytes to an event file. They are encoded with TensorBoard's own records; neither
TensorFlow nor torch is loaded.
"""

import io
from collections.abc import Mapping

from sparring.pipeline.files import Json
from sparring.pipeline.monitoring.intervals import Interval

PIPELINE = "Pipeline"
"""First part of the names of numbers that ML-Agents does not have."""


def scalars(interval: Interval) -> dict[str, float]:
    """Returns every number of an interval that is plotted over steps, by its TensorBoard tag.

    `Policy/Extrinsic Reward` is the mean return unless the learner publishes its own. A simulator's number is plotted
    unless it has the name of a built-in one.
    """
    found: dict[str, float | None] = {
        "Policy/Extrinsic Reward": interval.reward,
        "Is Training": float(interval.trained > 0),
        f"{PIPELINE}/Steps per Second": interval.steps_per_s,
        f"{PIPELINE}/Policy Lag Mean": interval.lag_mean,
        f"{PIPELINE}/Policy Lag Max": interval.lag_max,
        f"{PIPELINE}/Episodes Ended": float(interval.episodes),
        f"{PIPELINE}/Episodes Open": float(interval.open_episodes),
        f"{PIPELINE}/Oldest Episode": float(interval.oldest),
    }
    found |= {f"{PIPELINE}/Steps {column.capitalize()}": float(steps) for column, steps in interval.step_counts.items()}
    found |= {name: value for name, value in interval.gauges.items() if "/" in name}
    found |= {name: value for name, value in interval.means.items() if "/" in name or name == "Is Training"}
    return {**interval.simulators, **{name: value for name, value in found.items() if value is not None}}


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
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    stream = io.BytesIO()
    RecordWriter(stream).write(Event(wall_time=time_s, **content).SerializeToString())
    return stream.getvalue()
