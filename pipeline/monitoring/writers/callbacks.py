"""Calls functions that the configuration names with each event."""

import importlib
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import Annotated

from pydantic import Field

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.monitoring.writers import Event, RunInfo, Writer, WriterSettings

Name = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]


class CallbacksSettings(WriterSettings):
    """Configures callbacks.

    Attributes:
        functions: as `module:function`; modules are those that are installed, beside the configuration, or in
            `pipeline.python_path`.
    """

    functions: tuple[Name, ...] = Field(min_length=1)


class Callbacks(Writer):
    """Calls each function with each event; one that raises does not keep the event from the others."""

    settings_model = CallbacksSettings
    settings: CallbacksSettings

    def open(self, run: RunInfo) -> None:
        """Imports the functions.

        Raises:
            SettingsError: one cannot be imported.
        """
        self._functions = [_imported(name) for name in self.settings.functions]

    def write(self, event: Event) -> None:
        """Calls all functions.

        Raises:
            Exception: what the functions have raised.
        """
        call_all(partial(function, event) for function in self._functions)


def call_all(calls: Iterable[Callable[[], object]]) -> None:
    """Makes all calls, also where some of them fail.

    Raises:
        Exception: what the only one that fails raises, or a group of all that several do.
    """
    failures = []
    for call in calls:
        try:
            call()
        except Exception as error:
            failures.append(error)
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise ExceptionGroup("several calls failed", failures)


def _imported(name: str) -> Callable[[Event], object]:
    module, _, function = name.partition(":")
    try:
        found: Callable[[Event], object] = attrgetter(function)(importlib.import_module(module))
    except Exception as error:  # whatever the import of the user's module raises
        raise SettingsError(
            f"got the callback {name}, which cannot be imported ({type(error).__name__}: {error}); expected a function "
            "of a module that is installed, beside the configuration, or in pipeline.python_path; correct it"
        ) from error
    if not callable(found):
        raise SettingsError(f"got the callback {name}, which is {found!r}; expected a function; correct it")
    return found
