"""Writes to Weights & Biases; `mode: offline` keeps all in the folder of the run, for `wandb sync`."""

from importlib.util import find_spec
from typing import Any, Literal

from pydantic import Field

from sparring.pipeline.errors import install_command
from sparring.pipeline.monitoring.writers import Event, RunInfo, Writer, WriterSettings


class WandbSettings(WriterSettings):
    """Configures the run in Weights & Biases; what is left out has the library's default.

    Attributes:
        project: name of the project.
        entity: user or team.
        group: group of runs.
        name: name of the run; None for its id.
        tags: tags of the run.
        mode: `online`, or `offline` for files in `wandb/` in the folder of the run.
    """

    project: str = Field(default="sparring", min_length=1)
    entity: str | None = None
    group: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline"] = "online"


class WandbWriter(Writer):
    """Logs the numbers of each interval as `BEHAVIOR/NAME` over `BEHAVIOR/step`."""

    settings_model = WandbSettings
    settings: WandbSettings

    @classmethod
    def missing(cls) -> str:
        """Returns how the library is installed, where it is missing."""
        return "" if find_spec("wandb") else f"wandb is not installed: {install_command('wandb')}"

    def open(self, run: RunInfo) -> None:
        """Begins a run, or continues that of an earlier process."""
        import wandb

        own = self.settings
        self._run: Any = wandb.init(
            project=own.project,
            entity=own.entity,
            group=own.group,
            name=own.name or run.id,
            tags=own.tags,
            mode=own.mode,
            id=run.origin,
            resume="allow",
            dir=run.folder,
            config=dict(run.settings),
            settings=wandb.Settings(console="off", silent=True),
        )
        for behavior in run.settings["behaviors"]:
            self._run.define_metric(f"{behavior}/*", step_metric=f"{behavior}/step")

    def write(self, event: Event) -> None:
        """Logs an interval, and the end in the run's summary."""
        if event.kind == "interval":
            behavior = event.values["behavior"]
            named = {f"{behavior}/{name}": value for name, value in event.scalars.items()}
            self._run.log({f"{behavior}/step": event.values["step"], **named})
        elif event.kind == "end":
            self._run.summary["status"] = event.values["status"]

    def close(self) -> None:
        """Sends what is left."""
        self._run.finish()
