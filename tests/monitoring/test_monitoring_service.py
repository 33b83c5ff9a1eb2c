"""The monitor itself, over fake boards and a virtual clock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sparring.pipeline.monitoring.metrics import Registry
from tests.monitoring.monitoring_fakes import EPOCH_S, FakeRun, FakeTransport, Watched, seconds, watching, work


@pytest.mark.anyio
async def test_a_run_is_told_on_the_console_in_files_and_in_curves(
    fake_run: FakeRun, transport: FakeTransport, folder: Path
) -> None:
    async with watching(transport, folder) as watched:
        await work(fake_run, transport, 5)
    assert watched.lines == [
        "Balance  step 10,000  5.0k/s  reward 45 +- 5 (4 episodes)  updates 2  lag 1.0/1  entropy 1.42"
        "  open 64 episodes, oldest 812 steps",
        "Balance  step 20,000  5.0k/s  reward 45 +- 5 (4 episodes)  updates 2  lag 1.0/1  entropy 1.42"
        "  open 64 episodes, oldest 812 steps",
        "Balance  step 25,000  3.3k/s  reward 45 +- 5 (2 episodes)  updates 1  lag 1.0/1  entropy 1.42"
        "  open 64 episodes, oldest 812 steps",
    ]
    assert [record["step"] for record in watched.records("interval")] == [10_000, 20_000, 25_000]
    assert {record["service"] for record in watched.records("service")} == set(FakeRun.services)
    accumulator = EventAccumulator(str(folder / "Balance"))
    accumulator.Reload()
    assert [e.step for e in accumulator.Scalars("Environment/Cumulative Reward")] == [10_000, 20_000, 25_000]
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "sparring_trained_total" in (folder / "metrics.prom").read_text()
    assert all(subscription.closed for subscription in transport.subscriptions.values())


@pytest.mark.anyio
async def test_the_status_is_never_older_than_a_second(
    fake_run: FakeRun, transport: FakeTransport, folder: Path
) -> None:
    async with watching(transport, folder) as watched:
        assert watched.read("status.json")["services"]["assembly"]["heard_s"] is None
        await work(fake_run, transport, 12, steps=1_000)
        status = watched.read("status.json")
        balance = status["behaviors"]["Balance"]
        assert (status["run_id"], status["ended"], list(status["services"])) == ("r1", False, [*FakeRun.services])
        assert (balance["step"], balance["max_steps"], balance["reward"]) == (12_000, 500_000, 45.0)
        assert balance["steps_per_s"] == pytest.approx(1_000)
        assert (balance["open_episodes"], balance["oldest"], balance["version"]) == (64, 812, 7)
        assert balance["figures"]["step_counts"]["produced"] == 12_000
        stepping = status["services"]["stepping-0"]
        assert (stepping["waiting_for"], stepping["queues"]["steps"]["messages"]) == ("segments", 3)
        assert stepping["histograms"]["action_latency_s"]["p50"] == pytest.approx(0.0005, rel=0.12)
    assert watched.read("status.json")["ended"] is True


@pytest.mark.anyio
async def test_a_restarted_service_does_not_make_the_numbers_jump_back(
    fake_run: FakeRun, transport: FakeTransport, folder: Path
) -> None:
    async with watching(transport, folder) as watched:
        await work(fake_run, transport, 3)
        for service in FakeRun.services:
            fake_run.restart(service)
        await work(fake_run, transport, 3)
    assert [record["trained"] for record in watched.records("interval")] == [10_000, 10_000, 10_000]
    status = watched.read("status.json")
    assert status["services"]["learning-Balance"]["starts"] == 2
    assert status["behaviors"]["Balance"]["figures"]["updates"] == 6


@pytest.mark.anyio
async def test_a_restarted_monitor_goes_on_where_the_last_one_died(
    fake_run: FakeRun, transport: FakeTransport, folder: Path
) -> None:
    async with watching(transport, folder) as first:
        await work(fake_run, transport, 3)
        first.kill()
    assert not (folder / "curves.png").exists()
    fake_run.restart("assembly")
    await seconds(2)
    async with watching(transport, folder, again=True) as second:
        await work(fake_run, transport, 3)
    assert [record.counters["unwatched_s"] for _, record in first.published] == [0.0] * len(first.published)
    assert {record.counters["unwatched_s"] for _, record in second.published} == {2.5}
    records = second.records("interval")
    assert [record["step"] for record in records] == [10_000, 20_000, 30_000]
    assert [record["trained"] for record in records] == [10_000, 10_000, 10_000]
    assert [record["episodes"] for record in records] == [4, 4, 4]
    assert second.read("status.json")["behaviors"]["Balance"]["figures"]["updates"] == 6


@pytest.mark.anyio
async def test_a_damaged_state_means_counting_anew_not_dying(
    fake_run: FakeRun, transport: FakeTransport, folder: Path
) -> None:
    (folder / "monitor.json").write_text('{"time_s": 0}')
    async with watching(transport, folder) as watched:
        await work(fake_run, transport, 2)
    assert [record["step"] for record in watched.records("interval")] == [10_000]


@pytest.mark.anyio
async def test_a_run_that_does_not_move_says_every_minute_who_waits_for_what(
    fake_run: FakeRun, transport: FakeTransport, folder: Path
) -> None:
    async with watching(transport, folder) as watched:
        transport.subscriptions["stepping-0"].publish(fake_run.registries["stepping-0"].snapshot(EPOCH_S, "simulators"))
        await seconds(60)
        assert watched.lines == [
            "Balance  step 0 of 500,000  +0 trained and +0 produced in 60 s  no episode ended"
            "  open 0 episodes, oldest 0 steps  stepping-0 waits for simulators  assembly has not reported yet"
            "  coordination has not reported yet  learning-Balance has not reported yet"
        ]
        transport.subscriptions["stepping-0"].heard_age = 70.0
        await seconds(60)
        assert "  stepping-0 is silent  " in watched.lines[1]


@pytest.mark.anyio
async def test_no_episode_for_long_is_told_with_those_under_way(
    fake_run: FakeRun, transport: FakeTransport, folder: Path
) -> None:
    async with watching(transport, folder) as watched:
        fake_run.collect(10_000, [])
        fake_run.train(10_000)
        fake_run.publish(transport)
        await seconds(1)
    assert "  no episode ended  " in watched.lines[0]
    assert "  open 64 episodes, oldest 812 steps" in watched.lines[0]


@pytest.mark.anyio
async def test_a_behavior_nobody_announced_is_watched_too_and_stays_in_the_folder(
    transport: FakeTransport, folder: Path
) -> None:
    registry = Registry("learning-Balance", "learning-Balance.1")
    registry.add("trained/..", 150)
    async with watching(transport, folder, summary_freq=100) as watched:
        transport.subscriptions["learning-Balance"].publish(registry.snapshot(EPOCH_S))
        await seconds(1)
    assert watched.records("interval")[0]["behavior"] == ".."
    assert list((folder / "%2E%2E").glob("events.out.tfevents.*"))
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.anyio
async def test_the_monitor_publishes_numbers_of_its_own(transport: FakeTransport, folder: Path) -> None:
    async with watching(transport, folder) as watched:
        await seconds(3)
    assert [record.counters["ticks"] for _, record in watched.published] == [1, 2, 3, 4]


@pytest.mark.anyio
async def test_a_folder_that_is_gone_is_an_error_and_not_silence(transport: FakeTransport, folder: Path) -> None:
    watched = Watched(transport, folder / "missing")
    with pytest.raises(FileNotFoundError):
        await watched.run()
    assert all(subscription.closed for subscription in transport.subscriptions.values())


def test_the_monitor_loads_neither_torch_nor_tensorflow_nor_matplotlib(tmp_path: Path) -> None:
    script = """
import sys
from sparring.pipeline.monitoring import events
from sparring.services.stages import monitor
events.opening(0.0) + events.event({"a/b": 1.0}, 1, 0.0) + events.restart(1, 0.0)
print([name for name in ("torch", "tensorflow", "matplotlib", "zmq") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=50)
    assert done.stdout.strip() == "[]"
