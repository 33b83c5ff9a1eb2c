"""Learning from recorded steps alone: the losses of critics, the data, and the command without a simulator."""

from __future__ import annotations

import json
import math
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from sparring.pipeline.demonstrations.episodes import RecordingError
from sparring.pipeline.demonstrations.library import spec_of
from sparring.pipeline.learning import offline
from sparring.pipeline.learning.checkpoints import CheckpointFolder
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.learning.sac_settings import SACHyperparameters
from sparring.pipeline.learning.settings import OfflineSettings, TrainerSettings
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.networks.squashed import SquashedActor
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from sparring.services.commands import offline as command
from sparring.services.main import main
from tests.learning.signals_helpers import recorded, write

SPEC = BehaviorSpec(
    observations=(ObservationSpec(name="state", shape=(3,)),), actions=ActionSpec(continuous=1, discrete=(3, 2))
)


def learner(folder: Path, spec: BehaviorSpec = SPEC, **wanted) -> Learner:
    settings = TrainerSettings(
        trainer_type="sac",
        hyperparameters=SACHyperparameters(batch_size=32, steps_per_update=8, learning_rate=1e-3),
        network_settings=NetworkSettings(hidden_units=16, num_layers=1, normalize=True),
        offline=OfflineSettings(demo_path=str(folder), **wanted),
        max_steps=1000,
    )
    return Learner("Test", spec, settings, 0, offline=True, replay_folder=folder / "run" / "replay")


# ---------------------------------------------------------------- losses


def test_sum_over_choices_is_that_over_all_combinations_of_allowed_ones():
    values = torch.randn(4, 2, 5, generator=torch.Generator().manual_seed(0))
    masks = torch.zeros(4, 5, dtype=torch.bool)
    masks[:, 1] = masks[::2, 4] = True
    found = offline.log_sum(values, masks, (3, 2))
    for row in range(4):
        for signal in range(2):
            terms = [
                math.exp(values[row, signal, one] + values[row, signal, 3 + other])
                for one in range(3)
                for other in range(2)
                if not masks[row, one] and not masks[row, 3 + other]
            ]
            assert found[row, signal].item() == pytest.approx(math.log(sum(terms)), rel=1e-5)


def test_sum_over_continuous_actions_estimates_their_integral():
    """The logarithm of the integral of exp(3 a) over [-1, 1], which both kinds of samples estimate."""
    spec = BehaviorSpec(observations=SPEC.observations, actions=ActionSpec(continuous=1))
    actor = SquashedActor(spec, NetworkSettings(hidden_units=4), torch.Generator().manual_seed(0))
    head = torch.zeros(400, 2)
    found = offline.log_sum_of_all(
        actor, head, None, lambda _, actions: 3 * actions.unsqueeze(1), torch.Generator().manual_seed(1)
    )
    assert found.shape == (400, 1)
    assert found.exp().mean().item() == pytest.approx((math.exp(3) - math.exp(-3)) / 3, rel=0.05)


def test_losses_are_those_of_the_papers():
    values, targets, sums = (torch.randn(6, 2, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    pairs = list(zip(values.flatten(), targets.flatten(), sums.flatten(), strict=True))
    conservative = sum(0.5 * (q - y) ** 2 + 5 * (total - q) for q, y, total in pairs) / 12
    torch.testing.assert_close(offline.conservative_loss(values, targets, sums, 5.0), conservative)
    inverse = sum(v - q + (q - following) ** 2 / (4 * 0.5) for q, following, v in pairs) / 12
    torch.testing.assert_close(offline.inverse_loss(values, targets, sums, 0.5), inverse)


@pytest.mark.parametrize("objective", ["cql", "iq_learn"])
@pytest.mark.parametrize("actions", [{"continuous": 2}, {"discrete": (3, 2)}, {"continuous": 1, "discrete": (3,)}])
def test_updates_train_every_network_on_the_recorded_steps(tmp_path, objective, actions):
    spec = BehaviorSpec(observations=SPEC.observations, actions=ActionSpec(**actions))
    write(tmp_path, spec, recorded(spec, [20, 30, 25], masked=True))
    one = learner(tmp_path, spec, objective=objective)
    before = {name: array.copy() for name, array in one.checkpoint().weights.items()}
    report = one.update_offline()
    assert (report.steps, report.minibatches, report.skipped) == (32, 4, 0)
    after = one.checkpoint().weights
    for name in ("actor.body.layers.0.weight", "critic.0.body.layers.0.weight", "critic.1.body.layers.0.weight"):
        assert not np.array_equal(before[name], after[name])
    np.testing.assert_array_equal(
        after["actor.encoder.normalizer.count"], 76, "the statistics are those of the recorded steps, once"
    )


def test_penalty_lowers_the_values_of_actions_that_were_not_taken(tmp_path):
    spec = BehaviorSpec(observations=SPEC.observations, actions=ActionSpec(discrete=(3,)))
    columns = recorded(spec, [50] * 4)
    columns["discrete"][:] = 1
    write(tmp_path, spec, columns)
    margins = []
    for weight in (0.01, 5.0):
        one = learner(tmp_path, spec, weight=weight)
        while not one.done:
            one.update_offline()
        assert one.trained == 1000
        sac = one._algorithm
        minibatch = sac._minibatch(sac._sample())
        with torch.no_grad():
            values = sac.networks.evaluate(sac.networks.critics[0], minibatch.now, minibatch.continuous)[:, 0]
        margins.append((values[:, 1] - values[:, [0, 2]].mean(1)).mean().item())
    assert margins[1] > margins[0] + 0.1


def test_resumed_learner_reads_the_recorded_steps_again(tmp_path):
    write(tmp_path, SPEC, recorded(SPEC, [20, 30]))
    one = learner(tmp_path)
    one.update_offline()
    again = learner(tmp_path)
    again.restore(one.checkpoint())
    again.update_offline()
    one.update_offline()
    assert again.weights_sha256 == one.weights_sha256
    assert not (tmp_path / "run" / "replay").exists()


def test_recorded_steps_of_another_spec_are_refused(tmp_path):
    write(tmp_path, SPEC, recorded(SPEC, [5]))
    assert spec_of(tmp_path) == SPEC
    other = BehaviorSpec(observations=SPEC.observations, actions=ActionSpec(continuous=2))
    with pytest.raises(RecordingError, match="as Test has"):
        learner(tmp_path, other)


# ---------------------------------------------------------------- the command

CONFIG = """
behaviors:
  Test:
    trainer_type: {trainer}
    hyperparameters: {{batch_size: 16, buffer_size: 200, {hyper}}}
    network_settings: {{hidden_units: 8, num_layers: 1{network}}}
    {data}
    max_steps: 600
    summary_freq: 200
    checkpoint_interval: 300
pipeline: {{export: false}}
"""
BC = {"trainer": "bc", "hyper": "num_epoch: 1", "network": "", "data": "behavioral_cloning: {demo_path: demos}"}
SAC = {"trainer": "sac", "hyper": "steps_per_update: 8", "network": "", "data": "offline: {demo_path: demos}"}


def run(folder: Path, *arguments: str, **values: str) -> tuple[int, Path]:
    (folder / "demos").mkdir(exist_ok=True)
    write(folder / "demos", SPEC, recorded(SPEC, [20, 30]))
    (folder / "config.yaml").write_text(CONFIG.format(**values))
    status = main(["train", "config.yaml", "--offline", "--run-id", "run", "--seed", "1", *arguments])
    return status, folder / "results" / "run"


def no_process(*_: object, **__: object) -> None:
    raise AssertionError("a process was started")


@pytest.mark.parametrize("values", [BC, SAC], ids=["bc", "sac"])
def test_command_trains_without_a_simulator_and_continues(tmp_path, monkeypatch, values):
    monkeypatch.chdir(tmp_path)
    for start in ("subprocess.Popen.__init__", "os.fork"):
        monkeypatch.setattr(start, no_process)
    status, folder = run(tmp_path, **values)
    assert status == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["behaviors"]["Test"]["steps"]) == ("completed", 600)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines][-1] == 600
    assert any("Loss" in name for name in lines[0]["means"])
    assert {"curves.png", "run.json", "configuration.yaml"} <= {path.name for path in folder.iterdir()}
    assert len([*folder.glob("Test/checkpoint-*")]) == 2
    status, _ = run(tmp_path, "--resume", "--max-steps", "900", **values)
    assert status == 0
    assert json.loads((folder / "summary.json").read_text())["behaviors"]["Test"]["steps"] == 900


def test_command_goes_on_where_a_model_cannot_be_exported_and_a_line_is_damaged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, folder = run(tmp_path, "--set", "pipeline.export=true", **BC | {"network": ", previous_action: true"})
    assert status == 0
    lines = [json.loads(line) for line in (folder / "logs" / "supervisor.jsonl").read_text().splitlines()]
    assert [line["behavior"] for line in lines if line["event"] == "export_failed"] == ["Test", "Test"]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step":\n')
    status, _ = run(tmp_path, "--resume", "--max-steps", "900", **BC | {"network": ", previous_action: true"})
    assert status == 0


def test_command_goes_on_where_a_checkpoint_before_the_last_finds_no_room(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save, tried = CheckpointFolder.save, []

    def full_at_first(self, *arguments):
        tried.append(arguments)
        if len(tried) == 1:
            raise OSError(28, "No space left on device")
        return save(self, *arguments)

    monkeypatch.setattr(CheckpointFolder, "save", full_at_first)
    status, folder = run(tmp_path, **BC)
    assert (status, len(tried), len([*folder.glob("Test/checkpoint-*")])) == (0, 2, 1)


def test_command_goes_on_where_a_model_a_picture_or_a_line_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "results" / "run"
    status, _ = run(tmp_path, **BC)
    for name in ("Test.onnx", "curves.png"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()
    status, _ = run(tmp_path, "--resume", "--max-steps", "900", "--set", "pipeline.export=true", **BC)
    assert status == 0
    assert json.loads((folder / "summary.json").read_text())["behaviors"]["Test"]["steps"] == 900
    lines = [json.loads(line) for line in (folder / "logs" / "supervisor.jsonl").read_text().splitlines()]
    assert {"export_failed", "not_written"} <= {line["event"] for line in lines}


@pytest.mark.parametrize("is_replaced", [False, True])
def test_command_ends_where_the_folder_of_the_run_is_gone(tmp_path, monkeypatch, capsys, is_replaced):
    update = Learner.update_offline

    def move(self):
        if (folder := tmp_path / "results" / "run").exists() and not (tmp_path / "moved").exists():
            folder.rename(tmp_path / "moved")
            if is_replaced:
                folder.mkdir()
        return update(self)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Learner, "update_offline", move)
    status, folder = run(tmp_path, **BC)
    assert status == 1
    assert f"got no folder {folder.absolute()} any more" in capsys.readouterr().err
    assert not folder.exists() or not [*folder.iterdir()]


def test_command_says_that_it_skips_what_is_not_finite(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    huge = "offline: {demo_path: demos}\n    reward_signals: {extrinsic: {strength: 1.0e+30, gamma: 0.9}}"
    status, folder = run(tmp_path, **SAC | {"data": huge})
    assert status == 0
    lines = [json.loads(line) for line in (folder / "logs" / "supervisor.jsonl").read_text().splitlines()]
    skipped = [line for line in lines if line["event"] == "minibatches_skipped"]
    assert [(line["behavior"], line["count"]) for line in skipped] == [("Test", count) for count in (28, 28, 19)]


def test_command_that_is_stopped_before_its_first_interval_saves_the_weights(tmp_path, monkeypatch):
    update, stop = Learner.update_offline, []

    def stopped(self):
        stop[0].set()
        return update(self)

    @contextmanager
    def stopping():
        stop.append(threading.Event())
        yield stop[0]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_stopping", stopping)
    monkeypatch.setattr(Learner, "update_offline", stopped)
    status, folder = run(tmp_path, **SAC)
    assert status == 0
    assert json.loads((folder / "summary.json").read_text())["status"] == "stopped"
    assert len([*folder.glob("Test/checkpoint-*")]) == 1
    assert not (folder / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"trainer": "ppo", "data": ""}, "got trainer_type ppo; expected bc or sac"),
        ({**SAC, "data": ""}, "got trainer_type sac without offline"),
        ({**SAC, "network": ", previous_action: true"}, "sac with a memory or previous_action"),
    ],
)
def test_command_refuses_what_learns_only_from_a_simulator(tmp_path, monkeypatch, capsys, changed, message):
    monkeypatch.chdir(tmp_path)
    status, folder = run(tmp_path, **(BC | changed))
    assert status == 2
    assert message in capsys.readouterr().err
    assert not folder.exists()
