"""The examples of the documentation run as they stand, from an installed wheel in an empty folder."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from sparring.services.main import COMMANDS, main, module_of
from sparring.services.process import forking
from tests.installed import EXAMPLES, PACKAGES, run, shared

CONFIGURATIONS = sorted(EXAMPLES.glob("*.yaml"))
OF_PACKAGES = sorted(file for package in PACKAGES for file in package.glob("*.yaml"))
DOCS = EXAMPLES.parent


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment with the wheel and all packages among the examples."""
    return shared(tmp_path_factory) / "bin"


@pytest.mark.slow
@pytest.mark.parametrize("file", [*CONFIGURATIONS, *OF_PACKAGES], ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_example_trains(tmp_path: Path, commands: Path, file: Path) -> None:
    sparring = str(commands / "sparring")
    own = ["--set", "writers.tensorboard=false"]  # a process less
    run(tmp_path, sparring, "train", str(file), "--in-process", "--max-steps", "2000", "--run-id", "run", *own)
    folder = tmp_path / "results" / "run"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "completed"
    for behavior in summary["behaviors"].values():
        assert behavior["steps"] >= 2000
        assert behavior["episodes"] > 0
    if file.stem == "lamps":
        run(tmp_path, sparring, "evaluate", str(folder), "--episodes", "5", "--in-process", "--video", "lamps.gif")
        assert (tmp_path / "lamps.gif").read_bytes().startswith(b"GIF89a")
    if file.parent.name == "own_signal":
        assert _statistics(folder) >= {"Losses/Surprise Loss", "Policy/Surprise Reward"}
    if file.parent.name == "own_opponent":
        matches = [json.loads(line) for line in (folder / "matches.jsonl").read_text().splitlines()]
        assert any("@" in player for match in matches for player in match["players"].values())  # a snapshot
    if file.parent.name == "own_writer":
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        rows = (folder / "csv" / "Goal.csv").read_text().splitlines()
        assert [int(row.split(",")[0]) for row in rows] == [json.loads(line)["step"] for line in lines]
    if file.parent in PACKAGES:  # what is trained acts and is exported through the same doors
        run(tmp_path, sparring, "export", str(folder), "--format", "torchscript", "--out", "out")
        assert list((tmp_path / "out").rglob("*.pt"))


def _statistics(folder: Path) -> set[str]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {name for line in lines for name in json.loads(line)["means"]}


PAGES = [DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
WHOLE = re.compile(r"^ *(?:\$ )?sparring +([a-z]+ +[^#\n]*?)(?: +#.*|  +agent .*)?$", re.MULTILINE)
"""A command in a block of code, which may be followed by a comment."""
NAMED = re.compile(r"`sparring ([a-z]+)( [^`]*)?`")
"""A command in a sentence, which may lack arguments."""


def test_commands_of_the_documents_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is parsed; none is run. Other tests and the tools of the project run many of them."""
    monkeypatch.setattr(forking, "server", lambda: None)
    options, found = dict[str, set[str]](), 0
    for name in COMMANDS:
        module, parser = importlib.import_module(module_of(name)), argparse.ArgumentParser()
        monkeypatch.setattr(module, "run", lambda _: 0)
        module.add_arguments(parser)
        options[name] = set(parser._option_string_actions)
    for page in PAGES:
        text = re.sub(r"^```\n.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)  # drawings and output
        for command in WHOLE.findall(text):
            words = shlex.split(re.sub(r"[][]|\.\.\.", "", command))
            if words[0] in COMMANDS:  # else a sentence
                assert main(words) == 0, (page.name, command)
                found += 1
        for name, rest in NAMED.findall(text):
            ours = shlex.split(re.sub(r"[][]", "", rest.partition(" -- ")[0]))
            assert name in COMMANDS, (page.name, name)
            assert {word.partition("=")[0] for word in ours if word.startswith("--")} <= options[name], (
                page.name,
                rest,
            )
    assert found > 20


def test_every_example_is_documented() -> None:
    environments, extending = ((DOCS / name).read_text() for name in ("environments.md", "extending.md"))
    assert CONFIGURATIONS
    assert PACKAGES
    assert not [file.stem for file in CONFIGURATIONS if f"| `{file.stem}` |" not in environments]
    assert not [package.name for package in PACKAGES if f"examples/{package.name}" not in extending]


def test_packages_have_the_size_that_their_documentation_states() -> None:
    """A plain A2C has at most 150 lines, a reward signal of a random network 40, without empty lines."""
    for package, most in (("own_trainer/sparring_a2c", 150), ("own_signal/sparring_surprise", 40)):
        lines = [line for file in (EXAMPLES / package).glob("*.py") for line in file.read_text().splitlines() if line]
        assert len(lines) <= most, package


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kit", "compiler", "program"),
    [
        ("cpp", "c++ -std=c++17 -O0 -pthread corridor.cpp -o corridor", "./corridor"),
        ("js", "node -v", "node corridor.mjs"),
    ],
)
def test_kit_keeps_every_rule_of_the_protocol_and_learns(
    tmp_path: Path, commands: Path, kit: str, compiler: str, program: str
) -> None:
    """The commands of docs/clients.md; the shortest way through the corridor earns 0.97, and chance less than 0.8."""
    if shutil.which(compiler.split()[0]) is None:
        pytest.skip(f"no {compiler.split()[0]}")
    sparring, folder = str(commands / "sparring"), tmp_path / kit
    shutil.copytree(EXAMPLES / kit, folder)
    run(folder, *compiler.split())
    verdicts = json.loads(run(folder, sparring, "compliance", "--json", "--timeout", "5", "--", *program.split()))
    assert [verdict for verdict in verdicts if verdict["status"] != "PASS"] == []
    assert len(verdicts) > 25
    limits = ["--in-process", "--seed", "1", "--run-id", "run", "--set", "writers.tensorboard=false"]
    run(folder, sparring, "train", "corridor.yaml", *limits)
    summary = json.loads((folder / "results" / "run" / "summary.json").read_text())
    assert summary["behaviors"]["Corridor"]["reward_mean_last100"] > 0.9


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_example_in_python_trains_and_plays(tmp_path: Path, commands: Path) -> None:
    script = EXAMPLES / "from_python.py"
    *intervals, last = run(tmp_path, str(commands / "python"), "-W", "error", str(script)).splitlines()
    assert all(re.fullmatch(r" *[\d,]+ steps  reward \d+", one) for one in intervals), intervals
    assert intervals
    assert float(re.fullmatch(r"the pole stands for (\d+) of 500 steps", last)[1]) > 195, last
    assert script.name in (DOCS / "python.md").read_text()


NOTEBOOK = """
import sys
import nbclient
import nbformat

notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
print("plots", sum("image/png" in output.get("data", {}) for output in outputs))
print("".join(output.get("text", "") for output in outputs))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_notebook_trains_plots_loads_and_acts(tmp_path: Path, commands: Path) -> None:
    """In a kernel of the installed environment, which has a running event loop."""
    printed = run(tmp_path, str(commands / "python"), "-c", NOTEBOOK, str(EXAMPLES / "notebook.ipynb"))
    assert "plots 1" in printed
    assert int(re.search(r"the pole stands for (\d+) of 500 steps", printed)[1]) > 50, printed
    assert "notebook.ipynb" in (DOCS / "python.md").read_text()
