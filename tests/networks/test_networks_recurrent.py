"""The recurrent body compared with a textbook LSTM."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.networks.device import to_arrays
from sparring.pipeline.networks.layers import FORGET_BIAS, Layout, Recurrent
from sparring.pipeline.networks.perceptron import ConditionedLayers, Perceptron
from sparring.pipeline.networks.settings import MemorySettings, NetworkSettings

FEATURES, UNITS, MEMORY, OUTPUTS = 3, 4, 6, 2
SETTINGS = NetworkSettings(hidden_units=UNITS, memory=MemorySettings(memory_size=MEMORY))
LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=6)
TRUNKS = pytest.mark.parametrize("kind", ["perceptron", "conditioned"])


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def recurrent(kind="perceptron", seed=0):
    """Returns a small body in float64 with random parameters, so that no zero hides an error."""
    trunk = (
        Perceptron([FEATURES, 5], [1.0] * UNITS, SETTINGS, seeded())
        if kind == "perceptron"
        else ConditionedLayers([FEATURES - 1, 5, UNITS], 1, None, SETTINGS, seeded())
    )
    body = Recurrent(trunk, [1.0] * OUTPUTS, SETTINGS, seeded())
    random = seeded(seed)
    with torch.no_grad():
        for parameter in body.parameters():
            parameter.normal_(0, 0.5, generator=random)
    return body.double()


def random_sequences(lengths, seed=0):
    """Returns random rows [B, F] and memories [Q, M] of sequences."""
    random = seeded(seed)
    rows = torch.randn(sum(lengths), FEATURES, generator=random, dtype=torch.float64)
    return rows, torch.randn(len(lengths), MEMORY, generator=random, dtype=torch.float64)


def layout(lengths):
    return Layout(np.array(lengths, np.int32))


# ---------------------------------------------------------------- the textbook


def sigmoid(number):
    return 1 / (1 + math.exp(-number))


def slow_cell(weights, seen, hidden, cell):
    """Computes one row of one sequence, gate by gate: i, f and o are sigmoids, g is a hyperbolic tangent."""
    size = len(hidden)

    def summed(gate, unit):
        line = gate * size + unit
        total = weights["bias_ih_l0"][line] + weights["bias_hh_l0"][line]
        total += sum(w * x for w, x in zip(weights["weight_ih_l0"][line], seen, strict=True))
        return total + sum(w * h for w, h in zip(weights["weight_hh_l0"][line], hidden, strict=True))

    after_hidden, after_cell = [], []
    for unit in range(size):
        i, f, o = (sigmoid(summed(gate, unit)) for gate in (0, 1, 3))
        g = math.tanh(summed(2, unit))
        after_cell.append(f * cell[unit] + i * g)
        after_hidden.append(o * math.tanh(after_cell[-1]))
    return after_hidden, after_cell


def slow_trunk(trunk, row):
    """Returns the sums of the last hidden layer, computed by torch's own layers."""
    if isinstance(trunk, ConditionedLayers):  # it has its own slow twin
        return trunk(row.unsqueeze(0))[0]
    for layer in trunk.layers[:-1]:
        row = torch.nn.functional.silu(torch.nn.functional.linear(row, layer.weight, layer.bias))
    return torch.nn.functional.linear(row, trunk.layers[-1].weight, trunk.layers[-1].bias)


@torch.no_grad()
def slow_run(body, rows, lengths, memories):
    """Returns outputs and memories of `Recurrent.run`, row by row."""
    weights = {name: array.tolist() for name, array in to_arrays(body.lstm).items()}
    head_weight, head_bias = body.head.weight.tolist(), body.head.bias.tolist()
    outputs, after, row = [], [], 0
    for length, memory in zip(lengths, memories.tolist(), strict=True):
        hidden, cell = memory[: MEMORY // 2], memory[MEMORY // 2 :]
        for _ in range(length):
            sums = slow_trunk(body.trunk, rows[row]).tolist()
            hidden, cell = slow_cell(weights, [x * sigmoid(x) for x in sums], hidden, cell)
            outputs.append(
                [
                    bias + sum(w * h for w, h in zip(line, hidden, strict=True))
                    for line, bias in zip(head_weight, head_bias, strict=True)
                ]
            )
            row += 1
        after.append(hidden + cell)
    return torch.tensor(outputs, dtype=torch.float64), torch.tensor(after, dtype=torch.float64)


@TRUNKS
@given(lengths=LENGTHS, seed=st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_outputs_and_memories_equal_those_of_the_textbook(kind, lengths, seed):
    body, (rows, memories) = recurrent(kind, seed), random_sequences(lengths, seed)
    expected = slow_run(body, rows, lengths, memories)
    for got, slow in zip(body(rows, layout(lengths), memories), expected, strict=True):
        torch.testing.assert_close(got, slow)


@TRUNKS
def test_gradients_of_features_and_memories_equal_differences(kind):
    body, lengths = recurrent(kind), (2, 4, 1)
    rows, memories = (part.requires_grad_() for part in random_sequences(lengths, 1))
    assert torch.autograd.gradcheck(lambda *inputs: body(inputs[0], layout(lengths), inputs[1]), (rows, memories))


@TRUNKS
def test_gradients_of_parameters_equal_differences(kind):
    """The loss weights outputs and last memories; a perceptron computes its gradients without autograd."""
    body, lengths, step = recurrent(kind), (3, 1, 4), 1e-6
    rows, memories = random_sequences(lengths, 2)
    shapes = [part.shape for part in body(rows, layout(lengths), memories)]
    weighing = [torch.randn(shape, generator=seeded(4), dtype=torch.float64) for shape in shapes]

    def loss():
        found = body(rows, layout(lengths), memories)
        return sum((part * weights).sum() for part, weights in zip(found, weighing, strict=True))

    loss().backward()
    for name, parameter in body.named_parameters():
        values, slopes = parameter.data.view(-1), []
        for place, value in enumerate(values.tolist()):
            sides = []
            for moved in (value + step, value - step):
                values[place] = moved
                with torch.no_grad():
                    sides.append(loss().item())
            values[place] = value
            slopes.append((sides[0] - sides[1]) / (2 * step))
        expected = torch.tensor(slopes, dtype=torch.float64).view_as(parameter)
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-7, msg=name)


def test_new_memory_has_forget_biases_of_1():
    """Biases of forget gates are 1, all others 0; weights are scaled by their number of inputs."""
    settings = NetworkSettings(hidden_units=100, memory=MemorySettings(memory_size=128))
    body = Recurrent(Perceptron([3], [1.0] * 100, settings, seeded()), [1.0, 0.1], settings, seeded())
    bias = body.lstm.bias_ih_l0 + body.lstm.bias_hh_l0
    assert bias.tolist() == [0.0] * 64 + [FORGET_BIAS] * 64 + [0.0] * 128
    assert body.lstm.weight_ih_l0.std().item() == pytest.approx(1 / 10, rel=0.03)
    assert body.lstm.weight_hh_l0.std().item() == pytest.approx(1 / 8, rel=0.03)
    first, second = body.head.weight.detach().std(1).tolist()
    assert first == pytest.approx(1 / 8, rel=0.3)
    assert second == pytest.approx(0.1 / 8, rel=0.3)


# ---------------------------------------------------------------- packing


@given(lengths=LENGTHS)
@settings(max_examples=30, deadline=None)
def test_layout_orders_rows_by_time_and_then_by_length(lengths):
    found = layout(lengths)
    starts = np.cumsum(lengths) - lengths
    longest_first = sorted(range(len(lengths)), key=lambda sequence: -lengths[sequence])
    expected = [
        int(starts[sequence]) + time
        for time in range(max(lengths))
        for sequence in longest_first
        if time < lengths[sequence]
    ]
    assert found.order.tolist() == expected
    assert sorted(expected) == list(range(sum(lengths)))
    assert found.order[found.inverse].tolist() == list(range(sum(lengths)))
    assert found.sizes.tolist() == [sum(time < length for length in lengths) for time in range(max(lengths))]
    assert found.by_length.tolist() == longest_first
    assert found.by_length[found.by_number].tolist() == list(range(len(lengths)))


@TRUNKS
@given(lengths=LENGTHS, seed=st.integers(0, 10**6), data=st.data())
@settings(max_examples=30, deadline=None)
def test_other_sequences_of_a_batch_change_nothing(kind, lengths, seed, data):
    """Outputs, memories and gradients of some sequences do not depend on the others."""
    body, (rows, memories) = recurrent(kind, seed), random_sequences(lengths, seed)
    rows.requires_grad_()
    some = data.draw(st.lists(st.sampled_from(range(len(lengths))), min_size=1, unique=True))
    starts = np.cumsum(lengths) - lengths
    places = torch.tensor([int(starts[one]) + row for one in some for row in range(lengths[one])])
    outputs, after = body(rows, layout(lengths), memories)
    alone = rows.detach()[places].requires_grad_()
    got, got_after = body(alone, layout([lengths[one] for one in some]), memories[some])
    torch.testing.assert_close(got, outputs[places])
    torch.testing.assert_close(got_after, after[some])
    outputs[places].square().sum().backward()
    got.square().sum().backward()
    torch.testing.assert_close(alone.grad, rows.grad[places])
    others = torch.ones(len(rows), dtype=torch.bool).index_fill(0, places, False)
    assert not rows.grad[others].any(), "no sequence has a part in another's outputs"


@TRUNKS
@given(lengths=st.lists(st.integers(2, 7), min_size=1, max_size=5), seed=st.integers(0, 10**6), data=st.data())
@settings(max_examples=30, deadline=None)
def test_sequence_in_two_parts_gives_the_same_if_its_memory_continues(kind, lengths, seed, data):
    body, (rows, memories) = recurrent(kind, seed), random_sequences(lengths, seed)
    heads = [data.draw(st.integers(1, length - 1)) for length in lengths]
    starts = np.cumsum(lengths) - lengths
    parts = zip(starts, heads, lengths, strict=True)
    front = torch.tensor([int(start) + row for start, head, _ in parts for row in range(head)])
    parts = zip(starts, heads, lengths, strict=True)
    back = torch.tensor([int(start) + row for start, head, length in parts for row in range(head, length)])
    outputs, after = body(rows, layout(lengths), memories)
    first, between = body(rows[front], layout(heads), memories)
    tails = [length - head for head, length in zip(heads, lengths, strict=True)]
    second, end = body(rows[back], layout(tails), between)
    torch.testing.assert_close(first, outputs[front])
    torch.testing.assert_close(second, outputs[back])
    torch.testing.assert_close(end, after)


@TRUNKS
@pytest.mark.parametrize("outputs", [None, 1])
def test_frozen_body_step_by_step_equals_a_run(kind, outputs):
    body, agents, steps = recurrent(kind), 3, 5
    rows, memory = random_sequences([steps] * agents, 3)
    expected, after = body(rows, layout([steps] * agents), memory)
    frozen = body.frozen(outputs)
    with torch.no_grad():
        for parameter in body.parameters():
            parameter.add_(1.0)  # the copy does not change
    for step in range(steps):
        places = torch.arange(agents) * steps + step
        got, memory = frozen(rows[places], memory)
        torch.testing.assert_close(got, expected[places, :outputs].detach())
    torch.testing.assert_close(memory, after.detach())
    assert not memory.requires_grad
