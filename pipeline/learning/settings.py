"""This module defines the settings of a learner: hyperparameters, reward signals and checkpoints, in ML-Agents' terms.

A validator's message names the keys involved, so that a loader can point at their lines.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple, get_args

from pydantic import Field, field_validator, model_validator

from sparring.pipeline.demonstrations.episodes import DemoActions
from sparring.pipeline.networks.settings import HEADS, NetworkSettings, StrictSettings

TrainerType = Literal["ppo", "poca", "bc"]
Schedule = Literal["linear", "constant"]
RewardSignalName = Literal["extrinsic", "gail", "curiosity", "rnd"]

LEARNING_RATE_END: Final = 1e-10
EPSILON_END: Final = 0.1
BETA_END: Final = 1e-5


class Hyperparameters(StrictSettings):
    """Holds the hyperparameters of PPO and MA-POCA.

    Attributes:
        batch_size: steps in a minibatch.
        buffer_size: steps collected for an update.
        learning_rate: of Adam, at the start.
        beta: weight of the entropy bonus, at the start.
        epsilon: clip range of the probability ratio, at the start.
        lambd: lambda of the generalized advantage estimate.
        num_epoch: passes over the buffer in an update.
        shared_critic: actor and critic share one body.
        learning_rate_schedule: `linear` falls to 1e-10 over `max_steps`.
        beta_schedule: `linear` falls to 1e-5 over `max_steps`; defaults to the given `learning_rate_schedule`.
        epsilon_schedule: `linear` falls to 0.1 over `max_steps`; defaults to the given `learning_rate_schedule`.
        clip_value_loss: clip the value loss as the PPO paper's code does.
        decoupled_objective: correct for steps that an older version acted (`proximal`); without effect in lockstep.
            False leaves their weights out; with `ratio: joint` the clip is centered on the policy that acted, too.
        ratio: `per_dimension` clips the probability ratio of each continuous dimension and branch by itself, as
            ML-Agents does; `joint` clips that of the whole action, as in the PPO paper.
        max_grad_norm: largest norm of the gradient of all parameters together, which is scaled down to it; None for no
            limit. Cloning and reward networks have none.
        adam_epsilon: added to Adam's denominator; cloning and reward networks keep 1e-8.
    """

    batch_size: int = Field(default=1024, ge=1)
    buffer_size: int = Field(default=10240, ge=1)
    learning_rate: float = Field(default=3e-4, gt=0, le=1)
    beta: float = Field(default=5e-3, ge=0)
    epsilon: float = Field(default=0.2, gt=0, le=1)
    lambd: float = Field(default=0.95, ge=0, le=1)
    num_epoch: int = Field(default=3, ge=1)
    shared_critic: bool = False
    learning_rate_schedule: Schedule = "linear"
    beta_schedule: Schedule = "linear"
    epsilon_schedule: Schedule = "linear"
    clip_value_loss: bool = False
    decoupled_objective: bool = True
    ratio: Literal["joint", "per_dimension"] = "per_dimension"
    max_grad_norm: float | None = Field(default=None, gt=0)
    adam_epsilon: float = Field(default=1e-8, gt=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _schedules_follow(cls, data: Any) -> Any:
        schedule = data.get("learning_rate_schedule") if isinstance(data, dict) else None
        if schedule in get_args(Schedule):
            return {"beta_schedule": schedule, "epsilon_schedule": schedule, **data}
        return data

    @model_validator(mode="after")
    def _minibatch_fits(self) -> Hyperparameters:
        if self.batch_size > self.buffer_size:
            raise ValueError(
                f"got batch_size {self.batch_size} with buffer_size {self.buffer_size}; "
                "expected a minibatch that fits into the buffer; "
                "lower batch_size or raise buffer_size (several times batch_size is usual)"
            )
        return self


class SignalSettings(StrictSettings):
    """Holds the settings common to all reward signals.

    Attributes:
        gamma: discount of a later reward, per decision.
        strength: factor of the reward.
        network_settings: without effect, as in ML-Agents, which writes them for every signal.
    """

    gamma: float = Field(default=0.99, ge=0, le=1)
    strength: float = Field(default=1.0, ge=0)
    network_settings: NetworkSettings = NetworkSettings()


class ExtrinsicSettings(SignalSettings):
    """Configures the simulator's own reward.

    Attributes:
        normalize: divide rewards by the running standard deviation of their discounted sum, then clip them to +-10.
    """

    normalize: bool = False


class IntrinsicSettings(SignalSettings):
    """Configures a reward signal with a network of its own.

    Attributes:
        network_settings: shape of that network.
        learning_rate: of that network's Adam.
        encoding_size: old name of `network_settings.hidden_units`; without effect if `network_settings` are given.
    """

    learning_rate: float = Field(default=3e-4, gt=0, le=1)
    encoding_size: int | None = Field(default=None, ge=1)


class DemonstrationSettings(StrictSettings):
    """Names the demonstrations to learn from.

    Attributes:
        demo_path: a demonstration file or a folder of them.
        demo_actions: which action accompanies an observation in `.demo` files: that of the decision before it
            (`previous`), its `own`, or, under `auto`, the one detected in each file.
    """

    demo_path: str = Field(min_length=1)
    demo_actions: DemoActions = "auto"


class GailSettings(DemonstrationSettings, IntrinsicSettings):
    """Configures generative adversarial imitation of demonstrations.

    Attributes:
        use_actions: the discriminator reads actions too.
        use_vail: pass the discriminator's code through a variational bottleneck.
    """

    use_actions: bool = False
    use_vail: bool = False


class CuriositySettings(IntrinsicSettings):
    """Configures the reward for observations that a forward model predicts badly."""


class RndSettings(IntrinsicSettings):
    """Configures the reward for observations on which a distilled random network predicts badly."""

    learning_rate: float = Field(default=1e-4, gt=0, le=1)


class RewardSignals(StrictSettings):
    """Holds the reward signals of a behavior; one that is None is off.

    Attributes:
        extrinsic: the simulator's own reward.
        gail: imitation of demonstrations.
        curiosity: prediction error of a forward model.
        rnd: prediction error of a distilled random network.
    """

    extrinsic: ExtrinsicSettings | None = None
    gail: GailSettings | None = None
    curiosity: CuriositySettings | None = None
    rnd: RndSettings | None = None

    @model_validator(mode="after")
    def _not_empty(self) -> RewardSignals:
        if not self.named():
            raise ValueError(
                "got no reward signal; expected at least one of extrinsic, gail, curiosity, rnd; "
                "name a signal, or leave reward_signals out to get extrinsic"
            )
        return self

    def named(self) -> dict[RewardSignalName, SignalSettings]:
        """Returns the signals that are on, by name, always in the order extrinsic, gail, curiosity, rnd."""
        return {name: getattr(self, name) for name in get_args(RewardSignalName) if getattr(self, name) is not None}


class BehavioralCloningSettings(DemonstrationSettings):
    """Configures supervised imitation of demonstrations beside training.

    Attributes:
        steps: steps over which it fades to 0; 0 keeps it forever.
        strength: its share of the learning rate.
        samples_per_update: most demonstration steps of a pass; 0 for all.
        num_epoch: passes over them; None for that of the hyperparameters.
        batch_size: demonstration steps in a minibatch; None for that of the hyperparameters.
    """

    steps: int = Field(default=0, ge=0)
    strength: float = Field(default=1.0, gt=0)
    samples_per_update: int = Field(default=0, ge=0)
    num_epoch: int | None = Field(default=None, ge=1)
    batch_size: int | None = Field(default=None, ge=1)


class TrainerSettings(StrictSettings):
    """Configures the learner of one behavior name.

    Attributes:
        trainer_type: the algorithm.
        network_settings: shape of actor and critic.
        behavioral_cloning: imitation beside training; None for none.
        init_path: checkpoint to start from; None for fresh weights.
        keep_checkpoints: how many checkpoints are kept.
        checkpoint_interval: steps between checkpoints.
        even_checkpoints: spread `keep_checkpoints` evenly over `max_steps` instead.
        max_steps: steps after which the behavior is done.
        time_horizon: most steps in a segment.
        summary_freq: steps between summaries.
    """

    trainer_type: TrainerType = "ppo"
    hyperparameters: Hyperparameters = Hyperparameters()
    network_settings: NetworkSettings = NetworkSettings()
    reward_signals: RewardSignals = RewardSignals(extrinsic=ExtrinsicSettings())
    behavioral_cloning: BehavioralCloningSettings | None = None
    init_path: str | None = Field(default=None, min_length=1)
    keep_checkpoints: int = Field(default=5, ge=1)
    checkpoint_interval: int = Field(default=500_000, ge=1)
    even_checkpoints: bool = False
    max_steps: int = Field(default=500_000, ge=1)
    time_horizon: int = Field(default=64, ge=1)
    summary_freq: int = Field(default=50_000, ge=1)

    @field_validator("trainer_type", mode="before")
    @classmethod
    def _on_policy(cls, value: object) -> object:
        if value == "sac":
            raise ValueError(
                "got 'sac', which is not offered; expected ppo, poca or bc; "
                "write ppo and keep only the hyperparameters that ppo knows"
            )
        return value

    @model_validator(mode="after")
    def _algorithm_fits(self) -> TrainerSettings:
        units, shares_critic = self.network_settings.hidden_units, self.hyperparameters.shared_critic
        others = [name for name in self.reward_signals.named() if name != "extrinsic"]
        refusals = [
            ("bc", self.behavioral_cloning is None, "got trainer_type bc without behavioral_cloning; expected "
             "demonstrations to learn from; add behavioral_cloning with a demo_path"),
            ("bc", bool(others), f"got trainer_type bc with reward_signals {', '.join(others)}; expected no signal, "
             "because nothing is learned from rewards; remove reward_signals, or write ppo"),
            ("bc", shares_critic, "got trainer_type bc with hyperparameters.shared_critic true; expected no critic; "
             "remove shared_critic"),
            ("poca", units % HEADS > 0, f"got trainer_type poca with network_settings.hidden_units {units}; expected a "
             f"multiple of {HEADS}, one part for each attention head of the group's critic; set it to "
             f"{-(-units // HEADS) * HEADS}"),
            ("poca", shares_critic, "got trainer_type poca with hyperparameters.shared_critic true; expected a critic "
             "of its own, because it sees the whole group and an actor sees itself; remove shared_critic"),
        ]  # fmt: skip
        for trainer, is_refused, message in refusals:
            if self.trainer_type == trainer and is_refused:
                raise ValueError(message)
        return self

    @property
    def steps_between_checkpoints(self) -> int:
        """Returns `checkpoint_interval`, or the even share of `max_steps` if `even_checkpoints` is set."""
        return max(1, self.max_steps // self.keep_checkpoints) if self.even_checkpoints else self.checkpoint_interval


class Coefficients(NamedTuple):
    """Holds learning rate, clip range and entropy weight of one update."""

    learning_rate: float
    epsilon: float
    beta: float

    @classmethod
    def at(cls, settings: TrainerSettings, trained: int) -> Coefficients:
        """Returns the coefficients after `trained` steps of `max_steps`."""
        hyper, progress = settings.hyperparameters, trained / settings.max_steps
        return cls(
            learning_rate=scheduled(hyper.learning_rate_schedule, hyper.learning_rate, LEARNING_RATE_END, progress),
            epsilon=scheduled(hyper.epsilon_schedule, hyper.epsilon, EPSILON_END, progress),
            beta=scheduled(hyper.beta_schedule, hyper.beta, BETA_END, progress),
        )


def scheduled(schedule: Schedule, start: float, end: float, progress: float) -> float:
    """Returns `start`, or under a linear schedule the line from `start` to `end` at `progress` (0 to 1, beyond: `end`).

    A start below `end` stays: a schedule never rises.
    """
    if schedule == "constant" or start <= end:
        return start
    return end + (start - end) * max(0.0, 1.0 - progress)
