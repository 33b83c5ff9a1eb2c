"""Implicit rules of ML-Agents' files: schedules, completed defaults, ignored keys."""

from __future__ import annotations

from itertools import product

import pytest
import yaml

from sparring.pipeline.learning.settings import Hyperparameters
from sparring.pipeline.settings import Settings, parse_settings
from sparring.pipeline.settings.model import BehaviorSettings
from tests.settings.settings_texts import loaded, problems

KEYS = ("learning_rate_schedule", "beta_schedule", "epsilon_schedule")


def schedules(behavior: BehaviorSettings) -> tuple[str, ...]:
    """Returns the schedules of learning rate, beta and epsilon."""
    return tuple(getattr(behavior.hyperparameters, key) for key in KEYS)


def followed(*written: str | None) -> tuple[str, ...]:
    """Returns the three schedules that ML-Agents uses if those that are None are left out."""
    rate = written[0] or "linear"
    return tuple(one or rate for one in written)


CASES = [pytest.param(case, id="-".join(map(str, case))) for case in product((None, "linear", "constant"), repeat=3)]


def written(case: tuple[str | None, ...]) -> str:
    """Returns the hyperparameters of a case as YAML."""
    return str({key: value for key, value in zip(KEYS, case, strict=True) if value is not None}).replace("'", "")


@pytest.mark.parametrize("case", CASES)
def test_schedules_that_are_left_out_follow_that_of_the_learning_rate(
    case: tuple[str | None, ...],
) -> None:
    settings = loaded(f"behaviors: {{A: {{hyperparameters: {written(case)}}}}}").settings
    assert schedules(settings.behaviors["A"]) == followed(*case)


@pytest.mark.parametrize("case", CASES)
def test_default_settings_are_completed_before_a_behavior_adds_to_them(case: tuple[str | None, ...]) -> None:
    """As in ML-Agents, with `default_settings` the learning rate schedule of a behavior changes no other schedule."""
    text = (
        f"default_settings: {{hyperparameters: {written(case)}}}\n"
        "behaviors: {A: {}, B: {hyperparameters: {learning_rate_schedule: constant}},"
        " C: {hyperparameters: {beta_schedule: constant}}}"
    )
    settings = loaded(text).settings
    rate, beta, epsilon = followed(*case)
    assert schedules(settings.behaviors["A"]) == (rate, beta, epsilon)
    assert schedules(settings.behaviors["B"]) == ("constant", beta, epsilon)
    assert schedules(settings.behaviors["C"]) == (rate, "constant", epsilon)
    assert settings.default_settings is not None
    assert schedules(settings.default_settings) == (rate, beta, epsilon)


@pytest.mark.parametrize(
    ("default", "own"),
    [("trainer_type: sac", ""), ("max_steps: 5", "trainer_type: sac"), ("trainer_type: sac", "trainer_type: ppo")],
)
def test_default_settings_imply_only_schedules_that_the_trainer_has(default: str, own: str) -> None:
    settings = loaded(f"default_settings: {{{default}}}\nbehaviors: {{A: {{{own}}}, B: {{}}}}").settings
    for behavior in settings.behaviors.values():
        found = [getattr(behavior.hyperparameters, key, None) for key in KEYS]
        assert found == (["linear"] * 3 if behavior.trainer_type == "ppo" else ["constant", None, None])


def test_default_settings_without_hyperparameters_are_completed_too() -> None:
    text = "default_settings: {max_steps: 5}\nbehaviors: {A: {hyperparameters: {learning_rate_schedule: constant}}}"
    assert schedules(loaded(text).settings.behaviors["A"]) == ("constant", "linear", "linear")


def test_default_settings_include_the_implied_extrinsic_signal_and_team_change() -> None:
    text = (
        "default_settings: {{self_play: {{save_steps: 50000}}{signals}}}\n"
        "behaviors: {{A: {{self_play: {{save_steps: 1000}}, reward_signals: {{rnd: {{}}}}}}}}"
    )
    a = loaded(text.format(signals="")).settings.behaviors["A"]
    assert list(a.reward_signals.named()) == ["extrinsic", "rnd"]
    assert a.self_play is not None
    assert (a.self_play.save_steps, a.self_play.team_change) == (1000, 250_000)
    b = loaded(text.format(signals=", reward_signals: {curiosity: {}}")).settings.behaviors["A"]
    assert list(b.reward_signals.named()) == ["curiosity", "rnd"]


@pytest.mark.parametrize(
    "text",
    [
        "behaviors: {A: {hyperparameters: {learning_rate_schedule: constant}}}",
        "default_settings: {hyperparameters: {learning_rate_schedule: constant}}",
        "default_settings: {}\nbehaviors: {A: {hyperparameters: {learning_rate_schedule: constant}}}",
    ],
)
def test_schedules_are_explicit_in_the_saved_configuration(text: str) -> None:
    own = loaded(text).settings
    again = parse_settings(yaml.safe_dump(own.used, sort_keys=False), "configuration.yaml").settings
    assert again == own
    assert Settings.model_validate(own.written) == own
    for behavior in (*own.used["behaviors"].values(), own.used["default_settings"] or own.used["behaviors"]["A"]):
        assert set(KEYS) <= behavior["hyperparameters"].keys()


def test_an_invalid_schedule_is_one_problem_with_its_line() -> None:
    (line,) = problems("behaviors:\n  A:\n    hyperparameters: {learning_rate_schedule: liner}")
    assert line.startswith("run.yaml:3: behaviors.A.hyperparameters.learning_rate_schedule: got 'liner'; expected ")
    (line,) = problems("default_settings:\n  hyperparameters: {learning_rate_schedule: [1]}\nbehaviors: {A: {}}")
    assert line.startswith("run.yaml:2: default_settings.hyperparameters.learning_rate_schedule: got a list; expected ")


def test_schedules_follow_the_learning_rate_in_settings_without_a_file() -> None:
    made = Hyperparameters(learning_rate_schedule="constant", beta_schedule="linear")
    assert (made.beta_schedule, made.epsilon_schedule) == ("linear", "constant")


# ---------------------------------------------------------------- ignored keys


@pytest.mark.parametrize(
    ("text", "place", "got"),
    [
        (
            "behaviors:\n  A:\n    max_steps: 50000\n    self_play:\n      team_change: 50001",
            "run.yaml:5: behaviors.A.self_play.team_change",
            "got team_change 50001 with max_steps 50000; expected at most max_steps",
        ),
        (
            "behaviors:\n  A:\n    max_steps: 50000\n    self_play: {save_steps: 50001, team_change: 1000}",
            "run.yaml:4: behaviors.A.self_play.save_steps",
            "got save_steps 50001 with max_steps 50000; expected at most max_steps",
        ),
        (
            "behaviors:\n  A:\n    self_play:\n      save_steps: 200000",
            "run.yaml:4: behaviors.A.self_play.save_steps",
            "got team_change 1000000 with max_steps 500000; expected at most max_steps",
        ),
        (
            "behaviors:\n  A:\n    max_steps: 5000\n    self_play: {}",
            "run.yaml:3: behaviors.A.max_steps",
            "got team_change 100000 with max_steps 5000; expected at most max_steps",
        ),
        (
            "behaviors:\n  A:\n    trainer_type: poca\nsimulators: [{name: pettingzoo, options: {env_id: a}}]",
            "run.yaml:3: behaviors.A.trainer_type",
            "got trainer_type poca with a PettingZoo environment without groups; expected a group",
        ),
        (
            "default_settings:\n  max_steps: 5\n  self_play: {team_change: 6}\nbehaviors: {A: {}, B: {}}",
            "run.yaml:3: default_settings.self_play.team_change",
            "got team_change 6 with max_steps 5; expected at most max_steps",
        ),
        (
            "default_settings:\n  max_steps: 5\n  self_play: {team_change: 6}",
            "run.yaml:3: default_settings.self_play.team_change",
            "got team_change 6 with max_steps 5; expected at most max_steps",
        ),
        *(
            (
                f"behaviors:\n  A:\n    reward_signals:\n      {name}:\n        network_settings:\n"
                f"          memory: {{}}\n        {more}",
                f"run.yaml:6: behaviors.A.reward_signals.{name}.network_settings.memory",
                f"got a memory for the network of {name}; expected none, because it is ignored",
            )
            for name, more in (("gail", "demo_path: x"), ("curiosity", "gamma: 0.9"), ("rnd", "gamma: 0.9"))
        ),
    ],
)
def test_an_ignored_key_is_reported_once_with_its_line(text: str, place: str, got: str) -> None:
    (notice,) = loaded(text).notices
    assert notice.startswith(f"{place}: {got}")


@pytest.mark.parametrize(
    "text",
    [
        "behaviors: {A: {max_steps: 50000, self_play: {team_change: 50000}}}",
        "behaviors: {A: {max_steps: 50000}}",
        "behaviors: {A: {reward_signals: {rnd: {network_settings: {memory: null}}}, network_settings: {memory: {}}}}",
    ],
)
def test_a_key_with_effect_is_not_reported(text: str) -> None:
    assert loaded(text).notices == ()


def test_steps_of_the_command_line_apply_too() -> None:
    text = "behaviors:\n  A:\n    self_play: {team_change: 400000}"
    assert not loaded(text).notices
    (notice,) = loaded(text, {"behaviors.*.max_steps": 1000}).notices
    assert notice.startswith(
        "run.yaml:3: behaviors.A.self_play.team_change: got team_change 400000 with max_steps 1000"
    )
