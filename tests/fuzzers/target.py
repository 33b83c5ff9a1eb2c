"""What a fuzz target is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random


class Violation(Exception):
    """A promise that an input broke without raising anything by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A reader under test.

    Attributes:
        unit: what one input is.
        seeds: valid inputs, to begin with.
        one_input: feeds one; raises what is not allowed to happen, and nothing else.
        mutate: makes another input of one, with a random source and the other inputs of the corpus.
    """

    unit: str
    seeds: Callable[[], list[bytes]]
    one_input: Callable[[bytes], None]
    mutate: Callable[[bytes, Random, Sequence[bytes]], bytes]
