"""The Python environment of ML-Agents, installed where it is missing."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

VERSION: Final = "1.1.0"
PYTHON: Final = "python3.10"
DEFAULT: Final = Path.home() / ".cache" / "sparring" / f"mlagents-{VERSION}"
_PACKAGES: Final = (
    "torch",
    "numpy==1.23.5",
    "protobuf==3.20.3",
    "grpcio==1.48.2",
    "attrs<24",
    "cattrs<1.7",
    "tensorboard",
    "pyyaml",
    "Pillow",
    "h5py",
    "onnx==1.15.0",
    "setuptools<80",
    "huggingface-hub",
    "cloudpickle",
    "six",
    "filelock",
)
"""Packages that its trainers import; its own list needs a torch and a Python that are hard to find today."""
_ITSELF: Final = ("--no-deps", "--ignore-requires-python", f"mlagents=={VERSION}", f"mlagents-envs=={VERSION}")


def prepare(folder: Path, python: str) -> Path:
    """Returns the interpreter of an environment that has ML-Agents.

    Args:
        folder: of the environment; it is reused where it has the version already.
        python: name or path of an interpreter of Python 3.10.

    Raises:
        SystemExit: there is no such interpreter.
        CalledProcessError: pip fails; its output has the cause.
    """
    interpreter = folder / "bin" / "python"
    if _version(interpreter) != VERSION:
        subprocess.run([_find(python), "-m", "venv", "--clear", str(folder)], check=True)
        for packages in (_PACKAGES, _ITSELF):
            subprocess.run([str(interpreter), "-m", "pip", "install", "--quiet", *packages], check=True)
    return interpreter


def _version(interpreter: Path) -> str:
    """Returns the version of ML-Agents there; "" where it is missing."""
    if not interpreter.exists():
        return ""
    question = "from importlib.metadata import version; print(version('mlagents'))"
    found = subprocess.run([str(interpreter), "-c", question], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def _find(python: str) -> str:
    for candidate in _candidates(python):
        found = subprocess.run([candidate, "--version"], capture_output=True, text=True, check=False)
        if found.stdout.startswith("Python 3.10."):
            return candidate
    raise SystemExit(
        f"got no Python 3.10 as {python!r}; expected one, because ML-Agents {VERSION} runs on no newer one; install it "
        "(pyenv install 3.10) and name it with --python PATH"
    )


def _candidates(python: str) -> Iterator[str]:
    """Lists the named interpreter, or those on the path and of pyenv where none is named."""
    if found := shutil.which(python):
        yield found
    if python == PYTHON:
        yield from map(str, Path.home().glob(".pyenv/versions/3.10*/bin/python3.10"))
