"""Finds what installed packages offer under an entry point; what is built in is registered in the same way.

A package adds to a group in its `pyproject.toml`:

    [project.entry-points."sparring.simulators"]
    corridor = "corridor.game:make"
"""

from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from sparring.pipeline.errors import SettingsError

SIMULATORS: Final = "sparring.simulators"
"""Functions or classes that make a `sparring.pipeline.simulation.Game`: they take `areas` and options by keyword."""
_OWN: Final = "sparring"


@cache
def names(group: str) -> tuple[str, ...]:
    """Returns the names in a group, those of this package first.

    Raises:
        SettingsError: this package is not installed, or by an older version.
    """
    found = tuple(_found(group))
    if not found:
        raise SettingsError(
            f"got an installation without {group}; expected those of this version; install it anew with scripts/install"
        )
    return found


@cache
def load(group: str, name: str) -> Callable[..., Any]:
    """Imports what is registered under one of the `names`.

    Raises:
        SettingsError: it cannot be imported, or two packages have registered the name.
    """
    first, *others = _found(group)[name]
    if others:
        owners = ", ".join(sorted({_package(one) for one in (first, *others)}))
        raise SettingsError(f"got {name!r} of {owners} in {group}; expected one of them; uninstall the others")
    try:
        found: Callable[..., Any] = first.load()
    except Exception as error:  # whatever the import of a foreign package raises
        raise SettingsError(
            f"got {name!r} of {_package(first)}, whose {first.value} cannot be imported "
            f"({type(error).__name__}: {error}); expected a working package; mend or uninstall it"
        ) from error
    return found


def _found(group: str) -> dict[str, list[EntryPoint]]:
    """Returns the entry points by name; a package that is found twice, as an editable one may be, counts once."""
    ordered = sorted(entry_points(group=group), key=lambda one: one.dist is None or one.dist.name != _OWN)
    found: dict[str, dict[tuple[str, str], EntryPoint]] = {}
    for one in ordered:
        found.setdefault(one.name, {})[_package(one), one.value] = one
    return {name: list(same.values()) for name, same in found.items()}


def _package(one: EntryPoint) -> str:
    return "an unknown package" if one.dist is None else f"the package {one.dist.name} {one.dist.version}"
