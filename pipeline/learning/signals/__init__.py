# ruff: noqa: N803 (names end in their shape)
"""Reward signals give each step one reward per signal; some of them train networks of their own.

**Starts.** Novelty rewards ignore the end of an episode: an observation is novel or not whatever the episode (Burda et
al. 2018, arXiv 1810.12894, section 2.3: non-episodic returns). The end of one episode leads to the start of another, so
the value after an end is that of an episode start. (ML-Agents uses the value of the last observation, where no agent
ever acts: it is never trained and can diverge.)

**Scale.** Rewards are scaled to about one size, whatever unit a simulator uses.

1. Each reward is divided by the running standard deviation of the discounted sum `R_t = r_t + gamma R_{t-1}` of an
   agent's rewards so far, then clipped to +-10 (Engstrom et al. 2020, arXiv 2005.12729, section 3, "reward scaling").
   The mean is not subtracted: that would change what is optimal.
2. The sum starts at 0 with each agent episode, or group, and continues from one of its segments to the next, across
   batches. It omits steps that were dropped as stale, and after a checkpoint is restored all sums restart at 0.
3. The sums of a batch enter the statistics before its rewards are divided, so that the first batch is scaled too. The
   statistics start as one sum of variance 1, and are part of the weights in a checkpoint.

r steps of a batch, B of these in a minibatch, s segments, one after the other; A action features.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from sparring.pipeline.assembly import sequences
from sparring.pipeline.errors import ServiceError
from sparring.pipeline.learning.buffer import Batch
from sparring.pipeline.learning.losses import advantages
from sparring.pipeline.learning.minibatches import Memories
from sparring.pipeline.learning.optimizer import Adam, of_finite
from sparring.pipeline.learning.settings import EXTRINSIC, RewardSignals
from sparring.pipeline.networks.arrays import previous_features
from sparring.pipeline.networks.encoders import Encoder, Inputs, Normalizer
from sparring.pipeline.networks.perceptron import hidden_layer
from sparring.pipeline.networks.settings import ACTION_LIMIT, NetworkSettings
from sparring.pipeline.specs import ActionSpec, Array, BehaviorSpec, Flags, Floats, Numbers

_ROWS_AT_ONCE: Final = 4096

CLIP: Final = np.float32(10.0)
"""Largest absolute value of a scaled reward."""


class Steps:
    """Holds the steps of a batch as reward networks read them.

    Attributes:
        observations: one [n, *shape] per observation: those of the r steps first, then those that follow the segments.
        following: [r] row of the observation after each step.
        done: [r, A] action features: continuous actions as the simulator received them, then one 1 for each branch.
        ended: [r] the episode terminated or was interrupted with the step.
        agent_episodes: [r] number of the agent episode.

    Args:
        batch: segments, of which some may have no step at all.
        actions: spec of the actions.
        action_limit: limit of the raw samples.
    """

    def __init__(self, batch: Batch, actions: ActionSpec, action_limit: float = ACTION_LIMIT) -> None:
        stepped = np.flatnonzero(batch.lengths)
        last = np.cumsum(batch.lengths)[stepped] - 1
        self.observations = tuple(map(np.concatenate, zip(batch.observations, batch.next_observations, strict=True)))
        self.following = np.arange(1, batch.steps + 1)
        self.following[last] = batch.steps + stepped
        self.done = torch.from_numpy(previous_features(actions, batch.continuous, batch.discrete, action_limit))
        self.ended = np.zeros(batch.steps, np.bool_)
        self.ended[last] = batch.ended[stepped]
        self.agent_episodes = np.repeat(batch.agent_episodes, batch.lengths)

    def __len__(self) -> int:
        return len(self.ended)


class Features(nn.Module):
    """Combines encoder and layers of a reward network, which can be differentiated twice.

    Goals count as vectors, and there is no memory. Other inputs may be added to the observations.

    Args:
        spec: observations and actions of the behavior.
        settings: the network's settings.
        more: number of other inputs.
        generator: random source of the initial weights.

    Attributes:
        size: number of features.
    """

    def __init__(self, spec: BehaviorSpec, settings: NetworkSettings, more: int, generator: torch.Generator) -> None:
        super().__init__()
        plain = {"memory": None, "previous_action": False, "goal_conditioning_type": "none"}
        self.encoder = Encoder(spec, settings.model_copy(update=plain), generator)
        self.size = settings.hidden_units
        self.layers = dense([self.encoder.size + more, *[self.size] * settings.num_layers], settings, generator)

    def forward(self, inputs: Inputs, more: Tensor | None = None) -> Tensor:
        """Returns features [B, size] of observations from `encoder.prepare`."""
        encoded = self.encoder(inputs)
        features: Tensor = self.layers(encoded if more is None else torch.cat((encoded, more), 1))
        return features


def dense(sizes: Sequence[int], settings: NetworkSettings, generator: torch.Generator) -> nn.Sequential:
    """Builds layers of hidden units; `sizes` begins with the number of inputs."""
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers.append(hidden_layer(before, after, settings, generator))
        layers.append({"silu": nn.SiLU, "tanh": nn.Tanh, "relu": nn.ReLU}[settings.activation]())
    return nn.Sequential(*layers)


def select_rows(inputs: Inputs, rows: Tensor) -> Inputs:
    """Returns some rows of each column."""
    return tuple(column.index_select(0, rows) for column in inputs)


def blocks(rows: int, device: torch.device) -> Iterator[Tensor]:
    """Yields the numbers of rows on a device, as many at a time as networks evaluate together."""
    return iter(torch.split(torch.arange(rows, device=device), _ROWS_AT_ONCE))


class RewardNetwork(ABC):
    """Computes a reward signal with networks of its own.

    Adam takes one step on each minibatch of the policy, with constant learning rate (ML-Agents).

    Attributes:
        module: all weights that a checkpoint saves.
        optimizer: changes the trained weights.

    Args:
        module: the networks.
        trained: the part of them that the optimizer changes.
        learning_rate: of the optimizer.
        device: device of the networks.
    """

    def __init__(self, module: nn.Module, trained: nn.Module, learning_rate: float, device: torch.device) -> None:
        self.module = module
        self.optimizer = Adam(trained, learning_rate, device)
        self._steps: list[tuple[Tensor, dict[str, Tensor]]] = []  # whether each was skipped, and its measures

    @abstractmethod
    def begin(self, steps: Steps) -> Floats:
        """Starts a batch and returns its rewards [r]; `learn` then trains on its minibatches."""

    @abstractmethod
    def learn(self, at_B: Tensor) -> None:
        """Takes one optimizer step on the rows `at_B` of the batch; the row numbers are on the device."""

    def terminal_bootstrap_fraction(self, ends: int, steps: int) -> float:
        """Returns the fraction, 0 to 1, of the mean value of episode starts that bootstraps a terminated episode.

        By default it is 1: novelty does not depend on the episode, so the next one counts as the rest of this one.

        Args:
            ends: number of terminated episodes in the batch; interrupted ones do not count.
            steps: number of steps in the batch.
        """
        return 1.0

    def absorbing_reward(self, ends: int, steps: int) -> float | None:
        """Returns the reward of each step after the end of an episode; None where the next episode is its rest.

        It is asked by trainers that learn the value of what follows an end.

        Args:
            ends: number of terminated episodes in the batch; interrupted ones do not count.
            steps: number of steps in the batch.
        """
        return None

    def statistics(self) -> dict[str, float]:
        """Ends the batch and returns the means of its measures since `begin`, by ML-Agents' names."""
        taken = of_finite(self._steps)
        self._steps = []
        return {name: torch.stack([one[name] for one in taken]).mean().item() for name in (taken[0] if taken else ())}

    def take_step(self, loss: Tensor, measures: dict[str, Tensor]) -> Tensor:
        """Takes one optimizer step and stores its measures; returns 1 if it was skipped, else 0, on the device."""
        skipped = self.optimizer.step(loss.backward).skipped
        self._steps.append((skipped, measures))
        return skipped


class Signals:
    """Combines the reward signals of one behavior, in the order of the settings.

    Attributes:
        settings: settings of each signal, by name.
        sources: the signals with networks, by name.
        modules: their networks, and the statistics of extrinsic rewards if these are normalized.

    Args:
        wanted: settings of the signals.
        sources: those with networks, by name.
    """

    def __init__(self, wanted: RewardSignals, sources: Mapping[str, RewardNetwork]) -> None:
        self.settings = wanted.named()
        self.sources = dict(sources)
        self.modules = nn.ModuleDict({name: source.module for name, source in self.sources.items()})
        self._sums = {name: Memories(1) for name in self.sources}
        self._ended: dict[str, Floats] = {}
        extrinsic = wanted.extrinsic
        self._scale = RewardScale(extrinsic.gamma) if extrinsic is not None and extrinsic.normalize else None
        if self._scale is not None:
            self.modules[EXTRINSIC] = self._scale.module

    def scaled(self, extrinsic_r: Floats, lengths_s: Array, episodes_s: Numbers, ended_s: Flags) -> Floats:
        """Returns the simulator's rewards [r], scaled if the settings enable it; call it once a batch."""
        return extrinsic_r if self._scale is None else self._scale.divide(extrinsic_r, lengths_s, episodes_s, ended_s)

    def begin(self, extrinsic: Floats, steps: Callable[[], Steps]) -> dict[str, Floats]:
        """Starts a batch and returns its rewards [r] by signal, times the signal's strength.

        Args:
            extrinsic: the simulator's rewards, including those of an agent's group, `scaled`.
            steps: returns the networks' inputs; called only if there are networks.

        Raises:
            ServiceError: a plug-in returns something else than one reward for each step.
        """
        batch = steps() if self.sources else None
        found = self.evaluate(extrinsic, batch)
        if batch is not None:
            for name in self.sources:
                self._ended[name] = add_to_sums(self._sums[name], batch.agent_episodes, found[name], batch.ended)
        return found

    def evaluate(self, extrinsic: Floats, steps: Steps | None) -> dict[str, Floats]:
        """Returns rewards as `begin`, for `learn`, and adds them to no episode.

        Args:
            extrinsic: the simulator's rewards, including those of an agent's group, `scaled`.
            steps: the networks' inputs; None where no signal has networks.

        Raises:
            ServiceError: as `begin`.
        """
        found: dict[str, Floats] = {}
        for name, signal in self.settings.items():
            own = extrinsic if steps is None or name == EXTRINSIC else self._begin(name, steps)
            found[name] = own * np.float32(signal.strength)
        return found

    def _begin(self, name: str, steps: Steps) -> Floats:
        found, source, count = self.sources[name].begin(steps), type(self.sources[name]), len(steps)
        if not isinstance(found, np.ndarray) or found.dtype.kind != "f" or found.shape != (count,):
            got = f"{found.dtype} {[*found.shape]}" if isinstance(found, np.ndarray) else type(found).__name__
            raise ServiceError(
                f"got {got} from {source.__module__}.{source.__name__}.begin, the reward signal {name}; expected an "
                f"array float32 [{count}], one reward for each step; correct it there"
            )
        return found

    def learn(self, at_B: Tensor) -> None:
        """Takes one optimizer step of each network on rows of the batch."""
        if not self.sources:
            return
        with torch.enable_grad():
            for source in self.sources.values():
                source.learn(at_B)

    def statistics(self) -> dict[str, float]:
        """Returns the batch's losses by ML-Agents' names, and the mean reward of the episodes that ended."""
        found: dict[str, float] = {}
        for name, source in self.sources.items():
            found |= source.statistics()
            if self._ended[name].size:
                found[f"Policy/{name.capitalize()} Reward"] = float(self._ended[name].mean())
        return found


class EpisodeStarts:
    """Tracks the agent episodes under way, and the mean value of their starts by reward signal."""

    def __init__(self) -> None:
        self._under_way = Memories(1)  # 1 for each of them
        self._means: dict[str, np.float32] = {}

    def find(self, episodes_s: Numbers, ended_s: Flags) -> Flags:
        """Returns [s] which segments are the first of their episodes; segments of one episode are in order.

        Args:
            episodes_s: number of each segment's agent episode.
            ended_s: the agent episode ended with the segment.
        """
        agent_episodes, at = np.unique(episodes_s, return_index=True)
        first = np.zeros(len(episodes_s), bool)
        first[at] = self._under_way.recall(agent_episodes)[:, 0] == 0
        over = np.isin(agent_episodes, episodes_s[ended_s])
        self._under_way.keep(agent_episodes, np.ones((len(agent_episodes), 1), np.float32), over)
        return first

    def value(self, signal: str, values_b: Floats) -> np.float32:
        """Returns the mean value of the episode starts of this batch, or of the last batch that had any.

        Args:
            signal: name of the reward signal.
            values_b: value of each start in the batch; if one is not finite, the batch counts as having none.
        """
        if values_b.size and np.isfinite(mean := values_b.mean()):
            self._means[signal] = mean
        return self._means.get(signal, np.float32(0.0))


def add_to_sums(sums: Memories, episodes_r: Numbers, rewards_r: Floats, ended_r: Flags) -> Floats:
    """Adds rewards of steps to the sums of their episodes so far, and returns the sums of those that ended."""
    agent_episodes, at = np.unique(episodes_r, return_inverse=True)
    present = sums.recall(agent_episodes)
    present[:, 0] += np.bincount(at, rewards_r, len(agent_episodes))
    over = np.zeros(len(agent_episodes), bool)
    over[at[ended_r]] = True
    sums.keep(agent_episodes, present, over)
    ended: Floats = present[over, 0]
    return ended


class RewardScale:
    """Scales the rewards of one signal.

    Attributes:
        module: the statistics.

    Args:
        gamma: discount of the signal.
    """

    def __init__(self, gamma: float) -> None:
        self.module = Normalizer(1)
        self._gamma = gamma
        self._sums = Memories(1)

    def divide(self, rewards_r: Floats, lengths_s: Array, episodes_s: Numbers, ended_s: Flags) -> Floats:
        """Returns the rewards [r] of a batch, divided and clipped.

        Args:
            rewards_r: reward of each step.
            lengths_s: steps of each segment, at least 1; segments of one episode are in order.
            episodes_s: number of each segment's agent episode, or of its group.
            ended_s: the agent episode, or the group, ended with the segment.
        """
        sums_r = self._discounted(rewards_r, lengths_s, episodes_s, ended_s)
        self.module.update(torch.from_numpy(sums_r).unsqueeze(1))
        divided: Floats = rewards_r / self.module.variance.sqrt().numpy()
        return np.clip(divided, -CLIP, CLIP, out=divided)

    def _discounted(self, rewards_r: Floats, lengths_s: Array, episodes_s: Numbers, ended_s: Flags) -> Floats:
        """Returns [r] discounted sums so far, episode by episode: advantages of value 0, in reverse order."""
        by_episode_s = np.argsort(episodes_s, kind="stable")
        agent_episodes, first = np.unique(episodes_s[by_episode_s], return_index=True)
        steps = np.add.reduceat(lengths_s[by_episode_s], first)
        rows = sequences.rows_of((np.cumsum(lengths_s) - lengths_s)[by_episode_s], lengths_s[by_episode_s])
        back = rewards_r[rows][::-1].copy()
        before = self._sums.recall(agent_episodes)[::-1, 0]
        sums_back = advantages(back, np.zeros_like(back), before, steps[::-1], self._gamma, 1.0)
        sums_r: Floats = sums_back[::-1].copy()
        last = sums_r[np.cumsum(steps) - 1, None]
        over = np.isin(agent_episodes, episodes_s[ended_s])
        self._sums.keep(agent_episodes, np.where(np.isfinite(last), last, np.float32(0)), over)
        return sums_r


def by_series(rewards_r: Floats, timesteps_r: Numbers, in_series_T: Numbers) -> Floats:
    """Returns [T] what the members of groups earned together, at the timesteps of their decisions.

    Args:
        rewards_r: reward of each decision.
        timesteps_r: timestep of each decision.
        in_series_T: timesteps in the series.
    """
    most = int(max(in_series_T.max(), timesteps_r.max(initial=0))) + 1
    of_timesteps = np.bincount(timesteps_r, rewards_r, most)
    series: Floats = of_timesteps[in_series_T].astype(np.float32)
    return series
