"""A simulator process for tests: two agents that a person or a script controls, and that report their actions.

Episodes of agent a last 3 + a steps. In the k-th Step its continuous action is k / 100, its discrete action k % 2 and
its reward k. `python record_game.py MODE`; modes:

    reports  outcomes contain the actions
    silent   outcomes contain no actions
    quits    sends Bye in the 20th Step
    dies     exits without a message in the 20th Step
    wrong    ends an unknown agent in the 20th Step
    absent   does not connect
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.simulation.client import run
from sparring.pipeline.simulation.game import decisions, ends
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec

SPEC = BehaviorSpec(
    observations=(ObservationSpec(name="age", shape=(1,)),), actions=ActionSpec(continuous=1, discrete=(2,))
)
AGENTS = np.arange(2)
LAST = 20


class ReportingGame:
    """A game that reports the actions of its agents.

    Args:
        mode: one of the modes in the module's documentation.
    """

    name = "played"

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._time = 0
        self._ages = np.zeros(2, int)

    def behaviors(self) -> Mapping[str, BehaviorSpec]:
        return {"Hand?team=0": SPEC}

    def scripts(self) -> Mapping[str, Sequence[str]]:
        return {"Hand": ("other", "clever")}

    def reset(self, parameters: Mapping[str, float], seed: int | None) -> Sequence[BehaviorReport]:
        del parameters, seed
        return [BehaviorReport(behavior="Hand?team=0", decisions=decisions(AGENTS, self._seen(AGENTS)))]

    def step(self, actions: Mapping[str, BehaviorActions]) -> Sequence[BehaviorReport]:
        scripts = actions["Hand?team=0"].scripts
        assert scripts is None or scripts.tolist() == [2, 2]
        self._time += 1
        self._ages += 1
        over = self._ages == 3 + AGENTS
        ended = ends(AGENTS[over], self._seen(AGENTS[over]), interrupted=AGENTS[over] == 1, **self._outcomes(over))
        self._ages[over] = 0
        if self._time == LAST:
            if self._mode == "quits":
                os.kill(os.getpid(), signal.SIGTERM)
            elif self._mode == "dies":
                os._exit(9)
            elif self._mode == "wrong":
                ended = ends([77], self._seen(np.zeros(1, int)))
        decided = decisions(AGENTS, self._seen(AGENTS), **self._outcomes(np.ones(2, bool)))
        return [BehaviorReport(behavior="Hand?team=0", decisions=decided, ends=ended)]

    def close(self) -> None:
        """Holds nothing."""

    def _seen(self, agents: Any) -> Any:
        return self._ages[agents].astype(np.float32)[:, None]

    def _outcomes(self, rows: Any) -> dict[str, Any]:
        n = int(rows.sum())
        did: dict[str, Any] = {}
        if self._mode != "silent":
            did = {"did_continuous": np.full((n, 1), self._time / 100), "did_discrete": np.full((n, 1), self._time % 2)}
        return {"rewards": np.full(n, self._time), **did}


if __name__ == "__main__":
    if sys.argv[1] == "absent":
        sys.exit("no display")
    run(ReportingGame(sys.argv[1]))
