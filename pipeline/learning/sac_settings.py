"""This module defines the hyperparameters of SAC, with ML-Agents' keys and defaults."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from pydantic import Field

from sparring.pipeline.learning.settings import DemonstrationSettings, Schedule, TrainerHyperparameters, TrainerSettings
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.specs import BehaviorSpec

if TYPE_CHECKING:
    import torch

    from sparring.pipeline.learning.algorithm import Algorithm, Parts
    from sparring.pipeline.networks.actor import Actor

_UPDATE_STEPS: Final = 32
"""Steps after which new weights are published: few, because the policy that acts changes only then, and enough that
their publication takes little of the time."""
CLONING_STEPS: Final = 128
"""Steps after which a pass over the demonstrations is due."""


class SACHyperparameters(TrainerHyperparameters):
    """Configures SAC.

    Attributes:
        batch_size: steps in a minibatch, of which each gradient step samples one.
        buffer_size: places of the replay; a segment takes one more than it has steps.
        learning_rate_schedule: `linear` falls to 1e-10 over `max_steps`.
        buffer_init_steps: steps that are stored before the first gradient step.
        tau: share by which target critics approach the critics after each gradient step.
        steps_per_update: steps of agents for each gradient step.
        save_replay_buffer: the replay stays on disk, and a resumed run continues with it.
        init_entcoef: entropy coefficient at the start, of each kind of action.
        reward_signal_steps_per_update: steps of agents for each gradient step of the networks of reward signals; None
            for `steps_per_update`.
        discrete_target_entropy: entropy that each branch of discrete actions aims at, as a share of that of uniform
            choices; a small one makes the policy nearly deterministic early, and the replay of one kind.
        n_step: steps whose rewards are summed before the critics estimate the rest.
    """

    batch_size: int = Field(default=128, ge=1)
    buffer_size: int = Field(default=50_000, ge=1)
    learning_rate_schedule: Schedule = "constant"
    buffer_init_steps: int = Field(default=0, ge=0)
    tau: float = Field(default=0.005, gt=0, le=1)
    steps_per_update: float = Field(default=1.0, gt=0)
    save_replay_buffer: bool = False
    init_entcoef: float = Field(default=1.0, gt=0)
    reward_signal_steps_per_update: float | None = Field(default=None, gt=0)
    discrete_target_entropy: float = Field(default=0.2, ge=0, lt=1)
    n_step: int = Field(default=1, ge=1)

    has_limited_lag = False
    shares_minibatches = False
    splits_segments = False
    agent_steps = 4  # a segment takes one more place in the replay than it has steps

    def algorithm(self, parts: Parts) -> Algorithm:
        from sparring.pipeline.learning.sac import SAC

        return SAC(parts, self)

    @classmethod
    def actor(
        cls, spec: BehaviorSpec, settings: NetworkSettings, generator: torch.Generator | None = None, values: int = 0
    ) -> Actor:
        from sparring.pipeline.networks.squashed import SquashedActor

        return SquashedActor(spec, settings, generator, values)

    @property
    def update_steps(self) -> int:
        return max(_UPDATE_STEPS, math.ceil(self.steps_per_update))

    @property
    def cloning_epochs(self) -> int:
        return 1

    def gradient_steps(self, stored: int, new: int, every: float) -> int:
        """Returns how many gradient steps follow new steps: one for each `every` steps beyond the first.

        The first are `buffer_init_steps`, at least a minibatch.

        Args:
            stored: steps in the replay so far, the new ones included.
            new: new steps.
            every: steps of agents for each gradient step.
        """
        first = max(self.buffer_init_steps, self.batch_size)
        now, before = (max(0, steps - first) / every for steps in (stored, stored - new))
        return math.floor(now) - math.floor(before)

    def recordings(self, settings: TrainerSettings) -> DemonstrationSettings:
        if settings.offline is None:
            raise ValueError(
                "got trainer_type sac without offline; expected recorded steps to learn from; add offline with a "
                "demo_path"
            )
        if settings.network_settings.sequence_length:
            raise ValueError(
                "got trainer_type sac with a memory or previous_action; expected neither, because recorded steps hold "
                "no memories; remove network_settings.memory and previous_action"
            )
        return settings.offline

    def refusal(self, settings: TrainerSettings) -> str | None:
        if self.buffer_size <= settings.time_horizon:
            return (
                f"got trainer_type sac with hyperparameters.buffer_size {self.buffer_size} and time_horizon "
                f"{settings.time_horizon}; expected a replay that holds more than one segment; raise buffer_size"
            )
        if self.buffer_init_steps >= settings.max_steps:
            return (
                f"got trainer_type sac with hyperparameters.buffer_init_steps {self.buffer_init_steps} and max_steps "
                f"{settings.max_steps}; expected fewer, because nothing is learned before; raise max_steps"
            )
        if self.n_step > 1 and settings.network_settings.memory is not None:
            return (
                f"got trainer_type sac with hyperparameters.n_step {self.n_step} and network_settings.memory; expected "
                "1, because each step of a sequence is trained; remove n_step or memory"
            )
        return None
