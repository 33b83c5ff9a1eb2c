"""The examples of docs/environments.md train as they stand."""

from __future__ import annotations

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
