"""Decides in population-based training which members go on from others, and with which values.

The rule is that of Jaderberg et al., "Population Based Training of Neural Networks" (2017), arXiv 1711.09846: members
of the lowest quantile copy weights and values of one of the highest (exploit), and change the values (explore).

Deviation 1: members wait for each other, so that all are compared at equal steps, whatever runs at a time.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from sparring.pipeline.files import Json, reading, regular, write_atomically
from sparring.services.sweeps.space import Dimension, PopulationSettings, Values

_MOST_TRIES = 100
"""Tries to find values that can be run together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Describes what a member has trained between two decisions.

    Attributes:
        generation: counted from 0.
        member: counted from 0.
        parent: member of the generation before from whose checkpoint it went on; None in the first.
        values: by key.
        steps: trained at its end.
        seconds: that it took.
        reward: mean return at its end; None if unknown.
        error: why it failed; "" for nothing.
    """

    generation: int
    member: int
    parent: int | None
    values: Values
    steps: int
    seconds: float
    reward: float | None
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """Describes a member that goes on from another.

    Attributes:
        member: which one.
        donor: whose weights and values it copies.
        before: its own values.
        after: its values from now on.
    """

    member: int
    donor: int
    before: Values
    after: Values


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Describes the end of a generation.

    Attributes:
        generation: counted from 0.
        scores: by member; None for one that has failed.
        copies: the members that go on from others.
    """

    generation: int
    scores: Sequence[float | None]
    copies: Sequence[Copy]


@dataclass
class Population:
    """Holds the members of a population, as the lines of its file tell them.

    Args:
        dimensions: of the values.
        settings: of the population.
        own: values of the configuration, which the first member gets; the others, and missing ones, are sampled.
        seed: of sampling.
        is_possible: returns whether values can be run together.

    Attributes:
        generation: the present one.
        values: of each member in it.
        parents: the member that each has gone on from; None in the first generation.
        intervals: of all generations, by generation and member.
        decisions: of all generations before the present one.
    """

    dimensions: Mapping[str, Dimension]
    settings: PopulationSettings
    own: Values
    seed: int
    is_possible: Callable[[Values], bool] = lambda _: True
    generation: int = field(default=0, init=False)
    values: list[Values] = field(init=False)
    parents: list[int | None] = field(init=False)
    intervals: dict[tuple[int, int], Interval] = field(default_factory=dict, init=False)
    decisions: list[Decision] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        random, size = np.random.default_rng(self.seed), self.settings.size
        first = self._possible(lambda: self._sample(random) | dict(self.own), self._sample(random) | dict(self.own))
        self.values = [first, *(self._possible(lambda: self._sample(random), first) for _ in range(1, size))]
        self.parents = [None] * size

    @property
    def waiting(self) -> list[int]:
        """Returns the members that have not trained in this generation."""
        return [one for one in range(self.settings.size) if (self.generation, one) not in self.intervals]

    @property
    def present(self) -> list[Interval]:
        """Returns the intervals of this generation."""
        return [one for (generation, _), one in sorted(self.intervals.items()) if generation == self.generation]

    def on_interval(self, interval: Interval) -> None:
        """Adds what a member has trained."""
        self.intervals[interval.generation, interval.member] = interval

    def on_decision(self, decision: Decision) -> None:
        """Begins the next generation."""
        self.decisions.append(decision)
        self.parents = list(range(self.settings.size))
        for one in decision.copies:
            self.parents[one.member], self.values[one.member] = one.donor, one.after
        self.generation += 1

    def decide(self, scores: Sequence[float | None]) -> Decision:
        """Returns what becomes of the members, with these scores; it depends on the seed and the generation only."""
        random = np.random.default_rng([self.seed, self.generation])
        size = len(scores)
        known = sorted((one for one in range(size) if scores[one] is not None), key=lambda one: _score(scores, one))
        failed = [one for one in range(size) if scores[one] is None]
        few = min(max(1, int(size * self.settings.quantile)), size // 2)
        best, copies = known[-few:], []
        for member in [*failed, *known[: max(0, few - len(failed))]]:
            donor = best[int(random.integers(len(best)))] if best else member
            if member in failed or _score(scores, member) < _score(scores, donor):
                before, after = self.values[member], self.explore(self.values[donor], random)
                copies.append(Copy(member=member, donor=donor, before=before, after=after))
        return Decision(generation=self.generation, scores=list(scores), copies=copies if best else [])

    def explore(self, values: Values, random: np.random.Generator) -> Values:
        """Returns changed values, or the same where no change of many can be run."""

        def change(key: str, one: Dimension) -> Json:
            if random.random() < self.settings.resample or not one.has(values[key]):
                return one.sample(random)
            return one.perturb(values[key], self.settings.perturb, random)

        return self._possible(lambda: {key: change(key, one) for key, one in self.dimensions.items()}, values)

    def lineage(self, member: int) -> list[Interval]:
        """Returns the intervals from which a member of the last decision descends, the first one first."""
        found: list[Interval] = []
        at: int | None = member
        for generation in range(len(self.decisions) - 1, -1, -1):
            assert at is not None
            found.append(self.intervals[generation, at])
            at = found[-1].parent
        return found[::-1]

    def check(self) -> None:
        """Checks that the lines of a file fit together.

        Raises:
            LookupError, TypeError, ValueError: they do not.
        """
        for member in range(self.settings.size):
            self.lineage(member)
        for one in self.intervals.values():
            if one.values.keys() != self.dimensions.keys():
                raise ValueError(f"values of {', '.join(one.values)}")
        found = [one.reward for one in self.intervals.values()] + [
            one for made in self.decisions for one in made.scores
        ]
        np.array([one for one in found if one is not None], np.float64)

    def _sample(self, random: np.random.Generator) -> dict[str, Json]:
        return {key: one.sample(random) for key, one in self.dimensions.items()}

    def _possible(self, make: Callable[[], Values], otherwise: Values) -> Values:
        return next((values for _ in range(_MOST_TRIES) if self.is_possible(values := make())), otherwise)


def _score(scores: Sequence[float | None], member: int) -> float:
    score = scores[member]
    assert score is not None
    return score


# ---------------------------------------------------------------- the file


class PopulationFile:
    """Keeps the intervals and decisions of a population, a line of JSON for each, so that it can go on.

    Args:
        path: of the file.
        population: to which its lines are added.
    """

    def __init__(self, path: Path, population: Population) -> None:
        self._path, self._population = path, population
        with reading(path, "the decisions of a sweep", "restore it, or begin another sweep"):
            self._lines: list[str] = regular(path).read_text().splitlines() if path.exists() else []
            for line in self._lines:
                content = json.loads(line)
                if content.pop("type") == "interval":
                    population.on_interval(Interval(**content))
                else:
                    copies = [Copy(**one) for one in content.pop("copies")]
                    population.on_decision(Decision(**content, copies=copies))
            population.check()
        for one in population.present:
            if one.error:  # it trains again, as its cause may be mended
                del population.intervals[one.generation, one.member]

    def add(self, one: Interval | Decision) -> None:
        """Adds a line, to the file first."""
        kind = "interval" if isinstance(one, Interval) else "decision"
        self._lines.append(json.dumps({"type": kind, **asdict(one)}))
        write_atomically(self._path, "".join(f"{line}\n" for line in self._lines).encode())
        if isinstance(one, Interval):
            self._population.on_interval(one)
        else:
            self._population.on_decision(one)
