"""A learner reports the returns of the latest episodes, from which lessons and the mean reward follow."""

from __future__ import annotations

import numpy as np

from sparring.pipeline.coordination.coordinator import LAST_EPISODES
from sparring.pipeline.coordination.lessons import MOST_RECENT
from sparring.pipeline.messages.segments import Episodes
from sparring.pipeline.messages.state import EpisodeReturns


class EpisodeWindow:
    """An EpisodeWindow keeps the returns of the latest episodes, as many as coordination may need at once.

    Args:
        start: incarnation of the learning process.
        has_lessons: the run has curricula.
    """

    def __init__(self, start: str, *, has_lessons: bool) -> None:
        self._size = MOST_RECENT if has_lessons else LAST_EPISODES
        self.latest = EpisodeReturns(
            start=start, episodes=0, returns=np.empty(0, np.float32), lessons=np.empty(0, np.int64)
        )

    def add(self, episodes: Episodes) -> bool:
        """Adds episodes that ended; returns whether there were any."""
        if not len(episodes.returns):
            return False
        known = self.latest
        self.latest = EpisodeReturns(
            start=known.start,
            episodes=known.episodes + len(episodes.returns),
            returns=np.concatenate([known.returns, episodes.returns])[-self._size :],
            lessons=np.concatenate([known.lessons, episodes.lessons])[-self._size :],
        )
        return True
