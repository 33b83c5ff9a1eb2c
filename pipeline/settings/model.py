"""Defines all settings of a run: `read` returns them and every service starts with them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from sparring.pipeline.coordination.settings import CoordinationSettings, Mode, SelfPlaySettings
from sparring.pipeline.files import Json
from sparring.pipeline.learning.settings import TrainerSettings
from sparring.pipeline.networks.settings import StrictSettings
from sparring.pipeline.queues.endpoints import is_tcp
from sparring.pipeline.settings.parameters import EnvironmentParameter
from sparring.pipeline.settings.placement import PlacementSettings
from sparring.pipeline.settings.simulators import Option, SimulatorSettings
from sparring.pipeline.settings.writers import check_writers
from sparring.pipeline.stepping.settings import SteppingSettings

# ---------------------------------------------------------------- sections, ML-Agents' with its keys and defaults


class EnvironmentSettings(StrictSettings):
    """Configures Unity players; `seed` is the seed of the run.

    Attributes:
        env_path: path of the Unity player's build.
        env_args: arguments of the player.
        base_port: port of the first player.
        num_envs: number of players.
        num_areas: number of training areas in each player.
        seed: seed of the run; -1 chooses a random one at the start.
        timeout_wait: seconds to wait for a player.
        max_lifetime_restarts: restarts of a player in all; -1 for no limit.
        restarts_rate_limit_n: restarts within the period; -1 for no limit.
        restarts_rate_limit_period_s: period in seconds.
    """

    env_path: str | None = None
    env_args: tuple[str, ...] | None = None
    base_port: int = Field(default=5005, ge=1, le=65_535)
    num_envs: int = Field(default=1, ge=1)
    num_areas: int = Field(default=1, ge=1)
    seed: int = Field(default=-1, ge=-1, lt=2**31)
    timeout_wait: int = Field(default=60, ge=1)
    max_lifetime_restarts: int = Field(default=10, ge=-1)
    restarts_rate_limit_n: int = Field(default=1, ge=-1)
    restarts_rate_limit_period_s: int = Field(default=60, ge=1)


class EngineSettings(StrictSettings):
    """Configures how Unity players render and how fast their time runs.

    Attributes:
        width: width of the window, in pixels.
        height: height of the window, in pixels.
        quality_level: quality of rendering.
        time_scale: factor of the game's clock.
        target_frame_rate: frames per second; -1 for as many as possible.
        capture_frame_rate: frames per second of simulated time.
        no_graphics: run without rendering.
        no_graphics_monitor: the first player renders, the others do not.
    """

    width: int = Field(default=84, ge=1)
    height: int = Field(default=84, ge=1)
    quality_level: int = Field(default=5, ge=0)
    time_scale: float = Field(default=20.0, gt=0)
    target_frame_rate: int = Field(default=-1, ge=-1)
    capture_frame_rate: int = Field(default=60, ge=0)
    no_graphics: bool = False
    no_graphics_monitor: bool = False


class CheckpointSettings(StrictSettings):
    """Configures the folder of a run and its initial weights.

    Attributes:
        run_id: name of the run and of its folder; None chooses one.
        initialize_from: run whose weights are the initial ones.
        load_model: old name of `resume`.
        resume: continue the run with this id.
        force: replace the run with this id.
        train_model: no effect, as in ML-Agents.
        inference: act without learning.
        results_dir: folder of the runs.
    """

    run_id: str | None = None
    initialize_from: str | None = Field(default=None, min_length=1)
    load_model: bool = False
    resume: bool = False
    force: bool = False
    train_model: bool = False
    inference: bool = False
    results_dir: str = Field(default="results", min_length=1)

    @field_validator("run_id")
    @classmethod
    def _folder_name(cls, run_id: str | None) -> str | None:
        if run_id is not None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}", run_id):
            raise ValueError(
                f"got {run_id!r}; expected the name of a folder: at most 100 letters, digits, '_', '-', '.'; "
                "choose another run_id, and results_dir for the place"
            )
        return run_id

    @model_validator(mode="after")
    def _resume_or_replace(self) -> CheckpointSettings:
        if (self.resume or self.load_model) and self.force:
            raise ValueError(
                "got resume and force together; expected one of them; "
                "resume continues the run, force deletes it and starts again"
            )
        return self


class TorchSettings(StrictSettings):
    """Configures torch. Devices are in torch's notation; None is the CPU.

    Attributes:
        device: device of all learners, or by behavior name; a behavior without one has the CPU.
        acting_device: device that stepping acts on.
        matmul_precision: precision within products of matrices, by PyTorch's name; all else is float32.
    """

    device: str | dict[str, str] | None = None
    acting_device: str | None = None
    matmul_precision: Literal["highest", "high", "medium"] = "highest"

    @field_validator("device", "acting_device")
    @classmethod
    def _known(cls, device: str | dict[str, str] | None) -> str | dict[str, str] | None:
        if device == {}:
            raise ValueError("got no device; expected one, or one for each of some behaviors; leave it out for the CPU")
        for one in device.values() if isinstance(device, dict) else () if device is None else (device,):
            if not re.fullmatch(r"cpu|cuda(:\d+)?|mps", one):
                raise ValueError(f"got {one!r}; expected cpu, cuda, cuda:N or mps; leave it out for the CPU")
        return device

    def of_learner(self, behavior: str) -> str | None:
        """Returns the device of a behavior's learner."""
        return self.device.get(behavior) if isinstance(self.device, dict) else self.device

    def beside_cpu(self, behaviors: Iterable[str]) -> list[str]:
        """Returns the devices but the CPU that the learners of some behaviors and stepping use."""
        named = {self.acting_device, *map(self.of_learner, behaviors)}
        return sorted(one for one in named if one not in (None, "cpu"))


class CapacitySettings(StrictSettings):
    """Limits the messages in each kind of queue, from all senders together.

    Attributes:
        step_batches: queue from stepping to assembly.
        segments: queue from assembly to coordination, and those from coordination to learners.
    """

    step_batches: int = Field(default=64, ge=2)
    segments: int = Field(default=64, ge=2)


class RestartSettings(StrictSettings):
    """Limits the failures of a service before the run stops.

    Attributes:
        budget: restarts of one service within `period_s`.
        period_s: seconds in which restarts are counted.
        backoff_s: seconds before the first restart; doubled for each further one.
        backoff_max_s: most seconds before a restart.
    """

    budget: int = Field(default=10, ge=0)
    period_s: float = Field(default=600.0, gt=0)
    backoff_s: float = Field(default=0.5, ge=0)
    backoff_max_s: float = Field(default=30.0, ge=0)


class StallSettings(StrictSettings):
    """Limits the stalls of a run before it is ended.

    Attributes:
        budget: stalls within `period_s`.
        period_s: seconds in which stalls are counted.
    """

    budget: int = Field(default=3, ge=0)
    period_s: float = Field(default=3600.0, gt=0)


class LogSettings(StrictSettings):
    """Limits the files that grow with a run: each may hold `size_mb` times `kept + 1`.

    Attributes:
        size_mb: megabytes (10^6 bytes) at which a file is rotated to FILE.1, FILE.2 and so on.
        kept: number of rotated files to keep.
    """

    size_mb: float = Field(default=16.0, gt=0)
    kept: int = Field(default=3, ge=1)

    @property
    def most_bytes(self) -> int:
        """Returns `size_mb` in bytes."""
        return round(self.size_mb * 1e6)


class WriterLimits(StrictSettings):
    """Limits what a writer may take (`writers`).

    Attributes:
        timeout_s: seconds that it may take for an event, or after the end of the run; longer is a hang.
        backlog: events of a file that it may be behind before the oldest are left out.
        failures: events in a row at which it may raise, and restarts within `restarts.period_s`, before it is left
            alone for `restarts.period_s`.
    """

    timeout_s: float = Field(default=60.0, gt=0)
    backlog: int = Field(default=10_000, ge=1)
    failures: int = Field(default=5, ge=1)


class ThreadSettings(StrictSettings):
    """Configures the torch threads of each process.

    Attributes:
        learning: threads of each learner.
        stepping: threads of each stepping process.
    """

    learning: int = Field(default=1, ge=1)
    stepping: int = Field(default=1, ge=1)


class PipelineSettings(SteppingSettings, CoordinationSettings):
    """Configures the services of a run, with the keys of stepping and coordination.

    Attributes:
        transport: connections between services: Unix sockets (`ipc`), loopback (`tcp`), or the platform's best.
        recovery_interval: seconds between a learner's recovery checkpoints.
        capacities: capacities of the queues.
        stall_timeout_s: seconds without progress after which a stall is reported; `stall_timeout` is another name.
        stalls: limits of stalls.
        logs: limits of logs, of simulators' output, of `services.jsonl` and `metrics.jsonl`.
        restarts: limits of restarts of failed services.
        writer_limits: limits of writers.
        assembly: one process for all stepping processes, or one for each.
        ranks: processes of each learner, which share the rows of its minibatches.
        torch_threads: torch threads of each process.
        leave_cores_to_learners: stepping leaves as many CPU cores free as the learners have threads, if any remain
            (Linux); so do launched simulators, if each has a core then. All others may run on all.
        stop_timeout_s: seconds for a service to stop in order.
        metrics_address: `tcp://HOST:PORT` at which the monitor answers Prometheus by HTTP; None for no answers.
        export: write every checkpoint as ONNX too, in a process of low priority, if the extra `onnx` is installed.
        training_analytics: send Unity players a description of the training, which their package hands to its vendor's
            analytics.
        placement: where a cluster runs the parts of a run (`sparring train --ray`).
        interface: network interface of every node for connections between services on a cluster; None for the one that
            Ray uses.
        python_path: folders with Gymnasium and PettingZoo environments, searched after that of the configuration file;
            relative paths are relative to it.
        keys: folder made by `sparring keys`; `$SPARRING_KEYS` wins. Required to listen beyond loopback.
    """

    transport: Literal["auto", "ipc", "tcp"] = "auto"
    recovery_interval: float = Field(default=30.0, gt=0)
    capacities: CapacitySettings = CapacitySettings()
    stall_timeout_s: float = Field(default=300.0, gt=0)
    stalls: StallSettings = StallSettings()
    logs: LogSettings = LogSettings()
    restarts: RestartSettings = RestartSettings()
    writer_limits: WriterLimits = WriterLimits()
    assembly: Literal["one", "per stepping"] = "one"
    ranks: int = Field(default=1, ge=1)
    torch_threads: ThreadSettings = ThreadSettings()
    leave_cores_to_learners: bool = True
    stop_timeout_s: float = Field(default=20.0, gt=0)
    metrics_address: str | None = None
    export: bool = True
    training_analytics: bool = False
    placement: PlacementSettings = PlacementSettings()
    interface: str | None = Field(default=None, min_length=1)
    keys: str | None = Field(default=None, min_length=1)
    python_path: tuple[str, ...] = ()

    @field_validator("metrics_address")
    @classmethod
    def _a_port(cls, address: str | None) -> str | None:
        if address is None or (is_tcp(address) and urlsplit(address).port):
            return address
        raise ValueError(
            f"got {address!r}; expected tcp://HOST:PORT with a port from 1 to 65535; write for example "
            "tcp://127.0.0.1:9400"
        )


# ---------------------------------------------------------------- the whole


class BehaviorSettings(TrainerSettings):
    """Configures one behavior name: its trainer, its pace and its opponents.

    Attributes:
        threaded: ML-Agents' name for the mode: true is overlap, false is lockstep, None is unset.
        self_play: settings of ghosts; None trains every team at once.
    """

    threaded: bool | None = None
    self_play: SelfPlaySettings | None = None


class Settings(StrictSettings):
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
        writers: sections of writers by name, as JSON data, or false for none of this name.
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
    writers: dict[str, Json] = Field(default={})
    pipeline: PipelineSettings = PipelineSettings()

    _writer_sections = field_validator("writers")(check_writers)

    @property
    def active_writers(self) -> dict[str, dict[str, Json]]:
        """Returns the sections of the writers that run, by name; TensorBoard is one of them unless it is false."""
        return {name: one for name, one in {"tensorboard": {}, **self.writers}.items() if one is not False}

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
    def unnamed(self) -> BehaviorSettings | None:
        """Returns the settings of behaviors that only a simulator names; None if these are rejected."""
        return self.default_settings

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

    def step_budget(self, behavior: BehaviorSettings) -> int:
        """Returns the step budget of a behavior; that of PPO is (1 + overlap) x `buffer_size`."""
        hyper = behavior.hyperparameters
        own = None if hyper.has_limited_lag or not self.overlap else self.pipeline.step_budget
        return own or hyper.step_budget(self.overlap)

    def agent_steps(self, behavior: BehaviorSettings) -> int:
        """Returns the least steps of each agent in an update; 0 where a setting or lockstep fixes their sum."""
        is_fixed = not self.overlap or self.pipeline.step_budget is not None
        return 0 if is_fixed else min(behavior.hyperparameters.agent_steps, behavior.time_horizon)
