"""What is kept of a behavior's steps beside the steps: how many there were, and the episodes that ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.assembly.block import Block, Slots
from sparring.pipeline.assembly.columns import joined
from sparring.pipeline.messages.matches import Results
from sparring.pipeline.messages.segments import Episodes

_KINDS: Final[tuple[tuple[str, Any], ...]] = (
    ("returns", np.float32),
    ("lengths", np.int32),
    ("group_returns", np.float32),
    ("teams", np.int32),
    ("outcomes", np.float32),
    ("agents", np.int64),
    ("shared_returns", np.float32),
    ("groups", np.int64),
    ("lessons", np.int64),
)
_RESULTS: Final = ("numbers", "matchups", "simulators", "row_counts", "who", "scores", "explicit", "rewards")


@dataclass(slots=True)
class Account:
    """Counts of one behavior from one source, as `Segments` tell them.

    Attributes:
        behavior: name.
        source: start of the stepping process.
        origin: this start of assembly.
        ghosts: steps that ghosts have played.
    """

    behavior: str
    source: str
    origin: str
    began: int | None = None
    ghosts: int = 0
    received: int = 0
    orphaned: int = 0
    sequence: int = 0
    handed_on: int = 0
    told: int = 0

    @property
    def unreported(self) -> bool:
        """Whether there are steps that could not be recorded of which no message has told."""
        return self.orphaned > self.told

    def begin(self, produced_before: int, ghosts: int) -> None:
        """A part has come."""
        self.ghosts = max(self.ghosts, ghosts)
        if self.began is None:
            self.began = self.received = produced_before

    def count(self, completed: int, found: int) -> None:
        """Steps that a part completes, and how many of them could be recorded."""
        self.received += completed
        self.orphaned += completed - found

    def next_message(self, steps: int) -> dict[str, Any]:
        """What the next message, of so many steps, says of itself."""
        self.sequence += 1
        self.handed_on += steps
        self.told = self.orphaned
        return {
            "behavior": self.behavior,
            "source": self.source,
            "origin": self.origin,
            "sequence": self.sequence,
            "began": self.began or 0,
            "orphaned": self.orphaned,
            "received": self.received,
            "handed_on": self.handed_on,
            "ghosts": self.ghosts,
        }


class Notes:
    """Episodes and matches that ended since the last message."""

    def __init__(self) -> None:
        self._episodes: list[Episodes] = []
        self._results: list[Results] = []
        self._unreported: list[int] = []

    def __bool__(self) -> bool:
        """Whether there is something to tell."""
        return bool(self._episodes or self._unreported or self._results)

    @property
    def results(self) -> bool:
        """Whether matches are among it."""
        return bool(self._results)

    def told(self, block: Block, slots: Slots) -> NDArray[np.bool_]:
        """[n] Of which episodes something can be told: those seen whole, of at least one step."""
        told: NDArray[np.bool_] = block.known[slots] & (block.episode_lengths[slots] > 0)
        return told

    def unreported(self, agent_episodes: NDArray[np.int64]) -> None:
        """Nothing can be told of these lives."""
        self._unreported += agent_episodes.tolist()

    def add(
        self, block: Block, slots: Slots, outcomes: NDArray[np.float32] | None, group_returns: NDArray[np.float32]
    ) -> None:
        """Episodes of `slots` have ended, all their steps are in segments closed before.

        Args:
            block: of the slots.
            slots: [n] whose.
            outcomes: [n] of their matches; None where nobody said.
            group_returns: [g] of groups that have ended with them.
        """
        told = self.told(block, slots)
        self.unreported(block.agents[slots[~told]])
        if not (np.count_nonzero(told) or group_returns.size):
            return
        whole = slots[told]
        self._episodes.append(
            Episodes(
                returns=block.episode_returns[whole].astype(np.float32),
                lengths=block.episode_lengths[whole].astype(np.int32),
                group_returns=group_returns,
                teams=block.teams[whole],
                outcomes=np.full(len(whole), -1.0, np.float32) if outcomes is None else outcomes[told],
                agents=block.agents[whole],
                groups=block.groups[whole],
                shared_returns=block.episode_group_returns[whole].astype(np.float32),
                lessons=block.lessons[whole if block.taught else whole[:0]],
            )
        )

    def ended(self, results: Results | None) -> None:
        """Matches have ended."""
        if results is not None:
            self._results.append(results)

    def take(self) -> dict[str, Any]:
        """All of them, once, as the next message tells them."""
        columns = {name: joined([getattr(one, name) for one in self._episodes], dtype) for name, dtype in _KINDS}
        episodes = Episodes(**columns, unreported=np.array(self._unreported, np.int64))
        results = _together(self._results) if self._results else None
        self._episodes, self._unreported, self._results = [], [], []
        return {"episodes": episodes, "results": results}


def _together(results: list[Results]) -> Results:
    """The matches of all; the later of a source know the seats of the earlier, and have them in the same order."""
    columns = {name: np.concatenate([getattr(one, name) for one in results]) for name in _RESULTS}
    return Results(names=results[-1].names, before=results[0].before, **columns)
