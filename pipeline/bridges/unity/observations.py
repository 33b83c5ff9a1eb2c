"""Observations of a Unity agent as arrays.

What a sensor of Unity is here:

    rank 1                          vector; goal, where it is a goal signal
    rank 2, first axis variable     entities
    rank 3                          image

A goal signal of rank 2 or 3 is seen as any other list or image: networks here condition on goals that are vectors.

Newer packages of Unity (from 3.0) send images as [channels, height, width], older ones as [height, width, channels]. No
version number tells, the axes do: height and width are the two that allow a translation. Where the axes are not told,
the package is so old that channels are last.

An image comes as floats, or as PNG files of three channels each, one after the other. The mapping says for each of
their channels to which channel of the image it belongs; several that belong to one are averaged (a grey image is sent
as three equal channels). Bytes stay bytes: a PNG image is uint8, unless channels are averaged, which needs float32
(0..1). Scaled by 255 where it enters a network, it is the number that ML-Agents gives.
"""

from __future__ import annotations

import io
import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.bridges.unity import Unreadable
from sparring.pipeline.bridges.unity.messages import messages, parsed
from sparring.pipeline.errors import install_command
from sparring.pipeline.specs import ObservationKind, ObservationSpec

NONE, PNG = 0, 1
GOAL_SIGNAL: Final = 1
TRANSLATION, VARIABLE = 2, 4

MOST_PIXELS: Final = 2**24
"""Of an image: a few bytes of PNG can ask for any number."""

_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_CHANNELS: Final = 3
"""Of each PNG file."""

_SMALLEST: Final = 45
"""Bytes of a PNG file: signature, header, end."""

Sources = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SensorReader:
    """How one observation of all steps is read.

    Attributes:
        spec: what it is here.
        told: what each of its messages must repeat.
        channels_last: an image is [height, width, channels] in the file.
        sources: of a PNG image: for each channel, those of the files that it is the mean of.
        plain_goal: it is a goal signal that is read as what it is beside that.
    """

    spec: ObservationSpec
    told: tuple[Any, ...]
    channels_last: bool
    sources: Sources
    plain_goal: bool


def decoded(encoded: Iterable[bytes]) -> list[Any]:
    """The observations of an agent as messages.

    Raises:
        Unreadable: one is none.
    """
    kind = messages().observation
    return [parsed(kind, one, f"observation {at}") for at, one in enumerate(encoded)]


def sensors(observations: Sequence[Any]) -> tuple[SensorReader, ...]:
    """Those of an agent, from the observations of any of its steps.

    Raises:
        Unreadable: there is none, or one that no network here reads.
        SpecError: one with a size below 1.
    """
    if not observations:
        raise Unreadable("an agent without observations")
    taken: set[str] = set()
    return tuple(_sensor(one, _free(one.name or f"obs_{at}", taken)) for at, one in enumerate(observations))


def arrays(all_sensors: tuple[SensorReader, ...], observations: Sequence[Any]) -> list[NDArray[Any]]:
    """One array of the spec's shape and dtype for each sensor.

    Raises:
        Unreadable: the observations are not those of these sensors, or do not fill their shapes, or are not finite.
    """
    if len(observations) != len(all_sensors):
        raise Unreadable(f"{len(observations)} observations where there were {len(all_sensors)} at first")
    return [_array(sensor, one) for sensor, one in zip(all_sensors, observations, strict=True)]


def numbers(sensor: SensorReader, one: Any) -> bytes:
    """What an observation that is not compressed holds, as float32.

    Raises:
        Unreadable: it is not of this sensor, or does not fill its shape.
    """
    _check_told(sensor, one)
    data: bytes = one.float_data.data
    if len(data) != 4 * math.prod(sensor.spec.shape):
        raise Unreadable(f"{len(data) / 4:g} numbers for observation {sensor.spec.name!r} of shape {sensor.spec.shape}")
    return data


def shaped(sensor: SensorReader, data: bytes, n: int) -> NDArray[np.float32]:
    """[n, *shape] of what `numbers` gave for n agents, joined."""
    if not sensor.channels_last:
        return np.frombuffer(data, "<f4").reshape(n, *sensor.spec.shape)
    channels, height, width = sensor.spec.shape
    return np.ascontiguousarray(np.frombuffer(data, "<f4").reshape(n, height, width, channels).transpose(0, 3, 1, 2))


def image(sensor: SensorReader, one: Any) -> NDArray[Any]:
    """[channels, height, width] of an observation as PNG.

    Raises:
        Unreadable: it is not of this sensor, or its files do not hold that image.
    """
    _check_told(sensor, one)
    spec = sensor.spec
    height, width = spec.shape[1:]
    if height * width > MOST_PIXELS:
        raise Unreadable(f"image {spec.name!r} of {height} x {width} pixels, more than {MOST_PIXELS}")
    mapping = len(one.compressed_channel_mapping)
    files = list(_files(one.compressed_data, spec.name))
    channels = len(files) * _CHANNELS
    if channels < spec.shape[0] or (mapping and channels != mapping):
        raise Unreadable(f"{channels} channels of PNG files for {mapping or spec.shape[0]} of image {spec.name!r}")
    planes = np.concatenate([_planes(file, (width, height), spec.name) for file in files])
    if spec.dtype == "uint8":
        chosen: NDArray[np.uint8] = planes[[source for (source,) in sensor.sources]]
        return chosen
    means = [planes[list(sources)].mean(axis=0, dtype=np.float32) / np.float32(255) for sources in sensor.sources]
    return np.stack(means)


def _free(name: str, taken: set[str]) -> str:
    """The name, or with a number where it is taken."""
    free, number = name, 1
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    taken.add(free)
    return free


def _told(one: Any) -> tuple[Any, ...]:
    mapping = tuple(one.compressed_channel_mapping)
    axes = tuple(one.dimension_properties)
    return tuple(one.shape), one.compression_type, one.observation_type, axes, mapping, one.name


def _sensor(one: Any, name: str) -> SensorReader:
    shape, axes = tuple(one.shape), tuple(one.dimension_properties)
    if axes and len(axes) != len(shape):
        raise Unreadable(f"observation {name!r} with {len(axes)} properties of the axes of shape {shape}")
    if one.compression_type not in (NONE, PNG) or (one.compression_type == PNG and len(shape) != 3):
        raise Unreadable(f"observation {name!r} of shape {shape} with compression {one.compression_type}")
    channels_last = len(shape) == 3 and _channels_last(axes, name)
    if channels_last:
        shape = (shape[2], *shape[:2])
    packed = one.compression_type == PNG
    sources = _sources(tuple(one.compressed_channel_mapping), shape[0], name) if packed else ()
    exact = packed and all(len(of_one) == 1 for of_one in sources)
    kind = _kind(one, shape, axes, name)
    spec = ObservationSpec(name=name, shape=shape, dtype="uint8" if exact else "float32", kind=kind)
    plain_goal = one.observation_type == GOAL_SIGNAL and kind != "goal"
    return SensorReader(spec=spec, told=_told(one), channels_last=channels_last, sources=sources, plain_goal=plain_goal)


def _kind(one: Any, shape: tuple[int, ...], axes: tuple[int, ...], name: str) -> ObservationKind:
    if len(shape) == 3:
        return "image"
    if len(shape) == 2 and axes and axes[0] & VARIABLE:
        return "entities"
    if len(shape) == 1:
        return "goal" if one.observation_type == GOAL_SIGNAL else "vector"
    raise Unreadable(
        f"observation {name!r} of shape {shape} with axes {axes}, which is no vector, image or entity list"
    )


def _channels_last(axes: tuple[int, ...], name: str) -> bool:
    places = tuple(bool(axis & TRANSLATION) for axis in axes)
    if not any(axes) or places == (True, True, False):
        return True
    if places != (False, True, True):
        raise Unreadable(f"image {name!r} with axes {axes}, which do not tell height and width from channels")
    return False


def _sources(mapping: tuple[int, ...], channels: int, name: str) -> Sources:
    if channels < 1:
        return ()  # refused with its shape
    if not mapping:
        return ((0, 1, 2),) if channels == 1 else tuple((channel,) for channel in range(channels))
    if set(mapping) - {-1} != set(range(channels)):
        raise Unreadable(f"image {name!r} of {channels} channels with the channel mapping {list(mapping)}")
    return tuple(tuple(at for at, to in enumerate(mapping) if to == channel) for channel in range(channels))


def _check_told(sensor: SensorReader, one: Any) -> None:
    if (told := _told(one)) != sensor.told:
        raise Unreadable(f"observation {sensor.spec.name!r} told as {told}, at first as {sensor.told}")


def _array(sensor: SensorReader, one: Any) -> NDArray[Any]:
    if one.compression_type == PNG:
        return image(sensor, one)
    values: NDArray[np.float32] = shaped(sensor, numbers(sensor, one), 1)[0]
    if not np.isfinite(values).all():
        raise Unreadable(f"NaN or infinity in observation {sensor.spec.name!r}")
    return values


def _files(data: bytes, name: str) -> Iterator[bytes]:
    """The PNG files that stand one after the other, each from its signature to its last chunk."""
    at = 0
    while at < len(data) or at == 0:
        start = at
        if data[start : start + len(_SIGNATURE)] != _SIGNATURE:
            raise Unreadable(f"image {name!r} that is no PNG")
        at += len(_SIGNATURE)
        kind = b""
        while kind != b"IEND":
            kind = data[at + 4 : at + 8]
            at += 12 + int.from_bytes(data[at : at + 4], "big")  # length, kind and checksum have 4 bytes each
            if at > len(data) or len(kind) < 4:
                raise Unreadable(f"image {name!r} with a PNG that was cut off")
        if at - start < _SMALLEST:
            raise Unreadable(f"image {name!r} with a PNG that holds nothing")
        yield data[start:at]


def _planes(file: bytes, size: tuple[int, int], name: str) -> NDArray[np.uint8]:
    """[3, height, width] of one PNG file, which must have that width and height."""
    try:
        from PIL import Image
    except ImportError as error:
        raise Unreadable("images as PNG, and no library pillow to read them with", install_command("unity")) from error
    if (found := struct.unpack(">II", file[16:24])) != size:  # before anything of that size is allocated
        raise Unreadable(f"a PNG of {found[0]} x {found[1]} pixels for image {name!r} of {size[0]} x {size[1]}")
    try:
        image = Image.open(io.BytesIO(file), formats=["PNG"])
        pixels = np.asarray(image.convert("RGB"), np.uint8)
    except (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error) as error:  # as Pillow comes upon it
        raise Unreadable(f"image {name!r} with a PNG that cannot be decoded ({error})") from error
    if image.mode not in ("RGB", "L"):
        raise Unreadable(f"a PNG of mode {image.mode} for image {name!r}, where three channels are expected")
    return pixels.transpose(2, 0, 1)
