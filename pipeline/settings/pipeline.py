"""How the services of a run work together: the `pipeline` section."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from sparring.pipeline.coordination.settings import CoordinationSettings
from sparring.pipeline.settings.hosts import HostSettings, check_names
from sparring.pipeline.stepping.settings import SteppingSettings

TransportName = Literal["auto", "ipc", "tcp"]


class _PipelineModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class CapacitySettings(_PipelineModel):
    """Most messages in each kind of queue, from all senders together.

    Attributes:
        step_batches: stepping to assembly.
        segments: assembly to coordination, and coordination to each learner.
    """

    step_batches: int = Field(default=64, ge=2)
    segments: int = Field(default=64, ge=2)


class RestartSettings(_PipelineModel):
    """How often a service may fail before the run stops.

    Attributes:
        budget: restarts of one service within `period_s`.
        period_s: seconds in which they are counted.
        backoff_s: seconds before the first restart; doubled for each further one.
        backoff_max_s: most seconds before a restart.
    """

    budget: int = Field(default=10, ge=0)
    period_s: float = Field(default=600.0, gt=0)
    backoff_s: float = Field(default=0.5, ge=0)
    backoff_max_s: float = Field(default=30.0, ge=0)


class StallSettings(_PipelineModel):
    """How often a run may stall before it is ended.

    Attributes:
        budget: stalls within `period_s`.
        period_s: seconds in which they are counted.
    """

    budget: int = Field(default=3, ge=0)
    period_s: float = Field(default=3600.0, gt=0)


class LogSettings(_PipelineModel):
    """How large the files become that grow as long as a run lasts: of each, `size_mb` times `kept + 1`.

    Attributes:
        size_mb: megabytes (10^6 bytes) at which a file is put aside as FILE.1, FILE.2 and so on.
        kept: how many of these are kept.
    """

    size_mb: float = Field(default=16.0, gt=0)
    kept: int = Field(default=3, ge=1)

    @property
    def most_bytes(self) -> int:
        """`size_mb` in bytes."""
        return round(self.size_mb * 1e6)


class ThreadSettings(_PipelineModel):
    """Torch threads within one process.

    Attributes:
        learning: of each learner.
        stepping: of each stepping process.
    """

    learning: int = Field(default=1, ge=1)
    stepping: int = Field(default=1, ge=1)


class PipelineSettings(SteppingSettings, CoordinationSettings):
    """The `pipeline` section: the keys of stepping and coordination, and those of the services.

    Attributes:
        transport: between services: Unix sockets (`ipc`), loopback (`tcp`), or what the platform has.
        recovery_interval: seconds between a learner's recovery checkpoints.
        capacities: of the queues.
        stall_timeout_s: seconds without progress after which a stall is reported; `stall_timeout` is the same.
        stalls: how often that may happen.
        logs: bounds of logs, of what simulators write, of `services.jsonl` and `metrics.jsonl`.
        restarts: of services that failed.
        torch_threads: in each process.
        leave_cores_to_learners: all services but the learners keep off as many processor cores as the learners have
            threads, where any are left (Linux). Learners and simulators may run on all.
        stop_timeout_s: seconds a service has to stop in order.
        export: every checkpoint is also written as ONNX, by a process that lets all others go first, where the extra
            `onnx` is installed.
        training_analytics: Unity players are told what is trained and how, which their package hands to its vendor's
            analytics.
        hosts: machines of the run by name, the one where it is started first; none: this one only.
        port: first of the ports that are used between several machines.
        host_timeout_s: seconds for which a machine may be away before the run ends.
        python_path: folders from which Gymnasium and PettingZoo environments are imported, after that of the
            configuration file; relative ones are relative to it.
        keys: folder that `sparring keys` has made; `$SPARRING_KEYS` wins. What listens beyond loopback needs it.
    """

    transport: TransportName = "auto"
    recovery_interval: float = Field(default=30.0, gt=0)
    capacities: CapacitySettings = CapacitySettings()
    stall_timeout_s: float = Field(default=300.0, gt=0)
    stalls: StallSettings = StallSettings()
    logs: LogSettings = LogSettings()
    restarts: RestartSettings = RestartSettings()
    torch_threads: ThreadSettings = ThreadSettings()
    leave_cores_to_learners: bool = True
    stop_timeout_s: float = Field(default=20.0, gt=0)
    export: bool = True
    training_analytics: bool = False
    hosts: dict[str, HostSettings] = Field(default={})
    port: int = Field(default=5100, ge=1024, le=65_000)
    host_timeout_s: float = Field(default=600.0, gt=0)
    keys: str | None = Field(default=None, min_length=1)
    python_path: tuple[str, ...] = ()

    @field_validator("hosts")
    @classmethod
    def _named(cls, hosts: dict[str, HostSettings]) -> dict[str, HostSettings]:
        check_names(hosts)
        return hosts
