"""Explains in words what an environment has done wrong, for its author."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

import sparring
from sparring.pipeline.specs import SpecError

if TYPE_CHECKING:
    from gymnasium import Space

    from sparring.pipeline.bridges.spaces import Value

_OWN: Final = str(Path(sparring.__file__).parent)
_LIBRARIES: Final = (sysconfig.get_path("stdlib"), "<frozen")
_API: Final = ("/gymnasium/", "/pettingzoo/")


def shown(value: Value) -> str:
    """Returns what a value of an environment is, in a few words."""
    if isinstance(value, np.ndarray):
        ranged = value.size and value.dtype.kind in "buif"
        values = f" with values from {value.min():g} to {value.max():g}" if ranged else ""
        return f"an array {value.shape} of {value.dtype}{values}"
    if isinstance(value, Mapping):
        return f"a dict with the keys {', '.join(map(str, value)) or '(none)'}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(type(one).__name__ for one in value[:6])})"
    return f"{repr(value)[:80]} ({type(value).__name__})"


def wrong_value(name: str, value: Value, space: Space[Value], *, is_found: bool) -> SpecError:
    """Returns the error of an observation that cannot be read, or of the `value` in which it is not found."""
    return SpecError(
        got=f"{shown(value)} {'as' if is_found else 'without the'} observation {name!r}",
        expected=f"a value of its space {space}",
        remedy="correct what the environment returns, or its observation_space",
    )


def returned(call: str, result: Value, names: Sequence[str]) -> Value:
    """Returns what `reset` or `step` of an environment has returned.

    Raises:
        SpecError: it is no tuple of the parts `names`.
    """
    if isinstance(result, (tuple, list)) and len(result) == len(names):
        return result
    raise SpecError(
        got=f"{shown(result)} from {call}()",
        expected=f"a tuple of {len(names)}: {', '.join(names)}",
        remedy="return all of them (an environment for gym before 0.26 needs its step and reset changed)",
    )


def place_of(error: BaseException) -> str:
    """Returns the last file and line of the author's own code in an error, or its cause; "" where there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_authors(frame.filename)]
    if frames:
        return f" ({frames[-1].filename}:{frames[-1].lineno})"
    return "" if error.__cause__ is None else place_of(error.__cause__)


def traceback_of(error: BaseException) -> str:
    """Returns the traceback of an error in an environment from its author's code on, whose place the last line names.

    The whole traceback is returned where neither that code nor its library is in it.
    """
    if isinstance(error, SyntaxError):  # it names its place itself, and no code of the author has run
        return "".join(traceback.format_exception_only(error))
    whole = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = whole
    while part is not None:
        files = [frame.filename for frame in part.stack]
        begins = [index for index, file in enumerate(files) if _is_authors(file)]
        begins += [index for index, file in enumerate(files) if any(folder in file for folder in _API)]
        if begins:
            kept = [frame for frame in part.stack[begins[0] :] if not frame.filename.startswith(_OWN)]
            part.stack = traceback.StackSummary.from_list(kept)
        part = part.__cause__ or part.__context__
    return "".join(whole.format()).rstrip() + f"{place_of(error)}\n"


def _is_authors(filename: str) -> bool:
    return not filename.startswith((_OWN, *_LIBRARIES)) and "-packages" not in filename
