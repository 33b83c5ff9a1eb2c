"""Behavior ids and specs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.pipeline.specs import ActionSpec, BehaviorId, BehaviorSpec, ObservationSpec, SpecError

NAMES = st.text(st.characters(exclude_characters="?", exclude_categories=["Cs"]), min_size=1)


@given(NAMES, st.integers(0, 2**31 - 1))
def test_behavior_id_is_parsed_from_its_text(name: str, team: int) -> None:
    identity = BehaviorId(name=name, team=team)
    assert BehaviorId.parse(str(identity)) == identity
    assert BehaviorId.parse(name) == BehaviorId(name=name, team=0)


@pytest.mark.parametrize(
    "text",
    ["", "?team=1", "A?", "A?team", "A?team=", "A?team=-1", "A?team=x", "A?team=1.0", "A?side=1", "A?team=1&side=2",
     "A?team=2147483648", "A?team=1?team=2", "A?team=\u00b2", "A?team=1&team=2",
     "A?team=%31", "A?team=" + "1" * 5000],
)  # fmt: skip
def test_malformed_behavior_id_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="Name"):
        BehaviorId.parse(text)


def test_behavior_ids_sort_by_name_and_team() -> None:
    texts = ["B?team=0", "A?team=1", "A?team=0", "A?team=10"]
    assert [str(one) for one in sorted(map(BehaviorId.parse, texts))] == [
        "A?team=0", "A?team=1", "A?team=10", "B?team=0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "shape"), [("vector", (4,)), ("goal", (2,)), ("image", (3, 84, 84)), ("entities", (20, 5))]
)
def test_each_kind_of_observation_has_its_rank(kind: str, shape: tuple[int, ...]) -> None:
    assert ObservationSpec(name="o", shape=shape, kind=kind).shape == shape  # type: ignore[arg-type]
    for wrong in ((), (*shape, 1, 1), shape[:-1]):
        with pytest.raises(SpecError, match="dimensions"):
            ObservationSpec(name="o", shape=wrong, kind=kind)  # type: ignore[arg-type]


def test_only_known_kinds_sizes_and_dtypes_are_accepted() -> None:
    assert ObservationSpec(name="o", shape=(3, 8, 8), kind="image", dtype="uint8").dtype == "uint8"
    for wrong in (
        {"kind": "sound", "shape": (3,)},
        {"shape": (0,)},
        {"shape": (-1,)},
        {"shape": (3,), "dtype": "float64"},
        {"shape": (3,), "dtype": "uint8"},
        {"shape": (3, 2), "kind": "entities", "dtype": "uint8"},
    ):
        with pytest.raises(SpecError):
            ObservationSpec(name="o", **wrong)  # type: ignore[arg-type]


def test_action_spec_needs_an_action_and_counts_its_choices() -> None:
    assert ActionSpec(discrete=(3, 2, 4)).mask_size == 9
    assert ActionSpec(continuous=2).mask_size == 0
    for wrong in ({}, {"continuous": -1}, {"discrete": (0,)}, {"continuous": 1, "discrete": (3, -1)}):
        with pytest.raises(SpecError):
            ActionSpec(**wrong)  # type: ignore[arg-type]


def test_observations_of_a_behavior_have_unique_names() -> None:
    one = ObservationSpec(name="o", shape=(1,))
    assert BehaviorSpec(observations=(one,), actions=ActionSpec(continuous=1)).observations == (one,)
    for wrong in ((), (one, one)):
        with pytest.raises(SpecError, match="name"):
            BehaviorSpec(observations=wrong, actions=ActionSpec(continuous=1))


def test_spec_error_has_got_expected_and_remedy() -> None:
    with pytest.raises(SpecError) as caught:
        ObservationSpec(name="radar", shape=(0,))
    assert "radar" in caught.value.got
    assert caught.value.expected
    assert caught.value.remedy
