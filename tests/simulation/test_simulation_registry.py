"""The registry makes simulators by name with options of a command line."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.pipeline.bridges.spaces import Option
from sparring.pipeline.compliance.steps import StepWatch
from sparring.pipeline.compliance.trial import random_actions
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.games.registry import make, names, option_text, parse_options
from sparring.pipeline.messages.simulator import Step
from sparring.pipeline.simulation import run
from sparring.pipeline.specs import BehaviorId
from tests.simulation.compliance_simulator import verdicts_of

BUILT_IN = ("balance", "crowd", "goal", "goals", "key-door", "rooms", "scramble", "soccer")
PAIRS = ("balance", "goal", "key-door", "scramble")
STEPS = 600
LIKE_OTHERS = ("1", "007", "True", "1e5", "nan", "-inf", '"', '""', '"a"', "a=b", "[1]")
GROUPS: list[tuple[str, dict[str, Any]]] = [
    ("goals", {"mixed": True}),
    ("goals", {"members": 3}),
    ("crowd", {"every": 2}),
    ("soccer", {"rivals": "scripted"}),
]
VARIANTS = [
    *GROUPS,
    ("goals", {"discrete": True}),
    ("crowd", {"members": 2, "every": 4}),
    ("crowd", {}),
    ("soccer", {"rivals": "still"}),
    ("soccer", {}),
    ("key-door", {"rooms": 3}),
    ("rooms", {"members": 3}),
    ("goal", {}),
    ("balance", {}),
    ("scramble", {"teams": 2, "pellets": 1}),
    ("scramble", {}),
    ("tag", {}),
]


def test_built_in_games_are_made_by_name() -> None:
    """Each has its own behaviors and accepts areas and options."""
    assert sorted((*BUILT_IN, "tag", "gymnasium", "unity", "pettingzoo", "godot")) == sorted(names())
    for name in BUILT_IN:
        game = make(name, 2, behavior="Other")
        assert game.name == name
        assert {BehaviorId.parse(key).name for key in game.behaviors()} == {"Other"}
        (first, *_) = game.reset({}, 0)
        assert first.decisions is not None
        agents = first.decisions.agents.size
        assert 2 <= agents < 40 if name == "crowd" else agents == (2 if name in PAIRS else 4)


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
def test_a_built_in_game_follows_every_rule_of_the_protocol(name: str, options: dict[str, Any]) -> None:
    """Random play over many episodes with a reset gives no violation and no warning."""
    game, random, watch = make(name, 3, **options), np.random.default_rng(0), StepWatch()
    specs = dict(game.behaviors())
    watch.connected(specs)
    for beginning in (0, STEPS):
        watch.reset()
        reports = game.reset({}, beginning)
        for sequence in range(beginning, beginning + STEPS):
            assert watch.read(Step(sequence=sequence, reports=tuple(reports)))
            actions = {
                report.behavior: random_actions(
                    report.behavior, report.decisions, specs[report.behavior].actions, random
                )
                for report in reports
                if report.decisions is not None
            }
            reports = game.step(actions)
    assert watch.findings == {}
    assert watch.ended > 10


@pytest.mark.parametrize(("name", "options"), GROUPS, ids=str)
def test_a_game_with_groups_passes_the_compliance_test(name: str, options: dict[str, Any]) -> None:
    """It connects over a socket, as with `sparring compliance`."""
    verdicts = verdicts_of(lambda address: run(make(name, 2, **options), address, connect_timeout_s=1.0))
    assert {rule: verdict.status for rule, verdict in verdicts.items() if verdict.status != "PASS"} == {}


@given(st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.sampled_from(LIKE_OTHERS)))
def test_option_of_a_configuration_is_the_same_on_a_command_line(value: Option) -> None:
    found = parse_options("gymnasium", ["env_id=1", f"a={option_text(value)}"])["a"]
    assert (type(found), found) == (type(value), value)


def test_options_get_the_type_that_the_simulator_expects() -> None:
    """Texts become bool, int or str by name; bridges infer the types of other options."""
    assert parse_options("goal", ["discrete=true", "actions=2", "memory=False", "behavior=7"]) == {
        "discrete": True,
        "actions": 2,
        "memory": False,
        "behavior": "7",
    }
    assert parse_options("gymnasium", ["env_id=1", "a=1", "b=1.5", "c=true", "d=x=y"]) == {
        "env_id": "1",
        "a": 1,
        "b": 1.5,
        "c": True,
        "d": "x=y",
    }


@pytest.mark.parametrize(
    ("name", "texts", "expected"),
    [
        ("goal", ["discrete"], "key=value"),
        ("goal", ["actions=1", "actions=2"], "each key once"),
        ("gymnasium", ["areas=2"], "and --areas for the number of areas"),
        ("goal", ["actions=many"], "expected int"),
        ("goal", ["discrete=1.5"], "expected true or false"),
        ("goal", ["memry=true"], "did you mean 'memory'"),
        ("golf", [], "did you mean 'goal'"),
    ],
)
def test_an_invalid_option_is_refused_with_the_allowed_ones(name: str, texts: list[str], expected: str) -> None:
    with pytest.raises(SettingsError, match=expected):
        parse_options(name, texts)


@pytest.mark.parametrize(
    ("name", "areas", "options", "expected"),
    [
        ("balance", 0, {}, "expected from 1 to 1,000,000"),
        ("balance", 1, {"discrete": True}, "expected one of behavior"),
        ("gymnasium", 1, {}, "'env_id'"),
    ],
)
def test_make_refuses_an_invalid_simulator(name: str, areas: int, options: dict[str, Any], expected: str) -> None:
    """A simulator that cannot run is refused before it connects."""
    with pytest.raises(SettingsError, match=expected):
        make(name, areas, **options)


@pytest.mark.parametrize("name", ["gymnasium", "pettingzoo"])
def test_a_missing_package_is_reported_with_its_extra(name: str, monkeypatch: Any) -> None:
    """Bridges are optional; the message has the command that installs one."""
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SettingsError, match=rf"pip install '{name}>="):
        make(name, 1, env_id="CartPole-v1")
