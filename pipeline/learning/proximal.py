# ruff: noqa: N803, N806 (names end in their shape)
"""Decoupled PPO corrects for stale data.

Source: Hilton, Cobbe and Schulman 2021, arXiv 2110.00641, "Batch size-invariance for policy optimization", section 3.

It distinguishes two policies of a step: the behavior policy chose its action, the proximal policy is the center of the
clip. PPO does not, so a step which is one version old arrives with most of its clip range used up by the update in
between. Here the ratio is `pi / pi_proximal`, and each normalized advantage is weighted by `pi_proximal / pi_behavior`
of the joint action.

1. The proximal policy is the actor at the start of the update, not a moving average (AReaL, Fu et al. 2025, arXiv
   2505.24298).
2. The weight is capped at 2, and weights are not normalized (AReaL).
3. A step of the current version keeps its stored log-probability and the weight 1: at lag 0 this is PPO to the bit.
4. Entropy, value and baseline losses are not weighted.

R rows of the batch, B of some of them, P parts of an action (continuous dimensions, then branches).
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparring.pipeline.learning import losses
from sparring.pipeline.learning.minibatches import Minibatch, Recurrence, RecurrentState, rows_at_once
from sparring.pipeline.learning.settings import Hyperparameters
from sparring.pipeline.networks.actor import Actor
from sparring.pipeline.networks.device import over

WEIGHT_CAP: Final = 2.0


class Staleness(NamedTuple):
    """Measures the correction of an update.

    Attributes:
        weight: mean weight of the steps, from 0 to 2; 1 if no step is stale.
        sample_size: effective share of the steps, `(sum w)^2 / (n sum w^2)` (Kish 1965), from 0 to 1.
    """

    weight: float
    sample_size: float


NONE_STALE: Final = Staleness(weight=1.0, sample_size=1.0)


def correct(
    actor: Actor,
    rows: Minibatch,
    stale_R: NDArray[np.bool_],
    recurrence: Recurrence | None,
    epsilon: float,
    hyper: Hyperparameters,
) -> tuple[Minibatch, Staleness]:
    """Centers the clip of stale rows on the current actor, and weights their advantages.

    Args:
        actor: the actor at the start of the update.
        rows: all rows, with the log-probabilities of the behavior policies and normalized advantages.
        stale_R: rows that an older version acted.
        recurrence: the sequences and the memories stored at their starts; None for an actor without memory.
        epsilon: clip range.
        hyper: without `decoupled_objective` all weights are 1, and the clip of joint ratios stays on the behavior
            policy; with `ratio: per_dimension` the rows get the actor's log-probabilities [R, P], unless an action of
            a single part is a joint action.

    Returns:
        The rows with corrected `log_prob`, `advantage` and `limit`, and measures of the correction.
    """
    stale_R = stale_R & hyper.decoupled_objective
    per_dimension = hyper.ratio == "per_dimension" and actor.actions.parts > 1
    if not per_dimension and not stale_R.any():
        return rows, NONE_STALE
    proximal_RP = _proximal(actor, rows, stale_R | per_dimension, recurrence, per_dimension)
    stale = torch.from_numpy(stale_R)
    joint_R = proximal_RP.sum(1)
    weight_R = (joint_R - rows.log_prob).exp_().clamp_(max=WEIGHT_CAP).masked_fill_(~stale, 1.0)
    rows = rows._replace(log_prob=proximal_RP if per_dimension else torch.where(stale, joint_R, rows.log_prob))
    if not stale_R.any():
        return rows, NONE_STALE
    advantage_R = rows.advantage * weight_R
    rows = rows._replace(advantage=advantage_R, limit=losses.clip_limit(advantage_R, epsilon))
    total, squares = weight_R.sum().item(), weight_R.square().sum().item()
    return rows, Staleness(total / len(weight_R), total**2 / (len(weight_R) * squares) if squares else 0.0)


@torch.no_grad()
def _proximal(
    actor: Actor, rows: Minibatch, wanted_R: NDArray[np.bool_], recurrence: Recurrence | None, per_dimension: bool
) -> Tensor:
    """Returns log-probabilities [R, P], or [R, 1] of joint actions, computed in chunks; 0 for unwanted rows."""
    parts = actor.actions.parts if per_dimension else 1
    found_RP = torch.zeros(len(wanted_R), parts)
    for at_B, state in _chunks(rows, wanted_R, recurrence):
        some, there = over((rows.at(at_B), state), actor.device)
        layout, memory = (None, None) if there is None else (there.layout, there.actor)
        head_BH = actor(some.inputs, layout, memory)[:, : actor.outputs]
        log_prob = losses.evaluate(actor, head_BH, some, per_dimension).log_prob
        found_RP[at_B] = log_prob.reshape(len(at_B), parts).to(found_RP.device)
    return found_RP


def _chunks(
    rows: Minibatch, wanted_R: NDArray[np.bool_], recurrence: Recurrence | None
) -> Iterator[tuple[Tensor, RecurrentState | None]]:
    """Yields wanted rows, with their whole sequences for recurrent actors, as many as fit in the cache."""
    most = rows_at_once(rows.inputs)
    if recurrence is None:
        for at_B in torch.split(torch.from_numpy(np.flatnonzero(wanted_R)), most):
            yield at_B, None
        return
    wanted_q = np.flatnonzero(recurrence.holding(wanted_R))
    length = int(recurrence.lengths.max())
    for which_q in np.array_split(wanted_q, -(-len(wanted_q) // max(1, most // length))):
        yield recurrence.select(which_q)
