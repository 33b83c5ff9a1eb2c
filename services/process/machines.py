"""The parts of a run that another machine runs: orders on one side, processes on the other.

    main machine                                   other machine
    Machine.start(part) --- HostOrders(session) ---> Orderly.follow: starts, stops, kills
    RemotePart.wait    <--- HostState(session) ----- Orderly.state

A machine that falls silent ends all it has started, and its parts count as failed; when it is back, it has a new
session and gets new orders. So no part ever runs twice, and no order is carried out twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

import anyio
from anyio.abc import TaskGroup

from sparring.pipeline.messages.hosts import HostOrders, HostState, PartOrder, PartState
from sparring.services.process.hosting import HostedService

SILENT_S: Final = 3.5
"""A machine that has not heard from the main one for so long ends what it runs."""

AWAY_S: Final = 8.0
"""A machine that was not heard for so long is away: by then it has ended what it ran."""


class RemotePart:
    """One start of a part on another machine. As `HostedService` describes."""

    def __init__(self, order: PartOrder, changed: Callable[[], None]) -> None:
        self.order = order
        self.ordered = False
        self._changed = changed
        self._ended = anyio.Event()
        self._state = PartState(number=order.number)

    @property
    def pid(self) -> int | None:
        """Its process id on its machine; None before it was started there."""
        return self._state.pid or None

    @property
    def hopeless(self) -> bool:
        """Whether a restart cannot mend it."""
        return self._state.hopeless

    @property
    def ended(self) -> bool:
        """Whether it runs no more."""
        return self._ended.is_set()

    async def wait(self) -> str:
        """Returns when it has ended."""
        await self._ended.wait()
        return self._state.failure

    def stop(self) -> None:
        """Asks it to end in order; where it was not ordered yet, nobody begins it."""
        self._ask(dataclasses.replace(self.order, stop=True))
        if not self.ordered:
            self.take(dataclasses.replace(self._state, ended=True))

    def kill(self) -> None:
        """Ends it at once; nothing where its machine is away and nothing runs."""
        self._ask(dataclasses.replace(self.order, kill=self.ordered))

    def take(self, state: PartState) -> None:
        """What its machine says of it."""
        if state.number == self.order.number and not self.ended:
            self._state = state
            if state.ended:
                self._ended.set()

    def fail(self, failure: str, *, hopeless: bool = False) -> None:
        """It has ended with its machine."""
        self.take(dataclasses.replace(self._state, ended=True, failure=failure, hopeless=hopeless))

    def _ask(self, order: PartOrder) -> None:
        if order != self.order and not self.ended:
            self.order = order
            self._changed()


class Machine:
    """Another machine, as the main one sees it.

    Args:
        name: of the host.
        publish: makes orders known to it.
        clock: seconds, rising.
        patience_s: how long it may be away before its parts are given up.
    """

    def __init__(
        self, name: str, publish: Callable[[HostOrders], None], clock: Callable[[], float], patience_s: float
    ) -> None:
        self.name = name
        self.session = ""
        self.released = anyio.Event()
        self._publish = publish
        self._clock = clock
        self._patience_s = patience_s
        self._away_since = clock()
        self._numbers: dict[str, int] = {}
        self._parts: dict[str, RemotePart] = {}
        self._over = ""

    def start(self, part: str, start: str = "", *, first: bool = False) -> HostedService:
        """Starts a part there, as soon as the machine is there."""
        number = self._numbers[part] = self._numbers.get(part, 0) + 1
        remote = RemotePart(PartOrder(number=number, start=start, first=first), self._tell)
        self._parts[part] = remote
        self._tell()
        return remote

    def heard(self, state: HostState) -> bool:
        """The machine has said how it fares. Returns whether it has just joined."""
        joined = state.session != self.session
        if joined:
            self._lose(f"{self.name} has joined anew")
            self.session = state.session
            self._tell()
        for name, one in state.parts.items():
            if name in self._parts and self._parts[name].ordered:
                self._parts[name].take(one)
        if state.over:
            self.released.set()
        return joined

    def look(self, heard_age_s: float) -> str:
        """Looks whether the machine is there.

        Args:
            heard_age_s: seconds since it was last heard.

        Returns:
            What has happened just now: "" mostly, "away", or "given_up".
        """
        now = self._clock()
        if self.session and heard_age_s > AWAY_S:
            self.session = ""
            self._away_since = now
            self._lose(f"{self.name} was not heard for {heard_age_s:.0f} s")
            return "away"
        waiting = [part for part in self._parts.values() if not part.ended]
        if not self.session and waiting and now - self._away_since > self._patience_s:
            for part in waiting:
                part.fail(
                    f"got no word from the host {self.name} for {self._patience_s:g} s; expected it to take part; "
                    "start `sparring join` there",
                    hopeless=True,
                )
            return "given_up"
        return ""

    def end(self, status: str) -> None:
        """The run has ended; `released` is set when the machine has heard it, or is away."""
        self._over = status
        self._tell()
        if not self.session:
            self.released.set()

    def _lose(self, why: str) -> None:
        """What was ordered in the former session runs no more."""
        for part in self._parts.values():
            if part.ordered:
                part.fail(why)

    def _tell(self) -> None:
        if not self.session:
            return
        living = {name: part for name, part in self._parts.items() if not part.ended}
        for part in living.values():
            part.ordered = True
        orders = {name: part.order for name, part in living.items()}
        self._publish(HostOrders(session=self.session, parts=orders, over=self._over))


class OrderExecutor:
    """Carries out orders on a machine.

    Args:
        session: this stay of the machine in the run.
        start: starts a part by its name.
        publish: makes known how the machine fares.
        tasks: that wait for the ends of parts.
    """

    def __init__(
        self,
        session: str,
        start: Callable[[str, PartOrder], HostedService],
        publish: Callable[[HostState], None],
        tasks: TaskGroup,
    ) -> None:
        self._session = session
        self._start = start
        self._publish = publish
        self._tasks = tasks
        self._hosted: dict[str, HostedService] = {}
        self._states: dict[str, PartState] = {}
        self._asked: dict[str, PartOrder] = {}
        self.over = ""
        self.tell()

    def follow(self, orders: HostOrders) -> None:
        """Does what is ordered and not done yet."""
        if orders.session != self._session:
            return
        for name, order in orders.parts.items():
            self._carry_out(name, order)
        if orders.over and not self.over:
            self.over = orders.over
            self.tell()

    def _carry_out(self, name: str, order: PartOrder) -> None:
        before, state = self._asked.get(name), self._states.get(name)
        if before is not None and order.number < before.number:
            return
        self._asked[name] = order
        if state is None or state.ended:
            if state is None or order.number > state.number:
                self._begin(name, order)
        elif order.kill or order.number > state.number:  # a new one begins when the former has ended
            self._hosted[name].kill()
        elif order.stop and before is not None and not before.stop:
            self._hosted[name].stop()

    def _begin(self, name: str, order: PartOrder) -> None:
        if order.stop or order.kill:
            self._note(name, PartState(number=order.number, ended=True))
            return
        try:
            hosted = self._hosted[name] = self._start(name, order)
        except Exception as error:
            failure = f"cannot be started: {error}"
            self._note(name, PartState(number=order.number, ended=True, failure=failure, hopeless=True))
            return
        self._note(name, PartState(number=order.number, pid=hosted.pid or 0))
        self._tasks.start_soon(self._await, name, hosted, order.number)

    async def _await(self, name: str, hosted: HostedService, number: int) -> None:
        failure = await hosted.wait()
        state = PartState(
            number=number, pid=hosted.pid or 0, ended=True, failure=failure[:2000], hopeless=hosted.hopeless
        )
        self._note(name, state)
        self._carry_out(name, self._asked[name])

    def _note(self, name: str, state: PartState) -> None:
        if name not in self._states or state.number >= self._states[name].number:
            self._states[name] = state
            self.tell()

    def tell(self) -> None:
        """Publishes how the machine fares."""
        self._publish(HostState(session=self._session, parts=dict(self._states), over=bool(self.over)))
