"""Runs with a curriculum in the whole graph, with simulators that record the parameters of each episode."""

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
from tests.services.services_helpers import balanced

LENGTH = 6
"""Decisions of an episode; the reward of each is 1 unless the test sets another."""


@dataclass
class Reset:
    """A reset of a simulator.

    Attributes:
        level: value of the parameter at the reset.
        steps: outcomes that the simulator had reported before it.
    """

    level: float
    steps: int


@dataclass
class LessonGame:
    """A game whose agents read the parameter `level` when an episode begins, and start one after the other.

    Attributes:
        areas: number of agents.
        pay: reward of a decision by level, 1 by default.
        levels: level of each episode that has begun, in order.
        ended: number of ended episodes by the level at their beginning.
        steps: number of outcomes reported.
    """

    areas: int = 3
    behavior: str = "Goal"
    pay: Mapping[float, float] = field(default_factory=dict)
    resets: list[Reset] = field(default_factory=list)
    levels: list[float] = field(default_factory=list)
    ended: dict[float, int] = field(default_factory=dict)
    steps: int = 0
    name: str = "lessons"

    def behaviors(self) -> Mapping[str, BehaviorSpec]:
        spec = BehaviorSpec(observations=(ObservationSpec(name="age", shape=(1,)),), actions=ActionSpec(continuous=1))
        return {str(BehaviorId(name=self.behavior)): spec}

    def reset(self, parameters: Mapping[str, float], seed: int | None) -> Sequence[BehaviorReport]:
        del seed
        self.parameters = parameters
        self.resets.append(Reset(parameters["level"], self.steps))
        self.now = [0.0] * self.areas
        self.ages = -np.arange(self.areas)  # so that their episodes end at different steps
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
    """Returns the settings of a curriculum; each lesson is a value and its completion criteria."""
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
    """Returns a small configuration as plain values; `values` are settings of each behavior."""
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


def published_lessons(play: Play) -> list[LessonsState]:
    """Returns the lesson states that coordination published, in order."""
    return play.recorder.records("coordination", "lessons")


def check_lessons_only_advance(play: Play) -> None:
    """Lessons advance one at a time and never go back, even over restarts."""
    states = published_lessons(play)
    for name in states[0].numbers:
        numbers = [state.numbers[name] for state in states]
        steps = [after - before for before, after in itertools.pairwise(numbers)]
        assert numbers[0] == 0
        assert set(steps) <= {0, 1}, numbers
    serials = [state.serial for state in states]
    assert serials == sorted(serials)


def check_step_counts(play: Play) -> dict[str, int]:
    """The step counts of every behavior balance; returns those of the first."""
    for name in play.graph.names:
        step_counts = play.graph.step_counts(name)
        assert balanced(step_counts), step_counts
        assert min(step_counts.values()) >= 0
    assert not play.graph.faults
    return play.graph.step_counts(play.graph.names[0])
