"""Random segments, small settings and a small game for the tests of learning."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

from sparring.pipeline.learning.algorithm import Parts
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.learning.settings import Hyperparameters, TrainerSettings
from sparring.pipeline.messages.segments import Episodes, Segments
from sparring.pipeline.networks.actor import Actor
from sparring.pipeline.networks.device import load_arrays
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec

HYBRID = BehaviorSpec(
    observations=(ObservationSpec(name="near", shape=(3,)), ObservationSpec(name="far", shape=(2,))),
    actions=ActionSpec(continuous=2, discrete=(3, 2)),
)


def small_settings(**changes) -> TrainerSettings:
    """Returns settings of a small learner; `changes` are hyperparameters."""
    hyper = {"batch_size": 16, "buffer_size": 64, "learning_rate": 1e-3, "ratio": "joint"} | changes
    return TrainerSettings(
        hyperparameters=Hyperparameters(**hyper),
        network_settings=NetworkSettings(normalize=True, hidden_units=16, num_layers=2),
        max_steps=10_000,
    )


def algorithm_of(
    behavior: str, spec: BehaviorSpec, settings: TrainerSettings, generator: torch.Generator, **how: Any
) -> Any:
    """Returns the algorithm of some settings, with new networks."""
    return Parts(behavior=behavior, spec=spec, settings=settings, generator=generator, **how).build()


def no_episodes() -> Episodes:
    empty = np.zeros(0, np.float32)
    return Episodes(
        returns=empty, lengths=np.zeros(0, np.int32), group_returns=empty, teams=np.zeros(0, np.int32), outcomes=empty
    )


def segments(
    lengths, *, first=0, spec=HYBRID, seed=0, versions=1, terminated=None, masked=False, numbered=False, **fields
) -> Segments:
    """Returns random segments; with `numbered` the first column of the first observation counts rows from `first`.

    In the observations that follow a segment it is the number of the last row + 0.5.
    """
    random = np.random.default_rng(seed)
    lengths = np.asarray(lengths, np.int32)
    rows, count = int(lengths.sum()), len(lengths)
    observations = tuple(random.standard_normal((rows, *o.shape), np.float32) for o in spec.observations)
    following = tuple(random.standard_normal((count, *o.shape), np.float32) for o in spec.observations)
    if numbered:
        observations[0][:, 0] = first + np.arange(rows)
        following[0][:, 0] = first + np.cumsum(lengths) - 0.5
    actor = Actor(spec, NetworkSettings(hidden_units=8), torch.Generator().manual_seed(seed))
    masks = next_masks = None
    if masked:
        masks, next_masks = (np.zeros((size, spec.actions.mask_size), np.bool_) for size in (rows, count))
        masks[::2, 0] = next_masks[::2, 1] = True
    continuous, discrete, log_probs = actor.frozen().act(observations, masks, np.random.default_rng(seed))
    columns = {
        **_head(rows),
        "lengths": lengths,
        "observations": observations,
        "next_observations": following,
        "continuous": continuous,
        "discrete": discrete,
        "log_probs": log_probs,
        "masks": masks,
        "next_masks": next_masks,
        "rewards": random.standard_normal(rows, np.float32),
        "group_rewards": np.zeros(rows, np.float32),
        "versions": np.broadcast_to(np.asarray(versions, np.int64), rows).copy(),
        **_ends(count),
    }
    if terminated is not None:
        columns["terminated"] = np.asarray(terminated, np.bool_)
    return Segments(**(columns | fields))


def _head(rows: int) -> dict:
    """Returns the fields of the first record of an assembly incarnation, without a flush."""
    names = {"behavior": "Test", "source": "stepping-0.1", "origin": "assembly.1"}
    return {**names, "reached": rows, "flush": 0}


def _ends(count: int) -> dict:
    """Returns the columns of `count` segments without an end, each of another agent without a group."""
    return {
        "terminated": np.zeros(count, np.bool_),
        "interrupted": np.zeros(count, np.bool_),
        "group_ended": np.zeros(count, np.bool_),
        "teams": np.zeros(count, np.int32),
        "groups": np.zeros(count, np.int64),
        "agents": np.arange(count, dtype=np.int64),
        "simulators": np.zeros(count, np.int32),
        "episodes": no_episodes(),
    }


def play_goal(actions: ActionSpec, settings: TrainerSettings, seed: int, steps: int = 3000, window: int = 100) -> float:
    """Trains on the 1-D goal game with one agent; returns the mean return of the last `window` episodes."""
    spec = BehaviorSpec(observations=(ObservationSpec(name="goal", shape=(1,)),), actions=actions)
    learner = Learner("Goal", spec, settings, seed)
    actor, random = settings.hyperparameters.actor(spec, settings.network_settings), np.random.default_rng(seed)
    source = np.random.default_rng(seed + 1)
    load_arrays(actor, learner.weights().arrays)
    returns: deque[float] = deque(maxlen=window)
    goal, places, total = random.choice([-1.0, 1.0]), np.zeros(actions.continuous + len(actions.discrete)), 0.0
    rows: list[tuple] = []
    for _ in range(steps):
        seen = np.full((1, 1), goal, np.float32)
        continuous, discrete, log_prob = actor.frozen().act((seen,), None, source)
        move = np.concatenate([actor.executed(continuous)[0], discrete[0] * 2.0 - 1.0])
        places = np.clip(places + 0.2 * move, -1, 1)
        over = bool((np.abs(places) >= 1).all())
        reward = 1.06 * float((places * goal).mean()) if over else -0.01
        total += reward
        rows.append((seen, continuous, discrete, log_prob, np.float32([reward])))
        if over:
            returns.append(total)
            goal, places, total = random.choice([-1.0, 1.0]), np.zeros_like(places), 0.0
        if over or len(rows) == settings.time_horizon:
            observations, continuous, discrete, log_probs, rewards = map(np.concatenate, zip(*rows, strict=True))
            following = np.full((1, 1), goal, np.float32)
            learner.add(
                segments(
                    [len(rows)], spec=spec, terminated=[over], observations=(observations,),
                    next_observations=(following,), continuous=continuous, discrete=discrete, log_probs=log_probs,
                    rewards=rewards, versions=learner.version,
                )
            )  # fmt: skip
            rows = []
            if learner.ready:
                learner.update(everything=True)
                load_arrays(actor, learner.weights().arrays)
    return float(np.mean(returns)) if returns else -1.0
