"""Environment parameters as a game sees them: a mapping that follows the trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sparring.pipeline.messages.samplers import samples
from sparring.pipeline.messages.simulator import Sampler


class Parameters(Mapping[str, float]):
    """The environment parameters, one object for a whole conversation.

    Indexing one with a sampler draws anew each time; the first draw is the number that the trainer sent. What the
    trainer changes, a lesson of a curriculum for example, shows up here without a reset. A game that wants values to
    stay for an episode takes them when the episode begins.

    Attributes:
        revision: rises with each change.
    """

    def __init__(self) -> None:
        self.revision = 0
        self._numbers: dict[str, float] = {}
        self._samplers: dict[str, Sampler] = {}
        self._samples: dict[str, Iterator[float]] = {}

    @property
    def samplers(self) -> Mapping[str, Sampler]:
        """By parameter name, of those that are drawn: for bridges whose game draws by itself."""
        return self._samplers

    def replace(self, parameters: Mapping[str, float], samplers: Mapping[str, Sampler]) -> None:
        """Takes over all parameters of a Reset; a sampler that stays the same goes on with its draws."""
        gone = self._numbers.keys() - parameters.keys()
        for name in gone:
            del self._numbers[name]
            self._forget(name)
        self.revision += bool(gone)
        self.update(parameters, samplers)

    def update(self, parameters: Mapping[str, float], samplers: Mapping[str, Sampler]) -> None:
        """Takes over the parameters of an Act; the others stay."""
        before = self._as_sent(parameters)
        for name, number in parameters.items():
            sampler = samplers.get(name)
            self._numbers[name] = number
            if sampler is None:
                self._forget(name)
            elif _plain(sampler) != _plain(self._samplers.get(name)):
                self._samplers[name], self._samples[name] = sampler, samples(sampler)
        self.revision += self._as_sent(parameters) != before

    def __getitem__(self, name: str) -> float:
        drawn = self._samples.get(name)
        return self._numbers[name] if drawn is None else next(drawn)

    def __contains__(self, name: object) -> bool:
        return name in self._numbers  # asking draws nothing

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __repr__(self) -> str:
        shown = {name: self._samplers.get(name, number) for name, number in self._numbers.items()}
        return f"Parameters({shown})"

    def _forget(self, name: str) -> None:
        self._samplers.pop(name, None)
        self._samples.pop(name, None)

    def _as_sent(self, names: Mapping[str, float]) -> list[object]:
        return [(self._numbers.get(name), _plain(self._samplers.get(name))) for name in names]


def _plain(sampler: Sampler | None) -> object:
    return None if sampler is None else (sampler.kind, sampler.values, sampler.seed)
