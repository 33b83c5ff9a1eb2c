# ruff: noqa: N803, N806, N815 (names end in their shape)
"""PPO on one page, in float64 with torch's autograd: the reference that the product's updates are compared with.

Sources: Schulman et al. 2017, arXiv 1707.06347 ("PPO"); Schulman et al. 2016, arXiv 1506.02438 ("GAE"); Hilton et al.
2021, arXiv 2110.00641 ("decoupled"). A number in brackets is that of a deviation in `pipeline/learning/ppo.py`.

R rows of the update, B rows of a minibatch, F features, C continuous actions, D branches, K choices of all branches,
H = C + K means and logits, P = C + D parts of an action (1 for a joint ratio), S reward signals.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Categorical, Normal

from sparring.pipeline.learning.settings import TrainerSettings
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.specs import BehaviorSpec
from tests.learning.reference.networks import Weights, normalized, perceptron, remember, trainable, vectors
from tests.learning.reference.statistics import statistics


class Rows(NamedTuple):
    """Holds decisions; `at` selects some of them."""

    inputs_BF: Tensor
    continuous_BC: Tensor
    discrete_BD: Tensor
    masks_BK: Tensor
    old_log_prob_BP: Tensor
    advantage_B: Tensor
    returns_BS: Tensor
    old_values_BS: Tensor

    def at(self, which_B: Tensor) -> Rows:
        return Rows(*(column[which_B] for column in self))


class Part(NamedTuple):
    """Holds the part of a segment that an update trains on: rows, and what follows them."""

    rows: slice
    following: tuple[np.ndarray, ...]
    terminated: bool
    agent: int


class PPO:
    """Trains copies of a learner's weights; observations are vectors, and the networks have no memory."""

    def __init__(self, spec: BehaviorSpec, settings: TrainerSettings, weights: Mapping[str, np.ndarray]) -> None:
        self.spec, self.settings = spec, settings
        self.weights, self.adam = trainable(weights, settings)

    def update(
        self, record: Segments, generator: torch.Generator, version: int, trained: int, first: int = 0, last: int = -1
    ) -> dict[str, float]:
        """Trains on rows `first` to `last` of a record, in the order of the generator; returns the statistics."""
        hyper, (rate, epsilon, beta) = self.settings.hyperparameters, coefficients(self.settings, trained)
        last = len(record.rewards) if last < 0 else last
        this = slice(first, last)
        seen_RF = vectors(record.observations)[this]
        inputs_RF = normalized(self.weights, "actor.encoder", seen_RF)
        with torch.no_grad():
            _, values_RS = self.outputs(inputs_RF)
            advantages_RS = self.advantages(record, parts_of(record, first, last), values_RS)
        rows = Rows(
            inputs_RF,
            *actions_of(record, self.spec, this),
            torch.from_numpy(record.log_probs[this]).double(),
            standardized(advantages_RS.mean(1)),
            advantages_RS + values_RS,
            values_RS,
        )
        stale_R = torch.from_numpy(record.versions[this] < version)
        rows, weight_R = decoupled(self.weights, self.spec, self.settings, rows, stale_R)
        taken: list[dict[str, Any]] = []
        for _ in range(hyper.num_epoch):
            for at_B in minibatches(len(inputs_RF), hyper.batch_size, generator):
                some = rows.at(at_B)
                head_BH, values_BS = self.outputs(some.inputs_BF)
                loss, losses = policy_loss(self.weights, self.spec, head_BH, some, epsilon, beta)
                old_BS = some.old_values_BS if hyper.clip_value_loss else None
                losses["values"] = squared_errors(values_BS, some.returns_BS, old_BS, epsilon).mean()
                taken.append(step(self.adam, loss + 0.5 * losses["values"], losses, rate, hyper.max_grad_norm))
        remember(self.weights, "actor.encoder", seen_RF)
        estimates = {"Value": values_RS}
        return statistics(self.settings, (rate, epsilon, beta), taken, estimates, rows.returns_BS, values_RS, weight_R)

    def outputs(self, inputs_BF: Tensor) -> tuple[Tensor, Tensor]:
        """Returns means and logits [B, H], and values [B, S]; a shared critic's are the actor's last outputs."""
        outputs = perceptron(self.weights, "actor.body", inputs_BF)
        if not self.settings.hyperparameters.shared_critic:
            return outputs, perceptron(self.weights, "critic.body", inputs_BF)
        of_actor = self.spec.actions.continuous + self.spec.actions.mask_size
        return outputs[:, :of_actor], outputs[:, of_actor:]

    def advantages(self, record: Segments, parts: list[Part], values_RS: Tensor) -> Tensor:
        """Returns GAE (equation 16) of each signal and row: `A_t = delta_t + gamma lambda A_{t+1}`.

        `delta_t = r_t + gamma V_{t+1} - V_t`; a terminated segment has no next value, any other bootstraps. Curiosity
        ignores ends (7): there the next value is the mean value of episode starts, if all parts are of new episodes.
        """
        lambd, found_RS = self.settings.hyperparameters.lambd, torch.zeros_like(values_RS)
        origin = parts[0].rows.start
        starts = {part.agent: part.rows.start - origin for part in reversed(parts)}
        for head, (name, signal) in enumerate(self.settings.reward_signals.named().items()):
            at_start = 0.0 if name == "extrinsic" else values_RS[list(starts.values()), head].mean().item()
            for part in parts:
                inputs_1F = normalized(self.weights, "actor.encoder", vectors(part.following))
                after = at_start if part.terminated else self.outputs(inputs_1F)[1][0, head].item()
                advantage = 0.0
                for row in reversed(range(part.rows.start, part.rows.stop)):
                    earned = reward_of(record.rewards[row] + record.group_rewards[row], name, signal)
                    delta = earned + signal.gamma * after - values_RS[row - origin, head].item()
                    advantage = delta + signal.gamma * lambd * advantage
                    after = values_RS[row - origin, head].item()
                    found_RS[row - origin, head] = advantage
        return found_RS


# ---------------------------------------------------------------- data


def parts_of(record: Segments, first: int, last: int) -> list[Part]:
    """Divides rows `first` to `last` into segments; one that goes on after them bootstraps like an open one."""
    parts, begin = [], 0
    for segment, length in enumerate(record.lengths.tolist()):
        end, inside = begin + length, slice(max(begin, first), min(begin + length, last))
        if inside.start < inside.stop:
            flushed = end > last
            following = [column[[last]] for column in record.observations] if flushed else None
            following = following or [column[[segment]] for column in record.next_observations]
            terminated = bool(record.terminated[segment]) and not flushed
            parts.append(Part(inside, tuple(following), terminated, int(record.agents[segment])))
        begin = end
    return parts


def reward_of(extrinsic: float, name: str, signal: Any) -> float:
    """Returns a signal's reward: the simulator's times its strength; curiosity's is 0 until its first update."""
    return signal.strength * float(extrinsic) if name == "extrinsic" else 0.0


def actions_of(record: Segments, spec: BehaviorSpec, this: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Returns raw samples, choices, and masks (True = forbidden; none is forbidden without masks) of some rows."""
    free = np.zeros((len(record.rewards), spec.actions.mask_size), np.bool_)
    masks = torch.from_numpy(free if record.masks is None else record.masks)[this]
    return torch.from_numpy(record.continuous)[this].double(), torch.from_numpy(record.discrete)[this].long(), masks


def minibatches(rows: int, size: int, generator: torch.Generator) -> list[Tensor]:
    """Returns the shuffled row numbers of each minibatch; an incomplete one is left out (5)."""
    size = min(size, rows)
    return [at_B for at_B in torch.randperm(rows, generator=generator).split(size) if len(at_B) == size]


# ---------------------------------------------------------------- losses


def coefficients(settings: TrainerSettings, trained: int) -> tuple[float, float, float]:
    """Returns learning rate, clip range and entropy weight (4): a line to 1e-10, 0.1 and 1e-5 at `max_steps`."""
    hyper, left = settings.hyperparameters, max(0.0, 1 - trained / settings.max_steps)

    def at(schedule: str, start: float, end: float) -> float:
        return start if schedule == "constant" else min(start, end + (start - end) * left)

    return (
        at(hyper.learning_rate_schedule, hyper.learning_rate, 1e-10),
        at(hyper.epsilon_schedule, hyper.epsilon, 0.1),
        at(hyper.beta_schedule, hyper.beta, 1e-5),
    )


def standardized(advantage_R: Tensor) -> Tensor:
    """Subtracts the mean of the whole update and divides by its standard deviation (3)."""
    return (advantage_R - advantage_R.mean()) / (advantage_R.std(correction=0) + 1e-10)


def evaluate(weights: Weights, spec: BehaviorSpec, head_BH: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities [B, C + D] of each part of the actions, and entropies [B] as they are published."""
    actions = spec.actions
    means_BC, logits_BK = head_BH.split([actions.continuous, actions.mask_size], 1)
    normal = Normal(means_BC, weights["actor.log_sigma"].exp())
    log_probs, entropy_B = [normal.log_prob(rows.continuous_BC)], torch.zeros(len(head_BH)).double()
    if actions.continuous:
        entropy_B = entropy_B + normal.entropy().mean(1)
    branches = logits_BK.masked_fill(rows.masks_BK, -1e8).split(list(actions.discrete), 1) if actions.discrete else ()
    for branch, logits_Bk in enumerate(branches):
        categorical = Categorical(logits=logits_Bk)
        log_probs.append(categorical.log_prob(rows.discrete_BD[:, branch])[:, None])
        entropy_B = entropy_B + categorical.entropy()
    return torch.cat(log_probs, 1), entropy_B


@torch.no_grad()
def decoupled(
    weights: Weights, spec: BehaviorSpec, settings: TrainerSettings, rows: Rows, stale_R: Tensor
) -> tuple[Rows, Tensor]:
    """Centers the clip on the proximal policy and weights stale advantages (9; decoupled, section 3).

    The proximal policy is that at the start of the update; for rows of the current version it is the one that acted.
    The weight of a stale row is `min(pi_proximal / pi_behavior, 2)`, of joint actions.
    """
    hyper = settings.hyperparameters
    stale_R = stale_R & hyper.decoupled_objective
    proximal_RP, _ = evaluate(weights, spec, policy_head(weights, spec, rows.inputs_BF), rows)
    joint_R, stored_R = proximal_RP.sum(1), rows.old_log_prob_BP
    weight_R = torch.where(stale_R, (joint_R - stored_R).exp().clamp(max=2), 1.0)
    if hyper.ratio == "joint" or proximal_RP.shape[1] == 1:
        proximal_RP = torch.where(stale_R, joint_R, stored_R)[:, None]
    return rows._replace(old_log_prob_BP=proximal_RP, advantage_B=rows.advantage_B * weight_R), weight_R


def policy_head(weights: Weights, spec: BehaviorSpec, inputs_BF: Tensor) -> Tensor:
    """Returns the actor's means and logits, without the values of a shared critic."""
    return perceptron(weights, "actor.body", inputs_BF)[:, : spec.actions.continuous + spec.actions.mask_size]


def policy_loss(
    weights: Weights, spec: BehaviorSpec, head_BH: Tensor, rows: Rows, epsilon: float, beta: float
) -> tuple[Tensor, dict[str, Any]]:
    """Returns minus the clipped surrogate (PPO, equation 7) minus the entropy bonus, and what is reported of them."""
    log_prob_BP, entropy_B = evaluate(weights, spec, head_BH, rows)
    bonus = beta * entropy_B.mean()
    if rows.old_log_prob_BP.shape[1] < log_prob_BP.shape[1]:  # the ratio of the joint action (1)
        bonus = bonus * log_prob_BP.shape[1]
        log_prob_BP = log_prob_BP.sum(1, keepdim=True)
    log_ratio_BP, advantage_B1 = log_prob_BP - rows.old_log_prob_BP, rows.advantage_B[:, None]
    ratio_BP = log_ratio_BP.exp()
    clipped_BP = ratio_BP.clamp(1 - epsilon, 1 + epsilon)
    objective = torch.minimum(ratio_BP * advantage_B1, clipped_BP * advantage_B1).mean()
    return -objective - bonus, {"objective": objective, "entropy": entropy_B.mean(), "log_ratio": log_ratio_BP}


def squared_errors(found: Tensor, returns: Tensor, old: Tensor | None, epsilon: float) -> Tensor:
    """Returns squared errors; with old values the larger one of the value and of the value clipped to them (2)."""
    plain = (found - returns) ** 2
    if old is None:
        return plain
    return torch.maximum(plain, (old + (found - old).clamp(-epsilon, epsilon) - returns) ** 2)


def step(
    adam: torch.optim.Adam, loss: Tensor, losses: dict[str, Any], rate: float, max_norm: float | None
) -> dict[str, Any]:
    """Takes a step of Adam (6) and returns the losses and the gradient's norm before it was clipped."""
    adam.param_groups[0]["lr"] = rate
    adam.zero_grad()
    loss.backward()
    parameters = adam.param_groups[0]["params"]
    for parameter in parameters:  # a network that saw no row of a minibatch has a gradient of 0, not none
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm or torch.inf).item()
    adam.step()
    return {name: one.detach() for name, one in losses.items()} | {"norm": norm}
