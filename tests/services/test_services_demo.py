"""`sparring demo info`: the content of demonstration files, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparring.pipeline.demonstrations.episodes import SUFFIX, Recording, encode
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from sparring.services.main import COMMANDS, main

SPEC = BehaviorSpec(
    observations=(
        ObservationSpec(name="place", shape=(2,)),
        ObservationSpec(name="eye", shape=(3, 4, 4), dtype="uint8", kind="image"),
    ),
    actions=ActionSpec(continuous=1, discrete=(2, 3)),
)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "demo", "show what recorded episodes hold")


def write(path: Path, lengths: list[int], rewards: list[float], group_rewards: float = 0.0) -> Path:
    e, r = len(lengths), sum(lengths)
    columns: dict[str, Any] = {
        "lengths": np.array(lengths, np.int32),
        "agents": np.zeros(e, np.int64),
        "teams": np.zeros(e, np.int32),
        "simulators": np.zeros(e, np.int32),
        "groups": np.zeros(e, np.int64),
        "terminated": np.arange(e) % 2 == 0,
        "continuous": np.zeros((r, 1), np.float32),
        "discrete": np.zeros((r, 2), np.int32),
        "rewards": np.array(rewards, np.float32),
        "group_rewards": np.full(r, group_rewards, np.float32),
    }
    for at, one in enumerate(SPEC.observations):
        columns[f"observation.{at}"] = np.zeros((r, *one.shape), one.dtype)
        columns[f"final_observation.{at}"] = np.zeros((e, *one.shape), one.dtype)
    path.write_bytes(encode(Recording(behavior="Ball", spec=SPEC, columns=columns)))
    return path


def test_info_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON lists specs, episodes, steps, returns, lengths and ends of each file, in order."""
    one = write(tmp_path / f"a{SUFFIX}", [1, 3], [4, 1, 1, 1], group_rewards=0.5)
    two = write(tmp_path / f"b{SUFFIX}", [2], [1, 1])
    assert main(["demo", "info", "--json", str(tmp_path), str(one)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [part["file"] for part in found] == [str(one), str(two), str(one)]
    assert found[0] == {
        "file": str(one),
        "behavior": "Ball",
        "observations": [
            {"name": "place", "kind": "vector", "shape": [2], "dtype": "float32"},
            {"name": "eye", "kind": "image", "shape": [3, 4, 4], "dtype": "uint8"},
        ],
        "actions": {"continuous": 1, "discrete": [2, 3]},
        "episodes": 2,
        "steps": 4,
        "returns": {"mean": 3.5, "deviation": pytest.approx(0.5**0.5), "min": 3.0, "max": 4.0},
        "group_returns": {"mean": 1.0, "deviation": pytest.approx(0.5**0.5), "min": 0.5, "max": 1.5},
        "lengths": {"mean": 2.0, "deviation": pytest.approx(2**0.5), "min": 1.0, "max": 3.0},
        "terminated": 0.5,
    }
    assert found[1]["returns"]["deviation"] is None
    assert "group_returns" not in found[1]


def test_info_as_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each file has a table."""
    write(tmp_path / f"a{SUFFIX}", [1, 3], [4, 1, 1, 1])
    write(tmp_path / f"b{SUFFIX}", [], [])
    assert main(["demo", "info", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    for text in (
        "eye: image, 3 x 4 x 4, uint8",
        "1 continuous; branches of 2, 3",
        "mean 3.5, deviation 0.707, from 3 to 4",
        "50% of the episodes",
    ):
        assert text in output
    assert output.count("behavior") == 2


def test_bad_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error contains file and reason, the status is 2, and the other files are not shown."""
    write(tmp_path / f"a{SUFFIX}", [1], [1])
    bad = tmp_path / f"b{SUFFIX}"
    bad.write_bytes(b"not at all")
    for arguments in ([str(tmp_path)], [str(bad)]):
        assert main(["demo", "info", *arguments]) == 2
        out, err = capsys.readouterr()
        assert str(bad) in err
        assert "safetensors" in err
        assert out == ""
    assert main(["demo", "info", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err
