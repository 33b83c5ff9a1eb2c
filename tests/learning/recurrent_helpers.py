"""Small networks with memory, segments that they played, and a slow evaluation of these row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparring.pipeline.learning.buffer import Batch
from sparring.pipeline.learning.settings import Hyperparameters, TrainerSettings
from sparring.pipeline.networks.arrays import previous_features
from sparring.pipeline.networks.settings import MemorySettings, NetworkSettings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from tests.learning.learning_helpers import algorithm_of

LENGTH, MEMORY = 3, 6
VECTOR = ObservationSpec(name="state", shape=(3,))
EYE = ObservationSpec(name="eye", shape=(1, 6, 5), kind="image", dtype="uint8")
AIM = ObservationSpec(name="aim", shape=(2,), kind="goal")
HYBRID = ActionSpec(continuous=1, discrete=(2, 3))
VARIANTS = {
    "memory": {},
    "previous": {"previous": True},
    "shared": {"shared": True},
    "shared_previous": {"shared": True, "previous": True},
    "images_and_goals": {"observations": (VECTOR, EYE, AIM), "previous": True},
    "shared_images": {"observations": (EYE,), "shared": True},
}
ALL = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
FIRST = [(1, 4, False), (2, 7, True), (1, 3, False), (3, 1, False), (1, 2, False), (4, 5, True), (3, 6, False)]
SECOND = [(3, 2, False), (1, 5, True), (5, 4, False), (3, 3, False)]
"""Segments as (agent episode, rows, ended) of a first and a second batch."""


def learning(*, observations=(VECTOR,), shared=False, previous=False, memory=True, **hyper):
    """Returns a small PPO whose outputs and values are far from 0."""
    trainer = TrainerSettings(
        hyperparameters=Hyperparameters(
            **{"batch_size": 9, "buffer_size": 64, "learning_rate": 1e-3, "shared_critic": shared, "ratio": "joint"}
            | hyper
        ),
        network_settings=NetworkSettings(
            normalize=VECTOR in observations,
            hidden_units=8,
            vis_encode_type="match3",
            memory=MemorySettings(memory_size=MEMORY, sequence_length=LENGTH) if memory else None,
            previous_action=previous,
        ),
        max_steps=1000,
    )
    ppo = algorithm_of(
        "Test", BehaviorSpec(observations=observations, actions=HYBRID), trainer, torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        for parameter in ppo.networks.modules.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.2)
    return ppo


def observed(spec, rows, random):
    return tuple(
        random.integers(0, 256, (rows, *one.shape), np.uint8)
        if one.dtype == "uint8"
        else random.standard_normal((rows, *one.shape), np.float32)
        for one in spec.observations
    )


def played(ppo, parts, carried_by_agent=None, seed=0):
    """Plays segments of (agent episode, rows, ended) one after the other.

    `carried_by_agent` keeps the recurrent state of each agent episode between calls.
    """
    acting, random, generator = ppo.actor.frozen(), np.random.default_rng(seed), np.random.default_rng(seed + 1)
    carried_by_agent, spec = {} if carried_by_agent is None else carried_by_agent, ppo.actor.spec
    length = ppo.settings.network_settings.sequence_length
    columns, starts = [], []
    for episode, rows, _ in parts:
        carried = carried_by_agent.setdefault(episode, np.zeros((1, acting.carried), np.float32))
        for row in range(rows):
            if row % length == 0:
                starts.append(carried.copy())
            masks = np.array([[False, random.random() < 0.5, False, False, random.random() < 0.5]])
            seen = observed(spec, 1, random)
            columns.append((*seen, masks, *acting.act(seen, masks, generator, carried=carried)))
    *observations, masks, continuous, discrete, log_probs = map(np.concatenate, zip(*columns, strict=True))
    ended = np.array([end for _, _, end in parts])
    return Batch(
        lengths=np.array([rows for _, rows, _ in parts], np.int32),
        terminated=ended & (random.random(len(parts)) < 0.5),
        ended=ended,
        agent_episodes=np.array([episode for episode, _, _ in parts], np.int64),
        next_observations=observed(spec, len(parts), random),
        observations=tuple(observations),
        continuous=continuous,
        discrete=discrete,
        log_probs=log_probs,
        masks=masks,
        rewards=random.standard_normal(len(log_probs), np.float32),
        group_rewards=np.zeros(len(log_probs), np.float32),
        versions=np.zeros(len(log_probs), np.int64),
        sequence_length=length,
        carried=np.concatenate(starts),
    )


def estimated(ppo, batch):
    return ppo.networks.estimate(ppo.networks.prepare(batch), batch)


class Walk:
    """Evaluates every agent episode row by row."""

    def __init__(self, ppo):
        self.ppo, self.memories = ppo, {}

    def value(self, observations, row, previous_action, memory):
        """Returns the values of one row and the memory after it."""
        actor, critic = self.ppo.actor, self.ppo.networks.critic
        seen = tuple(column[row : row + 1] for column in observations)
        previous_action = None if previous_action is None else torch.from_numpy(previous_action[None])
        prepared = actor.encoder.prepare(actor.encoder.join(seen), previous_action)
        network = actor if critic is None else critic
        with torch.no_grad():
            outputs, after = network.recurrent.frozen()(network.encoder(prepared), torch.from_numpy(memory[None]))
        return outputs[0, actor.outputs if critic is None else 0 :].numpy(), after[0].numpy()

    def __call__(self, batch):
        """Returns values [R, S], values after segments [s, S] and the critic's memory at starts of sequences [q, M]."""
        shared, previous = self.ppo.networks.critic is None, self.ppo.actor.encoder.previous
        done = previous_features(HYBRID, batch.continuous, batch.discrete)
        values, following, starts, row, sequence = [], [], [], 0, 0
        for segment, (episode, rows) in enumerate(
            zip(batch.agent_episodes.tolist(), batch.lengths.tolist(), strict=True)
        ):
            memory = self.memories.get(episode, np.zeros(MEMORY, np.float32))
            for at in range(rows):
                previous_action = done[row - 1] if at else None
                if at % LENGTH == 0:
                    previous_action = batch.carried[sequence, MEMORY:]
                    memory = batch.carried[sequence, :MEMORY] if shared else memory
                    starts.append(memory)
                    sequence += 1
                value, memory = self.value(batch.observations, row, previous_action if previous else None, memory)
                values.append(value)
                row += 1
            last = done[row - 1] if previous else None
            following.append(self.value(batch.next_observations, segment, last, memory)[0])
            self.memories[episode] = memory
            if batch.ended[segment]:
                del self.memories[episode]
        return np.array(values), np.array(following), np.array(starts)
