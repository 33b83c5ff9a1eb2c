"""Defines environment parameters: numbers, samplers, and curricula of lessons, with ML-Agents' names.

`pipeline/coordination/lessons.py` decides when a lesson ends. Unlike in ML-Agents, a measure is taken after each
update, not at each step; only episodes that began in the lesson count; smoothing begins with the first measure, not
with 0; if `min_lesson_length` is 0, a mean covers up to 100 episodes, not the last one; a change of lesson resets the
episodes of its own behavior only, not those of all; and `rating` is a measure too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from sparring.pipeline.coordination import lessons
from sparring.pipeline.coordination.settings import CompletionCriteria
from sparring.pipeline.files import Json
from sparring.pipeline.messages import simulator
from sparring.pipeline.networks.settings import StrictSettings


class SamplerParameters(StrictSettings):
    """Holds what all samplers share.

    Attributes:
        seed: seed in the first simulator, the others count up; -1 takes it from the run's. A constant ignores it.
    """

    seed: int = Field(default=-1, ge=-1, lt=2**31)


class ConstantParameters(SamplerParameters):
    """Holds the value of a constant, which ML-Agents may write as a plain number."""

    value: float = 0.0


class UniformParameters(SamplerParameters):
    """Describes a range with equal density."""

    min_value: float = 0.0
    max_value: float = 1.0

    @model_validator(mode="after")
    def _in_order(self) -> UniformParameters:
        if self.min_value > self.max_value:
            raise ValueError(
                f"got min_value {self.min_value:g} above max_value {self.max_value:g}; "
                "expected min_value <= max_value; exchange them"
            )
        return self


class GaussianParameters(SamplerParameters):
    """Describes a normal distribution.

    Attributes:
        st_dev: standard deviation.
    """

    mean: float = 1.0
    st_dev: float = Field(default=1.0, ge=0)


class MultiRangeUniformParameters(SamplerParameters):
    """Describes several ranges, sampled in proportion to their widths.

    Attributes:
        intervals: pairs of lower and upper bound.
    """

    intervals: tuple[tuple[float, float], ...] = Field(default=((0.0, 1.0),), min_length=1)

    @model_validator(mode="after")
    def _in_order(self) -> MultiRangeUniformParameters:
        for low, high in self.intervals:
            if low > high:
                raise ValueError(
                    f"got the interval [{low:g}, {high:g}] in intervals; "
                    "expected the lower bound first; exchange the two"
                )
        return self


class ConstantSampler(StrictSettings):
    """Describes a constant."""

    sampler_type: Literal["constant"]
    sampler_parameters: ConstantParameters = ConstantParameters()


class UniformSampler(StrictSettings):
    """Samples one range."""

    sampler_type: Literal["uniform"]
    sampler_parameters: UniformParameters = UniformParameters()


class GaussianSampler(StrictSettings):
    """Samples a normal distribution."""

    sampler_type: Literal["gaussian"]
    sampler_parameters: GaussianParameters = GaussianParameters()


class MultiRangeUniformSampler(StrictSettings):
    """Samples several ranges."""

    sampler_type: Literal["multirangeuniform"]
    sampler_parameters: MultiRangeUniformParameters = MultiRangeUniformParameters()


Sampler = Annotated[
    ConstantSampler | UniformSampler | GaussianSampler | MultiRangeUniformSampler, Field(discriminator="sampler_type")
]


def _lesson_kind(value: Json | BaseModel) -> str:
    return "sampler" if isinstance(value, dict | BaseModel) else "number"


def _kind(value: Json | BaseModel) -> str:
    if isinstance(value, Curriculum) or (isinstance(value, dict) and "curriculum" in value):
        return "curriculum"
    return _lesson_kind(value)


LessonValue = Annotated[
    Annotated[float, Tag("number")] | Annotated[Sampler, Tag("sampler")],
    Discriminator(_lesson_kind),
]


class LessonSettings(StrictSettings):
    """Configures one lesson of a curriculum.

    Attributes:
        name: for logs.
        completion_criteria: None for the last lesson.
        value: value of the parameter: a number or a sampler.
    """

    name: str = Field(min_length=1)
    completion_criteria: CompletionCriteria | None = None
    value: LessonValue


class Curriculum(StrictSettings):
    """Lists lessons in their order."""

    curriculum: tuple[LessonSettings, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _leads_to_the_end(self) -> Curriculum:
        for lesson in self.curriculum[:-1]:
            if lesson.completion_criteria is None:
                raise ValueError(
                    f"got no completion_criteria for lesson {lesson.name!r}; expected them for all but the last "
                    "lesson; write when it is completed"
                )
        return self


EnvironmentParameter = Annotated[
    Annotated[float, Tag("number")] | Annotated[Sampler, Tag("sampler")] | Annotated[Curriculum, Tag("curriculum")],
    Discriminator(_kind),
]


def in_lessons(parameters: Mapping[str, EnvironmentParameter]) -> dict[str, tuple[float | simulator.Sampler, ...]]:
    """Returns the value of each parameter in each lesson, by parameter name: stepping sends it to simulators."""
    found = {}
    for name, one in parameters.items():
        values = [lesson.value for lesson in one.curriculum] if isinstance(one, Curriculum) else [one]
        found[name] = tuple(map(_value, values))
    return found


def curricula(parameters: Mapping[str, EnvironmentParameter]) -> dict[str, tuple[lessons.Lesson, ...]]:
    """Returns the lessons of parameters that have more than one, by parameter name: coordination decides on them."""
    return {
        name: tuple(map(_lesson, one.curriculum))
        for name, one in parameters.items()
        if isinstance(one, Curriculum) and len(one.curriculum) > 1
    }


def _value(value: float | Sampler) -> float | simulator.Sampler:
    if isinstance(value, float):
        return value
    if isinstance(value, ConstantSampler):
        return value.sampler_parameters.value
    numbers = value.sampler_parameters.model_dump(exclude={"seed"}).values()  # in the order of a simulator's sampler
    values = tuple(np.ravel([*numbers]).tolist())
    return simulator.Sampler(kind=value.sampler_type, values=values, seed=value.sampler_parameters.seed)


def _lesson(lesson: LessonSettings) -> lessons.Lesson:
    value = _value(lesson.value)
    shown = f"{value:g}" if isinstance(value, float) else f"{value.kind}{value.values}"
    return lessons.Lesson(name=lesson.name, value=shown, criterion=lesson.completion_criteria)
