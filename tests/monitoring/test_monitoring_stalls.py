"""Who keeps whom, judged from published waits and watermarks."""

from __future__ import annotations

import pytest

from sparring.pipeline.messages.metrics import Metrics
from sparring.pipeline.monitoring.metrics import Registry
from sparring.pipeline.monitoring.progress import ALL, DISK, SIMULATORS, ProgressTracker, readable
from sparring.pipeline.monitoring.stalls import PAUSE_S, Stall, StallBudget, Stalls

TIMEOUT_S = 100.0


class Stage:
    """A service that publishes what a test tells it to."""

    def __init__(self, name: str, start: int = 1) -> None:
        self.name, self.now = name, 0.0
        self.registry = Registry(name, f"{name}.{start}")
        self.progress = ProgressTracker(self.registry, lambda: self.now)

    def told(self) -> Metrics:
        waits = self.progress.published()
        return self.registry.snapshot(0.0, self.progress.waiting_for, waits)


def healthy(*names: str) -> dict[str, Stage]:
    """The stages of a run, each waiting for the one before it."""
    stages = {name: Stage(name) for name in ("stepping-0", "assembly", "coordination")}
    stages["stepping-0"].progress.reach("steps/Walk", 1)
    stages["stepping-0"].progress.waits("steps/Walk", "frames/Walk", SIMULATORS, who="simulator 3")
    stages["assembly"].progress.waits("segments", "steps", "stepping-0")
    for name in names or ("Walk",):
        stages["coordination"].progress.waits(f"segments/{name}", f"segments/{name}", "assembly")
        stages[f"learning-{name}"] = Stage(f"learning-{name}")
        stages[f"learning-{name}"].progress.waits(ALL, f"segments/{name}", "coordination")
    return stages


def judge(stages: dict[str, Stage], stalls: Stalls, seconds: float, begin: float = 0.0) -> list[Stall]:
    """What is found after looking every second."""
    found: list[Stall] = []
    for second in range(round(seconds) + 1):
        for stage in stages.values():
            stage.now = begin + second
            stalls.update(stage.told(), begin + second)
        found = stalls.look(begin + second)
    return found


def test_nothing_stalls_before_the_time_is_over_and_then_the_root_is_named() -> None:
    stages, stalls = healthy(), Stalls(["learning-Walk"], TIMEOUT_S)
    assert judge(stages, stalls, TIMEOUT_S) == []
    (stall,) = judge(stages, stalls, 1, begin=TIMEOUT_S)
    assert (stall.root, stall.kind, stall.seconds) == (SIMULATORS, "outside", TIMEOUT_S + 1)
    assert stall.text == (
        "simulators: nothing has moved for 101 s; learning-Walk waits for segments of Walk from coordination; "
        "coordination waits for segments of Walk from assembly; assembly waits for steps from stepping-0; "
        "stepping-0 waits for frames of Walk from simulator 3"
    )


def test_a_full_disk_is_named_as_what_a_stage_waits_for() -> None:
    """Else who tries to write would be stuck, and killed for it."""
    stages, stalls = healthy(), Stalls(["learning-Walk"], TIMEOUT_S)
    stages["coordination"].progress.waits(ALL, "room", DISK, said="room on the disk for the books")
    (stall,) = judge(stages, stalls, TIMEOUT_S + 1)
    assert (stall.root, stall.kind) == (DISK, "outside")
    assert stall.text.endswith("coordination waits for room from the disk")
    assert stages["coordination"].told().waiting_for == "room on the disk for the books"


def test_who_waits_for_one_that_goes_on_is_not_stalled_however_long_it_waits() -> None:
    """A learner whose team does not learn for now gets nothing, while its agents play on."""
    stages, stalls = healthy(), Stalls(["learning-Walk"], TIMEOUT_S)
    for second in range(0, 1000, 50):
        stages["stepping-0"].progress.reach("steps/Walk", second + 2)
        assert judge(stages, stalls, 49, begin=float(second)) == []


def test_a_stage_that_works_and_passes_nothing_on_is_stuck_and_its_input_is_counted() -> None:
    stages, stalls = healthy(), Stalls(["learning-Walk"], TIMEOUT_S)
    stages["coordination"].progress.works("segments/Walk")
    stages["coordination"].registry.queue("segments:Walk", messages=7, steps=70, capacity=64, waits=0, waited_s=0)
    stages["coordination"].registry.queue("updates:Walk.out", messages=9, steps=9, capacity=64, waits=0, waited_s=0)
    (stall,) = judge(stages, stalls, TIMEOUT_S + 1)
    assert (stall.root, stall.kind) == ("coordination", "stuck")
    assert stall.chain[-1] == "coordination answers, but gets no further; 7 messages wait for it"


def test_a_slow_update_is_no_stall_as_long_as_its_minibatches_go_on() -> None:
    stages, stalls = healthy(), Stalls(["learning-Walk"], TIMEOUT_S)
    learner = stages["learning-Walk"].progress
    learner.works()
    for second in range(0, 500, 50):
        learner.reach("minibatches/Walk", second + 1)
        assert judge(stages, stalls, 49, begin=float(second)) == []
    (stall,) = judge(stages, stalls, TIMEOUT_S + 1, begin=500.0)
    assert (stall.root, stall.kind) == ("learning-Walk", "stuck")


def test_a_learner_that_has_just_got_its_data_is_not_blamed_for_the_wait_before() -> None:
    stages, stalls = healthy(), Stalls(["learning-Walk"], TIMEOUT_S)
    judge(stages, stalls, TIMEOUT_S)
    stages["learning-Walk"].progress.works()
    assert judge(stages, stalls, TIMEOUT_S - 1, begin=TIMEOUT_S) == []


def test_backpressure_is_followed_to_the_stage_that_takes_nothing() -> None:
    """Simulators wait for stepping, and all up to the learner wait for credit: the learner is the root."""
    stages, stalls = healthy("Walk", "Run"), Stalls(["learning-Run", "learning-Walk"], TIMEOUT_S)
    stages["learning-Walk"].progress.works()
    stages["coordination"].progress.waits("segments/Walk", "credit.updates/Walk", "learning-Walk")
    stages["assembly"].progress.waits(ALL, "credit.segments/Walk", "coordination")
    stages["stepping-0"].progress.waits(ALL, "credit.steps", "assembly")
    (stall,) = judge(stages, stalls, TIMEOUT_S + 1)
    assert stall.root == "learning-Walk"
    assert stall.chain == (
        "learning-Run waits for segments of Run from coordination",
        "coordination waits for segments of Run from assembly",
        "assembly waits for credit for segments of Walk from coordination",
        "coordination waits for credit for updates of Walk from learning-Walk",
        "learning-Walk answers, but gets no further",
    )


def test_stages_that_wait_for_each_other_are_a_ring() -> None:
    stages, stalls = healthy(), Stalls(["learning-Walk"], TIMEOUT_S)
    stages["stepping-0"].progress.waits("steps/Walk", "allowances/Walk", "coordination")
    stages["coordination"].progress.waits("allowances/Walk", "weights/Walk", "learning-Walk")
    (stall,) = judge(stages, stalls, TIMEOUT_S + 1)
    assert (stall.kind, stall.root) == ("ring", "learning-Walk, coordination, assembly, stepping-0")
    assert stall.chain[-1] == "which closes the ring"


@pytest.mark.parametrize("other", ["moves", "stands"])
def test_one_of_several_sources_that_goes_on_is_enough(other: str) -> None:
    stages, stalls = healthy(), Stalls(["learning-Walk"], TIMEOUT_S)
    stages["stepping-1"] = Stage("stepping-1")
    stages["stepping-1"].progress.works("steps/Walk")
    stages["assembly"].progress.waits("segments", "steps", "stepping-0", "stepping-1")
    for second in range(0, 150, 30):
        stages["stepping-1"].progress.reach("steps/Walk", second if other == "moves" else 1)
        found = judge(stages, stalls, 29, begin=float(second))
    assert [stall.root for stall in found] == ([] if other == "moves" else ["stepping-1"])


def test_the_end_of_the_run_and_other_behaviors_are_nobodys_fault() -> None:
    stages, stalls = healthy(), Stalls(["learning-Walk"], TIMEOUT_S)
    stages["learning-Walk"].progress.waits(ALL, "the other behaviors")
    assert judge(stages, stalls, 3 * TIMEOUT_S) == []


def test_a_new_start_of_a_service_begins_with_all_its_time() -> None:
    stages, stalls = healthy(), Stalls(["learning-Walk"], TIMEOUT_S)
    stages["learning-Walk"].progress.works()
    judge(stages, stalls, TIMEOUT_S)
    stages["learning-Walk"] = Stage("learning-Walk", start=2)
    assert judge(stages, stalls, TIMEOUT_S, begin=TIMEOUT_S + 1) == []


def test_a_pause_of_the_judge_itself_is_not_held_against_the_others() -> None:
    stages, stalls = healthy(), Stalls(["learning-Walk"], TIMEOUT_S)
    judge(stages, stalls, 10)
    assert stalls.look(10 + PAUSE_S + 10 * TIMEOUT_S) == []
    assert judge(stages, stalls, TIMEOUT_S - 11, begin=10 + PAUSE_S + 10 * TIMEOUT_S) == []


def test_a_stall_is_told_once_for_each_span_and_too_many_exhaust_the_budget() -> None:
    patience = StallBudget(again_s=100, budget=2, period_s=1000)
    stall = Stall(root="a", kind="stuck", seconds=1, chain=())
    told = [now for now in range(301) if patience.news([stall], now)]
    assert told == [0, 101, 202]
    assert patience.over([stall]) == []
    assert (patience.over([]), patience.over([])) == (["a"], [])
    assert patience.news([stall], 301) == [stall]
    assert [patience.count(now) for now in (0, 900, 1200)] == [1, 2, 2]
    assert not patience.exhausted
    assert patience.count(1201) == 3
    assert patience.exhausted


def test_watermarks_say_what_was_passed_on_and_how_long_ago() -> None:
    stage = Stage("assembly")
    stage.progress.passed("segments/Walk", 64)
    stage.now = 3.0
    stage.progress.passed("segments/Walk", 6)
    stage.now = 10.0
    metrics = stage.told()
    assert metrics.counters["passed.segments/Walk"] == 70
    assert metrics.gauges["idle_s.segments/Walk"] == 7


def test_a_wait_is_dated_from_its_beginning_and_shown_in_words() -> None:
    stage = Stage("assembly")
    stage.progress.waits("segments", "steps", "stepping-0")
    stage.now = 5.0
    stage.progress.waits("segments", "steps", "stepping-0")
    (wait,) = stage.told().waits
    assert (wait.activity, wait.what, wait.sources, wait.seconds) == ("segments", "steps", ("stepping-0",), 5.0)
    stage.progress.waits(ALL, "credit.segments/Walk", "coordination")
    assert stage.told().waiting_for == "credit for segments of Walk"
    stage.progress.works()
    assert stage.told().waiting_for == "steps"
    assert readable("frames/Walk") == "frames of Walk"
