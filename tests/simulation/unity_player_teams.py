"""Games of the player stand-in with groups: soccer with two teams, and a game with every feature."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tests.simulation.unity_player_reports import Actions, Behavior, Entries, Report, Sensor, Setup, take

PER_TEAM: Final = 2


class SoccerGame:
    """Two teams of two that push a ball on `areas` pitches.

    The first branch moves the ball: 1 forward, 2 backward, by 0.05 times the team's mean; at 1 team 0 scores, at -1
    team 1 does. Then all four agents of the pitch end in one message, with a group reward of 1 - age / limit for the
    scorers and -1 for the others; after `max_steps` all are interrupted. Ids and groups are unique to pitch and team.
    """

    def __init__(self, setup: Setup) -> None:
        name, agents = setup.behavior or "SoccerTwos", setup.areas * PER_TEAM
        sensors = (
            Sensor(name="RayPerceptionSensor", shape=(264,)),
            Sensor(name="RayPerceptionSensorReverse", shape=(72,)),
        )
        self._behaviors = [Behavior(key=f"{name}?team={t}", sensors=sensors, branches=(3, 3, 3)) for t in (0, 1)]
        self._ids = [np.arange(agents) + team * agents for team in (0, 1)]
        self._groups = [np.arange(agents) // PER_TEAM + 1 + team * setup.areas for team in (0, 1)]
        self._random = np.random.default_rng(setup.seed)
        self._limit = setup.max_steps
        self._ball = np.zeros(setup.areas)
        self._ages = np.zeros(setup.areas, np.int64)
        self._rays = self._random.random((2, agents, 336), np.float32)

    def reset(self) -> list[Report]:
        self._ball[:], self._ages[:] = 0, 0
        none = np.zeros(len(self._ball), np.bool_)
        return [self._report(team, none, none, np.zeros(len(none))) for team in (0, 1)]

    def step(self, actions: dict[str, Actions]) -> list[Report]:
        for behavior, side in zip(self._behaviors, (1, -1), strict=True):
            kick = actions[behavior.key].discrete[:, 0]
            push = (kick == 1) * 1.0 - (kick == 2)
            self._ball += 0.05 * side * push.reshape(-1, PER_TEAM).mean(1)
        self._ball += 0.01 * self._random.standard_normal(len(self._ball))
        self._ages += 1
        scored = np.where(np.abs(self._ball) >= 1, np.sign(self._ball), 0)
        late = (scored == 0) & (self._ages >= self._limit)
        early = 1 - self._ages / self._limit
        ended = [
            self._report(team, late | (scored != 0), late, np.where(scored == side, early, np.where(scored, -1, 0)))
            for team, side in ((0, 1), (1, -1))
        ]
        over = late | (scored != 0)
        self._ball[over], self._ages[over] = 0, 0
        going_on = [self._report(team, np.zeros_like(late), late, np.zeros(len(late))) for team in (0, 1)]
        return [replace(now, ends=end.ends) for now, end in zip(going_on, ended, strict=True)]

    def _report(
        self, team: int, over: NDArray[np.bool_], late: NDArray[np.bool_], rewards: NDArray[np.float64]
    ) -> Report:
        """Returns ends of the pitches in `over` and decisions of all; `rewards` [areas] are those of the groups."""
        rays = self._rays[team]
        rays[:, 0] = (self._ball if team == 0 else -self._ball).repeat(PER_TEAM)
        rays[:, 1] = (self._ages / self._limit).repeat(PER_TEAM)
        agents = Entries(
            ids=self._ids[team],
            observations=(rays[:, :264].copy(), rays[:, 264:].copy()),
            rewards=np.zeros(len(rays)),
            groups=self._groups[team],
        )
        ends = None
        if over.any():
            all_ends = replace(agents, interrupted=late.repeat(PER_TEAM), group_rewards=rewards.repeat(PER_TEAM))
            ends = take(all_ends, over.repeat(PER_TEAM).nonzero()[0])
        return Report(behavior=self._behaviors[team], ends=ends, decisions=agents)


class Zoo:
    """A game with every feature, in which observations follow from an agent's id, age and last action.

    Each area has a group of three agents; member k ends at age 4 (k + 1), and at 12 all three restart. Members that are
    present when one ends get a group reward of 0.5, the last of them 1. An agent's own reward is its last first
    continuous action. At ages 12, 36, ... (every other episode) the last one is interrupted instead of done.

    Sensors: a vector [5] (id, age, last two continuous actions, code of the last discrete ones); a list of 1 to 4
    entities [4, 3] (id, age, number from 1); an image of 6 channels in two PNG files whose halves are swapped; a
    goal [2]. Actions: 2 continuous (if the trainer accepts both kinds), branches of 2 and 3; masks at even ages for
    agents with an even id. A second behavior, `Late` with one agent per area, a vector [2] (id, age) and one branch of
    2, is announced after `late_after` messages and has agents from the next one on.
    """

    GROUP: Final = 3
    MAPPING: Final = (3, 4, 5, 0, 1, 2)

    def __init__(self, setup: Setup) -> None:
        self._zoo = Behavior(
            key=f"{setup.behavior or 'Zoo'}?team=0",
            sensors=(
                Sensor(name="VectorSensor_size5", shape=(5,)),
                Sensor(name="BufferSensor", shape=(4, 3), kind="entities"),
                Sensor(name="StackingSensor", shape=(6, 6, 8), kind="image", png=setup.png, mapping=self.MAPPING),
                Sensor(name="GoalSensor", shape=(2,), goal=True),
            ),
            continuous=2 if setup.hybrid else 0,
            branches=(2, 3),
        )
        self._late = Behavior(
            key="Late?team=0", sensors=(Sensor(name="VectorSensor_size2", shape=(2,)),), branches=(2,)
        )
        agents = setup.areas * self.GROUP
        self._ids = np.arange(agents)
        self._late_ids = agents + np.arange(setup.areas)
        self._members = self._ids % self.GROUP
        self._groups = self._ids // self.GROUP + 1
        self._last = np.zeros((agents, 3))
        self._late_after = setup.late_after
        self._age, self._episode, self._messages = 0, 0, 0

    def reset(self) -> list[Report]:
        self._age = 0
        self._last[:] = 0
        self._messages += 1
        return [Report(behavior=self._zoo, decisions=self._entries(self._present())), *self._later({})]

    def _present(self) -> NDArray[np.int64]:
        """Returns the agents that decide at this age."""
        return (self._age < 4 * (self._members + 1)).nonzero()[0]

    def step(self, actions: dict[str, Actions]) -> list[Report]:
        acted, chosen = self._present(), actions[self._zoo.key]
        self._last[acted, :2] = chosen.continuous if self._zoo.continuous else 0
        self._last[acted, 2] = chosen.discrete @ [3, 1]
        self._age += 1
        self._messages += 1
        ended = acted[self._age == 4 * (self._members[acted] + 1)]
        rewards = self._last[:, 0].copy()
        shared = (1.0 if self._age == 12 else 0.5) if len(ended) else 0.0
        ends = self._entries(ended, rewards, shared, over=True) if len(ended) else None
        stay = np.setdiff1d(acted, ended)
        if self._age == 12:
            self._age, self._episode = 0, self._episode + 1
            self._last[:], rewards[:], shared = 0, 0, 0.0
            stay = self._ids
        return [
            Report(behavior=self._zoo, ends=ends, decisions=self._entries(stay, rewards, shared)),
            *self._later(actions),
        ]

    def _entries(
        self, rows: NDArray[np.int64], rewards: NDArray[Any] | None = None, shared: float = 0.0, over: bool = False
    ) -> Entries:
        interrupted = over and self._age == 12 and self._episode % 2 == 0
        return Entries(
            ids=self._ids[rows],
            observations=(self._vector(rows), self._entities(rows), zoo_image(rows, self._age), self._goal(rows)),
            rewards=np.zeros(len(rows)) if rewards is None else rewards[rows],
            interrupted=np.full(len(rows), interrupted) if over else None,
            masks=None if over else self._masks(rows),
            groups=self._groups[rows],
            group_rewards=np.full(len(rows), shared),
        )

    def _vector(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        head = np.stack([rows, np.full(len(rows), self._age)], 1)
        return np.concatenate([head, self._last[rows]], 1).astype(np.float32)

    def _entities(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        observed = np.zeros((len(rows), 4, 3), np.float32)
        observed[:, :, 0], observed[:, :, 1], observed[:, :, 2] = rows[:, None], self._age, np.arange(1, 5)
        count = 1 + (rows + self._age) % 4
        observed[np.arange(4) >= count[:, None]] = 0
        return observed

    def _goal(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        return np.eye(2, dtype=np.float32)[rows % 2]

    def _masks(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        masks = np.zeros((len(rows), 5), np.bool_)
        if self._age % 2 == 0:
            even = (rows % 2 == 0).nonzero()[0]
            masks[even, 2 + rows[even] % 3] = True
        return masks

    def _later(self, actions: dict[str, Actions]) -> list[Report]:
        age = self._messages - self._late_after - 2
        if age < -1:
            return []
        if age < 0:
            return [Report(behavior=self._late)]
        count = len(self._late_ids)
        observed = np.stack([self._late_ids, np.full(count, age)], 1).astype(np.float32)
        chosen = actions.get(self._late.key)
        rewards = np.zeros(count) if chosen is None else chosen.discrete[:, 0].astype(np.float64)
        return [
            Report(
                behavior=self._late, decisions=Entries(ids=self._late_ids, observations=(observed,), rewards=rewards)
            )
        ]


def zoo_image(ids: NDArray[np.int64], age: int) -> NDArray[np.uint8]:
    """Returns the images [n, 6, 6, 8] of agents of the zoo."""
    channels, height, width = np.ogrid[:6, :6, :8]
    values = 40 * channels + 5 * height + 3 * width + 7 * ids[:, None, None, None] + age
    return np.asarray(values % 256, np.uint8)
