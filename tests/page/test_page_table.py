"""Tables hold any number of lines in bounded memory, and no extreme value is lost."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sparring.services.page.table import Table

VALUES = st.one_of(st.none(), st.integers(-1000, 1000))


@given(values=st.lists(VALUES, min_size=1, max_size=400), most=st.sampled_from([2, 3, 8]), points=st.integers(1, 50))
def test_merged_rows_keep_extremes_and_ends(values: list[int | None], most: int, points: int) -> None:
    table = Table(most)
    for step, value in enumerate(values):
        table.add(step, 2.0 * step, {"other": 0.0} | ({} if value is None else {"value": float(value)}))
    known = [value for value in values if value is not None]
    if not known:
        assert "value" not in table.columns
        return
    found = table.query(["value"], "step", points=points)
    assert len(found.axes) <= points
    assert found.axes[-1].tolist() == [len(values) - 1, 2 * (len(values) - 1)]
    assert np.nanmin(found.values[..., 1]) == min(known)
    assert np.nanmax(found.values[..., 2]) == max(known)
    mean, low, high = np.moveaxis(found.values[:, 0], -1, 0)
    shown = np.isfinite(mean)
    assert np.all((low[shown] <= mean[shown] + 1e-3) & (mean[shown] <= high[shown] + 1e-3))
    assert len(table.query(["value"], "step", points=10**6).axes) < 2 * most + table.width


@given(steps=st.lists(st.integers(0, 60), min_size=1, max_size=120))
def test_lines_that_a_crash_rolled_back_are_left_out(steps: list[int]) -> None:
    table, kept = Table(), list[int]()
    for step in steps:
        table.add(step, 0.0, {"value": float(step)})
        kept = [one for one in kept if one < step] + [step]
    assert table.query(["value"], "step").values[:, 0, 0].tolist() == kept


def test_a_part_has_one_row_beyond_each_end_so_that_lines_go_to_the_edge() -> None:
    table = Table()
    for step in range(100):
        table.add(step, 1e9 + step, {"value": step / 2})
    assert table.query(["value"], "time", 1e9 + 10.5, 1e9 + 12.5).axes[:, 0].tolist() == [10, 11, 12, 13]
    assert table.query(["value"], "step", 200, 300).axes[:, 0].tolist() == [99]
    assert math.isclose(table.query(["value"], "step", 10, 20, points=3).values[0, 0, 0], 5.5)
