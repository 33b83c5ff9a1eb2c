"""Opponents of even strength: a snapshot is sampled the more often, the less certain the result against it is."""

from pydantic import Field

from sparring.pipeline.coordination.settings import OpponentSampling


class EvenSampling(OpponentSampling):
    """Configures `opponent_sampling: {type: even}`: weights rate (1 - rate), at least `least` (Vinyals et al. 2019).

    Attributes:
        least: weight of a snapshot against which the result is certain.
    """

    least: float = Field(default=0.01, gt=0)

    def weights(self, candidates):
        return [max(self.least, one.rate * (1 - one.rate)) for one in candidates]
