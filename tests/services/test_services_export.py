"""`sparring export`, and the exports beside a run."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import onnx
import pytest

from sparring.pipeline.errors import install_command
from sparring.pipeline.export import packages as export_packages
from sparring.pipeline.learning.checkpoints import CheckpointFolder
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.learning.settings import TrainerSettings
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from sparring.services.main import main
from sparring.services.supervision.exports import Exports

SPEC = BehaviorSpec(observations=(ObservationSpec(name="x", shape=(3,)),), actions=ActionSpec(continuous=1))


def save(run: Path, behavior: str, trained: int, keep: int = 5, **network) -> str:
    """Writes a checkpoint as a learner does, and returns its name within the run's folder."""
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


def test_it_exports_the_newest_checkpoint_of_every_behavior(run, capsys):
    assert main(["export", str(run)]) == 0
    assert files(run) == ["Goal.onnx", "Other.onnx"]
    assert steps(run / "Goal.onnx") == "2000"
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in said] == [["Goal", "2000", "steps"], ["Other", "1500", "steps"]]
    assert all("largest difference" in line for line in said)


def test_a_named_checkpoint_goes_to_a_file_with_its_steps(run):
    """Beside its checkpoints, as ML-Agents' users look for it; the newest has the place of the newest too."""
    assert main(["export", str(run), "--behavior", "Goal", "--checkpoint", "checkpoint-000000001000"]) == 0
    assert files(run) == ["Goal/Goal-1000.onnx"]
    assert main(["export", str(run), "--checkpoint", "checkpoint-000000002000"]) == 0
    assert files(run) == ["Goal.onnx", "Goal/Goal-1000.onnx", "Goal/Goal-2000.onnx"]
    assert (run / "Goal.onnx").read_bytes() == (run / "Goal/Goal-2000.onnx").read_bytes()


def test_it_writes_to_another_folder_and_in_other_formats(run, tmp_path):
    out = tmp_path / "models"
    for kind in ("safetensors", "torchscript"):
        assert main(["export", str(run), "--format", kind, "--out", str(out), "--behavior", "Other"]) == 0
    assert files(out) == ["Other.pt", "Other.safetensors"]
    assert files(run) == []


def test_exports_of_checkpoints_that_are_gone_are_removed_where_that_is_asked_for(run):
    for name in ("checkpoint-000000001000", "checkpoint-000000002000"):
        main(["export", str(run), "--checkpoint", name])
    (run / "Goal" / "mine-1.onnx").write_bytes(b"somebody else's")
    save(run, "Goal", 3000, keep=2)
    main(["export", str(run), "--behavior", "Goal"])
    assert "Goal/Goal-1000.onnx" in files(run)
    main(["export", str(run), "--behavior", "Goal", "--prune"])
    assert files(run) == ["Goal.onnx", "Goal/Goal-2000.onnx", "Goal/mine-1.onnx"]


def test_a_behavior_that_can_not_be_exported_does_not_keep_the_others_from_it(run, capsys):
    save(run, "Blind", 10, previous_action=True)
    assert main(["export", str(run)]) == 1
    assert files(run) == ["Goal.onnx", "Other.onnx"]
    assert "Blind: got Blind, trained with network_settings.previous_action" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_named(run, capsys):
    weights = run / "Other" / "checkpoint-000000001500" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert main(["export", str(run)]) == 1
    assert "damaged checkpoint file" in capsys.readouterr().err
    assert files(run) == ["Goal.onnx"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing"),
        (["--behavior", "Gaol"], "'Gaol'"),
        (["--checkpoint", "checkpoint-7"], "checkpoint-000000002000"),
    ],
)
def test_what_is_not_there_is_bad_input_that_names_what_is(run, capsys, arguments, said):
    folder = run if arguments else run / "nothing"
    assert main(["export", str(folder), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_missing_packages_are_named_with_how_to_install_them(run, capsys, monkeypatch):
    monkeypatch.setattr(export_packages, "ONNX_PACKAGES", ("onnx_is_not_here",))
    assert main(["export", str(run)]) == 1
    assert install_command("onnx") in capsys.readouterr().err
    assert files(run) == []


# ---------------------------------------------------------------- beside a run


class Log:
    """Keeps what is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict]] = []

    def info(self, event: str, **said) -> None:
        self.lines.append(("info", event, said))

    def warning(self, event: str, **said) -> None:
        self.lines.append(("warning", event, said))

    def of(self, event: str) -> list[dict]:
        return [said for _, name, said in self.lines if name == event]


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request) -> str:
    return request.param


@pytest.fixture
def stand_in(tmp_path):
    """An interpreter that does what a line of shell says instead; it waits for the pipe `gate` where it reads it."""
    os.mkfifo(tmp_path / "gate")

    def make(line: str) -> str:
        path = tmp_path / "python"
        path.write_text(f'#!/bin/sh\ngate="{tmp_path}/gate"\n{line}\n')
        path.chmod(0o755)
        return str(path)

    return make


async def open_gate(tmp_path: Path) -> None:
    """Waits until a child reads from the gate, and lets it pass."""
    await anyio.to_thread.run_sync((tmp_path / "gate").write_bytes, b"\n")


@pytest.mark.anyio
async def test_a_checkpoint_is_exported_by_a_child_that_lets_others_go_first(run, stand_in):
    log = Log()
    # Its niceness is raised once it runs: it waits for that.
    line = 'until test $(nice) = 19; do :; done; echo "$OMP_NUM_THREADS $*"'
    exports = Exports(run, stand_in(line), log)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exports.run)
        exports.saw("Goal", "Goal/checkpoint-000000002000")
        await exports.finish(30)
    (said,) = log.of("exported")
    assert said["checkpoint"] == "Goal/checkpoint-000000002000"
    assert said["result"] == (
        f"1 -P -m sparring export {run} --attached --prune --behavior=Goal --checkpoint=checkpoint-000000002000"
    )
    assert (exports.exported, exports.skipped, exports.failed) == (1, 0, 0)


@pytest.mark.anyio
async def test_checkpoints_that_were_overtaken_or_removed_are_skipped_and_counted(run, tmp_path, stand_in):
    log = Log()
    exports = Exports(run, stand_in('case "$9" in *3000) read passed < "$gate" ;; esac'), log)
    paths = [save(run, "Goal", trained) for trained in (3000, 4000, 5000)]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exports.run)
        exports.saw("Goal", paths[0])
        while exports._under_way is None:
            await anyio.lowlevel.checkpoint()
        exports.saw("Goal", paths[1])
        exports.saw("Goal", paths[2])
        exports.saw("Goal", paths[2])
        exports.saw("Other", "Other/checkpoint-000000001500")
        shutil.rmtree(run / "Other" / "checkpoint-000000001500")
        await open_gate(tmp_path)
        await exports.finish(30)
    assert [said["checkpoint"] for said in log.of("exported")] == [paths[0], paths[2]]
    assert [(said["checkpoint"], said["why"]) for said in log.of("export_skipped")] == [
        (paths[1], "overtaken"),
        ("Other/checkpoint-000000001500", "removed"),
    ]
    assert (exports.exported, exports.skipped, exports.failed) == (2, 2, 0)


@pytest.mark.anyio
async def test_a_child_that_fails_is_a_warning_with_its_last_line(run, stand_in):
    log = Log()
    exports = Exports(run, stand_in("echo first >&2; echo 'the cause' >&2; exit 3"), log)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exports.run)
        exports.saw("Goal", "Goal/checkpoint-000000002000")
        await exports.finish(30)
    (said,) = log.of("export_failed")
    assert (said["cause"], said["status"]) == ("the cause", 3)
    assert exports.failed == 1


@pytest.mark.anyio
async def test_a_child_that_can_not_be_started_is_a_warning(run, tmp_path):
    log = Log()
    exports = Exports(run, str(tmp_path / "not-there"), log)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exports.run)
        exports.saw("Goal", "Goal/checkpoint-000000002000")
        await exports.finish(30)
    assert [level for level, event, _ in log.lines if event == "export_failed"] == ["warning"]


@pytest.mark.anyio
async def test_a_child_that_takes_too_long_at_the_end_is_killed_with_a_warning(run, stand_in):
    log = Log()
    exports = Exports(run, stand_in('read passed < "$gate"'), log)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exports.run)
        exports.saw("Goal", "Goal/checkpoint-000000002000")
        while exports._under_way is None:
            await anyio.lowlevel.checkpoint()
        exports.saw("Other", "Other/checkpoint-000000001500")
        await exports.finish(0)
    (said,) = log.of("exports_given_up")
    assert said["checkpoints"] == ["Goal/checkpoint-000000002000", "Other/checkpoint-000000001500"]
    (before,) = log.of("waiting_for_exports")
    assert before["checkpoints"] == said["checkpoints"]
    assert exports.exported == 0


@pytest.mark.anyio
async def test_a_child_that_an_interrupt_hit_is_started_again(run, tmp_path, stand_in):
    """Ctrl-C at the terminal reaches all of its processes; the run goes on to its end in order."""
    log = Log()
    line = f'test -e "{tmp_path}/again" || {{ touch "{tmp_path}/again"; kill -INT $$; }}; echo done'
    exports = Exports(run, stand_in(line), log)
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(exports.run)
            exports.saw("Goal", "Goal/checkpoint-000000002000")
            await exports.finish(30)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [said["result"] for said in log.of("exported")] == ["done"]


@pytest.mark.anyio
async def test_without_the_packages_there_is_one_notice_and_nothing_else(run, monkeypatch):
    monkeypatch.setattr(export_packages, "ONNX_PACKAGES", ("onnx_is_not_here",))
    log = Log()
    exports = Exports(run, "/bin/false", log)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exports.run)
        exports.saw("Goal", "Goal/checkpoint-000000002000")
        exports.saw("Goal", "")
        await exports.finish(30)
    assert [(event, said["missing"]) for _, event, said in log.lines] == [("no_exports", ["onnx_is_not_here"])]


@pytest.mark.slow
def test_a_child_ends_when_the_run_it_belongs_to_is_gone(run, tmp_path):
    """Here while it waits for a checkpoint to be read, which a pipe in the place of a file never ends."""
    weights = run / "Goal" / "checkpoint-000000002000" / "weights.safetensors"
    weights.unlink()
    os.mkfifo(weights)
    command = [sys.executable, "-m", "sparring", "export", str(run), "--behavior=Goal", "--attached"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with weights.open("wb"):  # as soon as the child reads
        assert child.poll() is None
        child.send_signal(signal.SIGINT)
        child.stdin.close()
        assert child.wait() == 1
    assert files(run) == []


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_a_real_child_writes_the_files_beside_the_run(run, monkeypatch):
    monkeypatch.setattr(
        "sparring.services.supervision.exports.NICENESS", 0
    )  # who lets all others go first may wait for them for ever
    log = Log()
    exports = Exports(run, sys.executable, log)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exports.run)
        exports.saw("Goal", "Goal/checkpoint-000000002000")
        exports.saw("Other", "Other/checkpoint-000000001500")
        await exports.finish(500)
    assert exports.exported == 2, log.lines
    assert files(run) == ["Goal.onnx", "Goal/Goal-2000.onnx", "Other.onnx", "Other/Other-1500.onnx"]
