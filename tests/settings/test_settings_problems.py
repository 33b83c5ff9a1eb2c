"""Invalid settings are refused with their line, the cause and a remedy."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.games.registry import option_types
from sparring.pipeline.settings import parse_settings
from tests.settings.settings_texts import NAME, loaded, only_problem, problems


def test_all_problems_are_reported_at_once_in_the_order_of_their_lines() -> None:
    lines = problems(
        """
        behaviors:
          Ball:
            max_step: 5e5
            hyperparameters:
              btach_size: 32
              learning_rate: -1
              epsilon: "0.2"
          Other:
            hyperparameters:
              batch_size: 20480
        simulators:
          - name: balnce
            cout: 2
        pipeline:
          mode: lokstep
        torch_settings: {device: gpu}
        """
    )
    assert [line.split(": ")[:2] for line in lines] == [
        ["run.yaml:4", "behaviors.Ball.max_step"],
        ["run.yaml:6", "behaviors.Ball.hyperparameters.btach_size"],
        ["run.yaml:7", "behaviors.Ball.hyperparameters.learning_rate"],
        ["run.yaml:8", "behaviors.Ball.hyperparameters.epsilon"],
        ["run.yaml:11", "behaviors.Other.hyperparameters.batch_size"],
        ["run.yaml:13", "simulators[0].name"],
        ["run.yaml:14", "simulators[0].cout"],
        ["run.yaml:16", "pipeline.mode"],
        ["run.yaml:17", "torch_settings.device"],
    ]


def test_a_contradiction_is_reported_beside_other_problems() -> None:
    lines = problems("behaviors:\n  A: {threaded: true, max_step: 3}\n  B: {threaded: false}\n")
    assert len(lines) == 2
    assert "got threaded true for A, false for B" in lines[1]


def test_a_contradiction_that_may_follow_from_another_problem_is_not_reported() -> None:
    line = only_problem("behaviors: {A: {hyperparameters: {batch_size: 20480, bufer_size: 40960}}}")
    assert "did you mean buffer_size?" in line


def test_a_key_in_the_wrong_section_is_reported_with_the_right_one() -> None:
    for text, remedy in (
        ("batch_size: 3", "move it: batch_size belongs to behaviors.*.hyperparameters"),
        ("hyperparameters: {gamma: 0.9}", "move it: gamma belongs to behaviors.*.reward_signals.extrinsic"),
        ("reward_signals: {gamma: 0.9}", "move it: gamma belongs to behaviors.*.reward_signals.extrinsic"),
        ("hyperparameters: {nonsense: 0.9}", "remove it"),
        *(
            (text, "move it: normalize belongs to behaviors.*.network_settings or behaviors.*.reward_signals.extrinsic")
            for text in ("normalize: true", "hyperparameters: {normalize: true}")
        ),
        ("save_steps: 3", "move it: save_steps belongs to behaviors.*.self_play"),
        ("teams: each", "move it: teams belongs to simulators[].options, of pettingzoo"),
        ("lr: 0.1", "write learning_rate, which belongs to behaviors.*.hyperparameters"),
        ("hyperparameters: {lr: 0.1}", "write learning_rate"),
        ("hyperparameters: {clip_range: 0.1}", "write epsilon"),
        ("total_timesteps: 3", "write max_steps"),
    ):
        assert only_problem(f"behaviors: {{A: {{{text}}}}}").endswith(f"; {remedy}")
    line = problems("behaviors: {A: }\nsimulators: [{name: gymnasium, options: {env: a}}]")[-1]
    assert line.endswith("without the option env_id; expected it, there is no default; write env_id in place of env")
    assert problems("A: {max_steps: 9}\nbehaviors: {A: }")[-1].endswith("; write behaviors.A")
    for key in ("areas", "num_envs"):
        line = problems(f"behaviors: {{A: }}\nsimulators: [{{name: gymnasium, options: {{env_id: a, {key}: 3}}}}]")[-1]
        assert line.endswith(f"got {key} among the options; expected areas beside them; write areas: 3 there")


@pytest.mark.parametrize(
    ("name", "key", "remedy"),
    [
        *(("gymnasium", key, "move it into options") for key in option_types("gymnasium")[0]),
        *(("pettingzoo", key, "move it into options") for key in option_types("pettingzoo")[0]),
        ("gymnasium", "teams", "did you mean areas?"),
        ("goal", "discrete", "move it into options"),
        ("gymnasium", "num_envs", "write areas: 8 (copies in one process)"),
        ("pettingzoo", "n_envs", "write areas: 8 (copies in one process)"),
    ],
)
def test_an_option_beside_the_options_is_to_be_moved_into_them(name: str, key: str, remedy: str) -> None:
    line = problems(f"behaviors: {{A: }}\nsimulators: [{{name: {name}, {key}: 8, options: {{env_id: a}}}}]")[-1]
    assert line.startswith(f"run.yaml:2: simulators[0].{key}: got the unknown key {key!r}; expected one of name, ")
    assert line.endswith(f"; {remedy}")


def test_a_key_of_another_trainer_is_reported_with_those_that_have_it() -> None:
    line = only_problem("behaviors: {A: {trainer_type: sac, hyperparameters: {num_epoch: 3}}}")
    assert "expected one of batch_size, " in line
    assert "which sac has; remove it: it belongs to bc, poca, ppo" in line
    assert "did you mean sac?" in only_problem("behaviors: {A: {trainer_type: sacc, hyperparameters: {tau: 0.1}}}")


def test_more_first_steps_than_the_run_has_are_refused() -> None:
    text = "behaviors: {A: {trainer_type: sac, max_steps: 100, hyperparameters: {buffer_init_steps: 100}}}"
    assert "buffer_init_steps 100 and max_steps 100; expected fewer" in only_problem(text)


def test_a_misspelt_value_is_reported_with_the_nearest_one() -> None:
    text = "behaviors: {A: {hyperparameters: {beta_schedule: liner}}}"
    assert "got 'liner'; expected 'linear' or 'constant'; did you mean linear?" in only_problem(text)


def test_a_problem_of_the_defaults_is_reported_once_with_its_line() -> None:
    line = only_problem("behaviors: {A: , B: }\ndefault_settings:\n  hyperparameters:\n    num_epoch: 0\n")
    assert line.startswith("run.yaml:4: default_settings.hyperparameters.num_epoch: got 0; expected at least 1")


def test_defaults_that_every_behavior_overrides_are_still_checked() -> None:
    line = only_problem("behaviors: {A: {max_steps: 3}}\ndefault_settings: {max_steps: often}\n")
    assert line.startswith("run.yaml:2: default_settings.max_steps: got 'often'")


def test_defaults_need_not_be_complete() -> None:
    text = """
        default_settings: {hyperparameters: {batch_size: 20480}, reward_signals: {gail: {strength: 0.5}}}
        behaviors: {A: {hyperparameters: {buffer_size: 40960}, reward_signals: {gail: {demo_path: a.demo}}}}
        """
    assert loaded(text).settings.behaviors["A"].hyperparameters.batch_size == 20480


def test_a_minibatch_must_fit_into_the_buffer() -> None:
    line = only_problem("behaviors:\n  A:\n    hyperparameters:\n      buffer_size: 64\n")
    assert line.startswith(
        "run.yaml:4: behaviors.A.hyperparameters.buffer_size: got batch_size 1024 with buffer_size 64"
    )


def test_a_minibatch_must_hold_a_sequence() -> None:
    text = "behaviors:\n  A:\n    hyperparameters: {batch_size: 63}\n    network_settings: {memory: {}}\n"
    line = only_problem(text)
    assert line.startswith("run.yaml:3: behaviors.A.hyperparameters.batch_size: got batch_size 63 with sequence_length")
    assert "raise batch_size or lower sequence_length" in line
    assert loaded(text.replace("63", "64")).settings.behaviors["A"].hyperparameters.batch_size == 64


def test_a_group_critic_needs_hidden_units_divisible_by_its_heads() -> None:
    text = "behaviors:\n  A:\n    max_steps: 3\n    trainer_type: poca\n    network_settings: {hidden_units: 30}\n"
    line = only_problem(text)
    assert line.startswith("run.yaml:4: behaviors.A.trainer_type: got trainer_type poca with")
    assert "hidden_units 30; expected a multiple of 4, one part for each attention head" in line
    assert line.endswith("set it to 32")
    assert loaded(text.replace("30", "32")).settings.behaviors["A"].network_settings.hidden_units == 32
    assert loaded(text.replace("poca", "ppo")).settings.behaviors["A"].network_settings.hidden_units == 30


def test_a_group_critic_cannot_share_the_network_of_the_actor() -> None:
    text = "behaviors:\n  A:\n    trainer_type: poca\n    hyperparameters:\n      shared_critic: true\n"
    line = only_problem(text)
    assert line.startswith("run.yaml:3: behaviors.A.trainer_type: got trainer_type poca with")
    assert "shared_critic true; expected a critic of its own" in line
    assert line.endswith("remove shared_critic")
    assert loaded(text.replace("poca", "ppo")).settings.behaviors["A"].hyperparameters.shared_critic


def test_a_contradiction_with_the_defaults_is_reported_at_the_line_of_the_behavior() -> None:
    """Both lines take part; that of the behavior is the one to correct."""
    text = """\
        default_settings: {trainer_type: poca}
        behaviors:
          A:
            network_settings:
              hidden_units: 30
          B: {}
        """
    assert only_problem(text).startswith("run.yaml:4: behaviors.A.network_settings: got trainer_type poca with")
    both = "default_settings:\n  trainer_type: poca\n  network_settings: {hidden_units: 30}\nbehaviors: {A: , B: }\n"
    assert only_problem(both).startswith("run.yaml:2: default_settings.trainer_type: got trainer_type poca with")


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ("reward_signals: {gail: {}}", "expected demo_path, which has no default"),
        ("reward_signals: {}", "got no reward signal"),
        ("behavioral_cloning: {steps: 4}", "expected demo_path, which has no default"),
        ("network_settings: {memory: {memory_size: 33}}", "got 33; expected a multiple of 2"),
        ("hyperparameters: 5", "got 5; expected a mapping"),
        ("hyperparameters:", "got nothing; expected a mapping"),
        ("even_checkpoints: 1", "got 1; expected true or false"),
        ("max_steps: true", "got true; expected a whole number"),
        ("max_steps: 2.5", "got 2.5; expected a whole number"),
        ("max_steps: '64'", "got '64'; expected a whole number; write a plain one, without quotes"),
        ("max_steps: 1e300", "got 1e300; expected a whole number"),
        ("hyperparameters: {beta: .inf}", "got .inf; expected a finite number"),
        ("hyperparameters: {beta: .nan}", "got .nan; expected"),
    ],
)
def test_an_invalid_behavior_is_refused(section: str, text: str) -> None:
    assert text in only_problem(f"behaviors:\n  A:\n    {section}\n")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("wide", "got 'wide'; expected a number"),
        ("{}", "expected a number, or a mapping with 'sampler_type'"),
        ("{sampler_type: unifrom}", "did you mean uniform?"),
        ("{samplertype: uniform}", "did you mean sampler_type?"),
        ("{sampler_type: uniform, sampler_parameters: {min_value: 3}}", "got min_value 3 above max_value 1"),
        ("{sampler_type: gaussian, sampler_parameters: {st_dev: -1}}", "got -1; expected at least 0"),
        ("{sampler_type: multirangeuniform, sampler_parameters: {intervals: [[1]]}}", "expected a pair of numbers"),
        ("{sampler_type: multirangeuniform, sampler_parameters: {intervals: [[1, 2, 3]]}}", "expected at most 2"),
        ("{sampler_type: multirangeuniform, sampler_parameters: {intervals: [[2, 1]]}}", "got the interval [2, 1]"),
        ("{curriculum: []}", "expected at least 1 entry"),
        ("{curriculum: [{name: a, value: 1}, {name: b, value: 2}]}", "got no completion_criteria for lesson 'a'"),
        ("{curriculum: [{name: a, value: {curriculum: []}}]}", "got the unknown key 'curriculum'"),
        ("{curriculum: [a: {vale: 1}]}", "did you mean value?"),
        (
            "{curriculum: [{name: a, value: 1, completion_criteria: {behavior: A, measure: progress, threshold: 3}}]}",
            "got threshold 3 for progress; expected 0 to 1",
        ),
        (
            "{curriculum: [{name: a, value: 1, completion_criteria: {behavior: Al, threshold: 3}}]}",
            "got behavior 'Al'; expected one of Ali; did you mean Ali?",
        ),
    ],
)
def test_an_invalid_environment_parameter_is_refused(value: str, text: str) -> None:
    lines = problems(f"behaviors: {{Ali: }}\nenvironment_parameters:\n  size: {value}\n")
    assert any(text in line and line.startswith(f"{NAME}:3: ") for line in lines), lines


@pytest.mark.parametrize(
    ("simulator", "text"),
    [
        ("{}", "got neither name nor command"),
        ("{name: goal, command: [x]}", "got name and command together"),
        (
            "{name: gaol}",
            "got 'gaol'; expected one of balance, crowd, goal, goals, godot, gymnasium, key-door, pettingzoo, rooms, "
            "scramble, soccer, tag, unity; did you mean goal?",
        ),
        ("{name: goal, options: {descrete: true}}", "got the unknown option 'descrete' of goal"),
        ("{name: goal, options: {discrete: 1}}", "got 1 for the option discrete of goal; expected true or false"),
        ("{name: gymnasium}", "got gymnasium without the option env_id"),
        ("{name: gymnasium, options: {env_id: [1]}}", "got a list or mapping for the option env_id"),
        ("{command: [x], areas: 2}", "got areas or options beside a command"),
        ("{command: [x, '{adress}']}", "got {adress} in '{adress}'; expected only {address}"),
        ("{command: []}", "expected at least 1 entry"),
        ("{command: ./game --fast}", "expected a list"),
        ("{name: goal, count: 0}", "got 0; expected at least 1"),
        ("goal", "got 'goal'; expected a mapping"),
    ],
)
def test_an_invalid_simulator_is_refused(simulator: str, text: str) -> None:
    line = only_problem(f"behaviors: {{A: }}\nsimulators:\n  - {simulator}\n")
    assert text in line
    assert line.startswith(f"{NAME}:3: simulators[0]")


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:0", "tcp://[::1]:5005", "tcp://0.0.0.0:5005", "unix:///tmp/run.sock"]
)
def test_a_valid_address_is_accepted(address: str) -> None:
    text = f"behaviors: {{A: }}\npipeline: {{address: '{address}'}}"
    assert loaded(text).settings.pipeline.address == address


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("tcp://127.0.0.1", "expected tcp://HOST:PORT"),
        ("tcp://127.0.0.1:99999", "expected tcp://HOST:PORT with a port from 0 to 65535"),
        ("tcp://[::1:3", "expected tcp://HOST:PORT"),
        ("tcp://xn--é..:5", "expected tcp://HOST:PORT"),
        ("unix://relative", "or unix:///PATH"),
        ("5005", "expected tcp://HOST:PORT"),
        ("unix:tmp/x", "or unix:///PATH"),
        ("unix://tmp/x", "or unix:///PATH"),
        ("unix:///tmp/x?y", "or unix:///PATH"),
    ],
)
def test_an_invalid_address_is_refused(address: str, text: str) -> None:
    assert text in only_problem(f"behaviors: {{A: }}\npipeline: {{address: '{address}'}}")


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("websocket_address: 'tcp://127.0.0.1:0'", "with a port from 1 to 65535"),
        ("websocket_address: 'unix:///tmp/x'", "expected tcp://HOST:PORT"),
        ("websocket_address: 'ws://127.0.0.1:5010'", "expected tcp://HOST:PORT"),
        ("address: 'tcp://127.0.0.1:5010', websocket_address: 'tcp://127.0.0.1:5010'", "choose another port"),
        ("address: 'tcp://[::1]:5009', websocket_address: 'tcp://[::1]:5010', stepping_processes: 2", "another port"),
        ("websocket_origins: ['http://localhost']", "got websocket_origins without websocket_address"),
        ("encrypt: false, websocket_address: 'tcp://0.0.0.0:5010'", "got encrypt: false with address"),
        *(
            (f"websocket_address: 'tcp://127.0.0.1:1', websocket_origins: ['{origin}']", f"got '{origin}'; expected")
            for origin in (
                "*",
                "null",
                "http://localhost:8000/",
                "http://LOCALHOST",
                "localhost:8000",
                "http://*.x.org",
            )
        ),
    ],
)
def test_an_invalid_websocket_listener_is_refused(keys: str, text: str) -> None:
    assert text in only_problem(f"behaviors: {{A: }}\npipeline: {{{keys}}}")


def test_each_stepping_process_listens_for_websockets_at_a_port_of_its_own() -> None:
    text = "behaviors: {A: }\npipeline: {stepping_processes: 2, websocket_address: 'tcp://[::1]:5010'}"
    pipeline = loaded(text).settings.pipeline
    assert [pipeline.websocket_of(index) for index in range(2)] == ["tcp://[::1]:5010", "tcp://[::1]:5011"]


def test_a_heartbeat_must_be_shorter_than_the_timeout() -> None:
    assert "expected at most 1e+06" in only_problem("behaviors: {A: }\npipeline: {simulator_timeout_s: 9e9}\n")
    line = only_problem("behaviors: {A: }\npipeline:\n  heartbeat_s: 60\n")
    assert line.startswith("run.yaml:3: pipeline.heartbeat_s: got heartbeat_s 60 with simulator_timeout_s 60")


@pytest.mark.parametrize(
    "name", ["Ball?team=0", "a/b", "..", "' '", '"a\\tb"', "'a:b'", "'a#1'", "logs", "a.onnx", "metrics.jsonl.1"]
)
def test_a_behavior_name_must_be_able_to_name_a_folder(name: str) -> None:
    assert "expected a valid name of a folder" in only_problem(f"behaviors:\n  {name}: {{}}\n")


def test_resume_and_force_exclude_each_other() -> None:
    assert "got resume and force" in only_problem("behaviors: {A: }\ncheckpoint_settings: {resume: yes, force: yes}")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "got an empty file"),
        ("# nothing\n", 1, "got an empty file"),
        ("- A\n", 1, "got a list at the top"),
        ("A\n", 1, "got a scalar at the top"),
        ("env_settings: {seed: 1}", 1, "behaviors: got nothing; expected behaviors"),
        ("behaviors:\n", 1, "behaviors: got nothing; expected behaviors"),
        ("behaviors: {}", 1, "behaviors: got no behavior; expected at least one; write `behaviors: {NAME: {}}`"),
        ("behaviors:\n\tA: {}\n", 2, "got a tab in the indentation"),
        ("  A:\n    max_steps: 3\nsimulators: []\n", 3, "which may lack a key above it, as `behaviors:`"),
        ("behaviors:\n  A\n    max_steps: 3\n", 3, "correct the line, or the one before it"),
        ("behaviors:\n  A: {max_steps: 3\n", 3, "expected YAML"),
        ("behaviors: {A: }\n---\nbehaviors: {A: }\n", 2, "expected YAML"),
        ("behaviors:\n  A: \x00\n", 2, "characters that YAML does not allow"),
        ("behaviors:\n  A: {max_steps: 3}\n  A: {}\n", 3, "got the key a second time, after line 2"),
        ("behaviors:\n  ? [a]\n  : {}\n", 2, "got a list as a key"),
        ('behaviors:\n  Ball:\n    reward_signals: {"\\ud83d": {}}\n', 3, r"got '\ud83d' as a key; expected a word"),
        ('behaviors: {"A\\0": {}}\n', 1, r"got 'A\x00' as a key; expected a word"),
        ("behaviors:\n  A: {<<: 3}\n", 2, "got << with a scalar; expected a mapping"),
        ("behaviors:\n  A: &a {B: *a}\n", 2, "contains itself"),
        ("behaviors:\n  A: " + "[" * 5000, 1, "nested deeper than 50 levels"),
        ("behaviors:\n  A: !!python/object:os.system {}\n", 2, "expected one without a tag"),
        ("behaviors:\n  A: !!python/name:os.system x\n", 2, "expected a scalar that YAML itself defines"),
        ("behaviors:\n  A: {max_steps: 99999999999999999999}\n", 2, "whole numbers up to 2^53"),
        ("default_settings: 5\nbehaviors: {A: }\n", 1, "default_settings: got 5; expected a mapping"),
        (
            "default_settings:\n  reward_signals: {gail: {strength: 0.5}}\n",
            2,
            "default_settings.reward_signals.gail.demo_path: got nothing; expected demo_path",
        ),
        ("default_settings: {}\nbehaviors: [A]\n", 2, "behaviors: got a list; expected a mapping"),
    ],
)
def test_an_invalid_document_is_refused_with_its_line(text: str, line: int, message: str) -> None:
    found = only_problem(text)
    assert found.startswith(f"{NAME}:{line}: ")
    assert message in found


def test_exponentially_growing_anchors_are_refused_before_they_expand() -> None:
    levels = "\n".join(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]" for i in range(1, 12))
    assert "larger than 100000 entries" in only_problem(f"x0: &x0 [a]\n{levels}\nbehaviors: {{A: }}")


@pytest.mark.parametrize("text", ["Ball:\n  trainer_type: ppo\n", "Ball:\n  hyperparameters: {}\n"])
def test_trainer_outside_of_behaviors_is_refused_with_the_line_to_write(text: str) -> None:
    expected = "got the trainer 'Ball' at the top of the file; expected it below behaviors; write `behaviors:` above it"
    assert expected in only_problem(text)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        (
            "behaviors:\n  trainer_type: ppo\n  hyperparameters:\n    batch_size: 8\n",
            "write `NAME:` above trainer_type, ",
        ),
        ("behaviors:\n  hyperparameters: {batch_size: 8}\n", "write `NAME:` above hyperparameters, with the name"),
        ("behaviors:\n  Ball:\n  max_steps: 5\n", "indent it below Ball"),
    ],
)
def test_keys_directly_below_behaviors_lack_a_name(text: str, remedy: str) -> None:
    found = only_problem(text)
    assert "directly below behaviors; expected it below the name of a behavior; " + remedy in found
    assert f"{NAME}:{2 if 'Ball' not in text else 3}: behaviors." in found


def test_a_section_below_behaviors_is_moved() -> None:
    found = only_problem("behaviors:\n  A: {max_steps: 5}\n  simulators: [{name: goal}]\n")
    assert "got the section simulators below behaviors; expected it beside them; move it to the left margin" in found


def test_behaviors_may_have_the_names_of_keys() -> None:
    found = loaded("behaviors: {offline: {max_steps: 5}, self_play: {}, max_steps: }").settings.behaviors
    assert found.keys() == {"offline", "self_play", "max_steps"}


def test_a_section_that_is_true_has_its_defaults_as_the_remedy() -> None:
    for value, remedy in (("true", "write {} for its defaults"), ("false", "leave it out"), ("5", "indent its keys")):
        assert f"; {remedy}" in only_problem(f"behaviors: {{A: {{self_play: {value}}}}}")


def test_sections_of_formats_before_ml_agents_1_are_unknown_keys() -> None:
    assert "unknown key 'parameter_randomization'" in only_problem("behaviors: {A: }\nparameter_randomization: {}\n")


def test_a_refused_value_is_not_reported_again_as_a_contradiction() -> None:
    """Its default replaces a refused value, and contradictions of that default are not the user's mistake."""
    text = 'behaviors: {A: {hyperparameters: {batch_size: "32", buffer_size: 16}}}'
    assert "batch_size" in only_problem(text)


@given(st.text(max_size=200) | st.text(alphabet="ab:-{}[]&*<!'\"#\n 1.e?|>%@`\t,", max_size=60))
def test_any_text_gives_settings_or_a_settings_error(text: str) -> None:
    _accepted_or_refused(text)


YAML_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.sampled_from(["behaviors", "simulators", "pipeline", "environment_parameters", "default_settings"]), YAML_VALUES
)
def test_any_value_of_a_section_gives_settings_or_a_settings_error(section: str, value: object) -> None:
    document = {"behaviors": {"A": {}}} | {section: value}
    _accepted_or_refused(yaml.safe_dump(document))


def _accepted_or_refused(text: str) -> None:
    try:
        found = parse_settings(text, NAME)
    except SettingsError:
        return
    assert found.settings.behaviors
