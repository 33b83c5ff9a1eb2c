"""Compiles encoders and decoders of records from the annotations of their fields, once per record class.

An encoder turns a record into a map and moves its arrays to a list; a decoder does the reverse and checks every field.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np

from sparring.pipeline.errors import CodecError, SparringError
from sparring.pipeline.messages.schema import Columns
from sparring.pipeline.specs import Array

Arrays = list[Array]
Value = Any
"""The value of a field, or the plain MessagePack value that stands for it; its annotation says which."""
Hint = Any
"""The annotation of a field."""
Encode = Callable[[Value, Arrays], Value]
Decode = Callable[[Value, Arrays], Value]

DTYPES: Final = {text: np.dtype(text) for text in ("<f4", "|u1", "|b1", "<i4", "<i8")}

_repr = reprlib.Repr()
_repr.maxstring, _repr.maxother, _repr.maxlist, _repr.maxdict = 60, 200, 8, 8


def shorten(value: Value) -> str:
    """Shortens a received value for an error message, without exceeding the recursion limit."""
    return f"{value:.400}" if isinstance(value, PlainText) else _repr.repr(value)


@cache
def compile_record(cls: Hint) -> tuple[Encode, Decode]:
    """Compiles the functions that turn a record into a map, and a map into a record whose every field is checked."""
    hints = typing.get_type_hints(cls, include_extras=True)
    parts = {name: _compile(hint) for name, hint in hints.items()}
    decoders = {name: decode for name, (_, decode) in parts.items()}
    return _encode_record([(name, encode) for name, (encode, _) in parts.items()]), _decode_record(cls, decoders)


def _encode_record(parts: list[tuple[str, Encode]]) -> Encode:
    return lambda value, arrays: {name: part(getattr(value, name), arrays) for name, part in parts}


def _decode_record(cls: Hint, parts: dict[str, Decode]) -> Decode:
    required = {
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    hidden = {field.name for field in dataclasses.fields(cls) if not field.repr}

    def run(body: Value, arrays: Arrays) -> Value:
        if not isinstance(body, dict):
            raise FieldError(body, "a map")
        values: dict[str, Value] = {}
        name = ""
        try:
            for name, plain in body.items():
                values[name] = parts[name](plain, arrays)
        except KeyError:
            raise FieldError(PlainText(f"field {name!r:.60}"), f"one of {sorted(parts)}") from None
        except FieldError as error:
            raise (error.hidden() if name in hidden else error).within(f".{name}") from None
        if len(values) < len(parts) and (missing := required - values.keys()):
            raise FieldError(PlainText(f"nothing for {sorted(missing)}"), "all fields without a default")
        try:
            return cls(**values)
        except SparringError as error:  # a spec rejects its own values
            raise FieldError(PlainText(str(error)), "a valid record") from error

    return run


class PlainText(str):
    """PlainText is text that error messages show without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


class FieldError(Exception):
    """A field does not allow its value; the path to the field grows while the error propagates."""

    def __init__(self, got: Value, expected: str) -> None:
        self._got, self._expected, self._path = got, expected, ""
        super().__init__()

    def hidden(self) -> FieldError:
        """Returns the error without the value, which may be a secret."""
        return FieldError(PlainText("something else"), self._expected)

    def within(self, step: str) -> FieldError:
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
    args, is_record = typing.get_args(hint), dataclasses.is_dataclass(hint)
    if origin is typing.Annotated:
        columns = next(one for one in hint.__metadata__ if isinstance(one, Columns))
        return _encode_array(columns), _decode_array(columns)
    if is_record:
        return compile_record(hint)
    if origin in (types.UnionType, typing.Union):
        encode, decode = _compile(next(arg for arg in args if arg is not type(None)))
        return (
            lambda value, arrays: None if value is None else encode(value, arrays),
            lambda plain, arrays: None if plain is None else decode(plain, arrays),
        )
    if origin is tuple:
        encode, decode = _compile(args[0])
        return lambda value, arrays: [encode(one, arrays) for one in value], _decode_tuple(decode)
    if origin is dict:
        encode, decode = _compile(args[1])
        return lambda value, arrays: {key: encode(one, arrays) for key, one in value.items()}, _decode_dict(decode)
    return lambda value, _arrays: value, _decode_literal(args) if origin is typing.Literal else _decode_plain(hint)


def _encode_array(columns: Columns) -> Encode:
    dtypes = {DTYPES[text] for text in columns.dtypes}
    ndim = columns.ndim

    def run(value: Value, arrays: Arrays) -> int:
        if not isinstance(value, np.ndarray) or value.dtype not in dtypes or (ndim is not None and value.ndim != ndim):
            got = f"{value.dtype.str}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
            raise CodecError(got=got, expected=_expected(columns), remedy="convert the array before it is sent")
        arrays.append(value if value.flags.c_contiguous else np.ascontiguousarray(value))
        return len(arrays) - 1

    return run


def _decode_array(columns: Columns) -> Decode:
    dtypes = {DTYPES[text] for text in columns.dtypes}
    ndim = columns.ndim

    def run(plain: Value, arrays: Arrays) -> Array:
        if type(plain) is not int or not 0 <= plain < len(arrays):
            raise FieldError(plain, f"an index below {len(arrays)} into arrays")
        array = arrays[plain]
        if array.dtype not in dtypes or (ndim is not None and array.ndim != ndim):
            raise FieldError(PlainText(f"{array.dtype.str}{list(array.shape)}"), _expected(columns))
        return array

    return run


def _decode_tuple(item: Decode) -> Decode:
    def run(plain: Value, arrays: Arrays) -> Value:
        if not isinstance(plain, list):
            raise FieldError(plain, "a list")
        values: list[Value] = []
        try:
            for one in plain:
                values.append(item(one, arrays))  # noqa: PERF401 (its length is the index of the error)
        except FieldError as error:
            raise error.within(f"[{len(values)}]") from None
        return tuple(values)

    return run


def _decode_dict(entry: Decode) -> Decode:
    def run(plain: Value, arrays: Arrays) -> Value:
        if not isinstance(plain, dict) or not all(isinstance(key, str) for key in plain):
            raise FieldError(plain, "a map with text keys")
        values: dict[str, Value] = {}
        key = ""
        try:
            for key, one in plain.items():
                values[key] = entry(one, arrays)
        except FieldError as error:
            raise error.within(f"[{key!r:.40}]") from None
        return values

    return run


def _decode_literal(allowed: tuple[Value, ...]) -> Decode:
    def run(plain: Value, _arrays: Arrays) -> Value:
        if not isinstance(plain, str) or plain not in allowed:
            raise FieldError(plain, f"one of {allowed}")
        return plain

    return run


def _decode_plain(hint: Hint) -> Decode:
    def run(plain: Value, _arrays: Arrays) -> Value:
        if type(plain) is hint:
            if hint is float and not math.isfinite(plain):
                raise FieldError(plain, "a finite number")
            return plain
        if hint is float and type(plain) is int:
            return float(plain)
        raise FieldError(plain, hint.__name__)

    return run


def _expected(columns: Columns) -> str:
    rank = "any shape" if columns.ndim is None else f"{columns.ndim} dimension(s)"
    return f"an array of {' or '.join(columns.dtypes)} with {rank}"
