"""Reads observations of a Unity agent as arrays.

A sensor of Unity becomes:

    rank 1                          vector; goal, if it is a goal signal
    rank 2, first axis variable     entities
    rank 3                          image

A goal signal of rank 2 or 3 is read as a plain list or image: networks here are conditioned on vector goals only.

Newer packages of Unity (from 3.0) send images as [channels, height, width], older ones as [height, width, channels]. No
version number shows that, but the axes do: height and width are the two that allow a translation. A package that sends
no axes is so old that channels are last.

An image consists of floats, or of PNG files of three channels each, one after the other. The mapping assigns each of
their channels to a channel of the image; several channels of one are averaged (a gray image is sent as three equal
channels). Bytes stay bytes: a PNG image is uint8, unless channels are averaged, which needs float32 (0..1). Divided by
255 at the input of a network, it equals the number of ML-Agents.
"""

import io
import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.bridges.unity import UnreadableData
from sparring.pipeline.bridges.unity.messages import Proto, parsed
from sparring.pipeline.errors import install_command
from sparring.pipeline.specs import Array, ObservationKind, ObservationSpec

NONE, PNG = 0, 1
GOAL_SIGNAL: Final = 1
TRANSLATION, VARIABLE = 2, 4

MOST_PIXELS: Final = 2**24
"""Limit of an image: a few bytes of PNG can declare any size."""

_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_LAST_CHUNK: Final = b"\0\0\0\0IEND\xae\x42\x60\x82"
"""Ends each PNG file: its length of 0, kind and checksum."""
_CHANNELS: Final = 3
"""Channels of each PNG file."""
_LEAST: Final = 16
"""Bytes of each channel in a PNG file, at least: the fixed parts alone have 57 for three."""

Sources = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SensorReader:
    """Describes how one observation of all steps is read.

    Attributes:
        spec: its spec for the trainer.
        signature: fields that each of its messages must repeat.
        channels_last: an image in the message is [height, width, channels].
        sources: for each channel of a PNG image, the channels of the files that it is the mean of.
        plain_goal: a goal signal that is read as a plain list or image.
    """

    spec: ObservationSpec
    signature: tuple[object, ...]
    channels_last: bool
    sources: Sources
    plain_goal: bool


def decoded(encoded: Iterable[bytes]) -> list[Proto]:
    """Returns the observations of an agent as messages.

    Raises:
        UnreadableData: one cannot be decoded.
    """
    return [parsed("ObservationProto", one, f"observation {at}") for at, one in enumerate(encoded)]


def sensors(observations: Sequence[Proto]) -> tuple[SensorReader, ...]:
    """Returns the sensors of an agent, from the observations of any of its steps.

    Raises:
        UnreadableData: the agent has no observation, or one that no network here reads.
        SpecError: an observation has a size below 1.
    """
    if not observations:
        raise UnreadableData("an agent without observations")
    taken: set[str] = set()
    return tuple(_sensor(one, _free(one.name or f"obs_{at}", taken)) for at, one in enumerate(observations))


def arrays(all_sensors: tuple[SensorReader, ...], observations: Sequence[Proto]) -> list[Array]:
    """Returns one array of the spec's shape and dtype for each sensor.

    Raises:
        UnreadableData: the observations are not of these sensors, do not fill their shapes, or are not finite.
    """
    if len(observations) != len(all_sensors):
        raise UnreadableData(f"{len(observations)} observations where there were {len(all_sensors)} at first")
    return [_array(sensor, one) for sensor, one in zip(all_sensors, observations, strict=True)]


def numbers(sensor: SensorReader, one: Proto) -> bytes:
    """Returns the numbers of an uncompressed observation, as float32.

    Raises:
        UnreadableData: it is not of this sensor, or does not fill its shape.
    """
    _check_signature(sensor, one)
    data: bytes = one.float_data.data
    if len(data) != 4 * math.prod(sensor.spec.shape):
        spec = sensor.spec
        raise UnreadableData(f"{len(data) / 4:g} numbers for observation {spec.name!r} of shape {spec.shape}")
    return data


def shaped(sensor: SensorReader, data: bytes, n: int) -> NDArray[np.float32]:
    """Returns the joined `numbers` of n agents as [n, *shape]."""
    if not sensor.channels_last:
        return np.frombuffer(data, "<f4").reshape(n, *sensor.spec.shape)
    channels, height, width = sensor.spec.shape
    return np.ascontiguousarray(np.frombuffer(data, "<f4").reshape(n, height, width, channels).transpose(0, 3, 1, 2))


def image(sensor: SensorReader, one: Proto) -> Array:
    """Returns an observation in PNG as [channels, height, width].

    Raises:
        UnreadableData: it is not of this sensor, or its files do not hold that image.
    """
    _check_signature(sensor, one)
    spec = sensor.spec
    height, width = spec.shape[1:]
    if height * width > MOST_PIXELS:
        raise UnreadableData(f"image {spec.name!r} of {height} x {width} pixels, more than {MOST_PIXELS}")
    mapping = len(one.compressed_channel_mapping)
    files = _files(one.compressed_data, spec.name)
    channels = len(files) * _CHANNELS
    if channels < spec.shape[0] or (mapping and channels != mapping):
        raise UnreadableData(f"{channels} channels of PNG files for {mapping or spec.shape[0]} of image {spec.name!r}")
    planes = np.concatenate([_planes(file, (width, height), spec.name) for file in files])
    if spec.dtype == "uint8":
        chosen: NDArray[np.uint8] = planes[[source for (source,) in sensor.sources]]
        return chosen
    means = [planes[list(sources)].mean(axis=0, dtype=np.float32) / np.float32(255) for sources in sensor.sources]
    return np.stack(means)


def _free(name: str, taken: set[str]) -> str:
    """Returns the name, with a number if it is in use."""
    free, number = name, 1
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    taken.add(free)
    return free


def _signature(one: Proto) -> tuple[object, ...]:
    mapping = tuple(one.compressed_channel_mapping)
    axes = tuple(one.dimension_properties)
    return tuple(one.shape), one.compression_type, one.observation_type, axes, mapping, one.name


def _sensor(one: Proto, name: str) -> SensorReader:
    shape, axes = tuple(one.shape), tuple(one.dimension_properties)
    if axes and len(axes) != len(shape):
        raise UnreadableData(f"observation {name!r} with {len(axes)} properties of the axes of shape {shape}")
    if one.compression_type not in (NONE, PNG) or (one.compression_type == PNG and len(shape) != 3):
        raise UnreadableData(f"observation {name!r} of shape {shape} with compression {one.compression_type}")
    channels_last = len(shape) == 3 and _channels_last(axes, name)
    if channels_last:
        shape = (shape[2], *shape[:2])
    packed = one.compression_type == PNG
    most = max(_CHANNELS, len(one.compressed_data) // _LEAST)
    if packed and shape[0] > most:  # before anything of that size is allocated
        raise UnreadableData(f"image {name!r} of {shape[0]} channels, where its PNG files hold at most {most}")
    sources = _sources(tuple(one.compressed_channel_mapping), shape[0], name) if packed else ()
    exact = packed and all(len(of_one) == 1 for of_one in sources)
    kind = _kind(one, shape, axes, name)
    spec = ObservationSpec(name=name, shape=shape, dtype="uint8" if exact else "float32", kind=kind)
    plain_goal = one.observation_type == GOAL_SIGNAL and kind != "goal"
    return SensorReader(
        spec=spec, signature=_signature(one), channels_last=channels_last, sources=sources, plain_goal=plain_goal
    )


def _kind(one: Proto, shape: tuple[int, ...], axes: tuple[int, ...], name: str) -> ObservationKind:
    if len(shape) == 3:
        return "image"
    if len(shape) == 2 and axes and axes[0] & VARIABLE:
        return "entities"
    if len(shape) == 1:
        return "goal" if one.observation_type == GOAL_SIGNAL else "vector"
    raise UnreadableData(f"observation {name!r} of shape {shape} with axes {axes}: no vector, image or entity list")


def _channels_last(axes: tuple[int, ...], name: str) -> bool:
    places = tuple(bool(axis & TRANSLATION) for axis in axes)
    if not any(axes) or places == (True, True, False):
        return True
    if places != (False, True, True):
        raise UnreadableData(f"image {name!r} with axes {axes}, which do not separate height and width from channels")
    return False


def _sources(mapping: tuple[int, ...], channels: int, name: str) -> Sources:
    if channels < 1:
        return ()  # the spec rejects it with its shape
    if not mapping:
        return ((0, 1, 2),) if channels == 1 else tuple((channel,) for channel in range(channels))
    if set(mapping) - {-1} != set(range(channels)):
        raise UnreadableData(f"image {name!r} of {channels} channels with the channel mapping {list(mapping)}")
    return tuple(tuple(at for at, to in enumerate(mapping) if to == channel) for channel in range(channels))


def _check_signature(sensor: SensorReader, one: Proto) -> None:
    if (signature := _signature(one)) != sensor.signature:
        raise UnreadableData(f"observation {sensor.spec.name!r} with fields {signature}, at first {sensor.signature}")


def _array(sensor: SensorReader, one: Proto) -> Array:
    if one.compression_type == PNG:
        return image(sensor, one)
    values: NDArray[np.float32] = shaped(sensor, numbers(sensor, one), 1)[0]
    if not np.isfinite(values).all():
        raise UnreadableData(f"NaN or infinity in observation {sensor.spec.name!r}")
    return values


def _files(data: bytes, name: str) -> list[bytes]:
    """Returns the consecutive PNG files."""
    before, *files = data.split(_SIGNATURE)
    if before or not files:
        raise UnreadableData(f"image {name!r} that is no PNG")
    if not all(file.endswith(_LAST_CHUNK) for file in files):
        raise UnreadableData(f"image {name!r} with a truncated PNG")
    return [_SIGNATURE + file for file in files]


def _planes(file: bytes, size: tuple[int, int], name: str) -> NDArray[np.uint8]:
    """Returns one PNG file, which must have the width and height `size`, as [3, height, width]."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UnreadableData("images as PNG, and no library pillow for them", install_command("unity")) from error
    found = int.from_bytes(file[16:20], "big"), int.from_bytes(file[20:24], "big")
    if found != size:  # before anything of that size is allocated
        raise UnreadableData(f"a PNG of {found[0]} x {found[1]} pixels for image {name!r} of {size[0]} x {size[1]}")
    try:
        image = Image.open(io.BytesIO(file), formats=["PNG"])
        pixels = np.asarray(image.convert("RGB"), np.uint8)
    except (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error) as error:  # the errors of Pillow
        raise UnreadableData(f"image {name!r} with a PNG that cannot be decoded ({error})") from error
    if image.mode not in ("RGB", "L"):
        raise UnreadableData(f"a PNG of mode {image.mode} for image {name!r}, where three channels are expected")
    return pixels.transpose(2, 0, 1)
