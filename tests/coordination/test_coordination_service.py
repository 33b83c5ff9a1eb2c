"""The service around the ledgers: what it does with the books that it finds."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from sparring.pipeline.errors import ServiceError
from sparring.services.stages.coordinator import STATE_FILE, Coordination


def coordination_in(folder: Path) -> Coordination:
    """Without behaviors; it needs no more than its folder."""
    context: Any = SimpleNamespace(run=SimpleNamespace(directory=folder), log=structlog.get_logger())
    return Coordination(context, SimpleNamespace(), {})  # type: ignore[arg-type]


@pytest.mark.parametrize("left", [b"", b"\0\0\0\0", b'{"Ball": {"led', b"\xff"])
def test_books_that_a_loss_of_power_has_spoilt_are_refused_with_the_remedy(tmp_path: Path, left: bytes) -> None:
    (tmp_path / STATE_FILE).write_bytes(left)
    with pytest.raises(ServiceError, match=r"got .*coordination\.json.*expected the books.*remove the file"):
        coordination_in(tmp_path).restore()


def test_a_run_without_books_begins_with_new_ones(tmp_path: Path) -> None:
    coordination = coordination_in(tmp_path)
    coordination.restore()
    coordination.save()
    coordination.restore()
    assert json.loads((tmp_path / STATE_FILE).read_text()) == {"behaviors": {}, "self_play": None, "lessons": None}
