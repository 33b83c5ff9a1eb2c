"""Writes events as JSON lines to a file of the user, from which another program may ship them."""

from pathlib import Path

from pydantic import Field

from sparring.pipeline.files import append
from sparring.pipeline.monitoring.files import to_json
from sparring.pipeline.monitoring.writers import Event, RunInfo, Writer, WriterSettings


class JsonLinesSettings(WriterSettings):
    """Configures the file.

    Attributes:
        path: of the file, to which lines are appended; relative to the folder of the run.
    """

    path: str = Field(min_length=1)


class JsonLinesWriter(Writer):
    """Appends a line for each event: `run_id`, `kind` and the values of the event."""

    settings_model = JsonLinesSettings
    settings: JsonLinesSettings

    def open(self, run: RunInfo) -> None:
        """Makes the folder of the file.

        Raises:
            OSError: it cannot be made.
        """
        self._run_id = run.id
        self._path = run.folder / Path(self.settings.path).expanduser()
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, event: Event) -> None:
        """Appends a line.

        Raises:
            OSError: it cannot be written.
        """
        append(self._path, to_json({"run_id": self._run_id, "kind": event.kind, **event.values}) + b"\n")
