"""The examples of docs/environments.md and docs/python.md run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services.services_helpers import HANG_S, Training
from tests.services.started import start

EXAMPLES = sorted((Path(__file__).parent.parent / "docs" / "examples").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_example_trains(tmp_path: Path, file: Path) -> None:
    training = Training(tmp_path, str(file), "--in-process", "--max-steps", "2000")
    assert training.end() == 0, "\n".join(training.lines)
    for name, behavior in training.summary["behaviors"].items():
        assert behavior["steps"] >= 2000
        assert behavior["episodes"] > 0
        assert any(f"behavior  id={name}?team=" in line and "observations" in line for line in training.lines)
    if file.stem == "lamps":
        words = ["evaluate", str(training.directory), "--episodes", "5", "--in-process"]
        recorded = start([*words, "--video", str(tmp_path / "lamps.gif")])
        with recorded.stdout:
            assert recorded.wait(HANG_S) == 0
        assert (tmp_path / "lamps.gif").read_bytes().startswith(b"GIF89a")


def test_every_example_is_documented() -> None:
    text = (Path(__file__).parent.parent / "docs" / "environments.md").read_text()
    assert EXAMPLES
    assert not [file.stem for file in EXAMPLES if f"| `{file.stem}` |" not in text]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_example_in_python_trains_and_plays(tmp_path: Path) -> None:
    """It needs no more than the installed package, in an empty folder."""
    script = EXAMPLES[0].with_name("from_python.py")
    command = [sys.executable, "-W", "error", str(script)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    *intervals, last = ended.stdout.splitlines()
    assert all(re.fullmatch(r" *[\d,]+ steps  reward \d+", one) for one in intervals), ended.stdout
    assert intervals
    assert float(re.fullmatch(r"the pole stands for (\d+) of 500 steps", last)[1]) > 195, ended.stdout
    assert script.name in (script.parents[1] / "python.md").read_text()
