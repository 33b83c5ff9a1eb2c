"""Recorded returns of a game's agents, which the game itself writes so that every trainer is measured alike."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.simulation.unity_player_reports import Actions, Game, Report


class RecordedGame:
    """A game of one behavior that appends a JSON line for each step in which episodes end.

    A line holds `steps`, the decisions of all agents so far, `seconds` since the first reset, and the `returns`.

    Args:
        game: a game whose agents have numbers from 0 and all decide at each step.
        path: path of the file.
    """

    def __init__(self, game: Game, path: Path) -> None:
        self._game = game
        self._file = path.open("w", buffering=1)
        self._steps = 0
        self._began = time.monotonic()
        self._returns: NDArray[np.float64] = np.zeros(0)

    def reset(self) -> list[Report]:
        reports = self._game.reset()
        decisions = reports[0].decisions
        assert decisions is not None
        self._returns = np.zeros(len(decisions.ids))
        return reports

    def step(self, actions: dict[str, Actions]) -> list[Report]:
        reports = self._game.step(actions)
        (report,) = reports
        self._steps += len(self._returns)
        if report.decisions is not None:
            self._returns[report.decisions.ids] += report.decisions.rewards
        if report.ends is not None:
            self._returns[report.ends.ids] += report.ends.rewards
            self._write(self._returns[report.ends.ids])
            self._returns[report.ends.ids] = 0
        return reports

    def _write(self, returns: NDArray[np.float64]) -> None:
        line: dict[str, Any] = {"steps": self._steps, "seconds": time.monotonic() - self._began}
        self._file.write(json.dumps(line | {"returns": returns.tolist()}) + "\n")
