"""The definition of a fuzz target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random


class Violation(Exception):
    """A rule that an input broke without raising an exception."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A reader under test.

    Attributes:
        unit: what one input is, for messages.
        seeds: returns valid inputs to begin with.
        one_input: feeds one input; raises only for a broken rule.
        mutate: changes an input, with a random source and the other inputs of the corpus.
    """

    unit: str
    seeds: Callable[[], list[bytes]]
    one_input: Callable[[bytes], None]
    mutate: Callable[[bytes, Random, Sequence[bytes]], bytes]
