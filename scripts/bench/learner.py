"""The learner alone on data in memory, compared with the bare forward, backward and optimizer step.

    python scripts/bench/learner.py [a] [b]

Case a: batch 64, buffer 12,000. Case b: batch 4,096, buffer 65,536. Both: 3 epochs, separate actor
and critic of 128x2, 8 observations, 2 continuous actions, normalized, one thread. (Case images, batch 64, buffer
512, is for the end-to-end bench: one image of 84x84x3 bytes, `nature_cnn`, 4 choices.) `learner` is all
of an update: taking segments in, values, advantages, minibatches, statistics, normalizer, weights
to publish. `bare` is only forward, backward and optimizer step on the same minibatches, from a
fixed gradient, with plain `torch.nn` layers and Adam. `own` is the same with this project's
perceptrons and flat parameters. Times are CPU time of the thread, so that other work on the
machine counts less.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

import pictures

from sparring.pipeline.learning.algorithm import Parts
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.learning.minibatches import RecurrentState
from sparring.pipeline.learning.ppo import PPO
from sparring.pipeline.learning.settings import Hyperparameters, TrainerSettings
from sparring.pipeline.messages.segments import Episodes, Segments
from sparring.pipeline.networks.actor import Actor
from sparring.pipeline.networks.device import load_arrays
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec

SPEC = BehaviorSpec(observations=(ObservationSpec(name="state", shape=(8,)),), actions=ActionSpec(continuous=2))
VECTORS = NetworkSettings(normalize=True, hidden_units=128, num_layers=2)


@dataclass(frozen=True)
class Case:
    """Minibatch and buffer in steps, the length of each segment, and the spec of the agents."""

    batch: int
    buffer: int
    horizon: int = 64
    epochs: int = 3
    spec: BehaviorSpec = SPEC
    network: NetworkSettings = VECTORS


CASES = {
    "a": Case(batch=64, buffer=12_000),
    "b": Case(batch=4_096, buffer=65_536),
    "images": Case(batch=64, buffer=512, spec=pictures.SPEC, network=NetworkSettings(vis_encode_type="nature_cnn")),
}
COMPARED = ("a", "b")


def settings_of(case: Case) -> TrainerSettings:
    """Returns the settings of a learner for `case`."""
    return TrainerSettings(
        hyperparameters=Hyperparameters(batch_size=case.batch, buffer_size=case.buffer, num_epoch=case.epochs),
        network_settings=case.network,
        max_steps=10**9,
    )


def look(spec: BehaviorSpec, rows: int, random: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Makes random observations of `rows` agents."""
    return tuple(
        random.integers(0, 256, (rows, *one.shape), np.uint8)
        if one.dtype == "uint8"
        else random.standard_normal((rows, *one.shape), np.float32)
        for one in spec.observations
    )


def segments_of(learner: Learner, spec: BehaviorSpec, rows: int, horizon: int, random: np.random.Generator) -> Segments:
    """Makes random segments, acted by the learner's present policy."""
    actor = Actor(spec, learner.settings.network_settings)
    load_arrays(actor, learner.weights().arrays)
    lengths = np.full(-(-rows // horizon), horizon, np.int32)
    lengths[-1] = rows - horizon * (len(lengths) - 1)
    count = len(lengths)
    observations = look(spec, rows, random)
    continuous, discrete, log_probs = actor.frozen().act(observations, None, np.random.default_rng(1))
    return Segments(
        behavior="Bench",
        source="stepping-0.1",
        origin="assembly.1",
        reached=rows,
        flush=0,
        lengths=lengths,
        observations=observations,
        next_observations=look(spec, count, random),
        continuous=continuous,
        discrete=discrete,
        log_probs=log_probs,
        masks=None,
        rewards=random.standard_normal(rows, np.float32),
        group_rewards=np.zeros(rows, np.float32),
        versions=np.full(rows, learner.version, np.int64),
        terminated=np.zeros(count, np.bool_),
        interrupted=np.zeros(count, np.bool_),
        group_ended=np.zeros(count, np.bool_),
        teams=np.zeros(count, np.int32),
        groups=np.zeros(count, np.int64),
        agents=np.arange(count, dtype=np.int64),
        simulators=np.zeros(count, np.int32),
        episodes=Episodes(
            returns=np.zeros(0, np.float32),
            lengths=np.zeros(0, np.int32),
            group_returns=np.zeros(0, np.float32),
            teams=np.zeros(0, np.int32),
            outcomes=np.zeros(0, np.float32),
        ),
    )


class Alone:
    """The learner of a case with data in memory; a call returns the seconds of one update."""

    def __init__(self, case: Case) -> None:
        torch.set_num_threads(1)
        self._case, self._random = case, np.random.default_rng(1)
        self._learner = Learner("Bench", case.spec, settings_of(case), seed=1)

    def __call__(self) -> float:
        case = self._case
        record = segments_of(self._learner, case.spec, case.buffer, case.horizon, self._random)
        return _seconds(partial(_one_update, self._learner, record))


def measure(case: Case, updates: int = 5) -> dict[str, float]:
    """Measures one case.

    Returns:
        learner_steps_per_s; learner_ms, bare_ms and own_ms per minibatch; ratio (learner / bare).
    """
    random, minibatches = np.random.default_rng(1), case.buffer // case.batch * case.epochs
    learner, bare, own = Alone(case), _bare(case, random), _own(case, settings_of(case), random)
    times: dict[str, list[float]] = {"learner": [], "bare": [], "own": []}
    for _ in range(updates + 1):  # in turn, so that other load on the machine slows all three down
        times["learner"].append(learner())
        times["bare"].append(_seconds(bare))
        times["own"].append(_seconds(own))
    seconds = {name: statistics.median(taken[1:]) for name, taken in times.items()}
    return {
        "learner_steps_per_s": case.buffer / seconds["learner"],
        **{f"{name}_ms": value / minibatches * 1e3 for name, value in seconds.items()},
        "ratio": seconds["learner"] / seconds["bare"],
    }


def _one_update(learner: Learner, record: Segments) -> None:
    learner.add(record)
    learner.update()
    learner.weights()


def _own(case: Case, settings: TrainerSettings, random: np.random.Generator) -> Callable[[], None]:
    """Returns the same work with the learner's own networks and parameters."""
    ppo = Parts(behavior="Test", spec=SPEC, settings=settings, generator=torch.Generator().manual_seed(1)).build()
    assert isinstance(ppo, PPO)
    rows = torch.from_numpy(random.standard_normal((case.buffer, 8), np.float32))
    minibatches = torch.split(rows, case.batch)[: case.buffer // case.batch]
    gradients = (torch.randn(case.batch, 2) / case.batch, torch.randn(case.batch, 1) / case.batch)

    @torch.no_grad()
    def run() -> None:
        for _ in range(case.epochs):
            for inputs in zip(minibatches, strict=True):
                _, _, backward_fn = ppo.networks.run(inputs, RecurrentState())
                ppo.optimizer.step(partial(backward_fn, *gradients))

    return run


def _bare(case: Case, random: np.random.Generator) -> Callable[[], None]:
    """Returns the minibatches of an update with plain layers and optimizer, and a fixed gradient."""

    def network(outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, outputs))

    actor, critic = network(2), network(1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], fused=True)
    rows = torch.from_numpy(random.standard_normal((case.buffer, 8), np.float32))
    minibatches = torch.split(rows, case.batch)[: case.buffer // case.batch]
    gradients = (torch.randn(case.batch, 2) / case.batch, torch.randn(case.batch, 1) / case.batch)

    def run() -> None:
        for _ in range(case.epochs):
            for inputs in minibatches:
                optimizer.zero_grad()
                torch.autograd.backward((actor(inputs), critic(inputs)), gradients)
                optimizer.step()

    return run


def _seconds(run: Callable[[], Any]) -> float:
    before = time.thread_time()
    run()
    return time.thread_time() - before


def main() -> None:
    for name in sys.argv[1:] or COMPARED:
        case = CASES[name]
        measured = measure(case)
        print(
            f"({name}) batch {case.batch}, buffer {case.buffer}: "
            f"learner {measured['learner_steps_per_s']:,.0f} steps/s; "
            f"per minibatch {measured['learner_ms']:.3f} ms, bare {measured['bare_ms']:.3f} ms, "
            f"own {measured['own_ms']:.3f} ms; learner / bare {measured['ratio']:.2f}"
        )


if __name__ == "__main__":
    main()
