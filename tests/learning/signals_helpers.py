"""Small behaviors, demonstrations and batches for the tests of reward signals, and networks in numpy."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from sparring.pipeline.demonstrations.episodes import SUFFIX, Recording, encode
from sparring.pipeline.demonstrations.library import Demonstrations
from sparring.pipeline.learning.buffer import Batch
from sparring.pipeline.learning.settings import (
    BehavioralCloningSettings,
    CuriositySettings,
    ExtrinsicSettings,
    GailSettings,
    Hyperparameters,
    RewardSignals,
    RndSettings,
    TrainerSettings,
)
from sparring.pipeline.learning.signals import Steps
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.networks.arrays import to_environment
from sparring.pipeline.networks.settings import MemorySettings, NetworkSettings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from tests.learning.learning_helpers import no_episodes
from tests.learning.random_groups import World

NAMES = ("extrinsic", "gail", "curiosity", "rnd")
LENGTH, MEMORY = 3, 6

NEAR = ObservationSpec(name="near", shape=(3,))
FAR = ObservationSpec(name="far", shape=(2,))
HYBRID = ActionSpec(continuous=2, discrete=(3, 2))
SPECS = {
    "hybrid": BehaviorSpec(observations=(NEAR, FAR), actions=HYBRID),
    "continuous": BehaviorSpec(observations=(NEAR,), actions=ActionSpec(continuous=2)),
    "discrete": BehaviorSpec(observations=(NEAR,), actions=ActionSpec(discrete=(2, 4))),
    "bytes": BehaviorSpec(
        observations=(ObservationSpec(name="eye", shape=(1, 6, 5), kind="image", dtype="uint8"), NEAR), actions=HYBRID
    ),
    "floats": BehaviorSpec(
        observations=(ObservationSpec(name="eye", shape=(2, 5, 5), kind="image"),), actions=ActionSpec(discrete=(3,))
    ),
    "entities": BehaviorSpec(
        observations=(NEAR, ObservationSpec(name="others", shape=(3, 2), kind="entities")), actions=HYBRID
    ),
    "goal": BehaviorSpec(
        observations=(NEAR, ObservationSpec(name="aim", shape=(2,), kind="goal")),
        actions=ActionSpec(continuous=1, discrete=(3,)),
    ),
}


# ---------------------------------------------------------------- settings


def network(**changes: Any) -> NetworkSettings:
    return NetworkSettings(**({"hidden_units": 8, "vis_encode_type": "match3"} | changes))


def signals_of(
    names: Any, demo: Path | str = "none", *, use_actions: bool = False, use_vail: bool = False, normalize: bool = False
) -> RewardSignals:
    """Returns small signals, each with its own gamma and strength."""
    shape = {"network_settings": network(normalize=normalize), "learning_rate": 1e-3}
    every = {
        "extrinsic": lambda: ExtrinsicSettings(gamma=0.9, strength=0.7),
        "gail": lambda: GailSettings(
            gamma=0.8, strength=0.3, demo_path=str(demo), use_actions=use_actions, use_vail=use_vail, **shape
        ),
        "curiosity": lambda: CuriositySettings(gamma=0.95, strength=0.2, **shape),
        "rnd": lambda: RndSettings(gamma=0.85, strength=0.1, **shape),
    }
    return RewardSignals(**{name: every[name]() for name in names})


def trainer(
    signals: RewardSignals,
    *,
    kind: str = "ppo",
    memory: bool = False,
    previous: bool = False,
    normalize: bool = False,
    cloning: BehavioralCloningSettings | None = None,
    **hyper: Any,
) -> TrainerSettings:
    """Returns settings of a small learner; further arguments are hyperparameters."""
    chosen = {"batch_size": 9, "buffer_size": 32, "learning_rate": 1e-3, "num_epoch": 2, "ratio": "joint"} | hyper
    return TrainerSettings(
        trainer_type=kind,
        hyperparameters=Hyperparameters(**chosen),
        network_settings=network(
            normalize=normalize,
            memory=MemorySettings(memory_size=MEMORY, sequence_length=LENGTH) if memory else None,
            previous_action=previous,
        ),
        reward_signals=signals,
        behavioral_cloning=cloning,
        max_steps=10_000,
    )


# ---------------------------------------------------------------- demonstrations


def observed(spec: BehaviorSpec, rows: int, random: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Returns random rows of each observation; float images are in 0..1, and some entities are padding."""
    columns = []
    for one in spec.observations:
        if one.dtype == "uint8":
            columns.append(random.integers(0, 256, (rows, *one.shape), np.uint8))
        elif one.kind == "image":
            columns.append(random.random((rows, *one.shape), np.float32))
        else:
            column = random.standard_normal((rows, *one.shape), np.float32)
            if one.kind == "entities":
                column[random.random((rows, one.shape[0])) < 0.4] = 0
            columns.append(column)
    return tuple(columns)


def recorded(spec: BehaviorSpec, lengths: list[int], *, seed: int = 0, masked: bool = False) -> dict[str, np.ndarray]:
    """Returns columns of random episodes; no chosen action is masked."""
    random = np.random.default_rng([seed, 7])
    e, r, actions = len(lengths), sum(lengths), spec.actions
    discrete = random.integers(0, actions.discrete, (r, len(actions.discrete)), np.int32)
    found = {
        "lengths": np.array(lengths, np.int32),
        "agents": np.arange(e, dtype=np.int64),
        "teams": np.zeros(e, np.int32),
        "simulators": np.zeros(e, np.int32),
        "groups": np.zeros(e, np.int64),
        "terminated": random.random(e) < 0.5,
        "continuous": random.uniform(-1, 1, (r, actions.continuous)).astype(np.float32),
        "discrete": discrete,
        "rewards": random.standard_normal(r, np.float32),
        "group_rewards": np.zeros(r, np.float32),
    }
    seen, after = observed(spec, r, random), observed(spec, e, random)
    for at in range(len(spec.observations)):
        found |= {f"observation.{at}": seen[at], f"final_observation.{at}": after[at]}
    if masked and actions.discrete:
        found["masks"] = random.random((r, actions.mask_size)) < 0.4
        first = np.cumsum((0, *actions.discrete))[:-1]
        np.put_along_axis(found["masks"], first + discrete, False, 1)
    return found


def write(path: Path, spec: BehaviorSpec, columns: dict[str, np.ndarray], name: str = "one") -> Path:
    """Writes a file of these columns; returns its folder."""
    file = path / f"{name}{SUFFIX}"
    file.write_bytes(encode(Recording(behavior="Other", spec=spec, columns=columns)))
    return path


def demonstrations_of(spec: BehaviorSpec, columns: dict[str, np.ndarray]) -> Demonstrations:
    """Returns columns as training reads them, row by row."""
    starts = np.cumsum(columns["lengths"]) - columns["lengths"]
    episode, ended = [], []
    for number, (start, length) in enumerate(zip(starts, columns["lengths"], strict=True)):
        for row in range(start, start + length):
            episode.append(number)
            ended.append(row == start + length - 1)
    return Demonstrations(
        observations=tuple(columns[f"observation.{at}"] for at in range(len(spec.observations))),
        continuous=columns["continuous"],
        discrete=columns["discrete"],
        masks=columns.get("masks"),
        ended=np.array(ended),
        terminated=columns["terminated"],
        episode=np.array(episode, np.int64),
        episodes=len(columns["lengths"]),
    )


# ---------------------------------------------------------------- played segments


PARTS = [(1, 4, False), (2, 7, True), (1, 3, True), (3, 1, False), (4, 2, False), (5, 5, True), (3, 6, False)]
"""Segments as (agent episode, rows, ended)."""


def steps_from(
    actions: ActionSpec, lengths: Any, observations: Any, following: Any, continuous: Any, discrete: Any, ended: Any,
    episodes: Any,
) -> Any:  # fmt: skip
    """Returns steps of segments, with the actions that were executed."""
    batch: Any = SimpleNamespace(
        lengths=lengths, observations=observations, next_observations=following, continuous=continuous,
        discrete=discrete, ended=ended, agent_episodes=episodes, steps=len(continuous),
    )  # fmt: skip
    steps: Any = Steps(batch, actions)
    steps.continuous, steps.discrete = to_environment(continuous), discrete
    return steps


def steps_of(spec: BehaviorSpec, parts: Any = PARTS, seed: int = 0, scale: float = 3.0) -> Any:
    """Returns random steps; many raw samples exceed the range of executed actions."""
    random, (agent_episodes, lengths, ended) = np.random.default_rng([seed, 3]), zip(*parts, strict=True)
    rows = sum(lengths)
    return steps_from(
        spec.actions,
        np.array(lengths, np.int32),
        observed(spec, rows, random),
        observed(spec, len(parts), random),
        scale * random.standard_normal((rows, spec.actions.continuous), np.float32),
        random.integers(0, spec.actions.discrete, (rows, len(spec.actions.discrete)), np.int32),
        np.array(ended),
        np.array(agent_episodes, np.int64),
    )


def played(ppo: Any, parts: Any = PARTS, seed: int = 0, carried_by_agent: Any = None, masked: bool = True) -> Batch:
    """Plays segments one after the other; `carried_by_agent` keeps the state of agent episodes between calls."""
    acting, random, source = ppo.actor.frozen(), np.random.default_rng(seed), np.random.default_rng(seed + 1)
    carried_by_agent, spec = {} if carried_by_agent is None else carried_by_agent, ppo.actor.spec
    length, choices = ppo.settings.network_settings.sequence_length, spec.actions.mask_size
    masked = masked and choices > 0
    columns, starts = [], []
    for episode, rows, _ in parts:
        carried = carried_by_agent.setdefault(episode, np.zeros((1, acting.carried), np.float32))
        for row in range(rows):
            if length and row % length == 0:
                starts.append(carried.copy())
            masks = np.zeros((1, choices), np.bool_)
            masks[0, :1] = masked and random.random() < 0.5
            seen = observed(spec, 1, random)
            columns.append((*seen, masks, *acting.act(seen, masks if masked else None, source, carried=carried)))
    *observations, masks, continuous, discrete, log_probs = map(np.concatenate, zip(*columns, strict=True))
    ended, rows = np.array([end for _, _, end in parts]), len(log_probs)
    return Batch(
        lengths=np.array([rows for _, rows, _ in parts], np.int32),
        terminated=ended & (np.arange(len(parts)) % 2 == 1),
        ended=ended,
        agent_episodes=np.array([episode for episode, _, _ in parts], np.int64),
        next_observations=observed(spec, len(parts), random),
        observations=tuple(observations),
        continuous=continuous,
        discrete=discrete,
        log_probs=log_probs,
        masks=masks if masked else None,
        rewards=random.standard_normal(rows, np.float32),
        group_rewards=np.zeros(rows, np.float32),
        versions=np.zeros(rows, np.int64),
        sequence_length=length,
        carried=np.concatenate(starts) if length else None,
    )


def record_of(batch: Batch, source: str = "stepping-0.1") -> Segments:
    """Returns the record of a batch."""
    count, rows = len(batch.lengths), batch.steps
    names = (
        "lengths", "observations", "next_observations", "continuous", "discrete", "log_probs", "masks", "rewards",
        "group_rewards", "versions", "terminated", "carried",
    )  # fmt: skip
    return Segments(
        behavior="Test", source=source, origin="assembly.1", reached=rows,
        flush=0, interrupted=batch.ended & ~batch.terminated, group_ended=np.zeros(count, np.bool_),
        teams=np.zeros(count, np.int32), groups=np.zeros(count, np.int64), agents=batch.agent_episodes,
        simulators=np.zeros(count, np.int32), episodes=no_episodes(),
        **{name: getattr(batch, name) for name in names},
    )  # fmt: skip


def world(poca: Any, specs: dict[str, BehaviorSpec], seed: int = 0) -> World:
    """Returns groups in which the actor of a MA-POCA plays."""
    return World(specs, poca.actor, seed)


# ---------------------------------------------------------------- states


def state(module: nn.Module) -> dict[str, bytes]:
    """Returns the bytes of all parameters and buffers."""
    return {name: tensor.numpy().tobytes() for name, tensor in module.state_dict().items()}


def moments(of: Any) -> dict[str, bytes]:
    """Returns the bytes of an optimizer's moments."""
    return {name: tensor.numpy().tobytes() for name, tensor in of.moments.items()}


def finite(module: nn.Module) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in module.state_dict().values())


def add_noise(module: nn.Module, amount: float = 0.3, seed: int = 1) -> None:
    """Adds noise to all trained parameters, so that no initial zero remains."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=noise), alpha=amount)


# ---------------------------------------------------------------- networks in numpy


Weights = dict[str, np.ndarray]


def weights_of(module: nn.Module) -> Weights:
    """Returns all parameters and buffers in float64."""
    return {name: tensor.numpy().astype(np.float64) for name, tensor in module.state_dict().items()}


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Returns the sigmoid without overflow."""
    return np.exp(-np.logaddexp(0, -x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def dense(weights: Weights, name: str, x: np.ndarray) -> np.ndarray:
    """Applies the linear layers 0, 2, 4, ..., each followed by SiLU."""
    layer = 0
    while f"{name}.{layer}.weight" in weights:
        x = silu(linear(weights, f"{name}.{layer}", x))
        layer += 2
    assert layer
    return x


def linear(weights: Weights, name: str, x: np.ndarray) -> np.ndarray:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def actions_by_hand(actions: ActionSpec, executed: np.ndarray, discrete: np.ndarray) -> np.ndarray:
    """Returns actions row by row: continuous ones, then a one-hot vector for each branch."""
    rows = []
    for row in range(len(executed)):
        found = [float(value) for value in executed[row]]
        for branch, size in enumerate(actions.discrete):
            found += [1.0 if choice == discrete[row, branch] else 0.0 for choice in range(size)]
        rows.append(found)
    return np.array(rows, np.float64).reshape(len(executed), -1)


def slope(loss: Any, weights: Weights, name: str, at: tuple[int, ...], width: float = 1e-5) -> float:
    """Returns the central difference of a loss for one weight."""
    sides = []
    for sign in (1, -1):
        moved = weights | {name: weights[name].copy()}
        moved[name][at] += sign * width
        sides.append(loss(moved))
    return (sides[0] - sides[1]) / (2 * width)


def some_places(weights: Weights, names: list[str], seed: int = 0, each: int = 4) -> list[tuple[str, tuple[int, ...]]]:
    """Returns a few entries of each of these weights."""
    random = np.random.default_rng(seed)
    found = []
    for name in names:
        for _ in range(min(each, weights[name].size)):
            flat = int(random.integers(weights[name].size))
            found.append((name, tuple(int(part) for part in np.unravel_index(flat, weights[name].shape))))
    return found
