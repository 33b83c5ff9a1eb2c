"""Settings of a network: encoders, body and memory, in ML-Agents' words."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

VisualEncoder = Literal["simple", "nature_cnn", "resnet", "match3", "fully_connected"]
GoalConditioning = Literal["hyper", "none"]


class MemorySettings(BaseModel):
    """A recurrent layer (LSTM) after the body.

    Attributes:
        sequence_length: steps that are trained as one sequence.
        memory_size: values that an agent remembers: hidden and cell state, half each.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    sequence_length: int = Field(default=64, ge=1)
    memory_size: int = Field(default=128, ge=2, multiple_of=2)


class NetworkSettings(BaseModel):
    """Shape of an actor, critic or reward network.

    Attributes:
        normalize: keep a running mean and variance of vector observations and normalise by them.
        hidden_units: width of each layer of the body.
        num_layers: layers of the body.
        vis_encode_type: encoder of image observations.
        memory: the recurrent layer; None for none.
        goal_conditioning_type: how goal observations condition the body.
        deterministic: act with the most likely action instead of a sample.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    normalize: bool = False
    hidden_units: int = Field(default=128, ge=1)
    num_layers: int = Field(default=2, ge=1)
    vis_encode_type: VisualEncoder = "simple"
    memory: MemorySettings | None = None
    goal_conditioning_type: GoalConditioning = "hyper"
    deterministic: bool = False
