"""This module trains a policy by behavioral cloning alone."""

from dataclasses import dataclass

from sparring.pipeline.learning.actor_critic import ActorCritic
from sparring.pipeline.learning.algorithm import Algorithm, Parts
from sparring.pipeline.learning.buffer import Batch
from sparring.pipeline.learning.cloning import Cloning
from sparring.pipeline.learning.losses import UpdateReport, lags
from sparring.pipeline.learning.optimizer import Adam
from sparring.pipeline.learning.signals import Signals


def build(parts: Parts) -> "BC":
    """Builds an actor, and what trains it."""
    settings = parts.settings
    actor = settings.hyperparameters.actor(parts.spec, settings.network_settings, parts.generator)
    networks = ActorCritic(actor, None, settings)
    return BC(networks, parts.adam(networks.modules), parts.signals(), parts.cloning(networks))


@dataclass(eq=False)
class BC(Algorithm):
    """Trains the actor of one behavior by cloning alone, while the simulator shows how well it performs.

    After each `buffer_size` steps of the simulator, whose rewards are ignored, `num_epoch` passes over the
    demonstrations follow. There is no critic.

    Attributes:
        networks: the actor alone, which learns.
        optimizer: holds the actor's parameters, which the optimizer of the cloning changes.
        signals: none with a network.
        cloning: the training; None if the weights are only loaded.
    """

    networks: ActorCritic
    optimizer: Adam
    signals: Signals
    cloning: Cloning | None

    def update(self, batch: Batch, version: int, trained: int) -> UpdateReport:
        """Trains on the demonstrations.

        Args:
            batch: steps of the policy, which are only counted.
            version: version of the current weights.
            trained: steps counted before, for the schedule.
        """
        return self.update_offline(batch.steps, trained)._replace(lags=lags(version, batch.versions))

    def update_offline(self, steps: int, trained: int) -> UpdateReport:
        """Trains on the demonstrations, as after so many steps."""
        cloning = self.cloning
        assert cloning is not None
        statistics = cloning.update(trained)
        # BC ignores all rewards by design.
        return UpdateReport(statistics, steps, cloning.minibatches, cloning.skipped, (), group_rewards=False)
