"""Fixtures of the services' tests."""

from __future__ import annotations

import pytest

from tests.services.self_play_runs import fix_task_order


@pytest.fixture
def fixed_order(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch uses one thread and trio runs tasks in the same order every time, so that a failure repeats itself."""
    fix_task_order(monkeypatch, 0)
