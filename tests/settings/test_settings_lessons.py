"""Services receive curricula and samplers as the configuration describes them."""

from __future__ import annotations

import pytest

from sparring.pipeline.coordination.settings import CompletionCriteria
from sparring.pipeline.messages.simulator import Sampler
from sparring.pipeline.settings import without_effect
from sparring.pipeline.settings.parameters import curricula, in_lessons
from tests.settings.settings_texts import loaded, problems

TEXT = """
behaviors: {Ali: {self_play: {}}, Bo: {}}
environment_parameters:
  mass: 3
  wind: {sampler_type: gaussian, sampler_parameters: {mean: 2, st_dev: 0.5}}
  size: {sampler_type: multirangeuniform, sampler_parameters: {intervals: [[1, 2], [5, 8]]}}
  alone: {curriculum: [{name: only, value: 4}]}
  wall:
    curriculum:
      - low:
          completion_criteria:
            {measure: reward, behavior: Bo, threshold: 2.5, min_lesson_length: 7, signal_smoothing: false}
          value: 1.5
      - high:
          completion_criteria: {measure: rating, behavior: Ali, threshold: 1300, require_reset: true}
          value: {sampler_type: uniform, sampler_parameters: {min_value: 2, max_value: 4}}
      - highest: {value: 9}
"""


def test_every_parameter_has_its_value_in_each_lesson() -> None:
    found = in_lessons(loaded(TEXT).settings.environment_parameters)
    assert found["mass"] == (3.0,)
    assert found["alone"] == (4.0,)
    assert (found["wall"][0], found["wall"][2]) == (1.5, 9.0)
    (wind,), (size,), uniform = found["wind"], found["size"], found["wall"][1]
    samplers = [(one.kind, one.values) for one in (wind, size, uniform) if isinstance(one, Sampler)]
    assert samplers == [
        ("gaussian", (2.0, 0.5)),
        ("multirangeuniform", (1.0, 2.0, 5.0, 8.0)),
        ("uniform", (2.0, 4.0)),
    ]


def test_coordination_gets_only_parameters_with_several_lessons() -> None:
    found = curricula(loaded(TEXT).settings.environment_parameters)
    assert list(found) == ["wall"]
    assert [(lesson.name, lesson.value) for lesson in found["wall"]] == [
        ("low", "1.5"),
        ("high", "uniform(2.0, 4.0)"),
        ("highest", "9"),
    ]
    assert [lesson.criterion for lesson in found["wall"]] == [
        CompletionCriteria(measure="reward", behavior="Bo", threshold=2.5, signal_smoothing=False, min_lesson_length=7),
        CompletionCriteria(measure="rating", behavior="Ali", threshold=1300.0, require_reset=True),
        None,
    ]


def test_samplers_and_curricula_can_be_trained() -> None:
    assert not [line for line in without_effect(loaded(TEXT).settings) if "environment_parameters" in line]


def test_a_rating_needs_self_play() -> None:
    (line,) = problems(TEXT.replace("measure: reward, behavior: Bo", "measure: rating, behavior: Bo"))
    assert "got measure rating of Bo, which has no self_play" in line
    assert line.startswith("run.yaml:12: environment_parameters.wall.curriculum[0].low.completion_criteria.measure: ")


@pytest.mark.parametrize("name", ["Elo", "elo"])
def test_the_ml_agents_name_of_a_rating_is_accepted(name: str) -> None:
    settings = loaded(TEXT.replace("measure: rating", f"measure: {name}")).settings
    criterion = curricula(settings.environment_parameters)["wall"][1].criterion
    assert criterion is not None
    assert criterion.measure == "rating"


def test_criteria_of_the_last_lesson_are_accepted_with_a_notice() -> None:
    last = "- highest: {value: 9, completion_criteria: {behavior: Bo, threshold: 1}}"
    (notice,) = loaded(TEXT.replace("- highest: {value: 9}", last)).notices
    assert notice == (
        "run.yaml:17: environment_parameters.wall.curriculum[2].highest.completion_criteria: got completion_criteria "
        "for the last lesson 'highest'; expected none, because they are ignored: no lesson follows; remove them, or "
        "add a lesson"
    )
