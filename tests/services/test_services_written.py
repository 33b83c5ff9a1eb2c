"""What a run keeps of its configuration: whoever reads that again knows what was written, and what was not."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from sparring.pipeline.settings import Overrides, Settings, not_here, parse_settings, started_by_hand, without_effect
from sparring.services.process.runtime import Playing
from sparring.services.stages.playing import patience
from sparring.services.supervision.launch import trained_settings
from sparring.services.supervision.topology import Restarts, build, load_run

EDITOR = "behaviors: {Ball: {max_steps: 5e5, reward_signals: {gail: {demo_path: a.demo}}}}\n"
BUILD = EDITOR + f"env_settings: {{env_path: {sys.executable}, num_envs: 2}}\n"
LIMITED = EDITOR + f"env_settings: {{env_path: {sys.executable}, restarts_rate_limit_n: 3}}\n"
DIALS_IN = EDITOR + "pipeline: {address: 'tcp://127.0.0.1:0'}\n"
MACHINES = (
    EDITOR + "pipeline: {hosts: {desk: {address: 127.0.0.1}, rack: {address: 127.0.0.2, services: [learning]}}}\n"
)
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
    "machines": MACHINES,
    "curriculum": CURRICULUM,
}


def settings_of(text: str) -> Settings:
    return parse_settings(text, "run.yaml", Overrides(seed=7, run_id="r")).settings


def fields_set(value: Any) -> Any:
    """The keys that were written, at all depths."""
    if isinstance(value, BaseModel):
        return {name: fields_set(getattr(value, name)) for name in value.model_fields_set}
    if isinstance(value, dict):
        return {key: fields_set(one) for key, one in value.items()}
    return [fields_set(one) for one in value] if isinstance(value, tuple) else None


def saved(text: str, directory: Path) -> Settings:
    build(settings_of(text), run_id="r", directory=directory, seed=1).save()
    return load_run(directory)[0].settings


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_all_services_know_what_was_written_and_what_was_not(text: str, tmp_path: Path) -> None:
    own, theirs = settings_of(text), saved(text, tmp_path)
    assert theirs == own
    assert fields_set(theirs) == fields_set(own)
    assert theirs.launched == own.launched


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_configuration_as_used_is_one_that_runs_the_same_and_shows_defaults_of_behaviors(text: str) -> None:
    own = settings_of(text)
    again = parse_settings(yaml.safe_dump(own.used, sort_keys=False), "configuration.yaml").settings
    assert again == own
    assert again.launched == own.launched
    assert without_effect(again) == without_effect(own)
    assert all("epsilon" in behavior["hyperparameters"] for behavior in own.used["behaviors"].values())
    ours, theirs = fields_set(own), fields_set(again)
    assert ours | {"behaviors": None} == theirs | {"behaviors": None}


@pytest.mark.parametrize("text", [EDITOR, MACHINES], ids=["editor", "machines"])
def test_an_evaluation_of_what_the_editor_trained_waits_for_the_editor(text: str, tmp_path: Path) -> None:
    saved(text, tmp_path)
    settings = trained_settings(tmp_path, deterministic=True, insecure=False)
    assert started_by_hand(settings) == ["waits for the Unity editor: press Play when told to (port 5004)"]
    (plan,) = build(settings, run_id="e", directory=tmp_path, seed=1, playing=Playing(checkpoints={})).simulators
    assert plan.command[4:6] == ("simulator", "unity")


def test_somebody_has_as_long_to_start_a_game_as_the_episodes_may_take() -> None:
    """Where simulators are ours they come by themselves, or not at all; a run without an end waits."""
    evaluation = Playing(checkpoints={}, episodes=5, timeout_s=1234.0)
    own = settings_of(CURRICULUM)
    assert patience(own, evaluation)[0] == own.pipeline.simulator_timeout_s
    assert "--timeout" in patience(settings_of(EDITOR), evaluation)[1]
    assert patience(settings_of(EDITOR), evaluation)[0] == patience(settings_of(DIALS_IN), evaluation)[0] == 1234.0
    assert patience(own, Playing(checkpoints={}))[0] == patience(own, None)[0] == math.inf


@pytest.mark.parametrize(
    ("text", "restarts"),
    [(BUILD, None), (LIMITED, Restarts(budget=3, period_s=60, lifetime=10)), (EDITOR, None)],
    ids=["unwritten", "written", "editor"],
)
def test_players_may_fail_as_often_in_an_evaluation_as_in_training(
    text: str, restarts: Restarts | None, tmp_path: Path
) -> None:
    settings = saved(text, tmp_path)
    assert not not_here(settings)
    plans = build(settings, run_id="e", directory=tmp_path, seed=1, playing=Playing(checkpoints={})).simulators
    assert {plan.restarts for plan in plans} == {restarts}
