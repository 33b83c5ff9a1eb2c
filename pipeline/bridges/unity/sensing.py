"""Reads one sensor of all agents of a behavior as one array.

The observation of a float sensor has the same bytes for every agent and step, except for its numbers. So the
observations of all agents are joined as rows: the bytes before and after the numbers must equal the first ones, and the
numbers are the array. Another layout is read message by message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.bridges.unity import RECORD_AGAIN, UnreadableData
from sparring.pipeline.bridges.unity.messages import messages, parsed
from sparring.pipeline.bridges.unity.observations import PNG, SensorReader, image, numbers, shaped
from sparring.pipeline.specs import Array

SAME_SENSORS: Final = "give all agents of a behavior the same sensors, and leave them as they are while it trains"
NOT_FINITE: Final = "find where the game divides by zero or overflows"


def fit_for_games(error: UnreadableData, where: str, remedy: str) -> UnreadableData:
    """Returns the error with its place, and a remedy for the game's author."""
    return UnreadableData(f"{error} of {where}", remedy if error.remedy == RECORD_AGAIN else error.remedy)


class SensorColumn:
    """Reads one sensor as a column.

    Args:
        sensor: reader of one observation.
        first: an observation of the sensor.
        encoded: the bytes of `first`.
        behavior: behavior id, for errors.
    """

    def __init__(self, sensor: SensorReader, first: Any, encoded: bytes, behavior: str) -> None:
        self.sensor = sensor
        self._behavior = behavior
        self._packed = first.compression_type == PNG
        self._kind = messages().observation
        self._size = 4 * math.prod(sensor.spec.shape)
        around = None if self._packed else _around(first, encoded, self._size)
        self._before, self._behind = around or (b"", b"")
        self._whole = len(self._before) + self._size + len(self._behind) if around else -1

    def read(self, encoded: Sequence[bytes], agents: NDArray[np.int64]) -> Array:
        """Returns the column [n, *shape] in the spec's dtype.

        Args:
            encoded: n observations.
            agents: [n] their agents' ids.

        Raises:
            UnreadableData: an observation is not of this sensor, does not fill its shape, or is not finite.
        """
        if self._packed:
            images = [self._one(image, one, agents[row]) for row, one in enumerate(encoded)]
            return np.ascontiguousarray(np.stack(images))
        data = self._columns(encoded)
        if data is None:
            data = b"".join([self._one(numbers, one, agents[row]) for row, one in enumerate(encoded)])
        values = shaped(self.sensor, data, len(encoded))
        if not math.isfinite(np.vdot(values, values)):  # the squares may have overflowed, so check again
            self._refuse_infinite(values, agents)
        return values

    def _columns(self, encoded: Sequence[bytes]) -> bytes | None:
        """Returns the numbers of all agents if each observation has the layout of the first."""
        n, whole, start = len(encoded), self._whole, len(self._before)
        if set(map(len, encoded)) != {whole}:
            return None
        rows = np.frombuffer(b"".join(encoded), np.uint8).reshape(n, whole)
        stop = start + self._size
        if rows[:, :start].tobytes() != self._before * n or rows[:, stop:].tobytes() != self._behind * n:
            return None
        return rows[:, start:stop].tobytes()

    def _one(self, read: Any, encoded: bytes, agent: int) -> Any:
        try:
            return read(self.sensor, parsed(self._kind, encoded, f"observation {self.sensor.spec.name!r}"))
        except UnreadableData as error:
            raise fit_for_games(error, f"agent {agent} of {self._behavior}", SAME_SENSORS) from error

    def _refuse_infinite(self, values: NDArray[np.float32], agents: NDArray[np.int64]) -> None:
        wrong = ~np.isfinite(values.reshape(len(agents), -1)).all(axis=1)
        if wrong.any():
            where = f"agent {agents[wrong][0]} of {self._behavior}"
            raise UnreadableData(f"NaN or infinity in observation {self.sensor.spec.name!r} of {where}", NOT_FINITE)


def _around(one: Any, encoded: bytes, size: int) -> tuple[bytes, bytes] | None:
    """Returns the bytes before and after the numbers if protobuf writes the message as it was received."""
    if len(one.float_data.data) != size or one.SerializeToString() != encoded:
        return None
    other = type(one)()
    other.CopyFrom(one)
    written = []
    for filler in (b"\0", b"\xff"):
        other.float_data.data = filler * size
        written.append(other.SerializeToString())
    zeros, ones = written
    start = next(at for at, (zero, one_bits) in enumerate(zip(zeros, ones, strict=True)) if zero != one_bits)
    return zeros[:start], zeros[start + size :]
