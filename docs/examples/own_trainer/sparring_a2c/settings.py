"""The section `hyperparameters` of `trainer_type: a2c`. Every process reads it, so torch is imported in a method."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from sparring.pipeline.learning.settings import TrainerHyperparameters, TrainerSettings

if TYPE_CHECKING:
    from sparring.pipeline.learning.algorithm import Algorithm, Parts


class A2CHyperparameters(TrainerHyperparameters):
    """Configures A2C; `buffer_size` steps are one minibatch.

    Attributes:
        beta: weight of the entropy bonus.
        lambd: lambda of the advantage estimate; 1 for returns of as many steps as a segment has.
        value_weight: weight of the value loss.
        max_grad_norm: largest norm of the gradient.
    """

    buffer_size: int = Field(default=64, ge=1)
    learning_rate: float = Field(default=7e-4, gt=0, le=1)
    beta: float = Field(default=0.0, ge=0)
    lambd: float = Field(default=1.0, ge=0, le=1)
    value_weight: float = Field(default=0.5, ge=0)
    max_grad_norm: float = Field(default=0.5, gt=0)

    shares_minibatches = False

    def algorithm(self, parts: Parts) -> Algorithm:
        from sparring_a2c.algorithm import A2C

        return A2C(parts, self)

    def refusal(self, settings: TrainerSettings) -> str | None:
        if settings.network_settings.memory is not None:
            return "got trainer_type a2c with a memory; expected none; remove network_settings.memory"
        return None
