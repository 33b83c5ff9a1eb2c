"""Curricula in the whole graph under a virtual clock: simulators that note which parameters they had when."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.messages.state import LessonsState
from sparring.pipeline.simulation.game import decisions, ends
from sparring.pipeline.specs import ActionSpec, BehaviorId, BehaviorSpec, ObservationSpec
from tests.services.self_play_runs import Play

LENGTH = 6
"""Decisions of an episode; each is paid with 1."""


@dataclass
class Reset:
    """What a simulator had when it was reset.

    Attributes:
        level: of the parameter.
        steps: it had reported in all.
    """

    level: float
    steps: int


@dataclass
class Pupil:
    """Areas whose episodes begin one after the other, and which ask for a parameter when they begin.

    Attributes:
        areas: agents.
        behavior: theirs.
        pay: of each decision, by level.
        resets: every one.
        levels: of each episode that has begun, in order.
        ended: episodes that were reported to have ended, by the level they began with.
        steps: outcomes reported.
    """

    areas: int = 3
    behavior: str = "Goal"
    pay: Mapping[float, float] = field(default_factory=dict)
    resets: list[Reset] = field(default_factory=list)
    levels: list[float] = field(default_factory=list)
    ended: dict[float, int] = field(default_factory=dict)
    steps: int = 0
    name: str = "pupil"

    def behaviors(self) -> Mapping[str, BehaviorSpec]:
        spec = BehaviorSpec(observations=(ObservationSpec(name="age", shape=(1,)),), actions=ActionSpec(continuous=1))
        return {str(BehaviorId(name=self.behavior)): spec}

    def reset(self, parameters: Mapping[str, float], seed: int | None) -> Sequence[BehaviorReport]:
        del seed
        self.parameters = parameters
        self.resets.append(Reset(parameters["level"], self.steps))
        self.now = [0.0] * self.areas
        self.ages = -np.arange(self.areas)  # their ends are apart
        for area in range(self.areas):
            self._begin(area)
        return self._report(np.zeros(self.areas), [])

    def step(self, actions: Mapping[str, BehaviorActions]) -> Sequence[BehaviorReport]:
        del actions
        self.ages += 1
        self.steps += self.areas
        paid = np.array([self.pay.get(level, 1.0) for level in self.now])
        over = np.flatnonzero(self.ages >= LENGTH).tolist()
        for area in over:
            self.ended[self.now[area]] = self.ended.get(self.now[area], 0) + 1
            self.ages[area] = 0
            self._begin(area)
        return self._report(paid, over)

    def close(self) -> None:
        """Holds nothing."""

    def _begin(self, area: int) -> None:
        self.now[area] = self.parameters["level"]
        self.levels.append(self.now[area])

    def _report(self, rewards: Any, over: list[int]) -> Sequence[BehaviorReport]:
        seen = self.ages.astype(np.float32)[:, None] / LENGTH
        finished = ends(over, seen[over], rewards=rewards[over]) if over else None
        going_on = decisions(
            np.arange(self.areas), seen, rewards=np.where(np.isin(range(self.areas), over), 0, rewards)
        )
        return (BehaviorReport(behavior=str(BehaviorId(name=self.behavior)), decisions=going_on, ends=finished),)


def curriculum(*lessons: tuple[Any, Mapping[str, Any] | None], behavior: str = "Goal") -> dict[str, Any]:
    """Plain settings of one; each lesson has a value and what its criteria say."""
    return {
        "curriculum": [
            {"name": f"lesson{number}", "value": value}
            | ({} if criteria is None else {"completion_criteria": {"behavior": behavior, **criteria}})
            for number, (value, criteria) in enumerate(lessons)
        ]
    }


def plain_settings(
    parameters: Mapping[str, Any], *, names: Sequence[str] = ("Goal",), mode: str = "overlap", **values: Any
) -> dict[str, Any]:
    """A small configuration as plain values; `values` go to each behavior."""
    behavior = {
        "hyperparameters": {"batch_size": 16, "buffer_size": 64, "num_epoch": 1},
        "network_settings": {"hidden_units": 8, "num_layers": 1},
        "max_steps": 1000,
        "time_horizon": 8,
        **values,
    }
    pipeline = {"mode": mode, "recovery_interval": 1, "address": "unix:///nowhere"}
    return {
        "behaviors": {name: dict(behavior) for name in names},
        "environment_parameters": dict(parameters),
        "pipeline": pipeline,
    }


def told(play: Play) -> list[LessonsState]:
    """What was published of the lessons, in order."""
    return play.witness.records("coordination", "lessons")


def check_lessons_only_go_on(play: Play) -> None:
    """One at a time, and never back, also over restarts."""
    for name in told(play)[0].numbers:
        numbers = [state.numbers[name] for state in told(play)]
        steps = [after - before for before, after in itertools.pairwise(numbers)]
        assert numbers[0] == 0
        assert set(steps) <= {0, 1}, numbers
    serials = [state.serial for state in told(play)]
    assert serials == sorted(serials)


def check_step_counts(play: Play) -> dict[str, int]:
    """Every step is in one term, and the simulators have counted as many; returns the books of the first behavior."""
    for name in play.graph.names:
        step_counts = play.graph.step_counts(name)
        assert step_counts["produced"] == sum(value for term, value in step_counts.items() if term != "produced"), (
            name,
            step_counts,
        )
        assert min(step_counts.values()) >= 0
    assert not play.graph.faults
    return play.graph.step_counts(play.graph.names[0])
