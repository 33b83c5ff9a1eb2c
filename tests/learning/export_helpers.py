"""Specs and networks of every kind, and checkpoints whose values differ from initial ones as after training."""

from __future__ import annotations

import dataclasses

import numpy as np

from sparring.pipeline.learning.checkpoints import Checkpoint
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.learning.settings import Hyperparameters, TrainerSettings
from sparring.pipeline.networks.settings import MemorySettings, NetworkSettings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec

VECTOR = ObservationSpec(name="vector", shape=(5,))
FAR = ObservationSpec(name="far", shape=(3,))
GOAL = ObservationSpec(name="goal", shape=(3,), kind="goal")
IMAGE = ObservationSpec(name="image", shape=(3, 36, 40), kind="image")
BYTES = ObservationSpec(name="bytes", shape=(1, 20, 24), kind="image", dtype="uint8")
NEAR = ObservationSpec(name="near", shape=(4, 3), kind="entities")
TEAMMATES = ObservationSpec(name="teammates", shape=(2, 5), kind="entities")

CONTINUOUS = ActionSpec(continuous=2)
DISCRETE = ActionSpec(discrete=(3, 2))
HYBRID = ActionSpec(continuous=2, discrete=(3, 1, 2))
MEMORY = MemorySettings(memory_size=12, sequence_length=4)

Kind = tuple[tuple[ObservationSpec, ...], ActionSpec, dict]

KINDS: dict[str, Kind] = {
    "vector": ((VECTOR,), CONTINUOUS, {}),
    "vectors-normalized": ((VECTOR, FAR), HYBRID, {"normalize": True}),
    "one-layer": ((VECTOR,), DISCRETE, {"num_layers": 1}),
    "one-branch": ((VECTOR,), ActionSpec(discrete=(4,)), {}),
    "goal-as-vector": ((GOAL, VECTOR), HYBRID, {"goal_conditioning_type": "none", "normalize": True}),
    "goal-hyper": ((GOAL, VECTOR), HYBRID, {"normalize": True}),
    "goal-hyper-one-layer": ((VECTOR, GOAL), CONTINUOUS, {"num_layers": 1}),
    "limit": ((VECTOR,), HYBRID, {"action_limit": 0.05}),
    "tanh": ((VECTOR, FAR), HYBRID, {"activation": "tanh"}),
    "relu-goal": ((GOAL, VECTOR), HYBRID, {"activation": "relu", "initialization": "uniform"}),
    "tanh-goal-memory": ((GOAL, VECTOR), HYBRID, {"activation": "tanh", "memory": MEMORY}),
    "image": ((IMAGE,), DISCRETE, {}),
    "bytes-and-image": ((BYTES, VECTOR, IMAGE), HYBRID, {"normalize": True}),
    "nature_cnn": ((IMAGE,), CONTINUOUS, {"vis_encode_type": "nature_cnn"}),
    "resnet": ((IMAGE, BYTES), CONTINUOUS, {"vis_encode_type": "resnet"}),
    "match3": (
        (ObservationSpec(name="board", shape=(6, 9, 8), kind="image"),),
        DISCRETE,
        {"vis_encode_type": "match3"},
    ),
    "fully_connected": ((BYTES,), CONTINUOUS, {"vis_encode_type": "fully_connected"}),
    "entities": ((NEAR,), CONTINUOUS, {}),
    "entities-and-vector": ((NEAR, VECTOR, TEAMMATES), HYBRID, {"normalize": True}),
    "memory": ((VECTOR,), HYBRID, {"memory": MEMORY}),
    "memory-goal": ((GOAL, VECTOR), DISCRETE, {"memory": MEMORY}),
    "memory-one-layer": ((VECTOR,), CONTINUOUS, {"memory": MEMORY, "num_layers": 1}),
    "everything": ((NEAR, IMAGE, GOAL, VECTOR, BYTES, TEAMMATES, FAR), HYBRID, {"memory": MEMORY, "normalize": True}),
}


def checkpoint_of(kind: Kind, *, name: str = "Goal", shared: bool = False, trained: int = 1200) -> Checkpoint:
    """Returns a checkpoint with normalizer, log sigmas and biases as after training."""
    observations, actions, network = kind
    settings = TrainerSettings(
        network_settings=NetworkSettings(hidden_units=16, **network),
        hyperparameters=Hyperparameters(shared_critic=shared),
    )
    found = Learner(name, BehaviorSpec(observations=observations, actions=actions), settings, 3).checkpoint()
    random = np.random.default_rng(1)
    weights = dict(found.weights)
    for key, values in weights.items():
        if key.endswith("normalizer.mean"):
            weights[key] = random.normal(3, 4, values.shape).astype(np.float32)
        elif key.endswith("normalizer.variance"):
            weights[key] = random.uniform(0.1, 9, values.shape).astype(np.float32)
        elif key.endswith("log_sigma"):
            weights[key] = random.uniform(-1, 0.5, values.shape).astype(np.float32)
        elif "bias" in key:
            weights[key] = values + random.normal(0, 0.3, values.shape).astype(np.float32)
    return dataclasses.replace(found, weights=weights, trained=trained)
