"""A simulator runs as a process, and loads nothing of the trainer."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import deque
from typing import Any
from unittest.mock import Mock

import pytest

from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.games.goal import Goal
from sparring.pipeline.messages.simulator import Bye, Hello, Reset, Step
from sparring.pipeline.specs import SpecError
from sparring.services.main import main
from sparring.services.stages import simulator
from sparring.services.stages.simulator import slow_down
from tests.simulation.simulation_helpers import Trainer, act_for

HEAVY = ("torch", "zmq", "anyio", "pydantic", "structlog")


@pytest.mark.parametrize(
    "module", ["sparring.pipeline.simulation", "sparring.pipeline.games.registry", "sparring.services.stages.simulator"]
)
def test_a_simulator_loads_nothing_of_the_trainer(module: str) -> None:
    """A new interpreter that imports the client library has none of the trainer's libraries."""
    code = f"import {module}, sys; print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


FORK = """
import os, socket
from sparring.pipeline.simulation.link import Link, LinkLost, Stop
from sparring.pipeline.messages.simulator import VERSION, Hello

ours, theirs = socket.socketpair()
link, hello = Link(ours, stop=Stop(), timeout_s=5.0), Hello(version=VERSION, name="a", behaviors={})
if not (child := os.fork()):
    try:
        link.send(hello)
    except LinkLost:
        os._exit(7)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
link.send(hello)
print(len(theirs.recv(10**6)) > 0)
"""


def test_process_that_an_environment_forks_has_no_part_in_its_connection() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["7", "True"]


def script(trainer: Trainer) -> tuple[Hello, list[Step]]:
    peer = trainer.accept()
    hello = peer.greet(Reset())
    steps = []
    for _ in range(4):
        steps.append(peer.receive(Step))
        peer.send(act_for(steps[-1], hello))
    steps.append(peer.receive(Step))
    peer.send(Bye(reason="enough"))
    return hello, steps


def test_a_simulator_plays_until_bye_and_prints_its_count(trainer: Trainer, capsys: Any, monkeypatch: Any) -> None:
    """It exits with status 0 and one JSON line of step counts; missing options come from the environment."""
    monkeypatch.setenv("SPARRING_ADDRESS", trainer.play(script))
    monkeypatch.setenv("SPARRING_NUMBER", "3")
    monkeypatch.setenv("SPARRING_SEED", "5")
    monkeypatch.setenv("SPARRING_CREDENTIAL", "key")
    assert main(["simulator", "goal", "--areas", "2", "--option", "discrete=true"]) == 0
    for one in threading.enumerate():
        if one.name == "hang watch":
            one.join(10)
            assert not one.is_alive()
    hello, _ = trainer.result()
    assert (hello.number, hello.credential) == (3, "key")
    assert hello.behaviors["Goal?team=0"].actions.discrete == (2,)
    out = capsys.readouterr().out.splitlines()
    assert json.loads(out[-1]) == {"simulator": "goal", "number": 3, "steps": {"Goal": 8}, "reason": "enough"}


def test_the_seed_determines_the_reports(trainer: Trainer) -> None:
    """Two processes with the same seed start with the same episodes."""

    def twice(trainer: Trainer) -> list[Any]:
        return [script(trainer)[1][0].reports[0].decisions.observations[0].tolist() for _ in range(2)]

    address = trainer.play(twice)
    for _ in range(2):
        assert main(["simulator", "balance", "--areas", "3", "--connect", address, "--seed", "9"]) == 0
    first, second = trainer.result()
    assert first == second


def test_environment_that_ends_the_process_is_a_failure_with_its_line(
    trainer: Trainer, capsys: Any, monkeypatch: Any
) -> None:
    """Even with the statuses of success, and of what a restart cannot repair."""

    def step(*_: object) -> Any:
        sys.exit(status)

    monkeypatch.setattr(Goal, "step", step)
    for status in (None, 0, 3):
        assert main(["simulator", "goal", "--connect", trainer.play(greet_and_act)]) == 1
        last = capsys.readouterr().err.splitlines()[-1]
        assert (
            last
            == f"SystemExit{'' if status is None else f': {status}'} ({__file__}:{step.__code__.co_firstlineno + 1})"
        )


def greet_and_act(trainer: Trainer) -> None:
    peer = trainer.accept()
    hello = peer.greet(Reset())
    peer.send(act_for(peer.receive(Step), hello))


@pytest.mark.parametrize(
    ("arguments", "status", "expected"),
    [
        (["goal"], 3, "--connect or $SPARRING_ADDRESS"),
        (["goal", "--connect", "tcp://127.0.0.1:1", "--timeout", "0"], 1, "start the run first"),
        (["goal", "--connect", "nowhere"], 3, "tcp://HOST:PORT"),
        (["goal", "--connect", "tcp://127.0.0.1:1", "--option", "discret=1"], 3, "did you mean 'discrete'?"),
    ],
)
def test_a_failure_prints_one_line_and_its_status_shows_whether_a_restart_may_help(
    arguments: list[str], status: int, expected: str, capsys: Any
) -> None:
    """No mistake of a user ends in a traceback."""
    assert main(["simulator", *arguments]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert expected in captured.err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RemoteProtocolError("specs", got="a", expected="b", remedy="c"), 3),
        (RemoteProtocolError("version", got="a", expected="b", remedy="c"), 3),
        (RemoteProtocolError("timeout", got="a", expected="b", remedy="c"), 1),
        (RemoteProtocolError("not_finite", got="a", expected="b", remedy="c"), 1),
        (SpecError(got="a", expected="b", remedy="c"), 3),
    ],
    ids=lambda value: getattr(value, "code", str(value)),
)
def test_only_failures_that_a_restart_would_repeat_are_final(
    error: Exception, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulator that was silent for a while, or sent a NaN once, may be restarted."""

    def play(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(simulator, "play", play)
    assert main(["simulator", "goal", "--connect", "tcp://127.0.0.1:1"]) == status


def test_slow_adds_random_delays_and_changes_nothing_else() -> None:
    """Delays stay within the bound and repeat with the seed, and reports do not change."""
    delays: list[list[float]] = []
    reports = []
    for _ in range(2):
        delays.append([])
        game = Goal(areas=3)
        slow_down(game, 0.02, 4, delays[-1].append)
        (report,) = game.reset({}, 1)
        for _ in range(5):
            (report,) = game.step({"Goal?team=0": _still(report)})
        reports.append(report.decisions.observations[0].tolist())
        assert game.behaviors() == Goal(areas=3).behaviors()
        game.close()
    assert delays[0] == delays[1]
    assert len(set(delays[0])) == 5
    assert all(0 <= delay <= 0.02 for delay in delays[0])
    assert reports[0] == reports[1]


def test_a_call_that_does_not_return_is_named_once_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Calls that return between two looks are not named, although each of them waits at the same line."""
    entered, left, ended, looks = threading.Semaphore(0), threading.Semaphore(0), threading.Event(), []

    def step() -> bool:
        entered.release()
        left.acquire(timeout=10)
        return ended.is_set()

    def wait(seconds: float) -> bool:
        looks.append(seconds)
        if len(looks) <= 3:
            left.release()
            assert entered.acquire(timeout=10)
        return len(looks) > 4

    thread = threading.Thread(target=deque, args=(iter(step, True), 0))  # a loop that is no code of the author
    thread.start()
    assert entered.acquire(timeout=10)
    assert thread.ident is not None
    simulator.name_hang("gymnasium", thread.ident, Mock(wait=wait), 7.0)
    ended.set()
    left.release()
    thread.join()
    assert looks == [7.0] * 4
    (line,) = capsys.readouterr().err.splitlines()
    where = f"({__file__}:{step.__code__.co_firstlineno + 2})"
    assert line == (
        "sparring simulator gymnasium: got a call of the environment that has not returned for 7 s "
        f"{where}; expected it to return; correct it"
    )


def _still(report: Any) -> Any:
    from tests.simulation.simulation_helpers import actions_for

    return actions_for(report, Goal().behaviors()["Goal?team=0"])


def test_a_close_that_does_not_return_ends_the_process() -> None:
    """The link has ended, and nothing is left to do."""
    code = """
import threading
from sparring.pipeline.games.goal import Goal
from sparring.services.main import main
from sparring.services.stages import simulator

simulator._CLOSE_S = 0.2
Goal.close = lambda self: threading.Event().wait()
main(["simulator", "goal", "--connect", "unix:///nothing", "--timeout", "0"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "sparring simulator goal: got a call of close() that has not returned for 0.2 s; expected it to return; "
        "correct it\n"
    )
