"""Stalls and their roots, found from published waits and watermarks."""

from __future__ import annotations

import pytest

from sparring.pipeline.messages.metrics import Metrics
from sparring.pipeline.monitoring.metrics import Registry
from sparring.pipeline.monitoring.progress import ALL, DISK, SIMULATORS, ProgressTracker, readable
from sparring.pipeline.monitoring.stalls import PAUSE_S, Stall, StallHistory, Stalls

TIMEOUT_S = 100.0


class Stage:
    """A service that publishes given waits and progress."""

    def __init__(self, name: str, start: int = 1) -> None:
        self.name, self.now = name, 0.0
        self.registry = Registry(name, f"{name}.{start}")
        self.progress = ProgressTracker(self.registry, lambda: self.now)

    def metrics(self) -> Metrics:
        waits = self.progress.published()
        return self.registry.snapshot(0.0, self.progress.waiting_for, waits)


def healthy(*names: str) -> dict[str, Stage]:
    """Returns the stages of a run, each waiting for the one before it."""
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
    """Returns the stalls found at the end of `seconds`, after a check every second."""
    found: list[Stall] = []
    for second in range(round(seconds) + 1):
        for stage in stages.values():
            stage.now = begin + second
            stalls.update(stage.metrics(), begin + second)
        found = stalls.look(begin + second)
    return found


def test_stall_is_found_after_the_timeout_with_its_root() -> None:
    stages, stalls = healthy(), Stalls(["learning-Walk"], TIMEOUT_S)
    assert judge(stages, stalls, TIMEOUT_S) == []
    (stall,) = judge(stages, stalls, 1, begin=TIMEOUT_S)
    assert (stall.root, stall.kind, stall.seconds) == (SIMULATORS, "outside", TIMEOUT_S + 1)
    assert stall.text == (
        "simulators: nothing has moved for 101 s; learning-Walk waits for segments of Walk from coordination; "
        "coordination waits for segments of Walk from assembly; assembly waits for steps from stepping-0; "
        "stepping-0 waits for frames of Walk from simulator 3"
    )


def test_full_disk_is_the_root_of_a_stall() -> None:
    """Otherwise the stage that retries the write would count as stuck and be killed."""
    stages, stalls = healthy(), Stalls(["learning-Walk"], TIMEOUT_S)
    stages["coordination"].progress.waits(ALL, "room", DISK, text="room on the disk for the step counts")
    (stall,) = judge(stages, stalls, TIMEOUT_S + 1)
    assert (stall.root, stall.kind) == (DISK, "outside")
    assert stall.text.endswith("coordination waits for room from the disk")
    assert stages["coordination"].metrics().waiting_for == "room on the disk for the step counts"


def test_stage_that_waits_for_a_progressing_stage_is_not_stalled() -> None:
    """A learner whose team does not learn gets no segments while its agents keep playing."""
    stages, stalls = healthy(), Stalls(["learning-Walk"], TIMEOUT_S)
    for second in range(0, 1000, 50):
        stages["stepping-0"].progress.reach("steps/Walk", second + 2)
        assert judge(stages, stalls, 49, begin=float(second)) == []


def test_working_stage_without_output_is_stuck_and_its_input_is_counted() -> None:
    stages, stalls = healthy(), Stalls(["learning-Walk"], TIMEOUT_S)
    stages["coordination"].progress.works("segments/Walk")
    stages["coordination"].registry.queue("segments:Walk", messages=7, steps=70, capacity=64, waits=0, waited_s=0)
    stages["coordination"].registry.queue("updates:Walk.out", messages=9, steps=9, capacity=64, waits=0, waited_s=0)
    (stall,) = judge(stages, stalls, TIMEOUT_S + 1)
    assert (stall.root, stall.kind) == ("coordination", "stuck")
    assert stall.chain[-1] == "coordination answers, but makes no progress; 7 messages wait for it"


def test_slow_update_with_progressing_minibatches_is_no_stall() -> None:
    stages, stalls = healthy(), Stalls(["learning-Walk"], TIMEOUT_S)
    learner = stages["learning-Walk"].progress
    learner.works()
    for second in range(0, 500, 50):
        learner.reach("minibatches/Walk", second + 1)
        assert judge(stages, stalls, 49, begin=float(second)) == []
    (stall,) = judge(stages, stalls, TIMEOUT_S + 1, begin=500.0)
    assert (stall.root, stall.kind) == ("learning-Walk", "stuck")


def test_learner_that_has_just_received_its_data_is_not_stuck() -> None:
    stages, stalls = healthy(), Stalls(["learning-Walk"], TIMEOUT_S)
    judge(stages, stalls, TIMEOUT_S)
    stages["learning-Walk"].progress.works()
    assert judge(stages, stalls, TIMEOUT_S - 1, begin=TIMEOUT_S) == []


def test_backpressure_leads_to_the_stage_that_accepts_nothing() -> None:
    """Simulators wait for stepping, and every stage waits for credit of the next, so the learner is the root."""
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
        "learning-Walk answers, but makes no progress",
    )


def test_stages_that_wait_for_each_other_form_a_ring() -> None:
    stages, stalls = healthy(), Stalls(["learning-Walk"], TIMEOUT_S)
    stages["stepping-0"].progress.waits("steps/Walk", "allowances/Walk", "coordination")
    stages["coordination"].progress.waits("allowances/Walk", "weights/Walk", "learning-Walk")
    (stall,) = judge(stages, stalls, TIMEOUT_S + 1)
    assert (stall.kind, stall.root) == ("ring", "learning-Walk, coordination, assembly, stepping-0")
    assert stall.chain[-1] == "which closes the ring"


@pytest.mark.parametrize("other", ["moves", "stands"])
def test_one_progressing_source_of_several_is_enough(other: str) -> None:
    stages, stalls = healthy(), Stalls(["learning-Walk"], TIMEOUT_S)
    stages["stepping-1"] = Stage("stepping-1")
    stages["stepping-1"].progress.works("steps/Walk")
    stages["assembly"].progress.waits("segments", "steps", "stepping-0", "stepping-1")
    for second in range(0, 150, 30):
        stages["stepping-1"].progress.reach("steps/Walk", second if other == "moves" else 1)
        found = judge(stages, stalls, 29, begin=float(second))
    assert [stall.root for stall in found] == ([] if other == "moves" else ["stepping-1"])


def test_learner_that_waits_for_other_behaviors_is_no_stall() -> None:
    stages, stalls = healthy(), Stalls(["learning-Walk"], TIMEOUT_S)
    stages["learning-Walk"].progress.waits(ALL, "the other behaviors")
    assert judge(stages, stalls, 3 * TIMEOUT_S) == []


def test_new_incarnation_of_a_service_has_the_full_timeout() -> None:
    stages, stalls = healthy(), Stalls(["learning-Walk"], TIMEOUT_S)
    stages["learning-Walk"].progress.works()
    judge(stages, stalls, TIMEOUT_S)
    stages["learning-Walk"] = Stage("learning-Walk", start=2)
    assert judge(stages, stalls, TIMEOUT_S, begin=TIMEOUT_S + 1) == []


def test_idle_stage_has_the_full_timeout_from_when_it_is_asked() -> None:
    """A learner restarts while its simulators pause: coordination, which had nothing to do, is not the cause."""
    stages, stalls = healthy(), Stalls(["learning-Walk"], TIMEOUT_S)
    (stall,) = judge(stages, stalls, 2 * TIMEOUT_S)
    assert stall.root == SIMULATORS
    stages["learning-Walk"] = Stage("learning-Walk", start=2)
    stages["learning-Walk"].progress.waits(ALL, "specs/Walk", "coordination")
    assert judge(stages, stalls, TIMEOUT_S, begin=2 * TIMEOUT_S) == []
    (stall,) = judge(stages, stalls, 1, begin=3 * TIMEOUT_S)
    assert (stall.root, stall.kind) == ("coordination", "stuck")


def test_pause_of_the_stall_check_itself_is_not_counted() -> None:
    stages, stalls = healthy(), Stalls(["learning-Walk"], TIMEOUT_S)
    judge(stages, stalls, 10)
    assert stalls.look(10 + PAUSE_S + 10 * TIMEOUT_S) == []
    assert judge(stages, stalls, TIMEOUT_S - 11, begin=10 + PAUSE_S + 10 * TIMEOUT_S) == []


def test_stall_is_reported_once_per_period_and_those_of_a_period_are_counted() -> None:
    history = StallHistory(again_s=100, period_s=1000)
    stall = Stall(root="a", kind="stuck", seconds=1, chain=())
    reports = [now for now in range(301) if history.news([stall], now)]
    assert reports == [0, 101, 202]
    assert history.over([stall]) == []
    assert (history.over([]), history.over([])) == (["a"], [])
    assert history.news([stall], 301) == [stall]
    assert [history.count(now) for now in (0, 900, 1200, 1201)] == [1, 2, 2, 3]


def test_watermarks_have_the_amount_passed_on_and_its_age() -> None:
    stage = Stage("assembly")
    stage.progress.passed("segments/Walk", 64)
    stage.now = 3.0
    stage.progress.passed("segments/Walk", 6)
    stage.now = 10.0
    metrics = stage.metrics()
    assert metrics.counters["passed.segments/Walk"] == 70
    assert metrics.gauges["idle_s.segments/Walk"] == 7


def test_wait_is_published_and_readable() -> None:
    stage = Stage("assembly")
    stage.progress.waits("segments", "steps", "stepping-0")
    (wait,) = stage.metrics().waits
    assert (wait.activity, wait.what, wait.sources) == ("segments", "steps", ("stepping-0",))
    stage.progress.waits(ALL, "credit.segments/Walk", "coordination")
    assert stage.metrics().waiting_for == "credit for segments of Walk"
    stage.progress.works()
    assert stage.metrics().waiting_for == "steps"
    assert readable("frames/Walk") == "frames of Walk"
