"""The group critic against a twin that goes through members, heads and queries one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import silu

from sparring.pipeline.networks.encoders import Encoder
from sparring.pipeline.networks.group_critic import GroupCritic, GroupRecurrentState, GroupTimesteps
from sparring.pipeline.networks.limits import HEADS
from sparring.pipeline.networks.recurrent import Layout
from sparring.pipeline.networks.settings import MemorySettings, NetworkSettings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec

SPECS = {
    "Own": BehaviorSpec(
        observations=(ObservationSpec(name="a", shape=(3,)), ObservationSpec(name="b", shape=(2,))),
        actions=ActionSpec(continuous=2, discrete=(3,)),
    ),
    "Mate": BehaviorSpec(
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
EQUAL = [[["Own"] * size] * 2 for size in range(1, 7)]
MIXED = [["Own", "Own", "Mate"], ["Own"], ["Mate", "Mate"], ["Own"] * 4 + ["Mate"] * 2, ["Own", "Mate"]]
PADDED = [["Own"] * size for size in (3, 1, 6, 2, 5, 4)]
SHAPES = {
    **{f"{size}_own": groups for size, groups in enumerate(EQUAL, 1)},
    "padded": PADDED,
    "own_and_mates": [["Own", "Own", "Mate", "Mate"], ["Own", "Mate", "Mate", "Mate"]],
    "padded_own_and_mates": MIXED,
    "three_names": [*MIXED, ["Own", "Mate", "Third", "Third"], ["Own", "Third"], ["Third"]],
}
ALL = pytest.mark.parametrize("names", SHAPES.values(), ids=SHAPES)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


ACTIVATE = {"silu": silu, "tanh": torch.tanh}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def drawn(module, seed=7):
    """Every weight and bias random, so that none hides behind a zero or a one."""
    with torch.no_grad():
        for at, parameter in enumerate(module.parameters()):
            parameter.normal_(0, 0.5, generator=seeded(seed + at))
    return module


def critic(known=("Own", "Mate", "Third"), largest=6, own="Own", **network):
    settings = NetworkSettings(hidden_units=UNITS, vis_encode_type="match3", **network)
    one = drawn(GroupCritic(own, {name: SPECS[name] for name in known}, settings, SIGNALS, seeded()))
    one.see(largest)
    return one


class Token:
    """A member at a moment: one row of what it sees and did."""

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
    """A group at each moment: tokens of the names."""
    return [
        [Token(SPECS[name], name, 100 * seed + 10 * at + place) for place, name in enumerate(group)]
        for at, group in enumerate(names)
    ]


def shown(one, groups, *, most=None, seed=0, decided=None):
    """What a critic is shown of groups; rows of each name in a random order.

    Args:
        one: the critic.
        groups: tokens, our own first.
        most: room for members; None for that of the largest group.
        seed: of the order.
        decided: (moment, member) of each baseline; None for all of ours.
    """
    m, n = len(groups), most or max(map(len, groups))
    ours = [sum(token.name == one.names[0] for token in group) for group in groups]
    j = max(ours)
    every = [token for group in groups for token in group]
    row, inputs, actions = {}, [], []
    for name in one.names:
        mine = [token for token in dict.fromkeys(every) if token.name == name]
        mine = [mine[at] for at in np.random.default_rng(seed).permutation(len(mine))]
        row |= {token: len(row) + at for at, token in enumerate(mine)}
        inputs.append(tuple(map(torch.cat, zip(*(token.inputs for token in mine), strict=True))) if mine else None)
        actions.append(torch.cat([token.done for token in mine]) if mine else None)
    if decided is None:
        decided = [(at, member) for at, count in enumerate(ours) for member in range(count)]
    whole = all(len(group) == n for group in groups)
    places = torch.tensor([at * n + place for at, group in enumerate(groups) for place in range(len(group))])
    timesteps = GroupTimesteps(
        inputs=tuple(inputs),
        actions=tuple(actions),
        rows=torch.tensor([row[token] for token in every]),
        places=None if whole else places,
        shape=(m, n, j),
        counts=torch.tensor([float(len(group)) for group in groups]),
        decided=torch.tensor([at * j + member for at, member in decided], dtype=torch.int64),
    )
    return timesteps, row, decided


# ---------------------------------------------------------------- the twin


def normalised(layer, row):
    """Layer normalisation of one vector."""
    centred = row - row.sum() / len(row)
    return centred / (centred.square().sum() / len(row) + layer.eps).sqrt() * layer.weight + layer.bias


def encoded(one, group, without=None):
    """Mean over the members of what each makes of all; with the actions of all but `without`, or of none."""
    embedded = []
    for place, token in enumerate(group):
        at = one.names.index(token.name)
        row = one.observed[at](one.encoders[at](token.inputs))
        if without not in (None, place):
            row = row + one.acted[at](token.done)
        embedded.append(ACTIVATE[one._settings.activation](row)[0])
    attention = one.attention
    inputs = [normalised(attention.before, row) for row in embedded]
    parts = [attention.project(row).split(UNITS) for row in inputs]
    width, results = UNITS // HEADS, []
    for asking, (query, _, _) in enumerate(parts):
        heads = []
        for head in range(HEADS):
            cut = slice(head * width, (head + 1) * width)
            logits = [sum(query[cut] * key[cut]) / math.sqrt(width) for _, key, _ in parts]
            weights = [logit.exp() for logit in logits]
            heads.append(sum(w * value[cut] for w, (_, _, value) in zip(weights, parts, strict=True)) / sum(weights))
        results.append(normalised(attention.after, inputs[asking] + attention.merge(torch.cat(heads))))
    return sum(results) / len(group)


def hidden(one, row):
    for layer in one.trunk.layers:
        row = ACTIVATE[one._settings.activation](layer(row))
    return row


def headed(one, head, row, count):
    """The number of members, from -1 for none to 1 for the most ever seen, joins the encoding."""
    return head(torch.cat([row, torch.tensor([2 * count / one.largest.item() - 1])]))


@torch.no_grad()
def twin(one, groups, decided):
    """Value of each group, and the baselines asked for, each by itself."""
    values = [headed(one, one.value, hidden(one, encoded(one, group)), len(group)) for group in groups]
    baselines = [
        headed(one, one.baseline, hidden(one, encoded(one, groups[at], member)), len(groups[at]))
        for at, member in decided
    ]
    return torch.stack(values), torch.stack(baselines) if baselines else torch.zeros(0, len(SIGNALS))


# ---------------------------------------------------------------- equality


@ALL
@pytest.mark.parametrize(("layers", "activation"), [(1, "silu"), (3, "silu"), (2, "tanh")])
def test_values_and_baselines_are_those_of_members_one_by_one(names, layers, activation):
    one, groups = critic(num_layers=layers, activation=activation), groups_of(names)
    timesteps, _, decided = shown(one, groups)
    assert len(decided) == sum(group.count("Own") for group in names)
    values, baselines = one(timesteps)
    for got, expected in zip((values, baselines), twin(one, groups, decided), strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)
    assert values.std() > 0.01


@pytest.mark.parametrize("own", ["Own", "Mate"])
@pytest.mark.parametrize("kinds", ["hyper", "none"])
def test_every_kind_of_observation_may_be_ours_or_a_mates(own, kinds):
    """Goals that condition an actor's body are features here."""
    one = critic(own=own, goal_conditioning_type=kinds)
    other = "Mate" if own == "Own" else "Own"
    assert one.names == [own, other, "Third"]
    groups = groups_of([[own, own, other], [own, other, "Third"], [own]])
    if kinds == "none":  # goals are joined with the vectors
        for token in {token for group in groups for token in group if token.name == "Mate"}:
            eye, vector, others, aim = token.inputs[1], token.inputs[0], token.inputs[2], token.inputs[3]
            token.inputs = (torch.cat([vector, aim], 1), eye, others)
    timesteps, _, decided = shown(one, groups)
    for got, expected in zip(one(timesteps), twin(one, groups, decided), strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("whole", [True, False])
def test_only_the_baselines_asked_for_are_made_and_in_that_order(whole):
    one, groups = critic(), groups_of([["Own"] * 4] * 3 if whole else PADDED)
    asked = [(2, 1), (0, 2), (0, 0), (2, 0)]
    timesteps, _, _ = shown(one, groups, decided=asked)
    for got, expected in zip(one(timesteps), twin(one, groups, asked), strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


def test_values_alone_where_nobody_decides():
    for names in (PADDED, [["Mate"], ["Mate", "Third"]], [["Mate", "Mate"]]):
        one, groups = critic(), groups_of(names)
        timesteps, _, _ = shown(one, groups, decided=[])
        values, baselines = one(timesteps)
        torch.testing.assert_close(values, twin(one, groups, [])[0], **CLOSE)
        assert baselines.shape == (0, len(SIGNALS))


def test_a_row_that_is_shown_at_several_moments_is_the_same_member_at_each():
    one = critic()
    ((first, second, third),) = groups_of([["Own"] * 3])
    groups = [[first, second], [first, third], [third, first, second], [first]]
    timesteps, row, decided = shown(one, groups)
    assert len(row) == 3
    for got, expected in zip(one(timesteps), twin(one, groups, decided), strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


def test_the_largest_group_ever_seen_scales_the_number_of_members_and_never_shrinks():
    one, groups = critic(largest=2), groups_of([["Own"] * 2, ["Own"]])
    assert one.largest == 2
    timesteps, _, decided = shown(one, groups)
    before = one(timesteps)[0]
    one.see(5)
    one.see(3)
    assert one.largest == 5
    assert "largest" in one.state_dict()
    for got, expected in zip(one(timesteps), twin(one, groups, decided), strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)
    assert (one(timesteps)[0] - before).abs().min() > 1e-4


# ---------------------------------------------------------------- nothing of the own action


@ALL
def test_the_gradient_of_a_baseline_for_the_own_action_is_exactly_zero(names):
    """For those of mates it is not, for those of other groups it is."""
    one, groups = critic(), groups_of(names)
    timesteps, row, decided = shown(one, groups)
    actions = [None if done is None else done.clone().requires_grad_() for done in timesteps.actions]
    values, baselines = one(timesteps._replace(actions=tuple(actions)))
    asked = [done for done in actions if done is not None]

    def influence(output):
        found = iter(torch.autograd.grad(output.sum(), asked, retain_graph=True, materialize_grads=True))
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
def test_another_own_action_leaves_the_own_baseline_to_the_bit(names):
    """More than asked for: nothing of it enters, not even by rounding."""
    one, groups = critic(), groups_of(names)
    timesteps, row, decided = shown(one, groups)
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
def test_a_permutation_of_members_permutes_baselines_and_leaves_values(names):
    one, groups = critic(), groups_of(names)
    values, baselines = one(shown(one, groups)[0])
    random, moved, expected, before = np.random.default_rng(3), [], [], 0
    for group in groups:
        ours = sum(token.name == "Own" for token in group)
        order, others = random.permutation(ours), ours + random.permutation(len(group) - ours)
        moved.append([group[at] for at in (*order, *others)])
        expected += [before + at for at in order]
        before += ours
    moved_values, moved_baselines = one(shown(one, moved, seed=1)[0])
    torch.testing.assert_close(moved_values, values, **CLOSE)
    torch.testing.assert_close(moved_baselines, baselines[expected], **CLOSE)


@ALL
@pytest.mark.parametrize("more", [1, 4])
def test_room_for_members_that_are_absent_changes_nothing(names, more):
    one, groups = critic(), groups_of(names)
    narrow = shown(one, groups)[0]
    wide = shown(one, groups, most=max(map(len, groups)) + more)[0]
    assert wide.places is not None
    for got, expected in zip(one(wide), one(narrow), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_a_group_is_judged_alike_alone_and_among_others():
    one, groups = critic(), groups_of(MIXED)
    values, baselines = one(shown(one, groups)[0])
    alone = [one(shown(one, [group])[0]) for group in groups if group[0].name == "Own"]
    torch.testing.assert_close(torch.cat([baselines for _, baselines in alone]), baselines, rtol=1e-6, atol=1e-6)
    ours = [at for at, group in enumerate(groups) if group[0].name == "Own"]
    torch.testing.assert_close(torch.cat([value for value, _ in alone]), values[ours], rtol=1e-6, atol=1e-6)


def test_a_moment_at_which_nobody_is_there_is_finite_and_changes_no_other():
    one, groups = critic(), groups_of(PADDED)
    timesteps, _, decided = shown(one, groups)
    empty, _, _ = shown(one, [*groups[:2], [], *groups[2:]], decided=[(at + (at > 1), who) for at, who in decided])
    values, baselines = one(empty)
    expected_values, expected_baselines = one(timesteps)
    kept = [0, 1, 3, 4, 5, 6]
    torch.testing.assert_close(values[kept], expected_values, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(baselines, expected_baselines, rtol=1e-6, atol=1e-6)
    assert values.isfinite().all()
    (values.sum() + baselines.sum()).backward()
    assert all(parameter.grad.isfinite().all() for parameter in one.parameters() if parameter.grad is not None)


# ---------------------------------------------------------------- one more name


def test_growing_by_a_name_leaves_groups_without_it_as_they_were():
    one = critic(known=("Own", "Mate"))
    groups = groups_of(MIXED)
    before, state = one(shown(one, groups)[0]), {name: part.clone() for name, part in one.state_dict().items()}
    one.add("Third", SPECS["Third"], seeded(3))
    assert one.names == ["Own", "Mate", "Third"]
    for name, part in state.items():
        assert torch.equal(one.state_dict()[name], part)
    for got, expected in zip(one(shown(one, groups)[0]), before, strict=True):
        assert torch.equal(got, expected)
    groups = groups_of(SHAPES["three_names"])
    timesteps, _, decided = shown(one, groups)
    for got, expected in zip(one(timesteps), twin(one, groups, decided), strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


def test_ours_is_normalised_by_the_actor_and_mates_here_and_only_we_see_what_we_did_before():
    settings = NetworkSettings(hidden_units=UNITS, vis_encode_type="match3", normalize=True, previous_action=True)
    one = GroupCritic("Own", SPECS, settings, SIGNALS, seeded())
    assert one.encoder("Own").normalizer is None
    assert one.encoder("Mate").normalizer is not None
    assert (one.encoder("Own").previous, one.encoder("Mate").previous) == (5, 0)
    assert one.encoder("Third") is one.encoders[2]


# ---------------------------------------------------------------- memory


@torch.no_grad()
def test_a_critic_that_remembers_goes_through_moments_and_decisions_in_their_order():
    """Values by groups' sequences, baselines by members' ones, against cells step by step."""
    one, groups = critic(memory=MemorySettings(memory_size=MEMORY, sequence_length=4)), groups_of(MIXED)
    asked = [(0, 0), (3, 1), (4, 0), (0, 1), (1, 0), (3, 2)]
    timesteps, _, _ = shown(one, groups, decided=asked)
    lengths = [2, 3, 3, 1, 2]
    memory = torch.randn(5, MEMORY, generator=seeded(5))
    remembered = GroupRecurrentState(Layout(np.array(lengths)), memory, 2)
    values, baselines, after = one.remember(timesteps, remembered)
    cells = [(at, one.value, hidden(one, encoded(one, group)), len(group)) for at, group in enumerate(groups)]
    cells += [
        (len(groups) + at, one.baseline, hidden(one, encoded(one, groups[group], member)), len(groups[group]))
        for at, (group, member) in enumerate(asked)
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
