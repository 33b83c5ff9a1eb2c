"""The sections that ML-Agents gives its players, checkpoints and torch; accepted with its keys and defaults."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class _EnvironmentModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class EnvironmentSettings(_EnvironmentModel):
    """The `env_settings` section; `seed` is the seed of the run, the rest describes a Unity player.

    Attributes:
        env_path: of a Unity player.
        env_args: its arguments.
        base_port: its port.
        num_envs: how many players.
        num_areas: training areas in each.
        seed: of the run; -1 draws one at the start.
        timeout_wait: seconds to wait for a player.
        max_lifetime_restarts: restarts of a player; -1 for no limit.
        restarts_rate_limit_n: restarts within the period; -1 for no limit.
        restarts_rate_limit_period_s: that period in seconds.
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


class EngineSettings(_EnvironmentModel):
    """The `engine_settings` section: how a Unity player renders and how fast its time runs.

    Attributes:
        width: of the window, in pixels.
        height: of the window, in pixels.
        quality_level: of rendering.
        time_scale: factor of its clock.
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


class CheckpointSettings(_EnvironmentModel):
    """The `checkpoint_settings` section: where a run lives and what it starts from.

    Attributes:
        run_id: name of the run and of its folder; None chooses one.
        initialize_from: run whose weights are the start.
        load_model: old name of `resume`.
        resume: go on with the run of this id.
        force: replace the run of this id.
        train_model: without effect, as in ML-Agents.
        inference: act without learning.
        results_dir: folder that holds the runs.
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
                "resume goes on with the run, force deletes it and starts again"
            )
        return self


class TorchSettings(_EnvironmentModel):
    """The `torch_settings` section.

    Attributes:
        device: of the learners, as torch names it; None for the processor.
    """

    device: str | None = None

    @field_validator("device")
    @classmethod
    def _known(cls, device: str | None) -> str | None:
        if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?|mps", device):
            raise ValueError(f"got {device!r}; expected cpu, cuda, cuda:N or mps; leave it out for the processor")
        return device
