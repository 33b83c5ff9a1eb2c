"""Finds optional packages, wrappers, and what modules have registered, to make environments."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from types import ModuleType

from sparring.pipeline.bridges.explain import place_of
from sparring.pipeline.bridges.spaces import Value
from sparring.pipeline.errors import SettingsError, install_command


def import_optional(module: str, extra: str) -> ModuleType:
    """Returns the optional package `module`.

    Raises:
        SettingsError: it is not installed; the message names the extra that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SettingsError(
            f"got no package {module!r} ({error}); expected it to be installed; try: {install_command(extra)}"
        ) from error


def registered_by(module: str) -> list[str]:
    """Returns the ids that a module, which was imported, has registered with Gymnasium, each as MODULE:ID."""
    registry = getattr(sys.modules.get("gymnasium"), "registry", {})
    made_by = {one: spec.entry_point or spec.vector_entry_point for one, spec in registry.items()}
    return [
        f"{module}:{one}"
        for one, made in made_by.items()
        if (made.partition(":")[0] if isinstance(made, str) else getattr(made, "__module__", "")) == module
    ]


def read_wrappers(text: str) -> list[Callable[[Value], Value]]:
    """Returns functions that wrap an environment, innermost first.

    Args:
        text: classes or functions as `package.module.Class`, separated by commas; or as JSON a list of them, in which
            `{"class": PATH, ...}` has further keyword arguments.

    Raises:
        SettingsError: the text cannot be read, or there is no such class.
    """
    try:
        entries = json.loads(text) if text.lstrip().startswith("[") else text.split(",")
    except (ValueError, RecursionError) as error:
        remedy = "expected a list as JSON; correct the option"
        raise SettingsError(f"got wrappers {text[:100]!r} ({error}); {remedy}") from error
    return [_wrapper(one) for one in entries if not isinstance(one, str) or one.strip()]


def _wrapper(entry: Value) -> Callable[[Value], Value]:
    arguments = {"class": entry.strip()} if isinstance(entry, str) else entry
    if not isinstance(arguments, dict) or not isinstance(path := arguments.get("class"), str):
        raise SettingsError(
            f"got the wrapper {entry!r}; expected package.module.Class, or a mapping with that as class and arguments "
            "beside it; write for example {class: gymnasium.wrappers.TimeLimit, max_episode_steps: 100}"
        )
    try:
        module, _, name = path.rpartition(".")
        found: Callable[..., Value] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(
            f"got wrapper {path!r}: {error}; expected a class, as package.module.Class; correct the path"
        ) from error
    keywords = {key: one for key, one in arguments.items() if key != "class"}

    def wrap(environment: Value) -> Value:
        try:
            return found(environment, **keywords)
        except TypeError as error:
            raise SettingsError(
                f"got wrapper {path!r} with the arguments {keywords}: {error}{place_of(error)}; expected those that it "
                "takes; write them beside its class, as {class: " + path + ", NAME: VALUE}"
            ) from error

    return wrap
