"""Group timesteps of random members, and a slow group critic that computes members, heads and queries one by one."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.nn.functional import silu

from sparring.pipeline.networks.encoders import Encoder
from sparring.pipeline.networks.group_critic import GroupCritic, GroupTimesteps
from sparring.pipeline.networks.settings import HEADS, NetworkSettings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec

SPECS = {
    "Own": BehaviorSpec(
        observations=(ObservationSpec(name="a", shape=(3,)), ObservationSpec(name="b", shape=(2,))),
        actions=ActionSpec(continuous=2, discrete=(3,)),
    ),
    "Teammate": BehaviorSpec(
        observations=(
            ObservationSpec(name="eye", shape=(1, 6, 5), kind="image", dtype="uint8"),
            ObservationSpec(name="state", shape=(4,)),
            ObservationSpec(name="others", shape=(3, 2), kind="entities"),
            ObservationSpec(name="aim", shape=(2,), kind="goal"),
        ),
        actions=ActionSpec(discrete=(2, 2)),
    ),
    "Third": BehaviorSpec(observations=(ObservationSpec(name="c", shape=(1,)),), actions=ActionSpec(continuous=1)),
}
UNITS, MEMORY, SIGNALS = 8, 6, ("extrinsic", "curiosity")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


ACTIVATE = {"silu": silu, "tanh": torch.tanh, "relu": torch.relu}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def randomized(module, seed=7):
    """Sets all weights and biases at random, so that no zero or one hides an error; returns the module."""
    with torch.no_grad():
        for at, parameter in enumerate(module.parameters()):
            parameter.normal_(0, 0.5, generator=seeded(seed + at))
    return module


def critic(known=("Own", "Teammate", "Third"), largest=6, own="Own", **network):
    settings = NetworkSettings(hidden_units=UNITS, vis_encode_type="match3", **network)
    specs = {name: SPECS[name] for name in dict.fromkeys((own, *known))}
    one = randomized(GroupCritic(specs, settings, len(SIGNALS), seeded()))
    one.largest.clamp_(min=largest)
    return one


class Token:
    """A member at a group timestep: one row of observations and actions."""

    def __init__(self, spec, name, seed):
        random, self.name = np.random.default_rng(seed), name
        columns = []
        for one in spec.observations:
            if one.dtype == "uint8":
                columns.append(random.integers(0, 256, (1, *one.shape), np.uint8))
            else:
                columns.append(random.standard_normal((1, *one.shape), np.float32))
            if one.kind == "entities":
                columns[-1][0, -1] = 0
        encoder = Encoder(spec, NetworkSettings(hidden_units=UNITS, vis_encode_type="match3"), seeded())
        self.inputs = encoder.prepare(encoder.join(columns))
        self.done = torch.from_numpy(
            random.standard_normal((1, spec.actions.continuous + spec.actions.mask_size), np.float32)
        )


def groups_of(names, seed=0):
    """Returns a group for each timestep, as tokens of the named behaviors."""
    return [
        [Token(SPECS[name], name, 100 * seed + 10 * at + place) for place, name in enumerate(group)]
        for at, group in enumerate(names)
    ]


def timesteps_for(one, groups, *, most=None, seed=0, decided=None):
    """Returns the group timesteps of groups, with rows of each behavior in a random order.

    Args:
        one: the critic.
        groups: tokens, our own first.
        most: maximum number of members; None for that of the largest group.
        seed: seed of the order.
        decided: (timestep, member) of each baseline; None for all of ours.
    """
    m, n = len(groups), most or max(map(len, groups))
    ours = [sum(token.name == one.names[0] for token in group) for group in groups]
    j = max(ours)
    every = [token for group in groups for token in group]
    row, inputs, actions = {}, [], []
    for name in one.names:
        mine = [token for token in dict.fromkeys(every) if token.name == name]
        mine = [mine[at] for at in np.random.default_rng(seed).permutation(len(mine))]
        columns = mine or [Token(SPECS[name], name, 0)]
        row |= {token: len(row) + at for at, token in enumerate(mine)}
        joined = map(torch.cat, zip(*(token.inputs for token in columns), strict=True))
        done = torch.cat([token.done for token in columns])
        kind = one.value.weight.dtype
        inputs.append(tuple(joined) if mine else tuple(column[:0].to(kind) for column in joined))
        actions.append(done if mine else done[:0].to(kind))
    if decided is None:
        decided = [(at, member) for at, count in enumerate(ours) for member in range(count)]
    slots = torch.zeros(n, m, dtype=torch.int64)
    here = torch.zeros(n, m, dtype=torch.bool)
    for at, group in enumerate(groups):
        for place, token in enumerate(group):
            slots[place, at], here[place, at] = row[token], True
    timesteps = GroupTimesteps(
        inputs=tuple(inputs),
        actions=tuple(actions),
        rows=slots.flatten(),
        here=None if here.all() else here,
        counts=torch.tensor([float(len(group)) for group in groups]),
        decided=torch.tensor([member * m + at for at, member in decided], dtype=torch.int64),
        shape=(m, n, j),
    )
    return timesteps, row, decided


# ---------------------------------------------------------------- the twin


def normalized(layer, row):
    """Layer normalization of one vector."""
    centered = row - row.sum() / len(row)
    return centered / (centered.square().sum() / len(row) + layer.eps).sqrt() * layer.weight + layer.bias


def encoded(one, group, without=None):
    """Returns the mean attention output over members, with actions of all but `without`, or of none."""
    embedded = []
    for place, token in enumerate(group):
        at = one.names.index(token.name)
        row = one.observed[at](one.encoders[at](token.inputs))
        if without not in (None, place):
            row = row + one.acted[at](token.done)
        embedded.append(ACTIVATE[one._settings.activation](row)[0])
    attention = one.attention
    inputs = [normalized(attention.before, row) for row in embedded]
    parts = [attention.project(row).split(UNITS) for row in inputs]
    width, results = UNITS // HEADS, []
    for index, (query, _, _) in enumerate(parts):
        heads = []
        for head in range(HEADS):
            part = slice(head * width, (head + 1) * width)
            logits = [sum(query[part] * key[part]) / math.sqrt(width) for _, key, _ in parts]
            weights = [logit.exp() for logit in logits]
            heads.append(sum(w * value[part] for w, (_, _, value) in zip(weights, parts, strict=True)) / sum(weights))
        results.append(normalized(attention.after, inputs[index] + attention.merge(torch.cat(heads))))
    return sum(results) / len(group)


def hidden(one, row):
    for layer in one.trunk.layers:
        row = ACTIVATE[one._settings.activation](layer(row))
    return row


def headed(one, head, row, count):
    """Applies a head to the encoding and the number of members, scaled from -1 (none) to 1 (the most ever seen)."""
    return head(torch.cat([row, torch.tensor([2 * count / one.largest.item() - 1], dtype=row.dtype)]))


@torch.no_grad()
def twin(one, groups, decided):
    """Returns the value of each group and the requested baselines, computed one by one."""
    values = [headed(one, one.value, hidden(one, encoded(one, group)), len(group)) for group in groups]
    baselines = [
        headed(one, one.baseline, hidden(one, encoded(one, groups[at], member)), len(groups[at]))
        for at, member in decided
    ]
    return torch.stack(values), torch.stack(baselines) if baselines else torch.zeros(
        0, len(SIGNALS), requires_grad=values[0].requires_grad, dtype=values[0].dtype
    )
