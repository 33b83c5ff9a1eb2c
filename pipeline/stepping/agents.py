"""Tables map agent ids to slots without a loop over agents.

A slot belongs to one agent episode. A frame with the same ids as the last one costs a single comparison; an agent that
ends and decides again in one frame keeps its slot and begins a new episode.
"""

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.messages.state import StepAllowance
from sparring.pipeline.specs import BehaviorSpec

Ids = NDArray[np.int64]
Slots = NDArray[np.int32]

_FIRST_SLOTS: Final = 16


class SlotTable:
    """A SlotTable holds the slots of one behavior name over all simulators.

    Args:
        limit: maximum number of live agents.

    Attributes:
        has_ghosts: the behavior is under self-play; else all agents learn, and the next six columns are unused.
        learning: [slots] the agent's team learns in the match; the others are ghosts.
        ghosts: [slots] number of the policy that acts: a version or an external opponent; 0 for the latest weights.
        matchups: [slots] number of the matchup that the agent plays under.
        matches: [slots] number of its match; 0 where it is a match by itself whose result is not reported.
        alone: [slots] the agent is a match by itself.
        match_ids: [slots] match or group id from its simulator.
        has_curricula: the run has curricula; else the next column is unused.
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
        self.has_ghosts = False
        self.learning: NDArray[np.bool_] = np.ones(_FIRST_SLOTS, bool)
        self.ghosts: Ids = np.zeros(_FIRST_SLOTS, np.int64)
        self.matchups: Ids = np.zeros(_FIRST_SLOTS, np.int64)
        self.matches: Ids = np.zeros(_FIRST_SLOTS, np.int64)
        self.alone: NDArray[np.bool_] = np.zeros(_FIRST_SLOTS, bool)
        self.match_ids: Ids = np.zeros(_FIRST_SLOTS, np.int64)
        self.has_curricula = False
        self.lessons: Ids = np.zeros(_FIRST_SLOTS, np.int64)
        self._agent_episodes = 0
        self._free: list[int] = list(range(_FIRST_SLOTS - 1, -1, -1))

    @property
    def taken(self) -> int:
        """Returns the number of slots in use."""
        return len(self.live) - len(self._free)

    def take(self, n: int) -> Slots:
        """Takes `n` free slots, the lowest first.

        Raises:
            OverflowError: the limit would be exceeded.
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
        """Begins a new episode in each of `slots`, with nothing carried."""
        self.live[slots] = True
        self.acted[slots] = False
        self.agents[slots] = np.arange(self._agent_episodes + 1, self._agent_episodes + 1 + len(slots))
        self._agent_episodes += len(slots)
        self.groups[slots] = groups
        self.teams[slots] = team
        self.simulators[slots] = simulator
        self.carried[slots] = 0

    def carry(self, slots: Slots, numbers: int) -> NDArray[np.float32]:
        """Returns a copy, [n, numbers], of what the agents of `slots` carry from their last decision."""
        if (more := numbers - self.carried.shape[1]) > 0:  # each policy may need more
            self.carried = np.concatenate([self.carried, np.zeros((len(self.live), more), np.float32)], axis=1)
        return self.carried[slots, :numbers]

    def _grow(self) -> None:
        size = len(self.live)
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self.learning[size:] = True
        self._free = [*range(2 * size - 1, size - 1, -1), *self._free]


class Roster:
    """A Roster maps the agent ids of one behavior id in one simulator to slots.

    Attributes:
        slots: of all its agents.
    """

    def __init__(self) -> None:
        self._ids: Ids = np.empty(0, np.int64)
        self.slots: Slots = np.empty(0, np.int32)
        self._last_ids: bytes | None = None
        self._last_slots: Slots = self.slots

    def last(self, ids: Ids) -> Slots | None:
        """Returns the slots, [n], of the ids last remembered if these are the same row by row and none was removed."""
        return self._last_slots if ids.tobytes() == self._last_ids else None

    def find(self, ids: Ids) -> Slots:
        """Returns the slot, [n], of each id; -1 where it is unknown."""
        if not self._ids.size:
            return np.full(len(ids), -1, np.int32)
        at = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        return np.where(self._ids[at] == ids, self.slots[at], np.int32(-1))

    def add(self, ids: Ids, slots: Slots) -> None:
        """Adds new ids with their slots."""
        ids, slots = np.concatenate([self._ids, ids]), np.concatenate([self.slots, slots])
        order = np.argsort(ids, kind="stable")
        self._ids, self.slots = ids[order], slots[order]

    def remember(self, ids: Ids, slots: Slots) -> None:
        """Remembers the slots of these ids for the next frame."""
        self._last_ids, self._last_slots = ids.tobytes(), slots

    def remove(self, slots: Slots) -> None:
        """Removes the agents of `slots`."""
        keep = ~np.isin(self.slots, slots)
        self._ids, self.slots = self._ids[keep], self.slots[keep]
        self._last_ids = None


@dataclass(slots=True)
class Behavior:
    """A Behavior tracks one behavior name over all simulators.

    Attributes:
        spec: the first simulator's; all others must agree.
        table: slots of its agents.
        produced: completed steps of learning agents.
        running: actions without an outcome yet, of simulators that have been answered.
        ghosts: steps completed by ghosts.
        allowance: latest step allowance of this process.
        row_bytes: bytes of one agent's observations.
    """

    name: str
    spec: BehaviorSpec
    table: SlotTable
    produced: int = 0
    running: int = 0
    ghosts: int = 0
    allowance: StepAllowance = field(default_factory=lambda: StepAllowance(serial=0, steps=0))
    row_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.row_bytes = self.spec.observation_bytes

    def replace_spec(self, spec: BehaviorSpec) -> None:
        """Replaces a spec with which no agent has acted."""
        self.spec, self.row_bytes = spec, spec.observation_bytes

    @property
    def remaining(self) -> int:
        """Returns the number of steps that may still be started."""
        return self.allowance.steps - self.produced - self.running

    def grant(self, allowance: StepAllowance) -> None:
        """Adopts a step allowance; the same allowance received again does not restore returned steps."""
        if allowance.serial < self.allowance.serial:
            return
        if allowance.serial == self.allowance.serial:
            allowance = replace(allowance, steps=min(allowance.steps, self.allowance.steps))
        self.allowance = allowance

    def return_unused(self) -> None:
        """Returns the unused steps of its allowance where it has no agents."""
        if not self.table.taken and self.allowance.steps > self.produced:
            self.allowance = replace(self.allowance, steps=self.produced)
