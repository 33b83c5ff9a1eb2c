"""Notes the step counts of a behavior, and its episodes that have ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.assembly.block import Block, Slots
from sparring.pipeline.assembly.columns import joined
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


@dataclass(slots=True)
class Account:
    """Counts the steps of one behavior from one source, as `Segments` report them.

    Attributes:
        behavior: behavior name.
        source: incarnation of the stepping service.
        origin: incarnation of this assembly service.
        received: steps that the source had produced by the last part that arrived.
        reached: steps that are in messages or could not be recorded; `announced` of them the last message reported.
        begun: a part has arrived.
    """

    behavior: str
    source: str
    origin: str
    received: int = 0
    reached: int = 0
    announced: int = 0
    begun: bool = False

    @property
    def has_unreported(self) -> bool:
        """Returns whether any steps that could not be recorded are still unreported."""
        return self.reached > self.announced

    def begin(self, produced_before: int) -> None:
        """Begins to count the steps of a part; those before the first part could not be recorded."""
        if not self.begun:
            self.begun, self.received, self.reached = True, produced_before, produced_before

    def count(self, completed: int, found: int) -> None:
        """Counts the steps that a part completes, and those of them that could be recorded."""
        self.received += completed
        self.reached += completed - found

    def next_message(self, steps: int) -> dict[str, Any]:
        """Returns the head of the next message, which has `steps` steps."""
        self.reached += steps
        self.announced = self.reached
        return {"behavior": self.behavior, "source": self.source, "origin": self.origin, "reached": self.reached}


class Notes:
    """Collects the episodes that have ended since the last message."""

    def __init__(self) -> None:
        self._episodes: list[Episodes] = []
        self._unreported: list[int] = []

    def __bool__(self) -> bool:
        """Returns whether any episode has ended."""
        return bool(self._episodes or self._unreported)

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

    def take(self) -> Episodes:
        """Returns all episodes and forgets them."""
        columns = {name: joined([getattr(one, name) for one in self._episodes], dtype) for name, dtype in _KINDS}
        episodes = Episodes(**columns, unreported=np.array(self._unreported, np.int64))
        self._episodes, self._unreported = [], []
        return episodes
