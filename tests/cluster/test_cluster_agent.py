"""An agent without Ray: it starts, reports and ends one part, in a folder of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sparring.pipeline.errors import CANNOT_START, SettingsError
from sparring.pipeline.security import KEY_FILE
from sparring.services.cluster.agent import CHUNK, Agent, address_of

LIMIT_S = 30.0


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent("simulator-0", node_address="127.0.0.1")
    yield made
    made.close()


BOUNDS = (1_000_000, 2)


def start(agent: Agent, *command: str, key: str = "", watched: bool = True) -> int:
    return agent.start(list(command), {"GREETING": "hello"}, BOUNDS, watched=watched, key=key)


def end(agent: Agent) -> dict[str, Any]:
    deadline = time.monotonic() + LIMIT_S
    while not (state := agent.poll())["ended"]:
        assert time.monotonic() < deadline
    return state


def test_a_program_runs_with_its_variables_and_what_it_writes_is_listed(agent: Agent) -> None:
    start(agent, sys.executable, "-c", "import os, sys; print(os.environ['GREETING'], file=sys.stderr)")
    state = end(agent)
    assert (state["failure"], state["hopeless"]) == ("", False)
    assert state["files"]["logs/simulator-0.stderr"][0] == 6
    assert agent.read("logs/simulator-0.stderr", 2) == b"llo\n"
    assert agent.read("logs/other", 0) == b""


def test_the_word_sparring_is_the_command_of_the_node(agent: Agent) -> None:
    start(agent, "sparring", "--version", watched=False)
    assert end(agent)["failure"] == ""


def test_a_missing_program_is_named_and_a_restart_is_hopeless(agent: Agent) -> None:
    start(agent, "no-such-program")
    state = end(agent)
    assert f"exit status {CANNOT_START}" in state["failure"]
    assert "'no-such-program', which cannot be started" in state["failure"]
    assert state["hopeless"]


def test_files_stay_within_its_folder_and_the_key_is_for_its_owner_alone(agent: Agent) -> None:
    agent.write("A/checkpoint-1/weights", b"former", more=False)
    agent.write("A/checkpoint-1/weights", b"we", more=False)
    agent.write("A/checkpoint-1/weights", b"ights", more=True)
    start(agent, sys.executable, "-c", "pass", key="k" * 40)
    folder = Path(agent.describe()["folder"])
    assert (folder / "A/checkpoint-1/weights").read_bytes() == b"weights"
    assert (folder / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert KEY_FILE not in agent.poll()["files"]
    with pytest.raises(AssertionError, match="outside"):
        agent.write("../escaped", b"", more=False)
    with pytest.raises(AssertionError, match="outside"):
        agent.read("/etc/hostname", 0)


def test_no_call_is_large_enough_for_the_object_store_of_ray(agent: Agent) -> None:
    """The driver would end with the raylet of its node, without a word or a summary."""
    largest = 100 * 1024  # Ray's `max_direct_call_object_size`
    agent.write("file", bytes(3 * largest), more=False)
    assert 0 < len(agent.read("file", 0)) == CHUNK < largest * 0.9


def test_stop_kill_and_another_start_end_what_runs(agent: Agent) -> None:
    sleep = ("import time; time.sleep(1000)",)
    first = start(agent, sys.executable, "-c", *sleep)
    second = start(agent, sys.executable, "-c", *sleep)
    assert not psutil.pid_exists(first)
    assert agent.poll(0.0)["ended"] is False
    agent.kill()
    assert "SIGKILL" in end(agent)["failure"]
    assert not psutil.pid_exists(second)
    start(agent, sys.executable, "-c", *sleep)
    agent.stop()
    end(agent)


def test_a_port_is_reserved_and_kept_where_it_is_free(agent: Agent) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert agent.reserve(port, here=True) not in (0, port)
    assert agent.reserve(port, here=False) == port


def test_an_agent_that_hears_nothing_ends_its_part_and_itself(tmp_path: Path) -> None:
    """Its run may have started the part elsewhere."""
    program = f"""
import time
from pathlib import Path
from sparring.services.cluster import agent
made = agent.Agent("part", node_address="127.0.0.1")
pid = made.start(["{sys.executable}", "-c", "import time; time.sleep(1000)"], {{}}, (1000, 1), watched=True, key="")
Path("{tmp_path}/pid").write_text(f"{{pid}} {{made.describe()['folder']}}")
agent.SILENT_S = 1.0  # only now: a busy machine may take longer until here
time.sleep(1000)
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=LIMIT_S, check=False)
    pid, folder = (tmp_path / "pid").read_text().split()
    assert done.returncode == 1
    assert not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE
    assert not Path(folder).exists()


def test_an_agent_that_is_closing_lists_no_files(agent: Agent) -> None:
    """A listing that lacks a checkpoint would remove its copy."""
    start(agent, sys.executable, "-c", "pass")
    agent._is_closing = True
    with pytest.raises(ChildProcessError, match="nothing was heard of its run"):
        agent.poll()


def test_an_interface_has_an_address_or_is_named_with_those_that_exist() -> None:
    assert address_of("lo", "10.0.0.1") == "127.0.0.1"
    assert address_of(None, "10.0.0.1") == "10.0.0.1"
    with pytest.raises(SettingsError, match=r"'eth99'.*which has .*lo"):
        address_of("eth99", "10.0.0.1")
