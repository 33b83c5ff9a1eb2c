"""A configuration file gives the settings that ML-Agents' format and our additions define."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

import pytest

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.settings import Settings, read, without_effect
from sparring.pipeline.settings.parameters import Curriculum, MultiRangeUniformSampler, UniformSampler
from tests.settings.settings_texts import loaded, only_problem, problems


def test_an_empty_behavior_has_the_defaults_of_ml_agents() -> None:
    behavior = loaded("behaviors: {Ball: }").settings.behaviors["Ball"]
    assert (behavior.trainer_type, behavior.max_steps, behavior.time_horizon) == ("ppo", 500_000, 64)
    assert (behavior.summary_freq, behavior.keep_checkpoints, behavior.checkpoint_interval) == (50_000, 5, 500_000)
    assert behavior.hyperparameters.model_dump() == {
        "batch_size": 1024,
        "buffer_size": 10240,
        "learning_rate": 3e-4,
        "beta": 5e-3,
        "epsilon": 0.2,
        "lambd": 0.95,
        "num_epoch": 3,
        "shared_critic": False,
        "learning_rate_schedule": "linear",
        "beta_schedule": "linear",
        "epsilon_schedule": "linear",
        "clip_value_loss": False,
        "decoupled_objective": True,
        "ratio": "per_dimension",
        "max_grad_norm": None,
        "adam_epsilon": 1e-8,
    }
    assert list(behavior.reward_signals.named()) == ["extrinsic"]
    assert behavior.network_settings.memory is None
    assert behavior.threaded is None
    assert behavior.self_play is None


def test_default_settings_are_merged_under_each_behavior_mapping_by_mapping() -> None:
    settings = loaded(
        """
        default_settings:
          max_steps: 1000
          hyperparameters: {batch_size: 32, learning_rate: 1e-3}
          network_settings: {memory: {memory_size: 64, sequence_length: 16}}
        behaviors:
          A: {hyperparameters: {batch_size: 16}, network_settings: {memory: null}}
          B: {max_steps: 7}
        """
    ).settings
    a, b = settings.behaviors["A"], settings.behaviors["B"]
    assert (a.hyperparameters.batch_size, a.hyperparameters.learning_rate, a.max_steps) == (16, 1e-3, 1000)
    assert (b.hyperparameters.batch_size, b.hyperparameters.learning_rate, b.max_steps) == (32, 1e-3, 7)
    assert a.network_settings.memory is None
    assert b.network_settings.memory is not None
    assert b.network_settings.memory.memory_size == 64


def test_default_settings_alone_apply_to_any_behavior() -> None:
    settings = loaded("default_settings: {max_steps: 7}\n").settings
    assert (settings.behaviors, settings.unnamed) == ({}, settings.default_settings)
    assert [*settings.sections] == ["default_settings"]
    named = settings.naming(["B", "A"])
    assert [(name, one.max_steps) for name, one in named.behaviors.items()] == [("B", 7), ("A", 7)]
    assert [*named.sections] == ["behaviors.B", "behaviors.A"]
    assert Settings.model_validate_json(json.dumps(named.written)) == named


def test_the_command_line_overrides_default_settings_too() -> None:
    overrides = {"behaviors.*.max_steps": 9, "behaviors.*.network_settings.deterministic": True}
    settings = loaded("default_settings: {max_steps: 7}\nbehaviors: {A: }\n", overrides).settings
    for behavior in (settings.behaviors["A"], settings.unnamed):
        assert behavior is not None
        assert (behavior.max_steps, behavior.network_settings.deterministic) == (9, True)


def test_added_behaviors_do_not_change_the_mode() -> None:
    """`threaded` of the defaults applies unless a behavior overrides it."""
    alone = loaded("default_settings: {threaded: false}\n").settings
    beside = loaded("default_settings: {threaded: false}\nbehaviors: {A: {threaded: true}}\n").settings
    for settings, mode in ((alone, "lockstep"), (beside, "overlap")):
        assert (settings.mode, settings.naming(["B"]).mode) == (mode, mode)
        assert Settings.model_validate_json(json.dumps(settings.naming(["B"]).written)).mode == mode


def test_incomplete_defaults_do_not_apply_to_other_behaviors() -> None:
    text = """
        default_settings: {reward_signals: {gail: {strength: 0.5}}}
        behaviors: {A: {reward_signals: {gail: {demo_path: a.demo}}}}
        """
    assert loaded(text).settings.unnamed is None


def test_lessons_may_depend_on_a_behavior_that_only_the_game_names() -> None:
    curriculum = """
        environment_parameters:
          size:
            curriculum:
              - {name: small, value: 1, completion_criteria: {behavior: B, measure: %s, threshold: 0.5}}
              - {name: large, value: 2}
        """
    assert loaded("default_settings: {}\n" + dedent(curriculum % "reward")).settings.environment_parameters
    with pytest.raises(SettingsError, match="got measure rating of B, which has no self_play"):
        loaded("default_settings: {}\n" + dedent(curriculum % "rating"))


@pytest.mark.parametrize("number", ["500000", "5.0e5", "5e5", "5E+5", "500_000", "500000.0", "+500000"])
def test_a_whole_number_may_have_any_usual_notation(number: str) -> None:
    assert loaded(f"behaviors: {{A: {{max_steps: {number}}}}}").settings.behaviors["A"].max_steps == 500_000


@pytest.mark.parametrize(("number", "value"), [("3e-4", 3e-4), (".5", 0.5), ("1", 1.0), ("1.", 1.0), ("2.5E-2", 0.025)])
def test_a_number_may_have_any_usual_notation(number: str, value: float) -> None:
    text = f"behaviors: {{A: {{hyperparameters: {{learning_rate: {number}}}}}}}"
    assert loaded(text).settings.behaviors["A"].hyperparameters.learning_rate == value


def test_a_leading_zero_is_decimal_and_a_colon_is_text() -> None:
    assert loaded("behaviors: {A: {max_steps: 010}}").settings.behaviors["A"].max_steps == 10
    assert "got '1:30'; expected a whole number" in only_problem("behaviors: {A: {max_steps: 1:30}}")


@pytest.mark.parametrize(("word", "value"), [("true", True), ("no", False), ("On", True), ("FALSE", False)])
def test_yes_and_no_are_truth_values_as_in_ml_agents(word: str, value: bool) -> None:
    assert loaded(f"behaviors: {{A: {{even_checkpoints: {word}}}}}").settings.behaviors["A"].even_checkpoints is value


def test_a_behavior_may_have_any_plain_name() -> None:
    names = ["3DBall", "1", "yes", "Wall Jump", "a.b", "球"]
    assert list(loaded("behaviors: {" + ", ".join(f"{n}: {{}}" for n in names) + "}").settings.behaviors) == names


def test_anchors_and_merges_are_followed() -> None:
    settings = loaded(
        """
        behaviors:
          A: &a {max_steps: 5, time_horizon: 3}
          B: *a
          C: {<<: *a, max_steps: 6}
          D: {<<: [{max_steps: 8}, *a]}
        """
    ).settings
    steps = {name: (b.max_steps, b.time_horizon) for name, b in settings.behaviors.items()}
    assert steps == {"A": (5, 3), "B": (5, 3), "C": (6, 3), "D": (8, 3)}


def test_team_change_is_five_times_save_steps_unless_it_is_written() -> None:
    text = "behaviors: {A: {self_play: {save_steps: 300}}, B: {self_play: {save_steps: 300, team_change: 7}}}"
    changes = [b.self_play.team_change for b in loaded(text).settings.behaviors.values() if b.self_play]
    assert changes == [1500, 7]


def test_old_names_are_accepted_with_a_notice() -> None:
    result = loaded(
        """
        behaviors:
          A:
            self_play:
              play_against_current_self_ratio: 0.3
            reward_signals:
              rnd:
                encoding_size: 32
        checkpoint_settings:
          load_model: true
        """
    )
    behavior = result.settings.behaviors["A"]
    assert behavior.self_play is not None
    assert behavior.self_play.play_against_latest_model_ratio == 0.3
    assert behavior.reward_signals.rnd is not None
    assert behavior.reward_signals.rnd.network_settings.hidden_units == 32
    assert result.settings.checkpoint_settings.resume
    assert [notice.split(": ")[0] for notice in result.notices] == ["run.yaml:5", "run.yaml:8", "run.yaml:10"]


@pytest.mark.parametrize(
    ("default", "own", "units"),
    [
        ("{}", "{encoding_size: 64}", 64),
        ("{}", "{encoding_size: 64, network_settings: {num_layers: 1}}", 128),
        ("{}", "{encoding_size: 64, network_settings: {hidden_units: 32}}", 32),
        ("{encoding_size: 64}", "{network_settings: {num_layers: 1}}", 64),
        ("{network_settings: {hidden_units: 32}}", "{encoding_size: 64}", 64),
        ("{encoding_size: null}", "{network_settings: {hidden_units: 32}, encoding_size: null}", 32),
    ],
)
def test_an_encoding_size_applies_unless_a_network_is_configured_beside_it(default: str, own: str, units: int) -> None:
    signals = "{reward_signals: {rnd: %s}}"
    result = loaded(f"default_settings: {signals % default}\nbehaviors: {{A: {signals % own}}}")
    rnd = result.settings.behaviors["A"].reward_signals.rnd
    assert rnd is not None
    assert rnd.network_settings.hidden_units == units
    both = "encoding_size: 64, network" in own
    assert any("encoding_size: has no effect beside network_settings" in one for one in result.notices) == both


def test_an_invalid_encoding_size_is_reported_with_its_line() -> None:
    line = only_problem("behaviors:\n  A:\n    reward_signals:\n      rnd:\n        encoding_size: wide\n")
    assert line.startswith(
        "run.yaml:5: behaviors.A.reward_signals.rnd.encoding_size: got 'wide'; expected a whole number"
    )


def test_even_checkpoints_divide_max_steps() -> None:
    text = "behaviors: {A: {even_checkpoints: true, keep_checkpoints: 4, max_steps: 1000}, B: {checkpoint_interval: 9}}"
    behaviors = loaded(text).settings.behaviors
    assert [b.steps_between_checkpoints for b in behaviors.values()] == [250, 9]


def test_environment_parameters_are_numbers_samplers_and_curricula() -> None:
    settings = loaded(
        """
        behaviors: {A: }
        environment_parameters:
          mass: 3
          gravity: {sampler_type: uniform, sampler_parameters: {min_value: 7, max_value: 12.5}}
          size: {sampler_type: multirangeuniform, sampler_parameters: {intervals: [[7, 10], [15, 20]]}}
          wall:
            curriculum:
              - First:
                  completion_criteria: {measure: reward, behavior: A, threshold: 3}
                  value: 1
              - name: Second
                value: {sampler_type: gaussian}
        """
    ).settings
    parameters = settings.environment_parameters
    assert parameters["mass"] == 3.0
    assert isinstance(parameters["gravity"], UniformSampler)
    assert isinstance(parameters["size"], MultiRangeUniformSampler)
    assert isinstance(parameters["wall"], Curriculum)
    assert [lesson.name for lesson in parameters["wall"].curriculum] == ["First", "Second"]


def test_a_section_whose_lines_are_all_commented_out_counts_as_left_out() -> None:
    assert loaded("behaviors: {A: }\nsimulators:\npipeline:\n  # mode: lockstep\n").settings.simulators == ()


def test_a_command_gets_its_address_number_and_seed() -> None:
    text = 'behaviors: {A: }\nsimulators: [{command: [./game, "--to={address}", "{number}{seed}", \'{"a": {}}\']}]'
    (simulator,) = loaded(text).settings.simulators
    arguments = simulator.arguments(address="unix:///{seed}", number=2, seed=9)
    assert arguments == ["./game", "--to=unix:///{seed}", "29", '{"a": {}}']


def test_an_option_keeps_the_type_that_was_written() -> None:
    text = "behaviors: {A: }\nsimulators: [{name: gymnasium, options: {env_id: X-v0, a: 1.0, b: 1, c: true, d: '1'}}]"
    (simulator,) = loaded(text).settings.simulators
    assert [repr(value) for value in simulator.options.values()] == ["'X-v0'", "1.0", "1", "True", "'1'"]


def test_overrides_take_precedence_over_the_file_and_its_defaults() -> None:
    own = {"run_id": "r", "results_dir": "out", "resume": True, "inference": True}
    overrides = {f"checkpoint_settings.{key}": value for key, value in own.items()}
    overrides |= {"behaviors.*.max_steps": 7, "env_settings.seed": 3}
    text = "behaviors: {A: {max_steps: 5}, B: }\ncheckpoint_settings: {run_id: x}\nenv_settings: {seed: 9}"
    settings = loaded(text, overrides).settings
    assert [b.max_steps for b in settings.behaviors.values()] == [7, 7]
    assert settings.seed == 3
    checkpoints = settings.checkpoint_settings
    assert (checkpoints.run_id, checkpoints.results_dir, checkpoints.resume) == ("r", "out", True)
    assert (checkpoints.force, checkpoints.inference) == (False, True)


@pytest.mark.parametrize(("word", "other"), [("force", "resume"), ("resume", "force")])
def test_resume_and_force_on_the_command_line_replace_the_other_in_the_file(word: str, other: str) -> None:
    text = f"behaviors: {{A: }}\ncheckpoint_settings: {{{word}: true}}"
    checkpoints = loaded(text, {f"checkpoint_settings.{other}": True}).settings.checkpoint_settings
    assert (getattr(checkpoints, word), getattr(checkpoints, other)) == (False, True)


def test_an_invalid_override_is_reported_as_part_of_the_command_line() -> None:
    lines = problems("behaviors: {A: }", {"behaviors.*.max_steps": 0, "checkpoint_settings.run_id": "../x"})
    assert lines[0].startswith("command line: --max-steps: got 0; expected at least 1")
    assert lines[1].startswith("command line: --run-id: got '../x'; expected the name of a folder")


def test_a_file_is_read_as_utf_8_with_or_without_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "ball.yaml"
    path.write_text("behaviors: {球: }", encoding="utf-8-sig")
    assert list(read(path).settings.behaviors) == ["球"]
    assert read(str(path)).notices == ()


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"#" * 2**21], ids=["missing", "not UTF-8", "too large"])
def test_an_unreadable_file_raises_a_settings_error_with_its_name(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "ball.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError, match=r"got .*ball\.yaml.*expected"):
        read(path)


def test_a_folder_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="expected a configuration file"):
        read(tmp_path)


def test_settings_without_effect_are_listed() -> None:
    text = (
        "behaviors: {A: {time_horizon: 20000}}\nengine_settings: {width: 3}\nenv_settings: {seed: 1, num_areas: 2}\n"
        "simulators: [{name: goal}]"
    )
    lines = [*without_effect(loaded(text).settings)]
    assert [line.split(":")[0] for line in lines] == [
        "engine_settings",
        "env_settings.num_areas",
        "behaviors.A.time_horizon 20000",
    ]
    assert not [*without_effect(loaded("behaviors: {A: }").settings)]


@pytest.mark.parametrize(
    ("signals", "others", "remarked"),
    [
        ("{curiosity: {strength: 0.1}}", "", True),
        ("{rnd: {}, curiosity: {}}", "", True),
        ("{extrinsic: {strength: 0}}", "", True),
        ("{extrinsic: {strength: 0}, rnd: {}}", "", True),
        ("{extrinsic: {strength: 0}}", "behavioral_cloning: {demo_path: a}", False),
        ("{gail: {demo_path: a}}", "", False),
        ("{gail: {demo_path: a}, extrinsic: {strength: 0}}", "", False),
        ("{extrinsic: {strength: 0.1}, curiosity: {}}", "", False),
    ],
)
def test_a_reward_of_the_environment_that_is_not_learned_from_is_remarked(
    signals: str, others: str, remarked: bool
) -> None:
    text = f"behaviors: {{A: {{reward_signals: {signals}, {others}}}}}"
    lines = [line for line in without_effect(loaded(text).settings) if ".reward_signals:" in line]
    expected = (
        "behaviors.A.reward_signals: the reward of the environment is not learned from, because extrinsic is left out "
        "or its strength is 0"
    )
    assert lines == ([expected] if remarked else [])
