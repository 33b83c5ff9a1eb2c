"""Which parts share a node, and what does not fit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.pipeline.settings import Settings, parse_settings
from sparring.services.cluster.placement import Unit, described, lacking, stepping_processes, total, units_of

TEXT = """
behaviors: {{A: {{}}, B: {{}}}}
simulators: [{{name: goal, count: 5}}]
pipeline:
  stepping_processes: 2
  placement: {placement}
"""


def settings(placement: str = "{}") -> Settings:
    return parse_settings(TEXT.format(placement=placement), "test").settings


def test_simulators_share_the_node_of_the_stepping_process_that_they_connect_to() -> None:
    units = units_of(settings("{simulators: {num_cpus: 0.5, resources: {unity: 1}}}"), 2)
    assert [unit.name for unit in units] == ["stepping-0", "stepping-1", "assembly", "learning-A", "learning-B"]
    assert list(units[0].parts) == ["stepping-0", "simulator-0", "simulator-2", "simulator-4"]
    assert units[0].bundle == {"CPU": 2.5, "unity": 3.0}
    assert units[3].bundle == {"CPU": 1.0}


def test_an_assembly_of_its_own_is_beside_its_stepping_process() -> None:
    text = TEXT.format(placement="{}").replace(
        "stepping_processes: 2", "stepping_processes: 2\n  assembly: per stepping"
    )
    units = units_of(parse_settings(text, "test").settings, 2)
    assert [unit.name for unit in units] == ["stepping-0", "stepping-1", "learning-A", "learning-B"]
    assert list(units[1].parts) == ["stepping-1", "simulator-1", "simulator-3", "assembly-1"]


@pytest.mark.parametrize(
    ("nodes", "left"),
    [
        ([{"CPU": 20.0}], []),
        ([{"CPU": 4.0}, {"CPU": 3.0}, {"CPU": 3.0}], []),
        ([{"CPU": 4.0}, {"CPU": 3.0}, {"CPU": 2.0}], ["learning-B"]),
        ([{"CPU": 4.0, "GPU": 1.0}], ["stepping-1", "assembly", "learning-A", "learning-B"]),
        ([], ["stepping-0", "stepping-1", "assembly", "learning-A", "learning-B"]),
    ],
)
def test_what_has_no_room_beside_all_else_is_named(nodes: list[dict[str, float]], left: list[str]) -> None:
    assert [unit.name for unit in lacking(units_of(settings(), 2), nodes)] == left


@pytest.mark.parametrize(
    ("nodes", "count"),
    [
        ([{"CPU": 8.0}], 1),
        ([{"CPU": 3.5}] * 2, 2),
        ([{"CPU": 3.0}, {"CPU": 1.0}, {"CPU": 4.0}], 2),
        ([{"CPU": 9.0}] * 7, 7),
        ([{"CPU": 0.5}] * 3, 1),
    ],
)
def test_one_stepping_process_runs_on_each_node_with_room(nodes: list[dict[str, float]], count: int) -> None:
    """Its share of the five simulators needs half a CPU each."""
    per_node = settings("{stepping: {per: node}, simulators: {num_cpus: 0.5}}")
    assert stepping_processes(per_node, nodes) == count
    assert stepping_processes(settings(), nodes) == 2


AMOUNTS = st.dictionaries(st.sampled_from(["CPU", "GPU", "unity"]), st.integers(1, 4).map(float), min_size=1)


@given(units=st.lists(AMOUNTS, max_size=6), nodes=st.lists(AMOUNTS, max_size=4), apart=st.booleans())
def test_what_is_placed_fits(units: list[dict[str, float]], nodes: list[dict[str, float]], apart: bool) -> None:
    made = [Unit(parts={f"p{index}": amounts}, apart=apart) for index, amounts in enumerate(units)]
    left = lacking(made, nodes)
    placed = [unit for unit in made if unit not in left]
    there = total(nodes)
    assert all(amount <= there.get(name, 0.0) for name, amount in total(unit.bundle for unit in placed).items())
    assert not apart or len(placed) <= len(nodes)
    assert lacking(placed, nodes) == []


def test_amounts_are_described_without_what_ray_adds() -> None:
    assert described({"CPU": 2.0, "node:10.0.0.1": 1.0, "object_store_memory": 1e9, "unity": 0.5}) == "2 CPU, 0.5 unity"
    assert described({}) == "nothing"


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ("{stepping: {per: core}}", "per"),
        ("{learning: {num_gpus: -1}}", "num_gpus"),
        ("{strategy: CLOSE}", "strategy"),
        ("{monitor: {}}", "monitor"),
    ],
)
def test_invalid_placement_is_refused(placement: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        settings(placement)


def test_a_bundle_has_amounts_above_zero_only() -> None:
    found: Any = settings("{learning: {num_gpus: 1, num_cpus: 0, resources: {unity: 0}}}").pipeline.placement
    assert found.learning.bundle == {"GPU": 1.0}
