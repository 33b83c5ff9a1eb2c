"""A whole run exports its checkpoints during training, and a failed export does not affect it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparring.pipeline.export.checkpoints import load_onnx
from sparring.pipeline.export.layout import TOLERANCE, compare, trained_policy
from sparring.pipeline.learning.checkpoints import load
from tests.services.services_helpers import Training

RESULT = re.compile(r"Goal  (\d+) steps  \S+  .*largest difference (\S+)  \S+ s")


def behavior(**network: Any) -> dict[str, Any]:
    return {
        "hyperparameters": {"batch_size": 64, "buffer_size": 256},
        "network_settings": {"hidden_units": 16, "num_layers": 1} | network,
        "max_steps": 500,
    }


@pytest.mark.slow
def test_run_exports_its_checkpoints_and_completes_despite_one_failed_export(tmp_path: Path) -> None:
    """A model that needs its previous action cannot be exported, because no game can provide it."""
    plain = {
        "behaviors": {"Goal": behavior(), "Blind": behavior(previous_action=True)},
        "simulators": [{"name": "goal", "options": {"behavior": name}} for name in ("Goal", "Blind")],
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(plain))
    training = Training(tmp_path, str(tmp_path / "config.yaml"), "--in-process", export=True)
    status, run = training.end(), training.directory
    events: dict[str, list[dict[str, Any]]] = {}
    for one in training.log():
        events.setdefault(one["event"], []).append(one)

    assert (status, training.summary["status"]) == (0, "completed"), "\n".join(training.lines)
    exported = {one["checkpoint"]: RESULT.fullmatch(one["result"]) for one in events["exported"]}
    newest = Path(training.summary["behaviors"]["Goal"]["checkpoint"])
    assert newest.relative_to(run).as_posix() in exported
    steps = {int(found[1]) for found in exported.values() if found is not None}
    assert len(steps) == len(exported)
    assert all(float(found[2]) <= TOLERANCE for found in exported.values() if found is not None)

    onnx = sorted(path.relative_to(run).as_posix() for path in run.rglob("*.onnx"))
    assert onnx == ["Goal.onnx", *sorted(f"Goal/Goal-{one}.onnx" for one in steps)]
    assert (run / "Goal.onnx").read_bytes() == (run / "Goal" / f"Goal-{max(steps)}.onnx").read_bytes()
    assert compare(trained_policy(load(newest)), load_onnx((run / "Goal.onnx").read_bytes())) <= TOLERANCE

    assert {(one["behavior"], one["level"]) for one in events["export_failed"]} == {("Blind", "warning")}
    assert "trained with network_settings.previous_action" in events["export_failed"][-1]["cause"]
    assert any("warning  supervisor  export_failed  behavior=Blind" in line for line in training.lines)
    assert (run / training.summary["behaviors"]["Blind"]["checkpoint"]).is_dir()
