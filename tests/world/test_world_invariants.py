"""Each invariant detects its violation, and allows what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio

from sparring.pipeline.errors import CodecError, ServiceError
from sparring.pipeline.messages.codec import SERVICES, decode, encode
from sparring.pipeline.messages.matches import Matchup, MatchupAssignment
from sparring.pipeline.messages.simulator import Ping
from sparring.pipeline.messages.state import LearnerState, PolicyWeights, RunState, StepCounts
from sparring.pipeline.monitoring.progress import ProgressTracker
from sparring.services.stages import assembly
from tests.world import world_game, world_links, world_run
from tests.world.world_invariants import Watch
from tests.world.world_plan import Fault, Plan, sample_plan
from tests.world.world_run import run_plan


def violations(see: Callable[[Watch], None]) -> list[str]:
    """Returns the rules that a watch reports as broken after `see` has fed it."""
    watch = Watch(real=False, damage=False)

    async def main() -> None:
        await trio.lowlevel.checkpoint()
        see(watch)

    trio.run(main)
    return [violation.split(" ", 1)[1].partition(":")[0] for violation in watch.violations]


def weights(version: int, value: float = 0.0) -> PolicyWeights:
    return PolicyWeights(behavior="A", version=version, arrays={"w": np.full(2, value, np.float32)})


def step_counts(**terms: int) -> RunState:
    own = StepCounts(**{"produced": 0, "trained": 0, "ghost": 0, "stale": 0, "lost": 0, "open": 0, **terms})
    nothing: dict[str, Any] = {}
    return RunState(
        start="c.1",
        finished=False,
        specs={},
        step_counts={"A": own},
        losses=nothing,
        unaccounted=nothing,
        versions=nothing,
        reward_mean_last100=nothing,
        episodes=nothing,
    )


def segments(numbers: list[int], matchups: list[int] | None = None, agents: list[int] | None = None) -> Any:
    """Returns the columns of segments, one row each, that a watch reads."""
    rows = len(numbers)
    return SimpleNamespace(
        behavior="A",
        source="stepping-0.1",
        lengths=np.ones(rows, np.int32),
        matchups=None if matchups is None else np.array(matchups),
        agents=np.array(agents or range(rows)),
        teams=np.zeros(rows, np.int32),
    )


def learner() -> Any:
    return SimpleNamespace(lineage=set(), behavior="A", trained=0, version=1)


def take(watch: Watch, numbers: list[int], matches: list[int] | None = None, **values: Any) -> None:
    watch.on_segments(
        learner(), segments(numbers, **values), np.array(numbers), np.array(matches or [-1] * len(numbers))
    )


def trained_twice(watch: Watch) -> None:
    one = learner()
    for _ in range(2):
        watch.on_segments(one, segments([7]), np.array([7]), np.array([-1]))


def trained_again_after_a_restore(watch: Watch) -> None:
    first, second = learner(), learner()
    first.trained = 1
    watch.on_update(first, np.array([7]))
    checkpoint: Any = SimpleNamespace(behavior="A", version=2, trained=1)
    watch.on_checkpoint(first, checkpoint)
    watch.on_restore(second, checkpoint)
    watch.on_segments(second, segments([7]), np.array([7]), np.array([-1]))


def two_opponents(watch: Watch, agents: list[int], matches: list[int]) -> None:
    matchups = (Matchup(number=1, team=0, ghosts={"A?team=1": 1}), Matchup(number=2, team=0, ghosts={"A?team=1": 2}))
    watch.published("coordination", "assignment", MatchupAssignment(serial=1, matchups=matchups))
    take(watch, [1, 2], matches, matchups=[1, 2], agents=agents)


def learned_from_a_ghost(watch: Watch) -> None:
    matchups = (Matchup(number=1, team=1, ghosts={"A?team=0": 1}),)
    watch.published("coordination", "assignment", MatchupAssignment(serial=1, matchups=matchups))
    take(watch, [1], matchups=[1])


def published(*records: PolicyWeights) -> Callable[[Watch], None]:
    def see(watch: Watch) -> None:
        for record in records:
            watch.published("policy-A", "weights", record)

    return see


def received_backwards(watch: Watch) -> None:
    for version in (3, 2):
        watch.received("stepping-0", "policy-A", {"weights": weights(version)})


def another_content(watch: Watch) -> None:
    watch.published("policy-A", "weights", weights(1))
    watch.published("ghosts", "ghost-0", weights(1, 0.5))


def lost(failed: dict[str, int], **losses: int) -> Callable[[Watch], None]:
    """Returns a check of lost steps by cause, after so many incarnations failed; 20 steps can be in flight."""
    return lambda watch: watch.check_losses("A", losses, failed, 20)


def state_of_learner(**counts: int) -> Callable[[Watch], None]:
    """Returns the publication of a learner that 10 steps have reached."""
    record = LearnerState(
        behavior="A",
        start="learning-A.1",
        version=1,
        updates=1,
        reached={"stepping-0.1": 10},
        **{"trained": 0, **counts},
    )
    return lambda watch: watch.published("learning-A", "state", record)


@pytest.mark.parametrize(
    ("rule", "see"),
    [
        ("losses", lost({"learning": 1}, assembly=10)),
        ("losses", lost({"assembly": 1}, assembly=21)),
        ("losses", lost({"stepping": 1}, stepping=-1)),
        ("losses", lost({"assembly": 1}, assembly=3, both_ends=3)),
        ("step_counts", state_of_learner(trained=4, buffered=5)),
        ("once", trained_twice),
        ("once", trained_again_after_a_restore),
        ("matches", lambda watch: two_opponents(watch, [5, 5], [-1, -1])),
        ("matches", lambda watch: two_opponents(watch, [5, 6], [9, 9])),
        ("matches", learned_from_a_ghost),
        ("versions", published(weights(2), weights(2))),
        ("versions", published(weights(2), weights(1))),
        ("versions", received_backwards),
        ("versions", another_content),
        ("step_counts", lambda watch: watch.published("coordination", "run", step_counts(produced=5, trained=4))),
        ("step_counts", lambda watch: watch.published("coordination", "run", step_counts(trained=1, open=-1))),
    ],
)
def test_a_violated_rule_is_detected(rule: str, see: Callable[[Watch], None]) -> None:
    assert violations(see) == [rule]


def test_allowed_events_violate_no_rule() -> None:
    def see(watch: Watch) -> None:
        published(weights(1), weights(2, 0.5))(watch)
        watch.published("ghosts", "ghost-0", weights(1))
        watch.published("coordination", "run", step_counts(produced=5, trained=4, open=1))
        take(watch, [1, 2])
        state_of_learner(trained=4, buffered=5, stale=1)(watch)
        lost({"assembly": 1}, assembly=20)(watch)
        lost({"assembly": 2}, assembly=40)(watch)
        lost({"link": 1}, both_ends=20)(watch)
        lost({"learning": 1}, learning=48)(watch)

    assert violations(see) == []


@pytest.fixture
def calm() -> Plan:
    """Returns a small run without faults."""
    return next(plan for plan in map(sample_plan, range(1000)) if not plan.faults and len(plan.setting.names) == 1)


def first(plan: Plan) -> str:
    found = run_plan(plan).violations
    return found[0] if found else ""


def test_a_service_that_fails_without_a_fault_is_detected(calm: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: Any) -> None:
        raise ServiceError("got nothing; expected something; despair")

    monkeypatch.setattr(assembly.Assembly, "_apply", die)
    assert "deaths: assembly failed" in first(calm)


def test_a_run_that_makes_no_progress_is_detected(calm: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_run, "RESUMES_S", 3.0)
    monkeypatch.setattr(assembly.Assembly, "_apply", lambda *_: None)
    assert "progress: nothing for" in first(calm)


def test_an_unwatched_endless_wait_is_detected(calm: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(world_run.WATCHED, "services/stages/stepping.py run")
    assert "may wait for ever in services/stages/stepping.py run" in first(calm)


def test_a_stage_that_does_not_report_what_it_waits_for_is_detected(
    calm: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProgressTracker, "waits", lambda *_, **__: None)
    assert "and does not report for what" in first(calm)


def test_nothing_runs_while_a_part_hangs(calm: Plan) -> None:
    """The run waits for the part as long as it hangs and no longer."""
    hang = Fault(kind="hang", at=0.0, until=6.0, parts=("coordination",))
    outcome = run_plan(Plan(seed=calm.seed, setting=calm.setting, faults=(hang,)))
    assert not outcome.violations
    assert outcome.virtual_s > 6.0


def test_a_damaged_message_is_never_decoded_as_another_one() -> None:
    chance, frames = Random(1), encode(Ping(number=3))
    for _ in range(300):
        with pytest.raises(CodecError):
            decode(world_links.damage(frames, chance), SERVICES)


def test_an_observation_identifies_its_decision() -> None:
    rows = np.array([world_game.written(number, match) for number, match in ((5, 1), (70_000, 2))], np.float32)
    rows = np.concatenate([rows, rows + np.float32(1)])
    numbers, matches = world_game.read(rows)
    assert numbers.tolist() == [5, 70_000, -1, -1]
    assert matches.tolist()[:2] == [1, 2]
