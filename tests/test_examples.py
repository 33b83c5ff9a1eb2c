"""The examples of docs/environments.md train as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.services.services_helpers import Training

EXAMPLES = sorted((Path(__file__).parent.parent / "docs" / "examples").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_example_trains(tmp_path: Path, file: Path) -> None:
    training = Training(tmp_path, str(file), "--in-process", "--max-steps", "2000")
    assert training.end() == 0, "\n".join(training.lines)
    (behavior,) = training.summary["behaviors"].values()
    assert behavior["steps"] >= 2000
    assert behavior["episodes"] > 0


def test_every_example_is_documented() -> None:
    text = (Path(__file__).parent.parent / "docs" / "environments.md").read_text()
    assert EXAMPLES
    assert not [file.stem for file in EXAMPLES if f"| `{file.stem}` |" not in text]
