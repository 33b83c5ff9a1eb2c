"""Notes the step counts of a behavior, and its episodes and matches that have ended."""

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
    """Counts the steps of one behavior from one source, as `Segments` report them.

    Attributes:
        behavior: behavior name.
        source: incarnation of the stepping service.
        origin: incarnation of this assembly service.
        ghosts: steps that ghosts have played.
        reported_orphans: orphaned steps that the last message reported.
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
    reported_orphans: int = 0

    @property
    def has_unreported(self) -> bool:
        """Returns whether any steps that could not be recorded are still unreported."""
        return self.orphaned > self.reported_orphans

    def begin(self, produced_before: int, ghosts: int) -> None:
        """Begins to count the steps of a part."""
        self.ghosts = max(self.ghosts, ghosts)
        if self.began is None:
            self.began = self.received = produced_before

    def count(self, completed: int, found: int) -> None:
        """Counts the steps that a part completes, and those of them that could be recorded."""
        self.received += completed
        self.orphaned += completed - found

    def next_message(self, steps: int) -> dict[str, Any]:
        """Returns the head of the next message, which has `steps` steps."""
        self.sequence += 1
        self.handed_on += steps
        self.reported_orphans = self.orphaned
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
    """Collects the episodes and matches that have ended since the last message."""

    def __init__(self) -> None:
        self._episodes: list[Episodes] = []
        self._results: list[Results] = []
        self._unreported: list[int] = []

    def __bool__(self) -> bool:
        """Returns whether any episode or match has ended."""
        return bool(self._episodes or self._unreported or self._results)

    @property
    def results(self) -> bool:
        """Returns whether any match has ended."""
        return bool(self._results)

    def reportable(self, block: Block, slots: Slots) -> NDArray[np.bool_]:
        """Returns [n] which episodes can be reported: those seen whole, of at least one step."""
        reportable: NDArray[np.bool_] = block.known[slots] & (block.episode_lengths[slots] > 0)
        return reportable

    def add_unreported(self, agent_episodes: NDArray[np.int64]) -> None:
        """Adds agent episodes of which no statistics are known."""
        self._unreported += agent_episodes.tolist()

    def add(
        self, block: Block, slots: Slots, outcomes: NDArray[np.float32] | None, group_returns: NDArray[np.float32]
    ) -> None:
        """Adds the ended episodes of `slots`, whose steps are all in closed segments.

        Args:
            block: block of the slots.
            slots: [n] slots of the agents.
            outcomes: [n] outcomes of their matches; None if none was reported.
            group_returns: [g] returns of the groups that have ended with them.
        """
        reportable = self.reportable(block, slots)
        self.add_unreported(block.agents[slots[~reportable]])
        if not (np.count_nonzero(reportable) or group_returns.size):
            return
        whole = slots[reportable]
        self._episodes.append(
            Episodes(
                returns=block.episode_returns[whole].astype(np.float32),
                lengths=block.episode_lengths[whole].astype(np.int32),
                group_returns=group_returns,
                teams=block.teams[whole],
                outcomes=np.full(len(whole), -1.0, np.float32) if outcomes is None else outcomes[reportable],
                agents=block.agents[whole],
                groups=block.groups[whole],
                shared_returns=block.episode_group_returns[whole].astype(np.float32),
                lessons=block.lessons[whole if block.has_lessons else whole[:0]],
            )
        )

    def add_results(self, results: Results | None) -> None:
        """Adds the results of matches."""
        if results is not None:
            self._results.append(results)

    def take(self) -> dict[str, Any]:
        """Removes all episodes and results, and returns them as fields of the next message."""
        columns = {name: joined([getattr(one, name) for one in self._episodes], dtype) for name, dtype in _KINDS}
        episodes = Episodes(**columns, unreported=np.array(self._unreported, np.int64))
        results = _concatenate(self._results) if self._results else None
        self._episodes, self._unreported, self._results = [], [], []
        return {"episodes": episodes, "results": results}


def _concatenate(results: list[Results]) -> Results:
    """Returns all results as one record; the names of a later one begin with those of the earlier ones."""
    columns = {name: np.concatenate([getattr(one, name) for one in results]) for name in _RESULTS}
    return Results(names=results[-1].names, before=results[0].before, **columns)
