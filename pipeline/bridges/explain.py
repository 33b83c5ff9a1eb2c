"""Explains in words what an environment or a plug-in has done wrong, for its author."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Concatenate, Final, ParamSpec, Protocol, TypeVar

import numpy as np

import sparring
from sparring.pipeline import plugins
from sparring.pipeline.errors import NOTICE, ExplainedError, SparringError, described, did_you_mean, shortened
from sparring.pipeline.specs import SpecError

if TYPE_CHECKING:
    from gymnasium import Space

    from sparring.pipeline.bridges.spaces import Value

_LARGEST: Final = float(np.finfo(np.float32).max)
_PARTS: Final = {
    "reset": "2: observation, info",
    "step": "5: observation, reward, terminated, truncated, info",
}
"""What methods of a Gymnasium environment return."""
_ALIKE: Final = 0.85
"""How alike two words are, from 0 to 1, of which one is hardly another name."""
_OWN: Final = str(Path(sparring.__file__).parent)
_LIBRARIES: Final = (sysconfig.get_path("stdlib"), "<frozen", "<string>")  # which is what dataclasses generate
_API: Final = ("/gymnasium/", "/pettingzoo/")
_BASES: Final = ("/gymnasium/core.py", "/gymnasium/vector/vector_env.py", "/pettingzoo/utils/env.py")
"""Modules of classes whose methods do nothing."""


def shown(value: Value) -> str:
    """Returns what a value of an environment is, in a few words."""
    if isinstance(value, np.ndarray):
        is_masked = isinstance(value, np.ma.MaskedArray)
        ranged = value.size and value.dtype.kind in "buif" and not is_masked
        wrong = 0 if not ranged else int(np.count_nonzero(~np.isfinite(value)))
        values = f" with values from {value.min():g} to {value.max():g}" if ranged and not wrong else ""
        values = f" with {wrong} that are NaN or infinite" if wrong else values
        return f"{'a masked' if is_masked else 'an'} array {value.shape} of {value.dtype}{values}"
    if isinstance(value, Mapping):
        return f"a dict with the keys {', '.join(map(str, value)) or '(none)'}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(type(one).__name__ for one in value[:6])})"
    text = str(value) if isinstance(value, np.generic) else repr(value)
    return f"{text[:80]} ({type(value).__name__})"


class NotFinite(ExplainedError):
    """An environment has returned NaN or infinity, as one whose physics explodes may do from time to time."""


def not_finite(value: Value, what: str) -> NotFinite:
    """Returns the error of a value that is NaN or infinite, or holds such numbers; `what` says whose."""
    remedy = "find where the environment divides by zero or overflows"
    return NotFinite(got=f"{shown(value)} as {what}", expected="finite numbers", remedy=remedy)


def number(reward: Value, area: int, agent: str = "") -> float:
    """Returns a reward as a number; `area` and `agent` are for messages.

    Raises:
        SpecError: it is no number.
        NotFinite: it is NaN, infinite, or too large for 32 bits.
    """
    try:
        if isinstance(reward, (str, bytes)):
            raise TypeError("text")  # which float() would read
        found = float(reward)
    except OverflowError:
        found = math.inf
    except (TypeError, ValueError) as error:
        raise _wrong(reward, _part("reward", area, agent), "a number") from error
    if not math.isfinite(found):
        raise not_finite(reward, _part("reward", area, agent))
    if abs(found) > _LARGEST:
        got, expected = (
            f"{shown(reward)} as {_part('reward', area, agent)}",
            f"at most {_LARGEST:.2g}, as 32 bits hold it",
        )
        raise NotFinite(got=got, expected=expected, remedy="find where the environment overflows")
    return found


def flag(value: Value, name: str, area: int, agent: str = "") -> bool:
    """Returns whether an episode has ended; `name`, `area` and `agent` are for messages.

    Raises:
        SpecError: it is neither true nor false.
    """
    if value is True or value is False:
        return bool(value)
    if np.size(value) != 1 or np.asarray(value).dtype.kind not in "biuf" or np.asarray(value).item() not in (0, 1):
        raise _wrong(value, _part(name, area, agent), "True or False")
    return bool(np.asarray(value).item())  # as a list of one element is true whatever it holds


def _wrong(value: Value, part: str, expected: str) -> SpecError:
    return SpecError(got=f"{shown(value)} as {part}", expected=expected, remedy="correct what step() returns")


def _part(name: str, area: int, agent: str) -> str:
    return f"{name} of {f'agent {agent!r} in ' if agent else ''}area {area}"


def attribute(env: Value, name: str, *, call: str = "__init__") -> Value:
    """Returns an attribute of an environment; `call` is the method that sets it.

    Raises:
        SpecError: it has none of this name.
    """
    if env is None:
        got, expected = "None in place of an environment", "the environment"
        raise SpecError(got=got, expected=expected, remedy="return it from the function that makes it")
    if isinstance(env, type):
        got, expected = f"the class {env.__name__} in place of an environment", "an environment"
        raise SpecError(got=got, expected=expected, remedy=f"return {env.__name__}() from the function that makes it")
    try:
        return getattr(env, name)
    except AttributeError as error:
        if place_of(error):  # of a property
            raise
        owner = type(getattr(env, "unwrapped", env)).__name__
        raise SpecError(got=f"{owner} without {name}", expected="one", remedy=f"set it in {call}()") from error


class _Authored(Protocol):
    """A game of an environment that is another author's work.

    Attributes:
        env: the environment; one of several.
    """

    env: Value


_A = TypeVar("_A", bound=_Authored)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def naming_code(method: Callable[Concatenate[_A, _P], _R]) -> Callable[Concatenate[_A, _P], _R]:
    """Adds to errors of what an environment has returned where its method of the same name is.

    A method that does not take the arguments of its call is such an error, too.
    """
    call = method.__name__

    @functools.wraps(method)
    def play(game: _A, /, *args: _P.args, **keywords: _P.kwargs) -> _R:
        owner = type(getattr(game.env, "unwrapped", game.env))
        try:
            return method(game, *args, **keywords)
        except NotImplementedError as missing:
            if place_of(missing):
                raise
            raise _undefined(owner, traceback.extract_tb(missing.__traceback__)[-1].name) from missing
        except (SpecError, NotFinite, TypeError, ValueError) as caught:
            error = caught if isinstance(caught, (SpecError, NotFinite)) else _uncallable(call, caught)
            # A step may begin the next episode, or ask for the next turn.
            wrong = next((one for one in ("reset", "last") if f"{one}()" in error.got), call)
            code = getattr(getattr(owner, wrong, None), "__code__", None)
            if code is not None and code.co_filename.endswith(_BASES) and "(NoneType) from" in error.got:
                raise _undefined(owner, wrong) from caught
            if code is None or not _is_authors(code.co_filename):
                raise
            remedy = f"{error.remedy} ({wrong}() of {owner.__name__}, {code.co_filename}:{code.co_firstlineno})"
            raise type(error)(got=error.got, expected=error.expected, remedy=remedy) from caught

    return play


def _undefined(owner: type, method: str) -> SpecError:
    """Returns the error of a method that an environment only inherits from the base class of its library."""
    return SpecError(got=f"{owner.__name__} without {method}()", expected="one", remedy="define it")


def _uncallable(call: str, error: Exception) -> SpecError:
    """Returns the error of a method that does not take the arguments of its call, or returns what no wrapper unpacks.

    Raises:
        Exception: the error is another one.
    """
    last = traceback.extract_tb(error.__traceback__)[-1]
    if "unpack" in str(error) and "/gymnasium/" in last.filename and last.name in _PARTS:
        got, expected = f"what {last.name}() returns: {error}", f"a tuple of {_PARTS[last.name]}"
        return SpecError(got=got, expected=expected, remedy="return all of them")
    if not isinstance(error, TypeError) or f"{call}() " not in str(error) or place_of(error):
        raise error
    arguments = {"reset": "seed=None, options=None", "step": "action"}[call]
    return SpecError(got=str(error), expected=f"def {call}(self, {arguments})", remedy="correct its arguments")


def meant(options: Iterable[str], bridge: Callable[..., object]) -> str | None:
    """Returns the question whether an option of a bridge itself is meant by one of those of an environment."""
    known = inspect.signature(bridge).parameters
    return next((hint for one in options if (hint := did_you_mean(one, known)) is not None), None)


def note_meant(options: Iterable[str], bridge: Callable[..., object]) -> None:
    """Notes on standard error which options, that an environment has taken, look like those of the bridge itself."""
    known = inspect.signature(bridge).parameters
    for one in options:
        for near in difflib.get_close_matches(one, known, n=1, cutoff=_ALIKE):
            sys.stderr.write(f"{NOTICE}the option {one} is given to the environment; did you mean {near}?\n")


def wrong_value(name: str, value: Value, space: Space[Value], whose: str | None, *, is_found: bool) -> SpecError:
    """Returns the error of an observation that cannot be read, or of the `value` in which it is not found.

    Args:
        name: of the observation.
        value: in its place.
        space: of the observation of one agent.
        whose: the agent, for the message; None for an array with a row for each area.
        is_found: False where `value` lacks it.
    """
    return SpecError(
        got=f"{shown(value)} {'as' if is_found else 'without the'} observation {name!r}{whose or ''}",
        expected=f"a value of its space {space}" if whose is not None else f"a row for each area, each of {space}",
        remedy="correct what the environment returns, or its observation_space",
    )


def returned(call: str, result: Value, names: Sequence[str]) -> Value:
    """Returns what `reset` or `step` of an environment has returned.

    Raises:
        SpecError: it is no tuple of the parts `names`, or its info is no dict.
    """
    if isinstance(result, (tuple, list)) and len(result) == len(names):
        if names[-1] == "info" and not isinstance(result[-1], Mapping):
            got = f"{shown(result[-1])} as info from {call}()"
            raise SpecError(got=got, expected="a dict", remedy="return {} where it holds nothing")
        return result
    raise SpecError(
        got=f"{shown(result)} from {call}()",
        expected=f"a tuple of {len(names)}: {', '.join(names)}",
        remedy="return all of them"
        + (" (an environment for gym before 0.26 needs its step and reset changed)" if names[-1] == "info" else ""),
    )


def say(text: str) -> None:
    """Writes to standard error, also where the author's code has set `sys.stderr` to None."""
    stream = sys.stderr or sys.__stderr__
    if stream is not None:
        stream.write(text)
        stream.flush()


def place_of(error: BaseException) -> str:
    """Returns the last file and line of the author's own code in an error, or its cause; "" where there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_authors(frame.filename)]
    if frames:
        return f" ({frames[-1].filename}:{frames[-1].lineno})"
    return "" if error.__cause__ is None else place_of(error.__cause__)


def frames_of_author(thread: int) -> list[FrameType]:
    """Returns the frames of the author's own code that a thread is in, the innermost first."""
    present = sys._current_frames().get(thread)  # noqa: SLF001 (of CPython and PyPy)
    stack = [] if present is None else [frame for frame, _ in traceback.walk_stack(present)]
    return [frame for frame in stack if _is_authors(frame.f_code.co_filename)]


def described_with_place(error: BaseException) -> str:
    """Returns a failure in words, as one line; where the author's code has raised it, that place is in it."""
    place = "" if isinstance(error, SparringError) else place_of(error)
    return " ".join(described(error).splitlines()) + place


def traceback_of(error: BaseException) -> str:
    """Returns the traceback of an error in an environment from its author's code on.

    Its last line is that which a run shows: the whole error, of a group the first one, however many lines its text has,
    without its notes, and its place.

    The whole traceback is returned where neither that code nor its library is in it.
    """
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
        error = error.__cause__  # which Python does not let through a generator or coroutine
    if isinstance(error, SyntaxError):  # it names its place itself, and no code of the author has run
        lines = "".join(traceback.format_exception_only(error)).rstrip("\n")
        return f"{lines} ({error.filename}:{error.lineno})\n"
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
    parts, first = list(whole.format()), error
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    named = traceback.format_exception_only(first)[0]
    if parts[-1] == named:  # it is neither that of a group nor followed by notes
        parts.pop()
    return f"{''.join(parts)}{shortened(' '.join(named.splitlines()))}{place_of(first) or place_of(error)}\n"


def _is_pythons(module: ModuleType) -> bool:
    """Returns whether a module is one of Python's own, which hides any other of its name."""
    file = getattr(module, "__file__", None) or ""
    within = file.startswith(_LIBRARIES[0]) and "-packages/" not in file  # `test`, which the names lack
    return within or module.__name__.partition(".")[0] in sys.stdlib_module_names


def hidden_by(module: ModuleType) -> str:
    """Returns the remedy where a module hides one of the author's that has its name; "" where it hides none."""
    name, file = module.__name__.partition(".")[0], getattr(module, "__file__", None) or ""
    if _is_pythons(module):
        return f"rename the module of yours, which Python's own {name} hides"
    own = [folder / one for folder in _folders() for one in (name, f"{name}.py") if (folder / one).exists()]
    is_other = bool(file and own) and not file.startswith(str(own[0].parent))
    return f"rename {own[0]}, which {file} hides" if is_other else ""


def _folders() -> list[Path]:
    """Returns the folders in which modules are searched after the installed ones."""
    installed = (_OWN, sys.prefix, sys.base_prefix)
    found = [Path(one).resolve() for one in sys.path if one and not one.startswith(installed)]
    return [one for one in found if str(one) not in _OWN]


def not_imported(module: str, error: ImportError) -> tuple[str, str]:
    """Returns what is expected in place of a module that cannot be imported, and the remedy."""
    cause = error if error.name is not None or not isinstance(error.__cause__, ImportError) else error.__cause__
    if "relative import" in str(cause):
        remedy = "write `import NAME` there, or name this module with its package, as PACKAGE.MODULE"
        return "an import that a module without a package can have", remedy
    if cause.name is not None and not f"{module}.".startswith(f"{cause.name}."):
        name = cause.name.partition(".")[0]
        remedy = f"install {name}, correct the import, or give the folder that has {name} as pipeline.python_path"
        if name == "gym":
            remedy = "write import gymnasium as gym"
        return "a module whose imports are installed", remedy
    if "is not a package" in str(cause):
        above = module.rpartition(".")[0]
        return "a module", f"write {above}, the module, in place of {module}"
    first, here = module.partition(".")[0], Path.cwd()
    has_it = any((here / one).exists() for one in (first, f"{first}.py"))
    remedy = "correct the name, or write pipeline.python_path: [FOLDER] with the folder that has it"
    if has_it:
        remedy = f"write pipeline.python_path: [{here}], which has {first}"
    listed = ", ".join(f"{one}{'' if one.is_dir() else ' (missing)'}" for one in _folders())
    searched = f" (searched: {listed})" if listed else ""
    return (
        f"a module that is installed, beside the configuration, or in pipeline.python_path{searched}",
        f"{remedy} (without a configuration: --python-path)",
    )


def _is_authors(filename: str) -> bool:
    folder, _, module = filename.rpartition("-packages/")
    if folder:
        return re.split(r"[/.]", module)[0] in plugins.modules()
    return not filename.startswith((_OWN, *_LIBRARIES))
