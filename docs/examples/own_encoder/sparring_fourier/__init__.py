"""An encoder of vectors by Fourier features, with which a network fits quick changes (Li and Pathak 2021)."""

from pydantic import Field

from sparring.pipeline.networks.settings import EncoderSettings


class FourierSettings(EncoderSettings):
    """Configures an encoder of `type: fourier`; every process reads it, so torch is imported in the method.

    Attributes:
        scale: standard deviation of the initial frequencies.
    """

    kinds = ("vector",)
    scale: float = Field(default=1.0, gt=0)

    def build(self, shape, units, generator):
        from sparring_fourier.encoder import FourierEncoder

        return FourierEncoder(shape[0], units, self.scale, generator)
