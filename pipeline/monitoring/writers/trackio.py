"""Writes to trackio: to a database in the folder of the run, or to a Space of Hugging Face."""

import os
from importlib.util import find_spec
from typing import Any

from pydantic import Field

from sparring.pipeline.errors import install_command
from sparring.pipeline.monitoring.writers import Event, RunInfo, Writer, WriterSettings


class TrackioSettings(WriterSettings):
    """Configures the run in trackio.

    Attributes:
        project: name of the project.
        name: name of the run; None for its id.
        space_id: Space that shows it, as `user/space`; None for a database in `trackio/` in the folder of the run, or
            in `$TRACKIO_DIR`.
    """

    project: str = Field(default="sparring", min_length=1)
    name: str | None = None
    space_id: str | None = None


class TrackioWriter(Writer):
    """Logs the numbers of each interval as `BEHAVIOR/NAME`."""

    settings_model = TrackioSettings
    settings: TrackioSettings

    @classmethod
    def missing(cls) -> str:
        """Returns how the library is installed, where it is missing."""
        return "" if find_spec("trackio") else f"trackio is not installed: {install_command('trackio')}"

    def open(self, run: RunInfo) -> None:
        """Begins a run, or continues that of an earlier process."""
        os.environ.setdefault("TRACKIO_DIR", str(run.folder / "trackio"))  # trackio reads it when it is imported
        import trackio

        own = self.settings
        self._run: Any = trackio.init(
            project=own.project,
            name=own.name or run.id,
            space_id=own.space_id,
            config=dict(run.settings),
            resume="allow",
        )

    def write(self, event: Event) -> None:
        """Logs an interval."""
        if event.kind == "interval":
            behavior = event.values["behavior"]
            named = {f"{behavior}/{name}": value for name, value in event.scalars.items()}
            self._run.log(named, step=event.values["step"])

    def close(self) -> None:
        """Sends what is left."""
        self._run.finish()
