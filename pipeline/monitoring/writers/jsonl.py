"""Writes events as JSON lines to a file of the user, from which another program may ship them."""

from pathlib import Path
from typing import Final

from pydantic import Field, field_validator

from sparring.pipeline.errors import ServiceError
from sparring.pipeline.files import append, expanded
from sparring.pipeline.monitoring.files import to_json
from sparring.pipeline.monitoring.writers import FOLDER, Event, RunInfo, Writer, WriterSettings

_OWN: Final = {
    *("config", "configuration", "coordination", "curves", "matches", "metrics", "monitor"),
    *("processes", "run", "services", "status", "summary"),
}
"""Beginnings of the names of files in the folder of a run."""
_OWN_FOLDERS: Final = {"logs", FOLDER}


class JsonLinesSettings(WriterSettings):
    """Configures the file.

    Attributes:
        path: of the file, to which lines are appended; relative to the folder of the run.
    """

    path: str = Field(min_length=1)

    @field_validator("path")
    @classmethod
    def _names_a_file(cls, path: str) -> str:
        if "\0" not in path and Path(path).name not in ("", "..") and not str(expanded(path)).startswith("~"):
            return path
        raise ValueError(f"got path {path!r}; expected the name of a file; write for example events.jsonl")


class JsonLinesWriter(Writer):
    """Appends a line for each event: `run_id`, `kind` and the values of the event."""

    settings_model = JsonLinesSettings
    settings: JsonLinesSettings

    def open(self, run: RunInfo) -> None:
        """Makes the folder of the file.

        Raises:
            OSError: it cannot be made.
            ServiceError: the run itself writes this file, or reads it for its writers.
        """
        self._run_id = run.id
        self._path = run.folder / expanded(self.settings.path)
        folder, path = run.folder.resolve(), self._path.resolve()
        within = path.relative_to(folder).parts if path.is_relative_to(folder) else ("", "")
        if within[0] in _OWN_FOLDERS or (len(within) == 1 and within[0].partition(".")[0] in _OWN):
            raise ServiceError(
                f"got writers.jsonl.path {self.settings.path!r}, a file that the run itself writes; expected another; "
                "choose another name, such as events.jsonl"
            )
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, event: Event) -> None:
        """Appends a line.

        Raises:
            OSError: it cannot be written.
        """
        append(self._path, to_json({"run_id": self._run_id, "kind": event.kind, **event.values}) + b"\n")
