"""Runs that are started from Python: real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import psutil
import pytest
import yaml

import sparring
from sparring.pipeline.demonstrations.library import describe, read_any
from sparring.pipeline.errors import ServiceError
from sparring.pipeline.specs import names_a_folder
from sparring.services.api.runs import Run, RunFailed, written

GOAL: dict[str, Any] = {
    "behaviors": {
        "Goal": {
            "hyperparameters": {"batch_size": 16, "buffer_size": 64, "learning_rate": 5e-3},
            "network_settings": {"hidden_units": 32, "num_layers": 1},
            "summary_freq": 500,
            "max_steps": 3000,
        }
    },
    "simulators": [{"name": "goal"}],
    "pipeline": {"mode": "lockstep", "export": False},
    "writers": {"tensorboard": False},
}
HANG_S = 240.0
ENDLESS = {"behaviors.Goal.max_steps": 10**9}


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        ({**GOAL, "pipeline": 5}, {}),
        ({**GOAL, "pipeline": {"python_path": None}}, {}),
        ({**GOAL, "pipeline": {"python_path": "here"}}, {}),
        ({"behaviors": {"\U0001f600": {}}, "debug": np.float64(1.5)}, {"behaviors.Goal.max_steps": np.int64(5)}),
    ],
)
def test_any_data_reach_the_command_for_its_own_checks(config: dict[str, Any], overrides: dict[str, Any]) -> None:
    with written(config, overrides) as words:
        found = yaml.safe_load(Path(words[0]).read_text(encoding="utf-8"))
        assert found["behaviors"].keys() == config["behaviors"].keys()
        assert [word.partition("=")[2] for word in words[2::2]] == ["5"] * len(overrides)


@pytest.mark.parametrize(
    ("config", "overrides"), [({"debug": object()}, {}), (GOAL, {"a\0b": 1}), (GOAL, {"debug": {1, 2j}})]
)
def test_what_is_no_data_is_refused(config: dict[str, Any], overrides: dict[str, Any]) -> None:
    with pytest.raises(sparring.SettingsError), written(config, overrides):
        pass


def test_arguments_of_another_type_are_refused_before_anything_starts(tmp_path: Path) -> None:
    for function, arguments, options, message in (
        (sparring.train, (), {}, r"got no config for train\(\); expected one; give it"),
        (sparring.start, (None,), {}, "got None as config; expected a valid string or .*Path.* or a valid dictionary"),
        (sparring.train, (GOAL, [1]), {}, r"got \[1\] as overrides; expected a valid dictionary; correct what train"),
        (sparring.train, (GOAL,), {"callbacks": [3]}, "got 3 as callbacks; expected callable"),
        (sparring.train, (GOAL,), {"run_id": 5}, "got 5 as run_id; expected a valid string"),
        (sparring.train, (GOAL,), {"bogus": 1}, r"got the argument bogus=1 for train\(\); .* see help\(sparring.train"),
        (sparring.train, ("a\0b",), {}, "got 'a.x00b'; expected text in UTF-8 without NUL"),
        (sparring.start, (GOAL,), {"run_id": "\ud800"}, "got '.ud800'; expected text in UTF-8"),
        (
            sparring.start,
            (GOAL, {"behaviors.\ud800.max_steps": 1}),
            {},
            "got 'behaviors..ud800.max_steps=1'; expected a",
        ),
        (
            sparring.start,
            ({"behaviors": {"A": {"max_steps": 10**5000}}},),
            {},
            "got a dict .*expected data as in",
        ),
        (sparring.evaluate, ("run",), {"episodes": 10**5000}, "got a whole number beyond 2.53"),
        (sparring.evaluate, ("run", 3), {}, r"got 3 as a further argument for evaluate\(\)"),
        (sparring.evaluate, ("run",), {"episodes": "many"}, "got 'many' as episodes; expected a valid integer"),
        (sparring.load, (None,), {}, "got None as path; expected a valid string or"),
    ):
        with pytest.raises(sparring.SettingsError, match=message):
            function(*arguments, **{"results_dir": tmp_path, **options} if arguments else {})  # type: ignore[operator]
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_run_tells_what_its_files_hold_and_its_policy_acts(tmp_path: Path) -> None:
    heard: list[sparring.Event] = []

    def fail(event: sparring.Event) -> None:
        if event.kind == "checkpoint":
            pytest.fail("of the caller")

    run = sparring.start(
        GOAL, {"behaviors.Goal.max_steps": 3200}, [heard.append, fail], run_id="goal", results_dir=tmp_path, seed=1
    )
    events = list(run)
    result = run.wait(HANG_S)
    assert (result.status, result.folder, result.error) == ("completed", tmp_path / "goal", "")
    assert result.behaviors["Goal"]["steps"] >= 3200
    own = [path.name for path in result.folder.iterdir() if names_a_folder(path.name)]
    assert own == ["Goal"], "no behavior may have the name of anything else in the folder"
    assert [one.kind for one in events] == [one.kind for one in heard]
    assert [one.values for one in events if one.kind == "interval"] == [
        json.loads(line) for line in (tmp_path / "goal" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [one.kind for one in events].count("checkpoint") == len(run.callback_errors) >= 1
    assert events[-1] == sparring.Event("end", {"status": "completed", "error": ""})
    assert run.status()["behaviors"]["Goal"]["step"] >= 3200
    policy = sparring.load(result.folder)
    goals = [[-1.0], [1.0]]
    assert (policy.act(goals, deterministic=True).actions.continuous * goals > 0).all(), "it goes to the goal"
    found = sparring.evaluate(result.folder, episodes=5, deterministic=True, seed=1, in_process=True)
    assert found["behaviors"]["Goal"]["reward"]["mean"] > 0.9
    (file,) = sparring.record(GOAL, policy="goal", results_dir=tmp_path, episodes=3, out=tmp_path / "of; me", seed=1)
    assert describe(read_any(file))["episodes"] == 3
    with pytest.raises(sparring.SettingsError, match="which exist; expected none"):
        sparring.record(GOAL, policy=result.folder, out=tmp_path / "of; me")
    with pytest.raises(sparring.SettingsError, match="got a single player"):
        sparring.tournament("goal", results_dir=tmp_path)
    with pytest.raises(ServiceError, match="evaluate ended with status 1"):
        sparring.evaluate(result.folder, episodes=10**6, timeout_s=1.0, in_process=True)
    code = f"import sparring; sparring.evaluate({str(result.folder)!r}, episodes=10**6, seed=7)"
    caller = subprocess.Popen([sys.executable, "-c", code])
    parts: list[psutil.Process] = []
    while len(parts) < 7:  # the command, its fork server and five services
        assert caller.poll() is None
        parts = psutil.Process(caller.pid).children(recursive=True)
    caller.kill()
    caller.wait()
    _, alive = psutil.wait_procs(parts, timeout=20)
    assert not alive


@pytest.mark.slow
def test_several_tasks_follow_a_run_that_one_of_them_stops(tmp_path: Path) -> None:
    run = sparring.start(GOAL, ENDLESS, results_dir=tmp_path)
    kinds: dict[str, list[str]] = {"first": [], "second": []}

    async def follow(name: str) -> None:
        async for event in run:
            kinds[name].append(event.kind)
            if name == "first" and event.kind == "interval":
                run.stop()

    async def both() -> None:
        async with anyio.create_task_group() as tasks:
            for name in kinds:
                tasks.start_soon(follow, name)

    anyio.run(both)
    assert kinds["first"] == kinds["second"]
    assert kinds["first"][-1] == "end"
    assert run.wait().status == "stopped"


@pytest.mark.slow
def test_what_cannot_be_run_is_refused_as_by_the_command(tmp_path: Path) -> None:
    with pytest.raises(sparring.SettingsError, match=r"behaviors.Goal.max_stepz: .*did you mean max_steps"):
        sparring.train(GOAL, {"behaviors.Goal.max_stepz": 1}, results_dir=tmp_path)
    with pytest.raises(sparring.SettingsError, match=r"^1 problem in the configuration\nthe configuration: engine"):
        sparring.train({**GOAL, "engine": 1}, results_dir=tmp_path)
    with pytest.raises(sparring.SettingsError, match=r"got .*nothing.yaml: No such file"):
        sparring.train(tmp_path / "nothing.yaml", results_dir=tmp_path)
    with pytest.raises(sparring.SettingsError, match="expected the name of a folder: at most 100 letters"):
        sparring.train(GOAL, run_id="a" * 300, results_dir=tmp_path)
    (tmp_path / "goal").mkdir()
    (tmp_path / "goal" / "summary.json").write_text('{"status": "completed", "behaviors": {}}')
    with pytest.raises(sparring.SettingsError, match="got run id 'goal', which exists"):
        sparring.train(GOAL, results_dir=tmp_path, run_id="goal")
    first = sparring.start(GOAL, ENDLESS, results_dir=tmp_path, run_id="both")
    next(iter(first))
    second = sparring.start(GOAL, results_dir=tmp_path, run_id="both")
    assert second._process.wait(HANG_S) == 2
    first.stop()
    assert first.wait(HANG_S).status == "stopped"
    with pytest.raises(sparring.SettingsError, match="got run id 'both', which exists"):  # asked for when both are over
        second.wait(HANG_S)
    failing = {**GOAL, "simulators": [{"command": [sys.executable, "-c", "raise SystemExit('no game')"]}]}
    with pytest.raises(sparring.RunFailed, match="no game") as failed:
        sparring.train(failing, results_dir=tmp_path)
    assert failed.value.result.status == "failed"


@pytest.mark.slow
def test_run_that_is_stopped_at_once_is_stopped(tmp_path: Path) -> None:
    run = sparring.start(GOAL, ENDLESS, results_dir=tmp_path)
    run.stop()
    run.stop()
    assert run.wait(HANG_S).status == "stopped"


@pytest.mark.slow
def test_events_of_a_resumed_or_replaced_run_are_its_own(tmp_path: Path) -> None:
    def steps(run: sparring.Run) -> list[int]:
        return [event.values["step"] for event in run if event.kind == "interval"]

    how: dict[str, Any] = {"results_dir": tmp_path, "run_id": "run", "seed": 1}
    first = steps(sparring.start(GOAL, **how))
    more = steps(sparring.start(GOAL, {"behaviors.Goal.max_steps": 5000}, resume=True, **how))
    assert max(first) < min(more)
    again = steps(sparring.start(GOAL, force=True, **how))
    assert min(again) < max(first)
    assert again == sorted(set(again))
    assert max(again) < min(more)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_run_ends_although_a_process_forked_from_the_caller_lives_on(tmp_path: Path) -> None:
    """The forked process can neither follow nor stop it, and gets an error that says so."""
    code = """
import json, os, sys, time, sparring
from sparring.pipeline.errors import ServiceError
run = sparring.start(json.loads(sys.argv[1]), json.loads(sys.argv[2]), results_dir=sys.argv[3], run_id="run")
next(event for event in run if event.kind == "interval")
ours, theirs = os.pipe()
if not os.fork():
    for call in (run.stop, run.wait, run.console, lambda: next(iter(run))):
        try:
            call()
        except ServiceError:
            os.write(theirs, b".")
    os.closerange(0, 3)
    os.close(theirs)
    time.sleep(60)
os.close(theirs)
refused = 0
while os.read(ours, 1):
    refused += 1
print(refused, run._process.pid, flush=True)
os._exit(0)
"""
    words = [json.dumps(GOAL), json.dumps(ENDLESS), str(tmp_path)]
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", code, *words], stdout=subprocess.PIPE, timeout=120)
    refused, pid = map(int, ended.stdout.split())
    assert refused == 4
    _, alive = psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=40)
    assert not alive


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of threads, which the forked one does not use
def test_process_forked_meanwhile_leaves_a_configuration_to_its_run() -> None:
    with ExitStack() as held:
        path = Path(held.enter_context(written({"behaviors": {}}, None))[0])
        if not (child := os.fork()):
            held.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert path.exists()
    assert not path.parent.exists()


def test_result_of_a_killed_command_names_the_signal_before_what_it_has_printed(tmp_path: Path) -> None:
    words = ["sh", "-c", "echo said; kill -KILL $$"]
    with tempfile.TemporaryFile() as output, subprocess.Popen(words, stdin=subprocess.PIPE, stdout=output) as process:
        run = Run(tmp_path, process, output, (), ExitStack(), {})
        with pytest.raises(RunFailed) as raised:
            run.wait(60)
    assert raised.value.result.error == "signal SIGKILL\nsaid"


@pytest.mark.slow
def test_run_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = """
import json, os, signal, sys, sparring
run = sparring.start(json.loads(sys.argv[1]), json.loads(sys.argv[2]), results_dir=sys.argv[3], run_id="run")
next(event for event in run if event.kind == "interval")
print(run._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    words = [json.dumps(GOAL), json.dumps(ENDLESS), str(tmp_path)]
    ended = subprocess.run([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True, timeout=120)
    command = psutil.Process(int(ended.stdout)) if psutil.pid_exists(int(ended.stdout)) else None
    if command is not None:
        _, alive = psutil.wait_procs([command, *command.children(recursive=True)], timeout=40)
        for one in alive:
            os.kill(one.pid, signal.SIGKILL)
        assert not alive
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "stopped"
