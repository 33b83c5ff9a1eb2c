"""Everything that one behavior name can be told: its trainer, its pace and its opponents."""

from __future__ import annotations

from sparring.pipeline.coordination.settings import SelfPlaySettings
from sparring.pipeline.learning.settings import TrainerSettings


class BehaviorSettings(TrainerSettings):
    """One entry of `behaviors`.

    Attributes:
        threaded: ML-Agents' word for the mode: true is overlap, false is lockstep, None unsaid.
        self_play: ghosts; None trains every team at once.
    """

    threaded: bool | None = None
    self_play: SelfPlaySettings | None = None
