"""The CPU time of an update beside that of its matrix products alone: `python scripts/bench/products.py [poca] [ppo]`.

poca    MA-POCA at the shape of configs/soccer.yaml: groups of two that decide together, 2,048 steps, minibatches of
        256, 3 epochs, 64x2, 27 observations, 3 branches of 3 choices.
ppo     PPO with minibatches of 64, 128x2, 2,048 steps, 3 epochs, 8 observations, 2 continuous actions.

The products are those of all linear layers: forward before the update, for the critic's estimates and for the actor's
log-probability of each part of an action; forward, for the weights, and for the inputs of every layer but the first in
each minibatch. They have the update's shapes and write to memory that
exists. Both are timed in turn in one process with one thread, and the median of the ratios counts. `kernels` is the
number of PyTorch's operators for each minibatch that call no other operator.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))

import groups
import learner

from sparring.pipeline.learning.algorithm import Parts
from sparring.pipeline.learning.buffer import Batch, SegmentBuffer
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.learning.poca import POCA
from sparring.pipeline.learning.ppo import PPO
from sparring.pipeline.learning.settings import Hyperparameters, TrainerSettings
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec

STEPS, EPOCHS, REPEATS = 2048, 3, 7
SOCCER = BehaviorSpec(
    observations=(ObservationSpec(name="view", shape=(27,)),), actions=ActionSpec(continuous=0, discrete=(3, 3, 3))
)


class Layer(NamedTuple):
    """A linear layer: its rows in a minibatch, its sizes, and whether its inputs have a gradient."""

    rows: int
    inputs: int
    outputs: int
    first: bool = False


def settings_of(trainer: Literal["ppo", "poca"], batch: int, units: int) -> TrainerSettings:
    """Returns the settings of a case."""
    return TrainerSettings(
        trainer_type=trainer,
        hyperparameters=Hyperparameters(batch_size=batch, buffer_size=STEPS, num_epoch=EPOCHS),
        network_settings=NetworkSettings(normalize=True, hidden_units=units, num_layers=2),
        max_steps=10**9,
    )


def chain(rows: int, *sizes: int) -> list[Layer]:
    """Returns the layers of a perceptron."""
    return [Layer(rows, *pair, at == 0) for at, pair in enumerate(pairwise(sizes))]


def products(forward: list[Layer], trained: list[Layer], minibatches: int) -> Callable[[], None]:
    """Returns a function that computes the products of an update.

    Args:
        forward: layers that are evaluated before the update.
        trained: layers of one minibatch.
        minibatches: their number.
    """

    def forward_of(layer: Layer) -> Callable[[], object]:
        out = torch.empty(layer.rows, layer.outputs)
        return partial(
            torch.mm, torch.randn(layer.rows, layer.inputs), torch.randn(layer.inputs, layer.outputs), out=out
        )

    def backward_of(layer: Layer) -> list[Callable[[], object]]:
        gradient = torch.randn(layer.rows, layer.outputs)
        inputs, weight = torch.randn(layer.rows, layer.inputs), torch.randn(layer.outputs, layer.inputs)
        to_weight = partial(torch.mm, gradient.t(), inputs, out=torch.empty_like(weight))
        to_inputs = partial(torch.mm, gradient, weight, out=torch.empty_like(inputs))
        return [to_weight] if layer.first else [to_weight, to_inputs]

    before = [forward_of(layer) for layer in forward]
    each = [forward_of(layer) for layer in trained] + [one for layer in trained for one in backward_of(layer)]

    def run() -> None:
        for product in before:
            product()
        for _ in range(minibatches):
            for product in each:
                product()

    return run


def ppo() -> tuple[Callable[[], object], Callable[[], None], int]:
    """Returns an update of PPO, its products and its number of minibatches."""
    batch, settings = 64, settings_of("ppo", 64, 128)
    made = learner.segments_of(
        Learner("Bench", learner.SPEC, settings, seed=1), learner.SPEC, STEPS, 64, np.random.default_rng(1)
    )
    algorithm = Parts(
        behavior="Bench", spec=learner.SPEC, settings=settings, generator=torch.Generator().manual_seed(1)
    ).build()
    assert isinstance(algorithm, PPO)
    every = chain(batch, 8, 128, 128, 2) + chain(batch, 8, 128, 128, 1)
    before = chain(STEPS + STEPS // 64, 8, 128, 128, 1) + chain(STEPS, 8, 128, 128, 2)
    minibatches = STEPS // batch * EPOCHS
    return (
        partial(algorithm.update, batch_of(made, together=False), 0, 0),
        products(before, every, minibatches),
        minibatches,
    )


def poca() -> tuple[Callable[[], object], Callable[[], None], int]:
    """Returns an update of MA-POCA, its products and its number of minibatches."""
    batch, units, members, settings = 256, 64, 2, settings_of("poca", 256, 64)
    (made,) = groups.assembled(members, STEPS, SOCCER)
    algorithm = Parts(behavior="B", spec=SOCCER, settings=settings, generator=torch.Generator().manual_seed(1)).build()
    assert isinstance(algorithm, POCA)

    def critic(timesteps: int, baselines: bool) -> list[Layer]:
        tokens, sets = timesteps * members, 1 + members * baselines
        rows = timesteps * sets
        embedded = [Layer(tokens, 27, units, first=True), Layer(tokens, 9, units, first=True)]
        attention = [Layer(2 * tokens, units, 3 * units), Layer(tokens * sets, units, units)]
        heads = [Layer(timesteps, units + 1, 1), Layer(rows - timesteps, units + 1, 1)]
        return [*embedded, *attention, Layer(rows, units, units), Layer(rows, units, units), *heads]

    every = chain(batch, 27, units, units, 9) + critic(batch // members, baselines=True)
    before = critic(STEPS // members, baselines=True) + chain(STEPS, 27, units, units, 9)
    minibatches = STEPS // batch * EPOCHS
    return (
        partial(algorithm.update, batch_of(made, together=True), 1, 0),
        products(before, every, minibatches),
        minibatches,
    )


def batch_of(made: Segments, *, together: bool) -> Batch:
    """Returns segments as a batch."""
    buffer = SegmentBuffer(groups=together)
    buffer.add(made)
    return buffer.take()


def main() -> int:
    torch.set_num_threads(1)
    cases = {"poca": poca, "ppo": ppo}
    for name in sys.argv[1:] or cases:
        update, multiply, minibatches = cases[name]()
        pairs = [(timed(update), timed(multiply)) for _ in range(REPEATS + 1)][1:]
        ours, bare = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
        ratios = sorted(one / other for one, other in pairs)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            update()
        kernels = sum(one.name.startswith("aten::") and not one.cpu_children for one in profiled.events()) / minibatches
        print(
            f"{name}: update {ours:.1f} ms, products {bare:.1f} ms, ratio {statistics.median(ratios):.2f} "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f}), per minibatch {ours / minibatches * 1e3:.0f} us, "
            f"{kernels:.0f} kernels",
            flush=True,
        )
    return 0


def timed(work: Callable[[], object]) -> float:
    """Measures CPU seconds."""
    began = time.process_time()
    work()
    return time.process_time() - began


if __name__ == "__main__":
    sys.exit(main())
