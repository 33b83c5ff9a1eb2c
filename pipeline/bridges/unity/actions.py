"""Reads the action spec of a Unity behavior, and writes its actions.

Before version 1.3 of the communication a behavior was continuous or discrete, and both kinds of actions were floats in
one list. A player of 1.3 or later always sends an action spec, an older one never does: so the spec shows the version.

The actions of all agents of one behavior are one array of bytes with a row for each agent: rows have the same length,
and differ in their numbers only.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.bridges.unity import UnreadableData
from sparring.pipeline.bridges.unity.messages import Proto
from sparring.pipeline.specs import ActionSpec

CONTINUOUS: Final = 1
"""A deprecated space type; 0 is discrete."""

_OLD, _CONTINUOUS, _DISCRETE = 1, 6, 7  # fields of AgentActionProto
_VALUE: Final = 1  # field of ListAgentActionProto


def action_spec(brain: Proto) -> ActionSpec:
    """Returns the actions of a behavior, from its BrainParametersProto of any version.

    Raises:
        UnreadableData: the parameters contradict each other.
        SpecError: the behavior has no actions, or an action without choices.
    """
    new = brain.action_spec
    branches = tuple(new.discrete_branch_sizes)
    if new.num_discrete_actions != len(branches):
        raise UnreadableData(f"{new.num_discrete_actions} discrete actions with branches {branches}")
    if new.num_continuous_actions or branches:
        return ActionSpec(continuous=new.num_continuous_actions, discrete=branches)
    sizes = tuple(brain.vector_action_size_deprecated)
    if brain.vector_action_space_type_deprecated != CONTINUOUS:
        return ActionSpec(discrete=sizes)
    if len(sizes) != 1:
        raise UnreadableData(f"continuous actions of sizes {sizes}")
    return ActionSpec(continuous=sizes[0])


class ActionWriter:
    """Writes the actions of one behavior.

    Args:
        spec: actions of the behavior.
        old: the player speaks a version before 1.3.
    """

    def __init__(self, spec: ActionSpec, *, old: bool) -> None:
        self._old = old
        self._floats = spec.continuous + len(spec.discrete) if old else spec.continuous
        widths = () if old else tuple(_width(branch) for branch in spec.discrete)
        places = [(branch, byte, width) for branch, width in enumerate(widths) for byte in range(width)]
        self._branches = np.array([branch for branch, _, _ in places], np.intp)
        self._shifts = np.array([7 * byte for _, byte, _ in places], np.int32)
        self._continuations = np.array([0x80 if byte < width - 1 else 0 for _, byte, width in places], np.int32)
        self._wide = len(places) > len(widths)
        before = block(_OLD if old else _CONTINUOUS, 4 * self._floats) if self._floats else b""
        between = block(_DISCRETE, len(places)) if places else b""
        size = len(before) + 4 * self._floats + len(between) + len(places)
        before = block(_VALUE, size) + before
        row = before + bytes(4 * self._floats) + between + bytes(len(places))
        self._row = np.frombuffer(row, np.uint8)
        self._reals = slice(len(before), len(before) + 4 * self._floats)
        self._choices = slice(len(row) - len(places), len(row))

    def write(self, continuous: NDArray[np.float32], discrete: NDArray[np.int32]) -> bytes:
        """Returns a ListAgentActionProto of n agents.

        Args:
            continuous: [n, continuous actions] in [-1, 1].
            discrete: [n, branches] chosen index of each branch.
        """
        rows = np.empty((len(continuous), len(self._row)), np.uint8)
        rows[:] = self._row
        if self._floats:
            reals = np.concatenate([continuous, discrete], axis=1) if self._old else continuous
            rows[:, self._reals] = np.ascontiguousarray(reals, "<f4").view(np.uint8)
        if self._wide:
            rows[:, self._choices] = discrete[:, self._branches] >> self._shifts & 0x7F | self._continuations
        elif self._branches.size:
            rows[:, self._choices] = discrete
        return rows.tobytes()


def _width(branch: int) -> int:
    """Returns the number of bytes for any choice of a branch; small ones are padded, which the wire format allows."""
    return max(1, -(-(branch - 1).bit_length() // 7))


def block(number: int, size: int) -> bytes:
    """Returns the head of a field of `size` bytes in protobuf's wire format: a message, or packed numbers."""
    return _varint(number << 3 | 2) + _varint(size)


def _varint(value: int) -> bytes:
    """Encodes a number from 0 with seven bits per byte, the lowest first."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
