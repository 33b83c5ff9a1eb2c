"""The cost of a group: one copy of its data, compared with a copy of the teammates' data for every member.

    python scripts/bench/groups.py [2 8 32]

The groups have 2, 8 and 32 members, all of whom decide at every group timestep. `bytes` counts encoded segments for
each agent-step, as assembly sends them; `copying` adds the teammates' observations and actions to each member's rows.
`update` is the CPU time of a whole update for each agent-step: values, baselines, returns, minibatches, optimizer.
`copying` runs the same critic with the same weights and as large minibatches, but embeds and projects every teammate
once for each member, and evaluates each member's timestep by itself. Both are timed in turn; the median counts.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from sparring.pipeline.assembly.assembler import Assembler
from sparring.pipeline.assembly.members import Sizes
from sparring.pipeline.learning import losses
from sparring.pipeline.learning.algorithm import Parts
from sparring.pipeline.learning.buffer import Batch, SegmentBuffer
from sparring.pipeline.learning.minibatches import Minibatch
from sparring.pipeline.learning.optimizer import Adam
from sparring.pipeline.learning.poca import BASELINE_WEIGHT, POCA
from sparring.pipeline.learning.ppo import VALUE_WEIGHT, hyperparameters_of
from sparring.pipeline.learning.settings import Coefficients, Hyperparameters, TrainerSettings
from sparring.pipeline.messages.codec import encode
from sparring.pipeline.messages.segments import Segments, TeammateSegments
from sparring.pipeline.messages.steps import ActionsChosen, AgentsStarted, BehaviorSteps, OutcomesReported
from sparring.pipeline.networks.arrays import previous_features
from sparring.pipeline.networks.group_critic import GroupCritic
from sparring.pipeline.networks.layers import attend
from sparring.pipeline.networks.perceptron import backpropagate
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec

SPEC = BehaviorSpec(observations=(ObservationSpec(name="state", shape=(32,)),), actions=ActionSpec(continuous=2))
STEPS = 4096
BATCH = 512
HORIZON = 32
REPEATS = 5
SETTINGS = TrainerSettings(
    trainer_type="poca",
    hyperparameters=Hyperparameters(batch_size=BATCH, buffer_size=STEPS, num_epoch=3),
    network_settings=NetworkSettings(hidden_units=128, num_layers=2),
    max_steps=10**9,
)


def assembled(members: int, steps: int = STEPS, spec: BehaviorSpec = SPEC) -> list[Segments]:
    """Assembles segments of random agent-steps."""
    random, agents, actions = np.random.default_rng(0), steps // HORIZON, spec.actions
    slots, ticks = np.arange(agents, dtype=np.int32), HORIZON + 1
    groups = 1 + np.repeat(np.arange(agents // members), members)
    rows = np.zeros((ticks, 5), np.int32)
    rows[:, 3:] = agents
    rows[0, 2] = agents
    part = BehaviorSteps(
        behavior="B",
        produced_before=0,
        ticks=np.arange(1, ticks + 1),
        completed=np.array([0] + [agents] * HORIZON),
        rows=rows,
        joined=AgentsStarted(
            slots=slots,
            agents=1 + np.arange(agents),
            groups=groups,
            teams=np.zeros(agents, np.int32),
            simulators=np.zeros(agents, np.int32),
            fresh=np.ones(agents, bool),
        ),
        reported=OutcomesReported(
            slots=np.tile(slots, ticks),
            observations=(random.standard_normal((agents * ticks, *spec.observations[0].shape), np.float32),),
            rewards=np.zeros(agents * ticks, np.float32),
            group_rewards=np.repeat(random.random(ticks * (agents // members), np.float32), members),
        ),
        acted=ActionsChosen(
            slots=None,
            log_probs=np.full(agents * ticks, -2.8, np.float32),
            versions=np.ones(agents * ticks, np.int64),
            continuous=random.standard_normal((agents * ticks, actions.continuous), np.float32),
            discrete=random.integers(0, actions.discrete, (agents * ticks, len(actions.discrete)), np.int32),
        ),
    )
    assembler = Assembler(
        "s", "o", lambda _: Sizes(horizon=HORIZON, message_steps=1, largest=2 * steps), in_groups=lambda _: True
    )
    assembler.apply([part])
    return list(assembler.ready_messages())


def copied(segments: Segments, members: int) -> TeammateSegments:
    """Returns the copies of teammates' data that every member's rows would hold."""

    def of_teammates(column: Any) -> Any:
        return np.repeat(column, members - 1, axis=0)

    shared = segments.shared
    assert shared is not None
    nothing = np.empty(0, np.int32)
    return TeammateSegments(
        behavior="",
        members=nothing,
        lengths=nothing,
        times=nothing,
        next_times=nothing,
        until=nothing,
        observations=tuple(map(of_teammates, segments.observations)),
        next_observations=tuple(map(of_teammates, segments.next_observations)),
        continuous=of_teammates(segments.continuous),
        discrete=of_teammates(segments.discrete),
        next_continuous=of_teammates(shared.next_continuous)[:0],
        next_discrete=of_teammates(shared.next_discrete)[:0],
    )


def size(record: Any) -> int:
    """Returns the bytes of an encoded record."""
    return sum(memoryview(frame).nbytes for frame in encode(record))


class Copying:
    """An update in which every member's row holds copies of its teammates' rows; all members act at each timestep."""

    def __init__(self, poca: POCA, members: int) -> None:
        self.poca, self.members = poca, members
        self.actor, self.critic = poca.actor, poca.networks.critic
        self.optimizer = Adam(poca.networks.modules, SETTINGS.hyperparameters.learning_rate)

    def prepare(self, batch: Batch) -> None:
        """Makes the copies, which would come over the wire."""
        m, groups = self.members, len(batch.sizes)
        observed = batch.observations[0].reshape(groups, m, HORIZON, -1)
        followed = batch.next_observations[0].reshape(groups, m, 1, -1)
        seen = np.concatenate([observed, followed], 2)  # [groups, members, times + 1, features]
        done = previous_features(SPEC.actions, batch.continuous, batch.discrete)
        done = done.reshape(groups, m, HORIZON, -1)
        others = np.array([[one for one in range(m) if one != member] for member in range(m)], np.int64)
        self.own = torch.from_numpy(observed.reshape(STEPS, -1))
        self.teammates = torch.from_numpy(observed[:, others].swapaxes(2, 3).reshape(STEPS, m - 1, -1))
        self.teammates_done = torch.from_numpy(done[:, others].swapaxes(2, 3).reshape(STEPS, m - 1, -1))
        last = seen[:, :, -1]
        self.next_own = torch.from_numpy(last.reshape(groups * m, -1))
        self.next_teammates = torch.from_numpy(last[:, others].reshape(groups * m, m - 1, -1))

    def update(self, batch: Batch) -> None:
        """Runs an update: values and baselines of every row, returns of every member, minibatches of single rows."""
        hyper = hyperparameters_of(SETTINGS)
        coefficients = Coefficients.at(hyper, 0)
        with torch.no_grad():
            parts = [self.estimate(self.own[p], self.teammates[p], self.teammates_done[p]) for p in chunks_of(STEPS)]
            values, baselines = (torch.cat(column).numpy() for column in zip(*parts, strict=True))
            following = [self.value(self.next_own[p], self.next_teammates[p]) for p in chunks_of(len(self.next_own))]
        lengths = np.full(STEPS // HORIZON, HORIZON)
        rewards = batch.group_rewards
        ends = torch.cat(following).numpy()[:, 0]
        target = losses.advantages(rewards, values[:, 0], ends, lengths, 0.99, hyper.lambd) + values[:, 0]
        advantage = torch.from_numpy(losses.normalized(target - baselines[:, 0]))
        rows = Minibatch(
            inputs=(self.own,),
            continuous=torch.from_numpy(batch.continuous),
            discrete=torch.from_numpy(batch.discrete).long(),
            masks=None,
            log_prob=torch.from_numpy(batch.log_probs),
            advantage=advantage,
            limit=losses.clip_limit(advantage, coefficients.epsilon),
            returns=torch.from_numpy(target[:, None]),
            values=torch.from_numpy(baselines),
        )
        for _ in range(hyper.num_epoch):
            for which in torch.split(torch.randperm(STEPS), BATCH):
                self.step(rows, which, coefficients.beta)

    def step(self, rows: Minibatch, which: Tensor, beta: float) -> None:
        others: Any = (None if column is None else column[which] for column in rows[1:])
        some = Minibatch((rows.inputs[0][which],), *others)
        head = self.actor(some.inputs)
        values, baselines = self.estimate(some.inputs[0], self.teammates[which], self.teammates_done[which])
        with torch.no_grad():
            _, to_head, to_log_sigma = losses.policy_loss(self.actor, head, some, beta)
            _, to_values = losses.value_loss(values, some.returns, VALUE_WEIGHT)
            _, to_baselines = losses.value_loss(baselines, some.returns, BASELINE_WEIGHT)
            outputs = head, self.actor.log_sigma, values, baselines
            self.optimizer.step(partial(backpropagate, outputs, to_head, to_log_sigma, to_values, to_baselines))

    def estimate(self, own: Tensor, teammates: Tensor, done: Tensor) -> tuple[Tensor, Tensor]:
        """Estimates value and baseline of each row from its own copies."""
        critic = self.critic
        seen = critic.observed[0](torch.cat([own.unsqueeze(1), teammates], 1))
        acted = silu(seen[:, 1:] + critic.acted[0](done))
        seen = silu(seen)
        value, baseline = attended(critic, seen), attended(critic, torch.cat([seen[:, :1], acted], 1))
        hidden = silu(critic.trunk(torch.cat([value, baseline])))
        counts = torch.full((2 * len(own), 1), 2 * self.members / critic.largest.item() - 1)
        encoding = torch.cat([hidden, counts], 1)
        return critic.value(encoding[: len(own)]), critic.baseline(encoding[len(own) :])

    def value(self, own: Tensor, teammates: Tensor) -> Tensor:
        """Estimates the value of each row."""
        return self.estimate(own, teammates, torch.zeros(*teammates.shape[:2], SPEC.actions.continuous))[0]


def attended(critic: GroupCritic, embedded: Tensor) -> Tensor:
    """Returns the mean of the attention's output over members."""
    attention = critic.attention
    inputs = attention.before(embedded)
    mixed: Tensor = attention.after(inputs + attention.merge(attend(attention.project(inputs), None))).mean(1)
    return mixed


def chunks_of(rows: int) -> list[slice]:
    return [slice(start, start + 256) for start in range(0, rows, 256)]


def timed(work: Callable[[], Any]) -> float:
    """Measures CPU seconds."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def check_equal(poca: POCA, copying: Copying, batch: Batch) -> None:
    """Checks that both ways give the same estimates, else the comparison is void."""
    poca.networks.critic.largest.clamp_(min=copying.members)
    prepared = poca.networks.prepare(batch)
    found = poca.networks.estimate(prepared, batch)
    with torch.no_grad():
        values, baselines = copying.estimate(copying.own[:256], copying.teammates[:256], copying.teammates_done[:256])
    np.testing.assert_allclose(found.values[prepared.index.timesteps[:256]], values.numpy(), atol=1e-4)
    np.testing.assert_allclose(found.baselines[:256], baselines.numpy(), atol=1e-4)


def main() -> int:
    torch.set_num_threads(1)
    sizes = [int(text) for text in sys.argv[1:]] or [2, 8, 32]
    print("members   bytes/step  copying  | update us/step  copying  ratio   us/step and member")
    for members in sizes:
        (segments,) = assembled(members)
        steps = len(segments.log_probs)
        own, copies = size(segments) / steps, (size(segments) + size(copied(segments, members))) / steps
        buffer = SegmentBuffer(groups=True)
        buffer.add(segments)
        batch = buffer.take()
        poca, twin = (
            Parts(behavior="B", spec=SPEC, settings=SETTINGS, generator=torch.Generator().manual_seed(1)).build()
            for _ in range(2)
        )
        assert isinstance(poca, POCA)
        assert isinstance(twin, POCA)
        copying = Copying(twin, members)
        copying.critic.largest.clamp_(min=members)
        copying.prepare(batch)
        check_equal(poca, copying, batch)
        pairs = [
            (timed(lambda: poca.update(batch, 1, 0)), timed(lambda: copying.update(batch)))  # noqa: B023 (called here)
            for _ in range(REPEATS)
        ]
        ours = statistics.median(one for one, _ in pairs) / steps * 1e6
        ratio = statistics.median(other / one for one, other in pairs)
        bytes_column, time_column = f"{own:12.0f} {copies:8.0f}", f"{ours:14.1f} {ours * ratio:8.1f} {ratio:6.2f}"
        print(f"{members:7} {bytes_column}  | {time_column} {ours / members:10.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
