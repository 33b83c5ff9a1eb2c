"""One import name: what is installed, and what a user's folder can do to it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import sparring
from sparring.services.process.hosting import SPARRING

ROOT = Path(__file__).parent.parent
CONFIG = """
behaviors:
  Goal:
    max_steps: 256
    hyperparameters: {batch_size: 64, buffer_size: 256}
simulators: [{name: goal, areas: 4}]
"""


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder whose files would be imported in place of the trainer's, if its path came first."""
    folder = tmp_path / "game"
    (folder / "services").mkdir(parents=True)
    for name in ("pipeline.py", "services/__init__.py", "yaml.py", "sparring.py", "torch.py"):
        (folder / name).write_text(f"raise SystemExit('a user file was imported: {name}')\n")
    (folder / "config.yaml").write_text(CONFIG)
    return folder


def run(folder: Path, *command: str) -> str:
    """What a command prints in a folder, without variables that change Python's path."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def trains(folder: Path, *command: str) -> None:
    """A whole run of every service completes in a folder."""
    arguments = ("train", "config.yaml", "--run-id", "run", "--seed", "1", "--no-export")
    run(folder, *command, *arguments)
    assert (folder / "results" / "run" / "summary.json").exists()


def test_the_command_says_its_version() -> None:
    assert run(ROOT, *SPARRING, "--version").split() == ["sparring", sparring.__version__]


@pytest.mark.slow
def test_a_run_imports_nothing_from_the_working_directory(hostile: Path) -> None:
    trains(hostile, str(Path(sys.executable).with_name("sparring")))


@pytest.mark.slow
def test_what_is_built_installs_one_name_and_runs(hostile: Path, tmp_path: Path) -> None:
    """The source distribution, and the wheel built from it, in an empty environment that borrows libraries."""
    built, environment = tmp_path / "dist", tmp_path / "environment"
    run(ROOT, sys.executable, "-m", "build", "--no-isolation", "--outdir", str(built))
    (package,) = built.glob("*.whl")
    run(tmp_path, sys.executable, "-m", "venv", str(environment))
    python = str(environment / "bin" / "python")
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(f"{next(path for path in sys.path if path.endswith('site-packages'))}\n")
    before = {path.name for path in site.iterdir()}
    run(tmp_path, python, "-m", "pip", "install", "--no-deps", "--force-reinstall", str(package))
    added = {path.name for path in site.iterdir()} - before
    assert added == {"sparring", f"sparring-{sparring.__version__}.dist-info"}
    where = run(hostile, python, "-P", "-c", "import sparring.services.main as main; print(main.__file__)").strip()
    assert Path(where).is_relative_to(site)
    assert not any(path.is_symlink() for path in (site / "sparring").rglob("*"))
    assert (site / "sparring" / "pipeline" / "bridges" / "unity" / "messages.proto").exists()
    trains(hostile, str(environment / "bin" / "sparring"))
