"""Translates Gymnasium spaces to specs of actions, their columns to values, and masks of choices, for both bridges.

Discrete, MultiDiscrete and MultiBinary are branches; a Box with finite bounds is continuous, rescaled from [-1, 1].
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.bridges.spaces import MASK, NUMERIC, Value, named
from sparring.pipeline.errors import NOTICE
from sparring.pipeline.specs import ActionSpec, Array, ObservationSpec, SpecError

if TYPE_CHECKING:
    from gymnasium import Space, spaces

Convert = Callable[[Array, Array], Array]
"""Converts continuous [n, continuous] and discrete [n, branches] actions of n agents to values of a space."""

_MASKLIKE: Final = re.compile("mask|legal|valid|avail|allowed", re.IGNORECASE)
"""What names of masks have in other libraries."""


class Actions:
    """Converts columns of actions to values of one space.

    Args:
        space: a Gymnasium space.

    Raises:
        SpecError: the space is not supported.
    """

    def __init__(self, space: Space[Value]) -> None:
        from gymnasium import spaces

        self.spec, self._values = _action(space)
        self._plain = isinstance(space, spaces.Discrete)
        self._is_masked = False
        self._is_quiet = False

    def batch(self, continuous: Array, discrete: Array) -> Array:
        """Returns values [n, *space.shape] for continuous [n, continuous] and discrete [n, branches]."""
        return self._values(continuous, discrete)

    def rows(self, continuous: Array, discrete: Array) -> list[Value]:
        """Returns the same values as a list for n agents; Discrete as plain int, which environments step fastest."""
        values = self._values(continuous, discrete)
        return values.tolist() if self._plain else list(values)

    def forbidden(self, masks: Sequence[Value], whose: Callable[[int], str] = lambda _: "") -> NDArray[np.bool_] | None:
        """Returns `forbidden_choices`; notes on standard error once where none has a mask, and some had one before."""
        found = forbidden_choices(masks, self.spec, whose)
        if found is None and self._is_masked and not self._is_quiet:
            self._is_quiet = True
            sys.stderr.write(
                f"{NOTICE}info[{MASK!r}] is missing after some steps; without it all choices are allowed\n"
            )
        self._is_masked = found is not None
        return found


def forbidden_choices(
    masks: Sequence[Value], spec: ActionSpec, whose: Callable[[int], str] = lambda _: ""
) -> NDArray[np.bool_] | None:
    """Returns masks [n, choices] with True = forbidden from masks of agents with 1 = legal.

    Args:
        masks: for each agent, the choices of all branches side by side (or one sequence per branch), or None.
        spec: action spec of the agents.
        whose: says in messages whose mask that of a row is, as " of area 3".

    Raises:
        SpecError: a mask has another size than the action spec, other values than 0 and 1, or leaves no choice.
    """
    if not spec.discrete or all(mask is None for mask in masks):
        return None
    legal = np.ones((len(masks), spec.mask_size))
    for number, (row, mask) in enumerate(zip(legal, masks, strict=True)):
        if mask is None:
            continue
        flat = np.concatenate([np.ravel(part) for part in mask]) if isinstance(mask, (tuple, list)) else np.ravel(mask)
        if flat.size != row.size:
            got = f"an action mask of {flat.size} entries{whose(number)}"
            expected = f"{row.size} for the branches {spec.discrete}"
            raise SpecError(got=got, expected=expected, remedy="correct the mask in the environment")
        row[:] = flat if flat.dtype.kind in NUMERIC else np.nan
    result: NDArray[np.bool_] = legal == 0
    if (wrong := ~result & (legal != 1)).any():
        raise SpecError(
            got=f"an action mask with {legal[wrong][0]:g}{whose(int(wrong.any(1).argmax()))}",
            expected="1 for each choice that is allowed, and 0 for each other one",
            remedy="correct the mask in the environment",
        )
    sizes = np.array(spec.discrete, np.int64)
    begins = np.cumsum(sizes) - sizes
    if (stuck := np.logical_and.reduceat(result, begins, axis=1).any(1)).any():
        raise SpecError(
            got=f"an action mask that forbids every choice of a branch{whose(int(stuck.argmax()))}",
            expected=f"a legal choice, marked with 1, in each of the branches {spec.discrete}",
            remedy="correct the mask: 1 is legal and 0 is not; an agent that can do nothing has ended",
        )
    return result


def note_unread_masks(
    spec: ActionSpec, observed: Sequence[ObservationSpec], info: Mapping[str, Value], place: str = ""
) -> None:
    """Notes on standard error what may be meant as masks of actions and is not read as such.

    Args:
        spec: of the actions.
        observed: of the observations.
        info: of one agent.
        place: where a mask may stand in an observation; "" for nowhere.
    """
    if not spec.discrete:
        if MASK in info:
            sys.stderr.write(f"{NOTICE}info[{MASK!r}] is not read, because all actions are continuous\n")
        return
    right = f"info[{MASK!r}]" + (f", or {MASK!r} {place}" if place else "")
    for key, value in info.items():
        if _MASKLIKE.search(str(key)) and str(key).lstrip("_") != MASK and np.ndim(value):
            sys.stderr.write(f"{NOTICE}info[{key!r}] is not read; a mask of actions is {right}\n")
    for one in observed:
        if _MASKLIKE.search(one.name.rpartition("/")[2]) and one.shape == (spec.mask_size,):
            sys.stderr.write(f"{NOTICE}{one.name!r} is read as an observation; a mask of actions is {right}\n")


def _action(space: Space[Value]) -> tuple[ActionSpec, Convert]:
    from gymnasium import spaces

    match space:
        case spaces.Discrete():
            start = int(space.start)
            return ActionSpec(discrete=(int(space.n),)), lambda _, discrete: discrete[:, 0].astype(np.int64) + start
        case spaces.MultiDiscrete():
            return _branches(space, tuple(space.nvec.ravel().tolist()), np.ravel(space.start))
        case spaces.MultiBinary():
            return _branches(space, (2,) * math.prod(space.shape), np.zeros(1, np.int64))
        case spaces.Box() if space.dtype.kind == "f" and np.isfinite([*space.low.flat, *space.high.flat]).all():
            return _rescaled(space)
    if isinstance(space, spaces.Box) and space.dtype.kind == "f":
        remedy = f"give it bounds, such as Box(-1, 1, {space.shape}), and scale actions in the environment"
    elif isinstance(space, spaces.Box):
        remedy = "use MultiDiscrete for whole numbers, or a Box of floats"
    else:
        remedy = "join its parts in one of these, and take an action apart in step()"
    raise SpecError(
        got=f"the action space {named(space)}",
        expected="Discrete, MultiDiscrete, MultiBinary or a Box of floats with finite bounds",
        remedy=remedy,
    )


def _branches(space: Space[Value], branches: tuple[int, ...], start: Array) -> tuple[ActionSpec, Convert]:
    shape = space.shape or ()

    def values(_: Array, discrete: Array) -> Array:
        return (discrete + start).astype(space.dtype).reshape(-1, *shape)

    return ActionSpec(discrete=branches), values


def _rescaled(space: spaces.Box) -> tuple[ActionSpec, Convert]:
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    middle, half = (low + high) / 2, (high - low) / 2

    def values(continuous: Array, discrete: Array) -> Array:
        scaled = middle + np.clip(continuous, -1, 1).reshape(-1, *space.shape) * half
        return np.clip(scaled, low, high).astype(space.dtype)

    return ActionSpec(continuous=math.prod(space.shape)), values
