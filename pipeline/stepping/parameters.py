"""What simulators are told of the environment parameters: numbers, samplers with seeds, and when they change."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sparring.pipeline.messages.samplers import samples
from sparring.pipeline.messages.simulator import Sampler
from sparring.pipeline.messages.state import LessonsState

Value = float | Sampler
"""A number, or a sampler: with the seed of the first simulator, or with -1 where that is still to be given."""


@dataclass(frozen=True, slots=True)
class ParameterUpdate:
    """Some parameters, as `Act` and `Reset` carry them.

    Attributes:
        parameters: a number for each; of a sampled one its first draw.
        samplers: by name, of those that are sampled.
    """

    parameters: dict[str, float] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)


class RunParameters:
    """The environment parameters of a run, and the lessons that they are in.

    Args:
        lessons: by parameter name, its value in each lesson; one value where there is no curriculum.
        seed: of the run; each sampler in each simulator gets one of its own from it.

    Attributes:
        taught: there are curricula: which lessons hold is known from coordination only.
        state: what coordination has said of the lessons; None before it has.
    """

    def __init__(self, lessons: Mapping[str, Sequence[Value]], seed: int = 0) -> None:
        self._lessons = {name: tuple(values) for name, values in lessons.items()}
        self._seed = seed
        self.taught = any(len(values) > 1 for values in self._lessons.values())
        self.state: LessonsState | None = None

    @property
    def known(self) -> bool:
        """Whether the present values are known."""
        return self.state is not None or not self.taught

    @property
    def serial(self) -> int:
        """Of the present lessons; 0 before the first change."""
        return 0 if self.state is None else self.state.serial

    def adopt(self, state: LessonsState) -> bool:
        """Goes over to other lessons; returns whether they were not known."""
        if self.state is not None and state.serial <= self.state.serial:
            return False
        self.state = state
        return True

    def resets(self, serial: int) -> bool:
        """Whether a simulator that has the lessons of `serial` must begin new episodes."""
        return self.state is not None and self.state.resets > serial

    def all(self, simulator: int) -> ParameterUpdate:
        """All parameters, for a Reset.

        Args:
            simulator: its number.
        """
        return self._told(self._lessons, simulator)

    def since(self, serial: int, simulator: int) -> ParameterUpdate:
        """Parameters whose lessons began after those of `serial`, for an Act."""
        since = {} if self.state is None else self.state.since
        return self._told([name for name in self._lessons if since.get(name, 0) > serial], simulator)

    def _told(self, names: Iterable[str], simulator: int) -> ParameterUpdate:
        told = ParameterUpdate()
        for name in names:
            values = self._lessons[name]
            number = 0 if self.state is None else min(self.state.numbers.get(name, 0), len(values) - 1)
            value = values[number]
            if isinstance(value, Sampler):
                own = (value.seed + simulator) % 2**31 if value.seed >= 0 else self._seed_of(name, number, simulator)
                sampler = replace(value, seed=own)
                told.samplers[name] = sampler
                value = next(samples(sampler))
            told.parameters[name] = value
        return told

    def _seed_of(self, name: str, lesson: int, simulator: int) -> int:
        own = [self._seed, simulator, zlib.crc32(name.encode()), lesson]
        return int(np.random.SeedSequence(own).generate_state(1)[0] >> 1)  # below 2^31: for an int32
