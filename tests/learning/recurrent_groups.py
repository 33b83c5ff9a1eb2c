"""Recurrent MA-POCA learners, segments that they played, and a slow evaluation of these step by step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import silu

from tests.learning.group_helpers import (
    LENGTH,
    MEMORY,
    batch_of,
    decisions_of,
    estimated,
    learning,
    timestep,
)
from tests.learning.random_groups import OWN, PLAIN, World, specs_of

VARIANTS = {"plain": {}, "teammates": {"teammates": 2}, "previous": {"teammates": 1, "previous": True}}
ALL = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


def played(variant, seed=0, count=4, horizon=5, **hyper):
    """Returns a learner and segments that its actor played, several of most groups."""
    how = dict(variant)
    specs = specs_of(PLAIN, how.pop("teammates", 0))
    poca = learning(specs, memory=True, **how, **hyper)
    return poca, World(specs, poca.actor, seed).groups(count, times=14, horizon=horizon)


def batch_for(poca, groups):
    return batch_of(groups, poca.networks.specs, length=LENGTH)


# ---------------------------------------------------------------- the twin


def evaluate_row(critic, head, encoded, count, memory):
    """Returns the value of one row and the memory after it."""
    state = torch.lstm_cell(silu(critic.trunk(encoded)), memory.split(MEMORY // 2, 1), *critic.memory.parameters())
    scaled = torch.tensor([[2 * count / critic.largest.item() - 1]])
    return head(torch.cat([state[0], scaled], 1))[0, 0], torch.cat(state, 1)


def encodings(poca, group, time):
    """Returns the encodings of the group and of each of our members, and the number of members."""
    timesteps_shown, ours = timestep(poca, group, time)
    encoded = poca.networks.critic.encode(timesteps_shown)
    return encoded[:1], {one: encoded[at : at + 1] for at, one in enumerate(ours, 1)}, timesteps_shown.counts[0].item()


def deciding(members, time):
    """Returns the members that decide at a time, with their decisions."""
    return [(one, step) for one in members for step in one.steps if step.time == time]


class Walk:
    """Evaluates groups timestep by timestep, from one batch to the next.

    Attributes:
        groups: memory of each open group.
        members: memory of each of our open members.
    """

    def __init__(self, poca):
        self.poca, self.groups, self.members = poca, {}, {}

    @torch.no_grad()
    def __call__(self, groups):
        """Returns values by (group, time), baselines by decision, and memories at starts of windows and sequences."""
        critic, nothing = self.poca.networks.critic, torch.zeros(1, MEMORY)
        values, baselines, at_windows, at_sequences = {}, {}, {}, {}
        for group in groups:
            memory = self.groups.get(group.number, nothing)
            windows = dict.fromkeys(group.of(OWN), -1)
            for time in range(group.span + 1):
                values[group, time] = 0.0
                if not group.there(time):
                    continue
                encoded, each, count = encodings(self.poca, group, time)
                value, after = evaluate_row(critic, critic.value, encoded, count, memory)
                values[group, time] = value.item()
                if time == group.span:
                    continue  # it is the first of the next segment
                if time % LENGTH == 0:
                    at_windows[group, time] = memory
                memory = after
                for one, step in deciding(each, time):
                    before = self.members.get(one.episode, nothing)
                    if windows[one] != time // LENGTH:
                        windows[one], at_sequences[step] = time // LENGTH, before
                    value, self.members[one.episode] = evaluate_row(critic, critic.baseline, each[one], count, before)
                    baselines[step] = value.item()
            self._end(group, memory)
        return values, baselines, at_windows, at_sequences

    def _end(self, group, memory):
        self.groups[group.number] = memory
        if group.over:
            del self.groups[group.number]
        for one in group.of(OWN):
            if one.ended:
                self.members.pop(one.episode, None)


def compare(poca, groups, walk):
    prepared, found = estimated(poca, batch_for(poca, groups))
    values, baselines, at_windows, at_sequences = walk(groups)
    np.testing.assert_allclose(found.values[:, 0], list(values.values()), atol=1e-5)
    expected = [baselines[step] for _, _, step in decisions_of(groups)]
    np.testing.assert_allclose(found.baselines[:, 0], expected, atol=1e-5)
    starts = [(group, time) for group in groups for time in range(0, group.span, LENGTH)]
    np.testing.assert_allclose(found.groups, torch.cat([at_windows[one] for one in starts]), atol=1e-5)
    decided = [step for _, _, step in decisions_of(groups)]
    first = [decided[row] for row in prepared.windows.first_q]
    np.testing.assert_allclose(found.members, torch.cat([at_sequences[step] for step in first]), atol=1e-5)
