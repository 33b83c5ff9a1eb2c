"""`sparring check` summarizes a valid file and reports every problem of another."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.settings import no_device, not_here, parse_settings
from sparring.services.main import main as sparring


def _file(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_valid_file_is_summarized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _file(
        tmp_path,
        """
behaviors: {Goal: {hyperparameters: {batch_size: 16, buffer_size: 64}, max_steps: 3000}}
simulators: [{name: goal, count: 2, areas: 3, options: {discrete: true}}, {command: [./game, --fast]}]
pipeline: {mode: lockstep}
""",
    )
    assert sparring(["check", path]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: it cannot run here",
        "mode: lockstep: collecting and training take turns; the same seed gives the same weights",
        "behavior Goal: ppo, 3,000 steps, updates of 64 steps in 3 x minibatches of 16, at most 64 in flight",
        "simulator: 2 x goal with 3 areas, discrete True",
        "simulator: 1 x ./game --fast",
        "not found: simulators: command './game', which is no program on this machine: give its path, or "
        "start it by hand",
        "  Goal?team=0: agents 3; observations goal: vector 1; actions branches of 2 choices; masks none; groups none",
    ]


def test_a_configuration_that_a_pipe_holds_is_checked_without_its_simulators(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It can be read once."""
    reading, writing = os.pipe()
    os.write(writing, b"behaviors: {Goal: }\nsimulators: [{name: goal}]\n")
    os.close(writing)
    assert sparring(["check", f"/dev/fd/{reading}"]) == 0
    os.close(reading)
    output = capsys.readouterr().out
    assert f"notice: the simulators of /dev/fd/{reading} are not tried: it is a pipe or the standard input" in output


def test_a_configuration_may_have_any_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(_file(tmp_path, "behaviors: {Goal: }\nsimulators: [{name: goal}]\n")).rename(tmp_path / "goal.conf")
    assert sparring(["check", str(path)]) == 0
    assert "Goal?team=0: agents 1" in capsys.readouterr().out


@pytest.mark.parametrize("simulators", ["{name: goal}", "{name: goal}, {name: godot}"])
def test_a_behavior_that_no_simulator_names_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], simulators: str
) -> None:
    """A game of another engine is not started, and may name it."""
    path = _file(tmp_path, f"behaviors: {{Red: , Goal: , Blue: }}\nsimulators: [{simulators}]")
    assert sparring(["check", path]) == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: behaviors ")]
    expected = (
        "warning: behaviors Red, Blue: no simulator names them at its start (but Goal), and the run does not end "
        "without them; correct the names, or remove them"
    )
    assert warnings == ([] if "godot" in simulators else [expected])


def test_check_of_a_valid_file_shows_what_would_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "behaviors: {A: {self_play: {play_against_current_self_ratio: 0.2}}}\n"
        "environment_parameters: {size: {sampler_type: uniform}}\n"
        "pipeline: {address: 'tcp://127.0.0.1:0'}"
    )
    path = _file(tmp_path, text)
    assert sparring(["check", path]) == 0
    out = capsys.readouterr().out
    assert f"{path}: valid\nmode: overlap" in out
    assert "simulators: none to launch; waits for them at tcp://127.0.0.1:0" in out
    assert f"notice: {path}:1: " in out


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("env_settings: {env_path: builds/Ball}\n", "builds/Ball"),
        ("pipeline: {keys: no/keys}\n", "no/keys"),
    ],
)
def test_a_missing_build_or_key_gives_status_1_and_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, missing: str
) -> None:
    path = _file(tmp_path, "behaviors: {A: }\n" + text)
    assert sparring(["check", path]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{path}: it cannot run here"
    (line,) = [line for line in lines if line.startswith("not found: ")]
    assert missing in line


def test_an_invalid_file_gives_status_1_and_all_problems_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _file(tmp_path, "behaviors:\n  A: {max_step: 3}\n  B: {time_horizon: 0}\n")
    assert sparring(["check", path]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(": ")[0] for line in err.splitlines()] == [f"2 problems in {path}", f"{path}:2", f"{path}:3"]


@pytest.mark.parametrize("text", ['"a\\x1b[2J": {}', '{behaviors: {"a\\x1b[2J": {}}}'])
def test_control_characters_of_a_file_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    sparring(["check", _file(tmp_path, text)])
    out, err = capsys.readouterr()
    assert "a\\x1b[2J" in out + err
    assert "\x1b" not in out + err


@pytest.mark.parametrize(
    ("text", "key", "most"),
    [
        ("behaviors: {A: {}}\nsimulators: [{name: goal, count: 1e9}]", "simulators[0].count", "4,096"),
        ("behaviors: {A: {}}\nsimulators: [{name: goal, areas: 1e9}]", "simulators[0].areas", "65,536"),
        ("behaviors: {A: {}}\npipeline: {stepping_processes: 1e9}", "pipeline.stepping_processes", "1,024"),
        ("behaviors: {A: {}}\npipeline: {ranks: 1e9}", "pipeline.ranks", "1,024"),
        ("behaviors: {A: {}}\npipeline: {torch_threads: {learning: 1e9}}", "pipeline.torch_threads.learning", "1,024"),
        ("behaviors: {A: {}}\nenv_settings: {env_path: game, num_envs: 1e9}", "env_settings.num_envs", "4,096"),
        ("behaviors: {A: {hyperparameters: {buffer_size: 1e9}}}", "behaviors.A.hyperparameters.buffer_size", "100,000"),
        ("behaviors: {A: {network_settings: {num_layers: 1e9}}}", "behaviors.A.network_settings.num_layers", "1,000"),
        (
            "behaviors: {A: {network_settings: {memory: {memory_size: 1e9}}}}",
            "behaviors.A.network_settings.memory.memory_size",
            "31,622",
        ),
        (
            "behaviors: {A: {reward_signals: {rnd: {network_settings: {hidden_units: 1e9}}}}}",
            "behaviors.A.reward_signals.rnd.network_settings.hidden_units",
            "22,360",
        ),
        (
            "default_settings: {network_settings: {hidden_units: 1e9}}",
            "default_settings.network_settings.hidden_units",
            "22,360",
        ),
    ],
)
def test_sizes_beyond_any_machine_are_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, key: str, most: str
) -> None:
    assert sparring(["check", _file(tmp_path, text)]) == 1
    _, problem = capsys.readouterr().err.splitlines()
    assert f": {key}: got 1,000,000,000; expected at most {most}" in problem
    assert ", because " in problem


def test_buffer_larger_than_the_run_is_remarked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sparring(["check", _file(tmp_path, "behaviors: {A: {max_steps: 100}}")]) == 0
    assert "without effect: behaviors.A.max_steps 100: the run ends after the first update" in capsys.readouterr().out


def test_a_missing_file_gives_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sparring(["check", str(tmp_path / "none.yaml")]) == 1
    assert "expected a configuration file; check the path" in capsys.readouterr().err
    assert sparring(["check", str(tmp_path / "none.py")]) == 1
    assert "a file of Python; expected a configuration, which names the module" in capsys.readouterr().err


def test_missing_folders_and_demonstrations_are_reported_before_a_run_needs_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "behaviors: {Ball: {reward_signals: {gail: {demo_path: demos/nowhere.demo}}}}\n"
        "pipeline: {python_path: [environments]}\n"
    )
    assert sparring(["check", str(path)]) == 1
    output = capsys.readouterr().out
    assert f"not found: pipeline.python_path: {tmp_path / 'environments'}, which is no folder" in output
    refused = "not found: behaviors.Ball.reward_signals.gail.demo_path: got demos/nowhere.demo, which does not exist"
    assert refused in output


def test_missing_and_damaged_checkpoints_are_reported_before_a_run_needs_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (damaged := tmp_path / "damaged").mkdir()
    (damaged / "state.json").write_text("{}")
    path = tmp_path / "config.yaml"
    path.write_text(
        f"""
behaviors:
  Ball: {{init_path: nowhere, self_play: {{opponents: [{{checkpoint: {damaged}}}]}}}}
checkpoint_settings: {{initialize_from: former, results_dir: {tmp_path}}}
"""
    )
    assert sparring(["check", str(path)]) == 1
    output = capsys.readouterr().out
    assert "not found: got nowhere under init_path of Ball, which holds no checkpoint" in output
    assert f"not found: got the checkpoint {damaged}, which cannot be played" in output
    assert f"not found: got {tmp_path / 'former'} under initialize_from, which is no folder" in output


# ---------------------------------------------------------------- training device

ONE_HOST = "behaviors: {Ball: }\ntorch_settings: {device: cuda:77}\n"


class FakeProbe:
    """A replacement for the process that tests a device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, status: int = 0, out: str = "", err: str = "") -> None:
        self.devices: list[str] = []
        self.ended = subprocess.CompletedProcess([], status, out, err)
        monkeypatch.setattr(subprocess, "run", self.run)

    def run(self, command: list[str], **_: Any) -> Any:
        self.devices.append(command[-2])
        if self.ended.returncode == 99:
            raise subprocess.TimeoutExpired(command, 1.0)
        return self.ended


def test_a_device_is_tested_only_where_it_is_not_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = FakeProbe(monkeypatch)
    for text in ("behaviors: {A: }", "behaviors: {A: }\ntorch_settings: {device: cpu}"):
        assert no_device(parse_settings(text, "test").settings) is None
    assert probe.devices == []
    assert no_device(parse_settings(ONE_HOST, "test").settings) is None
    assert probe.devices == ["cuda:77"]


SEVERAL = """
behaviors: {Ball: , Goal: , Keeper: }
torch_settings: {device: {Ball: "cuda:1", Goal: "cuda:2"}, acting_device: cuda}
"""


def test_learners_have_devices_by_name_and_stepping_has_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = FakeProbe(monkeypatch)
    settings = parse_settings(SEVERAL, "test").settings
    assert [settings.torch_settings.of_learner(name) for name in settings.behaviors] == ["cuda:1", "cuda:2", None]
    assert no_device(settings) is None
    assert probe.devices == ["cuda:1", "cuda:2", "cuda"]
    with pytest.raises(SettingsError, match=r"got behavior 'Bal'; expected one of Ball, Goal, Keeper; did you mean"):
        parse_settings(SEVERAL.replace('{Ball: "', '{Bal: "'), "test")


@pytest.mark.parametrize(
    ("status", "out", "text"),
    [
        (1, '["this card", "another", "buy one"]', "got this card; expected another; buy one"),
        (-11, "", "whose test ended with status -11: the cause"),
        (99, "", "which did not answer within"),
    ],
)
def test_the_cause_of_an_unusable_device_is_reported(
    status: int,
    out: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    FakeProbe(monkeypatch, status, out, "first\nthe cause\n")
    assert sparring(["check", _file(tmp_path, ONE_HOST)]) == 1
    assert text in next(line for line in capsys.readouterr().out.splitlines() if line.startswith("not usable: got "))


@pytest.mark.slow
def test_a_run_on_a_missing_device_is_refused_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    options = ["--torch-device", "cuda:77", "--results-dir", str(results)]
    assert sparring(["train", _file(tmp_path, "behaviors: {Ball: }"), *options]) == 2
    error = capsys.readouterr().err
    assert "torch_settings.device 'cuda:77', which PyTorch" in error
    assert "leave torch_settings.device out" in error
    assert not results.exists()


def test_a_websocket_address_without_its_library_cannot_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "behaviors: {A: }\npipeline: {websocket_address: 'tcp://127.0.0.1:5010'}"
    settings = parse_settings(text, "run.yaml").settings
    assert not_here(settings) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    (line,) = not_here(settings)
    assert line.startswith(
        "pipeline.websocket_address: the library websockets, which is not installed: try pip install"
    )
