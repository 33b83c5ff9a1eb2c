"""This module defines the settings of a network, in ML-Agents' terms, and checks what networks can be built for.

The check builds none, because stepping makes it at a simulator's Hello.
"""

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from sparring.pipeline.errors import ExplainedError, SettingsError
from sparring.pipeline.specs import ActionSpec, BehaviorSpec

VisualEncoder = Literal["simple", "nature_cnn", "resnet", "match3", "fully_connected"]
GoalConditioning = Literal["hyper", "none"]
Activation = Literal["silu", "tanh"]
Initialization = Literal["he_normal", "orthogonal"]

ACTION_LIMIT: Final = 3.0
"""Default of `network_settings.action_limit` (ML-Agents)."""

HEADS: Final = 4
"""Heads of the attention over entities and over group members."""

SMALLEST: Final[dict[str, int]] = {"simple": 20, "nature_cnn": 36, "resnet": 15, "match3": 5, "fully_connected": 1}
"""Fewest pixels of an image's height and width, so that something is left after the last convolution (ML-Agents)."""


class StrictSettings(BaseModel):
    """Refuses unknown keys, other types and numbers that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Unsupported(ExplainedError, SettingsError):
    """Reports that the settings or a behavior's spec need what cannot be built."""


class MemorySettings(StrictSettings):
    """Configures a recurrent layer (LSTM) after the body.

    Attributes:
        sequence_length: steps that are trained as one sequence.
        memory_size: values in an agent's memory: hidden and cell state, half each.
    """

    sequence_length: int = Field(default=64, ge=1)
    memory_size: int = Field(default=128, ge=2, multiple_of=2)


class NetworkSettings(StrictSettings):
    """Configures an actor, critic or reward network.

    Attributes:
        normalize: keep a running mean and variance of vector observations and normalize by them.
        hidden_units: width of each layer of the body.
        num_layers: layers of the body.
        vis_encode_type: encoder of image observations.
        memory: the recurrent layer; None for none.
        goal_conditioning_type: how goal observations condition the body.
        deterministic: act with the most likely action instead of a sample.
        previous_action: the networks read the agent's previous action: continuous actions as the simulator received
            them, discrete ones as one 1 per branch; zeros at the first decision of an episode.
        activation: function of the hidden units; image encoders keep their leaky ReLU.
        action_limit: continuous samples are clipped to +- this and divided by it, so that simulators receive [-1, 1].
            The standard deviation starts at 1: a limit of 1 explores three times as far as 3, ML-Agents' own.
        initialization: distribution of the initial weights of the body and of the outputs; image and entity encoders,
            hypernetworks and recurrent layers keep their own.
    """

    normalize: bool = False
    hidden_units: int = Field(default=128, ge=1)
    num_layers: int = Field(default=2, ge=1)
    vis_encode_type: VisualEncoder = "simple"
    memory: MemorySettings | None = None
    goal_conditioning_type: GoalConditioning = "hyper"
    deterministic: bool = False
    previous_action: bool = False
    activation: Activation = "silu"
    action_limit: float = Field(default=ACTION_LIMIT, gt=0)
    initialization: Initialization = "he_normal"

    @property
    def sequence_length(self) -> int:
        """Returns the steps from one stored memory of an agent to the next; 0 if agents carry nothing."""
        return self.memory.sequence_length if self.memory is not None else int(self.previous_action)

    def carried(self, actions: ActionSpec) -> int:
        """Returns how many numbers an agent carries from one decision to the next: memory, then previous action."""
        return (0 if self.memory is None else self.memory.memory_size) + self.previous_size(actions)

    def previous_size(self, actions: ActionSpec) -> int:
        """Returns the number of features of the previous action; 0 if networks do not read it."""
        return actions.continuous + actions.mask_size if self.previous_action else 0


def refuse_unsupported(spec: BehaviorSpec, settings: NetworkSettings) -> None:
    """Refuses a spec and settings for which no network can be built.

    Raises:
        Unsupported: names the observation or setting.
    """
    smallest, units = SMALLEST[settings.vis_encode_type], settings.hidden_units
    for one in spec.observations:
        if one.kind == "image" and (pixels := min(one.shape[1:])) < smallest:
            raise Unsupported(
                got=f"image {one.name!r} of {one.shape[1]} x {one.shape[2]} pixels with vis_encode_type "
                f"{settings.vis_encode_type!r}",
                expected=f"at least {smallest} x {smallest}",
                remedy="send a larger image, or set network_settings.vis_encode_type to one of "
                f"{[kind for kind, size in SMALLEST.items() if size <= pixels]}",
            )
        if one.kind == "entities" and units % HEADS:
            raise Unsupported(
                got=f"hidden_units {units} with entities {one.name!r}",
                expected=f"a multiple of {HEADS}, one part for each attention head",
                remedy=f"set network_settings.hidden_units to {-(-units // HEADS) * HEADS}",
            )
    if all(one.kind == "goal" for one in spec.observations) and settings.goal_conditioning_type == "hyper":
        raise Unsupported(
            got="goal observations alone, with goal_conditioning_type 'hyper'",
            expected="another observation, whose processing the goal can condition",
            remedy="set network_settings.goal_conditioning_type to none, so that goals are read as vectors",
        )
