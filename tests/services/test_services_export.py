"""`sparring export`, and exports beside a run."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import BinaryIO

import anyio
import onnx
import pytest

from sparring.pipeline import export
from sparring.pipeline.errors import install_command
from sparring.pipeline.learning.checkpoints import CheckpointFolder
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.learning.settings import TrainerSettings
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.settings import parse_settings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from sparring.services.main import main
from sparring.services.process.hosting import SPARRING, Process, ProcessHost
from sparring.services.supervision.active_run import ActiveRun
from sparring.services.supervision.exports import Exports
from sparring.services.supervision.topology import build

SPEC = BehaviorSpec(observations=(ObservationSpec(name="x", shape=(3,)),), actions=ActionSpec(continuous=1))


def save(run: Path, behavior: str, trained: int, keep: int = 5, **network) -> str:
    """Writes a checkpoint as a learner does, and returns its path within the run's folder."""
    settings = TrainerSettings(network_settings=NetworkSettings(hidden_units=8, **network))
    checkpoint = dataclasses.replace(Learner(behavior, SPEC, settings, 1).checkpoint(), trained=trained)
    return CheckpointFolder(run, behavior).save(checkpoint, keep).relative_to(run).as_posix()


@pytest.fixture
def run(tmp_path) -> Path:
    """The folder of a run of two behaviors."""
    folder = tmp_path / "goal-1"
    save(folder, "Goal", 1000)
    save(folder, "Goal", 2000)
    save(folder, "Other", 1500)
    (folder / "logs").mkdir()
    return folder


def files(folder: Path) -> list[str]:
    suffixes = (".onnx", ".pt", ".pt2", ".safetensors")
    found = [path for path in folder.rglob("*") if path.suffix in suffixes and not path.parent.name.startswith("check")]
    return sorted(path.relative_to(folder).as_posix() for path in found)


def steps(path: Path) -> str:
    return {one.key: one.value for one in onnx.load(path).metadata_props}["steps"]


# ---------------------------------------------------------------- the command


def test_newest_checkpoint_of_every_behavior_is_exported(run, capsys):
    assert main(["export", str(run)]) == 0
    assert files(run) == ["Goal.onnx", "Other.onnx"]
    assert steps(run / "Goal.onnx") == "2000"
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [["Goal", "2000", "steps"], ["Other", "1500", "steps"]]
    assert all("largest difference" in line for line in lines)


def test_named_checkpoint_is_exported_to_a_file_with_its_steps(run):
    """The file is beside the checkpoints, as in ML-Agents; the newest checkpoint also has the behavior's file."""
    assert main(["export", str(run), "--behavior", "Goal", "--checkpoint", "checkpoint-000000001000"]) == 0
    assert files(run) == ["Goal/Goal-1000.onnx"]
    assert main(["export", str(run), "--checkpoint", "checkpoint-000000002000"]) == 0
    assert files(run) == ["Goal.onnx", "Goal/Goal-1000.onnx", "Goal/Goal-2000.onnx"]
    assert (run / "Goal.onnx").read_bytes() == (run / "Goal/Goal-2000.onnx").read_bytes()


def test_export_to_another_folder_in_other_formats(run, tmp_path):
    out = tmp_path / "models"
    for kind in ("safetensors", "torchscript"):
        assert main(["export", str(run), "--format", kind, "--out", str(out), "--behavior", "Other"]) == 0
    assert files(out) == ["Other.pt", "Other.safetensors"]
    assert files(run) == []


def test_prune_removes_exports_of_removed_checkpoints(run):
    for name in ("checkpoint-000000001000", "checkpoint-000000002000"):
        main(["export", str(run), "--checkpoint", name])
    for name in ("mine-1.onnx", "Goal-².onnx"):
        (run / "Goal" / name).write_bytes(b"another user's")
    save(run, "Goal", 3000, keep=2)
    main(["export", str(run), "--behavior", "Goal"])
    assert "Goal/Goal-1000.onnx" in files(run)
    main(["export", str(run), "--behavior", "Goal", "--prune"])
    assert files(run) == ["Goal.onnx", "Goal/Goal-2000.onnx", "Goal/Goal-².onnx", "Goal/mine-1.onnx"]


def test_failed_export_of_a_behavior_does_not_stop_the_others(run, capsys):
    save(run, "Blind", 10, previous_action=True)
    assert main(["export", str(run)]) == 1
    assert files(run) == ["Goal.onnx", "Other.onnx"]
    assert "Blind: got Blind, trained with network_settings.previous_action" in capsys.readouterr().err


def test_damaged_checkpoint_is_named(run, capsys):
    weights = run / "Other" / "checkpoint-000000001500" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert main(["export", str(run)]) == 1
    assert "damaged checkpoint file" in capsys.readouterr().err
    assert files(run) == ["Goal.onnx"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing"),
        (["--behavior", "Gaol"], "'Gaol'"),
        (["--checkpoint", "checkpoint-7"], "checkpoint-000000002000"),
        (["--out", "/dev/null"], "got --out /dev/null, which is no folder"),
        (["--out", "model.onnx"], "got --out model.onnx, which is no folder"),
    ],
)
def test_unknown_run_behavior_or_checkpoint_is_bad_input_with_suggestions(run, capsys, arguments, message):
    folder = run if arguments else run / "nothing"
    assert main(["export", str(folder), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_missing_packages_are_named_with_their_installation_command(run, capsys, monkeypatch):
    monkeypatch.setattr(export, "ONNX_PACKAGES", ("onnx_is_not_here",))
    assert main(["export", str(run)]) == 1
    assert install_command("onnx") in capsys.readouterr().err
    assert files(run) == []


# ---------------------------------------------------------------- beside a run


class Log:
    """Records log events."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict]] = []

    def info(self, event: str, **fields) -> None:
        self.lines.append(("info", event, fields))

    def warning(self, event: str, **fields) -> None:
        self.lines.append(("warning", event, fields))

    def of(self, event: str) -> list[dict]:
        return [fields for _, name, fields in self.lines if name == event]


def exports_of(run: Path, log: Log) -> Exports:
    """Returns the exports of a run on one machine."""
    settings = parse_settings("behaviors: {Goal: {}}", "test").settings
    return Exports(build(settings, run_id="test", directory=run, seed=1), {}, log)  # type: ignore[arg-type]


both_loops = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])


@pytest.fixture
def children(tmp_path, monkeypatch):
    """Makes all children run a line of shell, which can wait by reading from the pipe `gate`, or another program."""
    os.mkfifo(tmp_path / "gate")

    def run(line: str, program: str = "/bin/sh") -> None:
        command = [program, "-c", f'gate="{tmp_path}/gate"\n{line}', "sparring"]

        async def forked(host: ProcessHost, name: str, arguments: list[str], environment: dict[str, str]) -> Process:
            return host.start(name, [*command, *arguments], environment)

        monkeypatch.setattr(ProcessHost, "forked", forked)

    return run


async def reach_gate(tmp_path: Path) -> BinaryIO:
    """Waits until a child reads from the gate; returns the gate, and a line written to it lets the child continue."""
    return await anyio.to_thread.run_sync((tmp_path / "gate").open, "wb")


@pytest.mark.anyio
@both_loops
async def test_checkpoint_is_exported_by_a_child_of_lowest_priority(run, children):
    log = Log()
    # The child waits until its niceness is raised, which happens after its start.
    line = 'until test $(nice) = 19; do :; done; echo "$OMP_NUM_THREADS $*"'
    children(line)
    exports = exports_of(run, log)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exports.run)
        exports.on_checkpoint("Goal", "Goal/checkpoint-000000002000")
        while not log.of("exported"):  # noqa: ASYNC110 - a log has no event
            await anyio.sleep(0.01)
        await exports.finish(30)
    (fields,) = log.of("exported")
    assert fields["checkpoint"] == "Goal/checkpoint-000000002000"
    assert fields["result"] == (f"1 export {run} --prune --behavior=Goal --checkpoint=checkpoint-000000002000")


@pytest.mark.anyio
@both_loops
async def test_overtaken_and_removed_checkpoints_are_skipped_and_counted(run, tmp_path, children):
    log = Log()
    children('case "$5" in *3000) read passed < "$gate" ;; esac; echo done')
    exports = exports_of(run, log)
    paths = [save(run, "Goal", trained) for trained in (3000, 4000, 5000)]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exports.run)
        exports.on_checkpoint("Goal", paths[0])
        gate = await reach_gate(tmp_path)
        exports.on_checkpoint("Goal", paths[1])
        exports.on_checkpoint("Goal", paths[2])
        exports.on_checkpoint("Goal", paths[2])
        exports.on_checkpoint("Other", "Other/checkpoint-000000001500")
        shutil.rmtree(run / "Other" / "checkpoint-000000001500")
        with gate:
            gate.write(b"\n")
        await exports.finish(30)
    assert [fields["checkpoint"] for fields in log.of("exported")] == [paths[0], paths[2]]
    assert [(fields["checkpoint"], fields["why"]) for fields in log.of("export_skipped")] == [
        (paths[1], "overtaken"),
        ("Other/checkpoint-000000001500", "removed"),
    ]


@pytest.mark.anyio
@both_loops
@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("echo first >&2; echo 'the cause' >&2; exit 3", "exit status 3: the cause"),
        ("", "exit status 0 before its end"),
    ],
)
async def test_failed_child_is_a_warning_with_its_last_line(run, children, line, cause):
    log = Log()
    children(line)
    exports = exports_of(run, log)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exports.run)
        exports.on_checkpoint("Goal", "Goal/checkpoint-000000002000")
        await exports.finish(30)
    (fields,) = log.of("export_failed")
    assert fields["cause"] == cause


@pytest.mark.anyio
@both_loops
async def test_child_that_cannot_be_started_is_a_warning(run, tmp_path, children):
    log = Log()
    children("", program=str(tmp_path / "not-there"))
    exports = exports_of(run, log)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exports.run)
        exports.on_checkpoint("Goal", "Goal/checkpoint-000000002000")
        await exports.finish(30)
    assert [level for level, event, _ in log.lines if event == "export_failed"] == ["warning"]


@pytest.mark.anyio
@both_loops
async def test_child_that_is_too_slow_at_the_end_is_killed_with_a_warning(run, tmp_path, children):
    log = Log()
    children('read passed < "$gate"')
    exports = exports_of(run, log)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exports.run)
        exports.on_checkpoint("Goal", "Goal/checkpoint-000000002000")
        with await reach_gate(tmp_path):
            exports.on_checkpoint("Other", "Other/checkpoint-000000001500")
            await exports.finish(0)
    (fields,) = log.of("exports_given_up")
    assert fields["checkpoints"] == ["Goal/checkpoint-000000002000", "Other/checkpoint-000000001500"]
    (before,) = log.of("waiting_for_exports")
    assert before["checkpoints"] == fields["checkpoints"]
    assert not log.of("exported")


@pytest.mark.anyio
@both_loops
async def test_wait_for_exports_ends_where_the_run_is_hurried(run, tmp_path, children):
    log, active = Log(), ActiveRun(None, anyio.current_time, None, "s")
    children('read passed < "$gate"')
    exports = exports_of(run, log)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(exports.run)
            exports.on_checkpoint("Goal", "Goal/checkpoint-000000002000")
            with await reach_gate(tmp_path):
                tasks.start_soon(exports.finish, 1e6, active.wait_scope)
                await anyio.wait_all_tasks_blocked()
                active.hurry()
    assert [fields["checkpoints"] for fields in log.of("exports_given_up")] == [["Goal/checkpoint-000000002000"]]


@pytest.mark.anyio
@both_loops
async def test_child_at_the_end_has_normal_priority_and_is_not_interrupted_with_the_terminal(run, children):
    """Ctrl-C reaches every process of the terminal's group, but the run still ends in order."""
    log = Log()
    children("echo $$ $(ps -o pgid= -p $$) $(nice)")
    exports = exports_of(run, log)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exports.run)
        exports.on_checkpoint("Goal", "Goal/checkpoint-000000002000")
        await exports.finish(30)
    ((own, group, niceness),) = [fields["result"].split() for fields in log.of("exported")]
    assert own == group
    assert int(niceness) == os.nice(0)


@pytest.mark.anyio
@both_loops
async def test_missing_packages_are_reported_once_and_nothing_is_exported(run, monkeypatch):
    monkeypatch.setattr(export, "ONNX_PACKAGES", ("onnx_is_not_here",))
    log = Log()
    exports = exports_of(run, log)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exports.run)
        exports.on_checkpoint("Goal", "Goal/checkpoint-000000002000")
        exports.on_checkpoint("Goal", "")
        await exports.finish(30)
    assert [(event, fields["missing"]) for _, event, fields in log.lines] == [
        ("exports_disabled", ["onnx_is_not_here"])
    ]


@pytest.mark.slow
def test_child_ends_with_its_run(run, tmp_path):
    """The child reads a pipe at that time, whose content never ends."""
    config = run / "config.yaml"
    os.mkfifo(config)
    host = ProcessHost(run / "logs")
    child = host.start("check", [*SPARRING, "check", str(config)], {})
    with config.open("wb"):  # as soon as the child reads
        assert child.join(0) is None
        host.close()
        assert child.join(60) == "exit status 1"


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_real_child_writes_the_files_beside_the_run(run):
    log = Log()
    exports = exports_of(run, log)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exports.run)
        exports.on_checkpoint("Goal", "Goal/checkpoint-000000002000")
        exports.on_checkpoint("Other", "Other/checkpoint-000000001500")
        await exports.finish(500)
    assert len(log.of("exported")) == 2, log.lines
    assert files(run) == ["Goal.onnx", "Goal/Goal-2000.onnx", "Other.onnx", "Other/Other-1500.onnx"]
