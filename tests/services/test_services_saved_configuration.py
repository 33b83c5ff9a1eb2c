"""The saved configuration of a run says which settings the user wrote and which are defaults."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from sparring.pipeline.settings import Settings, not_here, parse_settings, started_by_hand, without_effect
from sparring.services.process.runtime import Playback
from sparring.services.stages.playing import spec_timeout
from sparring.services.supervision.launch import trained_settings
from sparring.services.supervision.topology import Restarts, build, load_run

EDITOR = "behaviors: {Ball: {max_steps: 5e5, reward_signals: {gail: {demo_path: a.demo}}}}\n"
BUILD = EDITOR + f"env_settings: {{env_path: {sys.executable}, num_envs: 2}}\n"
LIMITED = EDITOR + f"env_settings: {{env_path: {sys.executable}, restarts_rate_limit_n: 3}}\n"
DIALS_IN = EDITOR + "pipeline: {address: 'tcp://127.0.0.1:0'}\n"
PLACED = EDITOR + "pipeline: {placement: {learning: {num_gpus: 1}, stepping: {per: node}}}\n"
CURRICULUM = """
behaviors: {Goal: {self_play: {}}}
simulators: [{name: goal, count: 2, options: {discrete: true}}]
environment_parameters:
  size: {curriculum: [{small: {value: 1, completion_criteria: {behavior: Goal}}}, {large: {value: 2.5}}]}
"""
TEXTS = {
    "editor": EDITOR,
    "build": BUILD,
    "limited": LIMITED,
    "dials in": DIALS_IN,
    "placed": PLACED,
    "curriculum": CURRICULUM,
}


def settings_of(text: str) -> Settings:
    return parse_settings(text, "run.yaml", {"env_settings.seed": 7, "checkpoint_settings.run_id": "r"}).settings


def fields_set(value: Any) -> Any:
    """Returns the keys that were written, at all depths."""
    if isinstance(value, BaseModel):
        return {name: fields_set(getattr(value, name)) for name in value.model_fields_set}
    if isinstance(value, dict):
        return {key: fields_set(one) for key, one in value.items()}
    return [fields_set(one) for one in value] if isinstance(value, tuple) else None


def saved(text: str, directory: Path) -> Settings:
    build(settings_of(text), run_id="r", directory=directory, seed=1).save()
    return load_run(directory)[0].settings


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_services_know_which_settings_were_written(text: str, tmp_path: Path) -> None:
    own, theirs = settings_of(text), saved(text, tmp_path)
    assert theirs == own
    assert fields_set(theirs) == fields_set(own)
    assert theirs.launched == own.launched


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_used_configuration_runs_the_same_and_shows_defaults_of_behaviors(text: str) -> None:
    own = settings_of(text)
    again = parse_settings(yaml.safe_dump(own.used, sort_keys=False), "configuration.yaml").settings
    assert again == own
    assert again.launched == own.launched
    assert [*without_effect(again)] == [*without_effect(own)]
    assert all("epsilon" in behavior["hyperparameters"] for behavior in own.used["behaviors"].values())
    ours, theirs = fields_set(own), fields_set(again)
    assert ours | {"behaviors": None} == theirs | {"behaviors": None}


@pytest.mark.parametrize("text", [EDITOR, PLACED], ids=["editor", "placed"])
def test_evaluation_of_a_run_with_the_editor_waits_for_the_editor(text: str, tmp_path: Path) -> None:
    saved(text, tmp_path)
    settings = trained_settings(tmp_path, deterministic=True, insecure=False)
    (line,) = started_by_hand(settings)
    assert line.startswith(
        "waits for the Unity editor: press Play when asked to (port 5004); the configuration names no"
    )
    (plan,) = build(settings, run_id="e", directory=tmp_path, seed=1, playing=Playback(checkpoints={})).simulators
    assert plan.command[4:6] == ("simulator", "unity")


def test_evaluation_waits_as_long_for_a_game_as_its_episodes_may_take() -> None:
    """The run starts its own simulators, so their limit is short; a run without an end waits forever."""
    evaluation = Playback(checkpoints={}, episodes=5, timeout_s=1234.0)
    own = settings_of(CURRICULUM)
    assert spec_timeout(own, evaluation)[0] == own.pipeline.simulator_timeout_s
    assert "--timeout" in spec_timeout(settings_of(EDITOR), evaluation)[1]
    assert (
        spec_timeout(settings_of(EDITOR), evaluation)[0] == spec_timeout(settings_of(DIALS_IN), evaluation)[0] == 1234.0
    )
    assert spec_timeout(own, Playback(checkpoints={}))[0] == math.inf


@pytest.mark.parametrize(
    ("text", "restarts"),
    [(BUILD, None), (LIMITED, Restarts(budget=3, period_s=60, lifetime=10)), (EDITOR, None)],
    ids=["unwritten", "written", "editor"],
)
def test_restart_limits_of_players_hold_in_evaluations(text: str, restarts: Restarts | None, tmp_path: Path) -> None:
    settings = saved(text, tmp_path)
    assert not not_here(settings)
    plans = build(settings, run_id="e", directory=tmp_path, seed=1, playing=Playback(checkpoints={})).simulators
    assert {plan.restarts for plan in plans} == {restarts}
