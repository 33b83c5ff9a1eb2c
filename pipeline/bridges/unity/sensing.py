"""One sensor of all agents of a behavior as one array.

The observation of a float sensor is the same bytes for every agent and step, but for its numbers. So the observations
of all agents are joined and cut into columns: what stands before and behind the numbers must be as it was at first, and
the numbers are the array. What is not laid out so is read message by message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.bridges.unity import RECORD_AGAIN, Unreadable
from sparring.pipeline.bridges.unity.messages import messages, parsed
from sparring.pipeline.bridges.unity.observations import PNG, SensorReader, image, numbers, shaped

SAME_SENSORS: Final = "give all agents of a behavior the same sensors, and leave them as they are while it trains"
NOT_FINITE: Final = "find where the game divides by zero or overflows"


def fit_for_games(error: Unreadable, where: str, remedy: str) -> Unreadable:
    """The refusal with the place, and what a game's author can do about it."""
    return Unreadable(f"{error} of {where}", remedy if error.remedy == RECORD_AGAIN else error.remedy)


class SensorColumn:
    """Reads one sensor.

    Args:
        sensor: how an observation is read.
        first: an observation of it.
        encoded: its bytes.
        behavior: id, for refusals.
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

    def read(self, encoded: Sequence[bytes], agents: NDArray[np.int64]) -> NDArray[Any]:
        """[n, *shape] of the spec's dtype.

        Args:
            encoded: n observations.
            agents: [n] whose they are.

        Raises:
            Unreadable: one is not of this sensor, does not fill its shape, or is not finite.
        """
        if self._packed:
            images = [self._one(image, one, agents[row]) for row, one in enumerate(encoded)]
            return np.ascontiguousarray(np.stack(images))
        data = self._columns(encoded)
        if data is None:
            data = b"".join([self._one(numbers, one, agents[row]) for row, one in enumerate(encoded)])
        values = shaped(self.sensor, data, len(encoded))
        if not math.isfinite(np.vdot(values, values)):  # or the squares overflow, so look again
            self._refuse_infinite(values, agents)
        return values

    def _columns(self, encoded: Sequence[bytes]) -> bytes | None:
        """The numbers of all agents, where each is laid out as the first was."""
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
        except Unreadable as error:
            raise fit_for_games(error, f"agent {agent} of {self._behavior}", SAME_SENSORS) from error

    def _refuse_infinite(self, values: NDArray[np.float32], agents: NDArray[np.int64]) -> None:
        wrong = ~np.isfinite(values.reshape(len(agents), -1)).all(axis=1)
        if wrong.any():
            where = f"agent {agents[wrong][0]} of {self._behavior}"
            raise Unreadable(f"NaN or infinity in observation {self.sensor.spec.name!r} of {where}", NOT_FINITE)


def _around(one: Any, encoded: bytes, size: int) -> tuple[bytes, bytes] | None:
    """What stands before and behind the numbers, where the message is written as it would be here."""
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
