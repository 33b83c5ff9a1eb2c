"""The group critic compared with a slow twin that computes members, heads and queries one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparring.pipeline.networks.group_critic import GroupCritic
from sparring.pipeline.networks.layers import Layout
from sparring.pipeline.networks.settings import MemorySettings, NetworkSettings
from tests.networks.group_critic_twin import (
    CLOSE,
    MEMORY,
    SIGNALS,
    SPECS,
    UNITS,
    critic,
    encoded,
    groups_of,
    headed,
    hidden,
    seeded,
    timesteps_for,
    twin,
)

EQUAL = [[["Own"] * size] * 2 for size in range(1, 7)]
MIXED = [
    ["Own", "Own", "Teammate"],
    ["Own"],
    ["Teammate", "Teammate"],
    ["Own"] * 4 + ["Teammate"] * 2,
    ["Own", "Teammate"],
]
PADDED = [["Own"] * size for size in (3, 1, 6, 2, 5, 4)]
SHAPES = {
    **{f"{size}_own": groups for size, groups in enumerate(EQUAL, 1)},
    "padded": PADDED,
    "own_and_mates": [["Own", "Own", "Teammate", "Teammate"], ["Own", "Teammate", "Teammate", "Teammate"]],
    "padded_own_and_mates": MIXED,
    "three_names": [*MIXED, ["Own", "Teammate", "Third", "Third"], ["Own", "Third"], ["Third"]],
}
ALL = pytest.mark.parametrize("names", SHAPES.values(), ids=SHAPES)


# ---------------------------------------------------------------- equality


@ALL
@pytest.mark.parametrize(("layers", "activation"), [(1, "silu"), (3, "silu"), (2, "tanh")])
def test_values_and_baselines_equal_those_of_the_twin(names, layers, activation):
    one, groups = critic(num_layers=layers, activation=activation), groups_of(names)
    timesteps, _, decided = timesteps_for(one, groups)
    assert len(decided) == sum(group.count("Own") for group in names)
    values, baselines = one(timesteps)
    for got, expected in zip((values, baselines), twin(one, groups, decided), strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)
    assert values.std() > 0.01


@pytest.mark.parametrize("own", ["Own", "Teammate"])
@pytest.mark.parametrize("kinds", ["hyper", "none"])
def test_every_kind_of_observation_can_be_ours_or_a_teammates(own, kinds):
    """Goals, which condition an actor's body, are features of the critic."""
    one = critic(own=own, goal_conditioning_type=kinds)
    other = "Teammate" if own == "Own" else "Own"
    assert one.names == [own, other, "Third"]
    groups = groups_of([[own, own, other], [own, other, "Third"], [own]])
    if kinds == "none":  # goals are concatenated with vectors
        for token in {token for group in groups for token in group if token.name == "Teammate"}:
            eye, vector, others, aim = token.inputs[1], token.inputs[0], token.inputs[2], token.inputs[3]
            token.inputs = (torch.cat([vector, aim], 1), eye, others)
    timesteps, _, decided = timesteps_for(one, groups)
    for got, expected in zip(one(timesteps), twin(one, groups, decided), strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("same_size", [True, False])
def test_requested_baselines_are_returned_in_order(same_size):
    one, groups = critic(), groups_of([["Own"] * 4] * 3 if same_size else PADDED)
    requested = [(2, 1), (0, 2), (0, 0), (2, 0)]
    timesteps, _, _ = timesteps_for(one, groups, decided=requested)
    for got, expected in zip(one(timesteps), twin(one, groups, requested), strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


def test_timesteps_without_decisions_have_values_only():
    for names in (PADDED, [["Teammate"], ["Teammate", "Third"]], [["Teammate", "Teammate"]]):
        one, groups = critic(), groups_of(names)
        timesteps, _, _ = timesteps_for(one, groups, decided=[])
        values, baselines = one(timesteps)
        torch.testing.assert_close(values, twin(one, groups, [])[0], **CLOSE)
        assert baselines.shape == (0, len(SIGNALS))


def test_row_used_at_several_timesteps_is_the_same_member():
    one = critic()
    ((first, second, third),) = groups_of([["Own"] * 3])
    groups = [[first, second], [first, third], [third, first, second], [first]]
    timesteps, row, decided = timesteps_for(one, groups)
    assert len(row) == 3
    for got, expected in zip(one(timesteps), twin(one, groups, decided), strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


def test_largest_group_so_far_scales_the_number_of_members():
    one, groups = critic(largest=2), groups_of([["Own"] * 2, ["Own"]])
    assert one.largest == 2
    timesteps, _, decided = timesteps_for(one, groups)
    before = one(timesteps)[0]
    one.largest.clamp_(min=5)
    one.largest.clamp_(min=3)
    assert one.largest == 5
    assert "largest" in one.state_dict()
    for got, expected in zip(one(timesteps), twin(one, groups, decided), strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)
    assert (one(timesteps)[0] - before).abs().min() > 1e-4


# ---------------------------------------------------------------- independence of the own action


@ALL
def test_gradient_of_a_baseline_for_the_own_action_is_exactly_zero(names):
    """The gradient is not 0 for actions of teammates, and 0 for those of other groups."""
    one, groups = critic(), groups_of(names)
    timesteps, row, decided = timesteps_for(one, groups)
    actions = [None if done is None else done.clone().requires_grad_() for done in timesteps.actions]
    values, baselines = one(timesteps._replace(actions=tuple(actions)))
    requested = [done for done in actions if done is not None]

    def influence(output):
        found = iter(torch.autograd.grad(output.sum(), requested, retain_graph=True, materialize_grads=True))
        of_names = [None if done is None else next(found) for done in actions]
        return [row_of_name for done in of_names if done is not None for row_of_name in done]

    assert not any(part.any() for part in influence(values))
    for baseline, (at, member) in zip(baselines, decided, strict=True):
        found = influence(baseline)
        teammates = {row[token] for place, token in enumerate(groups[at]) if place != member}
        for number, part in enumerate(found):
            if number in teammates:
                assert part.all(), "every feature of a mate's action matters"
            else:
                assert not part.any(), "exactly zero"


@ALL
def test_own_baseline_does_not_depend_on_the_own_action_bit_for_bit(names):
    """The own action does not even affect rounding."""
    one, groups = critic(), groups_of(names)
    timesteps, row, decided = timesteps_for(one, groups)
    before = one(timesteps)[1]
    for number, (at, member) in enumerate(decided):
        token = groups[at][member]
        done = timesteps.actions[0].clone()
        done[row[token]] = torch.tensor([1e4, -3.0, 0.0, 1.0, 7.0])
        after = one(timesteps._replace(actions=(done, *timesteps.actions[1:])))[1]
        assert torch.equal(after[number], before[number])
        if len(groups[at]) > 1 and (others := [i for i, (g, k) in enumerate(decided) if g == at and k != member]):
            assert (after[others] != before[others]).any(1).all()


# ---------------------------------------------------------------- sets


@ALL
def test_permutation_of_members_permutes_baselines_and_keeps_values(names):
    one, groups = critic(), groups_of(names)
    values, baselines = one(timesteps_for(one, groups)[0])
    random, moved, expected, before = np.random.default_rng(3), [], [], 0
    for group in groups:
        ours = sum(token.name == "Own" for token in group)
        order, others = random.permutation(ours), ours + random.permutation(len(group) - ours)
        moved.append([group[at] for at in (*order, *others)])
        expected += [before + at for at in order]
        before += ours
    moved_values, moved_baselines = one(timesteps_for(one, moved, seed=1)[0])
    torch.testing.assert_close(moved_values, values, **CLOSE)
    torch.testing.assert_close(moved_baselines, baselines[expected], **CLOSE)


@ALL
@pytest.mark.parametrize("more", [1, 4])
def test_places_for_absent_members_change_nothing(names, more):
    one, groups = critic(), groups_of(names)
    narrow = timesteps_for(one, groups)[0]
    wide = timesteps_for(one, groups, most=max(map(len, groups)) + more)[0]
    assert wide.here is not None
    for got, expected in zip(one(wide), one(narrow), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_values_of_a_group_do_not_depend_on_other_groups():
    one, groups = critic(), groups_of(MIXED)
    values, baselines = one(timesteps_for(one, groups)[0])
    alone = [one(timesteps_for(one, [group])[0]) for group in groups if group[0].name == "Own"]
    torch.testing.assert_close(torch.cat([baselines for _, baselines in alone]), baselines, rtol=1e-6, atol=1e-6)
    ours = [at for at, group in enumerate(groups) if group[0].name == "Own"]
    torch.testing.assert_close(torch.cat([value for value, _ in alone]), values[ours], rtol=1e-6, atol=1e-6)


def test_timestep_without_members_is_finite_and_affects_no_other():
    one, groups = critic(), groups_of(PADDED)
    timesteps, _, decided = timesteps_for(one, groups)
    empty, _, _ = timesteps_for(
        one, [*groups[:2], [], *groups[2:]], decided=[(at + (at > 1), who) for at, who in decided]
    )
    values, baselines = one(empty)
    expected_values, expected_baselines = one(timesteps)
    unchanged = [0, 1, 3, 4, 5, 6]
    torch.testing.assert_close(values[unchanged], expected_values, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(baselines, expected_baselines, rtol=1e-6, atol=1e-6)
    assert values.isfinite().all()
    (values.sum() + baselines.sum()).backward()
    assert all(parameter.grad.isfinite().all() for parameter in one.parameters() if parameter.grad is not None)


# ---------------------------------------------------------------- additional behaviors


def test_adding_a_behavior_does_not_change_groups_without_it():
    one = critic(known=("Own", "Teammate"))
    groups = groups_of(MIXED)
    before, state = one(timesteps_for(one, groups)[0]), {name: part.clone() for name, part in one.state_dict().items()}
    one.add("Third", SPECS["Third"], seeded(3))
    assert one.names == ["Own", "Teammate", "Third"]
    for name, part in state.items():
        assert torch.equal(one.state_dict()[name], part)
    for got, expected in zip(one(timesteps_for(one, groups)[0]), before, strict=True):
        assert torch.equal(got, expected)
    groups = groups_of(SHAPES["three_names"])
    timesteps, _, decided = timesteps_for(one, groups)
    for got, expected in zip(one(timesteps), twin(one, groups, decided), strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


def test_critic_normalizes_teammates_only_and_previous_actions_are_ours_only():
    settings = NetworkSettings(hidden_units=UNITS, vis_encode_type="match3", normalize=True, previous_action=True)
    one = GroupCritic(SPECS, settings, len(SIGNALS), seeded())
    assert one.encoders[0].normalizer is None
    assert one.encoders[1].normalizer is not None
    assert (one.encoders[0].previous, one.encoders[1].previous) == (5, 0)


# ---------------------------------------------------------------- memory


@torch.no_grad()
def test_recurrent_critic_follows_timesteps_and_decisions_in_order():
    """Values follow sequences of groups and baselines those of members, as LSTM cells do step by step."""
    one, groups = critic(memory=MemorySettings(memory_size=MEMORY, sequence_length=4)), groups_of(MIXED)
    requested = [(0, 0), (3, 1), (4, 0), (0, 1), (1, 0), (3, 2)]
    timesteps, _, _ = timesteps_for(one, groups, decided=requested)
    lengths = [2, 3, 3, 1, 2]
    memory = torch.randn(5, MEMORY, generator=seeded(5))
    values, baselines, after = one.remember(timesteps, (Layout(np.array(lengths)), memory))
    cells = [(at, one.value, hidden(one, encoded(one, group)), len(group)) for at, group in enumerate(groups)]
    cells += [
        (len(groups) + at, one.baseline, hidden(one, encoded(one, groups[group], member)), len(groups[group]))
        for at, (group, member) in enumerate(requested)
    ]
    row, expected, ends = iter(cells), [], []
    for length, start in zip(lengths, memory, strict=True):
        state = start[None].split(MEMORY // 2, 1)
        for _ in range(length):
            _, head, inputs, count = next(row)
            state = torch.lstm_cell(inputs[None], state, *one.memory.parameters())
            expected.append(headed(one, head, state[0][0], count))
        ends.append(torch.cat(state, 1)[0])
    torch.testing.assert_close(torch.cat([values, baselines]), torch.stack(expected), **CLOSE)
    torch.testing.assert_close(after, torch.stack(ends), **CLOSE)


# ---------------------------------------------------------------- derivatives


def gradients_of(one, run):
    """Returns the gradients that a function adds to the critic's parameters."""
    for parameter in one.parameters():
        parameter.grad = torch.zeros_like(parameter)
    run()
    return {name: parameter.grad for name, parameter in one.named_parameters()}


@settings(max_examples=10)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1)).filter(any), min_size=1, max_size=3),
    layers=st.integers(1, 3),
    activation=st.sampled_from(["silu", "tanh", "relu"]),
    share=st.floats(0, 1),
    same_rows=st.booleans(),
)
@example(sizes=[(1, 0)] * 2, layers=2, activation="silu", share=1.0, same_rows=False)
@example(sizes=[(2, 0)] * 2, layers=2, activation="silu", share=1.0, same_rows=True)
@example(sizes=[(5, 1)], layers=2, activation="silu", share=0.5, same_rows=False)
def test_explicit_derivative_equals_autograds_of_the_twin(sizes, layers, activation, share, same_rows):
    """With and without a graph; for groups of one, absent members, shared rows, and any choice of decisions."""
    one = critic(known=("Own", "Third"), largest=8, num_layers=layers, activation=activation).double()
    groups = groups_of([["Own"] * ours + ["Third"] * others for ours, others in sizes])
    if same_rows:
        groups += groups[:1]
    for token in {token for group in groups for token in group}:
        token.inputs, token.done = tuple(column.double() for column in token.inputs), token.done.double()
    every = [
        (at, place) for at, group in enumerate(groups) for place, one_of in enumerate(group) if one_of.name == "Own"
    ]
    decided = every[: round(share * len(every))]
    timesteps, _, _ = timesteps_for(one, groups, decided=decided)
    random = seeded(3)
    factors = [torch.randn(rows, len(SIGNALS), generator=random).double() for rows in (len(groups), len(decided))]

    expected = twin.__wrapped__(one, groups, decided)
    wanted = gradients_of(one, lambda: torch.autograd.backward(expected, factors))

    def traced():
        with torch.no_grad():
            values, baselines, backward_fn = one.traced(timesteps)
            backward_fn(*factors)
        torch.testing.assert_close((values, baselines), expected, rtol=1e-6, atol=1e-6)

    for run in (traced, lambda: torch.autograd.backward(one(timesteps), factors)):
        torch.testing.assert_close(gradients_of(one, run), wanted, rtol=1e-6, atol=1e-6)
