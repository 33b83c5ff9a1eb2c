"""Side channels of the player stand-in: the trainer's messages besides actions, and statistics."""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TextIO

ENGINE: Final = uuid.UUID("e951342c-4f7e-11ea-b238-784f4387d1f7")
PARAMETERS: Final = uuid.UUID("534c891e-810f-11ea-a9d0-822485860400")
STATISTICS: Final = uuid.UUID("a1d8f7b7-cec8-50f9-b78b-d3e165a78520")
ANALYTICS: Final = uuid.UUID("b664a4a9-d86f-5a5f-95cb-e8353a7e8356")
AVERAGE, MOST_RECENT, SUM, HISTOGRAM = range(4)

_ENGINE_KINDS: Final = (
    ("resolution", "<ii"),
    ("quality_level", "<i"),
    ("time_scale", "<f"),
    ("target_frame_rate", "<i"),
    ("capture_frame_rate", "<i"),
)
_SAMPLERS: Final = ("uniform", "gaussian")


class UnreadableData(Exception):
    """Bytes of the trainer are malformed."""


def payloads(data: bytes) -> Iterator[tuple[uuid.UUID, bytes]]:
    """Yields the messages of all channels in their order.

    Raises:
        UnreadableData: the bytes end within a message.
    """
    at = 0
    while at < len(data):
        if at + 20 > len(data):
            raise UnreadableData(f"got {len(data) - at} bytes at {at}; expected at least 20: a UUID and a length")
        channel = uuid.UUID(bytes_le=data[at : at + 16])
        (size,) = struct.unpack_from("<i", data, at + 16)
        if not 0 <= size <= len(data) - at - 20:
            raise UnreadableData(f"got a length of {size} at {at + 16}; expected at most {len(data) - at - 20}")
        yield channel, data[at + 20 : at + 20 + size]
        at += 20 + size


def parse_message(channel: uuid.UUID, payload: bytes) -> dict[str, Any]:
    """Returns one message as a dictionary.

    Raises:
        UnreadableData: the message is malformed.
    """
    try:
        if channel == ENGINE:
            return _engine(payload)
        if channel == PARAMETERS:
            return _parameter(payload)
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        raise UnreadableData(f"got {payload.hex()} for channel {channel}: {error}") from error
    name = "analytics" if channel == ANALYTICS else "unknown"
    return {"event": name, "channel": str(channel), "payload": payload.hex()}


def _exactly(format_: str, payload: bytes, at: int) -> tuple[Any, ...]:
    if len(payload) - at != struct.calcsize(format_):
        raise struct.error(f"{len(payload) - at} bytes at {at}, not {struct.calcsize(format_)}")
    return struct.unpack_from(format_, payload, at)


def _engine(payload: bytes) -> dict[str, Any]:
    name, format_ = _ENGINE_KINDS[struct.unpack_from("<I", payload)[0]]
    values = _exactly(format_, payload, 4)
    return {"event": "engine", "setting": name, "value": values[0] if len(values) == 1 else list(values)}


def _parameter(payload: bytes) -> dict[str, Any]:
    (size,) = struct.unpack_from("<i", payload)
    key, at = payload[4 : 4 + size].decode("ascii"), 4 + size
    (kind,) = struct.unpack_from("<i", payload, at)
    if kind == 0:
        return {"event": "parameter", "key": key, "value": _exactly("<f", payload, at + 4)[0]}
    seed, sampler = struct.unpack_from("<ii", payload, at + 4)
    sampler_event = {"event": "sampler", "key": key, "seed": seed}
    if sampler < 2:
        return sampler_event | {"sampler": _SAMPLERS[sampler], "values": list(_exactly("<ff", payload, at + 12))}
    (count,) = struct.unpack_from("<i", payload, at + 12)
    return sampler_event | {"sampler": "multirange", "values": list(_exactly(f"<{count}f", payload, at + 16))}


def statistic(key: str, value: float, kind: int) -> bytes:
    """Returns a statistic as side channel bytes."""
    text = key.encode("ascii")
    payload = struct.pack(f"<i{len(text)}sfi", len(text), text, value, kind)
    return STATISTICS.bytes_le + struct.pack("<i", len(payload)) + payload


def statistics(message: int) -> bytes:
    """Returns one statistic of each kind.

    Args:
        message: number of the message with agents, from 1; the value of all statistics but the sum, which is 1.
    """
    return b"".join(
        (
            statistic("Player/Average", message, AVERAGE),
            statistic("Player/Latest", message, MOST_RECENT),
            statistic("Player/Sum", 1.0, SUM),
            statistic("Player/Histogram", message, HISTOGRAM),
        )
    )


class EventLog:
    """Logs what arrives, for tests that read it.

    Args:
        path: file for JSON lines; None for no file.
    """

    def __init__(self, path: Path | None) -> None:
        self._file: TextIO | None = None if path is None else path.open("w")
        self.parameters: dict[str, float] = {}

    def write(self, **event: Any) -> None:
        """Writes one line and flushes it, because the player may be killed."""
        if self._file is not None:
            self._file.write(json.dumps(event) + "\n")
            self._file.flush()

    def write_side_channel(self, data: bytes) -> None:
        """Writes the side channel messages of one exchange.

        Raises:
            UnreadableData: the bytes are malformed.
        """
        for channel, payload in payloads(data):
            event = parse_message(channel, payload)
            if event["event"] == "parameter":
                self.parameters[event["key"]] = event["value"]
            self.write(**event)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
