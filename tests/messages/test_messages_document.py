"""`docs/protocol.md` agrees with the code."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import socket
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparring.pipeline.messages.codec import PREFIX, SIMULATORS, from_bytes, to_bytes
from sparring.pipeline.messages.conversation import TRANSITIONS, diagram
from sparring.pipeline.messages.schema import TAGS, Columns, tag_of
from sparring.pipeline.messages.simulator import Act, BehaviorActions, Bye, Ping, Reset, Welcome
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec

DOCUMENT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
SIMULATOR_RECORDS = [cls for cls in TAGS.values() if cls.__module__ == "sparring.pipeline.messages.simulator"]
SECTIONS = {"report": "**report**", "decisions": "**decisions**", "ends": "**ends**", "statistic": "**statistic**"}
SECTIONS |= {
    "sampler": "**sampler**",
    "player": "**player**",
    "actions": "**actions**",
    "ping": "### ping, pong",
    "pong": "### ping, pong",
}
SPECS = {BehaviorSpec: "A **spec**", ObservationSpec: "**observation spec**", ActionSpec: "**action spec**"}
CODES = {
    *("unexpected_message", "malformed", "too_large", "version", "credential", "specs", "unknown_behavior"),
    *("duplicate_agent", "unknown_agent", "shape", "dtype", "not_finite", "masks", "group", "sequence"),
    *("timeout", "internal"),
}


def rows_after(heading: str) -> dict[str, str]:
    """Returns the first table after a heading: name in the first column -> second column."""
    lines = iter(DOCUMENT[DOCUMENT.index(heading) :].splitlines())
    table = []
    for line in lines:
        if line.startswith("|"):
            table.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif table:
            break
    return {row[0].strip("`"): row[1] for row in table[2:]}


def test_the_diagram_is_generated_from_the_table() -> None:
    found = re.search(r"<!-- transitions -->\n```mermaid\n(.*?)\n```\n<!-- /transitions -->", DOCUMENT, re.DOTALL)
    assert found is not None
    assert found[1] == diagram()


def test_the_documented_transitions_are_those_of_the_code() -> None:
    lines = [
        line for line in DOCUMENT.splitlines() if re.fullmatch(r"\| \w+ \| (simulator|trainer) \| \w+ \| \w+ \|", line)
    ]
    assert lines == [f"| {state} | {role} | {tag} | {after} |" for (state, role, tag), after in TRANSITIONS.items()]


@pytest.mark.parametrize("cls", [*SIMULATOR_RECORDS, *SPECS], ids=lambda cls: cls.__name__)
def test_every_record_is_documented_with_fields_dtypes_and_defaults(cls: Any) -> None:
    heading = SPECS.get(cls) or SECTIONS.get(tag_of(cls)) or f"### {tag_of(cls)}\n"
    rows = rows_after(heading)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    assert list(rows) == list(fields)
    hints = typing.get_type_hints(cls, include_extras=True)
    for name, field in fields.items():
        has_default = not (field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING)
        assert ("default" in rows[name]) == has_default, name
        for columns in _columns(hints[name]):
            written = rows[name].replace("\\|", "|")
            assert all(f"`{dtype}`" in written for dtype in columns.dtypes), name
            assert columns.ndim is None or written.split("[")[1].split("]")[0].count(",") == columns.ndim - 1, name


def _columns(hint: Any) -> Iterator[Columns]:
    yield from getattr(hint, "__metadata__", ())
    for inner in getattr(hint, "__args__", ()):
        yield from _columns(inner)


def test_the_limits_are_those_of_the_codec() -> None:
    written = [int(text) for text in rows_after("## Limits").values()]
    assert written == [SIMULATORS.total, SIMULATORS.header, SIMULATORS.arrays, SIMULATORS.ndim, SIMULATORS.items]


def test_every_error_code_is_documented_once() -> None:
    assert set(rows_after("| code | cause |")) >= CODES


def test_every_code_that_the_trainer_sends_is_documented() -> None:
    root = Path(__file__).parents[2]
    sources = [
        *root.glob("pipeline/stepping/*.py"),
        *root.glob("pipeline/messages/*.py"),
    ]
    sent = {code for source in sources if source.exists() for code in _codes(ast.parse(source.read_text()))}
    assert "unexpected_message" in sent
    assert sent <= set(rows_after("| code | cause |"))


def _codes(tree: ast.AST) -> Iterator[str]:
    """Yields texts used as codes: the first argument of an error, or `code=` of a Fault."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        places: list[ast.expr] = [keyword.value for keyword in call.keywords if keyword.arg == "code"]
        if getattr(call.func, "id", "").endswith("ProtocolError") or getattr(call.func, "id", "") == "error":
            places += call.args[:1]
        for place in places:
            constants = (node.value for node in ast.walk(place) if isinstance(node, ast.Constant))
            yield from (value for value in constants if isinstance(value, str))


def test_the_bytes_in_the_document_are_the_named_messages() -> None:
    blocks = re.findall(r"```hex\n(.*?)```", DOCUMENT, re.DOTALL)
    dumps = [bytes.fromhex("".join(line[6:53] for line in block.splitlines())) for block in blocks]
    act = Act(
        sequence=0,
        actions=(
            BehaviorActions(
                behavior="Walk?team=0",
                agents=np.array([5], np.int64),
                continuous=np.zeros((1, 0), np.float32),
                discrete=np.ones((1, 1), np.int32),
            ),
        ),
    )
    assert dumps == [to_bytes(Ping(number=7)), to_bytes(act)]


def test_the_worked_example_runs_with_a_trainer(tmp_path: Path) -> None:
    """The program in the document sends Hello, executes its actions, ends at +3 and exits on Bye."""
    program = tmp_path / "walk.py"
    program.write_text(re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)[0])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with subprocess.Popen([sys.executable, program], env={**os.environ, "SPARRING_ADDRESS": address}) as process:
            try:
                connected, _ = listener.accept()
                connected.settimeout(20)
                with connected, connected.makefile("rb") as stream:
                    _play_to_the_right(connected, stream)
                assert process.wait(20) == 0
            finally:
                process.kill()


def _play_to_the_right(connected: socket.socket, stream: Any) -> None:
    hello = _read(stream)
    assert hello.behaviors["Walk?team=0"].actions == ActionSpec(discrete=(2,))
    connected.sendall(to_bytes(Welcome(version=1, connection=1, heartbeat_s=10.0, timeout_s=30.0)))
    connected.sendall(to_bytes(Reset(parameters={"slope": 0.5}, seed=1)))
    received = []
    for sequence in range(4):
        step = _read(stream)
        assert step.sequence == sequence
        (report,) = step.reports
        received.append((report.ends is not None, report.decisions.observations[0].item()))
        right = BehaviorActions(
            behavior=report.behavior,
            agents=report.decisions.agents,
            continuous=np.zeros((1, 0), np.float32),
            discrete=np.ones((1, 1), np.int32),
        )
        connected.sendall(to_bytes(Ping(number=9)))
        assert _read(stream) is not None
        connected.sendall(to_bytes(Act(sequence=sequence, actions=(right,))) if sequence < 3 else to_bytes(Bye()))
    assert received == [(False, 0.0), (False, 1.0), (False, 2.0), (True, 0.0)]
    assert report.ends.rewards.tolist() == [1.0]
    assert report.ends.observations[0].tolist() == [[3.0]]


def _read(stream: Any) -> Any:
    prefix = stream.read(PREFIX.size)
    return from_bytes(prefix + stream.read(PREFIX.unpack(prefix)[0] - PREFIX.size))
