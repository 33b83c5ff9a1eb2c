"""This module holds the learner of one behavior: its buffer, networks, optimizer and counters, without process or I/O.

All random numbers come from one generator that is seeded here and kept in checkpoints: the same seed and the same
segments give bit-identical weights, with the same number of threads.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import nn

from sparring.pipeline.errors import ServiceError
from sparring.pipeline.files import Json
from sparring.pipeline.learning import algorithm
from sparring.pipeline.learning.buffer import SegmentBuffer
from sparring.pipeline.learning.checkpoints import Checkpoint
from sparring.pipeline.learning.losses import UpdateReport
from sparring.pipeline.learning.poca import POCA
from sparring.pipeline.learning.ppo import PolicyGradient
from sparring.pipeline.learning.settings import TrainerSettings
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.state import EARLIER, PolicyWeights
from sparring.pipeline.networks.arrays import Arrays, non_finite, weights_sha256
from sparring.pipeline.networks.device import CPU, back, load_arrays, to_arrays
from sparring.pipeline.specs import BehaviorSpec, Floats, read_spec


@dataclass(eq=False)
class Learner:
    """Trains one behavior name on the segments that it receives.

    Attributes:
        behavior: name of the behavior.
        spec: observations and actions of the behavior.
        settings: the learner's settings.
        seed: seed of the run; the seed of each behavior is computed from it and the name.
        learns: False loads no demonstrations, for a learner that only holds weights to play with.
        device: device of the networks (`networks.device`); all inputs and outputs are on the CPU.
        is_stopping: returns whether an update is to end after its present minibatch.
        version: version of the current weights; starts at 1 and only rises.
        updates: number of updates in the lineage of the current weights.
        trained: steps in that lineage.
        stale: steps dropped as too old since this object was created.
        demo_files: demonstration files that the learner uses, each once.

    Raises:
        Unsupported: no network can be built for the spec or the settings.
        RecordingError: demonstrations are missing, unreadable, or of another spec.
    """

    behavior: str
    spec: BehaviorSpec
    settings: TrainerSettings
    seed: int
    learns: bool = field(default=True, kw_only=True)
    device: torch.device = field(default=CPU, kw_only=True)
    is_stopping: Callable[[], bool] = field(default=lambda: False, kw_only=True)

    def __post_init__(self) -> None:
        settings = self.settings
        self.version = 1
        self.updates = self.trained = self.stale = 0
        digest = hashlib.sha256(f"{self.seed}/{self.behavior}".encode()).digest()
        self._generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        build = partial(algorithm.build, self.behavior, self.spec, settings, self._generator)
        self._build = partial(build, learns=self.learns, device=self.device)
        self._algorithm, self.demo_files = self._build()
        self._buffer = SegmentBuffer(settings.network_settings.sequence_length, groups=settings.trainer_type == "poca")
        self._episode_returns: list[Floats] = []

    @property
    def buffered(self) -> int:
        """Returns the number of steps that wait for an update."""
        return self._buffer.steps

    @property
    def minibatches(self) -> int:
        """Returns the minibatches tried since creation; it rises during an update, and other threads may read it."""
        cloning = self._algorithm.cloning
        return self._algorithm.optimizer.tried + (0 if cloning is None else cloning.tried)

    @property
    def ready(self) -> bool:
        """Returns whether the buffer holds enough steps for an update."""
        return self.buffered >= self.settings.hyperparameters.buffer_size

    @property
    def done(self) -> bool:
        """Returns whether `max_steps` is reached."""
        return self.trained >= self.settings.max_steps

    @property
    def sizes(self) -> dict[str, Json]:
        """Returns the device, sizes and parameter counts of the networks, for the log."""
        actor, network = self._algorithm.networks.actor, self.settings.network_settings
        return {
            "device": str(actor.device),
            "observations": {one.name: [one.kind, *one.shape] for one in actor.spec.observations},
            "features": actor.encoder.size,
            "hidden_units": network.hidden_units,
            "num_layers": network.num_layers,
            "memory": 0 if network.memory is None else network.memory.memory_size,
            "actions": {"continuous": actor.actions.continuous, "discrete": list(actor.actions.discrete)},
            "actor_parameters": _count(actor),
            "critic_parameters": _count(dict(self._algorithm.networks.modules.items()).get("critic")),
        }

    @property
    def weights_sha256(self) -> str:
        """Returns a hash of the current weights of actor and critic, equal for equal weights only."""
        return weights_sha256(to_arrays(self._algorithm.networks.modules))

    @property
    def teammates(self) -> Mapping[str, BehaviorSpec]:
        """Returns the specs of the other registered behavior names that share groups with this one."""
        if not isinstance(self._algorithm, POCA):
            return {}
        return {name: spec for name, spec in self._algorithm.networks.specs.items() if name != self.behavior}

    def unknown_behaviors(self, record: Segments) -> list[str]:
        """Returns the behavior names in the groups of `record` that are not registered."""
        shared = record.shared.teammates if record.shared is not None else ()
        return [one.behavior for one in shared if one.behavior not in self.teammates]

    def register(self, specs: Mapping[str, BehaviorSpec]) -> None:
        """Registers other behavior names that share groups with this one; names already registered are ignored.

        Raises:
            Unsupported: no encoder can be built for one of them.
        """
        new = {name: spec for name, spec in specs.items() if name not in self.teammates}
        if new and isinstance(self._algorithm, POCA):
            self._algorithm.register(new)

    def add(self, record: Segments) -> None:
        """Adds finished segments to the buffer; all behavior names in their groups must be registered."""
        self._buffer.add(record)
        episodes = record.episodes
        if len(episodes.returns):
            self._episode_returns.append(episodes.returns + episodes.shared_returns)

    def drop_stale(self, max_lag: int) -> int:
        """Drops segments whose newest row is older than `max_lag` versions, but keeps enough steps for an update.

        Returns:
            The number of dropped steps.
        """
        dropped = self._buffer.drop_stale(self.version, max_lag, self.settings.hyperparameters.buffer_size)
        self.stale += dropped
        return dropped

    def size_of_update(self, everything: bool = False) -> int:
        """Returns the number of steps that `update` would train on now."""
        return self._buffer.whole(self._buffer.steps if everything else self.settings.hyperparameters.buffer_size)

    def update(self, everything: bool = False) -> UpdateReport:
        """Trains on the oldest `buffer_size` steps, or on all of them; the resulting weights are a new version.

        A sequence of a recurrent network is never split; one that reaches beyond the last step waits. Once
        `is_stopping()`, the update ends after its present minibatch, and its steps count as trained.

        Args:
            everything: train on the whole buffer (lockstep).

        Raises:
            ValueError: the buffer holds fewer steps, or none.
        """
        batch = self._buffer.take(None if everything else self.settings.hyperparameters.buffer_size)
        if isinstance(self._algorithm, PolicyGradient):
            self._algorithm.is_stopping = self.is_stopping
        report = self._algorithm.update(batch, self.version, self.trained)
        self.version += 1
        self.updates += 1
        self.trained += report.steps
        if (signal := self.settings.reward_signals.extrinsic) is not None and self._episode_returns:
            mean = float(np.concatenate(self._episode_returns).mean())
            report.statistics["Policy/Extrinsic Reward"] = mean * signal.strength
            self._episode_returns.clear()
        return report

    def weights(self) -> PolicyWeights:
        """Returns the actor's weights, including those of its normalizer, for publication.

        Raises:
            ServiceError: a weight is not finite.
        """
        arrays = self._algorithm.networks.actor.arrays()
        if bad := non_finite(arrays):
            raise ServiceError(
                f"got weights of {self.behavior} with NaN or infinity in {bad[:4]}; expected finite weights; "
                "resume from the last checkpoint with a lower learning_rate"
            )
        return PolicyWeights(behavior=self.behavior, version=self.version, arrays=arrays, trained=self.trained)

    def raise_version(self, seen: int) -> None:
        """Gives the current weights a version above `seen`, the newest one known elsewhere."""
        self.version = max(self.version, seen) + 1

    def checkpoint(self) -> Checkpoint:
        """Returns copies of everything that a resumed learner needs, except the buffer."""
        moments: Arrays = {name: back(moment).copy() for name, moment in algorithm.moments_of(self._algorithm).items()}
        return Checkpoint(
            behavior=self.behavior,
            description=self._description(),
            version=self.version,
            updates=self.updates,
            trained=self.trained,
            weights=to_arrays(algorithm.networks_of(self._algorithm)),
            optimizer=moments | {"generator": self._generator.get_state().numpy().copy()},
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Resumes from a checkpoint: weights and counters, and if it learns, optimizers and random state.

        Raises:
            CheckpointError: the checkpoint is of another behavior, spec or network; nothing was changed.
        """
        algorithm.check_description(self.behavior, self._description(), checkpoint)
        restored = self._with_teammates_of(checkpoint)
        moments = algorithm.restorable(restored, self._generator, checkpoint) if self.learns else {}
        load_arrays(algorithm.networks_of(restored), checkpoint.weights)
        self._algorithm = restored
        for name, moment in moments.items():
            moment.copy_(torch.from_numpy(np.array(checkpoint.optimizer[name])))
        if self.learns:
            self._generator.set_state(torch.from_numpy(np.array(checkpoint.optimizer["generator"])))
        self.version, self.updates, self.trained = checkpoint.version, checkpoint.updates, checkpoint.trained

    def load_weights(self, checkpoint: Checkpoint) -> None:
        """Loads only the weights of a checkpoint, which starts a new lineage (`init_path`).

        Raises:
            CheckpointError: the networks differ; nothing was changed.
        """
        loaded = self._with_teammates_of(checkpoint)
        own = {name: array for name, array in checkpoint.weights.items() if not name.startswith("signals.")}
        load_arrays(loaded.networks.modules, own)
        self._algorithm = loaded

    def _with_teammates_of(self, checkpoint: Checkpoint) -> algorithm.Algorithm:
        """Returns an algorithm whose teammates are registered in a checkpoint's order: embeddings go by number."""
        teammates = checkpoint.description.get("teammates", {})
        if list(self.teammates) == list(teammates):
            return self._algorithm
        built, _ = self._build()
        if isinstance(built, POCA):
            built.register({name: read_spec(plain) for name, plain in teammates.items()})
        return built

    def _description(self) -> dict[str, Json]:
        return algorithm.describe(self.spec, self.teammates, self.settings)


class Intake:
    """Counts the steps of each source up to which a learner has received segments, and the gaps before them.

    Assembly says in each message how far it has come with the source. What is missing between that and the last message
    was lost: with the learner's predecessor, if it is missing before the first message of a source that a restarted
    learner receives, else with an incarnation of assembly.

    Args:
        restarted: the learner has predecessors.

    Attributes:
        reached: steps received or lost, by incarnation of stepping, in the order of their first segments.
        lost: steps lost, by the stage that lost them.
    """

    def __init__(self, *, restarted: bool) -> None:
        self.reached: dict[str, int] = {}
        self.lost: dict[str, int] = {}
        self._restarted = restarted
        self._received: set[str] = set()  # sources of which this learner has received segments

    def add(self, segments: Segments) -> None:
        """Counts segments that have arrived."""
        source, first = segments.source, segments.source not in self._received
        missing = segments.reached - len(segments.log_probs) - self.reached.get(source, 0)
        self._lose("learning" if self._restarted and first else "assembly", missing)
        self.reached[source] = segments.reached
        self._received.add(source)

    def to_plain(self) -> dict[str, Json]:
        """Returns the counts as plain JSON values, for a checkpoint."""
        return {"reached": dict(self.reached), "lost": dict(self.lost)}

    def restore(self, plain: Mapping[str, Json], resolved: int) -> None:
        """Continues from what `to_plain` returned.

        Args:
            plain: counts of a checkpoint, which may have none.
            resolved: steps that the checkpoint holds as trained, stale or played. What it had received beyond them was
                in a buffer, and is lost; what it holds beyond those that it had received was produced by others.
        """
        self.reached, self.lost = dict(plain.get("reached", {})), dict(plain.get("lost", {}))
        beyond = sum(self.reached.values()) - sum(self.lost.values()) - resolved
        self._lose("learning", max(0, beyond))
        if beyond < 0:
            self.reached[EARLIER] = self.reached.get(EARLIER, 0) - beyond

    def _lose(self, stage: str, steps: int) -> None:
        if steps:
            self.lost[stage] = self.lost.get(stage, 0) + steps


def _count(module: nn.Module | None) -> int:
    """Returns the number of parameters; 0 without a module."""
    return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())
