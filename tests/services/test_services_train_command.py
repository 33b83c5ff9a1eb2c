"""`sparring train`: its options, the command that resumes a run, and notes to start a game by hand."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import shlex
import shutil
import socket
import threading
from pathlib import Path

import anyio
import pytest
import structlog

from sparring.pipeline import errors
from sparring.pipeline.coordination.opponents import OPPONENTS_FILE
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.settings import Settings, parse_settings, read
from sparring.services.commands import runs, train
from sparring.services.commands.players import write_opponents
from sparring.services.main import main
from sparring.services.supervision.launch import checkpoints
from sparring.services.supervision.topology import origin_of
from sparring.services.supervision.watchdog import relay, written_since


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return parser.parse_args(words)


def test_resume_command_repeats_the_options_of_the_first_one() -> None:
    first = parsed(
        *("ball.yaml", "--env", "my builds/Ball", "--num-envs", "4", "--no-graphics", "--max-steps", "5e6"),
        *("--set", "behaviors.Ball.max_steps=1", "--set", "debug=true"),
        *("--run-id", "a", "--force", "--initialize-from", "b", "--env-args", "--level", "3"),
    )
    again = shlex.split(train.going_on(first, "a"))
    assert again[:2] == ["sparring", "train"]
    changed = {"resume": True, "force": None, "initialize_from": None}
    expected = vars(first) | {f"checkpoint_settings.{key}": value for key, value in changed.items()}
    assert vars(parsed(*again[2:])) == expected


def test_resume_command_names_a_run_without_run_id() -> None:
    assert train.going_on(parsed("ball.yaml"), "ball-1") == "sparring train ball.yaml --run-id ball-1 --resume"


def test_run_of_a_program_is_resumed_by_that_program() -> None:
    """Its configuration may be a file that is gone by now."""
    args = parsed("/tmp/sparring-1/config.yaml", "--until-eof", "--results-dir", "runs")
    assert train.going_on(args, "a").startswith("sparring.train(CONFIG, run_id='a', results_dir='runs', resume=True)")


def overridden(tmp_path: Path, *words: str, text: str = "behaviors: {Ball: {}}") -> Settings:
    path = tmp_path / "ball.yaml"
    path.write_text(text)
    args = parsed(str(path), *words)
    return read(args.config, train._overrides(args)).settings


def left_by(tmp_path: Path, status: str, steps: int) -> list[str]:
    """Leaves a run with one checkpoint and a summary; returns the command that resumes it."""
    run, config = tmp_path / "results" / "a", tmp_path / "ball.yaml"
    checkpoint = run / "Ball" / "checkpoint-000000001000"
    checkpoint.mkdir(parents=True)
    network = {"hidden_units": 128, "num_layers": 2}
    described = {"network_settings": network, "trainer": "ppo", "signals": ["extrinsic"], "shared_critic": False}
    (checkpoint / "state.json").write_text(json.dumps({"description": described}))
    (run / "summary.json").write_text(json.dumps({"status": status, "behaviors": {"Ball": {"steps": steps}}}))
    config.write_text("behaviors: {Ball: {max_steps: 1000, network_settings: {hidden_units: 64}}}")
    return ["train", str(config), "--results-dir", str(tmp_path / "results"), "--run-id", "a", "--resume"]


def test_resuming_without_an_id_names_those_that_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *command, _, _, _ = left_by(tmp_path, "stopped", 1000)
    results = tmp_path / "results"
    expected = f"got --resume without --run-id; expected the id of a run in {results} (there is none); add it"
    assert main([*command, "--resume"]) == errors.BAD_INPUT
    assert expected in capsys.readouterr().err
    (results / "a" / "run.json").write_text("{}")
    assert main([*command, "--run-id", "b", "--resume"]) == errors.BAD_INPUT
    assert f"got --resume of 'b'; expected the id of a run in {results} (a); name" in capsys.readouterr().err


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


def test_resuming_a_finished_run_says_so_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = left_by(tmp_path, "completed", 1024)
    before = content(tmp_path)
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("a has completed: Ball 1,024 of 1,000 steps; nothing was changed")
    assert content(tmp_path) == before


def test_run_of_simulators_does_not_go_on_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it learned from no simulator would contradict its step accounting."""
    command = left_by(tmp_path, "stopped", 500)
    monkeypatch.setattr(train, "_refuse_offline", lambda *_: None)  # there are no recordings
    (tmp_path / "results" / "a" / "coordination.json").write_text("{}")
    before = content(tmp_path)
    assert main([*command, "--offline"]) == errors.BAD_INPUT
    assert "whose steps simulators have produced; expected a run that began offline" in capsys.readouterr().err
    assert content(tmp_path) == before


@pytest.mark.parametrize("status", ["stopped", "failed", None])
@pytest.mark.parametrize("goal", [900, 1000, 1100])
def test_run_that_has_not_completed_goes_on_even_if_it_has_trained_enough(
    tmp_path: Path, status: str | None, goal: int
) -> None:
    """Its summary, if it was killed, or its last models are missing; the last update may have exceeded the goal."""
    left_by(tmp_path, status or "", 1000)
    run = tmp_path / "results" / "a"
    if status is None:
        (run / "summary.json").unlink()
    assert not runs.finished(run, parse_settings(f"behaviors: {{Ball: {{max_steps: {goal}}}}}", "test").settings)


@pytest.mark.parametrize(
    ("status", "further", "expected"),
    [
        ("stopped", [], "network_settings.hidden_units 64 with --resume; expected 128"),
        ("completed", ["--max-steps", "5000"], "network_settings.hidden_units 64 with --resume; expected 128"),
        ("stopped", ["trainer_type=poca"], "trainer_type poca with --resume; expected ppo"),
        ("stopped", ["hyperparameters.shared_critic=true"], "shared_critic True with --resume; expected False"),
        ("stopped", ["reward_signals.curiosity={}"], "reward_signals ['curiosity'] with --resume"),
    ],
)
def test_changed_network_is_refused_by_its_key_before_anything_is_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: str, further: list[str], expected: str
) -> None:
    if further and "=" in further[0]:
        same = "behaviors.Ball.network_settings.hidden_units=128"
        further = ["--set", f"behaviors.Ball.{further[0]}", "--set", same]
    command = left_by(tmp_path, status, 1024)
    (tmp_path / "results" / "a" / "run.json").write_text("{}")
    before = content(tmp_path)
    assert main([*command, *further]) == 2
    shown = capsys.readouterr().err
    assert "got behaviors.Ball." in shown
    assert expected in shown
    assert content(tmp_path) == before


@pytest.mark.parametrize("others", ["", "default_settings: {}\n"])
def test_run_of_another_configuration_is_not_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], others: str
) -> None:
    command = left_by(tmp_path, "stopped", 500)
    (tmp_path / "ball.yaml").write_text(f"{others}behaviors: {{Scout: {{}}}}")
    before = content(tmp_path)
    assert main(command) == 2
    run = tmp_path / "results" / "a"
    expected = f"got --resume of {run}, whose run has Ball, with {tmp_path / 'ball.yaml'}, which has Scout; expected "
    assert expected in capsys.readouterr().err
    assert content(tmp_path) == before


@pytest.mark.parametrize("text", ["behaviors: {Scout: {}, Ball: {}}", "default_settings: {}"])
def test_run_is_resumed_with_behaviors_more_or_less(tmp_path: Path, text: str) -> None:
    left_by(tmp_path, "stopped", 500)
    settings = parse_settings(text, "run.yaml").settings
    train._refuse_other_behaviors(tmp_path / "ball.yaml", tmp_path / "results" / "a", settings)


def test_several_players_need_a_build_as_in_ml_agents(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"command line: --num-envs: got num_envs 4 without env_path; .*--env PATH"):
        overridden(tmp_path, "--num-envs", "4")
    in_file = "behaviors: {Ball: {}}\nenv_settings: {num_envs: 3}\nsimulators: [{name: goal}]"
    with pytest.raises(
        SettingsError, match=r"ball.yaml:2: env_settings.num_envs: got num_envs 3 without .* a count at"
    ):
        overridden(tmp_path, text=in_file)
    assert overridden(tmp_path, "--num-envs", "4", "--env", "Ball").env_settings.num_envs == 4
    assert overridden(tmp_path, "--num-envs", "1").env_settings.num_envs == 1


def test_inference_does_not_accept_initialize_from(tmp_path: Path) -> None:
    path = tmp_path / "ball.yaml"
    path.write_text("behaviors: {Ball: {}}")
    args = parsed(str(path), "--inference", "--run-id", "a", "--initialize-from", "b", "--results-dir", str(tmp_path))
    with pytest.raises(SettingsError, match=r"--inference with --initialize-from b; .* write --run-id b for those"):
        train.run(args)


def test_new_note_of_a_bridge_is_printed_once(tmp_path: Path) -> None:
    path, log, notes = tmp_path / "simulator-0.stderr", tmp_path / "learning-Ball.jsonl", []
    path.write_text("the Unity editor: press Play; an hour ago\n")

    notice = {"level": "info", "event": "lesson", "service": "learning-Ball", "value": 3, "notice": True}
    logged = [
        notice,
        {**notice, "notice": False, "value": 4},
        {**notice, "event": "not_written"},  # the supervisor says that itself
        {**notice, "level": "exit"},
    ]

    async def listen() -> None:
        with structlog.testing.capture_logs() as lines, anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                files = path, tmp_path / "not-yet.stderr", log
                tasks.start_soon(relay, lambda: files, structlog.get_logger(), 0)
                await anyio.lowlevel.checkpoint()
                with path.open("a") as file:
                    file.write("a warning\nthe Unity editor: press Play; waiting\n" + 2 * "notice: a box is a vector\n")
                while len(lines) < 2:
                    await anyio.lowlevel.checkpoint()
                for _ in range(5):
                    await anyio.lowlevel.checkpoint()
                log.write_text("".join(f"{json.dumps(one)}\n" for one in logged))  # just before the end
                tasks.cancel_scope.cancel()
        notes.extend(lines)

    anyio.run(listen)
    assert [(line["part"], line["note"]) for line in notes] == [
        ("simulator-0", "the Unity editor: press Play; waiting"),
        ("simulator-0", "a box is a vector"),
        ("learning-Ball", "lesson  value=3"),
    ]


def test_incomplete_line_waits_and_a_truncated_file_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "simulator-0.stderr"
    path.write_bytes(b"one\ntw")
    assert written_since(path, 0) == (b"one\n", 4)
    path.write_bytes(b"x\n")
    assert written_since(path, 4) == (b"x\n", 2)


def test_folder_of_a_run_without_a_place_for_logs_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("behaviors: {Goal: {}}\nsimulators: [{name: goal}]\n")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "logs").write_text("not a folder")
    words = ["train", str(tmp_path / "config.yaml"), "--results-dir", str(tmp_path), "--run-id", "run", "--resume"]
    assert main(words) != 0
    shown = capsys.readouterr()
    assert str(folder / "logs") in shown.err
    assert "Traceback" not in shown.out + shown.err


def test_a_run_that_cannot_begin_leaves_the_one_that_it_was_to_replace_or_continue(tmp_path: Path) -> None:
    file, former = tmp_path / "config.yaml", tmp_path / "run"
    (former / "Goal" / "checkpoint-000000000900").mkdir(parents=True)
    (former / "notes.txt").write_text("mine")
    words = ["train", str(file), "--results-dir", str(tmp_path), "--no-export", "--run-id"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        file.write_text(f"behaviors: {{Goal: }}\npipeline: {{address: 'tcp://127.0.0.1:{port}'}}\n")
        assert main([*words, "run", "--force"]) == errors.BAD_INPUT
        found = sorted(path.relative_to(former).as_posix() for path in former.rglob("*"))
        assert found == ["Goal", "Goal/checkpoint-000000000900", "lock", "notes.txt"]
        shutil.rmtree(former / "Goal")
        assert main([*words, "run", "--resume"]) == errors.BAD_INPUT
        assert (former / "notes.txt").read_text() == "mine"
        assert main([*words, "new"]) == main([*words, "new", "--force"]) == errors.BAD_INPUT
        assert not (tmp_path / "new").exists()


def test_configuration_from_a_pipe_is_not_copied(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(shutil.SpecialFileError):
        shutil.copyfile(pipe, tmp_path / "copy")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        text = f"behaviors: {{Goal: }}\npipeline: {{address: 'tcp://127.0.0.1:{port}'}}\n"
        writing = threading.Thread(target=pipe.write_text, args=(text,))
        writing.start()
        words = ["train", str(pipe), "--results-dir", str(tmp_path), "--no-export", "--run-id", "run"]
        assert main(words) == errors.BAD_INPUT, "it comes as far as the port"
        writing.join()


def test_pipe_in_the_place_of_the_lock_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(OSError, match=f"Not a regular file: '{tmp_path}/lock'"), train.locked(tmp_path):
        pass


def test_damaged_numbers_of_opponents_are_refused_with_their_file(tmp_path: Path) -> None:
    settings = parse_settings("behaviors: {Goal: {self_play: {}}}\n", "run.yaml").settings
    (tmp_path / OPPONENTS_FILE).write_text("{")
    with pytest.raises(SettingsError, match=f"got .*{OPPONENTS_FILE}, which cannot be used"):
        write_opponents(tmp_path, settings, settings.behaviors)


@pytest.mark.parametrize("text", ["[1]", "{", "{}", "3"])
def test_damaged_description_of_a_run_names_no_origin(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    assert origin_of(tmp_path) == ""


def test_run_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"got no checkpoint of Ball in .*; expected a run that has trained it"):
        checkpoints(tmp_path, argparse.Namespace(behaviors={"Ball": None}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "CONFIG", "--max-steps", "1e999"], "argument --max-steps"),
        (["train", "CONFIG", "--max-steps", "nan"], "argument --max-steps"),
        (["train", "CONFIG", "--max-steps", "2.5"], "argument --max-steps"),
        (["train", "CONFIG", "--env="], "got the build ''; expected the path of its program"),
        (["train", "LONG"], "File name too long"),
        (["check", "LONG"], "File name too long"),
        (["simulator", "balance", "--connect", "unix:///x", "--areas", "9" * 20], "expected from 1 to 1,000,000"),
        (["try", "balance", "--areas", "9" * 20], "expected from 1 to 1,000,000"),
        (["try", "balance", "--seed", "-1"], "argument --seed: got '-1'; expected a number from 0 to 2147483647"),
        (["try", "balance", "--steps", "-5"], "argument --steps: got '-5'; expected a number from 0"),
        (["evaluate", "run", "--seed", "2147483648"], "argument --seed: got '2147483648'; expected a number from 0"),
    ],
)
def test_an_absurd_value_is_refused_in_a_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {"CONFIG": "behaviors: {A: }\n", "LONG": f"behaviors: {{A: }}\npipeline: {{keys: {'k' * 300}}}\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    try:
        status = main([str(tmp_path / word) if word in texts else word for word in words])
    except SystemExit as end:
        status = end.code
    shown = capsys.readouterr()
    assert status not in (0, None)
    assert message in shown.out + shown.err
    assert "Traceback" not in shown.out + shown.err


@pytest.mark.parametrize(("number", "is_refused"), [(errno.ENOLCK, False), (errno.EIO, True)])
def test_a_disk_without_locks_is_named_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, is_refused: bool
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(train.fcntl, "flock", refuse)
    refused = pytest.raises(OSError, match="Input/output error") if is_refused else contextlib.nullcontext()
    with refused, train.locked(tmp_path):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}"
    assert ("start no other run in it" in capsys.readouterr().err) is not is_refused
