"""Malformed reports are refused with their code, the field and, where there is one, the agent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.messages.simulator import BehaviorReport, Decisions, Ends, Step
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from sparring.pipeline.stepping.connections import SimulatorConnection
from sparring.pipeline.stepping.stepper import Stepper
from sparring.pipeline.stepping.validation import check_report, image_out_of_range
from tests.stepping.stepping_fakes import MASKS, SPEC, FakePolicy

AGENTS = (11, 22, 33)


def observations(n: int = 3) -> tuple[Any, ...]:
    return np.zeros((n, 1), np.float32), np.zeros((n, 1, 2, 2), np.uint8)


def decisions(**changed: Any) -> Decisions:
    n = len(AGENTS)
    return replace(
        Decisions(
            agents=np.array(AGENTS, np.int64),
            groups=np.zeros(n, np.int64),
            observations=observations(),
            rewards=np.zeros(n, np.float32),
            group_rewards=np.zeros(n, np.float32),
            masks=np.zeros((n, MASKS), bool),
            matches=np.zeros(n, np.int64),
        ),
        **changed,
    )


def ends(**changed: Any) -> Ends:
    n = len(AGENTS)
    return replace(
        Ends(
            agents=np.array(AGENTS, np.int64),
            observations=observations(),
            rewards=np.zeros(n, np.float32),
            group_rewards=np.zeros(n, np.float32),
            interrupted=np.zeros(n, bool),
            outcomes=np.ones(n, np.float32),
            matches=np.zeros(n, np.int64),
        ),
        **changed,
    )


def f32(*values: float) -> Any:
    return np.array(values, np.float32)


def numbers(*values: float) -> tuple[Any, ...]:
    return np.array(values, np.float32).reshape(-1, 1), observations(len(values))[1]


BOTH = [
    ("rewards_long", {"rewards": f32(0, 0, 0, 0)}, "shape", ["rewards", "4 rows"]),
    ("group_rewards_short", {"group_rewards": f32(0)}, "shape", ["group_rewards"]),
    ("matches_short", {"matches": np.zeros(1, np.int64)}, "shape", ["matches"]),
    ("nan_reward", {"rewards": f32(0, np.nan, 0)}, "not_finite", ["rewards", "agent 22"]),
    ("infinite_group_reward", {"group_rewards": f32(0, 0, -np.inf)}, "not_finite", ["group_rewards", "agent 33"]),
    ("opposite_infinities", {"rewards": f32(0, np.inf, -np.inf)}, "not_finite", ["rewards", "agent 22"]),
    ("no_column", {"observations": observations()[:1]}, "shape", ["observations", "1 columns"]),
    ("one_column_more", {"observations": (*observations(), *observations())}, "shape", ["observations", "4 columns"]),
    ("rows_missing", {"observations": observations(2)}, "shape", ["observations['number']", "(2, 1)"]),
    (
        "other_shape",
        {"observations": (observations()[0], np.zeros((3, 2, 2, 1), np.uint8))},
        "shape",
        ["observations['pixels']", "(3, 2, 2, 1)"],
    ),
    (
        "other_dtype",
        {"observations": (observations()[0], np.zeros((3, 1, 2, 2), np.float32))},
        "dtype",
        ["observations['pixels']", "float32"],
    ),
    ("nan_seen", {"observations": numbers(0, 0, np.nan)}, "not_finite", ["observations['number']", "agent 33"]),
    (
        "both_infinities_seen",
        {"observations": numbers(0, -np.inf, np.inf)},
        "not_finite",
        ["observations['number']", "agent 22"],
    ),
]
DECISIONS = [
    ("groups_short", {"groups": np.zeros(2, np.int64)}, "shape", ["groups", "2 rows"]),
    ("negative_group", {"groups": np.array([0, 1, -4])}, "group", ["groups", "-4", "agent 33"]),
    ("huge_group", {"groups": np.array([2**31, 1, 1])}, "group", ["groups", str(2**31), "agent 11"]),
    ("narrow_masks", {"masks": np.zeros((3, MASKS - 1), bool)}, "masks", ["masks"]),
    ("masks_of_two", {"masks": np.zeros((2, MASKS), bool)}, "masks", ["masks"]),
    (
        "branch_closed",
        {"masks": np.array([[0, 0, 0, 0, 0], [1, 1, 0, 1, 1], [1, 1, 1, 0, 0]], bool)},
        "masks",
        ["branch 0", "agent 33"],
    ),
    ("last_branch_closed", {"masks": np.array([[0, 0, 0, 1, 1]] * 3, bool)}, "masks", ["branch 1", "agent 11"]),
]
ENDS = [
    ("interrupted_short", {"interrupted": np.zeros(2, bool)}, "shape", ["ends.interrupted"]),
    ("outcomes_short", {"outcomes": f32(1)}, "shape", ["ends.outcomes"]),
    ("outcome_above", {"outcomes": f32(1, 1.5, 0)}, "shape", ["outcomes", "1.5"]),
    ("outcome_nan", {"outcomes": f32(1, 1, np.nan)}, "not_finite", ["ends.outcomes", "agent 33"]),
]
CASES = [
    *(
        (f"decisions-{name}", decisions(**changed), None, code, words)
        for name, changed, code, words in BOTH + DECISIONS
    ),
    *((f"ends-{name}", None, ends(**changed), code, words) for name, changed, code, words in BOTH + ENDS),
]


@pytest.mark.parametrize(("made", "ended", "code", "words"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_a_malformed_report_is_refused_by_code_field_and_agent(
    made: Decisions | None, ended: Ends | None, code: str, words: list[str]
) -> None:
    """Each mistake has its code of docs/protocol.md and names behavior, field and first wrong agent."""
    with pytest.raises(RemoteProtocolError) as caught:
        check_report(BehaviorReport(behavior="Ball?team=3", decisions=made, ends=ended), SPEC)
    assert caught.value.code == code
    for word in ("Ball?team=3", "decisions" if ended is None and code != "masks" else "", *words):
        assert word in caught.value.got
    assert caught.value.expected
    assert caught.value.remedy


def test_the_largest_numbers_are_accepted() -> None:
    """Numbers up to 1e18 are accepted although the sum of many squares would overflow."""
    largest, agents = np.full(500, 1e18, np.float32), np.arange(500)
    seen = Decisions(agents=agents, observations=observations(500), rewards=largest, group_rewards=-largest)
    check_report(BehaviorReport(behavior="A", decisions=seen), SPEC)


@pytest.mark.parametrize("value", [1.01e18, -2e19, 3.4e38])
@pytest.mark.parametrize("column", ["observations", "rewards", "group_rewards", "did_continuous"])
def test_a_number_beyond_1e18_is_a_fault(column: str, value: float) -> None:
    """The squares of such numbers would end a learner, and so every simulator's training."""
    wrong = {
        "observations": numbers(0, value, 0),
        "did_continuous": np.array([[0], [value], [0]], np.float32).repeat(SPEC.actions.continuous, 1),
    }
    made = decisions(**{column: wrong.get(column, f32(0, value, 0))})
    with pytest.raises(RemoteProtocolError, match=r"a number beyond 1e18 .*agent 22") as caught:
        check_report(BehaviorReport(behavior="A", decisions=made), SPEC)
    assert caught.value.code == "not_finite"


@pytest.mark.parametrize(("value", "good"), [(0.0, True), (1.0, True), (1.001, False), (-0.001, False), (255.0, False)])
def test_a_float_image_beyond_0_to_1_is_accepted_with_a_warning(value: float, good: bool) -> None:
    """Bytes sent as floats are 255 times too bright, but an array of three axes need not be a picture."""
    eye = ObservationSpec(name="eye", shape=(1, 2, 2), kind="image")
    spec = BehaviorSpec(observations=(eye,), actions=ActionSpec(continuous=1))
    image = np.full((3, 1, 2, 2), 0.5, np.float32)
    image[1, 0, 1, 0] = value
    seen = Decisions(agents=np.array(AGENTS, np.int64), observations=(image,), rewards=np.zeros(3, np.float32))
    report = BehaviorReport(behavior="A", decisions=seen)
    check_report(report, spec)
    warning = image_out_of_range(report, spec)
    assert warning == "" if good else f"{value:g}" in warning and "'eye'" in warning


def test_a_report_without_rows_is_accepted() -> None:
    """A simulator without decisions or ends may send columns of length 0."""
    none, nothing = np.empty(0, np.int64), np.empty(0, np.float32)
    empty = decisions(
        agents=none,
        groups=none,
        observations=observations(0),
        rewards=nothing,
        group_rewards=nothing,
        masks=np.empty((0, MASKS), bool),
        matches=none,
    )
    check_report(BehaviorReport(behavior="A", decisions=empty), SPEC)


# ---------------------------------------------------------------- a whole Step


@pytest.fixture
def stepper() -> Stepper:
    stepper = Stepper({"A": FakePolicy()}, max_agents=5)
    stepper.connect(1, 7, {"A": SPEC, "A?team=1": SPEC})
    return stepper


def step(sequence: int = 0, *reports: BehaviorReport) -> Step:
    return Step(sequence=sequence, reports=reports)


def report(text: str = "A", made: Decisions | None = None, ended: Ends | None = None) -> BehaviorReport:
    return BehaviorReport(behavior=text, decisions=made, ends=ended)


REFUSED = [
    (step(1), "sequence", "Step 1"),
    (step(0, report("C")), "unknown_behavior", "'C'"),
    (step(0, report(), report()), "duplicate_behavior", "'A'"),
    (step(0, report("A", decisions(agents=np.array([4, 9, 4])))), "duplicate_agent", "agent 4"),
    (step(0, report("A", None, ends(agents=np.array([5, 6, 6])))), "duplicate_agent", "agent 6"),
    (step(0, report("A", None, ends())), "unknown_agent", "agent 11"),
    (step(0, report("A?team=1", None, ends())), "unknown_agent", "A?team=1"),
    (step(0, report("A", decisions(rewards=f32(0, 0, np.nan)))), "not_finite", "agent 33"),
]


def test_huge_numbers_are_a_fault_of_their_simulator_alone() -> None:
    """80 reports of 64 agents with 3.4e38 leave nothing for a learner, and the other simulator's steps are taken."""
    stepper, agents = Stepper({"A": FakePolicy()}), np.arange(64)
    stepper.connect(1, 7, {"A": SPEC})
    huge = Decisions(
        agents=agents,
        observations=(np.full((64, 1), 3.4e38, np.float32), observations(64)[1]),
        rewards=np.zeros(64, np.float32),
    )
    for key in range(2, 82):
        stepper.connect(key, key + 100, {"A": SPEC})
        with pytest.raises(RemoteProtocolError, match="a number beyond 1e18"):
            stepper.receive(key, step(0, report("A", huge)), now=0.0)
        stepper.disconnect(key)
    stepper.receive(1, step(0, report("A", decisions())), now=0.0)
    stepper.tick(now=0.0)
    (taken,) = stepper.take_steps()
    assert taken.reported is not None
    assert len(taken.reported.slots) == 3
    assert np.abs(taken.reported.observations[0]).max() <= 1e18


@pytest.mark.parametrize(
    ("refused", "code", "words"), REFUSED, ids=[f"{case[1]}-{i}" for i, case in enumerate(REFUSED)]
)
def test_a_contradicting_step_is_refused(stepper: Stepper, refused: Step, code: str, words: str) -> None:
    """A refused Step leaves no frame, no agent and no step."""
    with pytest.raises(RemoteProtocolError, match=words) as caught:
        stepper.receive(1, refused, now=0.0)
    assert caught.value.code == code
    stepper.tick(now=0.0)
    assert stepper.take_steps() == ()
    assert stepper.behaviors["A"].table.taken == 0


def test_too_many_agents_are_refused_on_arrival(stepper: Stepper) -> None:
    """The limit also counts agents of received frames before their tick, so other simulators are unaffected."""
    stepper.connect(2, 8, {"A": SPEC})
    stepper.receive(1, step(0, report("A", decisions())), now=0.0)
    with pytest.raises(RemoteProtocolError, match="at most 5 agents") as caught:
        stepper.receive(2, step(0, report("A", decisions())), now=0.0)
    assert caught.value.code == "too_large"
    stepper.disconnect(2)
    stepper.tick(now=0.0)
    assert stepper.behaviors["A"].table.taken == 3


def test_both_teams_of_one_step_count_for_the_limit(stepper: Stepper) -> None:
    """Teams of one behavior name share its slots."""
    with pytest.raises(RemoteProtocolError) as caught:
        stepper.receive(1, step(0, report("A", decisions()), report("A?team=1", decisions())), now=0.0)
    assert caught.value.code == "too_large"


def test_another_spec_for_a_known_name_is_refused(stepper: Stepper) -> None:
    """All simulators and teams of one behavior name share one spec; the refusal changes nothing."""
    other = replace(SPEC, observations=SPEC.observations[:1])
    with pytest.raises(RemoteProtocolError, match="'A'") as caught:
        stepper.connect(2, 8, {"New": SPEC, "A?team=2": other})
    assert caught.value.code == "specs"
    with pytest.raises(RemoteProtocolError, match="'B'"):
        stepper.connect(2, 8, {"B": SPEC, "B?team=1": other})
    with pytest.raises(RemoteProtocolError):
        stepper.add_behaviors(1, {"A?team=2": other})
    assert set(stepper.behaviors) == {"A"}
    assert set(stepper.connections) == {1}
    assert set(stepper.connections[1].behaviors) == {"A", "A?team=1"}


def test_a_reconnected_simulator_replaces_its_old_connection(stepper: Stepper) -> None:
    """A new connection with the number of an open one closes that one and returns its key."""
    assert stepper.connect(2, 7, {"A": SPEC}) == 1
    stepper.tick(now=0.0)
    assert set(stepper.connections) == {2}
    stepper.disconnect(2)
    assert stepper.connect(3, 7, {"A": SPEC}) is None


def test_a_refused_step_does_not_move_the_sequence() -> None:
    """`arrive` counts a Step only where it accepts it."""
    connection = SimulatorConnection(number=0)
    with pytest.raises(RemoteProtocolError):
        connection.arrive(step(0, report("A")))
    assert connection.sequence == 0
