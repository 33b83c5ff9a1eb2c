"""The compliance examination: a good simulator passes, and each fault is found by the rule it breaks."""

from __future__ import annotations

import argparse
import json
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparring.pipeline.bridges.gymnasium import make_gymnasium
from sparring.pipeline.compliance.rules import RULES, Verdict, examine
from sparring.pipeline.compliance.steps import LONGEST_SILENCE, STEP_RULES, StepWatch
from sparring.pipeline.compliance.trial import random_actions
from sparring.pipeline.errors import SettingsError, SparringError
from sparring.pipeline.messages.codec import FrameReader, to_bytes
from sparring.pipeline.messages.simulator import (
    Act,
    BehaviorReport,
    Behaviors,
    Bye,
    Decisions,
    Ends,
    Fault,
    Hello,
    Ping,
    Pong,
    Reset,
    Step,
    Welcome,
)
from sparring.pipeline.simulation import run as run_game
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from sparring.services.commands import compliance

SPEC = BehaviorSpec(
    observations=(ObservationSpec(name="o", shape=(2,)),), actions=ActionSpec(continuous=1, discrete=(2, 3))
)
WALK = "Walk?team=0"
LONG_S = 10.0
SHORT_S = 1.0
"""For each answer; short where the habit is to give none. An honest thread needs a fraction of either."""


class ThreadHost:
    """Runs a simulator as a thread, on a port of its own at each start."""

    def __init__(self, simulator: Callable[[str], None]) -> None:
        self._simulator = simulator
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._failed = False

    def start(self) -> None:
        self.stop()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._failed = False
        address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, args=(address,))
        self._thread.start()

    def accept(self, timeout_s: float) -> socket.socket:
        assert self._listener is not None
        self._listener.settimeout(timeout_s)
        return self._listener.accept()[0]

    def exit_status(self, timeout_s: float) -> int | None:
        assert self._thread is not None
        self._thread.join(timeout_s)
        return None if self._thread.is_alive() else int(self._failed)

    def last_words(self) -> str:
        return "words"

    def stop(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._thread is not None:
            self._thread.join(10)

    def _run(self, address: str) -> None:
        try:
            self._simulator(address)
        except (SparringError, OSError):
            self._failed = True


def step(sequence: int = 0, *, deciding: Any = (1, 2), ended: Any = (), **columns: Any) -> Step:
    """A Step of the behavior Walk, with columns replaced."""
    part = {name.removeprefix("ends_"): value for name, value in columns.items() if name.startswith("ends_")}
    rest = {name: value for name, value in columns.items() if not name.startswith("ends_")}
    decisions = replace(Decisions(**_columns(deciding)), **rest) if len(deciding) else None
    ends = Ends(**_columns(ended), interrupted=np.zeros(len(ended), np.bool_)) if len(ended) else None
    report = BehaviorReport(behavior=WALK, decisions=decisions, ends=ends and replace(ends, **part))
    return Step(sequence=sequence, reports=(report,))


def _columns(agents: Any) -> dict[str, Any]:
    n = len(agents)
    zeros = np.zeros(n, np.float32)
    return {
        "agents": np.array(agents, np.int64),
        "observations": (np.zeros((n, 2), np.float32),),
        "rewards": zeros,
        "group_rewards": zeros,
    }


# ---------------------------------------------------------------- Steps


def watch_after(*steps: Step) -> StepWatch:
    """A watch that read the Steps after one Reset."""
    watch = StepWatch()
    watch.connected({WALK: SPEC})
    watch.reset()
    for one in steps:
        if not watch.read(one):
            break
    return watch


def floats(*values: float) -> Any:
    return np.array(values, np.float32)


def ids(*values: int) -> Any:
    return np.array(values, np.int64)


ALL_OF_BRANCH_1 = np.array([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]], np.bool_)
BROKEN: dict[str, tuple[str, list[Step]]] = {
    "starts at 1": ("sequence", [step(1)]),
    "leaves one out": ("sequence", [step(0), step(2)]),
    "unknown behavior": ("behaviors", [Step(sequence=0, reports=(BehaviorReport(behavior="Run?team=0"),))]),
    "two reports": ("behaviors", [Step(sequence=0, reports=step().reports * 2)]),
    "short rewards": ("columns", [step(rewards=floats(1))]),
    "short masks": ("columns", [step(masks=np.zeros((1, 5), np.bool_))]),
    "long matches": ("columns", [step(matches=ids(1, 1, 1))]),
    "short outcomes": ("columns", [step(), step(1, ended=(1, 2), ends_outcomes=floats(1))]),
    "missing observation": ("observations", [step(observations=())]),
    "observation of another shape": ("observations", [step(observations=(np.zeros((2, 3), np.float32),))]),
    "observation of another dtype": ("observations", [step(observations=(np.zeros((2, 2), np.uint8),))]),
    "nan observation": ("finite", [step(observations=(np.array([[0, 0], [np.nan, 0]], np.float32),))]),
    "infinite reward": ("finite", [step(rewards=floats(0, np.inf))]),
    "infinite reward at an end": ("finite", [step(), step(1, ended=(1,), ends_group_rewards=floats(-np.inf))]),
    "agent twice": ("ids", [step(deciding=(1, 1))]),
    "agent ends twice": ("ids", [step(), step(1, ended=(2, 2))]),
    "nobody decides at first": ("first_step", [Step(sequence=0, reports=())]),
    "ends at first": ("first_step", [step(ended=(1,))]),
    "end of a stranger": ("ends", [step(), step(1, ended=(3,))]),
    "end of the dead": ("ends", [step(), step(1, deciding=(2,), ended=(1,)), step(2, deciding=(2,), ended=(1,))]),
    "narrow masks": ("masks", [step(masks=np.zeros((2, 3), np.bool_))]),
    "nothing allowed": ("masks", [step(masks=ALL_OF_BRANCH_1)]),
    "negative group": ("groups", [step(groups=ids(0, -1))]),
    "large group": ("groups", [step(groups=ids(0, 2**31))]),
    "another match": ("matches", [step(matches=ids(1, 1)), step(1, matches=ids(1, 2))]),
    "another match at the end": ("matches", [step(matches=ids(1, 1)), step(1, ended=(1,), ends_matches=ids(2))]),
    "outcome of 2": ("outcomes", [step(), step(1, ended=(1,), ends_outcomes=floats(2))]),
    "team that won and lost": (
        "outcomes",
        [step(matches=ids(1, 1)), step(1, ended=(1, 2), ends_matches=ids(1, 1), ends_outcomes=floats(1, 0))],
    ),
    "agent that never returns": ("silence", [step(), *(step(i, deciding=(1,)) for i in range(1, LONGEST_SILENCE + 3))]),
}


@pytest.mark.parametrize(("rule", "steps"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_step_is_found_by_its_rule_alone(rule: str, steps: list[Step]) -> None:
    findings = watch_after(*steps).findings
    assert list(findings) == [rule]
    assert findings[rule].status == ("WARN" if rule == "silence" else "FAIL")
    assert findings[rule].got
    assert findings[rule].expected
    assert findings[rule].remedy


def test_every_rule_about_steps_is_shown_to_bite() -> None:
    assert {rule for rule, _ in BROKEN.values()} == {rule.name for rule in STEP_RULES}


def test_good_steps_break_no_rule() -> None:
    """Ends and next decisions together, new and leaving agents, masks, groups, matches, outcomes, nothing at all."""
    watch = watch_after(
        step(matches=ids(4, 4), groups=ids(1, 2**31 - 1), masks=~ALL_OF_BRANCH_1 & False),
        step(1, ended=(1, 2), matches=ids(5, 5), ends_matches=ids(4, 4), ends_outcomes=floats(0.5, 0.5)),
        step(2, deciding=(1, 2, 3), matches=ids(5, 5, 6)),
        step(3, deciding=(3,), matches=ids(6)),
        Step(sequence=4, reports=()),
        step(5, deciding=(), ended=(1, 2, 3)),
        step(6, deciding=(9,)),
    )
    assert watch.findings == {}
    assert watch.ended == 5
    assert set(watch.agent_episodes[WALK]) == {9}


def test_random_actions_are_legal_and_cover_what_is_allowed() -> None:
    masks = np.array([[True, False, False, True, False]] * 200)
    decisions = Decisions(**_columns(range(200)), masks=masks)
    actions = random_actions(WALK, decisions, SPEC.actions, np.random.default_rng(0))
    assert set(actions.discrete[:, 0]) == {1}
    assert set(actions.discrete[:, 1]) == {0, 2}
    assert np.abs(actions.continuous).max() <= 1


# ---------------------------------------------------------------- conduct


class Simulator:
    """A simulator with one bad habit.

    Args:
        quirk: the habit; "" for none.
    """

    def __init__(self, quirk: str = "") -> None:
        self.quirk = quirk

    def __call__(self, address: str) -> None:
        self.steps = self.resets = 0
        self._alive: tuple[int, ...] = ()
        if self.quirk == "absent":
            return
        while self._talk(address) == "lost" and self.quirk != "leaves":
            pass

    def _talk(self, address: str) -> str:
        port = int(address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as self._socket:
            self._sequence, self._open = 0, False
            self._greet()
            for message in self._messages():
                if (ending := self._answer(message)) is not None:
                    return ending
        return "lost"

    def _greet(self) -> None:
        if self.quirk == "garbage":
            self._socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
        if self.quirk == "silent handshake":
            return
        first = {"bad id": "Walk?side=1", "late behavior": ""}.get(self.quirk, WALK)
        behaviors = {first: SPEC} if first else {}
        if self.quirk == "two specs":
            behaviors["Walk?team=1"] = replace(SPEC, actions=ActionSpec(continuous=3))
        counted = {"miscounts": {"Walk": self.steps + 1}, "does not count": {}}.get(self.quirk, {"Walk": self.steps})
        hello = Hello(version=2 if self.quirk == "version" else 1, name="quirk", behaviors=behaviors, steps=counted)
        self._send(Step(sequence=0, reports=()) if self.quirk == "step first" else hello)

    def _answer(self, message: Any) -> str | None:
        if isinstance(message, Ping) and self.quirk != "deaf":
            self._send(Pong(number=message.number + (self.quirk == "wrong pong")))
        if isinstance(message, Welcome) and self.quirk == "late behavior":
            return None
        if isinstance(message, Reset | Act):
            self._play(message)
        if isinstance(message, Bye):
            return self._linger() if self.quirk == "stays" else self._leave()
        if isinstance(message, Fault):
            return self._linger() if self.quirk == "stubborn" else "over"
        return None

    def _play(self, message: Reset | Act) -> None:
        settled = self.quirk == "settled" and isinstance(message, Act) and message.parameters
        if settled or (self.quirk == "gives up" and self.steps > 20):
            self._send(Fault(code="internal", got="a crash", expected="none", remedy="mend it"))
            return
        if self.quirk == "late behavior" and self._sequence == 0:
            self._send(Behaviors(behaviors={WALK: SPEC}))
        if isinstance(message, Reset):
            self.resets += 1
            self._alive = (1,) if self.quirk == "shrinks" and self.resets > 1 else (1, 2)
            noise = np.full((len(self._alive), 2), self.resets if self.quirk == "unseeded" else 0, np.float32)
            self._send(step(self._sequence, deciding=self._alive, observations=(noise,)))
        else:
            self.steps += len(self._alive)
            habits = {
                "nan": {"rewards": floats(np.nan, 0)},
                "blind": {"observations": ()},
                "ragged": {"rewards": floats(0)},
            }
            over = () if self.quirk == "endless" else self._alive
            self._send(step(self._sequence, ended=over, **habits.get(self.quirk, {})))
            self._alive = (1, 2)
        self._sequence += 1

    def _leave(self) -> str:
        if self.quirk == "crashes":
            raise OSError("crashed on Bye")
        return "over"

    def _linger(self) -> str:
        self._socket.settimeout(None)
        while self._socket.recv(100):
            pass
        return "over"

    def _messages(self) -> Iterator[Any]:
        reader = FrameReader()
        self._socket.settimeout(None if self.quirk == "mute" else 0.05)
        while True:
            while (message := reader.next()) is not None:
                if isinstance(message, Welcome):
                    self._open = True
                yield message
            try:
                data = self._socket.recv(4096)
            except TimeoutError:
                if self._open:
                    self._send(Ping())
                continue
            except ConnectionError:
                return
            if not data:
                return
            reader.feed(data)

    def _send(self, message: Any) -> None:
        self._socket.sendall(to_bytes(message))


def verdicts_of(
    simulator: Callable[[str], None], *, episodes: int = 2, timeout_s: float = LONG_S
) -> dict[str, Verdict]:
    host = ThreadHost(simulator)
    try:
        return {verdict.rule: verdict for verdict in examine(host, episodes=episodes, timeout_s=timeout_s)}
    finally:
        host.stop()


def test_a_game_of_the_client_kit_passes_every_rule() -> None:
    def simulator(address: str) -> None:
        run_game(make_gymnasium("CartPole-v1", 2), address, connect_timeout_s=1.0)

    verdicts = verdicts_of(simulator)
    assert {rule: verdict.status for rule, verdict in verdicts.items() if verdict.status != "PASS"} == {}
    assert set(verdicts) == {rule.name for rule in (*RULES, *STEP_RULES)} | {"decoding", "order"}


@pytest.mark.parametrize("quirk", ["", "late behavior"])
def test_a_simulator_that_keeps_the_protocol_passes_every_rule(quirk: str) -> None:
    verdicts = verdicts_of(Simulator(quirk))
    assert {rule: verdict.status for rule, verdict in verdicts.items() if verdict.status != "PASS"} == {}


HABITS = {
    "absent": {"connects": "FAIL"},
    "silent handshake": {"hello": "FAIL"},
    "garbage": {"decoding": "FAIL"},
    "step first": {"order": "FAIL"},
    "version": {"hello": "FAIL"},
    "bad id": {"specs": "FAIL"},
    "two specs": {"specs": "FAIL"},
    "deaf": {"ping_waiting": "FAIL", "ping_deciding": "FAIL"},
    "wrong pong": {"ping_waiting": "FAIL", "ping_deciding": "FAIL"},
    "mute": {"heartbeat": "FAIL"},
    "endless": {"plays": "WARN"},
    "gives up": {"plays": "FAIL"},
    "settled": {"parameters": "FAIL"},
    "nan": {"finite": "FAIL"},
    "blind": {"observations": "FAIL"},
    "ragged": {"columns": "FAIL"},
    "shrinks": {"reset_in_place": "WARN", "seed": "WARN"},
    "unseeded": {"seed": "WARN"},
    "stays": {"bye": "FAIL"},
    "crashes": {"bye": "FAIL"},
    "leaves": {"reconnects": "WARN"},
    "miscounts": {"counts": "FAIL"},
    "stubborn": {"fault": "FAIL"},
}


WAITED_FOR = {"absent", "silent handshake", "deaf", "mute", "leaves", "stays", "stubborn"}


@pytest.mark.parametrize(("quirk", "expected"), HABITS.items(), ids=HABITS.keys())
def test_a_bad_habit_is_found_by_its_rule_and_said_in_three_parts(quirk: str, expected: dict[str, str]) -> None:
    episodes = 30 if quirk == "gives up" else 2
    verdicts = verdicts_of(Simulator(quirk), episodes=episodes, timeout_s=SHORT_S if quirk in WAITED_FOR else LONG_S)
    found = {rule: verdict.status for rule, verdict in verdicts.items() if verdict.status in ("FAIL", "WARN")}
    assert found == expected
    for rule in expected:
        assert verdicts[rule].got
        assert verdicts[rule].expected
        assert verdicts[rule].remedy
    assert all(verdict.got for verdict in verdicts.values() if verdict.status == "SKIP")


def test_a_simulator_that_does_not_count_is_not_blamed_for_it() -> None:
    assert verdicts_of(Simulator("does not count"))["counts"].status == "SKIP"


def test_every_rule_of_conduct_is_shown_to_bite() -> None:
    """`reset` fails with whatever keeps the first Step away; `plays` shows the same."""
    shown = {rule for expected in HABITS.values() for rule in expected} | {"reset"}
    assert shown >= {rule.name for rule in RULES} | {"decoding", "order"}


# ---------------------------------------------------------------- the command


def command(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    compliance.add_arguments(parser)
    return parser.parse_args(words)


@pytest.fixture
def walk(tmp_path: Path) -> Path:
    """The program of the protocol document."""
    document = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    program = tmp_path / "walk.py"
    program.write_text(re.findall(r"```python\n(.*?)```", document, re.DOTALL)[0])
    return program


def test_the_documents_program_passes_with_the_warning_that_the_document_names(
    walk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compliance.run(command("--json", "--timeout", "1.5", "--", sys.executable, str(walk))) == 0
    verdicts = json.loads(capsys.readouterr().out)
    assert [verdict["rule"] for verdict in verdicts if verdict["status"] == "WARN"] == ["reconnects"]


def test_the_documented_simulator_passes_every_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A newcomer copies it, and runs the next command of the page on it."""
    page = (Path(__file__).parents[2] / "docs" / "simulators.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "walk.py").write_text(program)
    assert compliance.run(command("--json", "--timeout", "10", "--", sys.executable, str(tmp_path / "walk.py"))) == 0
    verdicts = json.loads(capsys.readouterr().out)
    assert {verdict["status"] for verdict in verdicts} <= {"PASS", "SKIP"}


def test_a_command_that_never_connects_fails_with_its_last_words(capsys: pytest.CaptureFixture[str]) -> None:
    program = "import sys; sys.exit('no such level: {address}')"
    assert compliance.run(command("--timeout", "0.5", "--", sys.executable, "-c", program)) == 1
    shown = capsys.readouterr().out
    assert "FAIL  connects" in shown
    assert re.search(r"no such level: tcp://127.0.0.1:\d+", shown)
    assert "because  rule connects did not hold" in shown
    assert shown.endswith("SKIP\n")


@pytest.mark.parametrize(
    "words", [(), ("--",), ("--episodes", "0", "--", "x"), ("--timeout", "0", "--", "x"), ("--", "/no/such/program")]
)
def test_a_command_line_that_can_not_be_run_is_refused_with_a_remedy(words: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError, match=r"got .*; expected .*; "):
        compliance.run(command(*words))
