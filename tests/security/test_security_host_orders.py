"""A machine carries out each order once, and its services end before others replace them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.messages.hosts import HostOrders, HostState, PartOrder
from sparring.services.commands import join
from sparring.services.process.hosting import HostedService, ProcessHost
from sparring.services.process.machines import AWAY_S, Machine, OrderExecutor
from sparring.services.supervision.topology import build, load_topology
from tests.security.security_hosts import three_machines


class VirtualClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeProcess:
    """A process that runs until it is stopped."""

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


class TwoMachines:
    """The main machine's view of a machine and that machine itself, which exchange orders and states on request."""

    def __init__(self, tasks: Any) -> None:
        self.clock = VirtualClock()
        self.orders: HostOrders | None = None
        self.states: list[HostState] = []
        self.processes: list[tuple[str, str, FakeProcess]] = []
        self.machine = Machine("rack", self._order, self.clock, host_timeout_s=60.0)
        self.tasks = tasks
        self.executor: OrderExecutor | None = None
        self._sessions = 0

    def _order(self, orders: HostOrders) -> None:
        self.orders = orders

    def join(self) -> None:
        """The other machine joins, for the first time or again; what it ran before has ended."""
        for _, _, process in self.processes:
            process.ended.set()
        self._sessions += 1
        self.states = []  # reports of an earlier session are dropped
        self.executor = OrderExecutor(f"rack.{self._sessions}", self._start, self.states.append, self.tasks)

    def _start(self, name: str, order: PartOrder) -> HostedService:
        process = FakeProcess(100 + len(self.processes))
        self.processes.append((name, order.start, process))
        return process

    async def exchange(self) -> None:
        """Delivers the latest orders and the latest state."""
        for _ in range(3):
            await anyio.wait_all_tasks_blocked()
            if self.states:
                self.machine.on_state(self.states[-1])
            if self.orders is not None and self.executor is not None:
                self.executor.follow(self.orders)

    @property
    def running(self) -> list[str]:
        return [start for _, start, process in self.processes if not process.ended.is_set()]


def in_virtual_time(test: Callable[[TwoMachines], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        async def main() -> None:
            async with anyio.create_task_group() as tasks:
                await test(TwoMachines(tasks))
                tasks.cancel_scope.cancel()

        anyio.run(main, backend="trio")

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


@in_virtual_time
async def test_a_service_is_started_once_its_machine_has_joined(pair: TwoMachines) -> None:
    part = pair.machine.start("stepping-0", "stepping-0.1", first=True)
    assert pair.orders is None
    pair.join()
    await pair.exchange()
    await pair.exchange()
    assert pair.running == ["stepping-0.1"]
    assert part.pid == 100
    pair.processes[0][2].failure = "exit status 1"
    pair.processes[0][2].ended.set()
    await pair.exchange()
    assert await part.wait() == "exit status 1"
    pair.machine.start("stepping-0", "stepping-0.2")
    await pair.exchange()
    assert pair.running == ["stepping-0.2"]


@in_virtual_time
async def test_stop_and_kill_reach_the_process_once(pair: TwoMachines) -> None:
    stopped, killed = pair.machine.start("a", "a.1"), pair.machine.start("b", "b.1")
    pair.join()
    await pair.exchange()
    stopped.stop()
    killed.kill()
    await pair.exchange()
    await pair.exchange()
    assert [process.asked for _, _, process in pair.processes] == [["stop"], ["kill"]]
    assert (await stopped.wait(), await killed.wait()) == ("", "killed")


@in_virtual_time
async def test_services_of_a_silent_machine_end_and_it_gets_new_orders_when_it_returns(pair: TwoMachines) -> None:
    part = pair.machine.start("a", "a.1")
    pair.join()
    await pair.exchange()
    assert pair.machine.check(AWAY_S) == ""
    assert pair.machine.check(AWAY_S + 1) == "away"
    assert "was silent for 9 s" in await part.wait()
    pair.machine.start("a", "a.2")
    old = pair.orders
    pair.join()
    await pair.exchange()
    assert pair.running == ["a.2"]
    assert old is not None
    assert pair.executor is not None
    pair.executor.follow(old)
    assert pair.running == ["a.2"]


@in_virtual_time
async def test_a_machine_that_rejoins_before_it_was_missed_runs_nothing_twice(pair: TwoMachines) -> None:
    part = pair.machine.start("a", "a.1")
    pair.join()
    await pair.exchange()
    pair.join()
    await pair.exchange()
    assert await part.wait() == "rack has rejoined"
    pair.machine.start("a", "a.2")
    await pair.exchange()
    assert [start for _, start, _ in pair.processes] == ["a.1", "a.2"]


@in_virtual_time
async def test_a_machine_that_was_frozen_ends_its_processes_before_it_starts_new_ones(pair: TwoMachines) -> None:
    pair.machine.start("a", "a.1")
    pair.join()
    await pair.exchange()
    assert pair.machine.check(AWAY_S + 1) == "away"
    pair.machine.start("a", "a.2")
    await pair.exchange()
    await pair.exchange()
    assert pair.processes[0][2].asked[:1] == ["kill"]
    assert pair.running == ["a.2"]


class FakeSubscription:
    """A subscription to the topic of a supervisor."""

    def __init__(self) -> None:
        self.publisher = "supervisor.1"
        self.records: dict[str, Any] = {}
        self.heartbeat_age = 0.0

    def latest(self, topic: Any) -> Any:
        return self.records.get(topic.key)

    async def changed(self) -> None:
        await anyio.lowlevel.checkpoint()


def test_a_machine_rejoins_a_main_supervisor_that_restarted_at_once(tmp_path: Path) -> None:
    build(three_machines(), run_id="r", directory=tmp_path, seed=1).save()
    topic = FakeSubscription()

    class OneOrder:
        over = ""

        def follow(self, orders: HostOrders) -> None:
            assert orders.session == "rack.1"
            topic.publisher = "supervisor.2"
            topic.records["orders:rack"] = HostOrders(session="rack.2")

    topic.records["orders:rack"] = HostOrders(session="rack.1")
    session = join.HostSession(load_topology(tmp_path, "rack"), ProcessHost(tmp_path), "rack.1")

    async def follow() -> None:
        with anyio.fail_after(10):
            assert await session.follow(topic, OneOrder()) is None  # type: ignore[arg-type]

    anyio.run(follow)


@in_virtual_time
async def test_a_machine_that_stays_away_ends_the_run_with_a_remedy(pair: TwoMachines) -> None:
    part = pair.machine.start("a", "a.1")
    pair.clock.now = 60.0
    part.kill()
    assert pair.machine.check(float("inf")) == ""
    pair.clock.now = 61.0
    assert pair.machine.check(float("inf")) == "given_up"
    assert "expected it to take part; start `sparring join` there" in await part.wait()
    assert part.hopeless


@in_virtual_time
async def test_a_service_that_was_never_ordered_ends_at_once_when_it_is_stopped(pair: TwoMachines) -> None:
    part = pair.machine.start("a", "a.1")
    part.stop()
    assert await part.wait() == ""
    pair.join()
    await pair.exchange()
    assert pair.processes == []


@in_virtual_time
async def test_the_end_of_the_run_reaches_the_machine_and_is_acknowledged(pair: TwoMachines) -> None:
    pair.join()
    await pair.exchange()
    pair.machine.end("completed")
    await pair.exchange()
    assert pair.machine.released.is_set()
    assert pair.executor is not None
    assert pair.executor.over == "completed"


@in_virtual_time
async def test_a_service_that_cannot_be_started_reports_the_cause(pair: TwoMachines) -> None:
    def refuse(name: str, order: PartOrder) -> HostedService:
        raise OSError("no such program")

    part = pair.machine.start("a", "a.1")
    pair.executor = OrderExecutor("rack.1", refuse, pair.states.append, pair.tasks)
    await pair.exchange()
    assert await part.wait() == "cannot be started: no such program"
    assert part.hopeless


_EVENTS = (
    "start",
    "start",
    "exchange",
    "exchange",
    "exchange",
    "stop",
    "kill",
    "crash",
    "join",
    "away",
    "frozen",
    "late",
)


@settings(max_examples=25)
@given(st.lists(st.sampled_from(_EVENTS), max_size=30))
def test_no_order_is_carried_out_twice_and_one_process_of_a_service_runs_at_a_time(events: list[str]) -> None:
    async def run_events(pair: TwoMachines) -> None:
        part: Any = None
        seen: list[HostOrders] = []
        for number, event in enumerate(events):
            if event == "start" and (part is None or part.ended.is_set()):
                part = pair.machine.start("a", f"a.{number}")
            elif event in ("stop", "kill") and part is not None:
                getattr(part, event)()
            elif event == "crash" and pair.processes:
                pair.processes[-1][2].ended.set()
            elif event == "join":
                pair.join()
            elif event == "away":
                pair.machine.check(AWAY_S + 1)
                if pair.executor is not None:  # it has noticed too and ended what it ran
                    pair.join()
            elif event == "frozen":  # only the main machine saw it as away
                pair.machine.check(AWAY_S + 1)
            elif event == "late" and seen and pair.executor is not None:
                pair.executor.follow(seen[0])  # an update that was delayed for long
            elif event == "exchange":
                await pair.exchange()
            if pair.orders is not None:
                seen.append(pair.orders)
            starts = [start for _, start, _ in pair.processes]
            assert len(starts) == len(set(starts))
            assert len(pair.running) <= 1

    in_virtual_time(run_events)()
