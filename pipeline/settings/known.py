"""Lists the keys of each section, read from the models."""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Final, Union, get_args, get_origin

from pydantic import BaseModel

from sparring.pipeline.settings.model import Settings
from sparring.pipeline.settings.problems import Path

_ALIKE: Final = frozenset({"default_settings"})
"""Sections that have the keys of another section, which lists them."""


def known_keys(path: Path) -> list[str]:
    """Returns the valid keys of the mapping at `path`; none if any key is valid.

    Args:
        path: path of a mapping, in names of the models (tags of unions are skipped).
    """
    annotations: list[Any] = [Settings]
    for step in path:
        annotations = [inner for annotation in annotations for inner in _inside(annotation, step)] or annotations
    found = [annotation for annotation in annotations if _is_model(annotation)]
    keys = {key: None for model in found for key in model.model_fields}
    return list(keys)


@cache
def sections_of(key: str) -> tuple[str, ...]:
    """Returns the sections, dotted, that have a key of this name; none if no model has it."""
    return tuple(dict.fromkeys(section for section, name in all_keys() if name == key))


@cache
def all_keys() -> tuple[tuple[str, str], ...]:
    """Returns every (section, key) of a configuration, with `*` for a free name."""
    keys = ((section, key) for section, model in models() for key in model.model_fields)
    return tuple(dict.fromkeys(keys))


@cache
def models() -> tuple[tuple[str, type[BaseModel]], ...]:
    """Returns every section of a configuration with its model; once for each model that it may have."""
    return tuple(_sections(Settings, ""))


def _sections(model: type[BaseModel], section: str) -> Iterator[tuple[str, type[BaseModel]]]:
    yield section, model
    for key, info in model.model_fields.items():
        for inner, star in () if key in _ALIKE else _leaves(info.annotation):
            yield from _sections(inner, f"{section}.{key}".removeprefix(".") + star)


def _leaves(annotation: Any, star: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    if _is_model(annotation):
        yield annotation, star
        return
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        arguments = arguments[:1]
    elif origin is dict:
        arguments, star = arguments[1:], star + ".*"
    elif origin is tuple:
        star += "[]"
    for argument in arguments:
        if argument is not Ellipsis:
            yield from _leaves(argument, star)


def _inside(annotation: Any, step: str | int) -> list[Any]:
    """Returns the annotations of the values at `step` of a value with that annotation."""
    if _is_model(annotation):
        info = annotation.model_fields.get(str(step))
        return [] if info is None else list(_members(info.annotation))
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is dict:
        return list(_members(arguments[1]))
    if origin is tuple and isinstance(step, int):
        return list(_members(arguments[0]))
    return []


def _members(annotation: Any) -> Iterator[Any]:
    """Yields the members of a union, or the annotation itself."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _members(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
