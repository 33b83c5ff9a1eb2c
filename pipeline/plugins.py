"""Finds what installed packages offer under an entry point; what is built in is registered in the same way.

A package adds to a group in its `pyproject.toml`:

    [project.entry-points."sparring.simulators"]
    corridor = "corridor.game:make"

But for simulators and writers, a plug-in is a section of the configuration: a pydantic model whose fields are the
section's keys, with a method that builds what they configure. Every process reads the configuration, so the module
of a section imports libraries like torch only in that method.
"""

from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from sparring.pipeline.errors import SettingsError, described, did_you_mean

SIMULATORS: Final = "sparring.simulators"
"""Functions or classes that make a `sparring.pipeline.simulation.Game`: they take `areas` and options by keyword."""
TRAINERS: Final = "sparring.trainers"
"""Subclasses of `sparring.pipeline.learning.settings.TrainerHyperparameters`, by `trainer_type`."""
REWARD_SIGNALS: Final = "sparring.reward_signals"
"""Subclasses of `sparring.pipeline.learning.settings.SignalSettings`, by the key below `reward_signals`."""
ENCODERS: Final = "sparring.encoders"
"""Subclasses of `sparring.pipeline.networks.settings.EncoderSettings`, by `vis_encode_type` or `encoders.*.type`."""
OPPONENTS: Final = "sparring.opponents"
"""Subclasses of `sparring.pipeline.coordination.settings.OpponentSampling`, by `opponent_sampling`."""
WRITERS: Final = "sparring.writers"
"""Subclasses of `sparring.pipeline.monitoring.writers.Writer`."""
_BASES: Final = {
    TRAINERS: "sparring.pipeline.learning.settings.TrainerHyperparameters",
    REWARD_SIGNALS: "sparring.pipeline.learning.settings.SignalSettings",
    ENCODERS: "sparring.pipeline.networks.settings.EncoderSettings",
    OPPONENTS: "sparring.pipeline.coordination.settings.OpponentSampling",
    WRITERS: "sparring.pipeline.monitoring.writers.Writer",
}
"""The class that each plug-in of a group is a subclass of, by name: this module imports none of them."""
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
def load(group: str, name: str) -> Any:
    """Imports what is registered under a name.

    Raises:
        SettingsError: the name is unknown, it cannot be imported or is something else, or two packages have registered
            it.
    """
    if name not in names(group):
        hint = did_you_mean(name, names(group)) or f"correct it, or install the package that registers it under {group}"
        raise SettingsError(f"got {name!r}; expected one of {', '.join(names(group))}; {hint}")
    first, *others = _found(group)[name]
    if others:
        owners = ", ".join(sorted({_package(one) for one in (first, *others)}))
        raise SettingsError(f"got {name!r} of {owners} in {group}; expected one of them; uninstall the others")
    try:
        found = first.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the import of a foreign package raises
        raise SettingsError(
            f"got {name!r} of {_package(first)}, whose {first.value} cannot be imported "
            f"({described(error)}); expected a working package; mend or uninstall it"
        ) from error
    base = _BASES.get(group)
    above = [f"{one.__module__}.{one.__qualname__}" for one in getattr(found, "__mro__", ())]
    if not callable(found) or (base is not None and base not in above):
        expected = "a function or a class" if base is None else f"a subclass of {base}"
        raise SettingsError(
            f"got {name!r} of {_package(first)}, whose {first.value} is {found!r:.80}; expected {expected}; mend or "
            "uninstall the package"
        )
    return found


def working(group: str) -> Iterator[tuple[str, Any]]:
    """Yields the names in a group with what is registered, without what cannot be loaded, which ends no run."""
    for name in names(group):
        try:
            yield name, load(group, name)
        except SettingsError:
            continue


def origin(group: str, name: str) -> str:
    """Returns the name and the version of the package that registers a name."""
    return _package(_found(group)[name][0])


@cache
def modules() -> frozenset[str]:
    """Returns the top-level modules of the packages that register something, without this one."""
    return frozenset(
        one.module.partition(".")[0]
        for group in (SIMULATORS, TRAINERS, REWARD_SIGNALS, ENCODERS, OPPONENTS, WRITERS)
        for one in _installed().select(group=group)
        if one.dist is None or one.dist.name != _OWN
    )


@cache
def _installed() -> Any:  # a class that depends on the version of Python
    """Returns all entry points: reading the metadata of all packages takes as long for one group as for all."""
    return entry_points()


@cache
def _found(group: str) -> dict[str, list[EntryPoint]]:
    """Returns the entry points by name; a package that is found twice, as an editable one may be, counts once."""
    ordered = sorted(_installed().select(group=group), key=lambda one: one.dist is None or one.dist.name != _OWN)
    found: dict[str, dict[tuple[str, str], EntryPoint]] = {}
    for one in ordered:
        found.setdefault(one.name, {})[_package(one), one.value] = one
    return {name: list(same.values()) for name, same in found.items()}


def _package(one: EntryPoint) -> str:
    return "an unknown package" if one.dist is None else f"the package {one.dist.name} {one.dist.version}"
