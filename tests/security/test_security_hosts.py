"""Several machines: what one orders the other runs once, and what falls silent has ended before it is started anew."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.messages.hosts import HostOrders, HostRun, HostState, PartOrder
from sparring.pipeline.settings import Settings, SimulatorSettings
from sparring.pipeline.settings.hosts import HostSettings, machines, place
from sparring.services.commands import join
from sparring.services.main import main
from sparring.services.process.hosting import HostedService, ProcessHost
from sparring.services.process.machines import AWAY_S, Machine, OrderExecutor
from sparring.services.process.runtime import Playing
from sparring.services.supervision.topology import Topology, build, joined, origin_of

HOSTS = {
    "desk": HostSettings(address="10.0.0.1"),
    "rack": HostSettings(address="10.0.0.2", services=("stepping", "learning-Ball")),
    "tower": HostSettings(address="10.0.0.3", services=("learning", "stepping-1")),
}


# ---------------------------------------------------------------- where


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
def test_the_most_exact_word_says_where_a_service_runs(service: str, host: str) -> None:
    assert place(HOSTS, service) == host
    assert place({}, service) == ""


def test_the_own_address_comes_first() -> None:
    assert machines(HOSTS, "tower") == ("10.0.0.3", "10.0.0.1", "10.0.0.2")
    assert machines({}, "") == ()


def asked(hosts: Mapping[str, Any], **rest: Any) -> Settings:
    return Settings.model_validate({"behaviors": {"Ball": {}}, "pipeline": {"hosts": hosts, **rest}})


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
def test_hosts_that_can_not_be_are_refused(hosts: Mapping[str, Any], rest: Mapping[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="got") as error:
        asked(hosts, **rest)
    assert text in str(error.value)


def topology(settings: Settings, **rest: Any) -> Topology:
    return build(settings, run_id="r", directory=Path(), seed=1, **rest)


def spread() -> Settings:
    hosts = {
        "desk": {"address": "127.0.0.1"},
        "rack": {"address": "10.9.9.2", "services": ["stepping-1", "stepping-2"]},
        "tower": {"address": "10.9.9.3", "services": ["learning"]},
    }
    simulators = (
        SimulatorSettings(name="balance", count=3, host="rack"),
        SimulatorSettings(name="balance", count=1),
        SimulatorSettings(name="balance", count=2, host="tower"),
    )
    return asked(hosts, stepping_processes=3, port=27_000).model_copy(update={"simulators": simulators})


def test_everyone_listens_at_a_port_of_its_own_on_its_machine() -> None:
    found = topology(spread())
    assert found.host == "desk"
    assert found.endpoints["topic:supervisor"] == "tcp://127.0.0.1:27000"
    assert len({endpoint.rpartition(":")[2] for endpoint in found.endpoints.values()}) == len(found.endpoints)
    on = {name: endpoint.partition("//")[2].partition(":")[0] for name, endpoint in found.endpoints.items()}
    assert {name for name, address in on.items() if address == "10.9.9.2"} == {
        *("topic:stepping-1", "topic:stepping-2", "topic:host-rack")
    }
    assert {name for name, address in on.items() if address == "10.9.9.3"} == {
        *("updates:Ball", "topic:learning-Ball", "topic:policy-Ball", "topic:host-tower")
    }


def test_simulators_connect_to_stepping_on_their_machine_else_to_all_in_turn() -> None:
    found = topology(spread())
    addresses = found.run.addresses
    assert list(addresses.values()) == ["tcp://127.0.0.1:26997", "tcp://10.9.9.2:26998", "tcp://10.9.9.2:26999"]
    order = [list(addresses.values()).index(plan.environment["SPARRING_ADDRESS"]) for plan in found.simulators]
    assert order == [1, 2, 1, 0, 0, 1]
    assert [found.place(f"simulator-{number}") for number in range(6)] == ["rack"] * 3 + ["desk"] + ["tower"] * 2
    assert found.run.simulators == {"stepping-0": 2, "stepping-1": 3, "stepping-2": 1}


def test_a_machine_that_joins_has_the_same_topology_from_the_file_of_the_run(tmp_path: Path) -> None:
    found = build(spread(), run_id="r", directory=tmp_path, seed=1)
    found.save()
    other = joined(tmp_path, "tower")
    assert other.endpoints == found.endpoints
    assert other.run.addresses == found.run.addresses
    assert [plan.environment for plan in other.simulators] == [plan.environment for plan in found.simulators]
    assert [other.place(plan.name) for plan in other.services] == [found.place(plan.name) for plan in found.services]
    assert other.host == "tower"
    first = origin_of(tmp_path)
    build(spread(), run_id="r", directory=tmp_path, seed=1, resumed=True).save()
    assert origin_of(tmp_path) == first
    build(spread(), run_id="r", directory=tmp_path, seed=1).save()
    assert origin_of(tmp_path) != first


def test_to_play_a_checkpoint_one_machine_is_enough() -> None:
    found = topology(spread(), playing=Playing(checkpoints={"Ball": "x"}))
    assert found.run.hosts == {}
    assert {plan.host for plan in found.simulators} == {""}
    assert all("127.0.0.1" in address for address in found.run.addresses.values())


# ---------------------------------------------------------------- joining


def described(tmp_path: Path, **files: bytes) -> HostRun:
    folder = tmp_path / "main"
    folder.mkdir(exist_ok=True)
    build(spread(), run_id="r", directory=folder, seed=1).save()
    octets = {name: np.frombuffer(content, np.uint8) for name, content in files.items()}
    return HostRun(content=np.frombuffer((folder / "run.json").read_bytes(), np.uint8), files=octets)


def test_a_machine_that_joins_makes_a_folder_of_its_own_and_takes_no_other_runs(tmp_path: Path) -> None:
    found = described(tmp_path, **{"initial/Ball/state.json": b"{}"})
    directory = join.prepare(tmp_path / "here", "rack", found)
    assert (directory / "initial/Ball/state.json").read_bytes() == b"{}"
    assert join.prepare(tmp_path / "here", "rack", found) == directory
    with pytest.raises(SettingsError, match="which holds another run; expected a new folder"):
        join.prepare(tmp_path / "here", "rack", described(tmp_path))
    with pytest.raises(SettingsError, match="got the host 'cellar'; expected one of desk, rack, tower"):
        join.prepare(tmp_path / "there", "cellar", found)


@pytest.mark.parametrize("name", ["../up", "/etc/x", "a/../../b"])
def test_a_file_beyond_the_runs_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match="expected one within the run's folder"):
        join.prepare(tmp_path / "here", "rack", described(tmp_path, **{name: b"x"}))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["5100"], "expected tcp://HOST:PORT of the main machine"),
        (["tcp://10.0.0.1"], "expected tcp://HOST:PORT of the main machine"),
        (["tcp://10.0.0.1:5100"], "without keys: whoever answers there could start programs here"),
        (["tcp://127.0.0.1:5100", "--keys", "/no/keys"], "which cannot be read"),
    ],
)
def test_who_joins_must_know_whom(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARRING_KEYS", "")
    assert main(["join", *arguments, "--host", "rack"]) == 2
    assert text in capsys.readouterr().err


# ---------------------------------------------------------------- orders


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Process:
    """A process that runs until it is told."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.hopeless = False
        self.failure = ""
        self.ended = anyio.Event()
        self.asked: list[str] = []

    async def wait(self) -> str:
        await self.ended.wait()
        return self.failure

    def stop(self) -> None:
        self.asked.append("stop")
        self.ended.set()

    def kill(self) -> None:
        self.asked.append("kill")
        self.failure = "killed"
        self.ended.set()


class Pair:
    """Both sides, and a line between them that may be cut."""

    def __init__(self, tasks: Any) -> None:
        self.clock = Clock()
        self.orders: HostOrders | None = None
        self.states: list[HostState] = []
        self.processes: list[tuple[str, str, Process]] = []
        self.machine = Machine("rack", self._order, self.clock, patience_s=60.0)
        self.tasks = tasks
        self.orderly: OrderExecutor | None = None
        self._sessions = 0

    def _order(self, orders: HostOrders) -> None:
        self.orders = orders

    def join(self) -> None:
        """The other machine joins, for the first time or again: what it ran before has ended."""
        for _, _, process in self.processes:
            process.ended.set()
        self._sessions += 1
        self.states = []  # what a former stay still says is heard by nobody
        self.orderly = OrderExecutor(f"rack.{self._sessions}", self._start, self.states.append, self.tasks)

    def _start(self, name: str, order: PartOrder) -> HostedService:
        process = Process(100 + len(self.processes))
        self.processes.append((name, order.start, process))
        return process

    async def talk(self) -> None:
        """Both hear the latest of each other."""
        for _ in range(3):
            await anyio.wait_all_tasks_blocked()
            if self.states:
                self.machine.heard(self.states[-1])
            if self.orders is not None and self.orderly is not None:
                self.orderly.follow(self.orders)

    @property
    def running(self) -> list[str]:
        return [start for _, start, process in self.processes if not process.ended.is_set()]


def in_virtual_time(test: Callable[[Pair], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        async def main() -> None:
            async with anyio.create_task_group() as tasks:
                await test(Pair(tasks))
                tasks.cancel_scope.cancel()

        anyio.run(main, backend="trio")

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


@in_virtual_time
async def test_a_part_is_started_once_its_machine_has_joined(pair: Pair) -> None:
    part = pair.machine.start("stepping-0", "stepping-0.1", first=True)
    assert pair.orders is None
    pair.join()
    await pair.talk()
    await pair.talk()
    assert pair.running == ["stepping-0.1"]
    assert part.pid == 100
    pair.processes[0][2].failure = "exit status 1"
    pair.processes[0][2].ended.set()
    await pair.talk()
    assert await part.wait() == "exit status 1"
    pair.machine.start("stepping-0", "stepping-0.2")
    await pair.talk()
    assert pair.running == ["stepping-0.2"]


@in_virtual_time
async def test_stop_and_kill_reach_the_process_once(pair: Pair) -> None:
    stopped, killed = pair.machine.start("a", "a.1"), pair.machine.start("b", "b.1")
    pair.join()
    await pair.talk()
    stopped.stop()
    killed.kill()
    await pair.talk()
    await pair.talk()
    assert [process.asked for _, _, process in pair.processes] == [["stop"], ["kill"]]
    assert (await stopped.wait(), await killed.wait()) == ("", "killed")


@in_virtual_time
async def test_a_machine_that_falls_silent_takes_its_parts_with_it_and_gets_new_orders_when_it_is_back(
    pair: Pair,
) -> None:
    part = pair.machine.start("a", "a.1")
    pair.join()
    await pair.talk()
    assert pair.machine.look(AWAY_S) == ""
    assert pair.machine.look(AWAY_S + 1) == "away"
    assert "was not heard for 9 s" in await part.wait()
    pair.machine.start("a", "a.2")
    old = pair.orders
    pair.join()
    await pair.talk()
    assert pair.running == ["a.2"]
    assert old is not None
    assert pair.orderly is not None
    pair.orderly.follow(old)
    assert pair.running == ["a.2"]


@in_virtual_time
async def test_a_machine_that_joins_anew_before_it_was_missed_runs_nothing_twice(pair: Pair) -> None:
    part = pair.machine.start("a", "a.1")
    pair.join()
    await pair.talk()
    pair.join()
    await pair.talk()
    assert await part.wait() == "rack has joined anew"
    pair.machine.start("a", "a.2")
    await pair.talk()
    assert [start for _, start, _ in pair.processes] == ["a.1", "a.2"]


@in_virtual_time
async def test_a_machine_that_was_frozen_ends_what_it_runs_before_it_begins_anew(pair: Pair) -> None:
    pair.machine.start("a", "a.1")
    pair.join()
    await pair.talk()
    assert pair.machine.look(AWAY_S + 1) == "away"
    pair.machine.start("a", "a.2")
    await pair.talk()
    await pair.talk()
    assert pair.processes[0][2].asked[:1] == ["kill"]
    assert pair.running == ["a.2"]


class Topic:
    """A subscription to a supervisor's board."""

    def __init__(self) -> None:
        self.publisher = "supervisor.1"
        self.latest: dict[str, Any] = {}
        self.heard_age = 0.0

    async def changed(self) -> None:
        await anyio.lowlevel.checkpoint()


def test_a_main_supervisor_that_was_started_anew_at_once_is_joined_anew(tmp_path: Path) -> None:
    build(spread(), run_id="r", directory=tmp_path, seed=1).save()
    topic = Topic()

    class Done:
        over = ""

        def follow(self, orders: HostOrders) -> None:
            assert orders.session == "rack.1"
            topic.publisher = "supervisor.2"
            topic.latest["orders:rack"] = HostOrders(session="rack.2")

    topic.latest["orders:rack"] = HostOrders(session="rack.1")
    stay = join.HostSession(joined(tmp_path, "rack"), ProcessHost(tmp_path), "rack.1")

    async def follow() -> None:
        with anyio.fail_after(10):
            assert await stay.follow(topic, Done()) is None  # type: ignore[arg-type]

    anyio.run(follow)


@in_virtual_time
async def test_a_machine_that_stays_away_ends_the_run_with_a_remedy(pair: Pair) -> None:
    part = pair.machine.start("a", "a.1")
    pair.clock.now = 60.0
    part.kill()
    assert pair.machine.look(float("inf")) == ""
    pair.clock.now = 61.0
    assert pair.machine.look(float("inf")) == "given_up"
    assert "expected it to take part; start `sparring join` there" in await part.wait()
    assert part.hopeless


@in_virtual_time
async def test_what_was_never_ordered_ends_at_once_when_it_is_stopped(pair: Pair) -> None:
    part = pair.machine.start("a", "a.1")
    part.stop()
    assert await part.wait() == ""
    pair.join()
    await pair.talk()
    assert pair.processes == []


@in_virtual_time
async def test_the_end_of_the_run_is_heard_and_said_to_be(pair: Pair) -> None:
    pair.join()
    await pair.talk()
    pair.machine.end("completed")
    await pair.talk()
    assert pair.machine.released.is_set()
    assert pair.orderly is not None
    assert pair.orderly.over == "completed"


@in_virtual_time
async def test_a_part_that_can_not_be_started_says_why(pair: Pair) -> None:
    def refuse(name: str, order: PartOrder) -> HostedService:
        raise OSError("no such program")

    part = pair.machine.start("a", "a.1")
    pair.orderly = OrderExecutor("rack.1", refuse, pair.states.append, pair.tasks)
    await pair.talk()
    assert await part.wait() == "cannot be started: no such program"
    assert part.hopeless


_EVENTS = ("start", "start", "talk", "talk", "talk", "stop", "kill", "crash", "join", "away", "frozen", "late")


@settings(max_examples=50)
@given(st.lists(st.sampled_from(_EVENTS), max_size=30))
def test_whatever_happens_no_start_is_carried_out_twice_and_one_of_a_part_lives_at_a_time(events: list[str]) -> None:
    async def live(pair: Pair) -> None:
        part: Any = None
        seen: list[HostOrders] = []
        for number, event in enumerate(events):
            if event == "start" and (part is None or part.ended):
                part = pair.machine.start("a", f"a.{number}")
            elif event in ("stop", "kill") and part is not None:
                getattr(part, event)()
            elif event == "crash" and pair.processes:
                pair.processes[-1][2].ended.set()
            elif event == "join":
                pair.join()
            elif event == "away":
                pair.machine.look(AWAY_S + 1)
                if pair.orderly is not None:  # it has noticed too, and ended what it ran
                    pair.join()
            elif event == "frozen":  # it was away for the main machine only
                pair.machine.look(AWAY_S + 1)
            elif event == "late" and seen and pair.orderly is not None:
                pair.orderly.follow(seen[0])  # an update that was long under way
            elif event == "talk":
                await pair.talk()
            if pair.orders is not None:
                seen.append(pair.orders)
            starts = [start for _, start, _ in pair.processes]
            assert len(starts) == len(set(starts))
            assert len(pair.running) <= 1

    in_virtual_time(live)()
