"""Every outcome has one exit status, the same in all commands."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import get_args

import psutil
import pytest

from sparring.pipeline import errors
from sparring.pipeline.monitoring.summary import STATUSES, Status, summary
from sparring.pipeline.settings.load import parse_settings
from sparring.services.commands import evaluate, train
from sparring.services.main import main
from sparring.services.supervision.topology import build

ROOT = Path(__file__).parent.parent.parent
STATUS_NUMBERS = {name: value for name, value in vars(errors).items() if name.isupper() and isinstance(value, int)}
"""All exit statuses of the code."""
KNOWN = {"FAILED": 1, "BAD_INPUT": 2, "UNUSABLE": 3, "BELOW": 4, "STALLED": 5, "DISK_FULL": 28, "CANNOT_START": 127}
"""Statuses that scripts of users compare with, so they must not change."""


def test_documented_statuses_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    documented = {name: int(status) for status, name in re.findall(r"^\| (\d+) \| `([A-Z_]+)` \|", text, re.MULTILINE)}
    assert documented == STATUS_NUMBERS
    assert {name: STATUS_NUMBERS[name] for name in KNOWN} == KNOWN
    assert len(set(STATUS_NUMBERS.values())) == len(STATUS_NUMBERS)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["trian", "x.yaml"], "did you mean train?"),
        (["train", "x.yaml", "--max-step", "5"], "did you mean --max-steps?"),
        (["train", "x.yaml", "--result-dir=x"], "did you mean --results-dir?"),
        (["status", "--wach"], "did you mean --watch?"),
        (["export", "run", "--format", "onx"], "did you mean onnx?"),
    ],
)
def test_mistyped_commands_and_options_get_the_nearest_one_in_one_line(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == errors.BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert hint in line
    assert line.endswith("--help")


def test_errors_of_this_package_are_shown_without_class_and_without_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: argparse.Namespace) -> int:
        raise errors.ServiceError("got \x1b[2J; expected a name; correct it")

    monkeypatch.setattr(evaluate, "run", fail)
    assert main(["evaluate", "run"]) == errors.FAILED
    assert capsys.readouterr().err == "sparring: got \\x1b[2J; expected a name; correct it\n"
    assert errors.described(errors.ServiceError("got it")) == "got it"
    assert errors.described(KeyError("x")) == "KeyError: 'x'"


@pytest.mark.parametrize("limit", ["nan", "0", "-1", "1e10"])
@pytest.mark.parametrize("command", ["record", "try", "evaluate", "compliance"])
def test_a_time_limit_that_cannot_be_waited_for_is_refused(
    command: str, limit: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text("behaviors: {Goal: }\nsimulators: [{name: goal}]\n")
    words = {
        "record": [str(tmp_path / "c.yaml"), "--manual"],
        "try": ["goal"],
        "evaluate": ["x"],
        "compliance": ["--", "x"],
    }
    assert main([command, f"--timeout={limit}", *words[command]]) == errors.BAD_INPUT
    assert f"got --timeout {float(limit):g}; expected more than 0, and at most 1e+09" in capsys.readouterr().err


def test_letters_that_an_output_lacks_are_written_as_text(tmp_path: Path) -> None:
    path = tmp_path / "caf\u00e9.yaml"
    path.write_text("behaviors: {A: }\n")
    command = [sys.executable, "-m", "sparring", "check", str(path)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "caf\\xe9.yaml: valid" in done.stdout


class Panic(BaseException):
    """A failure as libraries in Rust raise it."""


@pytest.mark.parametrize("failure", [ZeroDivisionError("by zero"), Panic("by zero"), BaseExceptionGroup("", [Panic()])])
def test_mistake_takes_one_line_that_names_the_file_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failure: BaseException
) -> None:
    def fail(_: argparse.Namespace) -> int:
        raise failure

    monkeypatch.setattr("sparring.services.commands.check.run", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["check", "a.yaml"]) == errors.FAILED
    (kept,) = tmp_path.iterdir()
    said = rf"sparring: got \w+(: by zero \(.*:\d+\))?; expected none: it is a mistake .*; report it with {kept}\n"
    assert re.fullmatch(said, capsys.readouterr().err)
    assert "raise failure" in kept.read_text()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(type(failure)):
        main(["check", "a.yaml"])


@pytest.mark.parametrize("bar", ["nan", "inf", "-inf"])
def test_a_bar_that_nothing_can_miss_or_reach_is_refused(bar: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "run", f"--at-least={bar}"]) == errors.BAD_INPUT
    assert f"got --at-least {bar}; expected a finite number" in capsys.readouterr().err


def test_every_outcome_of_a_run_has_a_status_and_every_failure_needs_a_cause() -> None:
    assert set(STATUSES) == set(get_args(Status))
    assert STATUSES == {"completed": 0, "stopped": 0, "failed": 1, "stalled": 5}
    for status, number in STATUSES.items():
        if number:
            with pytest.raises(ValueError, match="without an error"):
                summary(run_id="r", status=status, wall_s=1.0, error=None, behaviors={})


def test_a_plug_in_that_leaves_a_service_by_sys_exit_is_named_with_its_place(tmp_path: Path) -> None:
    settings = parse_settings("{behaviors: {A: {}}, pipeline: {export: false}}", "run.yaml").settings
    build(settings, run_id="r", directory=tmp_path, seed=1).save()
    (tmp_path / "licensed.py").write_text("import sys\n\nasync def check(*_, **__):\n    sys.exit(0)\n")
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import licensed
from sparring.services.commands import service
from sparring.services.main import main
from sparring.services.supervision.topology import build
service._serve = licensed.check
sys.exit(main(["service", "monitor", "--run", {str(tmp_path)!r}]))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == errors.FAILED
    assert re.search(r"SystemExit: 0 .*licensed.py:4", ended.stderr), ended.stderr
    assert '"SystemExit: 0"' in (tmp_path / "logs" / "monitor.jsonl").read_text()


@pytest.mark.parametrize("cores", ["x", "-1", "", "9" * 20, "99999"])
def test_cores_that_a_service_cannot_run_on_are_refused(
    tmp_path: Path, cores: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = parse_settings("{behaviors: {A: {}}, pipeline: {export: false}}", "run.yaml").settings
    build(settings, run_id="r", directory=tmp_path, seed=1).save()
    try:
        status: object = main(["service", "monitor", "--run", str(tmp_path), f"--cores={cores}"])
    except SystemExit as left:  # of the parser
        status = left.code
    assert status == errors.BAD_INPUT
    assert "--cores" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no folder in which even root makes no file")
def test_a_service_whose_log_cannot_be_opened_says_so_in_one_line(tmp_path: Path) -> None:
    settings = parse_settings("{behaviors: {A: {}}, pipeline: {export: false}}", "run.yaml").settings
    build(settings, run_id="r", directory=tmp_path, seed=1).save()
    (tmp_path / "logs").symlink_to("/sys")
    command = [sys.executable, "-m", "sparring", "service", "monitor", "--run", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == errors.DISK_FULL
    said = r"got \[Errno \d+\] .*monitor\.jsonl'; expected a log that can be written; free disk space, or .*\n"
    assert re.fullmatch(said, ended.stderr)
    assert "Traceback" not in ended.stdout


def test_a_service_on_a_full_disk_has_its_status_though_its_message_has_no_room(tmp_path: Path) -> None:
    settings = parse_settings("{behaviors: {A: {}}, pipeline: {export: false}}", "run.yaml").settings
    build(settings, run_id="r", directory=tmp_path, seed=1).save()
    program = f"""
import sys
from sparring.pipeline.errors import DiskFull
from sparring.services.commands import service
from sparring.services.main import main

async def serve(*_, **__):
    raise DiskFull("got no room")

service._serve = serve
sys.exit(main(["service", "monitor", "--run", {str(tmp_path)!r}]))
"""
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([sys.executable, "-c", program], stderr=full, timeout=60, check=False)
    assert ended.returncode == errors.DISK_FULL


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot tell")
@pytest.mark.parametrize(
    ("left", "ended"),
    [
        ("threading.Thread(target=threading.Event().wait, name='engine').start()", "was left running: engine"),
        ("subprocess.Popen(['sleep', '987'])", "was left running: (sleep|python)"),  # before it has its own name
        ("get_context('spawn').Process(target=time.sleep, args=(987,)).start()", "was left running: python.*"),
        (
            "get_context('forkserver').Process(target=time.sleep, args=(987,)).start()",
            "plug-ins run at the exit, which took more than 0.5 s",
        ),
        ("atexit.register(threading.Event().wait)", "plug-ins run at the exit, which took more than 0.5 s"),
    ],
)
@pytest.mark.parametrize("command", ["train", "simulator"])
def test_what_plug_ins_leave_in_the_process_of_a_command_ends_with_it(left: str, ended: str, command: str) -> None:
    program = f"""
import atexit, subprocess, sys, threading, time
from multiprocessing import get_context
from sparring import __main__ as command
from sparring.services import main

def run(*_):
    {left}
    return 5

main.main, main._EXIT_S = run, 0.5
sys.argv[1:] = ["{command}", "x.yaml"]
sys.exit(command.main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 5
    assert re.fullmatch(f"notice: ended what {ended}\n", done.stderr), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot tell")
def test_what_a_script_started_before_it_became_the_command_stays() -> None:
    words = shlex.join([sys.executable, "-m", "sparring", "check", "/dev/null"])
    script = f"sleep 60 > /dev/null 2>&1 & echo $!; exec {words}"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    psutil.Process(int(done.stdout.split()[0])).kill()  # which raises an error where it is gone
    assert "ended what" not in done.stderr


@pytest.mark.parametrize(
    ("status", "complete", "reward", "expected"),
    [
        ("completed", True, 1.0, 0),
        ("completed", True, 0.0, errors.BELOW),
        ("completed", False, 1.0, errors.FAILED),
        ("stopped", True, 1.0, errors.FAILED),
        ("failed", True, 1.0, errors.FAILED),
        ("stalled", False, 1.0, errors.STALLED),
    ],
)
def test_evaluation_exits_with_the_status_of_its_outcome(
    status: str, complete: bool, reward: float, expected: int
) -> None:
    found = {"status": status, "complete": complete, "behaviors": {"A": {"reward": {"mean": reward}}}}
    assert evaluate._exit_status(found, at_least=0.5) == expected


@pytest.mark.parametrize("option", ["--timeout-wait", "--restarts-rate-limit-period-s", "--max-steps", "--seed"])
@pytest.mark.parametrize("number", ["x", "1" + "0" * 400, "inf", "1e300", "0.5"])
def test_option_takes_whole_numbers_as_large_as_in_a_file(
    option: str, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "c.yaml", option, number])
    assert ended.value.code == errors.BAD_INPUT
    assert f"argument {option}: invalid whole_number value: '{number}'" in capsys.readouterr().err


@pytest.mark.parametrize("status", get_args(Status))
def test_train_exits_with_the_status_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: Status
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        f"behaviors: {{A: {{}}}}\nsimulators: [{{name: goal, options: {{behavior: A}}}}]\n"
        f"checkpoint_settings: {{results_dir: {tmp_path}}}\n"
    )
    monkeypatch.setattr(train, "launch", lambda *_, **__: status)
    assert main(["train", str(config), "--run-id", "r"]) == STATUSES[status]


def test_invalid_input_has_its_status_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text("behaviors: {}\n")
    assert main(["train", str(tmp_path / "c.yaml"), "--results-dir", str(tmp_path / "r")]) == errors.BAD_INPUT
    assert main(["status", "none", "--results-dir", str(tmp_path)]) == errors.BAD_INPUT
    for words in (["train", "\udcff.yaml"], ["train", str(tmp_path / "c.yaml"), "--env-args", "\udcff"]):
        assert main([*words, "--results-dir", str(tmp_path / "r")]) == errors.BAD_INPUT
        assert "got the argument '\\udcff" in capsys.readouterr().err
    assert main(["check", str(tmp_path / "c.yaml")]) == errors.FAILED
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("closed", "name", "status"),
    [("<&-", "valid", 0), (">&-", "valid", 0), ("2>&-", "missing", 1), ("<&- >&- 2>&-", "missing", 1)],
)
def test_closed_standard_streams_change_no_status(closed: str, name: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "valid.yaml").write_text("behaviors: {Ball: }\n")
    path = tmp_path / f"{name}.yaml"
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "sparring", "check", str(path)]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == status


@pytest.mark.parametrize("arguments", [["check", "valid.yaml"], ["try", "goal"], ["status", "."]])
def test_output_that_nothing_reads_ends_a_command_without_a_traceback(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "valid.yaml").write_text("behaviors: {Ball: }\n")
    ended = summary(run_id="r", status="completed", wall_s=1.0, error=None, behaviors={})
    (tmp_path / "summary.json").write_text(json.dumps(ended))
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "sparring", *arguments]
    done = subprocess.run(command, cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such terminals")
@pytest.mark.parametrize("arguments", [["check", "valid.yaml"], ["try", "goal"], ["doctor"]])
@pytest.mark.parametrize("output", ["terminal that is gone", "only for reading"])
def test_output_that_cannot_be_written_ends_a_command_with_one_line(
    tmp_path: Path, output: str, arguments: list[str]
) -> None:
    (tmp_path / "valid.yaml").write_text("behaviors: {Ball: }\n")
    if output == "only for reading":
        writing = os.open(os.devnull, os.O_RDONLY)
    else:
        main_end, writing = os.openpty()
        os.close(main_end)
    command = [sys.executable, "-m", "sparring", *arguments]
    done = subprocess.run(
        command, cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    os.close(writing)
    assert done.returncode == errors.FAILED
    assert re.fullmatch("sparring: got .*; expected .*output.*; mend it\n", done.stderr), done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="it removes no working folder")
def test_working_folder_that_was_removed_is_told_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    for words in (["doctor"], ["train", str(tmp_path / "config.yaml")]):
        assert main(words) == 2
        assert "got a working folder that cannot be found" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "got [Errno 24] Too many open files; "),
        (OSError(errno.EFBIG, "File too large", "here"), "got [Errno 27] File too large: 'here'; "),
        (RuntimeError("can't start new thread"), "got can't start new thread; "),
        (MemoryError(), "got no memory; "),
    ],
)
def test_limit_of_the_system_is_told_without_a_traceback(
    failure: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: argparse.Namespace) -> int:
        raise ExceptionGroup("tasks", [failure])

    monkeypatch.setattr("sparring.services.commands.doctor.run", fail)
    assert main(["doctor"]) == 1
    expected = "expected what a run needs; raise the limits of this process (`ulimit -a`)"
    assert capsys.readouterr().err == f"sparring: {said}{expected}\n"


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such limit")
def test_too_low_limit_of_open_files_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("behaviors: {Goal: {}}\nsimulators: [{name: goal}]\n")
    command = f"ulimit -n 48; {sys.executable} -m sparring train config.yaml --run-id run"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "got a limit of 48 open files; expected at least 64; raise it (`ulimit -n 64`)" in done.stderr
    assert not (tmp_path / "results" / "run" / "run.json").exists()


def test_folder_in_place_of_a_file_is_named_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "status.json").mkdir()
    assert main(["status", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    path = tmp_path / "status.json"
    assert error.startswith(f"sparring: got {path}, which cannot be used (Is a directory); expected ")
