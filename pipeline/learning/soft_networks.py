# ruff: noqa: N803, N806 (names end in their shape)
"""This module holds the networks of SAC, and what they estimate of a policy's decisions.

B rows, C continuous actions, D branches, K choices of all branches, X values of an action for a signal: K, or 1 without
branches; E kinds of action with an entropy coefficient, S reward signals, M values of a recurrent memory.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from sparring.pipeline.learning.actor_critic import ActorCritic
from sparring.pipeline.learning.algorithm import Parts
from sparring.pipeline.networks.actor import Actor, Critic
from sparring.pipeline.networks.device import over
from sparring.pipeline.networks.encoders import Inputs
from sparring.pipeline.networks.layers import Layout
from sparring.pipeline.networks.squashed import SquashedActor, squash
from sparring.pipeline.specs import BehaviorSpec, ObservationSpec

_ACTION: Final = "the action that is evaluated"


class View(NamedTuple):
    """Holds rows that networks evaluate together.

    Attributes:
        inputs: prepared observations [B, ...].
        masks: [B, K] True = forbidden; None without branches.
        layout: how the rows form sequences; None for networks without memory.
        memory: [q, M] the actor's memory before each sequence.
    """

    inputs: Inputs
    masks: Tensor | None
    layout: Layout | None = None
    memory: Tensor | None = None


class Decisions(NamedTuple):
    """Holds what a policy would do in some rows.

    Attributes:
        continuous: [B, C] sampled.
        weights: [B, X] probability of each choice; ones without branches.
        entropies: [B, E] of the sample for the continuous actions together, of the distribution for each branch.
    """

    continuous: Tensor
    weights: Tensor
    entropies: Tensor


class SoftNetworks(ActorCritic):
    """Combines an actor, two critics, their targets, and entropy coefficients.

    A critic reads the continuous actions as one more observation.

    Args:
        parts: what the algorithm is built from.
        initial: entropy coefficient at the start.

    Attributes:
        trained: all networks that the optimizer changes.
        log_alpha: [E] logarithms of the entropy coefficients: of the continuous actions, then of each branch.
        absorbing: [S] value of the state after the end of an episode.
    """

    def __init__(self, parts: Parts, initial: float) -> None:
        spec, settings, generator = parts.spec, parts.settings, parts.generator
        network, actions, seen = settings.network_settings, spec.actions, spec.observations
        if actions.continuous:
            seen = (*seen, ObservationSpec(name=_ACTION, shape=(actions.continuous,)))
        evaluated = BehaviorSpec(observations=seen, actions=actions)
        actor: Actor = settings.hyperparameters.actor(spec, network, generator)
        values = len(settings.reward_signals.named()) * max(1, actions.mask_size)
        self.critics = [Critic(evaluated, network, values, generator) for _ in range(2)]
        self.targets = [Critic(evaluated, network, values, torch.Generator()) for _ in range(2)]
        super().__init__(actor, nn.ModuleList(self.critics), settings)
        kinds = (actions.continuous > 0) + len(actions.discrete)
        self.log_alpha = nn.Parameter(torch.full((kinds,), initial).log())
        self.modules["entropy"] = nn.ParameterList([self.log_alpha])
        self.trained = nn.ModuleDict(dict(self.modules.items()))
        self.absorbing = nn.Parameter(torch.zeros(self.signals), requires_grad=False)
        self.modules["absorbing"] = nn.ParameterList([self.absorbing])
        self.modules["target"] = nn.ModuleList(self.targets).requires_grad_(False)
        self.modules["target"].load_state_dict(self.modules["critic"].state_dict())
        self._followed = [tuple(self.modules[name].parameters()) for name in ("target", "critic")]

    def evaluate(self, critic: Critic, view: View, continuous_BC: Tensor) -> Tensor:
        """Returns values [B, S, X] of continuous actions together with every choice."""
        joined, *others = view.inputs
        memory = None if view.memory is None else torch.zeros_like(view.memory)
        values: Tensor = critic((torch.cat((joined, continuous_BC), 1), *others), view.layout, memory)
        return values.view(len(values), self.signals, -1)

    def follow(self, tau: float, absorbing_S: Tensor) -> None:
        """Moves the targets a share of the way to the critics, and the values of absorbing states to new estimates."""
        targets, critics = self._followed
        with torch.no_grad():
            torch._foreach_lerp_(targets, critics, tau)
            self.absorbing.lerp_(absorbing_S, tau)

    def decide(self, view: View, generator: torch.Generator) -> Decisions:
        """Returns what the present policy would do."""
        actor = self.actor
        assert isinstance(actor, SquashedActor)
        actions = actor.actions
        head_BH = actor(view.inputs, view.layout, view.memory)
        noise_BC = over(torch.randn(len(head_BH), actions.continuous, generator=generator), head_BH.device)
        continuous_BC, log_prob_B = squash(*actor.split(head_BH), noise_BC)
        entropies, weights = [-log_prob_B] if actions.continuous else [], []
        for logits_Bk in actor.branch_logits(head_BH, view.masks):
            log_p_Bk = logits_Bk.log_softmax(1)
            weights.append(log_p_Bk.exp())
            entropies.append(-(weights[-1] * log_p_Bk).sum(1))
        weights_BX = torch.cat(weights, 1) if weights else torch.ones_like(head_BH[:, :1])
        return Decisions(continuous_BC, weights_BX, torch.stack(entropies, 1))

    def least_for_policy(self, view: View, continuous_BC: Tensor) -> Tensor:
        """Returns [B, S, X] the smaller estimate of both critics, which can be differentiated for the actions alone."""
        self.modules["critic"].requires_grad_(False)
        values = self.least(self.critics, view, continuous_BC)
        self.modules["critic"].requires_grad_(True)
        return values

    def least(self, critics: Sequence[Critic], view: View, continuous_BC: Tensor) -> Tensor:
        """Returns [B, S, X] the smaller estimate of both critics."""
        one, other = (self.evaluate(critic, view, continuous_BC) for critic in critics)
        return torch.minimum(one, other)


def soft_values(decisions: Decisions, values_BSX: Tensor, alpha_E: Tensor) -> Tensor:
    """Returns [B, S] expected values of decisions, plus their entropies times the coefficients."""
    expected_BS = (values_BSX * decisions.weights.unsqueeze(1)).sum(2)
    return expected_BS + (decisions.entropies * alpha_E).sum(1, keepdim=True)


def target_entropies(actor: Actor, masks_BK: Tensor | None, share: float) -> Tensor:
    """Returns [B, E], or [1, E], the entropy that each coefficient aims at.

    Args:
        actor: the policy.
        masks_BK: True = forbidden; None without branches.
        share: of the entropy of uniform choices, for each branch.
    """
    actions, rows = actor.actions, 1 if masks_BK is None else len(masks_BK)
    targets = [torch.full((rows,), -float(actions.continuous), device=actor.device)] if actions.continuous else []
    if masks_BK is not None:
        allowed = masks_BK.logical_not().split_with_sizes(list(actions.discrete), 1)
        targets += [share * one.sum(1).clamp(min=1).log() for one in allowed]
    return torch.stack(targets, 1)
