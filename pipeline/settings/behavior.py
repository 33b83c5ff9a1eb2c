"""Defines the settings of one behavior name: its trainer, its pace and its opponents."""

from __future__ import annotations

from sparring.pipeline.coordination.settings import SelfPlaySettings
from sparring.pipeline.learning.settings import TrainerSettings


class BehaviorSettings(TrainerSettings):
    """Configures one behavior name.

    Attributes:
        threaded: ML-Agents' name for the mode: true is overlap, false is lockstep, None is unset.
        self_play: settings of ghosts; None trains every team at once.
    """

    threaded: bool | None = None
    self_play: SelfPlaySettings | None = None
