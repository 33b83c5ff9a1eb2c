"""What strikes a world, at its time, and what undoes it."""

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
"""Of what is slow: it runs for a share of each such time."""


class Crash(BaseException):
    """The process of a part ends where it is."""


class Troubles:
    """All faults of a world.

    Args:
        world: that they strike.

    Attributes:
        jumps: by part, seconds that its wall clock is off.
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
            "weather": self._weather,
            "reset": self._reset,
            "full disk": self._fill,
            "torn write": self._tear,
            "clock": self._jump,
        }

    async def come(self) -> None:
        """Strikes with each fault at its time."""
        with self._scope:
            async with anyio.create_task_group() as tasks:
                for fault in self._world.plan.faults:
                    tasks.start_soon(self._strike, fault)

    async def end(self, over: trio.Event) -> None:
        """Once the run is over there is room on the disk and links are whole: last words that are lost are missing.

        Parts still crash, hang and are slow while it stops.
        """
        await over.wait()
        self._over = True
        self._full.clear()
        self._torn.clear()
        for pair in [*self._world.network.weather]:
            self._world.network.clear(pair)

    def cease(self) -> None:
        """The supervisor is gone: who hangs cannot end otherwise."""
        self._scope.cancel()
        for part in self._world.plan.setting.parts:
            self._world.queue.resume(part, forget=True)

    def put(self, file: Any, data: bytes) -> None:
        """Writes to a disk that may be full, or whose writer may die meanwhile."""
        part = PART.get()
        if part in self._full or part in self._torn:
            file.write(data[: len(data) // 2])
        if part in self._full:
            raise OSError(errno.ENOSPC, "No space left on device")
        if part in self._torn:
            self._torn.discard(part)
            self._world.watch.line(f"{part} dies in the middle of a write")
            self._world.hosted[part].kill()
            raise Crash
        file.write(data)

    async def _strike(self, fault: Fault) -> None:
        await anyio.sleep(fault.at)
        if self._over and fault.kind in ("weather", "full disk", "torn write"):
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

    async def _weather(self, fault: Fault, _: str) -> None:
        pair, network = frozenset(fault.parts), self._world.network
        network.weather[pair] = fault.weather
        await anyio.sleep(fault.until - fault.at)
        network.clear(pair)

    async def _reset(self, _: Fault, part: str) -> None:
        if part in self._world.doors.links:
            self._world.doors.links[part].reset()

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
