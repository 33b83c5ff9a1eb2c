"""Order of the incarnations of a service."""

from __future__ import annotations

import pytest

from sparring.pipeline.messages.incarnations import precedes, service_of


@pytest.mark.parametrize(
    ("one", "other", "before"),
    [
        ("stepping-0.5f3a-2", "stepping-0.5f3a-10", True),
        ("stepping-0.5f3a-10", "stepping-0.5f3a-2", False),
        ("stepping-0.5f3a-2", "stepping-0.5f3a-2", False),
        ("stepping-0.5f3a-7", "stepping-0.0b1c-1", True),  # the run was resumed
        ("stepping-0.5f3a-1", "stepping-1.5f3a-2", False),
        ("stepping-0.1", "stepping-0.2", True),
    ],
)
def test_incarnations_of_a_service_are_ordered(one: str, other: str, before: bool) -> None:
    assert precedes(one, other) is before


def test_name_of_an_incarnation_contains_its_service() -> None:
    assert service_of("learning-My.Ball.5f3a-2") == "learning-My.Ball"
