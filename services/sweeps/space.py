"""Reads what a sweep is to try, and checks each value against the configuration before anything starts."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, Self

import numpy as np
from pydantic import BaseModel, Field, model_validator

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.files import Json
from sparring.pipeline.networks.settings import StrictSettings
from sparring.pipeline.settings import Settings, read
from sparring.pipeline.settings.document import Entry, Place, Problem, parse, refuse
from sparring.pipeline.settings.document import Path as KeyPath
from sparring.pipeline.settings.explain import scalars, validate_as
from sparring.pipeline.settings.load import key_path, read_text
from sparring.pipeline.settings.simulators import Option

Values = Mapping[str, Json]
"""A value for each key of a space."""

_EXAMPLE: Final = "space: {behaviors.Ball.hyperparameters.learning_rate: {low: 1e-4, high: 1e-2, log: true}}"

# ---------------------------------------------------------------- the file


class Parameter(StrictSettings):
    """Names the values of one key: `choices`, or those from `low` to `high`.

    Attributes:
        low: least value.
        high: greatest value.
        log: sample the logarithm evenly.
        step: distance of the values, counted from `low`; None for all between them.
        choices: the values.
    """

    low: float | None = None
    high: float | None = None
    log: bool = False
    step: float | None = Field(default=None, gt=0)
    choices: tuple[Option, ...] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        low, high, is_range = self.low, self.high, self.low is not None and self.high is not None
        if self.choices is not None:
            if self.model_fields_set != {"choices"}:
                raise ValueError("got choices with low, high, log or step; expected one of both; leave the others out")
        elif low is None or high is None or not is_range:
            raise ValueError("got neither low and high nor choices; expected one of both; write {low: 0.1, high: 0.9}")
        elif low >= high:
            raise ValueError(f"got low {low:g} with high {high:g}; expected less than high; exchange them")
        elif self.log and (low <= 0 or self.step is not None):
            raise ValueError("got log with step, or with low 0 or less; expected low above 0 alone; leave log out")
        elif high - low > _LARGEST:
            raise ValueError(f"got the range from {low:g} to {high:g}; expected {_LARGEST:g} at most; correct it")
        elif self.step is not None and (high - low) / self.step > _MOST_VALUES:
            raise ValueError(f"got steps of {self.step:g}; expected at most {_MOST_VALUES:,} values; raise it")
        elif self.step is not None and abs((high - low) / self.step - round((high - low) / self.step)) > _ROUNDING:
            raise ValueError(f"got high {high:g}, which steps of {self.step:g} from low {low:g} miss; correct it")
        return self


_ROUNDING: Final = 1e-6
_LARGEST: Final = 1e300
_MOST_VALUES: Final = 100_000
"""Of a range whose values are counted."""
_MOST_TRIALS: Final = 10_000
"""Of a grid, all of which are in the study from its beginning."""


class PopulationSettings(StrictSettings):
    """Configures population-based training.

    Attributes:
        size: number of members.
        interval_steps: steps between two decisions.
        quantile: share of the members that copy others, and of those that are copied.
        perturb: factors, of which a copied number is multiplied by one.
        resample: probability of a new value from the whole space instead.
        matches: matches of each pair of members in the tournament that rates them.
    """

    size: int = Field(default=4, ge=2, le=1000)
    interval_steps: int = Field(default=20_000, ge=1)
    quantile: float = Field(default=0.25, gt=0, le=0.5)
    perturb: tuple[float, ...] = Field(default=(0.8, 1.25), min_length=1)
    resample: float = Field(default=0.25, ge=0, le=1)
    matches: int = Field(default=20, ge=1)


class SweepSettings(StrictSettings):
    """Holds a file that says what a sweep tries.

    Attributes:
        space: values by dotted key of the configuration.
        method: independent trials (`search`), or members that copy each other (`population`).
        behavior: whose reward or rating counts; None for the only one.
        objective: what is to be high; None for the rating under self-play, else the reward.
        window: intervals at the end of a trial, whose mean is the objective.
        steps: length of a trial; None for the `max_steps` of the behavior.
        parallel: runs at a time.
        seed: of sampling; the runs have this one and those after it.
        trials: number of trials; with `grid` at most.
        sampler: how values are chosen.
        pruner: how trials that promise little are chosen, to be stopped early.
        startup_trials: completed trials before the `median` stops any.
        warmup_steps: steps of a trial before it may be stopped; None for a fifth of it.
        reduction_factor: of `halving` and `hyperband`: one of so many trials goes on.
        population: settings of that method.
    """

    space: dict[str, Parameter] = Field(min_length=1)
    method: Literal["search", "population"] = "search"
    behavior: str | None = None
    objective: Literal["reward", "rating"] | None = None
    window: int = Field(default=5, ge=1)
    steps: int | None = Field(default=None, ge=1)
    parallel: int = Field(default=1, ge=1, le=1000)
    seed: int = Field(default=0, ge=0, lt=2**30)
    trials: int = Field(default=30, ge=1)
    sampler: Literal["tpe", "random", "grid"] = "tpe"
    pruner: Literal["median", "halving", "hyperband", "none"] = "median"
    startup_trials: int = Field(default=5, ge=1)
    warmup_steps: int | None = Field(default=None, ge=0)
    reduction_factor: int = Field(default=3, ge=2)
    population: PopulationSettings = PopulationSettings()


# ---------------------------------------------------------------- one key


@dataclass(frozen=True, slots=True)
class Dimension:
    """Describes the values of one key.

    Attributes:
        choices: the values; empty for a range.
        whole: the values are whole numbers.
    """

    choices: tuple[Json, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None
    whole: bool = False

    @property
    def ends(self) -> tuple[Json, ...]:
        """Returns the values to check: the two ends of a range, or all choices."""
        return self.choices or (self.nearest(self.low), self.nearest(self.high))

    @property
    def grid(self) -> tuple[Json, ...]:
        """Returns all values; none if they cannot be counted."""
        step = self.step or (1.0 if self.whole and not self.log else None)
        if self.choices or step is None or (self.high - self.low) / step > _MOST_VALUES:
            return self.choices
        return tuple(self.nearest(self.low + at * step) for at in range(round((self.high - self.low) / step) + 1))

    def has(self, value: Json) -> bool:
        """Returns whether a value is one of these."""
        if self.choices:
            return any(value == one and type(value) is type(one) for one in self.choices)
        return type(value) in (int, float) and bool(np.isclose(self.nearest(value), value, rtol=1e-9, atol=0.0))

    def nearest(self, value: float) -> Json:
        """Returns the nearest value of a range."""
        if self.step is not None:
            value = self.low + round((value - self.low) / self.step) * self.step
        value = min(max(value, self.low), self.high)
        return round(value) if self.whole else float(value)

    def sample(self, random: np.random.Generator) -> Json:
        """Returns one of the values, each with the same probability."""
        if grid := self.grid:
            return grid[int(random.integers(len(grid)))]
        if self.log:
            return self.nearest(float(np.exp(random.uniform(np.log(self.low), np.log(self.high)))))
        return self.nearest(float(random.uniform(self.low, self.high)))

    def perturb(self, value: Json, factors: Sequence[float], random: np.random.Generator) -> Json:
        """Returns a value nearby: a number times one of the factors, a neighboring choice."""
        if not self.choices:
            return self.nearest(value * factors[int(random.integers(len(factors)))])
        at = next(at for at, one in enumerate(self.choices) if one == value and type(one) is type(value))
        return self.choices[min(max(at + int(random.choice((-1, 1))), 0), len(self.choices) - 1)]


# ---------------------------------------------------------------- the whole


@dataclass(frozen=True, slots=True)
class Sweep:
    """Holds a sweep that can be run.

    Attributes:
        settings: of the sweep.
        base: configuration of its runs, with their length, without values of the space.
        dimensions: by key.
        behavior: whose reward or rating counts.
        objective: what is to be high.
        steps: length of a trial.
        own: values of the configuration itself by key; a key without one in the space is left out.
    """

    settings: SweepSettings
    base: Settings
    dimensions: Mapping[str, Dimension]
    behavior: str
    objective: Literal["reward", "rating"]
    steps: int
    own: Values


def read_sweep(config: Path, path: Path, assigned: Sequence[str] = ()) -> Sweep:
    """Reads a configuration and the space of a sweep of it.

    Args:
        config: the configuration.
        path: the file with the space.
        assigned: values in place of what the configuration says, each as KEY=VALUE.

    Raises:
        SettingsError: lists every problem with its line.
    """
    root = parse(read_text(path), str(path), _EXAMPLE)
    settings, problems = validate_as(SweepSettings, root, lambda _: ())
    if settings is None:
        raise refuse(str(path), problems)
    plain = read(config, {}, assigned).settings
    behavior = _behavior(settings, plain, root)
    trained = plain.behaviors.get(behavior) or plain.unnamed
    assert trained is not None
    steps = settings.steps or trained.max_steps
    objective = settings.objective or ("reward" if trained.self_play is None else "rating")
    if objective == "rating" and trained.self_play is None:
        raise refuse(str(path), [_at(root, "objective", f"got rating of {behavior} without self_play; write reward")])
    interval = settings.population.interval_steps if settings.method == "population" else steps
    if trained.summary_freq > interval:
        text = f"got {interval} with summary_freq {trained.summary_freq}; expected several intervals of this length"
        raise refuse(str(path), [_at(root, "steps", f"{text}; lower summary_freq, for example with --set")])
    fixed = [f"{section}.max_steps={steps}" for section in _sections(plain)]
    base = read(config, _apart(plain), [*assigned, *fixed, "pipeline.export=false"]).settings
    checked = _Checks(config, [*assigned, *fixed], root, settings, base)
    dimensions = checked.dimensions()
    combinations = math.prod(len(one.grid) for one in dimensions.values())
    if settings.method == "search" and settings.sampler == "grid" and combinations > _MOST_TRIALS:
        text = f"got a grid of {combinations:,} combinations; expected at most {_MOST_TRIALS:,}; write larger steps"
        raise refuse(str(path), [_at(root, "sampler", text)])
    own = {key: value for key in dimensions if dimensions[key].has(value := value_at(base, key_path(key)[0]))}
    return Sweep(settings, base, dimensions, behavior, objective, steps, own)


def _behavior(settings: SweepSettings, plain: Settings, root: Entry) -> str:
    known = list(plain.behaviors)
    if settings.behavior is None and len(known) == 1:
        return known[0]
    if settings.behavior in known or (settings.behavior is not None and plain.unnamed is not None):
        return str(settings.behavior)
    got = "nothing" if settings.behavior is None else repr(settings.behavior)
    expected = f"expected one of {', '.join(known) or 'the names that simulators have'}"
    raise refuse(root.place.file, [_at(root, "behavior", f"got {got}; {expected}; write behavior: NAME")])


def _at(root: Entry, key: str, text: str) -> Problem:
    entry = root.child(key)
    return Problem(replace(root.place, path=(key,)) if entry is None else entry.place, text)


def _sections(settings: Settings) -> list[str]:
    """Returns the dotted keys of all behaviors and of the settings of others."""
    return [f'behaviors."{name}"' for name in settings.behaviors] + ["default_settings"] * (
        settings.default_settings is not None
    )


def _apart(settings: Settings) -> dict[str, Json]:
    """Returns what a run of a sweep has in place of a configuration's place for its results."""
    kept = settings.checkpoint_settings
    former = None if kept.initialize_from is None else str(Path(kept.results_dir, kept.initialize_from).absolute())
    keys = {"resume": False, "force": False, "inference": False, "initialize_from": former}
    return {f"checkpoint_settings.{key}": value for key, value in keys.items()}


def value_at(settings: Settings, path: KeyPath) -> Json:
    """Returns the value of a key; None for one that is not written."""
    here: Json = settings
    for step in path:
        if isinstance(here, BaseModel):
            here = getattr(here, str(step), None)
        elif isinstance(here, Mapping):
            here = here.get(step)
        else:
            here = here[step] if isinstance(here, tuple) and isinstance(step, int) and step < len(here) else None
    return here


def words_of(values: Values) -> list[str]:
    """Returns values as words for --set."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


# ---------------------------------------------------------------- checks

_LENGTHS: Final = ("max_steps",)
_RESUMABLE: Final[tuple[tuple[str, ...], ...]] = (
    ("behaviors", "*", "hyperparameters", "*"),
    ("behaviors", "*", "reward_signals", "*", "strength"),
    ("behaviors", "*", "reward_signals", "*", "gamma"),
    ("behaviors", "*", "self_play", "*"),
)
"""Keys that a population may change: a run that is resumed accepts another value."""
_SHAPES: Final = ("shared_critic", "opponents", "initial_elo")
"""What of these belongs to the networks, or to a run's beginning."""


class _Checks:
    """Checks each key of a space and its values."""

    def __init__(
        self, config: Path, assigned: Sequence[str], root: Entry, settings: SweepSettings, base: Settings
    ) -> None:
        self._config, self._assigned, self._settings, self._base = config, assigned, settings, base
        space = root.child("space")
        assert space is not None
        self._file, self._places = root.place.file, {key: entry.place for key, entry in space.mapping.items()}

    def dimensions(self) -> dict[str, Dimension]:
        """Returns the dimensions of the space.

        Raises:
            SettingsError: the configuration does not know a key, or allows none of its values.
        """
        found = {key: _dimension(key, one) for key, one in self._settings.space.items()}
        lines = [str(problem) for key, one in found.items() if (problem := self._refused(key, one)) is not None]
        if not lines:
            sides = [
                {},
                {key: one.ends[0] for key, one in found.items()},
                {key: one.ends[-1] for key, one in found.items()},
            ]
            wrong = (self._errors({key: value}, sides) for key, one in found.items() for value in one.ends)
            lines = list(dict.fromkeys(line for lines in wrong for line in lines))
        if lines:
            count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
            raise SettingsError("\n".join([f"{count} in {self._file}", *lines]))
        return found

    def _refused(self, key: str, one: Dimension) -> Problem | None:
        """Returns what is wrong with a key itself."""
        path, end = key_path(key)
        place = Place(self._file, self._places[key].line, path)
        if end < len(key) or not path or not isinstance(path[-1], str):
            return Problem(
                self._places[key], "got no dotted key; expected one such as behaviors.Ball.max_steps; correct it"
            )
        if path[-1] in _LENGTHS:
            return Problem(place, "got the length of a trial as a value; expected the same for all; write steps")
        if self._settings.method == "population" and not is_resumable(path):
            text = "got a key that a trained policy cannot change; expected one of hyperparameters, self_play, or the"
            return Problem(place, f"{text} strength or gamma of a reward signal; use method: search")
        if self._settings.method == "search" and self._settings.sampler == "grid" and not one.grid:
            return Problem(
                place, "got a range without step for a grid; expected values to count; write step or choices"
            )
        return None

    def _errors(self, values: Values, sides: Sequence[Values]) -> list[str]:
        """Returns why no run can have a value, neither with the configuration's others nor with ends of theirs."""
        refused = [error for side in sides if (error := self._error({**side, **values})) is not None]
        return refused[0].splitlines()[1:] if len(refused) == len(sides) else []

    def _error(self, values: Values) -> str | None:
        words = words_of(values)
        places = {word: self._places[key] for word, key in zip(words, values, strict=True)}
        try:
            read(self._config, {}, [*self._assigned, *words], places)
        except SettingsError as error:
            return str(error)
        return None


def is_resumable(path: KeyPath) -> bool:
    """Returns whether a run that is resumed may have another value of a key."""
    alike = (
        len(path) == len(one) and all(part in (key, "*") for part, key in zip(one, path, strict=True))
        for one in _RESUMABLE
    )
    return any(alike) and path[-1] not in _SHAPES


def _dimension(key: str, one: Parameter) -> Dimension:
    if one.choices is not None:
        return Dimension(choices=one.choices)
    assert one.low is not None
    assert one.high is not None
    known, numbers = scalars(key_path(key)[0]), [one.low, one.high, one.step or 0.0]
    whole = all(number.is_integer() for number in numbers) and (int in known or float not in known)
    return Dimension(low=one.low, high=one.high, log=one.log, step=one.step, whole=whole)
