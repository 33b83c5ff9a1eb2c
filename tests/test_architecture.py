"""Imports go one way, read from the sources; and a simulator pays for nothing it does not use."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Each room may import those before it in its row's list, and itself.
LAYERS: dict[str, set[str]] = {"errors": set(), "specs": {"errors"}}
LAYERS["sequences"] = set()
LAYERS["actions"] = {"specs"}
LAYERS["messages"] = {"errors", "specs"}
LAYERS["files"] = {"errors"}
LAYERS["metrics"] = {"messages"}
LAYERS["progress"] = {"messages", "metrics"}
LAYERS["logs"] = {"errors"}
LAYERS["queues"] = {"errors", "specs", "messages", "logs"}
_STAGE = {"errors", "specs", "actions", "messages", "queues", "metrics", "progress", "files"}
LAYERS["keys"] = {"errors", "files", "queues"}
LAYERS["simulation"] = {"errors", "specs", "messages", "unity", "keys"}
LAYERS["assembly"] = _STAGE | {"sequences"}
LAYERS["starts"] = set()
LAYERS["coordination"] = _STAGE | {"starts"}
LAYERS["monitoring"] = _STAGE | {"rotation"}
LAYERS["unity"] = {"errors", "specs", "messages"}
LAYERS["demonstrations"] = {"errors", "specs", "files", "messages", "unity"}
LAYERS["playing"] = _STAGE | {"demonstrations"}
LAYERS["networks"] = _STAGE
LAYERS["stepping"] = _STAGE | {"networks", "unity", "keys"}
LAYERS["learning"] = _STAGE | {"demonstrations", "networks", "sequences"}
LAYERS["settings"] = _STAGE | {"simulation", "assembly", "coordination", "networks", "learning", "stepping"}
LAYERS["writing"] = {"errors", "metrics", "progress"}
LAYERS["lifeline"] = set()
LAYERS["rotation"] = LAYERS["doctor"] = set()
LAYERS["hosting"] = {"errors", "logs", "lifeline"}
LAYERS["machines"] = {"errors", "hosting", "messages"}
LAYERS["runtime"] = _STAGE | {"settings", "stepping", "logs", "writing"}
LAYERS["security"] = {"errors", "keys", "queues", "settings"}
LAYERS["protection"] = {"keys", "queues", "runtime", "settings"}

TORCH = ("pipeline/networks/", "pipeline/learning/", "pipeline/stepping/policies.py")
LIGHT = ("torch", "zmq", "anyio", "pydantic", "structlog")


def sources(top: str) -> list[Path]:
    return sorted(path for path in (ROOT / top).rglob("*.py") if "__pycache__" not in path.parts)


def imports(path: Path) -> Iterator[str]:
    """Modules that a file names in an import, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(path: Path) -> str:
    """The room of `pipeline` that a file belongs to."""
    return path.relative_to(ROOT / "pipeline").parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", sources("pipeline"), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_rooms_before_it(path: Path) -> None:
    own = room(path)
    if own == "__init__":
        assert not list(imports(path))
        return
    for module in imports(path):
        parts = module.split(".")
        assert parts[0] != "services", f"{path} imports {module}"
        if parts[0] == "pipeline" and len(parts) > 1:
            assert parts[1] == own or parts[1] in LAYERS[own], f"{own} may not import {module}"


def test_services_import_no_services_but_the_topology() -> None:
    allowed = {
        "topology.py": {"services.analytics", "services.ports"},
        "supervisor.py": {
            "services.topology",
            "services.byhand",
            "services.exports",
            "services.outcome",
            "services.parts",
        },
        "outcome.py": {"services.topology"},
        "coordination.py": {"services.coordinator"},
        "parts.py": {"services.topology"},
        "hosts.py": {"services.topology"},
        "launch.py": {
            "services.topology",
            "services.supervisor",
            "services.hosts",
            "services.machines",
            "services.ports",
        },
        "machines.py": {"services.topology", "services.hosts", "services.ports"},
        "doctor.py": {"services.topology", "services.ports"},
        "join.py": {"services.topology", "services.hosts", "services.exports", "services.ports"},
        "train.py": {"services.topology", "services.check", "services.launch", "services.players"},
        "tournament.py": {
            "services.topology",
            "services.launch",
            "services.players",
            "services.runs",
            "services.ports",
        },
        "evaluate.py": {"services.topology", "services.launch", "services.runs"},
        "export.py": {"services.runs"},
        "status.py": {"services.runs"},
        "service.py": {"services.topology"},
        "record.py": {"services.record_actors", "services.record_simulator"},
        "record_actors.py": {"services.players"},
        "record_simulator.py": {"services.topology"},
    }
    for path in sources("services"):
        if path.name == "__main__.py":
            continue
        for module in imports(path):
            if module.startswith("services."):
                base = ".".join(module.split(".")[:2])
                assert base in allowed.get(path.name, set()), f"{path.name} imports {module}"


def test_zmq_is_imported_in_one_file_only() -> None:
    found = [path for top in ("pipeline", "services") for path in sources(top) if "zmq" in set(imports(path))]
    assert [path.relative_to(ROOT).as_posix() for path in found] == ["pipeline/queues/zmq.py"]


def test_torch_is_imported_only_where_networks_are() -> None:
    for top in ("pipeline", "services"):
        for path in sources(top):
            if any(module.split(".")[0] == "torch" for module in imports(path)):
                assert path.relative_to(ROOT).as_posix().startswith(TORCH), path


def test_nothing_pickles() -> None:
    for top in ("pipeline", "services", "scripts"):
        for path in sources(top):
            banned = {"pickle", "cloudpickle", "dill", "shelve", "marshal"} & set(imports(path))
            assert not banned, f"{path} imports {banned}"


@pytest.mark.parametrize("module", ["pipeline.simulation", "services.simulator"])
def test_a_simulator_loads_none_of_the_trainer(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {LIGHT!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_supervisor_loads_no_torch() -> None:
    """It starts the processes that need it: a run begins seconds sooner, and holds it in memory once less."""
    code = "import sys, services.train; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
