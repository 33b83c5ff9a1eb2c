"""`--set KEY=VALUE` writes into the file's settings."""

from __future__ import annotations

import contextlib

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.settings import Settings, parse_settings

TEXT = """
default_settings: {trainer_type: ppo}
behaviors:
  Ball: {hyperparameters: {beta: 0.5}}
  Ball.v2:
simulators: [{name: goal}, {name: balance, areas: 2}]
"""


def settings(*assigned: str, text: str = TEXT) -> Settings:
    return parse_settings(text, "run.yaml", assigned=assigned).settings


def test_values_are_those_of_the_file_or_new() -> None:
    found = settings(
        "behaviors.Ball.hyperparameters.beta=0.01",
        'behaviors."Ball.v2".max_steps=3e5',
        "default_settings.time_horizon=17",
        "simulators[1].areas=5",
        "pipeline.restarts.budget=7",
        "environment_parameters.gravity={sampler_type: uniform, sampler_parameters: {min_value: 1, max_value: 2}}",
    )
    ball, other = found.behaviors["Ball"], found.behaviors["Ball.v2"]
    assert ball.hyperparameters.beta == 0.01
    assert (ball.max_steps, other.max_steps) == (500_000, 300_000)
    assert (ball.time_horizon, other.time_horizon) == (17, 17)
    assert [one.areas for one in found.simulators] == [1, 5]
    assert found.pipeline.restarts.budget == 7
    assert "gravity" in found.environment_parameters
    assert settings("simulators.1.areas=6").simulators[1].areas == 6


def test_later_values_and_options_win() -> None:
    found = settings("behaviors.Ball.max_steps=1", "behaviors.Ball.max_steps=2")
    assert found.behaviors["Ball"].max_steps == 2
    overrides = {"behaviors.*.max_steps": 3}
    loaded = parse_settings(TEXT, "run.yaml", overrides, ["behaviors.Ball.max_steps=1"])
    assert loaded.settings.behaviors["Ball"].max_steps == 3


def test_a_file_without_behaviors_gets_one() -> None:
    assert settings("behaviors.Ball.max_steps=9", text="debug: true").behaviors["Ball"].max_steps == 9


@pytest.mark.parametrize(
    ("assigned", "message"),
    [
        ("beta", "got --set 'beta'; expected KEY=VALUE"),
        ("=3", "got --set '=3'; expected KEY=VALUE"),
        ("a..b=3", "expected KEY=VALUE"),
        ("simulators[0]=3", "expected KEY=VALUE"),
        ("simulators[x].count=3", "expected KEY=VALUE"),
        ("simulators[2].count=3", "command line: simulators[2].count: got entry 2 of a list of 2;"),
        ("behaviors.Bal.max_steps=3", "got 'Bal'; expected one of Ball, Ball.v2; did you mean Ball?"),
        ("behaviors.Ball.max_stepz=3", "command line: behaviors.Ball.max_stepz: "),
        ("behaviors.Ball.max_steps=many", "command line: behaviors.Ball.max_steps: got 'many'"),
        ("behaviors.Ball.hyperparameters.beta.x=1", "got 0.5 above 'x'; expected a section"),
        ("simulators.count=3", "got a list above 'count'; expected a section"),
        ("simulators.7.count=3", "command line: simulators.7.count: got entry 7 of a list of 2;"),
        ("simulators.first.count=3", "got entry first of a list of 2;"),
        (f"simulators.{'9' * 5000}.count=3", "of a list of 2;"),
        (f"simulators[{'9' * 5000}].count=3", "expected KEY=VALUE"),
        ("debug=true\nbehaviors: {}", "command line: debug: got several lines; expected one value"),
        ("debug={", "command line"),
        ("debug=\ud83d", "expected text in UTF-8"),
        ('debug="a\\0b"', "value: got 'a\\x00b'"),
        (f"{'a.' * 900}b=1", "expected KEY=VALUE"),
        ('simulators[0].options.goal="\\ud83d"', "value: got '\\ud83d'"),
    ],
)
def test_what_has_no_place_is_refused(assigned: str, message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        settings(assigned)
    assert message in str(refused.value)


@given(st.text(max_size=40))
def test_any_text_is_refused_or_valid(text: str) -> None:
    with contextlib.suppress(SettingsError):
        settings(text)


@given(st.one_of(st.booleans(), st.integers(1, 10**9), st.floats(0.0, 1e6), st.text(alphabet="abc .:-", max_size=9)))
def test_value_is_read_as_in_a_file(value: object) -> None:
    written = yaml.safe_dump({"a": {"value": value}}, default_flow_style=True).strip()[5:-1]
    text = written.partition(":")[2].strip().removesuffix("}")
    key = "environment_parameters.gravity"
    try:
        expected: object = settings(text=TEXT + f"environment_parameters: {{gravity: {text}}}").environment_parameters
    except SettingsError as error:
        expected = str(error).partition("gravity: ")[2]
    try:
        found: object = settings(f"{key}={text}").environment_parameters
    except SettingsError as error:
        found = str(error).partition("gravity: ")[2]
    assert found == expected
