"""Records of group segments, small MA-POCA learners, and calculations that several tests compare with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch.distributions import Categorical, Normal

from sparring.pipeline.learning.buffer import Batch, SegmentBuffer
from sparring.pipeline.learning.poca import POCA
from sparring.pipeline.learning.settings import Hyperparameters, TrainerSettings
from sparring.pipeline.messages.segments import GroupSegments, Segments, TeammateSegments
from sparring.pipeline.networks.actor import Actor
from sparring.pipeline.networks.arrays import previous_features
from sparring.pipeline.networks.group_critic import GroupTimesteps
from sparring.pipeline.networks.settings import MemorySettings, NetworkSettings
from sparring.pipeline.specs import BehaviorSpec
from tests.learning.learning_helpers import algorithm_of, no_episodes
from tests.learning.random_groups import OWN, Decision, Group, Member

LENGTH, MEMORY, GAMMA, LAMBDA, STRENGTH = 3, 6, 0.9, 0.8, 1.5


def decisions_of(groups: list[Group]) -> list[tuple[Group, Member, Decision]]:
    """Returns our own decisions in the order of a batch."""
    return [(group, one, step) for group in groups for one in group.of(OWN) for step in one.steps]


def timesteps_of(groups: list[Group]) -> list[tuple[Group, int]]:
    """Returns group and time of each group timestep of a batch."""
    return [(group, time) for group in groups for time in range(group.span + 1)]


# ---------------------------------------------------------------- records


def record(
    groups: list[Group], specs: dict[str, BehaviorSpec], *, masked: bool = True, length: int = 0, **changes: Any
):
    """Returns the record of group segments, with the recurrent state at each sequence of `length` group times."""
    own = [one for group in groups for one in group.of(OWN)]
    steps = [step for one in own for step in one.steps]
    starts = [step for one in own for step in _starts(one, length)] if length else []
    own_columns = _columns(groups, OWN, specs[OWN])
    masks = np.array([step.mask for step in steps]) if masked and steps else None
    columns = {
        "behavior": OWN, "source": "stepping-0.1", "origin": "assembly.1", "reached": len(steps), "flush": 0,
        **{name: column for name, column in own_columns.items() if name not in _OF_SHARED},
        "log_probs": np.array([step.log_prob for step in steps], np.float32),
        "masks": masks,
        "next_masks": None if masks is None else np.zeros((len(own), masks.shape[1]), np.bool_),
        "rewards": np.array([step.reward for step in steps], np.float32),
        "group_rewards": np.array([step.group_reward for step in steps], np.float32),
        "versions": np.array([step.version for step in steps], np.int64),
        "terminated": np.array([one.terminated for one in own], np.bool_),
        "interrupted": np.array([one.interrupted for one in own], np.bool_),
        "group_ended": np.array([group.over for group in groups for _ in group.of(OWN)], np.bool_),
        "teams": np.zeros(len(own), np.int32),
        "groups": np.array([group.number for group in groups for _ in group.of(OWN)], np.int64),
        "agents": np.array([one.episode for one in own], np.int64),
        "simulators": np.zeros(len(own), np.int32),
        "episodes": no_episodes(),
        "carried": np.array([step.carried for step in starts], np.float32) if starts else None,
        "shared": GroupSegments(
            numbers=np.array([group.number for group in groups], np.int64),
            spans=np.array([group.span for group in groups], np.int32),
            ended=np.array([group.over for group in groups], np.bool_),
            rewards=np.concatenate([np.zeros(0, np.float32), *(group.rewards for group in groups)]),
            teammates=tuple(
                TeammateSegments(behavior=name, **_columns(groups, name, spec))
                for name, spec in specs.items()
                if name != OWN and any(group.of(name) for group in groups)
            ),
            **{name: column for name, column in own_columns.items() if name in _OF_SHARED},
        ),
    }  # fmt: skip
    return Segments(**(columns | changes))


_OF_SHARED = ("members", "times", "next_times", "until", "next_continuous", "next_discrete")


def _columns(groups: list[Group], name: str, spec: BehaviorSpec) -> dict[str, Any]:
    """Returns the columns of the members of one behavior."""
    members = [one for group in groups for one in group.of(name)]
    steps, following = [step for one in members for step in one.steps], [one.following for one in members]
    columns: dict[str, Any] = {
        "members": np.array([len(group.of(name)) for group in groups], np.int32),
        "lengths": np.array([len(one.steps) for one in members], np.int32),
        "times": np.array([step.time for step in steps], np.int32),
        "next_times": np.array([one.time for one in following], np.int32),
        "until": np.array([one.until for one in members], np.int32),
    }
    for prefix, decisions in (("", steps), ("next_", following)):
        columns |= {
            f"{prefix}observations": tuple(
                np.concatenate([np.zeros((0, *one.shape), one.dtype), *(step.seen[at] for step in decisions)])
                for at, one in enumerate(spec.observations)
            ),
            f"{prefix}continuous": np.array([step.continuous for step in decisions], np.float32).reshape(
                len(decisions), spec.actions.continuous
            ),
            f"{prefix}discrete": np.array([step.discrete for step in decisions], np.int32).reshape(
                len(decisions), len(spec.actions.discrete)
            ),
        }
    return columns


def _starts(one: Member, length: int) -> Iterator[Decision]:
    """Yields the first step in each window of group time."""
    window = -1
    for step in one.steps:
        if step.time // length != window:
            window = step.time // length
            yield step


def batch_of(groups: list[Group], specs: dict[str, BehaviorSpec], *, length: int = 0, **changes: Any) -> Batch:
    """Returns group segments as the batch that a learner takes from its buffer."""
    buffer = SegmentBuffer(length, groups=True)
    buffer.add(record(groups, specs, length=length, **changes))
    return buffer.take()


def same_columns(one: Any, other: Any) -> None:
    """Checks that all columns of two batches are equal, and those of the records in them."""
    for name in (part.name for part in fields(one)):
        got, expected = getattr(one, name), getattr(other, name)
        if is_dataclass(got):
            same_columns(got, expected)
        elif isinstance(got, tuple):
            assert len(got) == len(expected)
            for ours, theirs in zip(got, expected, strict=True):
                if is_dataclass(ours):
                    same_columns(ours, theirs)
                else:
                    np.testing.assert_array_equal(ours, theirs, name)
        else:
            np.testing.assert_array_equal(got, expected, name)


# ---------------------------------------------------------------- learners


def poca_settings(
    *, memory: bool = False, previous: bool = False, normalize: bool = True, **hyper: Any
) -> TrainerSettings:
    """Returns settings of a small MA-POCA learner; further arguments are hyperparameters."""
    chosen = {"batch_size": 16, "buffer_size": 64, "learning_rate": 1e-3, "lambd": LAMBDA, "ratio": "joint"} | hyper
    settings = TrainerSettings(
        trainer_type="poca",
        hyperparameters=Hyperparameters(**chosen),
        network_settings=NetworkSettings(
            normalize=normalize,
            hidden_units=8,
            vis_encode_type="match3",
            memory=MemorySettings(memory_size=MEMORY, sequence_length=LENGTH) if memory else None,
            previous_action=previous,
        ),
        max_steps=10_000,
    )
    signals = settings.reward_signals
    assert signals.extrinsic is not None
    extrinsic = signals.extrinsic.model_copy(update={"gamma": GAMMA, "strength": STRENGTH})
    return settings.model_copy(update={"reward_signals": signals.model_copy(update={"extrinsic": extrinsic})})


def learning(specs: dict[str, BehaviorSpec], **how: Any) -> POCA:
    """Returns a small MA-POCA that knows all teammates and whose outputs and values are far from 0."""
    poca = algorithm_of(OWN, specs[OWN], poca_settings(**how), torch.Generator().manual_seed(0))
    if teammates := {name: spec for name, spec in specs.items() if name != OWN}:
        poca.register(teammates)
    assert isinstance(poca, POCA)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in poca.networks.modules.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise), alpha=0.2)
    return poca


# ---------------------------------------------------------------- a single group timestep


def features_of(poca: POCA, name: str, decision: Decision) -> np.ndarray:
    """Returns the action features [1, P] of a decision."""
    spec = poca.networks.specs[name]
    return previous_features(spec.actions, decision.continuous[None], decision.discrete[None])


def prepared_row(poca: POCA, member: Member, decision: Decision) -> tuple[torch.Tensor, ...]:
    """Returns the prepared observations of a decision."""
    encoder = poca.networks._encoders[member.name]
    before = None
    if member.name == OWN and encoder.previous:
        before = torch.from_numpy(_previous(poca, member, decision)[None])
    return encoder.prepare(encoder.join(decision.seen), before)


def _previous(poca: POCA, member: Member, decision: Decision) -> np.ndarray:
    """Returns the previous action of a member: the carried one, or after the last step that of the segment.

    A decision that was open during the whole segment has none.
    """
    if decision is not member.following:
        assert decision.carried is not None
        return decision.carried[poca.networks.memory :]
    if member.steps:
        return features_of(poca, OWN, member.steps[-1])[0]
    return np.zeros(poca.actor.encoder.previous, np.float32)


def timestep(poca: POCA, group: Group, time: int) -> tuple[GroupTimesteps, list[Member]]:
    """Returns one group timestep with baselines for all of our members present, and these members."""
    there = group.there(time)
    assert there
    inputs, actions, ours = [], [], []
    for name in poca.networks.critic.names:
        mine = [(member, decision) for member, decision in there if member.name == name]
        rows = [prepared_row(poca, member, decision) for member, decision in mine]
        absent = poca.networks._prepare(name, None, None)
        inputs.append(tuple(map(torch.cat, zip(*rows, strict=True))) if rows else absent.inputs)
        done = [torch.from_numpy(features_of(poca, name, decision)) for _, decision in mine]
        actions.append(torch.cat([absent.actions, *done]))
        ours += [member for member, _ in mine if name == OWN]
    count = len(there)
    columns = torch.arange(count), None, torch.tensor([float(count)]), torch.arange(len(ours))
    timesteps = GroupTimesteps(tuple(inputs), tuple(actions), *columns, (1, count, len(ours)))
    return timesteps, ours


# ---------------------------------------------------------------- a batch, written out


def estimated(poca: POCA, batch: Batch) -> tuple[Any, Any]:
    """Prepares a batch and returns it with the estimates before an update."""
    prepared = poca.networks.prepare(batch)
    return prepared, poca.networks.estimate(prepared, batch)


def targets_by_hand(
    groups: list[Group], values: dict[tuple[Group, int], float], baselines: dict[Decision, float]
) -> tuple[dict[tuple[Group, int], float], dict[Decision, float]]:
    """Returns the return at each group timestep of the segments, and the normalized advantage of each decision.

    `R_T = r_T + gamma V_next`; `R_t = r_t + gamma (lambda R_{t+1} + (1 - lambda) V_{t+1})`.
    """
    returns: dict[tuple[Group, int], float] = {}
    for group in groups:
        later = values[group, group.span]
        for time in reversed(range(group.span)):
            returns[group, time] = STRENGTH * float(group.rewards[time]) + GAMMA * later
            later = LAMBDA * returns[group, time] + (1 - LAMBDA) * values[group, time]
    decided = decisions_of(groups)
    found = np.array([returns[group, step.time] - baselines[step] for group, _, step in decided])
    found = (found - found.mean()) / (found.std() + 1e-10)
    return returns, {step: float(one) for (_, _, step), one in zip(decided, found, strict=True)}


def log_prob_and_entropy(actor: Actor, head: torch.Tensor, step: Decision) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns both for one decision: entropies of branches add up, those of continuous dimensions are averaged."""
    assert step.mask is not None
    actions = actor.actions
    normal = Normal(head[: actions.continuous], actor.log_sigma.exp())
    log_prob = normal.log_prob(torch.from_numpy(step.continuous)).sum()
    entropy = normal.entropy().mean() if actions.continuous else torch.zeros(())
    logits = head[actions.continuous :].masked_fill(torch.from_numpy(step.mask), -1e8)
    for branch, number in zip(logits.split(list(actions.discrete)), step.discrete, strict=True):
        one_of = Categorical(logits=branch)
        log_prob, entropy = log_prob + one_of.log_prob(torch.tensor(number)), entropy + one_of.entropy()
    return log_prob, entropy


def surrogate_of(ratios: list[torch.Tensor], advantages: list[float], epsilon: float) -> torch.Tensor:
    """Returns the clipped surrogate of some decisions (Schulman et al. 2017, equation 7)."""
    ratio, advantage = torch.stack(ratios), torch.tensor(advantages, dtype=torch.float32)
    return torch.minimum(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage).mean()
