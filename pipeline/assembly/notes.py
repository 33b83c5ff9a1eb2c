"""Notes the step counts of a behavior, and its episodes that have ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from sparring.pipeline.assembly.columns import joined
from sparring.pipeline.messages.segments import Episodes
from sparring.pipeline.specs import Array

_KINDS: Final[dict[str, type[np.generic]]] = {
    "returns": np.float32,
    "lengths": np.int32,
    "group_returns": np.float32,
    "teams": np.int32,
    "outcomes": np.float32,
    "agents": np.int64,
    "shared_returns": np.float32,
    "groups": np.int64,
    "lessons": np.int64,
}


@dataclass(slots=True)
class Notes:
    """Holds what the messages of one behavior from one source report beside segments.

    Attributes:
        received: steps that the source had produced by the last part that arrived.
        reached: steps that are in messages or could not be recorded; `announced` of them the last message reported.
        begun: a part has arrived.
        episodes: episodes that have ended since the last message.
        unreported: agent episodes that ended since the last message, of which no statistics are known.
    """

    received: int = 0
    reached: int = 0
    announced: int = 0
    begun: bool = False
    episodes: list[Episodes] = field(default_factory=list)
    unreported: list[int] = field(default_factory=list)

    @property
    def has_episodes(self) -> bool:
        """Returns whether any episode has ended."""
        return bool(self.episodes or self.unreported)

    @property
    def has_unrecorded(self) -> bool:
        """Returns whether the last message did not report all steps that could not be recorded."""
        return self.reached > self.announced

    def begin(self, produced_before: int) -> None:
        """Begins to count the steps of a part; those before the first part could not be recorded."""
        if not self.begun:
            self.begun, self.received, self.reached = True, produced_before, produced_before

    def count(self, completed: int, found: int) -> None:
        """Counts the steps that a tick completes, and those of them that could be recorded."""
        self.received += completed
        self.reached += completed - found

    def take(self, steps: int) -> tuple[int, Episodes]:
        """Returns the steps reached with the next message, which has `steps` steps, and forgets the episodes."""
        self.reached += steps
        self.announced = self.reached
        columns: dict[str, Array] = {
            name: joined([getattr(one, name) for one in self.episodes], dtype) for name, dtype in _KINDS.items()
        }
        episodes = Episodes(**columns, unreported=np.array(self.unreported, np.int64))
        self.episodes, self.unreported = [], []
        return self.reached, episodes
