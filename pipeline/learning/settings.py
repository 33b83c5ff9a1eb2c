"""This module defines the settings of a learner: hyperparameters, reward signals and checkpoints, in ML-Agents' terms.

A validator's message names the keys involved, so that a loader can point at their lines.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, TypeVar, get_args

from pydantic import ConfigDict, Field, SerializeAsAny, ValidationInfo, field_validator, model_validator
from pydantic_core import InitErrorDetails, ValidationError

from sparring.pipeline import plugins
from sparring.pipeline.demonstrations.episodes import DemoActions
from sparring.pipeline.errors import undefined
from sparring.pipeline.networks.settings import HEADS, NetworkSettings, StrictSettings, each, named_section, plugin
from sparring.pipeline.specs import BehaviorSpec

if TYPE_CHECKING:
    import torch

    from sparring.pipeline.demonstrations.library import Demonstrations
    from sparring.pipeline.learning.algorithm import Algorithm, Parts
    from sparring.pipeline.learning.signals import RewardNetwork
    from sparring.pipeline.networks.actor import Actor

Schedule = Literal["linear", "constant"]

LEARNING_RATE_END: Final = 1e-10
EPSILON_END: Final = 0.1
BETA_END: Final = 1e-5


class TrainerHyperparameters(StrictSettings):
    """Configures an algorithm, and makes what it consists of; a trainer's plug-in is a subclass.

    Attributes:
        batch_size: steps in a minibatch.
        buffer_size: steps collected for an update.
        learning_rate: of Adam, at the start.
        learning_rate_schedule: `linear` falls to 1e-10 over `max_steps`.
        groups: the algorithm trains on segments of whole groups, and learns from rewards of groups.
        has_limited_lag: segments that are older than `pipeline.max_policy_lag` versions are dropped.
        shares_minibatches: `pipeline.ranks` processes can share its minibatches.
        splits_segments: an update takes exactly `update_steps`; otherwise it takes all segments that have arrived.
        agent_steps: an update waits for at least as many steps of each agent; 0 where their number does not matter.
    """

    batch_size: int = Field(default=1024, ge=1)
    buffer_size: int = Field(default=10240, ge=1)
    learning_rate: float = Field(default=3e-4, gt=0, le=1)
    learning_rate_schedule: Schedule = "linear"

    groups: ClassVar[bool] = False
    has_limited_lag: ClassVar[bool] = True
    shares_minibatches: ClassVar[bool] = True
    splits_segments: ClassVar[bool] = True
    agent_steps: ClassVar[int] = 0

    def algorithm(self, parts: Parts) -> Algorithm:
        """Builds the algorithm with its networks.

        Raises:
            Unsupported: no network can be built for the spec or the settings.
        """
        raise undefined(self, "algorithm")

    @classmethod
    def actor(
        cls, spec: BehaviorSpec, settings: NetworkSettings, generator: torch.Generator | None = None, values: int = 0
    ) -> Actor:
        """Builds the policy: learners train it, stepping acts with it, and exports are made from it.

        Args:
            spec: observations and actions of the behavior.
            settings: the network's settings.
            generator: random source of the initial weights; unneeded if weights are loaded afterwards.
            values: further outputs, for a critic that shares its body.

        Raises:
            Unsupported: no network can be built for the spec or the settings.
        """
        from sparring.pipeline.networks.actor import Actor

        return Actor(spec, settings, generator, values)

    @property
    def update_steps(self) -> int:
        """Returns the new steps that an update waits for."""
        return self.buffer_size

    def step_budget(self, overlap: int) -> int:
        """Returns the most steps in flight: produced, and not yet part of a published update.

        Args:
            overlap: buffers that are collected while one trains.
        """
        return (1 + overlap) * self.update_steps

    @property
    def cloning_epochs(self) -> int:
        """Returns the passes over demonstrations in an update, unless `behavioral_cloning` names another number."""
        return 3

    @property
    def shares_critic(self) -> bool:
        """Returns whether the last outputs of the actor are values."""
        return False

    def refusal(self, settings: TrainerSettings) -> str | None:
        """Returns why the algorithm cannot be trained with other settings of the behavior: got, expected, remedy."""
        return None

    def recordings(self, settings: TrainerSettings) -> DemonstrationSettings:
        """Returns where the recorded steps are that the algorithm learns from without a simulator.

        Raises:
            ValueError: it learns only from a simulator, or the settings name no steps: got, expected, remedy.
        """
        raise ValueError(
            f"got trainer_type {settings.trainer_type}; expected bc or sac, which learn without a simulator; train it "
            "with one, or choose another trainer"
        )


class Hyperparameters(TrainerHyperparameters):
    """Holds the hyperparameters of PPO and MA-POCA.

    Attributes:
        beta: weight of the entropy bonus, at the start.
        epsilon: clip range of the probability ratio, at the start.
        lambd: lambda of the generalized advantage estimate.
        num_epoch: passes over the buffer in an update.
        shared_critic: actor and critic share one body.
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

    beta: float = Field(default=5e-3, ge=0)
    epsilon: float = Field(default=0.2, gt=0, le=1)
    lambd: float = Field(default=0.95, ge=0, le=1)
    num_epoch: int = Field(default=3, ge=1)
    shared_critic: bool = False
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

    @property
    def cloning_epochs(self) -> int:
        return self.num_epoch

    @property
    def shares_critic(self) -> bool:
        return self.shared_critic


class PPOHyperparameters(Hyperparameters):
    """Configures PPO."""

    def algorithm(self, parts: Parts) -> Algorithm:
        from sparring.pipeline.learning.ppo import build

        return build(parts)


class POCAHyperparameters(Hyperparameters):
    """Configures MA-POCA."""

    groups = True

    def algorithm(self, parts: Parts) -> Algorithm:
        from sparring.pipeline.learning.poca import build

        return build(parts)

    def refusal(self, settings: TrainerSettings) -> str | None:
        if (units := settings.network_settings.hidden_units) % HEADS:
            return (
                f"got trainer_type poca with network_settings.hidden_units {units}; expected a multiple of {HEADS}, "
                f"one part for each attention head of the group's critic; set it to {-(-units // HEADS) * HEADS}"
            )
        if self.shared_critic:
            return (
                "got trainer_type poca with hyperparameters.shared_critic true; expected a critic of its own, because "
                "it sees the whole group and an actor sees itself; remove shared_critic"
            )
        return None


class BCHyperparameters(Hyperparameters):
    """Configures behavioral cloning alone."""

    shares_minibatches = False

    def algorithm(self, parts: Parts) -> Algorithm:
        from sparring.pipeline.learning.bc import build

        return build(parts)

    def refusal(self, settings: TrainerSettings) -> str | None:
        if settings.behavioral_cloning is None:
            return (
                "got trainer_type bc without behavioral_cloning; expected demonstrations to learn from; add "
                "behavioral_cloning with a demo_path"
            )
        if others := [name for name in settings.reward_signals.named() if name != EXTRINSIC]:
            return (
                f"got trainer_type bc with reward_signals {', '.join(others)}; expected no signal, because nothing is "
                "learned from rewards; remove reward_signals, or write ppo"
            )
        if self.shared_critic:
            return (
                "got trainer_type bc with hyperparameters.shared_critic true; expected no critic; remove shared_critic"
            )
        return None

    def recordings(self, settings: TrainerSettings) -> DemonstrationSettings:
        assert settings.behavioral_cloning is not None
        return settings.behavioral_cloning


EXTRINSIC: Final = "extrinsic"
"""Name of the simulator's own reward."""


class SignalSettings(StrictSettings):
    """Holds the settings common to all reward signals; a plug-in is a subclass of it, or of `IntrinsicSettings`.

    Attributes:
        gamma: discount of a later reward, per decision.
        strength: factor of the reward.
        network_settings: without effect, as in ML-Agents, which writes them for every signal.
    """

    gamma: float = Field(default=0.99, ge=0, le=1)
    strength: float = Field(default=1.0, ge=0)
    network_settings: NetworkSettings = Field(default_factory=NetworkSettings)

    def build(
        self,
        spec: BehaviorSpec,
        generator: torch.Generator,
        device: torch.device,
        demonstrations: Demonstrations | None,
    ) -> RewardNetwork:
        """Builds what computes the rewards of one behavior; it is called for all signals but `extrinsic`.

        Args:
            spec: observations and actions of the behavior.
            generator: random source of the initial weights.
            device: device of the networks.
            demonstrations: those that the settings name, if they derive from `DemonstrationSettings`; None for networks
                whose weights are only loaded.

        Raises:
            Unsupported: no network can be built for the spec or the settings.
        """
        raise undefined(self, "build")


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
        reward: form of the reward, from the discriminator's logit h: `gail` log(1 + e^h), which is above 0; `airl` h
            (Fu et al. 2018); `fairl` -h e^h (Ghasemipour et al. 2019).
        gradient_penalty: weight of the gradient penalty; a small one lets the discriminator tell similar steps apart.
    """

    use_actions: bool = False
    use_vail: bool = False
    reward: Literal["gail", "airl", "fairl"] = "gail"
    gradient_penalty: float = Field(default=10.0, ge=0)

    def build(
        self,
        spec: BehaviorSpec,
        generator: torch.Generator,
        device: torch.device,
        demonstrations: Demonstrations | None,
    ) -> RewardNetwork:
        from sparring.pipeline.learning.signals.gail import Gail

        return Gail(spec, self, demonstrations, generator, device)


class CuriositySettings(IntrinsicSettings):
    """Configures the reward for observations that a forward model predicts badly."""

    def build(
        self,
        spec: BehaviorSpec,
        generator: torch.Generator,
        device: torch.device,
        demonstrations: Demonstrations | None,
    ) -> RewardNetwork:
        from sparring.pipeline.learning.signals.novelty import Curiosity

        return Curiosity(spec, self, generator, device)


class RndSettings(IntrinsicSettings):
    """Configures the reward for observations on which a distilled random network predicts badly."""

    learning_rate: float = Field(default=1e-4, gt=0, le=1)

    def build(
        self,
        spec: BehaviorSpec,
        generator: torch.Generator,
        device: torch.device,
        demonstrations: Demonstrations | None,
    ) -> RewardNetwork:
        from sparring.pipeline.learning.signals.novelty import Rnd

        return Rnd(spec, self, generator, device)


_OWN_SIGNALS: Final = (EXTRINSIC, "gail", "curiosity", "rnd")
"""The order in which critics and checkpoints hold them."""

SignalT = TypeVar("SignalT", bound=SignalSettings)


class RewardSignals(StrictSettings):
    """Holds the reward signals of a behavior by the names of their plug-ins; one that is None or left out is off."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _of_plugins(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        wanted = {name: value for name, value in data.items() if value is not None}
        if not wanted:
            raise ValueError(
                f"got no reward signal; expected at least one of {', '.join(plugins.names(plugins.REWARD_SIGNALS))}; "
                "name a signal, or leave reward_signals out to get extrinsic"
            )
        found = each(wanted, partial(cls._of_plugin, info))
        order = (*_OWN_SIGNALS, *plugins.names(plugins.REWARD_SIGNALS))
        return {name: found[name] for name in order if name in found}

    @staticmethod
    def _of_plugin(info: ValidationInfo, name: str, value: Any) -> Any:
        if name not in plugins.names(plugins.REWARD_SIGNALS):
            raise ValidationError.from_exception_data(name, [InitErrorDetails(type="extra_forbidden", input=value)])
        return named_section(plugins.REWARD_SIGNALS, name, value, info)

    def named(self) -> dict[str, SignalSettings]:
        """Returns the signals that are on, by name: those of this package first, in a fixed order."""
        return dict(self.__pydantic_extra__ or {})

    def find(self, kind: type[SignalT], name: str) -> SignalT | None:
        """Returns a signal's settings; None if it is off."""
        found = self.named().get(name)
        return found if isinstance(found, kind) else None

    @property
    def extrinsic(self) -> ExtrinsicSettings | None:
        """Returns the settings of the simulator's own reward; None if it is off."""
        return self.find(ExtrinsicSettings, EXTRINSIC)

    @property
    def gail(self) -> GailSettings | None:
        """Returns the settings of imitation by a discriminator; None if it is off."""
        return self.find(GailSettings, "gail")


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


class OfflineSettings(DemonstrationSettings):
    """Names the steps that `sparring train --offline` learns from, and how a trainer with critics does so.

    Attributes:
        objective: `cql` learns from rewards, with a penalty on the values of actions that were not taken (Kumar et al.
            2020, arXiv 2006.04779); `iq_learn` from the actions alone, as from demonstrations (Garg et al. 2021, arXiv
            2106.12142).
        weight: of the penalty of `cql`; of the squared rewards that `iq_learn` implies, whose factor is 1 / (4 weight).
    """

    objective: Literal["cql", "iq_learn"] = "cql"
    weight: float = Field(default=1.0, gt=0)


class TrainerSettings(StrictSettings):
    """Configures the learner of one behavior name.

    Attributes:
        trainer_type: the algorithm.
        hyperparameters: of that algorithm.
        network_settings: shape of actor and critic.
        behavioral_cloning: imitation beside training; None for none.
        offline: steps to learn from without a simulator; without effect otherwise.
        init_path: checkpoint to start from; None for fresh weights.
        keep_checkpoints: how many checkpoints are kept.
        checkpoint_interval: steps between checkpoints.
        even_checkpoints: spread `keep_checkpoints` evenly over `max_steps` instead.
        max_steps: steps after which the behavior is done.
        time_horizon: most steps in a segment.
        summary_freq: steps between summaries.
    """

    trainer_type: str = "ppo"
    hyperparameters: SerializeAsAny[TrainerHyperparameters] = Field(
        default_factory=lambda data: plugins.load(plugins.TRAINERS, data.get("trainer_type", "ppo"))()
    )
    network_settings: NetworkSettings = Field(default_factory=NetworkSettings)
    reward_signals: RewardSignals = Field(default_factory=lambda: RewardSignals.model_validate({EXTRINSIC: {}}))
    behavioral_cloning: BehavioralCloningSettings | None = None
    offline: OfflineSettings | None = None
    init_path: str | None = Field(default=None, min_length=1)
    keep_checkpoints: int = Field(default=5, ge=1)
    checkpoint_interval: int = Field(default=500_000, ge=1)
    even_checkpoints: bool = False
    max_steps: int = Field(default=500_000, ge=1)
    time_horizon: int = Field(default=64, ge=1)
    summary_freq: int = Field(default=50_000, ge=1)

    @field_validator("trainer_type")
    @classmethod
    def _known_trainer(cls, name: str) -> str:
        plugin(plugins.TRAINERS, name)
        return name

    @model_validator(mode="before")
    @classmethod
    def _of_trainer(cls, data: Any, info: ValidationInfo) -> Any:
        """Reads the hyperparameters as the section of the trainer; without a known one they are left out."""
        if not isinstance(data, dict) or "hyperparameters" not in data:
            return data
        trainer, rest = data.get("trainer_type", "ppo"), {**data}
        own = {"hyperparameters": rest.pop("hyperparameters")}
        is_known = isinstance(trainer, str) and trainer in plugins.names(plugins.TRAINERS)
        if is_known:
            rest |= each(own, lambda _, value: named_section(plugins.TRAINERS, trainer, value, info))
        return rest

    @model_validator(mode="after")
    def _algorithm_fits(self) -> TrainerSettings:
        if (refused := self.hyperparameters.refusal(self)) is not None:
            raise ValueError(refused)
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
    def at(cls, hyper: Hyperparameters, progress: float) -> Coefficients:
        """Returns the coefficients at a share of `max_steps`."""
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
