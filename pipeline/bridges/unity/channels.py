"""Encodes and decodes side channels, which carry data other than observations and actions.

    (UUID as Microsoft's GUIDs stand in memory, 16 bytes | int32 length | payload) *

all little-endian. A text is an int32 length and ASCII. An unknown channel is skipped, and so is data that a newer
package appends to a payload.
"""

import math
import struct
from collections.abc import Iterator, Mapping
from typing import Final
from uuid import UUID

from sparring.pipeline.bridges.unity import UnreadableData
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.messages.simulator import Aggregation, Distribution, Sampler, Statistic

ENGINE: Final = UUID("e951342c-4f7e-11ea-b238-784f4387d1f7")
PARAMETERS: Final = UUID("534c891e-810f-11ea-a9d0-822485860400")
STATISTICS: Final = UUID("a1d8f7b7-cec8-50f9-b78b-d3e165a78520")
ANALYTICS: Final = UUID("b664a4a9-d86f-5a5f-95cb-e8353a7e8356")

_FLOAT, _SAMPLER = 0, 1
_KINDS: Final[dict[Distribution, int]] = {"uniform": 0, "gaussian": 1, "multirangeuniform": 2}
_AGGREGATIONS: Final[tuple[Aggregation, ...]] = ("average", "most_recent", "sum", "histogram")
_SENDER: Final = "use the side channels of ML-Agents' package, or correct the lengths in your own side channel"


# ---------------------------------------------------------------- to the player


def engine(
    *,
    resolution: tuple[int, int],
    quality_level: int,
    time_scale: float,
    target_frame_rate: int,
    capture_frame_rate: int,
) -> bytes:
    """Returns settings of the player's engine.

    Args:
        resolution: width and height of the window, in pixels.
        quality_level: quality of rendering.
        time_scale: seconds of simulated time in a second.
        target_frame_rate: frames per second; -1 for as many as possible.
        capture_frame_rate: frames per second of simulated time; 0 for no fixed rate.

    Raises:
        SettingsError: a number does not fit into 32 bits.
    """
    fields: tuple[tuple[str, tuple[float, ...]], ...] = (
        ("<iii", (0, *resolution)),
        ("<ii", (1, quality_level)),
        ("<if", (2, time_scale)),
        ("<ii", (3, target_frame_rate)),
        ("<ii", (4, capture_frame_rate)),
    )
    return b"".join(_message(ENGINE, _packed("engine settings", form, *values)) for form, values in fields)


def parameters(values: Mapping[str, float], samplers: Mapping[str, Sampler]) -> bytes:
    """Returns environment parameters. The player samples by itself, whenever the game needs a value.

    Args:
        values: value of each parameter, by key.
        samplers: those that the player samples, by key.

    Raises:
        SettingsError: a key is not ASCII, a number does not fit into 32 bits, or a sampler has a wrong count of values.
    """
    contents = {key: _sampler(f"environment parameter {key!r}", one) for key, one in samplers.items()}
    for key in values:
        if key not in samplers:
            contents[key] = _packed(f"environment parameter {key!r}", "<if", _FLOAT, values[key])
    return b"".join(_message(PARAMETERS, _text(key) + content) for key, content in contents.items())


def _sampler(what: str, sampler: Sampler) -> bytes:
    kind, values = sampler.kind, sampler.values
    several = kind == "multirangeuniform"
    if kind not in _KINDS or (several and (not values or len(values) % 2)) or (not several and len(values) != 2):
        raise SettingsError(
            f"got sampler {kind!r} of {list(values)} for {what}; "
            "expected uniform or gaussian of two numbers, or multirangeuniform of two for each range; correct it"
        )
    head = (_SAMPLER, sampler.seed, _KINDS[kind], *([len(values)] if several else []))
    what = f"the sampler of {what}"
    return _packed(what, f"<{len(head)}i", *head) + _packed(what, f"<{len(values)}f", *values)


def analytics(payload: bytes) -> bytes:
    """Returns a message to the package's telemetry about the training, a `google.protobuf.Any`."""
    return _message(ANALYTICS, payload)


def _message(channel: UUID, payload: bytes) -> bytes:
    return channel.bytes_le + struct.pack("<i", len(payload)) + payload


def _text(key: str) -> bytes:
    if not key.isascii():
        raise SettingsError(
            f"got environment parameter {key!r}; expected a name in ASCII, as Unity needs; rename it, in the game too"
        )
    return struct.pack("<i", len(key)) + key.encode("ascii")


def _packed(what: str, form: str, *values: float) -> bytes:
    try:
        if all(map(math.isfinite, values)):
            return struct.pack(form, *values)
    except (struct.error, OverflowError):
        pass
    raise SettingsError(f"got {list(values)} for {what}; expected numbers that fit into 32 bits; correct them")


# ---------------------------------------------------------------- from the player


def parse_messages(data: bytes) -> Iterator[tuple[UUID, bytes]]:
    """Yields the messages of all channels, in order.

    Raises:
        UnreadableData: a message is truncated, or its length is wrong.
    """
    at = 0
    while at < len(data):
        if at + 20 > len(data):
            raise UnreadableData(f"{len(data) - at} bytes of a truncated side channel message", _SENDER)
        channel = UUID(bytes_le=data[at : at + 16])
        (size,) = struct.unpack_from("<i", data, at + 16)
        at += 20
        if not 0 <= size <= len(data) - at:
            raise UnreadableData(f"length {size} with {len(data) - at} bytes left in side channel {channel}", _SENDER)
        yield channel, data[at : at + size]
        at += size


def statistics(data: bytes) -> tuple[Statistic, ...]:
    """Returns the game's own statistics in the side channels' bytes.

    Raises:
        UnreadableData: a message is truncated, its lengths are wrong, or a number is not finite.
    """
    return tuple(_statistic(payload) for channel, payload in parse_messages(data) if channel == STATISTICS)


def _statistic(payload: bytes) -> Statistic:
    if len(payload) < 4:
        raise UnreadableData(f"{len(payload)} bytes of a statistic", _SENDER)
    (size,) = struct.unpack_from("<i", payload)
    if not 0 <= size <= len(payload) - 12:
        raise UnreadableData(f"a statistic of {len(payload)} bytes with a name of {size}", _SENDER)
    name = payload[4 : 4 + size].decode("ascii", "replace")
    value, aggregation = struct.unpack_from("<fi", payload, 4 + size)
    if not math.isfinite(value):
        raise UnreadableData(f"statistic {name!r} of {value}", "find where the game divides by zero or overflows")
    if not 0 <= aggregation < len(_AGGREGATIONS):
        raise UnreadableData(f"statistic {name!r} with aggregation {aggregation}, where 0 to 3 are known", _SENDER)
    return Statistic(name=name, value=value, aggregation=_AGGREGATIONS[aggregation])
