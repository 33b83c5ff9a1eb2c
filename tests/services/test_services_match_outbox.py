"""Stepping keeps the results of matches until coordination has them on disk, whoever restarts meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.abc import TaskGroup, TaskStatus
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from sparring.pipeline.coordination.coordinator import Coordinator
from sparring.pipeline.messages.channels import RESULTS
from sparring.pipeline.messages.matches import Results
from sparring.pipeline.messages.state import BehaviorSpecs, SteppingState
from sparring.pipeline.monitoring.metrics import Registry
from sparring.pipeline.monitoring.progress import ProgressTracker
from sparring.pipeline.queues.interface import Capacity, Delivery
from sparring.pipeline.queues.memory import MemoryHub, MemoryTransport
from sparring.services.stages.outboxes import MatchOutbox

SOURCE = "stepping-0.1"


class EndedMatches:
    """The matches of a stepping process that have ended, in place of `Matches`."""

    def __init__(self) -> None:
        self.ended = 0
        self._taken = 0

    def take(self, source: str) -> list[Results]:
        """Returns one record of each match that ended since the last call."""
        found = [result(source, number) for number in range(self._taken, self.ended)]
        self._taken = self.ended
        return found


def result(source: str, number: int) -> Results:
    """Returns the result of one match."""
    ids, none = np.array([number], np.int64), np.empty(0, np.float32)
    rows = np.zeros(1, np.int32)
    return Results(
        source=source,
        behavior="Goal",
        before=number,
        numbers=ids,
        matchups=ids,
        simulators=rows,
        row_counts=rows,
        names=(),
        who=rows[:0],
        scores=none,
        explicit=rows[:0],
        rewards=none,
    )


class Scene:
    """One stepping process, and incarnations of coordination one after the other.

    Args:
        hub: of their queue.
        messages: capacity of the queue.
        tasks: runs the outbox.
    """

    def __init__(self, hub: MemoryHub, messages: int, tasks: TaskGroup) -> None:
        self.hub = hub
        self.capacity = Capacity(messages=messages, steps=100)
        self.matches: Any = EndedMatches()
        self.disk: list[int] = []
        self.received: list[int] = []  # by the present coordination
        self.first = 0  # number of the result that it receives first
        self._unsaved: list[Delivery[Results]] = []
        self._tasks = tasks
        self._incarnations = 0

    async def begin(self, transport: MemoryTransport) -> None:
        progress = ProgressTracker(Registry("stepping-0", SOURCE), anyio.current_time)
        context: Any = SimpleNamespace(start=SOURCE, progress=progress)
        self.outbox = MatchOutbox(context, self.matches, await transport.sender(RESULTS))
        self._tasks.start_soon(self.outbox.send)
        await self.restart()

    async def restart(self) -> None:
        """Replaces coordination; the former one, if any, dies with what it has received and not saved."""
        if self._incarnations:
            self.death.set()
            await anyio.sleep(1)
        self._incarnations += 1
        self.received, self._unsaved, self.first = [], [], len(self.disk)
        await self._tasks.start(self._coordinate)
        await anyio.sleep(1)

    async def _coordinate(self, *, task_status: TaskStatus[None]) -> None:
        """Holds the receiving end of one incarnation of coordination until its death."""
        async with MemoryTransport(self.hub, start=f"coordination.{self._incarnations}") as transport:
            self.receiver, self.death = await transport.receiver(RESULTS, self.capacity), anyio.Event()
            task_status.started()
            await self.death.wait()
            transport.abandon()

    async def end_matches(self, n: int) -> None:
        """Ends `n` matches in one tick of stepping."""
        self.matches.ended += n
        self.outbox.gather()
        await anyio.sleep(1)

    async def receive(self, most: int) -> None:
        """Lets coordination count up to `most` results."""
        while most and not self.receiver.empty():
            delivery = self.receiver.receive_nowait()
            self._unsaved.append(delivery)
            self.received += delivery.record.numbers.tolist()
            most -= 1
            await anyio.sleep(1)

    async def save(self) -> None:
        """Writes what coordination has counted to its disk, and acknowledges it."""
        for delivery in self._unsaved:
            self.disk += delivery.record.numbers.tolist()
            delivery.acknowledge()
        self._unsaved = []
        await anyio.sleep(1)


async def in_scene(messages: int, play: Any) -> None:
    """Plays a scene in virtual time."""
    with anyio.fail_after(10_000):
        hub = MemoryHub()
        async with MemoryTransport(hub, start=SOURCE) as transport, anyio.create_task_group() as tasks:
            scene = Scene(hub, messages, tasks)
            await scene.begin(transport)
            await play(scene)
            tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_a_result_is_kept_until_it_is_on_disk() -> None:
    """A result that coordination has counted dies with it, and comes again; one on its disk does not."""

    async def play(scene: Scene) -> None:
        await scene.end_matches(3)
        await scene.receive(2)
        await scene.save()
        await scene.receive(1)
        await scene.restart()
        assert scene.disk == [0, 1]
        await scene.receive(9)
        assert scene.received == [2]

    await in_scene(10, play)


@pytest.mark.anyio
async def test_results_that_wait_for_credit_do_not_overtake_those_sent_again() -> None:
    """The queue is full when coordination dies: its successor receives the oldest result first."""

    async def play(scene: Scene) -> None:
        await scene.end_matches(5)
        await scene.receive(1)
        await scene.restart()
        await scene.receive(9)
        assert scene.received == [0, 1]
        await scene.save()
        await scene.receive(9)
        assert scene.received == [0, 1, 2, 3]

    await in_scene(2, play)


@pytest.mark.anyio
async def test_the_end_of_a_run_waits_for_the_disk() -> None:
    """Results that coordination has counted, and not saved, do not end the wait."""

    async def play(scene: Scene) -> None:
        await scene.end_matches(2)
        await scene.receive(2)
        with anyio.move_on_after(100) as waiting:
            await scene.outbox.drain()
        assert waiting.cancelled_caught
        await scene.save()
        await scene.outbox.drain()
        assert scene.disk == [0, 1]

    await in_scene(10, play)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("end"), st.integers(1, 4)),
        st.tuples(st.just("receive"), st.integers(1, 4)),
        st.just(("save", 0)),
        st.just(("restart", 0)),
    ),
    max_size=25,
)


@settings(max_examples=30)
@given(events=EVENTS, messages=st.integers(1, 6))
def test_every_result_reaches_the_disk_once_and_in_order(events: list[tuple[str, int]], messages: int) -> None:
    """Whenever coordination dies, its successor receives all results that are not on disk, from the first on."""

    async def play(scene: Scene) -> None:
        for event, n in [*events, *[("receive", 9), ("save", 0)] * 120]:
            before = len(scene.disk)
            if event == "end":
                await scene.end_matches(n)
            elif event == "receive":
                await scene.receive(n)
                assert scene.received == list(range(scene.first, scene.first + len(scene.received)))
            elif event == "save":
                await scene.save()
            else:
                await scene.restart()
            assert scene.disk == list(range(len(scene.disk)))
            assert len(scene.disk) >= before
        assert len(scene.disk) == scene.matches.ended

    anyio.run(in_scene, messages, play, backend="trio", backend_options={"clock": MockClock(autojump_threshold=0)})


# ---------------------------------------------------------------- what dies unread


def reported(source: str, matches: int) -> SteppingState:
    """Returns the state of a stepping process that has reported so many matches."""
    return SteppingState(source=source, behaviors={}, simulators=1, deterministic=False, matches=matches)


def test_results_that_die_unread_with_stepping_are_counted() -> None:
    """Of seven results coordination has counted four; the others are open while stepping lives, then lost."""
    counted = {SOURCE: 4}
    ghosts: Any = SimpleNamespace(
        received=lambda source: counted.get(source, 0), stepped=lambda *_: None, ratings=dict, rules=None
    )
    coordinator = Coordinator("coordination.1", ghosts=ghosts)
    nothing = BehaviorSpecs(behaviors={}, teams={})
    coordinator.on_stepping_state(nothing, reported(SOURCE, 7))
    assert coordinator.state().matches_lost == 0
    coordinator.on_stepping_state(nothing, reported("stepping-0.2", 2))
    assert coordinator.state().matches_lost == 3
    counted["stepping-0.2"] = 2
    coordinator.on_stepping_state(nothing, reported("stepping-0.3", 0))
    assert coordinator.state().matches_lost == 3
