"""Other machines run parts of a run: the main machine publishes orders, and an executor there starts processes.

    main machine                                   other machine
    Machine.start(part) --- HostOrders(session) ---> OrderExecutor.follow: starts, stops, kills
    RemotePart.wait    <--- HostState(session) ----- OrderExecutor.publish_state

A machine that loses contact ends all parts that it has started, and these count as failed; it rejoins with a new
session and gets new orders. So no part runs twice, and no order is executed twice.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import anyio
from anyio.abc import TaskGroup

from sparring.pipeline.messages.hosts import HostOrders, HostState, PartOrder, PartState
from sparring.services.process.hosting import HostedService

SILENT_S: Final = 3.5
"""Seconds without a message of the main machine after which a machine ends its parts."""

AWAY_S: Final = 8.0
"""Seconds of silence after which a machine counts as away: by then it has ended its parts."""


@dataclass
class RemotePart:
    """A RemotePart is one incarnation of a part on another machine, as `HostedService` describes.

    Attributes:
        order: what its machine is to do.
        changed: called when the order has changed.
        ordered: the order was published.
        cpu_s: None, because its machine does not report it.
        ended: set at its end.
    """

    order: PartOrder
    changed: Callable[[], None]
    ordered: bool = field(default=False, init=False)
    cpu_s: None = field(default=None, init=False)
    ended: anyio.Event = field(default_factory=anyio.Event, init=False)

    def __post_init__(self) -> None:
        self._state = PartState(number=self.order.number)

    @property
    def pid(self) -> int | None:
        """Returns its process id on its machine; None before it was started there."""
        return self._state.pid or None

    @property
    def hopeless(self) -> bool:
        """Returns whether it ended in a way that a restart cannot repair."""
        return self._state.hopeless

    async def wait(self) -> str:
        """Waits for its end; returns "" where it ended in order, else what went wrong."""
        await self.ended.wait()
        return self._state.failure

    def stop(self) -> None:
        """Asks it to end in order; where its order was not published yet, it never starts."""
        self._change_order(dataclasses.replace(self.order, stop=True))
        if not self.ordered:
            self.update(dataclasses.replace(self._state, ended=True))

    def kill(self) -> None:
        """Ends it at once; does nothing where its order was not published yet."""
        self._change_order(dataclasses.replace(self.order, kill=self.ordered))

    def update(self, state: PartState) -> None:
        """Adopts the state that its machine reports."""
        if state.number == self.order.number and not self.ended.is_set():
            self._state = state
            if state.ended:
                self.ended.set()

    def fail(self, failure: str, *, hopeless: bool = False) -> None:
        """Marks it as failed because its machine is away."""
        self.update(dataclasses.replace(self._state, ended=True, failure=failure, hopeless=hopeless))

    def _change_order(self, order: PartOrder) -> None:
        if order != self.order and not self.ended.is_set():
            self.order = order
            self.changed()


@dataclass
class Machine:
    """A Machine represents another machine on the main one.

    Attributes:
        name: of the host.
        publish: publishes its orders.
        clock: seconds, monotonic.
        host_timeout_s: seconds that it may be away before its parts fail for good.
        session: its session; "" while it is away.
        released: set when it knows that the run has ended, or is away then.
    """

    name: str
    publish: Callable[[HostOrders], None]
    clock: Callable[[], float]
    host_timeout_s: float
    session: str = field(default="", init=False)
    released: anyio.Event = field(default_factory=anyio.Event, init=False)
    _parts: dict[str, RemotePart] = field(default_factory=dict, init=False)
    _over: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._away_since = self.clock()

    def start(self, part: str, start: str = "", *, first: bool = False) -> HostedService:
        """Starts a part there, as soon as the machine has joined."""
        number = self._parts[part].order.number + 1 if part in self._parts else 1
        remote = RemotePart(PartOrder(number=number, start=start, first=first), self._publish_orders)
        self._parts[part] = remote
        self._publish_orders()
        return remote

    def on_state(self, state: HostState) -> bool:
        """Adopts the state that the machine reports; returns whether it has just joined."""
        joined = state.session != self.session
        if joined:
            self._fail_ordered(f"{self.name} has rejoined")
            self.session = state.session
            self._publish_orders()
        for name, one in state.parts.items():
            if name in self._parts and self._parts[name].ordered:
                self._parts[name].update(one)
        if state.over:
            self.released.set()
        return joined

    def check(self, silent_s: float) -> str:
        """Checks whether the machine is present.

        Args:
            silent_s: seconds since its last message.

        Returns:
            The change since the last check: "away", "given_up", or "" for none.
        """
        now = self.clock()
        if self.session and silent_s > AWAY_S:
            self.session = ""
            self._away_since = now
            self._fail_ordered(f"{self.name} was silent for {silent_s:.0f} s")
            return "away"
        waiting = [part for part in self._parts.values() if not part.ended.is_set()]
        if not self.session and waiting and now - self._away_since > self.host_timeout_s:
            for part in waiting:
                part.fail(
                    f"got no message from the host {self.name} for {self.host_timeout_s:g} s; "
                    "expected it to take part; start `sparring join` there",
                    hopeless=True,
                )
            return "given_up"
        return ""

    def end(self, status: str) -> None:
        """Publishes the end of the run; `released` is set when the machine knows of it, or is away."""
        self._over = status
        self._publish_orders()
        if not self.session:
            self.released.set()

    def _fail_ordered(self, why: str) -> None:
        """Marks the parts ordered in the former session as failed."""
        for part in self._parts.values():
            if part.ordered:
                part.fail(why)

    def _publish_orders(self) -> None:
        if not self.session:
            return
        running = {name: part for name, part in self._parts.items() if not part.ended.is_set()}
        for part in running.values():
            part.ordered = True
        orders = {name: part.order for name, part in running.items()}
        self.publish(HostOrders(session=self.session, parts=orders, over=self._over))


@dataclass
class OrderExecutor:
    """An OrderExecutor executes orders on a machine.

    Attributes:
        session: session of the machine.
        start: starts a part by its name.
        publish: publishes the state of the machine.
        tasks: task group that waits for the ends of parts.
        over: how the run ended; "" while it continues.
    """

    session: str
    start: Callable[[str, PartOrder], HostedService]
    publish: Callable[[HostState], None]
    tasks: TaskGroup
    over: str = field(default="", init=False)
    _hosted: dict[str, HostedService] = field(default_factory=dict, init=False)
    _states: dict[str, PartState] = field(default_factory=dict, init=False)
    _orders: dict[str, PartOrder] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.publish_state()

    def follow(self, orders: HostOrders) -> None:
        """Executes new orders."""
        if orders.session != self.session:
            return
        for name, order in orders.parts.items():
            self._execute(name, order)
        if orders.over and not self.over:
            self.over = orders.over
            self.publish_state()

    def _execute(self, name: str, order: PartOrder) -> None:
        before, state = self._orders.get(name), self._states.get(name)
        if before is not None and order.number < before.number:
            return
        self._orders[name] = order
        if state is None or state.ended:
            if state is None or order.number > state.number:
                self._begin(name, order)
        elif order.kill or order.number > state.number:  # a new one begins when the former has ended
            self._hosted[name].kill()
        elif order.stop and before is not None and not before.stop:
            self._hosted[name].stop()

    def _begin(self, name: str, order: PartOrder) -> None:
        state = PartState(number=order.number)
        if order.stop or order.kill:
            self._note(name, dataclasses.replace(state, ended=True))
            return
        try:
            hosted = self._hosted[name] = self.start(name, order)
        except Exception as error:
            failure = f"cannot be started: {error}"
            self._note(name, dataclasses.replace(state, ended=True, failure=failure, hopeless=True))
        else:
            self._note(name, dataclasses.replace(state, pid=hosted.pid or 0))
            self.tasks.start_soon(self._await, name, hosted)

    async def _await(self, name: str, hosted: HostedService) -> None:
        failure, state = await hosted.wait(), self._states[name]
        self._note(name, dataclasses.replace(state, ended=True, failure=failure[:2000], hopeless=hosted.hopeless))
        self._execute(name, self._orders[name])

    def _note(self, name: str, state: PartState) -> None:
        self._states[name] = state
        self.publish_state()

    def publish_state(self) -> None:
        """Publishes the state of the machine."""
        self.publish(HostState(session=self.session, parts=dict(self._states), over=bool(self.over)))
