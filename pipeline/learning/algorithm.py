"""This module declares what a learner expects of its algorithm and its buffer, and builds both from the settings."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from sparring.pipeline.learning.bc import BC
from sparring.pipeline.learning.buffer import SegmentBuffer
from sparring.pipeline.learning.cloning import Cloning
from sparring.pipeline.learning.group_buffer import GroupBuffer
from sparring.pipeline.learning.optimizer import Adam
from sparring.pipeline.learning.poca import POCA
from sparring.pipeline.learning.ppo import PPO
from sparring.pipeline.learning.report import UpdateReport
from sparring.pipeline.learning.settings import TrainerSettings
from sparring.pipeline.learning.signals import Signals
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.networks.actor import Actor
from sparring.pipeline.specs import BehaviorSpec


class Algorithm(Protocol):
    """An algorithm trains networks on batches of its own kind."""

    actor: Actor
    modules: nn.ModuleDict
    optimizer: Adam
    signals: Signals
    cloning: Cloning | None

    def update(self, batch: Any, version: int, trained: int) -> UpdateReport:
        """Trains on a batch."""


class Buffer(Protocol):
    """A buffer holds finished segments, the oldest first."""

    steps: int

    def add(self, record: Segments) -> None:
        """Appends the segments of `record`."""

    def whole(self, steps: int) -> int:
        """Returns how many steps `take` would remove."""

    def take(self, steps: int) -> Any:
        """Removes about `steps` of the oldest steps and returns them as a batch."""

    def drop_stale(self, version: int, max_lag: int, keep_at_least: int) -> int:
        """Drops segments older than `max_lag` versions while enough steps remain; returns how many steps it dropped."""


def build_algorithm(
    behavior: str,
    spec: BehaviorSpec,
    settings: TrainerSettings,
    generator: torch.Generator,
    *,
    learns: bool,
    device: torch.device,
) -> tuple[Algorithm, Buffer]:
    """Builds the algorithm that `trainer_type` names, and an empty buffer for it; arguments are those of `Learner`."""
    length = settings.network_settings.sequence_length
    if settings.trainer_type == "bc":
        return BC(behavior, spec, settings, generator, learns=learns, device=device), SegmentBuffer(length)
    if settings.trainer_type == "poca":
        return POCA(behavior, spec, settings, generator, learns=learns, device=device), GroupBuffer(length)
    return PPO(behavior, spec, settings, generator, learns=learns, device=device), SegmentBuffer(length)
