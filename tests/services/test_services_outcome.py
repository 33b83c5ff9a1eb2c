"""The books of a run at its end."""

from __future__ import annotations

import pytest

from services.outcome import closed

BOOKS = {"produced": 100, "trained": 60, "ghost": 5, "stale": 3, "lost": 2, "open": 20}


@pytest.mark.parametrize(
    ("produced", "died", "then"),
    [
        (100, [], {}),  # they do not balance, and that is to be seen
        (100, ["stepping-0"], {"lost": 12}),
        (85, ["coordination"], {"produced": 90}),
        (90, ["coordination"], {}),
    ],
)
def test_what_is_in_no_place_was_lost_with_what_died(produced: int, died: list[str], then: dict[str, int]) -> None:
    assert closed({**BOOKS, "produced": produced}, died) == {**BOOKS, "produced": produced, **then}
