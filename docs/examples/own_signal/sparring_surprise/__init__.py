"""A reward for observations that a network has not yet learned to tell apart: the error of a copy of a random one."""

from sparring.pipeline.learning.settings import IntrinsicSettings


class SurpriseSettings(IntrinsicSettings):
    """Configures `reward_signals.surprise`; every process reads it, so torch is imported in the method."""

    def build(self, spec, generator, device, demonstrations):
        from sparring_surprise.network import Surprise

        return Surprise(spec, self, generator, device)
