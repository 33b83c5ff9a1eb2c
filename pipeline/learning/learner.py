"""The learner of one behavior: buffer, networks, optimiser, counters; no process, no I/O.

Everything random comes from one generator that is seeded here and kept in checkpoints: the same
seed and the same segments give the same weights to the bit (with the same number of threads).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sparring.pipeline.demonstrations.library import DemonstrationFile
from sparring.pipeline.errors import CheckpointError, ServiceError
from sparring.pipeline.learning.bc import BC
from sparring.pipeline.learning.buffer import SegmentBuffer
from sparring.pipeline.learning.checkpoints import Checkpoint
from sparring.pipeline.learning.cloning import Cloning
from sparring.pipeline.learning.group_buffer import GroupBuffer
from sparring.pipeline.learning.optimizer import Adam
from sparring.pipeline.learning.poca import POCA
from sparring.pipeline.learning.ppo import PPO
from sparring.pipeline.learning.report import UpdateReport
from sparring.pipeline.learning.settings import TrainerSettings
from sparring.pipeline.learning.signals import EXTRINSIC, Signals
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.state import PolicyWeights
from sparring.pipeline.networks.actor import Actor
from sparring.pipeline.networks.arrays import Arrays, non_finite, weights_sha256
from sparring.pipeline.networks.device import CPU, back
from sparring.pipeline.networks.weights import load_arrays, to_arrays
from sparring.pipeline.specs import BehaviorSpec, read_spec

CLONING: Final = "cloning."


class Algorithm(Protocol):
    """What learns from batches of its own kind."""

    actor: Actor
    modules: nn.ModuleDict
    optimizer: Adam
    signals: Signals
    cloning: Cloning | None

    def update(self, batch: Any, version: int, trained: int) -> UpdateReport:
        """Trains on a batch."""


class Buffer(Protocol):
    """Finished segments, oldest first."""

    steps: int

    def add(self, record: Segments) -> None:
        """Appends the segments of `record`."""

    def whole(self, steps: int) -> int:
        """How many steps `take` would take."""

    def take(self, steps: int) -> Any:
        """Removes about as many of the oldest steps, as a batch."""

    def drop_stale(self, version: int, max_lag: int, keep_at_least: int) -> int:
        """Drops what is older than `max_lag` versions, but keeps as many steps; returns how many it dropped."""


def _algorithm(
    behavior: str,
    spec: BehaviorSpec,
    settings: TrainerSettings,
    generator: torch.Generator,
    *,
    learns: bool,
    device: torch.device,
) -> tuple[Algorithm, Buffer]:
    length = settings.network_settings.sequence_length
    if settings.trainer_type == "bc":
        return BC(behavior, spec, settings, generator, learns=learns, device=device), SegmentBuffer(length)
    if settings.trainer_type == "poca":
        return POCA(behavior, spec, settings, generator, learns=learns, device=device), GroupBuffer(length)
    return PPO(behavior, spec, settings, generator, learns=learns, device=device), SegmentBuffer(length)


class Learner:
    """Trains one behavior name on the segments it is given.

    Attributes:
        version: of the present weights; starts at 1 and only rises.
        updates: in the lineage of the present weights.
        trained: steps in that lineage.
        stale: steps dropped as too old since this object was made.

    Args:
        behavior: name.
        spec: of the behavior.
        settings: of its learner.
        seed: of the run; each behavior draws numbers of its own from it.
        learns: False for one that only holds weights to play with: demonstrations are not needed then.
        device: where the networks are (`networks.device`); what is handed in and out is on the processor.

    Raises:
        Unsupported: the spec or the settings ask for what cannot be built.
        RecordingError: demonstrations are not there, cannot be read, or are of another spec.
    """

    def __init__(
        self,
        behavior: str,
        spec: BehaviorSpec,
        settings: TrainerSettings,
        seed: int,
        *,
        learns: bool = True,
        device: torch.device = CPU,
    ) -> None:
        self._learns = learns
        self.behavior = behavior
        self.settings = settings
        self.version = 1
        self.updates = 0
        self.trained = 0
        self.stale = 0
        digest = hashlib.sha256(f"{seed}/{behavior}".encode()).digest()
        self._generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        self._device = device
        self._algorithm, self._buffer = _algorithm(
            behavior, spec, settings, self._generator, learns=learns, device=device
        )
        self._episode_returns: list[NDArray[np.float32]] = []
        self._spec = spec

    @property
    def _networks(self) -> nn.ModuleDict:
        return self._algorithm.modules

    @property
    def buffered(self) -> int:
        """Steps waiting for an update."""
        return self._buffer.steps

    @property
    def minibatches(self) -> int:
        """Tried since this object was made; it rises within an update, and may be read from another thread."""
        cloning = self._algorithm.cloning
        return self._algorithm.optimizer.tried + (0 if cloning is None else cloning.tried)

    @property
    def ready(self) -> bool:
        """Whether there is enough for an update."""
        return self.buffered >= self.settings.hyperparameters.buffer_size

    @property
    def done(self) -> bool:
        """Whether `max_steps` is reached."""
        return self.trained >= self.settings.max_steps

    @property
    def sizes(self) -> dict[str, Any]:
        """What the networks are made of, for the log: where they are, features of the body, and parameters."""
        actor = self._algorithm.actor
        memory = self.settings.network_settings.memory
        return {
            "device": str(actor.device),
            "observations": {one.name: [one.kind, *one.shape] for one in actor.spec.observations},
            "features": actor.encoder.size,
            "hidden_units": self.settings.network_settings.hidden_units,
            "num_layers": self.settings.network_settings.num_layers,
            "memory": 0 if memory is None else memory.memory_size,
            "actions": {"continuous": actor.actions.continuous, "discrete": list(actor.actions.discrete)},
            "actor_parameters": sum(parameter.numel() for parameter in actor.parameters()),
            "critic_parameters": sum(
                parameter.numel() for name, parameter in self._networks.named_parameters() if name.startswith("critic.")
            ),
        }

    @property
    def demo_files(self) -> tuple[DemonstrationFile, ...]:
        """The files of demonstrations that are learned from, each once."""
        cloning = self._algorithm.cloning
        files = (*self._algorithm.signals.demo_files, *(() if cloning is None else cloning.demo_files))
        return tuple(dict.fromkeys(files))

    @property
    def weights_sha256(self) -> str:
        """Hash of the present weights of actor and critic: equal for equal weights only."""
        return weights_sha256(to_arrays(self._networks))

    @property
    def teammates(self) -> Mapping[str, BehaviorSpec]:
        """Specs of the other behavior names that share groups with this one, as far as met."""
        if not isinstance(self._algorithm, POCA):
            return {}
        return {name: spec for name, spec in self._algorithm.networks.specs.items() if name != self.behavior}

    def strangers(self, record: Segments) -> list[str]:
        """Behavior names in the groups of `record` that `meet` has not been told of."""
        shared = record.shared.teammates if record.shared is not None else ()
        return [one.behavior for one in shared if one.behavior not in self.teammates]

    def meet(self, specs: Mapping[str, BehaviorSpec]) -> None:
        """Other behavior names share groups with this one from now on. Those met before are left out.

        Raises:
            Unsupported: no encoder can be built for one of them.
        """
        new = {name: spec for name, spec in specs.items() if name not in self.teammates}
        if new and isinstance(self._algorithm, POCA):
            self._algorithm.meet(new)

    def add(self, record: Segments) -> None:
        """Takes finished segments into the buffer; all names in their groups have been met."""
        self._buffer.add(record)
        episodes = record.episodes
        if len(episodes.returns):
            self._episode_returns.append(episodes.returns + episodes.shared_returns)

    def drop_stale(self, max_lag: int) -> int:
        """Drops segments whose newest row is older than `max_lag` versions, but never what an update would wait for.

        Returns:
            Steps dropped.
        """
        dropped = self._buffer.drop_stale(self.version, max_lag, self.settings.hyperparameters.buffer_size)
        self.stale += dropped
        return dropped

    def size_of_update(self, everything: bool = False) -> int:
        """Steps that `update` would train on now."""
        return self._buffer.whole(self._buffer.steps if everything else self.settings.hyperparameters.buffer_size)

    def update(self, everything: bool = False) -> UpdateReport:
        """Trains on the oldest `buffer_size` steps, or on all there are; the weights are a new version.

        A sequence of a network that remembers is not split: where one reaches over the end, it waits for the next.

        Args:
            everything: train on the whole buffer (lockstep).

        Raises:
            ValueError: there are fewer steps, or none.
        """
        size = self._buffer.steps if everything else self.settings.hyperparameters.buffer_size
        report = self._algorithm.update(self._buffer.take(size), self.version, self.trained)
        self.version += 1
        self.updates += 1
        self.trained += report.steps
        if (signal := self.settings.reward_signals.extrinsic) is not None and self._episode_returns:
            mean = float(np.concatenate(self._episode_returns).mean())
            report.statistics["Policy/Extrinsic Reward"] = mean * signal.strength
            self._episode_returns.clear()
        return report

    def weights(self) -> PolicyWeights:
        """The actor's weights, its normaliser included, to be published.

        Raises:
            ServiceError: one is not finite.
        """
        arrays = self._algorithm.actor.arrays()
        if bad := non_finite(arrays):
            raise ServiceError(
                f"got weights of {self.behavior} with NaN or infinity in {bad[:4]}; expected finite weights; "
                "go on from the last checkpoint with a lower learning_rate"
            )
        return PolicyWeights(behavior=self.behavior, version=self.version, arrays=arrays, trained=self.trained)

    def raise_version(self, seen: int) -> None:
        """Makes the present weights newer than any version `seen` elsewhere, so that they are published as the next."""
        self.version = max(self.version, seen) + 1

    def checkpoint(self) -> Checkpoint:
        """Copies of everything needed to go on; not the buffer."""
        moments: Arrays = {name: back(moment).copy() for name, moment in _moments(self._algorithm).items()}
        return Checkpoint(
            behavior=self.behavior,
            description=self._description(),
            version=self.version,
            updates=self.updates,
            trained=self.trained,
            weights=to_arrays(_modules(self._algorithm)),
            optimizer=moments | {"generator": self._generator.get_state().numpy().copy()},
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Goes on from a checkpoint: weights, counters, and where it learns the optimisers and the random state.

        Raises:
            CheckpointError: it is of another behavior, spec or network; nothing was changed.
        """
        self._same(checkpoint)
        algorithm = self._with_teammates_of(checkpoint)
        moments = _moments(algorithm) if self._learns else {}
        cloned = {name for name in checkpoint.optimizer if name.startswith(CLONING)}
        if cloned != {name for name in moments if name.startswith(CLONING)}:  # it was added or taken away since
            moments = {name: moment for name, moment in moments.items() if not name.startswith(CLONING)}
        if self._learns:
            self._check_moments(moments, checkpoint)
        load_arrays(_modules(algorithm), checkpoint.weights)
        self._algorithm = algorithm
        for name, moment in moments.items():
            moment.copy_(torch.from_numpy(np.array(checkpoint.optimizer[name])))
        if self._learns:
            algorithm.signals.restored()
            self._generator.set_state(torch.from_numpy(np.array(checkpoint.optimizer["generator"])))
        self.version, self.updates, self.trained = checkpoint.version, checkpoint.updates, checkpoint.trained

    def _check_moments(self, moments: Mapping[str, Tensor], checkpoint: Checkpoint) -> None:
        own = {name: tuple(moment.shape) for name, moment in moments.items()}
        own["generator"] = tuple(self._generator.get_state().shape)
        found = {name: array.shape for name, array in checkpoint.optimizer.items() if not name.startswith(CLONING)}
        if {name: shape for name, shape in own.items() if not name.startswith(CLONING)} != found:
            raise CheckpointError(
                got=f"optimiser state {sorted(checkpoint.optimizer)} of other names or sizes",
                expected=f"{sorted(own)} as this network's",
                remedy="use a checkpoint of this version of sparring",
            )
        try:
            torch.Generator().set_state(torch.from_numpy(np.array(checkpoint.optimizer["generator"])))
        except (TypeError, RuntimeError) as error:
            raise CheckpointError(
                got=f"optimiser state with a random state that is none ({error})",
                expected="that of a torch.Generator",
                remedy="use another checkpoint",
            ) from error

    def load_weights(self, checkpoint: Checkpoint) -> None:
        """Takes the weights of a checkpoint and nothing else: the start of a new lineage (`init_path`).

        Raises:
            CheckpointError: its networks differ; nothing was changed.
        """
        algorithm = self._with_teammates_of(checkpoint)
        own = {name: array for name, array in checkpoint.weights.items() if not name.startswith("signals.")}
        load_arrays(algorithm.modules, own)
        self._algorithm = algorithm

    def _with_teammates_of(self, checkpoint: Checkpoint) -> Algorithm:
        """The algorithm, or a new one, that has met the mates of a checkpoint in its order: embeddings go by number."""
        teammates = checkpoint.description.get("teammates", {})
        if list(self.teammates) == list(teammates):
            return self._algorithm
        algorithm, _ = _algorithm(
            self.behavior, self._spec, self.settings, self._generator, learns=self._learns, device=self._device
        )
        if isinstance(algorithm, POCA):
            algorithm.meet({name: read_spec(plain) for name, plain in teammates.items()})
        return algorithm

    def _same(self, checkpoint: Checkpoint) -> None:
        own, other = (
            {"behavior": self.behavior}
            | self._description()
            | {"teammates": checkpoint.description.get("teammates", {})},
            {"behavior": checkpoint.behavior} | checkpoint.description,
        )
        if differing := sorted(key for key in own.keys() | other.keys() if own.get(key) != other.get(key)):
            raise CheckpointError(
                got=f"a checkpoint with { ({key: other.get(key) for key in differing}) }",
                expected=f"{ ({key: own.get(key) for key in differing}) }",
                remedy="resume with the settings and the simulator of the run that wrote it, or start a new run",
            )

    def _description(self) -> dict[str, Any]:
        """What the networks are built from, as JSON gives it back."""
        settings = self.settings
        described = {
            "trainer": settings.trainer_type,
            "spec": dataclasses.asdict(self._spec),
            "teammates": {name: dataclasses.asdict(spec) for name, spec in self.teammates.items()},
            "network_settings": _shape(settings.network_settings.model_dump(exclude={"deterministic"})),
            "shared_critic": settings.hyperparameters.shared_critic,
            "signals": list(settings.reward_signals.named()),
            "reward_networks": {
                name: {
                    key: _shape(value) if key == "network_settings" else value
                    for key, value in one.model_dump().items()
                    if key in ("network_settings", "encoding_size", "use_actions", "use_vail")
                }
                for name, one in settings.reward_signals.named().items()
                if name != EXTRINSIC
            },
        }
        if EXTRINSIC in self._algorithm.signals.modules:  # else as in checkpoints before there was such a setting
            described["normalized_rewards"] = [EXTRINSIC]
        return dict(json.loads(json.dumps(described)))


def _shape(network: dict[str, Any]) -> dict[str, Any]:
    """What weights of a network belong to: not how they were drawn; SiLU is not named, as in older checkpoints."""
    unsaid = {"initialization"} | ({"activation"} if network["activation"] == "silu" else set())
    return {key: value for key, value in network.items() if key not in unsaid}


def _modules(algorithm: Algorithm) -> nn.ModuleDict:
    """All networks: actor and critic, and those of the reward signals."""
    return nn.ModuleDict({**dict(algorithm.modules.items()), "signals": algorithm.signals.modules})


def _moments(algorithm: Algorithm) -> dict[str, Tensor]:
    """States of all optimisers."""
    cloning = {} if algorithm.cloning is None else algorithm.cloning.moments
    return {
        **algorithm.optimizer.moments,
        **{f"signals.{name}": moment for name, moment in algorithm.signals.moments.items()},
        **{f"{CLONING}{name}": moment for name, moment in cloning.items()},
    }
