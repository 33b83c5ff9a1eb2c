"""Finds simulators and bridges by name, built in or of a plug-in, and parses their options from a command line."""

import contextlib
import difflib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from sparring.pipeline import plugins
from sparring.pipeline.bridges.spaces import Option
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.simulation.game import Game

_TYPES: Final[Mapping[str, type[Option]]] = {"bool": bool, "int": int, "float": float, "str": str}
_ANY: Final = tuple(_TYPES.values())
_SWITCHES: Final = {"true": True, "false": False}

MOST_AREAS: Final = 1_000_000


def names() -> tuple[str, ...]:
    """Returns the names of all simulators and bridges."""
    return plugins.names(plugins.SIMULATORS)


def make(name: str, areas: int, /, **options: Option) -> Game:
    """Returns the simulator `name` with `areas` copies of its environment.

    Args:
        name: one of `names()`.
        areas: number of copies, from 1 to `MOST_AREAS`.
        options: options from `option_types`.

    Raises:
        SettingsError: the name or an option is unknown, an option is missing or impossible, or a package is not
            installed.
    """
    if not 1 <= areas <= MOST_AREAS:
        raise SettingsError(f"got {areas} areas; expected from 1 to {MOST_AREAS:,}; correct the number of areas")
    known, free = option_types(name)
    for option in options:
        if option not in known and not free:
            raise _unknown(f"option {option!r} for {name!r}", option, known)
    if missing := [key for key in required_options(name) if key not in options]:
        raise SettingsError(f"got {name!r} without option {missing[0]!r}; expected it; add --option {missing[0]}=VALUE")
    return _maker(name)(areas=areas, **options)


def parse_options(name: str, texts: Iterable[str]) -> dict[str, Option]:
    """Returns options from `key=value` texts, each in the type that the simulator expects.

    Args:
        name: one of `names()`.
        texts: texts of the command line; a bridge passes unknown keys to the environment, as true or false, whole
            number, number or text, the first that fits; "..." is always a text.

    Raises:
        SettingsError: a text has no `=`, a key is unknown or given twice, or a value has the wrong type.
    """
    known, free = option_types(name)
    options: dict[str, Option] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or key in options or key == "areas":
            raise SettingsError(
                f"got option {text!r}; expected key=value, each key once, and --areas for the number of areas; correct "
                "the command line"
            )
        if key not in known and not free:
            raise _unknown(f"option {key!r} for {name!r}", key, known)
        options[key] = _convert(key, value, known.get(key, _ANY))
    return options


def option_text(value: Option) -> str:
    """Returns an option as a text that `parse_options` reads as the same value."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and (value.startswith('"') or _convert("", value, _ANY) != value):
        return json.dumps(value)
    return str(value)


def option_types(name: str) -> tuple[dict[str, tuple[type[Option], ...]], bool]:
    """Returns the options of a simulator with their possible types, and whether it passes others on.

    Raises:
        SettingsError: the name is unknown.
    """
    parameters = inspect.signature(_maker(name)).parameters
    kinds = {
        key: tuple(_TYPES[word] for word in _written(one.annotation).split(" | ") if word in _TYPES)
        for key, one in parameters.items()
        if one.kind is not one.VAR_KEYWORD and key != "areas"
    }
    return kinds, any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def _written(annotation: type | str) -> str:
    """Returns an annotation as text, which it is already where its module postpones the evaluation."""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def required_options(name: str) -> list[str]:
    """Returns the options without which a simulator cannot be made. Raises as `option_types`."""
    parameters = inspect.signature(_maker(name)).parameters
    return [key for key in option_types(name)[0] if parameters[key].default is inspect.Parameter.empty]


def _maker(name: str) -> Callable[..., Game]:
    if name not in names():
        raise _unknown(f"simulator {name!r}", name, names())
    make: Callable[..., Game] = plugins.load(plugins.SIMULATORS, name)
    return make


def _convert(key: str, value: str, wanted: tuple[type[Option], ...]) -> Option:
    if str in wanted and value.startswith('"'):
        with contextlib.suppress(ValueError):
            return str(json.loads(value))
    for kind in wanted:
        with contextlib.suppress(ValueError, KeyError):
            return _SWITCHES[value.lower()] if kind is bool else kind(value)
    kinds = " or ".join("true or false" if kind is bool else kind.__name__ for kind in wanted)
    raise SettingsError(f"got {value!r} for option {key!r}; expected {kinds}; correct the value")


def _unknown(what: str, word: str, allowed: Iterable[str]) -> SettingsError:
    names = list(allowed)
    near = difflib.get_close_matches(word, names, 1)
    remedy = f"did you mean {near[0]!r}?" if near else "correct the name"
    return SettingsError(f"got {what}; expected one of {', '.join(names) or 'none'}; {remedy}")
