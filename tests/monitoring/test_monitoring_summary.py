"""The line of a service, the summary of a behavior and the summary of a run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sparring.pipeline.monitoring.files import to_json
from sparring.pipeline.monitoring.overview import Overview
from sparring.pipeline.monitoring.summary import (
    BehaviorSummary,
    CounterWindows,
    from_status,
    summarize_behavior,
    summary,
)
from tests.monitoring.monitoring_fakes import EPOCH_S, FakeRun


def test_line_of_a_service_has_queues_waits_and_latency(fake_run: FakeRun) -> None:
    overview, windows = Overview(), CounterWindows()
    fake_run.collect(1_000, [1.0])
    fake_run.update(overview)
    windows.report("stepping-0", overview.services["stepping-0"], EPOCH_S)
    fake_run.collect(500, [1.0])
    fake_run.update(overview)
    line = windows.report("stepping-0", overview.services["stepping-0"], EPOCH_S + 10)
    assert (line["seconds"], line["waiting_for"], line["counters"]["steps/Balance"]) == (10.0, "segments", 500)
    assert line["queues"] == {"steps": {"messages": 3, "steps": 300, "capacity": 64, "waits": 0, "waited_s": 0}}
    latency = line["histograms"]["action_latency_s"]
    assert latency["count"] == 100
    assert latency["p50"] == pytest.approx(0.0005, rel=0.12)
    assert latency["p99"] == pytest.approx(0.0005, rel=0.12)
    assert latency["max"] == pytest.approx(0.004, rel=0.12)


def collected(fake_run: FakeRun) -> BehaviorSummary:
    overview = Overview()
    fake_run.collect(25_000, [1.0])
    fake_run.train(24_000)
    fake_run.update(overview)
    return summarize_behavior(overview, "Balance", 12_300.0)


def test_summary_has_exactly_the_fields_of_the_contract(fake_run: FakeRun) -> None:
    results = replace(collected(fake_run), checkpoint="Balance/Balance-24000.safetensors", weights_sha256="ab")
    content = summary(
        run_id="r1",
        status="completed",
        wall_s=170.25,
        error=None,
        behaviors={"Balance": results},
    )
    assert content == {
        "run_id": "r1",
        "status": "completed",
        "wall_s": 170.25,
        "error": None,
        "behaviors": {
            "Balance": {
                "steps": 24_000,
                "steps_per_s": 12_300.0,
                "updates": 1,
                "episodes": 37,
                "reward_mean_last100": 45.0,
                "step_counts": {
                    "produced": 25_000,
                    "trained": 24_000,
                    "ghost": 0,
                    "stale": 0,
                    "lost": 0,
                    "open": 1_000,
                },
                "losses": {},
                "unaccounted": None,
                "lag": {"mean": 1.0, "max": 1.0},
                "checkpoint": "Balance/Balance-24000.safetensors",
                "weights_sha256": "ab",
                "self_play": None,
            }
        },
    }


def test_behavior_without_metrics_has_every_field() -> None:
    content = summary(
        run_id="r1",
        status="failed",
        wall_s=1.0,
        error="stepping-0: no simulators",
        behaviors={"Balance": summarize_behavior(Overview(), "Balance", 0.0)},
    )
    entry = json.loads(json.dumps(content, allow_nan=False))["behaviors"]["Balance"]
    assert entry["lag"] == {"mean": None, "max": None}
    assert (entry["steps"], entry["checkpoint"], sum(entry["step_counts"].values())) == (0, None, 0)


def test_behavior_summary_knows_whether_step_counts_balance(fake_run: FakeRun) -> None:
    assert collected(fake_run).balanced
    fake_run.produced += 1
    assert not collected_again(fake_run).balanced


def collected_again(fake_run: FakeRun) -> BehaviorSummary:
    overview = Overview()
    fake_run.registries["coordination"].gauge("step_counts.produced/Balance", fake_run.produced)
    fake_run.update(overview)
    return summarize_behavior(overview, "Balance", 0.0)


def test_behavior_summary_is_read_from_the_status(fake_run: FakeRun) -> None:
    one = collected(fake_run)
    status = json.loads(to_json({"behaviors": {"Balance": {"figures": one}}}))
    assert from_status(status) == {"Balance": one}


def test_summary_of_a_failed_run_without_an_error_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got .*; "):
        summary(run_id="r", status="failed", wall_s=1.0, error=None, behaviors={})
