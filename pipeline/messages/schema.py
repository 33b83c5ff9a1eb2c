"""Declares records by the annotations of their fields, and compiles encoders and decoders from these.

A record is a frozen, keyword-only dataclass decorated with `@record("tag")`. Its fields may be
`bool`, `int`, `float`, `str`, an optional of these, arrays (the names below), other records,
`tuple[T, ...]` and `dict[str, T]`.

An encoder turns a record into a map and moves its arrays to a list; a decoder does the reverse and checks every field.
"""

import math
import reprlib
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache, partial
from typing import Annotated, Any, Final, NamedTuple, Self, TypeVar, dataclass_transform

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.errors import CodecError, SparringError
from sparring.pipeline.specs import Array


class Columns(NamedTuple):
    """Declares that a field is an array.

    Attributes:
        dtypes: allowed dtypes, as little-endian numpy strings.
        ndim: number of dimensions; None where the behavior's spec determines it.
    """

    dtypes: tuple[str, ...]
    ndim: int | None = 1


F32 = Annotated[NDArray[np.float32], Columns(("<f4",))]
F32Matrix = Annotated[NDArray[np.float32], Columns(("<f4",), 2)]
I32 = Annotated[NDArray[np.int32], Columns(("<i4",))]
I32Matrix = Annotated[NDArray[np.int32], Columns(("<i4",), 2)]
I64 = Annotated[NDArray[np.int64], Columns(("<i8",))]
Octets = Annotated[NDArray[np.uint8], Columns(("|u1",))]
Flags = Annotated[NDArray[np.bool_], Columns(("|b1",))]
Masks = Annotated[NDArray[np.bool_], Columns(("|b1",), 2)]
Observation = Annotated[Array, Columns(("<f4", "|u1"), None)]
Weights = Annotated[Array, Columns(("<f4", "<i8"), None)]

T = TypeVar("T")

TAGS: dict[str, type[Any]] = {}
"""The closed union of records that the codec accepts, by tag."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def record(tag: str) -> Callable[[type[T]], type[T]]:
    """Turns a class into a frozen keyword-only dataclass and registers it under `tag`."""

    def decorate(cls: type[T]) -> type[T]:
        made = dataclass(frozen=True, kw_only=True, slots=True, eq=False)(cls)
        if tag in TAGS:
            raise ValueError(f"tag {tag!r} is taken by {TAGS[tag].__name__}: a tag is never reused")
        TAGS[tag] = made
        made.__record_tag__ = tag  # type: ignore[attr-defined]
        return made

    return decorate


def tag_of(value: object) -> str:
    """Returns the tag of a record or record class."""
    return value.__record_tag__  # type: ignore[attr-defined,no-any-return]


# ---------------------------------------------------------------- encoders and decoders

Arrays = list[Array]
Value = Any
"""The value of a field, or the plain MessagePack value that stands for it; its annotation says which."""
Hint = Any
Encode = Callable[[Value, Arrays], Value]
Decode = Callable[[Value, Arrays], Value]

DTYPES: Final = {text: np.dtype(text) for text in ("<f4", "|u1", "|b1", "<i4", "<i8")}

_repr = reprlib.Repr()
_repr.maxstring, _repr.maxother, _repr.maxlist, _repr.maxdict = 60, 200, 8, 8


def shorten(value: Value) -> str:
    """Shortens a received value for an error message, without exceeding the recursion limit."""
    return f"{value:.400}" if isinstance(value, PlainText) else _repr.repr(value)


def encode_record(value: Value, arrays: Arrays) -> dict[str, Value]:
    """Returns the tag and the fields of a record, whose arrays it moves to a list.

    Raises:
        CodecError: a field's annotation does not allow its value.
    """
    encode, _ = _compile_record(value.__class__)
    return {"type": tag_of(value), "body": encode(value, arrays)}


def decode_record(plain: dict[str, Value], arrays: Arrays) -> Value:
    """Returns the record of a tag and fields, each of which is checked.

    Raises:
        CodecError: the tag is unknown, or a field's annotation does not allow its value.
    """
    tag = plain["type"]
    cls: Hint = TAGS.get(tag) if isinstance(tag, str) else None
    if cls is None:
        raise CodecError(got=f"type {shorten(tag)}", expected=f"one of {sorted(TAGS)}", remedy="use the same version")
    try:
        return _compile_record(cls)[1](plain["body"], arrays)
    except FieldError as error:
        raise error.as_error(tag) from None


@cache
def _compile_record(cls: Hint) -> tuple[Encode, Decode]:
    """Compiles the functions that turn a record into a map, and a map into a record whose every field is checked."""
    hints = typing.get_type_hints(cls, include_extras=True)
    parts = {name: _compile(hint) for name, hint in hints.items()}
    required = {one.name for one in fields(cls) if one.default is MISSING and one.default_factory is MISSING}
    hidden = {one.name for one in fields(cls) if not one.repr}

    def encode(value: Value, arrays: Arrays) -> Value:
        return {name: part(getattr(value, name), arrays) for name, (part, _) in parts.items()}

    def decode(body: Value, arrays: Arrays) -> Value:
        if not isinstance(body, dict):
            raise FieldError(body, "a map")
        values: dict[str, Value] = {}
        for name, plain in body.items():
            if name not in parts:
                raise FieldError(PlainText(f"field {name!r:.60}"), f"one of {sorted(parts)}")
            try:
                values[name] = parts[name][1](plain, arrays)
            except FieldError as error:
                raise (error.hidden() if name in hidden else error).within(f".{name}") from None
        if len(values) < len(parts) and (absent := required - values.keys()):
            raise FieldError(PlainText(f"nothing for {sorted(absent)}"), "all fields without a default")
        try:
            return cls(**values)
        except SparringError as error:  # a spec rejects its own values
            raise FieldError(PlainText(str(error)), "a valid record") from error

    return encode, decode


class PlainText(str):
    """PlainText is text that error messages show without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


class FieldError(Exception):
    """A field does not allow its value; the path to the field grows while the error propagates."""

    def __init__(self, got: Value, expected: str) -> None:
        self._got, self._expected, self._path = got, expected, ""
        super().__init__()

    def hidden(self) -> Self:
        """Returns the error without the value, which may be a secret."""
        return type(self)(PlainText("something else"), self._expected)

    def within(self, step: str) -> Self:
        """Prepends a step to the path."""
        self._path = step + self._path
        return self

    def as_error(self, tag: str) -> CodecError:
        """Returns the error for a record with this tag."""
        path = f"{tag}{self._path}"
        return CodecError(got=f"{shorten(self._got)} in {path}", expected=self._expected, remedy="correct the field")


def _compile(hint: Hint) -> tuple[Encode, Decode]:
    """Compiles the functions that encode and decode the values of one annotation."""
    origin: Hint = typing.get_origin(hint)
    args, is_record = typing.get_args(hint), is_dataclass(hint)
    if origin is Annotated:
        return _compile_array(next(one for one in hint.__metadata__ if isinstance(one, Columns)))
    if is_record:
        return _compile_record(hint)
    if origin in (types.UnionType, typing.Union):
        encode, decode = _compile(next(arg for arg in args if arg is not type(None)))
        return (
            lambda value, arrays: None if value is None else encode(value, arrays),
            lambda plain, arrays: None if plain is None else decode(plain, arrays),
        )
    if origin is tuple:
        encode, decode = _compile(args[0])
        return lambda value, arrays: [encode(one, arrays) for one in value], partial(_decode_tuple, decode)
    if origin is dict:
        encode, decode = _compile(args[1])
        read = partial(_decode_dict, decode)
        return lambda value, arrays: {key: encode(one, arrays) for key, one in value.items()}, read
    read = partial(_decode_literal, args) if origin is typing.Literal else partial(_decode_plain, hint)
    return lambda value, _arrays: value, read


def describe(dtype: np.dtype[Any], shape: tuple[int, ...]) -> PlainText:
    """Describes an array: "<f4[2, 3]"."""
    return PlainText(f"{dtype.str}{list(shape)}")


def _compile_array(columns: Columns) -> tuple[Encode, Decode]:
    dtypes = [DTYPES[text] for text in columns.dtypes]  # found in a list by identity; the hash of a dtype takes longer
    ndim = columns.ndim
    rank = "any shape" if ndim is None else f"{ndim} dimension(s)"
    expected = f"an array of {' or '.join(columns.dtypes)} with {rank}"

    def fits(array: Array) -> bool:
        return array.dtype in dtypes and (ndim is None or array.ndim == ndim)

    def encode(value: Value, arrays: Arrays) -> int:
        if not isinstance(value, np.ndarray) or not fits(value):
            got = describe(value.dtype, value.shape) if isinstance(value, np.ndarray) else type(value).__name__
            raise CodecError(got=got, expected=expected, remedy="convert the array before it is sent")
        arrays.append(value if value.flags.c_contiguous else np.ascontiguousarray(value))
        return len(arrays) - 1

    def decode(plain: Value, arrays: Arrays) -> Array:
        if type(plain) is not int or not 0 <= plain < len(arrays):
            raise FieldError(plain, f"an index below {len(arrays)} into arrays")
        array = arrays[plain]
        if not fits(array):
            raise FieldError(describe(array.dtype, array.shape), expected)
        return array

    return encode, decode


def _decode_tuple(item: Decode, plain: Value, arrays: Arrays) -> Value:
    if not isinstance(plain, list):
        raise FieldError(plain, "a list")
    return tuple(_decode_item(item, index, one, arrays) for index, one in enumerate(plain))


def _decode_dict(entry: Decode, plain: Value, arrays: Arrays) -> Value:
    if not isinstance(plain, dict) or not all(isinstance(key, str) for key in plain):
        raise FieldError(plain, "a map with text keys")
    return {key: _decode_item(entry, key, one, arrays) for key, one in plain.items()}


def _decode_item(decode: Decode, key: int | str, plain: Value, arrays: Arrays) -> Value:
    """Decodes a value of a list or map, whose errors name its index or key."""
    try:
        return decode(plain, arrays)
    except FieldError as error:
        raise error.within(f"[{key!r:.40}]") from None


def _decode_literal(allowed: tuple[Value, ...], plain: Value, _arrays: Arrays) -> Value:
    if not isinstance(plain, str) or plain not in allowed:
        raise FieldError(plain, f"one of {allowed}")
    return plain


def _decode_plain(hint: Hint, plain: Value, _arrays: Arrays) -> Value:
    if type(plain) is hint:
        if hint is float and not math.isfinite(plain):
            raise FieldError(plain, "a finite number")
        return plain
    if hint is float and type(plain) is int:
        return float(plain)
    raise FieldError(plain, hint.__name__)
