"""A simulated service process, which the supervisor starts, a fault can kill, and whose threads take virtual time."""

from __future__ import annotations

import errno
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import anyio
import trio

from sparring.pipeline.errors import SparringError, first_failure
from sparring.services.process.runtime import Context
from sparring.services.supervision.topology import ServicePlan
from tests.world.world_faults import Crash
from tests.world.world_learner import TRAINING
from tests.world.world_schedule import PART
from tests.world.world_transport import WorldTransport

if TYPE_CHECKING:
    from tests.world.world_run import World

EXIT_S: Final = 0.05
"""Time that a process takes to end, within which its final report arrives."""


class Log:
    """The logger of a service, which keeps its lines to explain violations."""

    def __init__(self, world: World, part: str) -> None:
        self._watch = world.watch
        self._part = part
        self._folder = str(world.folder)

    def bind(self, **_: Any) -> Log:
        return self

    def info(self, event: str, **about: Any) -> None:
        self._watch.line(f"{self._part} {event} {about}".replace(self._folder, "RUN"))

    warning = error = info


class HostedService:
    """One incarnation of a service."""

    pid = cpu_s = None
    starved_s = 0.0

    def __init__(self, world: World, plan: ServicePlan, start: str, *, first: bool) -> None:
        self.world, self.plan, self.start, self.first = world, plan, start, first
        self.stopping, self.ended = anyio.Event(), anyio.Event()
        self.scope = anyio.CancelScope()
        self.computing: set[anyio.CancelScope] = set()
        self.transport: WorldTransport | None = None
        self.context: Context | None = None
        self.killed = self.hopeless = False
        self.failure = ""

    @property
    def waiting_for(self) -> str:
        """Returns what the service reports to wait for; "" for nothing."""
        return "" if self.context is None else self.context.progress.waiting_for

    async def wait(self) -> str:
        await self.ended.wait()
        return self.failure

    def stop(self) -> None:
        self.stopping.set()

    def kill(self) -> None:
        """Ends the service without notice, as SIGKILL does."""
        if self.killed or self.ended.is_set():
            return
        self.killed = True
        self.failure = "signal SIGKILL"
        self._record_failure()
        if self.transport is not None:
            self.transport.abandon()
        self.scope.cancel()
        for scope in [*self.computing]:
            scope.cancel()
        self.world.queue.resume(self.plan.name, forget=True)

    def _record_failure(self) -> None:
        self.world.failed_stages[self.plan.name.partition("-")[0]] += 1

    async def compute(self, work: Callable[[], Any]) -> Any:
        """Computes as a worker thread does, in virtual time that only the end of the process shortens."""
        longest = self.world.plan.setting.update_s
        with anyio.CancelScope(shield=True) as scope:
            self.computing.add(scope)
            try:
                await anyio.sleep(self.world.chance.uniform(0.0, longest))
                result = work()
                await anyio.sleep(self.world.chance.uniform(0.0, longest))
            finally:
                self.computing.discard(scope)
        if self.killed:
            raise Crash  # in spite of any shield
        return result

    async def serve(self) -> None:
        """Runs the service to its end."""
        PART.set(self.plan.name)
        TRAINING.set(self.world.watch)
        try:
            with self.scope:
                await self._run()
        except (Exception, BaseExceptionGroup, Crash) as failure:
            self._failed(failure)
        self.world.queue.resume(self.plan.name, forget=True)
        await anyio.sleep(EXIT_S)
        self.ended.set()

    async def _run(self) -> None:
        world = self.world
        transport = WorldTransport(
            world.network, self.plan.name, self.start, lambda: world.opened(self.plan.name), world.created
        )
        async with transport:
            self.transport = transport
            self.context = context = Context(
                run=world.run,
                service=self.plan.name,
                start=self.start,
                first=self.first,
                transport=transport,
                stop=self.stopping,
                log=Log(world, self.plan.name),
                clock=trio.current_time,
                wall_clock=lambda: world.wall(self.plan.name),
                compute=self.compute,
                listen=world.listeners.listen(self.plan.name),
            )
            await self.plan.load()(context)

    def _failed(self, failure: BaseException) -> None:
        """Records the service's own failure, unless it was killed."""
        if self.killed:
            return
        error = first_failure(failure)
        self._record_failure()
        self.failure = f"{type(error).__name__}: {error}"
        self.hopeless = isinstance(error, SparringError)
        planned = isinstance(error, OSError) and error.errno == errno.ENOSPC
        self.world.watch.line(f"{self.plan.name} failed: {self.failure}")
        if not planned:
            trace = "".join(traceback.format_exception(error))
            self.world.watch.require(False, "deaths", f"{self.plan.name} failed:\n{trace}")
