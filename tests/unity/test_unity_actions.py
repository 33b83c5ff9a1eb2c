"""A player receives each action in the field where it belongs and in the order of its agents."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tests.unity.player_writer as writer
from sparring.pipeline.bridges.unity.actions import ActionWriter, action_spec
from sparring.pipeline.bridges.unity.messages import parsed
from sparring.pipeline.specs import ActionSpec

BRANCHES = st.lists(st.sampled_from([1, 2, 127, 128, 129, 16384, 16385, 2**21 + 1]), max_size=4)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 9), continuous=st.integers(0, 40), branches=BRANCHES, old=st.booleans(), seed=st.integers(0, 999)
)
@example(n=2, continuous=0, branches=[127], old=False, seed=1)
def test_any_actions_are_written_completely(n: int, continuous: int, branches: list[int], old: bool, seed: int) -> None:
    """This includes choices that need more than one byte, and messages whose length needs two."""
    if not continuous and not branches:
        continuous = 1
    if old:  # one kind of action only; floats can hold each choice
        continuous, branches = (0, branches) if branches else (continuous, [])
    rng = np.random.default_rng(seed)
    reals = rng.uniform(-1, 1, (n, continuous)).astype(np.float32)
    choices = rng.integers(0, branches, (n, len(branches)), np.int32)
    choices[0] = np.array(branches, np.int32) - 1
    spec = ActionSpec(continuous=continuous, discrete=tuple(branches))
    content = ActionWriter(spec, old=old).write(reals, choices)
    received = writer.acts(content)
    assert len(received) == n
    for row, one in enumerate(received):
        if old:
            assert (one.continuous, one.discrete) == ([], [])
            assert one.old == [*reals[row].tolist(), *choices[row].tolist()]
        else:
            assert one.old == []
            assert (one.continuous, one.discrete) == (reals[row].tolist(), choices[row].tolist())
    again = parsed("UnityRLInputProto.ListAgentActionProto", content, "actions")  # protobuf reads the same
    if not old:
        assert [list(one.discrete_actions) for one in again.value] == choices.tolist()
        assert b"".join(one.continuous_actions for one in again.value) == reals.tobytes()


def test_the_bytes_of_hybrid_actions_are_those_of_protobuf() -> None:
    content = ActionWriter(ActionSpec(continuous=1, discrete=(3, 127)), old=False).write(
        np.array([[0.5], [-1.0]], np.float32), np.array([[2, 126], [0, 5]], np.int32)
    )
    assert content == bytes.fromhex(
        "0a0a"  # 1 value, an agent of 10 bytes
        "32040000003f"  # . 6 continuous_actions: [0.5]
        "3a02027e"  # . 7 discrete_actions: [2, 126]
        "0a0a"
        "3204000080bf"
        "3a020005"
    )


def test_columns_of_any_layout_are_written() -> None:
    """Stages pass slices and transposed arrays."""
    made = ActionWriter(ActionSpec(continuous=2), old=False)
    whole = np.arange(12, dtype=np.float32).reshape(2, 6) / 12
    view = whole.T[::2, :]
    nothing = np.zeros((3, 0), np.int32)
    assert [one.continuous for one in writer.acts(made.write(view, nothing))] == view.tolist()


@pytest.mark.parametrize(
    ("brain", "spec"),
    [
        (writer.brain(continuous=2, branches=[3, 2]), ActionSpec(continuous=2, discrete=(3, 2))),
        (writer.old_brain("B", [2], continuous=True), ActionSpec(continuous=2)),
        (writer.old_brain("B", [3, 2], continuous=False), ActionSpec(discrete=(3, 2))),
        # a player of version 1.3 may send the deprecated sizes beside the spec
        (writer.old_brain("B", [7], continuous=True) + writer.brain("B", 2), ActionSpec(continuous=2)),
    ],
)
def test_actions_of_all_versions_are_understood(brain: bytes, spec: ActionSpec) -> None:
    assert action_spec(parsed("BrainParametersProto", brain, "a behavior")) == spec
