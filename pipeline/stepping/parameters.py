"""Simulators receive the environment parameters as numbers or seeded samplers, and their changes."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sparring.pipeline.messages.simulator import Sampler
from sparring.pipeline.messages.state import LessonsState

Value = float | Sampler
"""A number or a sampler; the sampler has the seed of the first simulator, or -1 where stepping must choose it."""


@dataclass(frozen=True, slots=True)
class ParameterUpdate:
    """A ParameterUpdate holds some parameters, as `Act` and `Reset` carry them.

    Attributes:
        parameters: number by name; for a sampled parameter its first sample.
        samplers: by name of the sampled parameters.
    """

    parameters: dict[str, float] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)


class RunParameters:
    """RunParameters hold the environment parameters of a run and their present lessons.

    Args:
        lessons: by parameter name, its value in each lesson; one value where it has no curriculum.
        seed: of the run; each sampler in each simulator gets its own seed from it.

    Attributes:
        has_curricula: the present lessons are known from coordination only.
        state: lessons that coordination last published; None before.
    """

    def __init__(self, lessons: Mapping[str, Sequence[Value]], seed: int = 0) -> None:
        self._lessons = {name: tuple(values) for name, values in lessons.items()}
        self._seed = seed
        self.has_curricula = any(len(values) > 1 for values in self._lessons.values())
        self.state: LessonsState | None = None

    @property
    def known(self) -> bool:
        """Returns whether the present values are known."""
        return self.state is not None or not self.has_curricula

    @property
    def serial(self) -> int:
        """Returns the serial of the present lessons; 0 before the first change."""
        return 0 if self.state is None else self.state.serial

    def adopt(self, state: LessonsState) -> bool:
        """Changes to other lessons; returns whether they are new."""
        if self.state is not None and state.serial <= self.state.serial:
            return False
        self.state = state
        return True

    def resets(self, serial: int) -> bool:
        """Returns whether a simulator that has the lessons of `serial` must begin new episodes."""
        return self.state is not None and self.state.resets > serial

    def all(self, simulator: int) -> ParameterUpdate:
        """Returns all parameters, for a Reset.

        Args:
            simulator: number of the simulator.
        """
        return self._update(self._lessons, simulator)

    def since(self, serial: int, simulator: int) -> ParameterUpdate:
        """Returns the parameters whose lessons began after `serial`, for an Act."""
        since = {} if self.state is None else self.state.since
        return self._update([name for name in self._lessons if since.get(name, 0) > serial], simulator)

    def _update(self, names: Iterable[str], simulator: int) -> ParameterUpdate:
        update = ParameterUpdate()
        for name in names:
            values = self._lessons[name]
            number = 0 if self.state is None else min(self.state.numbers.get(name, 0), len(values) - 1)
            value = values[number]
            if isinstance(value, Sampler):
                own = (value.seed + simulator) % 2**31 if value.seed >= 0 else self._seed_of(name, number, simulator)
                sampler = replace(value, seed=own)
                update.samplers[name] = sampler
                value = next(sampler.samples())
            update.parameters[name] = value
        return update

    def _seed_of(self, name: str, lesson: int, simulator: int) -> int:
        own = [self._seed, simulator, zlib.crc32(name.encode()), lesson]
        return int(np.random.SeedSequence(own).generate_state(1)[0] >> 1)  # below 2^31, to fit an int32
