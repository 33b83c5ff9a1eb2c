"""Encodes intervals as TensorBoard events, under the names that users of ML-Agents know.

The caller appends the bytes to an event file. They are encoded with TensorBoard's own records; neither
TensorFlow nor torch is loaded.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sparring.pipeline.monitoring.intervals import Interval

if TYPE_CHECKING:
    from google.protobuf.message import Message

PIPELINE = "Pipeline"
"""First part of the names of numbers that ML-Agents does not have."""


def scalars(interval: Interval) -> dict[str, float]:
    """Returns every number of an interval that is plotted over steps, by its TensorBoard tag.

    `Policy/Extrinsic Reward` is the mean return unless the learner publishes its own. A simulator's number is plotted
    unless it has the name of a built-in one.
    """
    found: dict[str, float | None] = {
        "Environment/Cumulative Reward": interval.reward,
        "Environment/Episode Length": interval.episode_length,
        "Environment/Group Cumulative Reward": interval.group_reward,
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
    from tensorboard.compat.proto.event_pb2 import Event

    return _framed(Event(wall_time=time_s, file_version="brain.Event:2"))


def restart(step: int, time_s: float) -> bytes:
    """Encodes a continuation from an earlier step: TensorBoard drops its values from `step` on."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    return _framed(Event(wall_time=time_s, step=step, session_log=SessionLog(status=SessionLog.START)))


def event(values: Mapping[str, float], step: int, time_s: float) -> bytes:
    """Encodes one event with all `values` at `step`."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    tagged = [Summary.Value(tag=name, simple_value=value) for name, value in sorted(values.items())]
    return _framed(Event(wall_time=time_s, step=step, summary=Summary(value=tagged)))


def _framed(message: Message) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    stream = io.BytesIO()
    RecordWriter(stream).write(message.SerializeToString())
    return stream.getvalue()
