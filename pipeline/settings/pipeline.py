"""Defines the `pipeline` section, which configures the services of a run."""

import re
from typing import Literal

from pydantic import Field, field_validator

from sparring.pipeline.coordination.settings import CoordinationSettings, SettingsModel
from sparring.pipeline.settings.hosts import HostSettings
from sparring.pipeline.stepping.settings import SteppingSettings

TransportName = Literal["auto", "ipc", "tcp"]


class CapacitySettings(SettingsModel):
    """Limits the messages in each kind of queue, from all senders together.

    Attributes:
        step_batches: queue from stepping to assembly.
        segments: queue from assembly to coordination, and those from coordination to learners.
    """

    step_batches: int = Field(default=64, ge=2)
    segments: int = Field(default=64, ge=2)


class RestartSettings(SettingsModel):
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


class StallSettings(SettingsModel):
    """Limits the stalls of a run before it is ended.

    Attributes:
        budget: stalls within `period_s`.
        period_s: seconds in which stalls are counted.
    """

    budget: int = Field(default=3, ge=0)
    period_s: float = Field(default=3600.0, gt=0)


class LogSettings(SettingsModel):
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


class ThreadSettings(SettingsModel):
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
        torch_threads: torch threads of each process.
        leave_cores_to_learners: services other than learners leave as many CPU cores free as the learners have threads,
            if any remain (Linux); so do launched simulators, if each has a core then. Learners may run on all.
        stop_timeout_s: seconds for a service to stop in order.
        export: write every checkpoint as ONNX too, in a process of low priority, if the extra `onnx` is installed.
        training_analytics: send Unity players a description of the training, which their package hands to its vendor's
            analytics.
        hosts: machines of the run by name, the one on which it is started first; empty for this one only.
        port: first of the ports for connections between machines.
        host_timeout_s: seconds for which a machine may be unreachable before the run ends.
        python_path: folders with Gymnasium and PettingZoo environments, searched after that of the configuration file;
            relative paths are relative to it.
        keys: folder made by `sparring keys`; `$SPARRING_KEYS` wins. Required to listen beyond loopback.
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
        for name in hosts:  # a part of a topic's name
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", name):
                raise ValueError(f"got the host {name!r}; expected a name of letters, digits, - and _; choose another")
        return hosts
