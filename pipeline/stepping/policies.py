"""Policies act with the weights of each behavior; no other file of stepping uses torch."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from sparring.pipeline import plugins
from sparring.pipeline.messages.state import PolicyWeights
from sparring.pipeline.networks.actor import Actor
from sparring.pipeline.networks.device import CPU, Device, load_arrays, move_parameters
from sparring.pipeline.networks.distributions import Source
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.specs import ActionSpec, Array, BehaviorSpec
from sparring.pipeline.stepping.acting import Carried, Masks
from sparring.pipeline.stepping.steps import SampledActions


class HasNetwork(Protocol):
    """The settings of a behavior have those of its network."""

    @property
    def trainer_type(self) -> str:
        """Returns the name of the trainer, which brings the actor."""

    @property
    def network_settings(self) -> NetworkSettings:
        """Returns the settings of its network."""


@dataclass(frozen=True)
class ScriptedPolicy:
    """Simulators play a scripted policy themselves: no network acts, and they ignore the actions.

    Attributes:
        actions: of the behavior.
        version: number of the opponent.
        script: name that the simulators know.
    """

    actions: ActionSpec
    version: int
    script: str
    carried: int = 0

    def act(self, observations: tuple[Array, ...], masks: Masks, carried: Carried = None) -> SampledActions:
        """Returns zeros for all rows."""
        del masks, carried
        rows = len(observations[0])
        zeros = np.zeros((rows, self.actions.continuous), np.float32)
        discrete = np.zeros((rows, len(self.actions.discrete)), np.int32)
        return SampledActions(continuous=zeros, executed=zeros, discrete=discrete, log_probs=np.zeros(rows, np.float32))


class NetworkPolicy:
    """An actor chooses actions with the weights of one version.

    Args:
        spec: of the behavior.
        settings: of the network.
        source: random source of the sampling.
        device: that the network is evaluated on.
        trainer: name of the trainer that brings the actor.
    """

    script: Final = ""

    def __init__(
        self,
        spec: BehaviorSpec,
        settings: NetworkSettings,
        source: Source,
        device: Device = CPU,
        trainer: str = "ppo",
    ) -> None:
        self.version = 0
        actor: Actor = plugins.load(plugins.TRAINERS, trainer).actor(spec, settings)
        self._actor = actor
        move_parameters(self._actor, device)
        self._acting = self._actor.frozen()
        self._deterministic = settings.deterministic
        self._source = source

    def load(self, weights: PolicyWeights) -> None:
        """Loads newer weights.

        Raises:
            CheckpointError: the weights do not fit the network.
        """
        load_arrays(self._actor, weights.arrays)
        self._acting = self._actor.frozen()
        self.version = weights.version

    @property
    def carried(self) -> int:
        """Returns how many numbers an agent carries from one decision to the next."""
        return self._acting.carried

    def act(self, observations: tuple[Array, ...], masks: Masks, carried: Carried = None) -> SampledActions:
        """Chooses actions for all rows in one forward pass and updates `carried` in place."""
        continuous, discrete, log_probs = self._acting.act(
            observations, masks, self._source, self._deterministic, carried
        )
        executed = self._acting.executed(continuous)
        return SampledActions(continuous=continuous, executed=executed, discrete=discrete, log_probs=log_probs)


class Policies:
    """Policies hold the latest policy of each behavior, built once its spec is known, and its ghosts.

    Args:
        settings: by behavior name; behaviors may be added.
        seed: of the sampling; each behavior gets its own random stream.
        device: that networks are evaluated on.

    Attributes:
        current: latest policy by behavior name.
        ghosts: fixed policies by behavior name and number; agents share one copy.
    """

    def __init__(self, settings: Mapping[str, HasNetwork], seed: int, device: Device = CPU) -> None:
        self.current: dict[str, NetworkPolicy] = {}
        self.ghosts: dict[tuple[str, int], NetworkPolicy | ScriptedPolicy] = {}
        self._settings = settings
        self._named = sorted(settings)
        self._seed = seed
        self._device = device
        self._latest: dict[str, PolicyWeights] = {}
        self._sources: dict[str, Source] = {}

    def learn(self, weights: PolicyWeights) -> None:
        """Stores weights that are newer than those known."""
        known = self._latest.get(weights.behavior)
        if known is None or weights.version > known.version:
            self._latest[weights.behavior] = weights

    def build(self, name: str, spec: BehaviorSpec) -> None:
        """Updates the policy of a behavior to the latest weights known.

        Raises:
            CheckpointError: the weights do not fit the spec.
        """
        weights = self._latest.get(name)
        if weights is None:
            return
        policy = self.current.get(name)
        if policy is None:
            own, source = self._settings[name], self._source(name)
            policy = NetworkPolicy(spec, own.network_settings, source, self._device, own.trainer_type)
            self.current[name] = policy
        if policy.version < weights.version:
            policy.load(weights)

    def hold(self, spec: BehaviorSpec, weights: PolicyWeights) -> None:
        """Stores a ghost if it is new.

        Args:
            spec: of the behavior.
            weights: of the ghost, with its number in `version`.

        Raises:
            CheckpointError: the weights do not fit the spec.
        """
        name = weights.behavior
        if (name, weights.version) in self.ghosts:
            return
        if weights.script:
            self.ghosts[name, weights.version] = ScriptedPolicy(spec.actions, weights.version, weights.script)
            return
        own = self._settings[name]
        network = own.network_settings
        if weights.network:
            network = NetworkSettings.model_validate_json(weights.network)
            network = network.model_copy(update={"deterministic": own.network_settings.deterministic})
        trainer = weights.trainer or own.trainer_type
        ghost = NetworkPolicy(spec, network, self._source(name), self._device, trainer)
        ghost.load(weights)
        self.ghosts[name, weights.version] = ghost

    def release(self, in_use: Container[tuple[str, int]]) -> None:
        """Drops ghosts that are not in use."""
        for key in [key for key in self.ghosts if key not in in_use]:
            del self.ghosts[key]

    def _source(self, name: str) -> Source:
        if name not in self._sources:
            own = [self._named.index(name)] if name in self._named else [len(self._named), *name.encode()]
            self._sources[name] = np.random.default_rng([self._seed, *own])
        return self._sources[name]
