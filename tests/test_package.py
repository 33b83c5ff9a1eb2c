"""The package has one import name, and files in a user's folder cannot replace it."""

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
    """A folder whose files would replace the trainer's modules if its path came first."""
    folder = tmp_path / "game"
    (folder / "services").mkdir(parents=True)
    for name in ("pipeline.py", "services/__init__.py", "yaml.py", "sparring.py", "torch.py"):
        (folder / name).write_text(f"raise SystemExit('a user file was imported: {name}')\n")
    (folder / "config.yaml").write_text(CONFIG)
    return folder


def run(folder: Path, *command: str) -> str:
    """Runs a command in a folder without variables that change Python's path; returns its output."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_training(folder: Path, *command: str) -> None:
    """Checks that a whole run completes in a folder."""
    arguments = ("train", "config.yaml", "--run-id", "run", "--seed", "1", "--no-export")
    run(folder, *command, *arguments)
    assert (folder / "results" / "run" / "summary.json").exists()


def test_command_prints_its_version() -> None:
    assert run(ROOT, *SPARRING, "--version").split() == ["sparring", sparring.__version__]


@pytest.mark.slow
def test_built_package_installs_one_name_and_its_run_imports_nothing_from_the_working_directory(
    hostile: Path, tmp_path: Path
) -> None:
    """A wheel built from the source distribution runs in a new environment with the libraries of this one."""
    built, environment = tmp_path / "dist", tmp_path / "environment"
    run(ROOT, sys.executable, "-m", "build", "--no-isolation", "--outdir", str(built))
    (package,) = built.glob("*.whl")
    run(tmp_path, sys.executable, "-m", "venv", "--without-pip", str(environment))
    python = str(environment / "bin" / "python")
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(f"{next(path for path in sys.path if path.endswith('site-packages'))}\n")
    before = {path.name for path in site.iterdir()}
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(tmp_path, *pip, "install", "--no-deps", "--force-reinstall", "--no-compile", str(package))
    added = {path.name for path in site.iterdir()} - before
    assert added == {"sparring", f"sparring-{sparring.__version__}.dist-info"}
    location = run(hostile, python, "-P", "-c", "import sparring.services.main as main; print(main.__file__)").strip()
    assert Path(location).is_relative_to(site)
    assert not any(path.is_symlink() for path in (site / "sparring").rglob("*"))
    assert (site / "sparring" / "pipeline" / "bridges" / "unity" / "messages.proto").exists()
    check_training(hostile, str(environment / "bin" / "sparring"))
