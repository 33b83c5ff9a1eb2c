"""Which slot each live agent has: found without a loop over agents.

A slot belongs to one agent's life. The common frame, the same ids as in the last one, costs one
comparison; an agent that ends and decides again in one frame keeps its slot and gets a new life.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Slots = NDArray[np.int32]

_FIRST_SLOTS: Final = 16
_EPISODE_COLUMNS: Final = ("live", "acted", "agents", "groups", "teams", "simulators", "carried")
_COLUMNS: Final = (*_EPISODE_COLUMNS, "learning", "ghosts", "matchups", "matches", "alone", "match_ids", "lessons")


class SlotTable:
    """The slots of one behavior name over all simulators.

    Args:
        limit: most agents alive at once.

    Attributes:
        ghosted: the behavior is under self-play; else all learn, and the columns after it say nothing.
        learning: [slots] its team learns in the match; the others are ghosts.
        ghosts: [slots] what acts for it: a version, or an opponent from elsewhere; 0 for the latest weights.
        matchups: [slots] number of the draw it plays under.
        matches: [slots] number of its match; 0 where it is one by itself that will not be told of.
        alone: [slots] it is a match by itself.
        match_ids: [slots] what its simulator calls the match.
        taught: there are curricula; else the column after it says nothing.
        lessons: [slots] serial of the lessons that its simulator had when its episode began.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.live: NDArray[np.bool_] = np.zeros(_FIRST_SLOTS, bool)
        self.acted: NDArray[np.bool_] = np.zeros(_FIRST_SLOTS, bool)
        self.agents: Ids = np.zeros(_FIRST_SLOTS, np.int64)
        self.groups: Ids = np.zeros(_FIRST_SLOTS, np.int64)
        self.teams: Slots = np.zeros(_FIRST_SLOTS, np.int32)
        self.simulators: Slots = np.zeros(_FIRST_SLOTS, np.int32)
        self.carried: NDArray[np.float32] = np.zeros((_FIRST_SLOTS, 0), np.float32)
        self.ghosted = False
        self.learning: NDArray[np.bool_] = np.ones(_FIRST_SLOTS, bool)
        self.ghosts: Ids = np.zeros(_FIRST_SLOTS, np.int64)
        self.matchups: Ids = np.zeros(_FIRST_SLOTS, np.int64)
        self.matches: Ids = np.zeros(_FIRST_SLOTS, np.int64)
        self.alone: NDArray[np.bool_] = np.zeros(_FIRST_SLOTS, bool)
        self.match_ids: Ids = np.zeros(_FIRST_SLOTS, np.int64)
        self.taught = False
        self.lessons: Ids = np.zeros(_FIRST_SLOTS, np.int64)
        self._agent_episodes = 0
        self._free: list[int] = list(range(_FIRST_SLOTS - 1, -1, -1))

    @property
    def taken(self) -> int:
        """Slots in use."""
        return len(self.live) - len(self._free)

    def take(self, n: int) -> Slots:
        """Takes `n` free slots, the lowest first.

        Raises:
            OverflowError: the limit would be passed.
        """
        if self.taken + n > self.limit:
            raise OverflowError
        while len(self._free) < n:
            self._grow()
        kept = len(self._free) - n
        taken = self._free[kept:][::-1]
        del self._free[kept:]
        return np.array(taken, np.int32)

    def give_back(self, slots: Slots) -> None:
        """Frees slots."""
        self.live[slots] = False
        self.acted[slots] = False
        self._free += slots[::-1].tolist()
        self._free.sort(reverse=True)

    def begin(self, slots: Slots, groups: Ids | int, team: int, simulator: int) -> None:
        """Starts a new life in each of `slots`, which carries nothing yet."""
        self.live[slots] = True
        self.acted[slots] = False
        self.agents[slots] = np.arange(self._agent_episodes + 1, self._agent_episodes + 1 + len(slots))
        self._agent_episodes += len(slots)
        self.groups[slots] = groups
        self.teams[slots] = team
        self.simulators[slots] = simulator
        self.carried[slots] = 0

    def carry(self, slots: Slots, numbers: int) -> NDArray[np.float32]:
        """[n, numbers] Copy of what the agents of `slots` carry from their last decision."""
        if (more := numbers - self.carried.shape[1]) > 0:  # known with the first weights, and those of each opponent
            self.carried = np.concatenate([self.carried, np.zeros((len(self.live), more), np.float32)], axis=1)
        return self.carried[slots, :numbers]

    def _grow(self) -> None:
        size = len(self.live)
        for name in _COLUMNS:
            column: NDArray[Any] = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self.learning[size:] = True
        self._free = [*range(2 * size - 1, size - 1, -1), *self._free]


class Roster:
    """The agents of one behavior id in one simulator: id to slot."""

    def __init__(self) -> None:
        self._ids: Ids = np.empty(0, np.int64)
        self._slots: Slots = np.empty(0, np.int32)
        self._last_ids: bytes | None = None
        self._last_slots: Slots = self._slots

    @property
    def slots(self) -> Slots:
        """Slots of all agents here."""
        return self._slots

    def last(self, ids: Ids) -> Slots | None:
        """[n] Slots of the ids last remembered, if these are the same row by row and none was removed since."""
        return self._last_slots if ids.tobytes() == self._last_ids else None

    def find(self, ids: Ids) -> Slots:
        """[n] Slot of each id, -1 where it is not here."""
        if not self._ids.size:
            return np.full(len(ids), -1, np.int32)
        at = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        return np.where(self._ids[at] == ids, self._slots[at], np.int32(-1))

    def add(self, ids: Ids, slots: Slots) -> None:
        """Enters new ids."""
        ids, slots = np.concatenate([self._ids, ids]), np.concatenate([self._slots, slots])
        order = np.argsort(ids, kind="stable")
        self._ids, self._slots = ids[order], slots[order]

    def remember(self, ids: Ids, slots: Slots) -> None:
        """Keeps what was found, for the next frame."""
        self._last_ids, self._last_slots = ids.tobytes(), slots

    def remove(self, slots: Slots) -> None:
        """Strikes out the agents of `slots`."""
        keep = ~np.isin(self._slots, slots)
        self._ids, self._slots = self._ids[keep], self._slots[keep]
        self._last_ids = None
