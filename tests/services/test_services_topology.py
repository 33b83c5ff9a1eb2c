"""The topology of a configuration: services, queues, cores."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from sparring.pipeline.bridges.unity.channels import ANALYTICS, parse_messages
from sparring.pipeline.queues.wire import make_id, parse_id
from sparring.pipeline.settings import Settings
from sparring.pipeline.settings.load import parse_settings
from sparring.services.commands.service import own_incarnation
from sparring.services.process.runtime import Run
from sparring.services.supervision.ports import Ports
from sparring.services.supervision.topology import (
    Topology,
    build,
    cores_beside_learners,
    load_run,
    service_plans,
    simulator_plans,
)

LEARNERS = {"learning-Striker", "learning-Goalie"}


def settings_of(learning: int = 1, processes: int = 1, leave: bool = True) -> Settings:
    text = f"""
behaviors:
  Striker: {{}}
  Goalie: {{}}
pipeline:
  leave_cores_to_learners: {str(leave).lower()}
  stepping_processes: {processes}
  torch_threads: {{learning: {learning}}}
"""
    return parse_settings(text, "test.yaml").settings


def topology(settings: Settings, folder: Path) -> Topology:
    return build(settings, run_id="r", directory=folder, seed=1)


def test_each_stepping_process_may_have_an_assembly_of_its_own(tmp_path: Path) -> None:
    text = "behaviors: {A: {}}\npipeline: {stepping_processes: 2, assembly: per stepping}\n"
    made = topology(parse_settings(text, "test.yaml").settings, tmp_path)
    run = made.run
    assert run.assemblies == ("assembly-0", "assembly-1")
    assert [(run.assembly_of(name), run.sources_of(run.assembly_of(name))) for name in run.stepping] == [
        ("assembly-0", ("stepping-0",)),
        ("assembly-1", ("stepping-1",)),
    ]
    assert {name: made.listeners[name] for name in ("steps:0", "steps:1")} == {
        "steps:0": "assembly-0",
        "steps:1": "assembly-1",
    }
    assert (run.capacity("steps:0").senders, run.capacity("segments:A").senders) == (1, 2)
    alone = topology(parse_settings(text.replace(": 2", ": 1"), "test.yaml").settings, tmp_path).run
    assert (alone.assemblies, alone.capacity("steps").senders, alone.capacity("segments:A").senders) == (
        ("assembly",),
        1,
        1,
    )


@given(
    learning=st.integers(1, 8),
    processes=st.integers(1, 3),
    usable=st.sets(st.integers(0, 127), max_size=40),
    simulators=st.integers(0, 8),
)
def test_stepping_and_simulators_leave_as_many_cores_to_learners_as_these_have_threads(
    learning: int, processes: int, usable: set[int], simulators: int
) -> None:
    """Without a free core every part may use all cores; others always may, and simulators where they are too many."""
    settings = settings_of(learning, processes)
    stepping = {f"stepping-{index}": "" for index in range(processes)}
    run = Run(id="r", directory=Path(), settings=settings, seed=0, addresses=stepping, simulators={})
    plans = service_plans(run)
    launched = [f"simulator-{number}" for number in range(simulators)]
    found = cores_beside_learners(settings, [plan.name for plan in plans], launched, sorted(usable))
    left = len(usable) - 2 * learning
    if left < 1:
        assert found == {}
        return
    assert set(found) == {*stepping, *(launched if simulators <= left else [])}
    assert all(set(cores) <= usable and len(cores) == left for cores in found.values())
    assert len(set(found.values())) == 1


def test_simulators_of_this_package_connect_in_the_private_folder_and_programs_to_the_address(tmp_path: Path) -> None:
    """Without that folder all of them connect to the address, which is for others, too."""
    text = "simulators: [{name: balance, count: 3}, {command: [game], count: 2}]\npipeline: {stepping_processes: 2}\n"
    settings = parse_settings("behaviors: {A: {}}\n" + text, "test.yaml").settings
    with Ports() as ports:
        ports.sockets = tmp_path
        made = build(settings, ports, run_id="r", directory=tmp_path, seed=0)
        made.save()
        first, second = made.run.addresses.values()
        private = [f"unix://{tmp_path}/s0", f"unix://{tmp_path}/s1"]
        found = [plan.environment["SPARRING_ADDRESS"] for plan in made.simulators]
        assert found == [*private, private[0], second, first]
        assert made.run.simulators == {"stepping-0": 3, "stepping-1": 2}
        assert load_run(tmp_path)[0].local == dict(zip(made.run.addresses, private, strict=True))
    plain = topology(settings, tmp_path)
    assert {plan.environment["SPARRING_ADDRESS"] for plan in plain.simulators} == {*plain.run.addresses.values()}


def test_all_services_share_all_cores_if_configured(tmp_path: Path) -> None:
    assert topology(settings_of(leave=False), tmp_path).cores == {}


def test_services_that_no_simulator_waits_for_have_lower_priority(tmp_path: Path) -> None:
    """Stepping has normal priority, learners a lower one, and all other services the lowest."""
    niceness = {plan.name: plan.niceness for plan in topology(settings_of(), tmp_path).services}
    assert {name for name, value in niceness.items() if value == 0} == {"stepping-0"}, "simulators wait for it"
    assert {niceness[name] for name in LEARNERS} == {3}
    assert min(value for name, value in niceness.items() if name not in ("stepping-0", *LEARNERS)) > 3
    assert min(niceness.values()) == 0, "raising the priority needs rights"


LOWER = """
import os, threading
from pathlib import Path
from sparring.services.commands.service import _lower_priority

ready, done, found = threading.Event(), threading.Event(), []
def work():
    ready.set()
    done.wait()
    found.append(os.nice(0))
before, thread = os.nice(0), threading.Thread(target=work)
thread.start()
ready.wait()
_lower_priority(3)
done.set()
thread.join()
print(os.nice(0) - before, found[0] - before)
"""


def test_every_thread_of_a_service_gives_way() -> None:
    """On Linux a priority is that of a thread; one of the learner computes updates, which began before."""
    shown = subprocess.run([sys.executable, "-c", LOWER], capture_output=True, text=True, check=True).stdout
    assert shown == "3 3\n"


def test_service_started_alone_replaces_its_earlier_incarnation() -> None:
    """The order does not depend on the random part of its name."""
    starts = [parse_id(make_id(own_incarnation("assembly"), opened=1)) for _ in range(20)]
    assert {start.name for start in starts} == {"assembly~0"}
    assert starts == sorted(starts, key=lambda start: start.order)


PLAYERS = """
behaviors:
  Ball: {}
env_settings: {env_path: Ball, num_envs: 2}
pipeline: {PIPELINE}
"""


def options(pipeline: str, folder: Path, *, learns: bool = True) -> list[list[str]]:
    """Returns the options of each simulator that the run adds."""
    settings = parse_settings(PLAYERS.replace("PIPELINE", pipeline), "test.yaml").settings
    plans = simulator_plans(settings, 1, {"stepping-0": "unix:///s"}, folder, learns=learns)
    return [[word for word in plan.command if word.startswith(("host=", "side_channel="))] for plan in plans]


def test_unity_players_get_training_analytics_if_configured(tmp_path: Path) -> None:
    """They get analytics of training runs, not of runs that only play."""
    assert options("training_analytics: false", tmp_path) == [[], []]
    assert options("training_analytics: true", tmp_path, learns=False) == [[], []]
    first, second = options("training_analytics: true", tmp_path)
    assert first == second
    analytics = bytes.fromhex(first[0].removeprefix("side_channel="))
    assert [channel for channel, _ in parse_messages(analytics)] == [ANALYTICS] * 2


def test_unity_players_connect_to_the_configured_host(tmp_path: Path) -> None:
    assert options('player_host: "::1"', tmp_path) == [["host=::1"]] * 2
