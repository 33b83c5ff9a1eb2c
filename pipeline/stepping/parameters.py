"""Simulators receive the environment parameters as numbers or seeded samplers, and their changes."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from sparring.pipeline.messages.simulator import Sampler
from sparring.pipeline.messages.state import LessonsState

Value = float | Sampler
"""A number or a sampler; the sampler has the seed of the first simulator, or -1 where stepping must choose it."""


Update = tuple[dict[str, float], dict[str, Sampler]]
"""Some parameters as `Act` and `Reset` carry them: numbers by name, first samples among them, and samplers by name."""


class RunParameters:
    """RunParameters hold the environment parameters of a run and their present lessons.

    Args:
        lessons: by parameter name, its value in each lesson; one value where it has no curriculum.
        seed: of the run; each sampler in each simulator gets its own seed from it.

    Attributes:
        has_curricula: the present lessons are known from coordination only.
        state: present lessons: the first ones until coordination has published others.
        known: the present values are known.
    """

    def __init__(self, lessons: Mapping[str, Sequence[Value]], seed: int = 0) -> None:
        self._lessons = {name: tuple(values) for name, values in lessons.items()}
        self._seed = seed
        self.has_curricula = any(len(values) > 1 for values in self._lessons.values())
        self.state = LessonsState(serial=0, numbers={}, since={})
        self.known = not self.has_curricula

    @property
    def serial(self) -> int:
        """Returns the serial of the present lessons; 0 before the first change."""
        return self.state.serial

    def adopt(self, state: LessonsState) -> bool:
        """Changes to other lessons; returns whether they are new."""
        if self.known and state.serial <= self.serial:
            return False
        self.state, self.known = state, True
        return True

    def resets(self, serial: int) -> bool:
        """Returns whether a simulator that has the lessons of `serial` must begin new episodes."""
        return self.state.resets > serial

    def of(self, simulator: int, since: int = -1) -> Update:
        """Returns the parameters of a simulator, for a Reset or Act.

        Args:
            simulator: number of the simulator.
            since: leaves out parameters whose lessons began with this serial or an earlier one; -1 for none.
        """
        numbers: dict[str, float] = {}
        samplers: dict[str, Sampler] = {}
        for name, values in self._lessons.items():
            if self.state.since.get(name, 0) <= since:
                continue
            lesson = min(self.state.numbers.get(name, 0), len(values) - 1)
            value = values[lesson]
            if isinstance(value, Sampler):
                own = (value.seed + simulator) % 2**31 if value.seed >= 0 else self._seed_of(name, lesson, simulator)
                samplers[name] = replace(value, seed=own)
                value = next(samplers[name].samples())
            numbers[name] = value
        return numbers, samplers

    def _seed_of(self, name: str, lesson: int, simulator: int) -> int:
        own = [self._seed, simulator, zlib.crc32(name.encode()), lesson]
        return int(np.random.SeedSequence(own).generate_state(1)[0] >> 1)  # below 2^31, to fit an int32
