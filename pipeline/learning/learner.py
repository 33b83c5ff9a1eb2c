"""This module holds the learner of one behavior: its buffer, networks, optimizer and counters, without process or I/O.

`check_description` and `restorable` decide which checkpoints fit what it trains.

All random numbers come from one generator that is seeded here and kept in checkpoints: the same seed and the same
segments give bit-identical weights, with the same number of threads.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from numbers import Real
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sparring.pipeline.errors import CheckpointError, ServiceError
from sparring.pipeline.files import Json
from sparring.pipeline.learning.algorithm import Algorithm, Parts, is_cloning
from sparring.pipeline.learning.buffer import SegmentBuffer
from sparring.pipeline.learning.checkpoints import Checkpoint
from sparring.pipeline.learning.losses import UpdateReport
from sparring.pipeline.learning.ranks import Ranks
from sparring.pipeline.learning.settings import EXTRINSIC, SignalSettings, TrainerSettings
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.state import PolicyWeights
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
        ranks: of the processes that share its minibatches; one that stops goes on alone.
        replay_folder: where a replay has its files; None keeps it in memory.
        offline: it learns from recorded steps, by `update_offline`.
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
    ranks: Ranks = field(default_factory=Ranks, kw_only=True)
    replay_folder: Path | None = field(default=None, kw_only=True)
    offline: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        settings = self.settings
        self.version = 1
        self.updates = self.trained = self.stale = 0
        digest = hashlib.sha256(f"{self.seed}/{self.behavior}".encode()).digest()
        self._generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        self._algorithm = self._build()
        self._buffer = SegmentBuffer(settings.network_settings.sequence_length, groups=settings.hyperparameters.groups)
        self._episode_returns: list[Floats] = []

    @property
    def buffered(self) -> int:
        """Returns the number of steps that wait for an update."""
        return self._buffer.steps

    @property
    def minibatches(self) -> int:
        """Returns the minibatches tried since creation; it rises during an update, and other threads may read it."""
        return self._algorithm.tried

    @property
    def ready(self) -> bool:
        """Returns whether the buffer holds enough steps for an update."""
        return self.buffered >= self.settings.hyperparameters.update_steps

    @property
    def done(self) -> bool:
        """Returns whether `max_steps` is reached."""
        return self.trained >= self.settings.max_steps

    @property
    def sizes(self) -> dict[str, Json]:
        """Returns the device, sizes and parameter counts of the networks, for the log."""
        networks = self._algorithm.networks
        actor, modules = networks.actor, networks.modules.items()
        return {
            "device": str(actor.device),
            "observations": {one.name: [one.kind, *one.shape] for one in actor.spec.observations},
            "features": actor.encoder.size,
            "actions": {"continuous": actor.actions.continuous, "discrete": list(actor.actions.discrete)},
            **{f"{name}_parameters": sum(map(Tensor.numel, module.parameters())) for name, module in modules},
        }

    @property
    def weights_sha256(self) -> str:
        """Returns a hash of the current weights of actor and critic, equal for equal weights only."""
        return weights_sha256(to_arrays(self._algorithm.networks.modules))

    @property
    def teammates(self) -> Mapping[str, BehaviorSpec]:
        """Returns the specs of the other registered behavior names that share groups with this one."""
        return self._algorithm.teammates

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
        if new:
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
        hyper = self.settings.hyperparameters
        if not hyper.has_limited_lag:
            return 0
        dropped = self._buffer.drop_stale(self.version, max_lag, hyper.update_steps)
        self.stale += dropped
        return dropped

    def size_of_update(self, everything: bool = False) -> int:
        """Returns the number of steps that `update` would train on now."""
        return self._buffer.whole(self._wanted(everything) or self._buffer.steps)

    def update(self, everything: bool = False) -> UpdateReport:
        """Trains on the oldest `update_steps`, or on all there are; the resulting weights are a new version.

        A sequence of a recurrent network is never split; one that reaches beyond the last step waits. Once
        `is_stopping()`, the update ends after its present minibatch, and its steps count as trained.

        Args:
            everything: train on the whole buffer (lockstep).

        Raises:
            ValueError: the buffer holds fewer steps, or none.
            ServiceError: a plug-in's report is none.
            RankLost: another rank has ended.
        """
        batch = self._buffer.take(self._wanted(everything))
        self._algorithm.is_stopping = self.is_stopping
        report = self._checked(self._algorithm.update(batch, self.version, self.trained), batch.steps)
        if self.is_stopping():
            self.ranks.leave()
        self.ranks.follow(self._algorithm.flat)
        self.version += 1
        self.updates += 1
        self.trained += report.steps
        if (signal := self.settings.reward_signals.extrinsic) is not None and self._episode_returns:
            mean = float(np.concatenate(self._episode_returns).mean())
            report.statistics["Policy/Extrinsic Reward"] = mean * signal.strength
            self._episode_returns.clear()
        return report

    def _checked(self, report: UpdateReport, steps: int) -> UpdateReport:
        """Refuses what a plug-in returns in place of a report of these steps, because accounts would be wrong."""
        is_one = isinstance(report, UpdateReport)
        numbers = all(isinstance(one, Real) for one in report.statistics.values()) if is_one else False
        if not numbers or report.steps != steps:
            got = f"{report.steps} steps and statistics {report.statistics}" if is_one else type(report).__name__
            kind = type(self._algorithm)
            raise ServiceError(
                f"got {got:.300} from {kind.__module__}.{kind.__name__}.update; expected an UpdateReport of the "
                f"{steps} steps in its batch, whose statistics are numbers; correct it there"
            )
        return report

    def update_offline(self) -> UpdateReport:
        """Trains on recorded steps, as if those of an update had arrived, without passing `max_steps`."""
        self._algorithm.is_stopping = self.is_stopping
        steps = min(self.settings.hyperparameters.update_steps, self.settings.max_steps - self.trained)
        report = self._algorithm.update_offline(steps, self.trained)
        self.version += 1
        self.updates += 1
        self.trained += report.steps
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
        moments: Arrays = {name: back(moment).copy() for name, moment in self._algorithm.moments.items()}
        return Checkpoint(
            behavior=self.behavior,
            description=self._description(),
            version=self.version,
            updates=self.updates,
            trained=self.trained,
            weights=to_arrays(self._algorithm.modules),
            optimizer=moments | {"generator": self._generator.get_state().numpy().copy()},
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Resumes from a checkpoint: weights and counters, and if it learns, optimizers and random state.

        Raises:
            CheckpointError: the checkpoint is of another behavior, spec or network; nothing was changed.
        """
        check_description(self.behavior, self._description(), checkpoint)
        restored = self._with_teammates_of(checkpoint)
        moments = restorable(restored, self._generator, checkpoint) if self.learns else {}
        load_arrays(restored.modules, checkpoint.weights)
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

    def _wanted(self, everything: bool) -> int | None:
        """Returns how many steps an update takes; None for all."""
        hyper = self.settings.hyperparameters
        return hyper.update_steps if hyper.splits_segments and not everything else None

    def _with_teammates_of(self, checkpoint: Checkpoint) -> Algorithm:
        """Returns an algorithm whose teammates are registered in a checkpoint's order: embeddings go by number."""
        teammates = checkpoint.description.get("teammates", {})
        if list(self.teammates) == list(teammates):
            return self._algorithm
        built = self._build()
        built.register({name: read_spec(plain) for name, plain in teammates.items()})
        return built

    def _build(self) -> Algorithm:
        parts = Parts(
            behavior=self.behavior,
            spec=self.spec,
            settings=self.settings,
            generator=self._generator,
            device=self.device,
            ranks=self.ranks,
            learns=self.learns,
            replay_folder=self.replay_folder,
            offline=self.offline,
        )
        built = parts.build()
        self.demo_files = tuple(dict.fromkeys(parts.files))
        return built

    def _description(self) -> dict[str, Json]:
        return describe(self.spec, self.teammates, self.settings)


# ---------------------------------------------------------------- what it trains, and which checkpoints fit


def describe(spec: BehaviorSpec, teammates: Mapping[str, BehaviorSpec], settings: TrainerSettings) -> dict[str, Json]:
    """Returns what the networks are built from, in the form in which JSON restores it.

    Args:
        spec: observations and actions of the behavior.
        teammates: specs of the other behavior names that share groups with it.
        settings: the learner's settings.
    """
    signals = settings.reward_signals.named()
    described = {
        "trainer": settings.trainer_type,
        "spec": asdict(spec),
        "teammates": {name: asdict(one) for name, one in teammates.items()},
        "network_settings": _shape(settings.network_settings.model_dump(exclude={"deterministic"})),
        "shared_critic": settings.hyperparameters.shares_critic,
        "signals": list(signals),
        "reward_networks": {name: _reward_network(one) for name, one in signals.items() if name != EXTRINSIC},
    }
    extrinsic = settings.reward_signals.extrinsic
    if extrinsic is not None and extrinsic.normalize:  # absent otherwise, as in checkpoints older than this setting
        described["normalized_rewards"] = [EXTRINSIC]
    return dict(json.loads(json.dumps(described)))


def check_description(behavior: str, description: dict[str, Json], checkpoint: Checkpoint) -> None:
    """Refuses a checkpoint of another behavior, spec or network; its teammates may differ.

    Raises:
        CheckpointError: the checkpoint differs from `behavior` and `description`.
    """
    own = {"behavior": behavior} | description | {"teammates": checkpoint.description.get("teammates", {})}
    other = {"behavior": checkpoint.behavior} | checkpoint.description
    if differing := sorted(key for key in own.keys() | other.keys() if own.get(key) != other.get(key)):
        raise CheckpointError(
            got=f"a checkpoint with {', '.join(_in_words(key, other.get(key)) for key in differing)}",
            expected=", ".join(_in_words(key, own.get(key)) for key in differing),
            remedy="resume with the settings and the simulator of the run that wrote it, or start a new run",
        )


def _in_words(key: str, value: Json) -> str:
    """Returns a part of a description in words."""
    return str(read_spec(value)) if key == "spec" and value is not None else f"{key} {value}"


def restorable(algorithm: Algorithm, generator: torch.Generator, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Returns the moments that a checkpoint restores: those of cloning only if it was not enabled or disabled since.

    Raises:
        CheckpointError: its optimizer state differs from that of `algorithm`, or its random state from `generator`'s.
    """
    moments = algorithm.moments
    own = {name: tuple(moment.shape) for name, moment in moments.items()}
    own["generator"] = tuple(generator.get_state().shape)
    found = {name: array.shape for name, array in checkpoint.optimizer.items()}
    cloned, saved = (set(filter(is_cloning, every)) for every in (own, found))
    if cloned != saved:
        own, found = ({name: every[name] for name in every.keys() - cloned - saved} for every in (own, found))
    problem = "of other names or sizes" if own != found else ""
    try:
        torch.Generator().set_state(torch.from_numpy(np.array(checkpoint.optimizer["generator"])))
    except (KeyError, TypeError, RuntimeError) as error:
        problem = problem or f"with an invalid random state ({error})"
    if problem:
        raise CheckpointError(
            got=f"optimizer state {sorted(checkpoint.optimizer)} {problem}",
            expected=f"{sorted(own)} with the sizes of this network, and the state of a torch.Generator",
            remedy="use a checkpoint of this version of sparring",
        )
    return {name: moment for name, moment in moments.items() if name in own}


def _shape(network: dict[str, Json]) -> dict[str, Json]:
    """Returns the settings that weights depend on: not initialization; SiLU is implied, as in old checkpoints."""
    implied = {"initialization"} | ({"activation"} if network["activation"] == "silu" else set())
    return {key: value for key, value in network.items() if key not in implied}


def _reward_network(signal: SignalSettings) -> dict[str, Json]:
    """Returns the settings that the weights of a reward network depend on."""
    plain = signal.model_dump(include={"network_settings", "encoding_size", "use_actions", "use_vail"})
    return plain | {"network_settings": _shape(plain["network_settings"])}
