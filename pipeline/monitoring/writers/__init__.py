"""Writers pass the events of a run on to other tools, each in a process of its own behind the monitor.

A package adds one to the entry points `sparring.writers`; what is built in is registered in the same way:

    class Printer(Writer):
        settings_model = PrinterSettings
        settings: PrinterSettings

        def write(self, event: Event) -> None:
            print(self.settings.prefix, event.kind, event.scalars)

A writer that raises, hangs or ends its process loses the events that it was given then, which are counted; the run and
other writers go on (`delivery.py`, `services/supervision/writers.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import pydantic_core
from pydantic import BaseModel

from sparring.pipeline import plugins
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.files import Json
from sparring.pipeline.monitoring.events import Event
from sparring.pipeline.networks.settings import StrictSettings

__all__ = ["Event", "RunInfo", "Writer", "WriterSettings", "load", "settings_of"]

FOLDER: Final = "writers"
"""Folder within that of a run, with the state of each writer."""


class WriterSettings(StrictSettings):
    """A section of a configuration; it refuses unknown keys, other types, and numbers that are not finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """Describes a run to its writers.

    Attributes:
        id: of the run.
        folder: of the run.
        origin: random text that identifies the run over all its sessions, and over restarts of the writer.
        settings: the whole configuration, with defaults, as JSON data.
    """

    id: str
    folder: Path
    origin: str
    settings: Mapping[str, Json]


class Writer:
    """A Writer is given the events of a run, one after another.

    What it raises is logged and counted. A call that takes longer than `pipeline.writer_limits.timeout_s` ends its
    process. After a restart, a new object continues with the next event.

    Args:
        settings: its section of the configuration, read by `settings_model`.

    Attributes:
        settings_model: describes the section.
        settings: the section.
    """

    settings_model: ClassVar[type[BaseModel]] = WriterSettings

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @classmethod
    def missing(cls) -> str:
        """Returns what must be installed, and how; "" for nothing."""
        return ""

    def open(self, run: RunInfo) -> None:
        """Begins; the libraries that it needs are imported here, so that nothing else loads them."""

    def write(self, event: Event) -> None:
        """Writes an event."""

    def close(self) -> None:
        """Writes what is still buffered; the run has ended."""


def load(name: str) -> type[Writer]:
    """Imports a writer.

    Raises:
        SettingsError: there is none, it cannot be imported, or it is none.
    """
    found: type[Writer] = plugins.load(plugins.WRITERS, name)
    model = found.settings_model
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise SettingsError(
            f"got {name!r} of {plugins.origin(plugins.WRITERS, name)} with settings_model {model!r:.80}; expected a "
            "subclass of pydantic.BaseModel; mend or uninstall the package"
        )
    return found


def settings_of(writer: type[Writer], section: Mapping[str, Json]) -> BaseModel:
    """Reads the section of a writer.

    Raises:
        ValidationError: it does not fit.
    """
    return writer.settings_model.model_validate_json(pydantic_core.to_json(section))
