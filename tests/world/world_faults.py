"""Injects the faults of a plan into a world and ends them."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import anyio
import trio

from tests.world.world_plan import Fault
from tests.world.world_schedule import PART

if TYPE_CHECKING:
    from tests.world.world_run import World

_SLICE_S: Final = 0.04
"""Period of a slow part, which runs for a share of each period."""


class Crash(BaseException):
    """Ends the process of a part at the current line."""


class FaultInjector:
    """All faults of a world.

    Args:
        world: the world to inject into.

    Attributes:
        jumps: offset of the wall clock by part, in seconds.
    """

    def __init__(self, world: World) -> None:
        self.jumps: dict[str, float] = {}
        self._world = world
        self._full: set[str] = set()
        self._torn: set[str] = set()
        self._scope = trio.CancelScope()
        self._over = False
        self._kinds: dict[str, Callable[[Fault, str], Any]] = {
            "crash": self._crash,
            "hang": self._hang,
            "slow": self._slow,
            "link": self._impair_link,
            "reset": self._reset,
            "full disk": self._fill,
            "torn write": self._tear,
            "clock": self._jump,
        }

    async def run(self) -> None:
        """Injects each fault at its time."""
        with self._scope:
            async with anyio.create_task_group() as tasks:
                for fault in self._world.plan.faults:
                    tasks.start_soon(self._inject, fault)

    async def end(self, over: trio.Event) -> None:
        """Frees the disk and repairs the links once the run is over, so that final reports arrive.

        Parts still crash, hang and run slowly while the run stops.
        """
        await over.wait()
        self._over = True
        self._full.clear()
        self._torn.clear()
        for pair in [*self._world.network.conditions]:
            self._world.network.clear(pair)

    def stop(self) -> None:
        """Resumes all parts that hang once the supervisor has ended, so that they can end."""
        self._scope.cancel()
        for part in self._world.plan.setting.parts:
            self._world.queue.resume(part, forget=True)

    def put(self, file: Any, data: bytes) -> None:
        """Writes to a disk that may be full, in a process that may die meanwhile."""
        part = PART.get()
        if part in self._full or part in self._torn:
            file.write(data[: len(data) // 2])
        if part in self._full:
            raise OSError(errno.ENOSPC, "No space left on device")
        if part in self._torn:
            self._torn.discard(part)
            self._world.watch.line(f"{part} dies amid a write")
            self._world.hosted[part].kill()
            raise Crash
        file.write(data)

    async def _inject(self, fault: Fault) -> None:
        await anyio.sleep(fault.at)
        if self._over and fault.kind in ("link", "full disk", "torn write"):
            return
        self._world.watch.line(f"FAULT {fault}")
        await self._kinds[fault.kind](fault, fault.parts[0] if fault.parts else "")

    async def _crash(self, _: Fault, part: str) -> None:
        world = self._world
        if part.startswith("simulator"):
            world.queue.resume(part, forget=True)
            world.agent_episodes[part].cancel()
        elif part in world.hosted:
            world.hosted[part].kill()

    async def _hang(self, fault: Fault, part: str) -> None:
        self._world.queue.hang(part)
        await anyio.sleep(fault.until - fault.at)
        self._world.queue.resume(part)

    async def _slow(self, fault: Fault, part: str) -> None:
        while trio.current_time() < fault.until:
            self._world.queue.hang(part)
            await anyio.sleep(_SLICE_S * (1 - fault.value))
            self._world.queue.resume(part)
            await anyio.sleep(_SLICE_S * fault.value)

    async def _impair_link(self, fault: Fault, _: str) -> None:
        pair, network = frozenset(fault.parts), self._world.network
        network.conditions[pair] = fault.conditions
        await anyio.sleep(fault.until - fault.at)
        network.clear(pair)

    async def _reset(self, _: Fault, part: str) -> None:
        if part in self._world.listeners.links:
            self._world.listeners.links[part].reset()

    async def _jump(self, fault: Fault, part: str) -> None:
        self.jumps[part] = self.jumps.get(part, 0.0) + fault.value

    async def _fill(self, fault: Fault, part: str) -> None:
        self._full.add(part)
        await anyio.sleep(fault.until - fault.at)
        self._full.discard(part)

    async def _tear(self, fault: Fault, part: str) -> None:
        self._torn.add(part)
        await anyio.sleep(fault.until - fault.at)
        self._torn.discard(part)
