"""Writes to MLflow: to a server, or to a database in the folder of the run."""

import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any, Final

from pydantic import Field

from sparring.pipeline.errors import install_command
from sparring.pipeline.files import Json, sqlite
from sparring.pipeline.monitoring.writers import Event, RunInfo, Writer, WriterSettings

_ORIGIN: Final = "sparring.origin"
_AT_ONCE: Final = 100
"""Parameters that every server accepts in one request; ten times as many metrics."""
_LONGEST: Final = 500
_NOT_ALLOWED: Final = re.compile(r"[^\w\-. /]")
_ENDED: Final = {"completed": "FINISHED", "stopped": "KILLED"}


class MlflowSettings(WriterSettings):
    """Configures the run in MLflow.

    Attributes:
        tracking_uri: address of the server or database; None for `mlflow.db` in the folder of the run.
        experiment: name of the experiment.
        name: name of the run; None for its id.
    """

    tracking_uri: str | None = Field(default=None, min_length=1)
    experiment: str = Field(default="sparring", min_length=1)
    name: str | None = None


class MlflowWriter(Writer):
    """Logs the numbers of each interval as `BEHAVIOR/NAME`, and the configuration as parameters."""

    settings_model = MlflowSettings
    settings: MlflowSettings

    @classmethod
    def missing(cls) -> str:
        """Returns how the library is installed, where it is missing."""
        found = all(map(find_spec, ("mlflow", "sqlalchemy", "alembic")))
        return "" if found else f"mlflow is not installed: {install_command('mlflow')}"

    def open(self, run: RunInfo) -> None:
        """Begins a run, or continues that of an earlier process."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        own = self.settings
        self._client: Any = MlflowClient(tracking_uri=own.tracking_uri or sqlite(run.folder / "mlflow.db"))
        known = self._client.get_experiment_by_name(own.experiment)
        experiment = known.experiment_id if known else self._client.create_experiment(own.experiment)
        earlier = self._client.search_runs([experiment], f"tags.`{_ORIGIN}` = '{run.origin}'")
        if earlier:
            self._id = earlier[0].info.run_id
            self._client.set_terminated(self._id, "RUNNING")
            return
        begun = self._client.create_run(experiment, run_name=own.name or run.id, tags={_ORIGIN: run.origin})
        self._id = begun.info.run_id
        params = [Param(_key(name), str(value)[:_LONGEST]) for name, value in _flat(run.settings)]
        for at in range(0, len(params), _AT_ONCE):
            self._client.log_batch(self._id, params=params[at : at + _AT_ONCE])

    def write(self, event: Event) -> None:
        """Logs an interval, and the end as the status of the run."""
        from mlflow.entities import Metric

        line = event.values
        if event.kind == "interval":
            at_ms, step = round(line["time_s"] * 1000), line["step"]
            named = event.scalars.items()
            metrics = [Metric(_key(f"{line['behavior']}/{name}"), value, at_ms, step) for name, value in named]
            for at in range(0, len(metrics), 10 * _AT_ONCE):
                self._client.log_batch(self._id, metrics=metrics[at : at + 10 * _AT_ONCE])
        elif event.kind == "end":
            self._client.set_terminated(self._id, _ENDED.get(line["status"], "FAILED"))


def _key(name: str) -> str:
    """Returns a name with the characters that MLflow allows."""
    return _NOT_ALLOWED.sub("_", name)


def _flat(values: Mapping[str, Json], prefix: str = "") -> Iterator[tuple[str, Json]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
