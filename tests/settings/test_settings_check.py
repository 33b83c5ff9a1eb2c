"""`sparring check`."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.check import main


def _file(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_valid_file_is_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _file(
        tmp_path,
        """
behaviors: {Goal: {hyperparameters: {batch_size: 16, buffer_size: 64}, max_steps: 3000}}
simulators: [{name: goal, count: 2, areas: 3, options: {discrete: true}}, {command: [./game, --fast]}]
pipeline: {mode: lockstep}
""",
    )
    assert main([path]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: valid",
        "mode: lockstep: collecting and training take turns; the same seed gives the same weights",
        "behavior Goal: ppo, 3,000 steps, updates of 64 steps in 3 x minibatches of 16, at most 64 in flight",
        "simulator: 2 x goal with 3 areas, discrete True",
        "simulator: 1 x ./game --fast",
        "not found: simulators: command './game', which is no program here: give its path, or start it by hand",
    ]


def test_a_valid_file_says_what_would_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "behaviors: {A: {self_play: {play_against_current_self_ratio: 0.2}}}\n"
        "environment_parameters: {size: {sampler_type: uniform}}\n"
        "pipeline: {address: 'tcp://127.0.0.1:0'}"
    )
    path = _file(tmp_path, text)
    assert main([path]) == 0
    out = capsys.readouterr().out
    assert f"{path}: valid\nmode: overlap" in out
    assert "simulators: none to launch; waits for them at tcp://127.0.0.1:0" in out
    assert f"notice: {path}:1: " in out


def test_a_file_that_is_wrong_gives_1_and_all_problems_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _file(tmp_path, "behaviors:\n  A: {max_step: 3}\n  B: {time_horizon: 0}\n")
    assert main([path]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(": ")[0] for line in err.splitlines()] == [f"2 problems in {path}", f"{path}:2", f"{path}:3"]


def test_a_file_that_is_missing_gives_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.yaml")]) == 1
    assert "expected a configuration file; check the path" in capsys.readouterr().err


def test_demonstrations_that_are_not_there_are_named_before_a_run_needs_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("behaviors: {Ball: {reward_signals: {gail: {demo_path: demos/nowhere.demo}}}}\n")
    assert main([str(path)]) == 0
    said = capsys.readouterr().out
    assert "not found: behaviors.Ball.reward_signals.gail.demo_path: got demos/nowhere.demo, which is not there" in said
