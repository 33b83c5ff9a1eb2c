"""Shows environment parameters to a game as a mapping that follows the trainer."""

from collections.abc import Iterator, Mapping

from sparring.pipeline.messages.simulator import Sampler


class Parameters(Mapping[str, float]):
    """Holds the environment parameters of a whole conversation.

    Each read of a parameter with a sampler returns a new sample; the first one is the number that the trainer sent. A
    change by the trainer, such as a new lesson of a curriculum, appears here without a reset. A game that needs
    constant values for an episode reads them when the episode begins.

    Attributes:
        revision: increases with each change.
    """

    def __init__(self) -> None:
        self.revision = 0
        self._numbers: dict[str, float] = {}
        self._samplers: dict[str, Sampler] = {}
        self._samples: dict[str, Iterator[float]] = {}

    @property
    def samplers(self) -> Mapping[str, Sampler]:
        """Returns the samplers by parameter name, for bridges whose game samples by itself."""
        return self._samplers

    def replace(self, parameters: Mapping[str, float], samplers: Mapping[str, Sampler]) -> None:
        """Takes over all parameters of a Reset; an unchanged sampler continues its sequence."""
        gone = self._numbers.keys() - parameters.keys()
        for name in gone:
            del self._numbers[name]
            self._forget(name)
        self.revision += bool(gone)
        self.update(parameters, samplers)

    def update(self, parameters: Mapping[str, float], samplers: Mapping[str, Sampler]) -> None:
        """Takes over the parameters of an Act; the others are unchanged."""
        before = self._as_sent(parameters)
        for name, number in parameters.items():
            sampler = samplers.get(name)
            self._numbers[name] = number
            if sampler is None:
                self._forget(name)
            elif _plain(sampler) != _plain(self._samplers.get(name)):
                self._samplers[name], self._samples[name] = sampler, sampler.samples()
        self.revision += self._as_sent(parameters) != before

    def __getitem__(self, name: str) -> float:
        sampled = self._samples.get(name)
        return self._numbers[name] if sampled is None else next(sampled)

    def __contains__(self, name: object) -> bool:
        return name in self._numbers  # a membership test takes no sample

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
