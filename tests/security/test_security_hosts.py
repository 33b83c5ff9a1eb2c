"""Services are placed on several machines, and machines join a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.messages.hosts import HostRun
from sparring.pipeline.settings import Settings
from sparring.pipeline.settings.hosts import HostSettings, place
from sparring.services.commands import join
from sparring.services.main import main
from sparring.services.process.runtime import Playback
from sparring.services.supervision.topology import Topology, build, load_topology, origin_of
from tests.security.security_hosts import three_machines, with_hosts

HOSTS = {
    "desk": HostSettings(address="10.0.0.1"),
    "rack": HostSettings(address="10.0.0.2", services=("stepping", "learning-Ball")),
    "tower": HostSettings(address="10.0.0.3", services=("learning", "stepping-1")),
}


# ---------------------------------------------------------------- placement


@pytest.mark.parametrize(
    ("service", "host"),
    [
        ("stepping-0", "rack"),
        ("stepping-1", "tower"),
        ("learning-Ball", "rack"),
        ("learning-Goal", "tower"),
        ("assembly", "desk"),
        ("coordination", "desk"),
        ("supervisor", "desk"),
    ],
)
def test_the_most_specific_entry_places_a_service(service: str, host: str) -> None:
    assert place(HOSTS, service) == host
    assert place({}, service) == ""


@pytest.mark.parametrize(
    ("hosts", "rest", "text"),
    [
        ({"a": {"address": "0.0.0.0"}}, {}, "got '0.0.0.0'; expected the IP address of one machine"),
        ({"a": {"address": "desk.local"}}, {}, "got 'desk.local'; expected the IP address of one machine"),
        ({"a b": {"address": "10.0.0.1"}}, {}, "got the host 'a b'; expected a name of letters"),
        ({"a": {"address": "10.0.0.1", "services": ["monitor"]}}, {}, "got the service 'monitor'; expected one of"),
        ({"a": {"address": "10.0.0.1", "services": ["stepping-1"]}}, {}, "expected one of stepping, assembly"),
        (
            {"a": {"address": "10.0.0.1", "services": ["learning"]}, "b": {"address": "::1", "services": ["learning"]}},
            {},
            "got 'learning' on a and on b; expected it on one host",
        ),
        ({"a": {"address": "10.0.0.1"}}, {"transport": "ipc"}, "got Unix sockets with pipeline.hosts; expected TCP"),
    ],
)
def test_invalid_hosts_are_refused(hosts: Mapping[str, Any], rest: Mapping[str, Any], text: str) -> None:
    with pytest.raises(SettingsError, match="got") as error:
        with_hosts(hosts, **rest)
    assert text in str(error.value)


def topology(settings: Settings, **rest: Any) -> Topology:
    return build(settings, run_id="r", directory=Path(), seed=1, **rest)


def test_each_service_listens_at_its_own_port_on_its_machine() -> None:
    found = topology(three_machines())
    assert found.host == "desk"
    assert found.endpoints["topic:supervisor"] == "tcp://127.0.0.1:27000"
    assert len({endpoint.rpartition(":")[2] for endpoint in found.endpoints.values()}) == len(found.endpoints)
    on = {name: endpoint.partition("//")[2].partition(":")[0] for name, endpoint in found.endpoints.items()}
    assert {name for name, address in on.items() if address == "10.9.9.2"} == {
        *("topic:stepping-1", "topic:stepping-2", "topic:host-rack")
    }
    assert {name for name, address in on.items() if address == "10.9.9.3"} == {
        *("segments:Ball", "topic:learning-Ball", "topic:policy-Ball", "topic:host-tower")
    }


def test_simulators_connect_to_stepping_on_their_machine_or_to_all_in_turn() -> None:
    found = topology(three_machines())
    addresses = found.run.addresses
    assert list(addresses.values()) == ["tcp://127.0.0.1:26997", "tcp://10.9.9.2:26998", "tcp://10.9.9.2:26999"]
    order = [list(addresses.values()).index(plan.environment["SPARRING_ADDRESS"]) for plan in found.simulators]
    assert order == [1, 2, 1, 0, 0, 1]
    assert [plan.host for plan in found.simulators] == ["rack"] * 3 + ["desk"] + ["tower"] * 2
    assert found.run.simulators == {"stepping-0": 2, "stepping-1": 3, "stepping-2": 1}


def test_a_machine_that_joins_reads_the_same_topology_from_the_file_of_the_run(tmp_path: Path) -> None:
    found = build(three_machines(), run_id="r", directory=tmp_path, seed=1)
    found.save()
    other = load_topology(tmp_path, "tower")
    assert other.endpoints == found.endpoints
    assert other.run.addresses == found.run.addresses
    assert [plan.environment for plan in other.simulators] == [plan.environment for plan in found.simulators]
    assert [other.place(plan.name) for plan in other.services] == [found.place(plan.name) for plan in found.services]
    assert other.host == "tower"
    first = origin_of(tmp_path)
    build(three_machines(), run_id="r", directory=tmp_path, seed=1, resumed=True).save()
    assert origin_of(tmp_path) == first
    build(three_machines(), run_id="r", directory=tmp_path, seed=1).save()
    assert origin_of(tmp_path) != first


def test_evaluating_a_checkpoint_uses_one_machine() -> None:
    found = topology(three_machines(), playing=Playback(checkpoints={"Ball": "x"}))
    assert found.run.hosts == {}
    assert {plan.host for plan in found.simulators} == {""}
    assert all("127.0.0.1" in address for address in found.run.addresses.values())


# ---------------------------------------------------------------- joining


def host_run(tmp_path: Path, **files: bytes) -> HostRun:
    folder = tmp_path / "main"
    folder.mkdir(exist_ok=True)
    build(three_machines(), run_id="r", directory=folder, seed=1).save()
    octets = {name: np.frombuffer(content, np.uint8) for name, content in files.items()}
    return HostRun(content=np.frombuffer((folder / "run.json").read_bytes(), np.uint8), files=octets)


def test_a_machine_that_joins_makes_its_own_folder_and_refuses_the_folder_of_another_run(tmp_path: Path) -> None:
    found = host_run(tmp_path, **{"initial/Ball/state.json": b"{}"})
    directory = join.prepare(tmp_path / "here", "rack", found)
    assert (directory / "initial/Ball/state.json").read_bytes() == b"{}"
    assert join.prepare(tmp_path / "here", "rack", found) == directory
    with pytest.raises(SettingsError, match="which holds another run; expected a new folder"):
        join.prepare(tmp_path / "here", "rack", host_run(tmp_path))
    with pytest.raises(SettingsError, match="got the host 'cellar'; expected one of desk, rack, tower"):
        join.prepare(tmp_path / "there", "cellar", found)


@pytest.mark.parametrize("name", ["../up", "/etc/x", "a/../../b"])
def test_a_file_outside_the_folder_of_the_run_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match="expected one within the run's folder"):
        join.prepare(tmp_path / "here", "rack", host_run(tmp_path, **{name: b"x"}))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["5100"], "expected tcp://HOST:PORT of the main machine"),
        (["tcp://10.0.0.1"], "expected tcp://HOST:PORT of the main machine"),
        (["tcp://10.0.0.1:5100"], "without keys: a program that answers there could start others here"),
        (["tcp://127.0.0.1:5100", "--keys", "/no/keys"], "which cannot be read"),
    ],
)
def test_joining_needs_an_address_and_keys(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARRING_KEYS", "")
    assert main(["join", *arguments, "--host", "rack"]) == 2
    assert text in capsys.readouterr().err
