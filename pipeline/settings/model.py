"""Defines all settings of a run: `read` returns them and every service starts with them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from pydantic import Field

from sparring.pipeline.coordination.settings import Mode, SelfPlaySettings, SettingsModel
from sparring.pipeline.files import Json
from sparring.pipeline.learning.settings import TrainerSettings
from sparring.pipeline.settings.parameters import EnvironmentParameter
from sparring.pipeline.settings.sections import (
    CheckpointSettings,
    EngineSettings,
    EnvironmentSettings,
    PipelineSettings,
    TorchSettings,
)
from sparring.pipeline.settings.simulators import Option, SimulatorSettings


class BehaviorSettings(TrainerSettings):
    """Configures one behavior name: its trainer, its pace and its opponents.

    Attributes:
        threaded: ML-Agents' name for the mode: true is overlap, false is lockstep, None is unset.
        self_play: settings of ghosts; None trains every team at once.
    """

    threaded: bool | None = None
    self_play: SelfPlaySettings | None = None


class Settings(SettingsModel):
    """Holds a whole configuration file, with its `default_settings` merged into each behavior.

    Its keys are valid one by one; `read` also refuses what contradicts itself (`conflicts`).

    Attributes:
        behaviors: settings by behavior name.
        default_settings: settings of other names that a simulator may have; None if they are incomplete without a
            behavior's own.
        env_settings: section of ML-Agents; its `seed` is the run's.
        engine_settings: section of ML-Agents.
        environment_parameters: numbers, samplers and curricula by parameter name.
        checkpoint_settings: section of ML-Agents.
        torch_settings: section of ML-Agents.
        debug: log more.
        simulators: simulators to launch; see `launched` if it is empty.
        pipeline: settings of the services.
    """

    behaviors: dict[str, BehaviorSettings]
    default_settings: BehaviorSettings | None = None
    env_settings: EnvironmentSettings = EnvironmentSettings()
    engine_settings: EngineSettings = EngineSettings()
    environment_parameters: dict[str, EnvironmentParameter] = Field(default={})
    checkpoint_settings: CheckpointSettings = CheckpointSettings()
    torch_settings: TorchSettings = TorchSettings()
    debug: bool = False
    simulators: tuple[SimulatorSettings, ...] = ()
    pipeline: PipelineSettings = PipelineSettings()

    @property
    def threaded(self) -> dict[str, bool]:
        """Returns `threaded` of each behavior that sets it; without behaviors, that of the defaults."""
        default = self.default_settings
        own = self.behaviors or ({} if default is None else {"default_settings": default})
        return {name: one.threaded for name, one in own.items() if one.threaded is not None}

    @property
    def mode(self) -> Mode:
        """Returns `pipeline.mode` if written, else the mode that `threaded` of the behaviors means, else `overlap`."""
        if self.pipeline.mode is not None:
            return self.pipeline.mode
        return "lockstep" if False in self.threaded.values() else "overlap"

    @property
    def overlap(self) -> int:
        """Returns how many buffers are collected while one trains: 1 for overlap, 0 for lockstep."""
        return 1 if self.mode == "overlap" else 0

    @property
    def alone(self) -> Settings:
        """Returns the same settings for this machine only."""
        if not self.pipeline.hosts:
            return self
        simulators = tuple(simulator.model_copy(update={"host": None}) for simulator in self.simulators)
        own: dict[str, object] = {"hosts": {}}
        if "address" in self.pipeline.model_fields_set:  # `launched` asks whether it is written
            own["address"] = PipelineSettings.model_fields["address"].default
        pipeline = self.pipeline.model_copy(update=own)
        return self.model_copy(update={"simulators": simulators, "pipeline": pipeline})

    @property
    def unnamed(self) -> BehaviorSettings | None:
        """Returns the settings of behaviors that only a simulator names; None if these are rejected.

        A run on several machines rejects them, because each service needs a machine before the run starts.
        """
        return None if self.pipeline.hosts else self.default_settings

    @property
    def sections(self) -> dict[str, BehaviorSettings]:
        """Returns the settings of behaviors by section; without any behavior, those of `unnamed`."""
        named = {f"behaviors.{name}": behavior for name, behavior in self.behaviors.items()}
        return named or ({} if self.unnamed is None else {"default_settings": self.unnamed})

    def naming(self, names: Iterable[str]) -> Settings:
        """Returns the same settings with further behaviors, each with the settings of `unnamed`."""
        assert self.unnamed is not None, "there are no settings for further behaviors"
        one = self.unnamed.model_copy(update={"threaded": None})  # the mode is the run's, and stays
        pipeline = self.pipeline.model_copy(update={"mode": self.mode})
        return self.model_copy(
            update={"behaviors": {**self.behaviors, **dict.fromkeys(names, one)}, "pipeline": pipeline}
        )

    @property
    def written(self) -> dict[str, Json]:
        """Returns the keys written in the file and on the command line, as JSON data; the others have their defaults.

        Reading this data restores the settings exactly: `launched` and the restarts of Unity players depend on which
        keys were written.
        """
        return self.model_dump(mode="json", exclude_unset=True)

    @property
    def used(self) -> dict[str, Json]:
        """Returns `written` with the complete settings of behaviors, in which defaults count as written."""
        return self.written | self.model_dump(mode="json", include={"behaviors", "default_settings"})

    @property
    def seed(self) -> int:
        """Returns the seed of the run; -1 chooses a random one at the start."""
        return self.env_settings.seed

    @property
    def launched(self) -> tuple[SimulatorSettings, ...]:
        """Returns the simulators to launch; without any, simulators connect to `pipeline.address`.

        These are `simulators` and the Unity players of `env_settings`. A file of ML-Agents without either waits for the
        editor's Play button, unless it sets an address for other simulators.
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
            **engine.model_dump(exclude={"no_graphics_monitor"}),
            "no_graphics": no_graphics,
        }
        if own.env_path is not None:
            options |= {"path": own.env_path, "port": own.base_port}
        return SimulatorSettings(name="unity", count=count, areas=own.num_areas, options=options)

    def budget(self, name: str) -> int:
        """Returns the step budget of behavior `name`: (1 + overlap) x `buffer_size`."""
        return (1 + self.overlap) * self.behaviors[name].hyperparameters.buffer_size
