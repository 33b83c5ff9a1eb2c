"""Checks the sections of writers, whose keys the packages of these bring."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

import pydantic_core
from pydantic import BaseModel, ValidationError, ValidationInfo
from pydantic_core import InitErrorDetails

from sparring.pipeline import plugins
from sparring.pipeline.errors import SettingsError, described, did_you_mean
from sparring.pipeline.files import Json
from sparring.pipeline.monitoring.writers import load, settings_of

PLUGINS: Final = {"plugins": True}
"""Context of a validation that loads packages. The processes of a run do not: none but the writer's own needs them."""


def check_writers(sections: dict[str, Json], info: ValidationInfo) -> dict[str, Json]:
    """Returns the sections as JSON data; an empty one has all defaults.

    Raises:
        ValidationError: a name is unknown, or a section does not fit.
    """
    plain = {name: {} if one is None else json.loads(pydantic_core.to_json(one)) for name, one in sections.items()}
    problems = [problem for name, one in plain.items() for problem in _problems(name, one)] if info.context else []
    if problems:
        raise ValidationError.from_exception_data("writers", problems)
    return plain


def _problems(name: str, section: Json) -> Iterator[InitErrorDetails]:
    known = plugins.names(plugins.WRITERS)
    if name not in known:
        remedy = did_you_mean(name, known) or "install its package, or remove it"
        text = f"got the unknown writer {name!r}; expected one of {', '.join(known)}; {remedy}"
        yield InitErrorDetails(type="value_error", loc=(name,), input=section, ctx={"error": ValueError(text)})
        return
    if section is False:
        return
    if not isinstance(section, dict):
        yield InitErrorDetails(type="model_type", loc=(name,), input=section, ctx={"class_name": "a section"})
        return
    try:
        settings_of(load(name), section)
    except SettingsError:  # `unusable` reports it: a writer never ends a run
        return
    except ValidationError as error:
        for one in error.errors(include_url=False):
            loc, context = (name, *one["loc"]), one.get("ctx", {})
            yield InitErrorDetails(type=one["type"], loc=loc, input=one["input"], ctx=context)
    except Exception as error:  # whatever the validators of a package raise
        text = (
            f"got {described(error)} from settings_model of {name}; expected a ValueError or none; mend its validators"
        )
        yield InitErrorDetails(type="value_error", loc=(name,), input=section, ctx={"error": ValueError(text)})


def section_model(name: str) -> type[BaseModel] | None:
    """Returns what describes the section of a writer; None where there is none of this name that can be loaded."""
    try:
        return load(name).settings_model
    except SettingsError:
        return None


def unusable(name: str) -> Iterator[str]:
    """Yields why a writer would not work here, in words."""
    try:
        lacking = load(name).missing()
    except Exception as error:  # whatever `missing` of a package raises
        lacking = described(error)
    if lacking:
        yield f"{lacking}; without it, the run goes on without this writer"
