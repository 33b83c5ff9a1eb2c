"""Learners of several processes need minibatches that can be divided, and devices for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparring.services.main import main
from sparring.services.supervision.topology import cores_beside_learners
from tests.settings.settings_texts import loaded, only_problem


@pytest.mark.parametrize(
    ("behavior", "rest", "line", "expected"),
    [
        ("{hyperparameters: {batch_size: 3, buffer_size: 30}}", "", 4, "4 ranks with minibatches of 3 rows;"),
        (
            "{network_settings: {memory: {sequence_length: 32}}, hyperparameters: {batch_size: 100}}",
            "",
            4,
            "4 ranks with minibatches of 3 sequences of 32 rows;",
        ),
        ("{trainer_type: bc, behavioral_cloning: {demo_path: a.demo}}", "", 4, "4 ranks for a trainer of type bc;"),
        ("{}", "torch_settings: {device: mps}", 4, "4 ranks on device 'mps';"),
        ("{}", "torch_settings: {device: {A: 'cuda:1'}}", 4, "4 ranks on device 'cuda:1';"),
    ],
)
def test_ranks_without_a_part_are_refused(behavior: str, rest: str, line: int, expected: str) -> None:
    text = f"behaviors:\n  A: {behavior}\npipeline:\n  ranks: 4\n{rest}\n"
    problem = only_problem(text)
    assert problem.startswith(f"run.yaml:{line}: pipeline.ranks: got {expected} expected "), problem


def test_ranks_on_the_cpu_or_a_gpu_each_are_accepted() -> None:
    for device in ("cpu", "cuda"):
        text = f"behaviors: {{A: {{}}}}\npipeline: {{ranks: 4}}\ntorch_settings: {{device: {device}}}"
        assert loaded(text).settings.pipeline.ranks == 4


def test_ranks_are_processes_and_need_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("behaviors: {A: {}}\nsimulators: [{name: goal}]\npipeline: {ranks: 2}\n")
    assert main(["train", str(file), "--in-process", "--results-dir", str(tmp_path)]) == 2
    assert "got --in-process with pipeline.ranks; expected ranks 1" in capsys.readouterr().err
    assert not [path for path in tmp_path.iterdir() if path != file]


def test_other_parts_leave_a_core_to_each_rank() -> None:
    settings = loaded("behaviors: {A: {}}\npipeline: {ranks: 2}").settings
    found = cores_beside_learners(settings, ["stepping-0", "assembly", "learning-A"], [], range(4))
    assert found == {"stepping-0": (2, 3)}
