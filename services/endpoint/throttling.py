"""The endpoint limits how fast a simulator is read and how much of its data is held, without closing its connection.

A peer that sends too much is read more slowly: its own system then makes it wait, and no data are lost. Requests that
waiting cannot repair are rejected (`pipeline/stepping/limits.py`).
"""

from collections.abc import Callable
from typing import Final

import anyio

from sparring.pipeline.messages.simulator import SimulatorMessage, Step
from sparring.pipeline.stepping.limits import LimitSettings

OWN_BYTES: Final = 2**18
"""Bytes that each connection may hold without reservation: a usual message, or one read of its socket."""

_BURST_S: Final = 1.0
"""Seconds whose rate a simulator may use at once."""


class LeakyBucket:
    """A LeakyBucket limits a rate: it fills with the units taken and leaks at that rate.

    Args:
        rate: units per second.
        burst: units that may arrive at once.
        now: seconds.
    """

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._level = 0.0
        self._at = now

    def take(self, units: float, now: float) -> float:
        """Counts `units`; returns the seconds to wait until the next may be taken."""
        self._level = max(0.0, self._level - (now - self._at) * self._rate) + units
        self._at = now
        return max(0.0, (self._level - self._burst) / self._rate)


class Pool:
    """A Pool limits the bytes that incoming large messages of all simulators hold together.

    A simulator with a reservation can finish its message and has a deadline for it, so the others follow in turn.

    Args:
        size: bytes; a single larger message is admitted alone.

    Attributes:
        taken: bytes in use.
    """

    def __init__(self, size: int) -> None:
        self.taken = 0
        self._size = size
        self._turn = anyio.Lock(fast_acquire=True)  # in order: small messages must not delay a large one for ever
        self._given = anyio.Event()

    async def take(self, size: int) -> None:
        """Waits for `size` bytes, in turn. A cancellation leaves nothing reserved."""
        async with self._turn:
            while self.taken and self.taken + size > self._size:
                self._given = anyio.Event()
                await self._given.wait()
            self.taken += size

    def give(self, size: int) -> None:
        """Returns bytes."""
        self.taken -= size
        self._given.set()


class ReadThrottle:
    """A ReadThrottle limits the reading of one simulator.

    Args:
        limits: of the stepping process.
        pool: shared by all its simulators.
        clock: seconds, monotonic.
    """

    def __init__(self, limits: LimitSettings, pool: Pool, clock: Callable[[], float]) -> None:
        now = clock()
        self._clock = clock
        self._pool = pool
        self._steps = LeakyBucket(limits.steps_per_s, _BURST_S * limits.steps_per_s, now)
        self._asides = LeakyBucket(limits.asides_per_s, _BURST_S * limits.asides_per_s, now)
        self._bytes = LeakyBucket(limits.bytes_per_s, max(_BURST_S * limits.bytes_per_s, OWN_BYTES), now)
        self._reserved = 0

    def note_bytes(self, size: int) -> float:
        """Counts received bytes; returns the seconds to wait before more are read."""
        return self._bytes.take(size, self._clock())

    def note_message(self, message: SimulatorMessage) -> float:
        """Counts a message; returns the seconds to wait before the next one is handled."""
        bucket = self._steps if isinstance(message, Step) else self._asides
        return bucket.take(1, self._clock())

    def note_asides(self, frames: int) -> float:
        """Counts frames of a WebSocket that are no message; returns the seconds to wait before more are read."""
        return self._asides.take(frames, self._clock())

    def needs_reservation(self, size: int) -> bool:
        """Returns whether the reservation does not match an incoming message of `size` bytes."""
        return self._wanted(size) != self._reserved

    async def reserve(self, size: int) -> None:
        """Returns the former reservation and waits until the incoming message may be held whole."""
        self.close()
        if wanted := self._wanted(size):
            await self._pool.take(wanted)
            self._reserved = wanted

    def close(self) -> None:
        """Returns the reservation of this simulator."""
        reserved, self._reserved = self._reserved, 0
        if reserved:
            self._pool.give(reserved)

    def _wanted(self, size: int) -> int:
        return size if size > OWN_BYTES else 0
