"""Encodes reports as columns of encoded fields that are joined row by row.

The entry of an agent joins one piece of each column, and each column is made for all agents at once; that of a float
sensor by one assignment into an array of bytes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tests.simulation.unity_player_reports import Behavior, Entries, Report, Sensor
from tests.simulation.unity_player_schema import (
    CAPABILITIES,
    CONTINUOUS,
    DISCRETE,
    OK,
    BrainParameters,
    InitializationOutput,
    chunk,
    packed,
    varint,
)

_PACKAGES: Final = ("1.0.8", "1.3.0", "1.5.0", "1.7.2", "1.9.1", "4.0.0")
_HWC_PACKAGE: Final = "2.3.0-exp.3"
_FROM_MINOR: Final = (1, 1, 2, 3, 4, 5, 5)
_NONE, _TRANSLATIONAL, _VARIABLE = 1, 2, 4
_HEADER: Final = chunk(1, b"\x08" + varint(OK))
_SIZES: Final = [varint(size) for size in range(1 << 14)]
_IDS: Final = [b"\x50" + varint(number) if number else b"" for number in range(4096)]
_ZERO: Final = bytes(4)
_PNG_FILE: Final = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Dialect:
    """The protocol features that player and trainer share.

    Attributes:
        minor: minor version of the protocol, 1.`minor`.0.
        hwc: whether images are sent as [height, width, channels].
        capabilities: capabilities of the player; `agree` keeps those that the trainer has too.
    """

    minor: int = 5
    hwc: bool = False
    capabilities: frozenset[str] = frozenset(CAPABILITIES)

    @classmethod
    def of(cls, version: str, layout: str) -> Dialect:
        """Returns the dialect of a protocol version with image layout chw or hwc; players before 1.5.0 use hwc."""
        minor = int(version.split(".")[1])
        known = (name for name, since in zip(CAPABILITIES, _FROM_MINOR, strict=True) if minor >= since)
        return cls(minor, layout == "hwc" or minor < 5, frozenset(known))

    def agree(self, trainer: Any) -> Dialect:
        """Returns this dialect with the capabilities that the trainer has too."""
        common = (name for name in self.capabilities if getattr(trainer, name))
        return Dialect(self.minor, self.hwc, frozenset(common))

    @property
    def package(self) -> str:
        return _HWC_PACKAGE if self.hwc and self.minor == 5 else _PACKAGES[self.minor]

    @property
    def action_spec(self) -> bool:
        """Returns whether a spec describes actions, which are then continuous and discrete."""
        return "hybridActions" in self.capabilities

    @property
    def detailed(self) -> bool:
        """Returns whether observations have names, kinds and dimension properties."""
        return self.minor >= 5


def initialization(dialect: Dialect) -> bytes:
    """Returns the first message."""
    output = InitializationOutput(
        name="AcademySingleton", communication_version=f"1.{dialect.minor}.0", package_version=dialect.package
    )
    for name in dialect.capabilities:
        setattr(output.capabilities, name, True)
    return _HEADER + chunk(2, chunk(2, output.SerializeToString()))


def nothing(status: int = OK) -> bytes:
    """Returns a header alone, which requests the first command or ends the conversation."""
    return chunk(1, b"\x08" + varint(status))


class Encoder:
    """Encodes the messages of one player and describes each behavior when it first has agents.

    Args:
        dialect: dialect that was agreed with the trainer.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._described: set[str] = set()
        self._sensors: dict[str, tuple[_Columns, ...]] = {}

    def message(self, reports: Sequence[Report], side_channel: bytes = b"") -> bytes:
        """Returns the message of one exchange."""
        output = b"".join([self._behavior(report) for report in reports])
        if side_channel:
            output += chunk(3, side_channel)
        body = chunk(1, output)
        new = [r.behavior for r in reports if (r.ends or r.decisions) and r.behavior.key not in self._described]
        if new:
            self._described.update(behavior.key for behavior in new)
            output = InitializationOutput(brain_parameters=[self._parameters(behavior) for behavior in new])
            body += chunk(2, output.SerializeToString())
        return _HEADER + chunk(2, body)

    def _parameters(self, behavior: Behavior) -> Any:
        made = BrainParameters(brain_name=behavior.key, is_training=True)
        if self._dialect.action_spec:
            made.action_spec.num_continuous_actions = behavior.continuous
            made.action_spec.num_discrete_actions = len(behavior.branches)
            made.action_spec.discrete_branch_sizes = packed(behavior.branches)
        else:
            sizes = behavior.branches or (behavior.continuous,)
            made.vector_action_size_deprecated = packed(sizes)
            made.vector_action_space_type_deprecated = DISCRETE if behavior.branches else CONTINUOUS
        return made

    def _behavior(self, report: Report) -> bytes:
        behavior = report.behavior
        columns = self._sensors.get(behavior.key)
        if columns is None:
            columns = self._sensors[behavior.key] = tuple(_columns(s, self._dialect) for s in behavior.sensors)
        rows = [] if report.ends is None else self._entries(report.ends, columns, over=True)
        if report.decisions is not None:
            rows += self._entries(report.decisions, columns, over=False)
        agents = b"".join([b"\x0a" + _size(row) + row for row in rows])
        return chunk(2, chunk(1, behavior.key.encode()) + chunk(2, agents))

    def _entries(self, entries: Entries, sensors: Iterable[_Columns], over: bool) -> list[bytes]:
        columns: list[list[bytes]] = []
        if entries.rewards.any():
            columns.append(_floats(b"\x3d", entries.rewards))
        if over:
            columns.append([b"\x40\x01"] * len(entries.ids))
        if entries.interrupted is not None and entries.interrupted.any():
            columns.append([b"\x48\x01" if interrupted else b"" for interrupted in entries.interrupted.tolist()])
        columns.append([_IDS[number] if number < 4096 else b"\x50" + varint(number) for number in entries.ids.tolist()])
        if entries.masks is not None and entries.masks.any():
            columns.append(_masks(entries.masks))
        columns += [sensor.column(v) for sensor, v in zip(sensors, entries.observations, strict=True)]
        if "multiAgentGroups" in self._dialect.capabilities:
            columns += _groups(entries)
        return list(map(b"".join, zip(*columns, strict=True)))


def _size(row: bytes) -> bytes:
    return _SIZES[len(row)] if len(row) < len(_SIZES) else varint(len(row))


def _floats(tag: bytes, values: NDArray[Any]) -> list[bytes]:
    raw = values.astype("<f4").tobytes()
    pieces = [raw[at : at + 4] for at in range(0, len(raw), 4)]
    return [b"" if piece == _ZERO else tag + piece for piece in pieces]


def _masks(masks: NDArray[np.bool_]) -> list[bytes]:
    return [chunk(11, row.tobytes()) if row.any() else b"" for row in masks]


def _groups(entries: Entries) -> list[list[bytes]]:
    columns = []
    if entries.groups is not None:
        columns.append([b"\x70" + varint(number) if number else b"" for number in entries.groups.tolist()])
    if entries.group_rewards is not None and entries.group_rewards.any():
        columns.append(_floats(b"\x7d", entries.group_rewards))
    return columns


def _columns(sensor: Sensor, dialect: Dialect) -> _Columns:
    files = _files(sensor, dialect) if sensor.kind == "image" and sensor.png else None
    return _FloatColumns(sensor, dialect) if files is None else _PngColumns(sensor, dialect, files)


def _files(sensor: Sensor, dialect: Dialect) -> tuple[int, ...] | None:
    """Returns the image channel in each channel of the files, or None if the trainer cannot read such files."""
    channels = sensor.shape[0]
    wanted = sensor.mapping or (tuple(range(channels)) if channels > 1 else (0, 0, 0))
    if sensor.mapping and "compressedChannelMapping" not in dialect.capabilities:
        return None
    if len(wanted) > 3 and "concatenatedPngObservations" not in dialect.capabilities:
        return None
    return wanted + (-1,) * (-len(wanted) % 3)


class _Columns:
    """The constant bytes before and after the values of a sensor."""

    def __init__(self, sensor: Sensor, dialect: Dialect, compressed: bool) -> None:
        shape, properties = sensor.shape, (_NONE,) * len(sensor.shape)
        if sensor.kind == "image":
            properties = (_NONE, _TRANSLATIONAL, _TRANSLATIONAL)
            if dialect.hwc:
                shape, properties = (*shape[1:], shape[0]), (*properties[1:], properties[0])
        elif sensor.kind == "entities":
            properties = (_VARIABLE, _NONE)
        self._before = chunk(1, packed(shape)) + (b"\x10\x01" if compressed else b"")
        self._after = b""
        if compressed and sensor.mapping:
            self._after += chunk(5, packed(sensor.mapping))
        if dialect.detailed:
            self._after += chunk(6, packed(properties))
            self._after += (b"\x38\x01" if sensor.goal else b"") + chunk(8, sensor.name.encode())
        self._hwc = dialect.hwc and sensor.kind == "image"

    def column(self, values: NDArray[Any]) -> list[bytes]:
        """Returns the encoded field of each agent for values [n, *shape]."""
        raise NotImplementedError


class _FloatColumns(_Columns):
    def __init__(self, sensor: Sensor, dialect: Dialect) -> None:
        super().__init__(sensor, dialect, compressed=False)
        size = 4 * int(np.prod(sensor.shape))
        row = chunk(13, self._before + chunk(4, chunk(1, bytes(size))) + self._after)
        self._start = len(row) - len(self._after) - size
        self._end = self._start + size
        self._row = np.frombuffer(row, np.uint8)
        self._rows = self._row[None].copy()

    def column(self, values: NDArray[Any]) -> list[bytes]:
        agents, width = len(values), self._row.size
        if values.dtype == np.uint8:
            values = values / np.float32(255)
        if self._hwc:
            values = values.transpose(0, 2, 3, 1)
        if len(self._rows) < agents:
            self._rows = np.repeat(self._row[None], agents, 0)
        rows = self._rows[:agents]
        rows[:, self._start : self._end] = np.ascontiguousarray(values, "<f4").reshape(agents, -1).view(np.uint8)
        raw = rows.tobytes()
        return [raw[at : at + width] for at in range(0, agents * width, width)]


class _PngColumns(_Columns):
    def __init__(self, sensor: Sensor, dialect: Dialect, files: tuple[int, ...]) -> None:
        super().__init__(sensor, dialect, compressed=True)
        self._files = np.array(files).reshape(-1, 3)

    def column(self, values: NDArray[Any]) -> list[bytes]:
        black = np.zeros_like(values[:, :1])
        planes = np.concatenate([values, black], 1)[:, self._files]  # [n, files, 3, height, width]; -1 is black
        pictures = planes.transpose(0, 1, 3, 4, 2)
        data = [b"".join(png(picture) for picture in agent) for agent in pictures]
        return [chunk(13, self._before + chunk(3, files) + self._after) for files in data]


def png(picture: NDArray[np.uint8]) -> bytes:
    """Returns a PNG file.

    Args:
        picture: pixels [height, width, 3].
    """
    height, width, _ = picture.shape
    lines = np.zeros((height, 1 + 3 * width), np.uint8)
    lines[:, 1:] = picture.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 1)), (b"IEND", b""))
    return _PNG_FILE + b"".join(_part(name, data) for name, data in parts)


def _part(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
