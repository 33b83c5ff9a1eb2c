"""Which start of a service came first."""

from __future__ import annotations

import pytest

from sparring.pipeline.messages.starts import comes_before, start_name


@pytest.mark.parametrize(
    ("one", "other", "before"),
    [
        ("stepping-0.5f3a-2", "stepping-0.5f3a-10", True),
        ("stepping-0.5f3a-10", "stepping-0.5f3a-2", False),
        ("stepping-0.5f3a-2", "stepping-0.5f3a-2", False),
        ("stepping-0.5f3a-7", "stepping-0.0b1c-1", True),  # of a run that this one resumes
        ("stepping-0.5f3a-1", "stepping-1.5f3a-2", False),
        ("stepping-0.1", "stepping-0.2", True),
    ],
)
def test_starts_are_ordered_within_a_service(one: str, other: str, before: bool) -> None:
    assert comes_before(one, other) is before


def test_a_start_names_its_service() -> None:
    assert start_name("learning-My.Ball.5f3a-2") == "learning-My.Ball"
