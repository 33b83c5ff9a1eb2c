"""All settings of a run: what `load` returns and every service is started with."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from sparring.pipeline.coordination.settings import Mode
from sparring.pipeline.settings.behavior import BehaviorSettings
from sparring.pipeline.settings.conflicts import Conflicts, conflicts, threaded
from sparring.pipeline.settings.environment import (
    CheckpointSettings,
    EngineSettings,
    EnvironmentSettings,
    TorchSettings,
)
from sparring.pipeline.settings.parameters import EnvironmentParameter
from sparring.pipeline.settings.pipeline import PipelineSettings
from sparring.pipeline.settings.simulators import Option, SimulatorSettings


class Settings(BaseModel):
    """A whole configuration file, its `default_settings` merged under each behavior.

    Attributes:
        behaviors: settings of each behavior name.
        default_settings: of any other name that a simulator may come with; None where these are not complete without
            what a behavior adds.
        env_settings: ML-Agents' section; `seed` is the run's.
        engine_settings: ML-Agents' section.
        environment_parameters: numbers, samplers and curricula by parameter name.
        checkpoint_settings: ML-Agents' section.
        torch_settings: ML-Agents' section.
        debug: log more.
        simulators: what to launch; see `launched` where it is empty.
        pipeline: how the services work together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    behaviors: dict[str, BehaviorSettings]
    default_settings: BehaviorSettings | None = None
    env_settings: EnvironmentSettings = EnvironmentSettings()
    engine_settings: EngineSettings = EngineSettings()
    environment_parameters: dict[str, EnvironmentParameter] = {}
    checkpoint_settings: CheckpointSettings = CheckpointSettings()
    torch_settings: TorchSettings = TorchSettings()
    debug: bool = False
    simulators: tuple[SimulatorSettings, ...] = ()
    pipeline: PipelineSettings = PipelineSettings()

    @model_validator(mode="after")
    def _fit_together(self) -> Settings:
        if found := conflicts(self):
            raise Conflicts(found)
        return self

    @property
    def mode(self) -> Mode:
        """`pipeline.mode` if written, else what `threaded` of the behaviors says, else `overlap`."""
        if self.pipeline.mode is not None:
            return self.pipeline.mode
        return "lockstep" if False in threaded(self).values() else "overlap"

    @property
    def overlap(self) -> int:
        """How many buffers are collected while one trains: 1 for overlap, 0 for lockstep."""
        return 1 if self.mode == "overlap" else 0

    @property
    def alone(self) -> Settings:
        """The same on one machine, this one."""
        if not self.pipeline.hosts:
            return self
        simulators = tuple(simulator.model_copy(update={"host": None}) for simulator in self.simulators)
        own: dict[str, object] = {"hosts": {}}
        if "address" in self.pipeline.model_fields_set:  # what was not written has it anyway, and `launched` asks
            own["address"] = PipelineSettings.model_fields["address"].default
        pipeline = self.pipeline.model_copy(update=own)
        return self.model_copy(update={"simulators": simulators, "pipeline": pipeline})

    @property
    def unnamed(self) -> BehaviorSettings | None:
        """Settings of a behavior that only a simulator names; None where such a one is refused.

        Where there are several machines, each service has its place before the run starts.
        """
        return None if self.pipeline.hosts else self.default_settings

    @property
    def sections(self) -> dict[str, BehaviorSettings]:
        """What behaviors are trained with, by its place in the file; without any, what counts for all that come."""
        named = {f"behaviors.{name}": behavior for name, behavior in self.behaviors.items()}
        return named or ({} if self.unnamed is None else {"default_settings": self.unnamed})

    def naming(self, names: Iterable[str]) -> Settings:
        """The same with further behaviors, which `unnamed` counts for."""
        assert self.unnamed is not None, "nothing counts for them"
        one = self.unnamed.model_copy(update={"threaded": None})  # the mode is the run's, and stays
        pipeline = self.pipeline.model_copy(update={"mode": self.mode})
        return self.model_copy(
            update={"behaviors": {**self.behaviors, **dict.fromkeys(names, one)}, "pipeline": pipeline}
        )

    @property
    def written(self) -> dict[str, Any]:
        """What the file and the command line said, as JSON knows it; the rest has its defaults.

        What reads it again knows as much as we do: whether a key was written at all counts in `launched`, and for
        how often a Unity player may fail.
        """
        return self.model_dump(mode="json", exclude_unset=True)

    @property
    def used(self) -> dict[str, Any]:
        """`written`, with all that the behaviors are told: there a default is as good as the same value written."""
        return self.written | self.model_dump(mode="json", include={"behaviors", "default_settings"})

    @property
    def seed(self) -> int:
        """Seed of the run, -1 to draw one at the start."""
        return self.env_settings.seed

    @property
    def launched(self) -> tuple[SimulatorSettings, ...]:
        """What the supervisor launches; without an entry, whoever dials in at `pipeline.address` plays.

        `simulators`, and the Unity players of `env_settings`. A file of ML-Agents that has neither waits for the
        editor's Play button, unless it says where other simulators are to dial in.
        """
        if self.env_settings.env_path is not None:
            return (*self.simulators, *self._players())
        if not self.simulators and "address" not in self.pipeline.model_fields_set:
            return (self._unity(1, no_graphics=self.engine_settings.no_graphics),)
        return self.simulators

    def _players(self) -> tuple[SimulatorSettings, ...]:
        count, engine = self.env_settings.num_envs, self.engine_settings
        if engine.no_graphics or not engine.no_graphics_monitor or count == 1:
            return (self._unity(count, no_graphics=engine.no_graphics),)
        return self._unity(1, no_graphics=False), self._unity(count - 1, no_graphics=True)

    def _unity(self, count: int, *, no_graphics: bool) -> SimulatorSettings:
        own, engine = self.env_settings, self.engine_settings
        options: dict[str, Option] = {
            "arguments": shlex.join(own.env_args or ()),
            "timeout_s": float(own.timeout_wait),
            "width": engine.width,
            "height": engine.height,
            "quality_level": engine.quality_level,
            "time_scale": engine.time_scale,
            "target_frame_rate": engine.target_frame_rate,
            "capture_frame_rate": engine.capture_frame_rate,
            "no_graphics": no_graphics,
        }
        if own.env_path is not None:
            options |= {"path": own.env_path, "port": own.base_port}
        return SimulatorSettings(name="unity", count=count, areas=own.num_areas, options=options)

    def budget(self, name: str) -> int:
        """Most steps of behavior `name` in flight: (1 + overlap) x `buffer_size`."""
        return (1 + self.overlap) * self.behaviors[name].hyperparameters.buffer_size
