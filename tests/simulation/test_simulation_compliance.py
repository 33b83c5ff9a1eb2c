"""The compliance test checks Steps by rules, and its command reports the result."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparring.pipeline.compliance.steps import LONGEST_SILENCE, STEP_RULES, StepWatch
from sparring.pipeline.compliance.trial import random_actions
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.messages.simulator import (
    BehaviorReport,
    Decisions,
    Step,
)
from sparring.services.commands import compliance
from tests.simulation.compliance_simulator import SPEC, WALK, _columns, floats, step

# ---------------------------------------------------------------- Steps


def watch_after(*steps: Step) -> StepWatch:
    """Returns a watch that has read Steps after one Reset."""
    watch = StepWatch()
    watch.connected({WALK: SPEC})
    watch.reset()
    for message in steps:
        if not watch.read(message):
            break
    return watch


def ids(*values: int) -> Any:
    return np.array(values, np.int64)


ALL_OF_BRANCH_1 = np.array([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]], np.bool_)
BROKEN: dict[str, tuple[str, list[Step]]] = {
    "starts at 1": ("sequence", [step(1)]),
    "leaves one out": ("sequence", [step(0), step(2)]),
    "unknown behavior": ("behaviors", [Step(sequence=0, reports=(BehaviorReport(behavior="Run?team=0"),))]),
    "two reports": ("behaviors", [Step(sequence=0, reports=step().reports * 2)]),
    "short rewards": ("columns", [step(rewards=floats(1))]),
    "short masks": ("masks", [step(masks=np.zeros((1, 5), np.bool_))]),
    "long matches": ("columns", [step(matches=ids(1, 1, 1))]),
    "short outcomes": ("outcomes", [step(), step(1, ended=(1, 2), ends_outcomes=floats(1))]),
    "missing observation": ("observations", [step(observations=())]),
    "observation of another shape": ("observations", [step(observations=(np.zeros((2, 3), np.float32),))]),
    "observation of another dtype": ("observations", [step(observations=(np.zeros((2, 2), np.uint8),))]),
    "nan observation": ("finite", [step(observations=(np.array([[0, 0], [np.nan, 0]], np.float32),))]),
    "infinite reward": ("finite", [step(rewards=floats(0, np.inf))]),
    "infinite reward at an end": ("finite", [step(), step(1, ended=(1,), ends_group_rewards=floats(-np.inf))]),
    "agent twice": ("ids", [step(deciding=(1, 1))]),
    "agent ends twice": ("ids", [step(), step(1, ended=(2, 2))]),
    "no agent decides at first": ("first_step", [Step(sequence=0, reports=())]),
    "ends at first": ("first_step", [step(ended=(1,))]),
    "end of an unknown agent": ("ends", [step(), step(1, ended=(3,))]),
    "end of an agent that has ended": (
        "ends",
        [step(), step(1, deciding=(2,), ended=(1,)), step(2, deciding=(2,), ended=(1,))],
    ),
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
def test_an_invalid_step_violates_exactly_its_rule(rule: str, steps: list[Step]) -> None:
    findings = watch_after(*steps).findings
    assert list(findings) == [rule]
    assert findings[rule].status == ("WARN" if rule == "silence" else "FAIL")
    assert findings[rule].got
    assert findings[rule].expected
    assert findings[rule].remedy


def test_every_rule_about_steps_has_a_step_that_violates_it() -> None:
    assert {rule for rule, _ in BROKEN.values()} == STEP_RULES.keys()


def test_valid_steps_violate_no_rule() -> None:
    """They have ends with next decisions, new and leaving agents, masks, groups, matches, outcomes, or no reports."""
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
    assert set(watch.agent_episodes) == {(WALK, 9)}


def test_random_actions_are_legal_and_cover_all_allowed_ones() -> None:
    masks = np.array([[True, False, False, True, False]] * 200)
    decisions = Decisions(**_columns(range(200)), masks=masks)
    actions = random_actions(WALK, decisions, SPEC.actions, np.random.default_rng(0))
    assert set(actions.discrete[:, 0]) == {1}
    assert set(actions.discrete[:, 1]) == {0, 2}
    assert np.abs(actions.continuous).max() <= 1


# ---------------------------------------------------------------- the command


def command(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    compliance.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.fixture
def walk(tmp_path: Path) -> Path:
    """Writes the program of the protocol document and returns its path."""
    document = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    program = tmp_path / "walk.py"
    program.write_text(re.findall(r"```python\n(.*?)```", document, re.DOTALL)[0])
    return program


def test_the_program_of_the_protocol_document_passes_with_the_documented_warning(
    walk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compliance.run(command("--json", "--timeout", "1.5", "--", sys.executable, str(walk))) == 0
    verdicts = json.loads(capsys.readouterr().out)
    assert [verdict["rule"] for verdict in verdicts if verdict["status"] == "WARN"] == ["reconnects"]


def test_the_documented_simulator_passes_every_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A reader copies it and runs the next command of the page on it."""
    page = (Path(__file__).parents[2] / "docs" / "simulators.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "walk.py").write_text(program)
    assert compliance.run(command("--json", "--timeout", "10", "--", sys.executable, str(tmp_path / "walk.py"))) == 0
    verdicts = json.loads(capsys.readouterr().out)
    assert {verdict["status"] for verdict in verdicts} <= {"PASS", "SKIP"}


def test_a_command_that_never_connects_fails_with_its_last_output(capsys: pytest.CaptureFixture[str]) -> None:
    program = "import sys; sys.exit('no such level: {address}')"
    assert compliance.run(command("--timeout", "0.5", "--", sys.executable, "-c", program)) == 1
    output = capsys.readouterr().out
    assert "FAIL  connects" in output
    assert re.search(r"no such level: tcp://127.0.0.1:\d+", output)
    assert "because  rule connects did not hold" in output
    assert output.endswith("SKIP\n")


@pytest.mark.parametrize(
    "arguments",
    [(), ("--",), ("--episodes", "0", "--", "x"), ("--timeout", "0", "--", "x"), ("--", "/no/such/program")],
)
def test_an_invalid_command_line_is_refused_with_a_remedy(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError, match=r"got .*; expected .*; "):
        compliance.run(command(*arguments))
