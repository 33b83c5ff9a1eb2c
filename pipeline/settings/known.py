"""Lists the keys of each section, read from the models."""

from collections.abc import Iterator
from functools import cache
from typing import Annotated, get_args, get_origin

from pydantic import BaseModel

from sparring.pipeline.settings.model import Settings
from sparring.pipeline.settings.problems import Path


def known_keys(path: Path) -> list[str]:
    """Returns the valid keys of the mapping at `path`; none if any key is valid."""
    if path[:1] == ("default_settings",):  # whose keys are those of a behavior
        path = ("behaviors", "", *path[1:])
    return list(dict.fromkeys(key for section, key in all_keys() if _is_at(path, section)))


def _is_at(path: Path, section: str) -> bool:
    steps = section.replace("[]", ".[]").split(".") if section else []
    return len(path) == len(steps) and all(
        step == "[]" if isinstance(key, int) else step in (key, "*") for key, step in zip(path, steps, strict=True)
    )


@cache
def sections_of(key: str) -> tuple[str, ...]:
    """Returns the sections, dotted, that have a key of this name; none if no model has it."""
    return tuple(dict.fromkeys(section for section, name in all_keys() if name == key))


@cache
def all_keys() -> tuple[tuple[str, str], ...]:
    """Returns every (section, key) of a configuration, with `*` for a free name and `[]` for a number."""
    keys = ((section, key) for section, model in models() for key in model.model_fields)
    return tuple(dict.fromkeys(keys))


@cache
def models() -> tuple[tuple[str, type[BaseModel]], ...]:
    """Returns every section of a configuration with its model; once for each model that it may have."""
    return tuple(_sections(Settings, ""))


def _sections(annotation: object, section: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yields the sections below a value with this annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield section, annotation
        for key, info in annotation.model_fields.items():
            if key != "default_settings":
                yield from _sections(info.annotation, f"{section}.{key}".removeprefix("."))
        return
    origin, arguments = get_origin(annotation), get_args(annotation)
    end = ".*" if origin is dict else "[]" if origin is tuple else ""
    for argument in arguments[:1] if origin is Annotated else arguments:
        yield from _sections(argument, section + end)
