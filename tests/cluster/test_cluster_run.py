"""Whole runs on a cluster of this machine with three nodes, whose raylets are killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sparring.pipeline.errors import BAD_INPUT, FAILED
from sparring.pipeline.security import secret_key
from tests.cluster.cluster_runs import ClusterRun, check_balance, nodes

HANG_S = 180.0

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("workers", "cpus", "deaths", "behavior"),
    [(3, 2, ["stepping-0", "learning-Balance"], "behaviors:\n Balance:"), (1, 8, ["assembly"], "default_settings:")],
    ids=["a part each", "all on one, the learner placed once its behavior is named"],
)
def test_a_run_survives_the_deaths_of_nodes(
    tmp_path: Path, workers: int, cpus: int, deaths: list[str], behavior: str
) -> None:
    """Parts are placed again, the learner continues from its newest checkpoint, and every step is accounted for.

    What died with a node is lost. Where all parts die together, the newest checkpoint may hold all that simulators had
    reported.
    """
    with nodes(workers, cpus) as cluster:
        run = ClusterRun(tmp_path, cluster.address, steps=10_000_000, behavior=behavior)
        run.until(lambda: run.trained() > 1000)
        for part in deaths:
            placed = run.text().count(f"placed  part={part} ")
            cluster.add()
            cluster.kill_node_of(part)
            run.until(lambda: run.text().count(f"placed  part={part} ") > placed)  # noqa: B023
            before = run.trained()
            run.until(lambda: run.trained() > before + 1000)  # noqa: B023
        key = secret_key(run.folder)
        assert run.orphans(), "the parts are found as long as they run"
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 0, run.text()
    found = run.summary()["behaviors"]["Balance"]
    assert "placed" in run.text()
    check_balance(found["step_counts"])
    assert found["step_counts"]["lost"] > 0 or workers == 1
    assert found["unaccounted"] in (None, 0)
    assert Path(found["checkpoint"]).is_dir()
    assert found["step_counts"]["trained"] == int(found["checkpoint"].rpartition("-")[2])
    assert not run.orphans()
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert key.encode() not in path.read_bytes(), path


def test_a_start_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    """Ray itself would end it by an exception that is raised anywhere, with which a lock may be held for ever."""
    command = [sys.executable, "-m", "sparring", "train", "configs/goal.yaml", "--ray", "--results-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        main, started = psutil.Process(process.pid), set[psutil.Process]()
        while not any(one.name() == "gcs_server" for one in started):
            assert process.poll() is None, process.communicate()[0]
            started |= {*main.children(recursive=True)}
            time.sleep(0.02)
        process.terminate()
        text, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 130, text
    assert "Traceback" not in text
    assert not psutil.wait_procs(started, HANG_S)[1]


def test_a_run_ends_with_its_head_keeps_a_checkpoint_and_is_resumed_in_another_cluster(tmp_path: Path) -> None:
    with nodes(1, 8) as cluster:
        run = ClusterRun(tmp_path, cluster.address, steps=1_000_000)
        run.until(lambda: run.trained() > 3000)
        killed_at = time.monotonic()
        cluster.kill_head()
        assert run.end(limit_s=90.0) == FAILED, run.text()
        assert time.monotonic() - killed_at < 90.0
    assert "head of the cluster has not answered" in run.text()
    assert "Traceback" not in run.text()
    assert not run.orphans()
    checkpoint = Path(run.summary()["behaviors"]["Balance"]["checkpoint"])
    assert checkpoint.is_dir()
    with nodes(1, 8) as cluster:
        steps = int(checkpoint.name.split("-")[1])
        resumed = ClusterRun(tmp_path, cluster.address, steps=steps + 1000, resume=True)
        assert resumed.end() == 0, resumed.text()
    assert "restored" in (run.folder / "logs" / "learning-Balance.jsonl").read_text()
    check_balance(resumed.summary()["behaviors"]["Balance"]["step_counts"])
    assert not resumed.orphans()


def test_what_cannot_run_there_is_named_before_anything_starts(tmp_path: Path) -> None:
    with nodes(workers=1) as cluster:
        run = ClusterRun(tmp_path, cluster.address, steps=1000, placement="stepping: {num_gpus: 1}")
        assert run.end() == BAD_INPUT
        (line,) = [line for line in run.text().splitlines() if "without room" in line]
        assert "stepping-0 needs 1.5 CPU, 1 GPU" in line
        assert "2 CPU; expected" not in line
        assert "Traceback" not in run.text()
    assert not run.folder.joinpath("run.json").exists()
    run = ClusterRun(tmp_path, "127.0.0.1:1", steps=1000)
    assert run.end() == BAD_INPUT
    assert "where no cluster answers" in run.text()
    assert "Traceback" not in run.text()
