"""An environment with this package as a wheel, as users have it, and the libraries of the present environment."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services.started import SAME_EVERYWHERE

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "docs" / "examples"
PACKAGES = sorted(path.parent for path in EXAMPLES.glob("*/pyproject.toml"))


def run(folder: Path, *command: str, limit_s: float = 300.0) -> str:
    """Runs a command in a folder without variables that change Python's path; returns its output."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command,
        cwd=folder,
        env=variables | SAME_EVERYWHERE,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def make(environment: Path) -> None:
    """Makes an environment, and installs what a source distribution of this package builds to, and all examples."""
    built = environment.parent / f"{environment.name}-dist"
    run(ROOT, sys.executable, "-m", "build", "--no-isolation", "--outdir", str(built))
    (package,) = built.glob("*.whl")
    run(environment.parent, sys.executable, "-m", "venv", "--without-pip", str(environment))
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(f"{next(path for path in sys.path if path.endswith('site-packages'))}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "install", "--no-deps"]
    run(environment.parent, *pip, "--force-reinstall", "--no-compile", str(package))


def add(environment: Path, package: Path, scratch: Path) -> None:
    """Installs a package of the examples, from a copy: an installer writes beside what it builds."""
    copy = scratch / package.name
    run(scratch, "cp", "-r", str(package), str(copy))
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "install", "--no-deps"]
    run(scratch, *pip, "--no-build-isolation", "--no-index", "--no-compile", str(copy))


def shared(factory: pytest.TempPathFactory) -> Path:
    """Returns the environment with all examples, which the processes of a session of tests share."""
    folder = factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    environment = folder / "installed"
    with (folder / "installed.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (environment / "complete").exists():
            make(environment)
            for package in PACKAGES:
                add(environment, package, folder)
            (environment / "complete").touch()
    return environment
