"""The monitor with fake topics under a virtual clock."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from structlog.testing import capture_logs

from sparring.pipeline.monitoring.metrics import Registry
from sparring.pipeline.monitoring.prometheus import Exporter
from tests.monitoring.monitoring_fakes import (
    EPOCH_S,
    FakeRun,
    FakeTransport,
    MonitorRun,
    running_monitor,
    seconds,
    work,
)
from tests.queues.queues_worlds import free_ports


def scraped(address: str) -> str:
    """Returns what Prometheus gets at an address; another thread answers."""
    with urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
        return text


@pytest.mark.anyio
async def test_run_is_reported_on_the_console_in_files_and_in_curves(
    fake_run: FakeRun, transport: FakeTransport, folder: Path
) -> None:
    async with running_monitor(transport, folder) as monitor:
        await work(fake_run, transport, 5)
    assert monitor.lines == [
        "Balance  step 10,000 of 500,000  5.0k/s  ETA 1 min 38 s  reward 45 +- 5 (4 episodes)"
        "  updates 2  lag 1.0/1  entropy 1.42  open 64 episodes, oldest 812 steps",
        "Balance  step 20,000 of 500,000  5.0k/s  ETA 1 min 36 s  reward 45 +- 5 (4 episodes)"
        "  updates 2  lag 1.0/1  entropy 1.42  open 64 episodes, oldest 812 steps",
        "Balance  step 25,000 of 500,000  3.3k/s  ETA 2 min 22 s  reward 45 +- 5 (2 episodes)"
        "  updates 1  lag 1.0/1  entropy 1.42  open 64 episodes, oldest 812 steps",
    ]
    assert [record["step"] for record in monitor.records("interval")] == [10_000, 20_000, 25_000]
    assert {record["service"] for record in monitor.records("service")} == set(FakeRun.services)
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "sparring_trained_total" in (folder / "metrics.prom").read_text()
    assert all(subscription.closed for subscription in transport.subscriptions.values())


@pytest.mark.anyio
async def test_prometheus_is_answered_by_http_until_the_end(
    fake_run: FakeRun, transport: FakeTransport, folder: Path
) -> None:
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    async with running_monitor(transport, folder, pipeline=f"{{metrics_address: 'tcp://{address}'}}"):
        await work(fake_run, transport, 5)
        text = scraped(address)
    assert 'sparring_trained_total{behavior="Balance",run="r1",service="learning-Balance"} 25000.0' in text
    with pytest.raises(URLError):
        scraped(address)


def test_clients_of_prometheus_beyond_those_allowed_are_disconnected_and_counted() -> None:
    (port,) = free_ports(1)
    exporter = Exporter("r1")
    with exporter.served(f"tcp://127.0.0.1:{port}"), ExitStack() as clients:

        def connect() -> socket.socket:
            return clients.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))

        silent = [connect() for _ in range(50)]
        assert connect().recv(1) == b""
        assert exporter.refused == 1
        silent[0].sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert silent[0].recv(15) == b"HTTP/1.0 200 OK"


def test_client_of_prometheus_that_sends_too_slowly_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    monkeypatch.setattr("sparring.pipeline.monitoring.prometheus._CLIENT_S", 0.1)
    served = Exporter("r1").served(f"tcp://127.0.0.1:{port}")
    with served, socket.create_connection(("127.0.0.1", port), timeout=5) as slow:
        slow.sendall(b"GET /")
        assert slow.recv(1) == b""


def test_header_that_the_library_cannot_read_leaves_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    served = Exporter("r1").served(f"tcp://127.0.0.1:{port}")
    with served, socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\nAccept: application/openmetrics-text; version=\xff\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.0 500"
        while client.recv(4096):
            pass
    assert capfd.readouterr().err == ""


@pytest.mark.anyio
async def test_port_of_prometheus_that_is_in_use_does_not_fail_the_monitor(
    fake_run: FakeRun, transport: FakeTransport, folder: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, capture_logs() as caught:
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        async with running_monitor(transport, folder, pipeline=f"{{metrics_address: '{address}'}}"):
            await work(fake_run, transport, 2)
    (line,) = [one for one in caught if one["event"] == "metrics_not_served"]
    assert (line["address"], line["log_level"]) == (address, "warning")
    assert "sparring_trained_total" in (folder / "metrics.prom").read_text()


@pytest.mark.anyio
async def test_disk_that_is_full_at_the_end_does_not_fail_the_monitor(
    fake_run: FakeRun, transport: FakeTransport, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not fit is counted; what follows it is tried all the same."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def plot(*_: object) -> None:
        tried.append("curves")
        full()

    tried: list[str] = []
    async with running_monitor(transport, folder) as monitor:
        await work(fake_run, transport, 5)
        monkeypatch.setattr("sparring.pipeline.monitoring.files.RunFiles.replace", full)
        monkeypatch.setattr("sparring.pipeline.monitoring.files.RunFiles.plot_curves", plot)
    assert tried
    assert dict(monitor.context.registry.snapshot(0.0).counters)["writes_failed"] >= 2
    assert not (folder / "curves.png").exists()


@pytest.mark.anyio
async def test_status_is_never_older_than_a_second(fake_run: FakeRun, transport: FakeTransport, folder: Path) -> None:
    async with running_monitor(transport, folder) as monitor:
        assert monitor.read("status.json")["services"]["assembly"]["heartbeat_age_s"] is None
        await work(fake_run, transport, 12, steps=1_000)
        status = monitor.read("status.json")
        balance = status["behaviors"]["Balance"]
        assert (status["run_id"], status["ended"], list(status["services"])) == ("r1", False, [*FakeRun.services])
        assert (balance["step"], balance["max_steps"], balance["reward"]) == (12_000, 500_000, 45.0)
        assert balance["steps_per_s"] == pytest.approx(1_000)
        assert (balance["open_episodes"], balance["oldest"], balance["version"]) == (64, 812, 7)
        assert balance["figures"]["step_counts"]["produced"] == 12_000
        stepping = status["services"]["stepping-0"]
        assert (stepping["waiting_for"], stepping["queues"]["steps"]["messages"]) == ("segments", 3)
        assert stepping["histograms"]["action_latency_s"]["p50"] == pytest.approx(0.0005, rel=0.12)
    assert monitor.read("status.json")["ended"] is True


@pytest.mark.anyio
async def test_restarted_service_does_not_reduce_the_totals(
    fake_run: FakeRun, transport: FakeTransport, folder: Path
) -> None:
    async with running_monitor(transport, folder) as monitor:
        await work(fake_run, transport, 3)
        for service in FakeRun.services:
            fake_run.restart(service)
        await work(fake_run, transport, 3)
    assert [record["trained"] for record in monitor.records("interval")] == [10_000, 10_000, 10_000]
    status = monitor.read("status.json")
    assert status["services"]["learning-Balance"]["starts"] == 2
    assert status["behaviors"]["Balance"]["figures"]["updates"] == 6


@pytest.mark.anyio
async def test_restarted_monitor_continues_where_the_last_one_ended(
    fake_run: FakeRun, transport: FakeTransport, folder: Path
) -> None:
    async with running_monitor(transport, folder) as first:
        await work(fake_run, transport, 3)
        first.kill()
    assert not (folder / "curves.png").exists()
    fake_run.restart("assembly")
    await seconds(2)
    async with running_monitor(transport, folder, first=False) as second:
        await work(fake_run, transport, 3)
    assert [record.counters["unwatched_s"] for _, record in first.published] == [0.0] * len(first.published)
    assert {record.counters["unwatched_s"] for _, record in second.published} == {2.5}
    records = second.records("interval")
    assert [record["step"] for record in records] == [10_000, 20_000, 30_000]
    assert [record["trained"] for record in records] == [10_000, 10_000, 10_000]
    assert [record["episodes"] for record in records] == [4, 4, 4]
    assert second.read("status.json")["behaviors"]["Balance"]["figures"]["updates"] == 6


@pytest.mark.anyio
async def test_monitor_with_a_damaged_state_starts_counting_anew(
    fake_run: FakeRun, transport: FakeTransport, folder: Path
) -> None:
    (folder / "monitor.json").write_text('{"time_s": 0}')
    async with running_monitor(transport, folder) as monitor:
        await work(fake_run, transport, 2)
    assert [record["step"] for record in monitor.records("interval")] == [10_000]


@pytest.mark.anyio
async def test_run_without_progress_lists_waiting_stages_every_minute(
    fake_run: FakeRun, transport: FakeTransport, folder: Path
) -> None:
    async with running_monitor(transport, folder) as monitor:
        transport.subscriptions["stepping-0"].publish(fake_run.registries["stepping-0"].snapshot(EPOCH_S, "simulators"))
        await seconds(60)
        assert monitor.lines == [
            "Balance  step 0 of 500,000  +0 trained and +0 produced in 60 s  no episode ended"
            "  open 0 episodes, oldest 0 steps  stepping-0 waits for simulators  assembly has not reported yet"
            "  coordination has not reported yet  learning-Balance has not reported yet"
        ]
        transport.subscriptions["stepping-0"].heartbeat_age = 70.0
        await seconds(60)
        assert "  stepping-0 is silent  " in monitor.lines[1]


@pytest.mark.anyio
async def test_line_without_ended_episodes_shows_open_ones(
    fake_run: FakeRun, transport: FakeTransport, folder: Path
) -> None:
    async with running_monitor(transport, folder) as monitor:
        fake_run.collect(10_000, [])
        fake_run.train(10_000)
        fake_run.publish(transport)
        await seconds(1)
    assert "  no episode ended  " in monitor.lines[0]
    assert "  open 64 episodes, oldest 812 steps" in monitor.lines[0]


@pytest.mark.anyio
async def test_unknown_behavior_is_monitored_and_its_files_stay_in_the_folder(
    transport: FakeTransport, folder: Path
) -> None:
    registry = Registry("learning-Balance", "learning-Balance.1")
    registry.add("trained/..", 60_000)
    async with running_monitor(transport, folder) as monitor:
        transport.subscriptions["learning-Balance"].publish(registry.snapshot(EPOCH_S))
        await seconds(1)
    assert monitor.records("interval")[0]["behavior"] == ".."
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.anyio
async def test_monitor_publishes_its_own_metrics(transport: FakeTransport, folder: Path) -> None:
    async with running_monitor(transport, folder) as monitor:
        await seconds(3)
    assert [record.counters["ticks"] for _, record in monitor.published] == [1, 2, 3, 4]


@pytest.mark.anyio
async def test_missing_folder_is_an_error(transport: FakeTransport, folder: Path) -> None:
    monitor = MonitorRun(transport, folder / "missing")
    with pytest.raises(FileNotFoundError):
        await monitor.run()
    assert all(subscription.closed for subscription in transport.subscriptions.values())


def test_monitor_loads_neither_torch_nor_tensorboard_nor_matplotlib(tmp_path: Path) -> None:
    script = """
import sys
from sparring.services.stages import monitor
print([name for name in ("torch", "tensorboard", "tensorflow", "matplotlib", "zmq") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=50)
    assert done.stdout.strip() == "[]"
