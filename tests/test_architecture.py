"""Imports between packages go one way, and a simulator process imports none of the trainer."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

TABLE = (
    "errors specs files plugins",
    "messages networks",
    "queues security monitoring",
    "simulation bridges games",
    "assembly coordination stepping compliance",
    "demonstrations learning evaluation export settings",
    "endpoint process stages supervision cluster page commands api sweeps main",
)
"""The packages of `pipeline`, then those of `services`: each imports itself and those before it."""
LAYERS = " ".join(TABLE).split()

TORCH = ("pipeline/networks/", "pipeline/learning/", "pipeline/export/", "pipeline/stepping/policies.py")
LOGIC = ("assembly", "coordination", "evaluation", "export", "learning", "networks", "stepping")
LIGHT = ("torch", "zmq", "anyio", "pydantic", "structlog")


def sources(top: str) -> list[Path]:
    return sorted(path for path in (ROOT / top).rglob("*.py") if "__pycache__" not in path.parts)


def imports(path: Path) -> Iterator[str]:
    """Yields the modules that a file imports, at any depth."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def package(path: Path) -> str:
    """Returns the package of `pipeline` or `services` that a file belongs to."""
    return path.relative_to(ROOT).parts[1].removesuffix(".py")


@pytest.mark.parametrize(
    "path", [*sources("pipeline"), *sources("services")], ids=lambda path: str(path.relative_to(ROOT))
)
def test_package_imports_only_earlier_packages(path: Path) -> None:
    own = package(path)
    for module in imports(path):
        parts = module.split(".")
        assert parts[0] not in ("pipeline", "services"), f"{path} imports {module} past the name sparring"
        if parts[0] == "sparring" and len(parts) > 2 and parts[2] in LAYERS:
            assert LAYERS.index(parts[2]) <= LAYERS.index(own), f"{own} imports {module}, which comes after it"


def test_supervision_starts_stages_by_name_and_imports_none() -> None:
    for path in sources("services/supervision"):
        assert not [module for module in imports(path) if module.startswith("sparring.services.stages")], path


@pytest.mark.parametrize("name", LOGIC)
def test_logic_never_awaits(name: str) -> None:
    for path in sources(f"pipeline/{name}"):
        tree = ast.parse(path.read_text())
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef | ast.Await)], path
        assert not {"anyio", "asyncio", "socket", "trio", "zmq"} & set(imports(path)), path


def test_zmq_is_imported_in_one_file_only() -> None:
    found = [path for top in ("pipeline", "services") for path in sources(top) if "zmq" in set(imports(path))]
    assert [path.relative_to(ROOT).as_posix() for path in found] == ["pipeline/queues/zmq.py"]


def test_torch_is_imported_only_where_networks_are() -> None:
    for top in ("pipeline", "services"):
        for path in sources(top):
            if any(module.split(".")[0] == "torch" for module in imports(path)):
                assert path.relative_to(ROOT).as_posix().startswith(TORCH), path


def test_no_module_pickles() -> None:
    for top in ("pipeline", "services", "scripts"):
        for path in sources(top):
            banned = {"pickle", "cloudpickle", "dill", "shelve", "marshal"} & set(imports(path))
            assert not banned, f"{path} imports {banned}"


@pytest.mark.parametrize("module", ["sparring.pipeline.simulation", "sparring.services.stages.simulator"])
def test_simulator_loads_none_of_the_trainer(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {LIGHT!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_supervisor_does_not_load_torch() -> None:
    """Processes that it starts load torch; without it the run begins seconds sooner and needs less memory."""
    code = "import sys, sparring.services.commands.train; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


def test_ppo_loads_few_modules() -> None:
    """A reader who opens all of them has seen PPO whole: no sockets, no settings of a run, no demonstrations' files."""
    code = "import sys, sparring.pipeline.learning.ppo; print(sum(one.startswith('sparring.') for one in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) <= 35
