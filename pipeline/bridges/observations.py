"""Translates Gymnasium spaces to specs of observations, and their values to columns, for both bridges.

A 1-D or integer Box, Discrete (one-hot), MultiDiscrete (one-hot each) and MultiBinary are vectors; a 3-D Box of uint8
or floats is an image, transposed to channels first, as is any 2-D or 3-D one that the option `images` names; Dict and
Tuple are several observations.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeVar

import numpy as np

from sparring.pipeline.bridges.explain import not_finite, wrong_value
from sparring.pipeline.bridges.spaces import MASK, NUMERIC, Value, named, numbers
from sparring.pipeline.errors import NOTICE, SettingsError
from sparring.pipeline.simulation.game import Game
from sparring.pipeline.specs import Array, ObservationSpec, SpecError

if TYPE_CHECKING:
    from gymnasium import Space, spaces

Path = tuple[str | int, ...]
"""Keys that lead to a value inside an observation."""

_LOOKS: Final = 100
"""Frames from which the scale of images is judged."""

_ROUNDING: Final = 1e-5
"""Part of a bound by which rounding may move a value."""

_PICTURE: Final = 16
"""Least height and width of a box of numbers that may be an image."""

_UNREADABLE: Final = (LookupError, TypeError, ValueError, RuntimeError)
"""What numpy, lookups and tensors with a gradient raise for values of another form than their space."""

GameOfSpaces = TypeVar("GameOfSpaces", bound=Game)


class _Leaf(NamedTuple):
    """Describes one observation inside a space.

    Attributes:
        spec: its spec for the trainer.
        path: keys that lead to it from an observation.
        read: converts the values of n agents to [n, *spec.shape].
        space: the space of these values.
    """

    spec: ObservationSpec
    path: Path
    read: Callable[[Value], Array]
    space: Space[Value]


class Observations:
    """Reads observations of one space as columns, and notes on standard error where an image may be lost.

    Args:
        space: a Gymnasium space.
        brightest: largest value in images of bytes, which are scaled to 0..255; 1 for maps of 0 and 1.
        images: names of the observations that are images, separated by commas; None: 3-D boxes of bytes or floats.

    Raises:
        SpecError: the space is not supported.
    """

    def __init__(self, space: Space[Value], brightest: int = 255, images: str | None = None) -> None:
        self._leaves = tuple(_leaves(space, (), brightest, None if images is None else _names(images)))
        self.specs = tuple(leaf.spec for leaf in self._leaves)
        self._highest = {spec.name: 0.0 for spec in self.specs if spec.kind == "image"}
        self._looks = _LOOKS
        self._within = {leaf.spec.name: _bounds(leaf) for leaf in self._leaves if leaf.spec.kind != "image"}
        self._known = {leaf.path[0] for leaf in self._leaves if leaf.path} | {MASK}
        self._is_new = len(self._known) > 1

    def rows(self, items: Sequence[Value], whose: Callable[[int], str] = lambda _: "") -> tuple[Array, ...]:
        """Returns columns [n, *shape] for each observation, from one value per agent.

        Args:
            items: the values.
            whose: says in messages whose value that of a row is, as " of area 3".

        Raises:
            SpecError: a value is not one of the space; it is named.
            NotFinite: a value is NaN or infinite.
        """
        self._note_unread(items[0] if items else None)
        try:
            return self._seen(_read(leaf, [_at(item, leaf.path) for item in items], whose) for leaf in self._leaves)
        except _UNREADABLE:
            for row, item in enumerate(items):
                self._check(item, lambda value: [value], whose(row))
            raise

    def batch(self, items: Value) -> tuple[Array, ...]:
        """Returns the same columns from values that a vector environment has already batched. Raises as `rows`."""
        self._note_unread(items)
        try:
            return self._seen(_read(leaf, _at(items, leaf.path), lambda row: f" in row {row}") for leaf in self._leaves)
        except _UNREADABLE:
            self._check(items, lambda values: values, None)
            raise

    def _note_unread(self, item: Value) -> None:
        """Notes once which entries of an observation its space lacks."""
        if self._is_new and isinstance(item, Mapping):
            self._is_new = False
            if unread := [str(key) for key in item if key not in self._known]:
                sys.stderr.write(f"{NOTICE}the observation_space lacks {', '.join(unread)}, which are not read\n")

    def _seen(self, columns: Iterable[Array]) -> tuple[Array, ...]:
        """Returns the columns; notes values beyond the bounds of the space in the first frames.

        After these it notes images that have another scale than they are read with.
        """
        found = tuple(columns)
        if self._looks:
            self._looks -= 1
            self._note_beyond(found)
            for spec, column in zip(self.specs, found, strict=True):
                if spec.name in self._highest and column.size:
                    self._highest[spec.name] = max(self._highest[spec.name], float(column.max()))
            for spec in self.specs if not self._looks else ():
                highest, is_bytes = self._highest.get(spec.name, 0.0), spec.dtype == "uint8"
                if highest == 1 if is_bytes else highest > 1:
                    expected = (
                        "bytes are divided by 255; where 1 is the largest, write brightest: 1 in the options"
                        if is_bytes
                        else "floats are read as they are; divide them, or use bytes"
                    )
                    sys.stderr.write(f"{NOTICE}the image {spec.name!r} has values up to {highest:g}: {expected}\n")
        return found

    def _note_beyond(self, columns: Sequence[Array]) -> None:
        """Notes once for each observation where values are not within the bounds of their space."""
        for spec, column in zip(self.specs, columns, strict=True):
            low, high = self._within.get(spec.name, (-np.inf, np.inf))
            if ((column < low) | (column > high)).any():
                self._within.pop(spec.name)
                sys.stderr.write(
                    f"{NOTICE}{spec.name!r} has values from {column.min():g} to {column.max():g}, beyond the bounds of "
                    "its space; does the environment clip them, or is the space another one?\n"
                )

    def _check(self, item: Value, rows: Callable[[Value], Value], whose: str | None) -> None:
        """Raises SpecError for the first observation in `item` whose `rows` cannot be read."""
        for leaf in self._leaves:
            value, is_found = item, False
            try:
                value, is_found = _at(item, leaf.path), True
                leaf.read(rows(value))
            except _UNREADABLE as error:
                raise wrong_value(leaf.spec.name, value, leaf.space, whose, is_found=is_found) from error


def check_images(game: GameOfSpaces, images: str | None) -> GameOfSpaces:
    """Returns the game, unless the option `images` has a name that is no image of any behavior.

    Raises:
        SettingsError: `images` names an observation that does not exist, or that cannot be an image.
    """
    observations = [one for behavior in game.behaviors().values() for one in behavior.observations]
    for name in sorted(_names(images or "")):
        if (name, "image") not in {(one.name, one.kind) for one in observations}:
            raise SettingsError(
                f"got images {name!r}; expected boxes of 2 or 3 dimensions among the observations "
                f"{', '.join(dict.fromkeys(one.name for one in observations))}; correct the option images"
            )
    return game


def _names(images: str) -> set[str]:
    return {word.strip() for word in images.split(",") if word.strip()}


def _leaves(space: Space[Value], path: Path, brightest: int, images: set[str] | None) -> Iterator[_Leaf]:
    """Yields the observations in a space, in its order; `brightest` and `images` as in `Observations`."""
    from gymnasium import spaces

    name = "/".join(map(str, path)) or "observation"
    match space:
        case spaces.Dict():
            for key, inner in space.spaces.items():
                yield from _leaves(inner, (*path, key), brightest, images)
        case spaces.Tuple():
            for index, inner in enumerate(space.spaces):
                yield from _leaves(inner, (*path, index), brightest, images)
        case spaces.Box() | spaces.MultiBinary() if _is_image(space, name, images):
            yield _image(space, name, path, brightest)
        case spaces.Box() | spaces.MultiBinary() if len(space.shape) < 4:
            size, kind = math.prod(space.shape), f"{space.shape} {space.dtype}"
            is_flat = len(space.shape) == 2 and (space.dtype == np.uint8 or min(space.shape) >= _PICTURE)
            if images is None and (len(space.shape) == 3 or is_flat):
                sys.stderr.write(
                    f"{NOTICE}observation {name!r}, a box of {kind}, is read as a vector of {size} numbers; the "
                    f"option images={name} reads it as an image, and images='' confirms that there is none\n"
                )
            yield _Leaf(
                ObservationSpec(name=name, shape=(size,)),
                path,
                partial(_vectors, shape=space.shape, is_binary=isinstance(space, spaces.MultiBinary)),
                space,
            )
        case spaces.Discrete():
            yield _one_hot(space, name, path, np.array([space.n]), np.array([space.start]))
        case spaces.MultiDiscrete():
            yield _one_hot(space, name, path, space.nvec.ravel(), np.ravel(space.start))
        case _:
            given: Value = space  # which need not be a space
            remedy = "wrap the environment so that it observes one of these (option wrappers)"
            if isinstance(given, Mapping):
                remedy = "make it a gymnasium.spaces.Dict"
            elif isinstance(given, spaces.Box):
                remedy = "wrap the environment (option wrappers); to stack frames, make them gray before that "
                remedy += "(gymnasium.wrappers.GrayscaleObservation)"
            elif callable(given):
                remedy = "set the space as an attribute in __init__(), in place of a method"
            raise SpecError(
                got=f"observation {name!r} of the space {named(space)}",
                expected="Box of up to 3 dimensions, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of these",
                remedy=remedy,
            )


def _vectors(items: Value, shape: tuple[int, ...], *, is_binary: bool) -> Array:
    """Returns values of a shape as vectors.

    Raises:
        ValueError: they have another shape, and not only further dimensions of 1; or one should be 0 or 1.
    """
    values = numbers(items)
    if is_binary and ((values != 0) & (values != 1)).any():
        raise ValueError("neither 0 nor 1")
    found = values.shape[1:]
    if found != shape and [one for one in found if one != 1] != [one for one in shape if one != 1]:
        raise ValueError("another shape")
    return values.reshape(len(items), math.prod(shape))


def _bounds(leaf: _Leaf) -> tuple[Array, Array]:
    """Returns the least and greatest values of an observation that is a box, a little apart for their rounding."""
    from gymnasium import spaces

    if not isinstance(leaf.space, spaces.Box):
        return np.array(-np.inf), np.array(np.inf)
    low, high = (one.astype(np.float64).ravel() for one in (leaf.space.low, leaf.space.high))
    return low - _ROUNDING * np.maximum(1, np.abs(low)), high + _ROUNDING * np.maximum(1, np.abs(high))


def _is_image(space: spaces.Box | spaces.MultiBinary, name: str, images: set[str] | None) -> bool:
    if images is None:
        return len(space.shape) == 3 and (space.dtype == np.uint8 or space.dtype.kind == "f")
    return name in images and len(space.shape) in (2, 3)


def _image(space: spaces.Box | spaces.MultiBinary, name: str, path: Path, brightest: int) -> _Leaf:
    """Returns an image with channels first. The channels of a square image are the odd dimension, else the smaller of
    first and last; one of two dimensions has one channel.
    """
    flat = len(space.shape) == 2
    first, middle, end = (1, *space.shape) if flat else space.shape
    last = not flat and (first == middle or (middle != end and end <= first))
    channels, height, width = (end, first, middle) if last else (first, middle, end)
    convert, dtype = _pixels(space, name, brightest)
    spec = ObservationSpec(name=name, shape=(channels, height, width), dtype=dtype, kind="image")

    def read(items: Value) -> Array:
        values = convert(items)
        if values.shape[1:] != space.shape:
            raise ValueError("another shape")
        values = values.reshape(-1, first, middle, end)
        return np.ascontiguousarray(values.transpose(0, 3, 1, 2)) if last else values

    return _Leaf(spec, path, read, space)


def _pixels(
    space: spaces.Box | spaces.MultiBinary, name: str, brightest: int
) -> tuple[Callable[[Value], Array], Literal["uint8", "float32"]]:
    """Returns how to read pixels: as bytes, or as floats, which integers become in proportion to their bounds."""
    from gymnasium import spaces

    if isinstance(space, spaces.MultiBinary) or space.dtype == np.bool_:
        brightest = 1
    elif space.dtype.kind == "f":
        return numbers, "float32"
    elif space.dtype != np.uint8:
        low, high = float(space.low.min()), float(space.high.max())
        return lambda items: ((numbers(items, np.float64) - low) / ((high - low) or 1)).astype(np.float32), "float32"
    if brightest == 255:
        return partial(_bytes, is_dark=isinstance(space, spaces.Box) and bool(space.high.max() > 1)), "uint8"
    return lambda items: _scale_bytes(_bytes(items), name, brightest), "uint8"


def _bytes(items: Value, *, is_dark: bool = False) -> Array:
    """Returns pixels as bytes.

    Raises:
        ValueError: that would change them; or they are floats from 0 to 1, which are too dark as bytes (`is_dark`).
    """
    values = np.asarray(items)
    if values.dtype == np.uint8:
        return values
    if values.dtype.kind not in NUMERIC:
        raise ValueError(f"values of {values.dtype}")
    with np.errstate(invalid="ignore"):
        pixels = values.astype(np.uint8)
    if (pixels != values).any() or (is_dark and values.dtype.kind == "f" and pixels.any() and pixels.max() <= 1):
        raise ValueError("not bytes")
    return pixels


def _scale_bytes(values: Array, name: str, brightest: int) -> Array:
    """Scales bytes from 0..brightest to 0..255."""
    if values.size and int(values.max()) > brightest:
        got = f"image {name!r} with a value of {int(values.max())}"
        remedy = "set brightest to the largest value that the environment sends"
        raise SpecError(got=got, expected=f"at most {brightest}, as option brightest says", remedy=remedy)
    table = np.round(np.arange(brightest + 1) * (255 / brightest)).astype(np.uint8)
    scaled: Array = table[values]
    return scaled


def _one_hot(space: Space[Value], name: str, path: Path, sizes: Array, starts: Array) -> _Leaf:
    begins = np.cumsum(sizes) - sizes
    offsets = begins - starts
    total = int(sizes.sum())

    def read(items: Value) -> Array:
        given = numbers(items, np.float64).reshape(len(items), len(sizes))
        if (given % 1).any():
            raise ValueError("not whole")
        columns = given.astype(np.int64) + offsets
        if ((columns < begins) | (columns >= begins + sizes)).any():
            raise ValueError("beyond the sizes")
        values = np.zeros((len(items), total), np.float32)
        np.put_along_axis(values, columns, 1, axis=1)
        return values

    return _Leaf(ObservationSpec(name=name, shape=(total,)), path, read, space)


def _read(leaf: _Leaf, items: Value, whose: Callable[[int], str]) -> Array:
    values = leaf.read(items)
    if values.dtype == np.float32 and not np.isfinite(values).all():
        row = int(np.argmin(np.isfinite(values).reshape(len(values), -1).all(axis=1)))
        raise not_finite(items[row], f"observation {leaf.spec.name!r}{whose(row)}")
    return values


def _at(value: Value, path: Path) -> Value:
    for key in path:
        value = value[key]
    return value
