"""Runs writers that were made for ML-Agents, which registers them under `mlagents.stats_writer`, as they are.

They import `mlagents.trainers.stats` and `mlagents.trainers.settings`. In the process of this writer, and nowhere else,
`stand_in` puts modules of these names in place, also where ML-Agents is installed: it would load torch.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Final

from pydantic import Field, field_validator

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.files import Json
from sparring.pipeline.monitoring.writers import Event, RunInfo, Writer, WriterSettings, mlagents_stats
from sparring.pipeline.monitoring.writers.callbacks import call_all
from sparring.pipeline.monitoring.writers.mlagents_stats import (
    RunOptions,
    StatsAggregationMethod,
    StatsPropertyType,
    StatsSummary,
    StatsWriter,
)

GROUP: Final = "mlagents.stats_writer"


class MlAgentsSettings(WriterSettings):
    """Names the writers.

    Attributes:
        names: entry points of the group `mlagents.stats_writer`.
    """

    names: tuple[str, ...] = Field(min_length=1)

    @field_validator("names")
    @classmethod
    def _registered(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        known = sorted(_registered())
        for name in names:
            if name not in known:
                listed = ", ".join(known) or "none: no package registers any"
                raise ValueError(
                    f"got the name {name!r}; expected one in the entry points {GROUP} ({listed}); "
                    "correct it, or install its package"
                )
        return names


class MlAgentsWriter(Writer):
    """Passes intervals to writers of ML-Agents; their category is the name of the behavior."""

    settings_model = MlAgentsSettings
    settings: MlAgentsSettings

    def open(self, run: RunInfo) -> None:
        """Makes the writers, and passes on the settings of behaviors.

        Raises:
            SettingsError: one cannot be imported.
        """
        stand_in()
        options, registered = RunOptions(run.settings, run.id), _registered()
        self._writers: list[StatsWriter] = []
        for name in self.settings.names:
            point = registered[name]
            package = point.dist.name if point.dist is not None else "an unknown package"
            try:
                make: Callable[[RunOptions], Iterable[StatsWriter]] = point.load()
                self._writers += make(options)
            except Exception as error:
                raise SettingsError(
                    f"got {name!r} of the package {package}, whose {point.value} cannot be used "
                    f"({type(error).__name__}: {error}); expected a working package; mend or uninstall it"
                ) from error
        for behavior, settings in run.settings["behaviors"].items():
            for writer in self._writers:
                writer.add_property(behavior, StatsPropertyType.HYPERPARAMETERS, settings)
                if settings.get("self_play"):
                    writer.add_property(behavior, StatsPropertyType.SELF_PLAY, True)

    def write(self, event: Event) -> None:
        """Passes on an interval; a writer that raises does not keep it from the others.

        Raises:
            Exception: what the writers have raised.
        """
        if event.kind == "interval":
            values = {
                name: StatsSummary([value], StatsAggregationMethod.AVERAGE) for name, value in event.scalars.items()
            }
            words = event.values["behavior"], values, event.values["step"]
            call_all(partial(writer.write_stats, *words) for writer in self._writers)


def _registered() -> Mapping[str, EntryPoint]:
    return {one.name: one for one in entry_points(group=GROUP)}


def stand_in() -> None:
    """Puts the modules that writers of ML-Agents import in place."""
    contents: dict[str, Mapping[str, Json]] = {
        "mlagents": {},
        "mlagents.trainers": {},
        "mlagents.trainers.settings": {"RunOptions": RunOptions},
        "mlagents.trainers.stats": {name: getattr(mlagents_stats, name) for name in mlagents_stats.__all__},
        "mlagents_envs": {},
        "mlagents_envs.logging_util": {"get_logger": logging.getLogger},
    }
    for name, content in contents.items():
        module = ModuleType(name, "Stands in for the module of ML-Agents of this name.")
        module.__path__ = []  # none of its other modules is found
        vars(module).update(content)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
