"""Simulators by name, and their options from a command line."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from pipeline.errors import SettingsError
from pipeline.simulation.registry import NAMES, make, parse_options
from pipeline.specs import BehaviorId


def test_the_built_in_games_are_made_by_name() -> None:
    """Each has its own behaviors, and takes areas and options."""
    assert NAMES == ("balance", "goal", "rooms", "soccer", "gymnasium", "pettingzoo")
    for name in ("balance", "goal", "rooms", "soccer"):
        game = make(name, 2, behavior="Other")
        assert game.name == name
        assert {BehaviorId.parse(key).name for key in game.behaviors()} == {"Other"}
        (first, *_) = game.reset({}, 0)
        assert first.decisions is not None
        assert first.decisions.agents.size == ({"soccer": 4, "rooms": 4}.get(name, 2))


def test_options_take_the_type_that_the_simulator_wants() -> None:
    """Texts become bool, int or str by name; a bridge passes others on as what they look like."""
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
        ("goal", ["actions=many"], "expected int"),
        ("goal", ["discrete=1.5"], "expected true or false"),
        ("goal", ["memry=true"], "did you mean 'memory'"),
        ("golf", [], "did you mean 'goal'"),
    ],
)
def test_a_wrong_option_is_refused_with_what_is_allowed(name: str, texts: list[str], expected: str) -> None:
    """Got, expected, remedy."""
    with pytest.raises(SettingsError, match=expected):
        parse_options(name, texts)


@pytest.mark.parametrize(
    ("name", "areas", "options", "expected"),
    [
        ("balance", 0, {}, "1 or more"),
        ("balance", 1, {"discrete": True}, "expected one of behavior"),
        ("gymnasium", 1, {}, "'env_id'"),
    ],
)
def test_make_refuses_what_can_not_be_made(name: str, areas: int, options: dict[str, Any], expected: str) -> None:
    """A simulator that can not run is refused before it connects."""
    with pytest.raises(SettingsError, match=expected):
        make(name, areas, **options)


@pytest.mark.parametrize("name", ["gymnasium", "pettingzoo"])
def test_a_missing_package_is_refused_with_the_extra_that_brings_it(name: str, monkeypatch: Any) -> None:
    """Bridges are extras: without one the command to install it is in the message."""
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SettingsError, match=rf"pip install 'sparring\[{name}\]'"):
        make(name, 1, env_id="CartPole-v1")
