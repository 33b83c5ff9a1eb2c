# ruff: noqa: N803, N806, N815 (names end in their shape)
"""MA-POCA on one page, in float64 with torch's autograd, one group timestep and one member at a time.

Sources: Cohen et al. 2021, arXiv 2111.05992 ("paper"); Vaswani et al. 2017, arXiv 1706.03762 ("attention"). A number in
brackets is that of a rule in `pipeline/learning/poca.py`. What it shares with PPO is that of the reference `ppo`.

R decisions of the update, B of a minibatch, K group timesteps, N members present at one, U units, H heads, u units of a
head, S reward signals.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sparring.pipeline.learning.settings import TrainerSettings
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.specs import BehaviorSpec
from tests.learning.reference import ppo
from tests.learning.reference.networks import linear, normalized, perceptron, remember, trainable, vectors
from tests.learning.reference.ppo import Rows
from tests.learning.reference.statistics import statistics

HEADS = 4


class Decision(NamedTuple):
    """Holds what a member observes and does from a group time on.

    `row` is that of our own decisions in the record; what follows a segment and teammates' decisions have none.
    """

    time: int
    behavior: int
    inputs_F: Tensor
    done_P: Tensor
    row: int | None


class Member(NamedTuple):
    """Holds the decisions of a member, and the group time from which on it is absent."""

    decisions: list[Decision]
    until: int


class Group(NamedTuple):
    """Holds a group segment: its members, and what they earned together between each group time and the next (2)."""

    number: int
    members: list[Member]
    rewards: list[float]

    def present(self, time: int) -> list[Decision]:
        """Returns the latest decisions of the members present; a member that ended is not one of them (6)."""
        begun = [[one for one in member.decisions if one.time <= time < member.until] for member in self.members]
        return [decisions[-1] for decisions in begun if decisions]


class Timestep(NamedTuple):
    """Holds a group timestep: the members present, and the rows of our own decisions made then."""

    present: list[Decision]
    rows: list[int]


class POCA:
    """Trains copies of a learner's weights; observations are vectors, and the networks have no memory.

    Args:
        specs: specs of all behavior names that the learner knows, our own first.
        settings: the learner's settings.
        weights: the learner's weights.
    """

    def __init__(
        self, specs: Mapping[str, BehaviorSpec], settings: TrainerSettings, weights: Mapping[str, np.ndarray]
    ) -> None:
        self.specs, self.settings = specs, settings
        self.spec = next(iter(specs.values()))
        self.weights, self.adam = trainable(weights, settings)

    def update(self, record: Segments, generator: torch.Generator, version: int, trained: int) -> dict[str, float]:
        """Trains on a whole record, in the order of the generator; returns the statistics."""
        hyper, (rate, epsilon, beta) = self.settings.hyperparameters, ppo.coefficients(self.settings, trained)
        groups = self.groups(record)
        steps_K = [timestep(group, time) for group in groups for time in range(len(group.rewards))]
        self.raise_largest(groups)  # (11)
        with torch.no_grad():
            values_KS, baselines_RS = self.evaluate(steps_K)
            returns_KS = self.returns(groups, values_KS)
        timesteps = {row: k for k, one in enumerate(steps_K) for row in one.rows}
        returns_RS = returns_KS[[timesteps[row] for row in range(len(timesteps))]]
        rows = Rows(
            normalized(self.weights, "actor.encoder", vectors(record.observations)),
            *ppo.actions_of(record, self.spec, slice(None)),
            torch.from_numpy(record.log_probs).double(),
            ppo.standardized((returns_RS - baselines_RS).mean(1)),  # (4, 8)
            returns_RS,
            baselines_RS,
        )
        stale_R = torch.from_numpy(record.versions < version)
        rows, weight_R = ppo.decoupled(self.weights, self.spec, self.settings, rows, stale_R)  # (13)
        taken: list[dict[str, Any]] = []
        for _ in range(hyper.num_epoch):
            of_actor = ppo.minibatches(len(record.rewards), hyper.batch_size, generator)  # (9)
            of_critic = shuffled([max(len(one.rows), bool(one.present)) for one in steps_K], len(of_actor), generator)
            for number, at_B in enumerate(of_actor):
                some, at_K = rows.at(at_B), of_critic[number % len(of_critic)]
                head_BH = perceptron(self.weights, "actor.body", some.inputs_BF)
                loss, losses = ppo.policy_loss(self.weights, self.spec, head_BH, some, epsilon, beta)
                losses |= self.critic_losses(steps_K, at_K, rows, returns_KS, values_KS, epsilon)
                loss = loss + 0.5 * (losses["values"] + 0.5 * losses["baselines"])  # (7)
                taken.append(ppo.step(self.adam, loss, losses, rate, hyper.max_grad_norm))
        self.remember(record)
        estimates = {"Value": values_KS, "Baseline": baselines_RS}
        return statistics(self.settings, (rate, epsilon, beta), taken, estimates, returns_KS, values_KS, weight_R)

    def returns(self, groups: list[Group], values_KS: Tensor) -> Tensor:
        """Returns lambda returns in group time (3): `R_t = r_t + gamma (lambda R_{t+1} + (1 - lambda) V_{t+1})`.

        They go on after a member's end, which is posthumous credit. After the segment `R = V`, of the members that
        remain; where none remains it is 0, but for curiosity, which ignores ends, the mean value of group starts.
        """
        lambd, found_KS = self.settings.hyperparameters.lambd, torch.zeros_like(values_KS)
        ends = np.cumsum([len(group.rewards) for group in groups]).tolist()
        starts = {group.number: end - len(group.rewards) for group, end in reversed([*zip(groups, ends, strict=True)])}
        for head, (name, signal) in enumerate(self.settings.reward_signals.named().items()):
            at_start = 0.0 if name == "extrinsic" else values_KS[list(starts.values()), head].mean().item()
            for group, end in zip(groups, ends, strict=True):
                remaining = group.present(len(group.rewards))
                value = self.value(remaining)[head].item() if remaining else at_start
                later = value
                for back, extrinsic in enumerate(reversed(group.rewards), start=1):
                    reward = ppo.reward_of(extrinsic, name, signal)
                    later = reward + signal.gamma * (lambd * later + (1 - lambd) * value)
                    value = values_KS[end - back, head].item()
                    found_KS[end - back, head] = later
        return found_KS

    def critic_losses(
        self,
        steps_K: list[Timestep],
        at_K: list[int],
        rows: Rows,
        returns_KS: Tensor,
        values_KS: Tensor,
        epsilon: float,
    ) -> dict[str, Tensor]:
        """Returns the mean squared errors of the values at some timesteps, and of the baselines of their decisions."""
        clip = self.settings.hyperparameters.clip_value_loss
        values = torch.stack([self.value(steps_K[k].present) for k in at_K])
        errors = ppo.squared_errors(values, returns_KS[at_K], values_KS[at_K] if clip else None, epsilon)
        decided = [(k, row) for k in at_K for row in steps_K[k].rows]
        if not decided:
            return {"values": errors.mean(), "baselines": torch.zeros(())}
        at_B = [row for _, row in decided]
        baselines = torch.stack([self.baseline(steps_K[k].present, row) for k, row in decided])
        old = rows.old_values_BS[at_B] if clip else None
        of_baselines = ppo.squared_errors(baselines, rows.returns_BS[at_B], old, epsilon)
        return {"values": errors.mean(), "baselines": of_baselines.mean()}

    # ------------------------------------------------------------ the group's critic

    def evaluate(self, steps_K: list[Timestep]) -> tuple[Tensor, Tensor]:
        """Returns values [K, S], 0 where no member is present, and the baselines [R, S] of all decisions."""
        signals = len(self.settings.reward_signals.named())
        values = [self.value(one.present) if one.present else torch.zeros(signals).double() for one in steps_K]
        baselines = {row: self.baseline(one.present, row) for one in steps_K for row in one.rows}
        return torch.stack(values), torch.stack([baselines[row] for row in range(len(baselines))])

    def value(self, present: list[Decision]) -> Tensor:
        """Returns the value [S] of a group: all members are seen without their actions (paper, section 4.1)."""
        return self.head("critic.value", [self.embed(one, acted=False) for one in present])

    def baseline(self, present: list[Decision], row: int) -> Tensor:
        """Returns the baseline [S] of one decision: its own action is not seen, those of others are (4)."""
        return self.head("critic.baseline", [self.embed(one, acted=one.row != row) for one in present])

    def embed(self, one: Decision, *, acted: bool) -> Tensor:
        """Returns [U] the embedding of a member's observation, or of its observation and action."""
        sums_U = linear(self.weights, f"critic.observed.{one.behavior}", one.inputs_F)
        if acted:
            sums_U = sums_U + linear(self.weights, f"critic.acted.{one.behavior}", one.done_P)
        return functional.silu(sums_U)

    def head(self, name: str, members: list[Tensor]) -> Tensor:
        """Returns [S]: residual self-attention, the mean over members, a layer, and their number in [-1, 1] (11)."""
        inputs_NU = self.layer_norm("before", torch.stack(members))
        n, units = inputs_NU.shape
        of_heads = linear(self.weights, "critic.attention.project", inputs_NU).view(n, 3, HEADS, units // HEADS)
        query_HNu, key_HNu, value_HNu = of_heads.permute(1, 2, 0, 3)
        weight_HNN = (query_HNu @ key_HNu.mT / (units // HEADS) ** 0.5).softmax(2)  # attention, equation 1
        attended_NU = (weight_HNN @ value_HNu).transpose(0, 1).flatten(1)
        merged_NU = linear(self.weights, "critic.attention.merge", attended_NU)
        mean_U = self.layer_norm("after", inputs_NU + merged_NU).mean(0)
        hidden_U = functional.silu(perceptron(self.weights, "critic.trunk", mean_U))
        count = 2 * n / self.weights["critic.largest"] - 1
        return linear(self.weights, name, torch.cat([hidden_U, count[None]]))

    def layer_norm(self, name: str, inputs_NU: Tensor) -> Tensor:
        weight_U, bias_U = (self.weights[f"critic.attention.{name}.{part}"] for part in ("weight", "bias"))
        return functional.layer_norm(inputs_NU, weight_U.shape, weight_U, bias_U)

    def raise_largest(self, groups: list[Group]) -> None:
        """Raises the number of members that counts as 1 to that of the largest group."""
        most = max(len(group.present(time)) for group in groups for time in range(len(group.rewards) + 1))
        self.weights["critic.largest"].clamp_(min=most)

    # ------------------------------------------------------------ data

    def groups(self, record: Segments) -> list[Group]:
        """Returns the group segments of a record as objects."""
        shared, names = record.shared, list(self.specs)
        assert shared is not None
        members = [self.members(0, record, shared)]
        members += [self.members(names.index(one.behavior), one, one) for one in shared.teammates]
        rewards = np.split(shared.rewards, np.cumsum(shared.spans)[:-1])
        return [
            Group(int(number), [one for of_name in members for one in of_name[at]], rewards[at].tolist())
            for at, number in enumerate(shared.numbers)
        ]

    def members(self, behavior: int, columns: Any, timing: Any) -> list[list[Member]]:
        """Returns the members of one behavior name in each group segment."""
        encoder, spec = self.encoder(behavior), list(self.specs.values())[behavior]
        inputs_rF = normalized(self.weights, encoder, vectors(columns.observations))
        inputs_sF = normalized(self.weights, encoder, vectors(columns.next_observations))
        done_rP = self.features(spec, columns.continuous, columns.discrete)
        done_sP = self.features(spec, timing.next_continuous, timing.next_discrete)
        members, row = [], 0
        for segment, length in enumerate(columns.lengths.tolist()):
            decisions = [
                Decision(int(timing.times[at]), behavior, inputs_rF[at], done_rP[at], None if behavior else at)
                for at in range(row, row + length)
            ]
            following = int(timing.next_times[segment])
            decisions.append(Decision(following, behavior, inputs_sF[segment], done_sP[segment], None))
            members.append(Member(decisions, int(timing.until[segment])))
            row += length
        ends = np.cumsum(timing.members).tolist()
        return [members[end - count : end] for end, count in zip(ends, timing.members.tolist(), strict=True)]

    def features(self, spec: BehaviorSpec, continuous: np.ndarray, discrete: np.ndarray) -> Tensor:
        """Returns actions [r, P] as the critic reads them: scaled as simulators get them, a 1 for each choice."""
        limit, choices = self.settings.network_settings.action_limit, torch.from_numpy(discrete).long()
        columns = [torch.from_numpy(continuous).double().clamp(-limit, limit) / limit]
        columns += [functional.one_hot(choices[:, at], size).double() for at, size in enumerate(spec.actions.discrete)]
        return torch.cat(columns, 1)

    def encoder(self, behavior: int) -> str:
        """Returns the encoder that holds a behavior's running statistics: ours is the actor's."""
        return f"critic.encoders.{behavior}" if behavior else "actor.encoder"

    def remember(self, record: Segments) -> None:
        """Adds the observations of all decisions to the running statistics of their behavior names."""
        assert record.shared is not None
        for one in (record, *record.shared.teammates):
            behavior = list(self.specs).index(one.behavior)
            remember(self.weights, self.encoder(behavior), vectors(one.observations))


def timestep(group: Group, time: int) -> Timestep:
    """Returns a group timestep; a decision that is still under way from an earlier time is not made at it."""
    present = group.present(time)
    return Timestep(present, [one.row for one in present if one.row is not None and one.time == time])


def shuffled(weights: list[int], parts: int, generator: torch.Generator) -> list[list[int]]:
    """Divides the timesteps, in a random order, into parts of about equal weight; those of weight 0 are left out."""
    kept, found, before = [k for k, weight in enumerate(weights) if weight], [[] for _ in range(parts)], 0
    for at in torch.randperm(len(kept), generator=generator).tolist():
        found[before * parts // sum(weights)].append(kept[at])
        before += weights[kept[at]]
    return [part for part in found if part]
