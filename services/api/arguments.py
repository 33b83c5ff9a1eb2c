"""Refuses arguments of a function that have another type than it declares, in words instead of a TypeError."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from pydantic import ConfigDict, ValidationError, validate_call
from pydantic_core import ErrorDetails

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.settings.document import LARGEST_INTEGER, is_text

_P = ParamSpec("_P")
_R = TypeVar("_R")
_STRICT = ConfigDict(arbitrary_types_allowed=True, extra="forbid")
_UNKNOWN = "unexpected_keyword_argument", "unexpected_positional_argument", "extra_forbidden"


def checked(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Returns the function so that it raises SettingsError for arguments which it cannot take."""
    names, called = [*inspect.signature(function).parameters], validate_call(config=_STRICT)(function)

    @functools.wraps(function)
    def call(*args: _P.args, **keywords: _P.kwargs) -> _R:
        for value in (*args, *keywords.values()):
            if isinstance(value, str | Path) and not is_text(str(value)):
                raise SettingsError(f"got {str(value)!r:.100}; expected text in UTF-8 without NUL; correct it")
            if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
                raise SettingsError("got a whole number beyond 2^53; expected a smaller one; correct it")
        try:
            return called(*args, **keywords)
        except ValidationError as error:
            if error.title != function.__name__:  # it is of what the function does
                raise
            problem = _problem(function.__name__, names, error.errors(include_url=False))
        raise SettingsError(problem)

    return call


def _problem(function: str, names: list[str], errors: list[ErrorDetails]) -> str:
    """Returns what is wrong with the first argument that is, of which each alternative of its type has an error."""
    place = errors[0]["loc"][0]
    own = [one for one in errors if one["loc"][0] == place]
    name = names[place] if isinstance(place, int) and place < len(names) else place
    got, kind = f"{own[0]['input']!r:.100}", own[0]["type"]
    if kind == "missing_argument":
        return f"got no {name} for {function}(); expected one; give it"
    if kind in _UNKNOWN:
        named = f"{got} as a further argument" if isinstance(place, int) else f"the argument {place}={got}"
        return f"got {named} for {function}(); expected those of its documentation; see help(sparring.{function})"
    wanted = " or ".join(dict.fromkeys(one["msg"].removeprefix("Input should be ") for one in own))
    return f"got {got} as {name}; expected {wanted}; correct what {function}() is given"
