"""Games of the player stand-in: small, vectorized, and easy to check by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.games.balance import Balance
from sparring.pipeline.messages.simulator import BehaviorActions, Decisions, Ends
from tests.simulation.unity_player_reports import Actions, Behavior, Entries, Report, Sensor, Setup, take


def _report(behavior: Behavior, now: Entries, over: NDArray[np.bool_], fresh: Entries) -> Report:
    """Returns a report with ends from `now` and decisions of all agents; those that ended decide as in `fresh`."""
    if not over.any():
        return Report(behavior=behavior, decisions=replace(fresh, rewards=now.rewards, group_rewards=now.group_rewards))
    groups = None if now.group_rewards is None else np.where(over, 0, now.group_rewards)
    going_on = replace(fresh, rewards=np.where(over, 0, now.rewards), group_rewards=groups)
    return Report(behavior=behavior, ends=take(now, over.nonzero()[0]), decisions=going_on)


class GoalGame:
    """A walk from 0 to the goal, -1 or +1, in one dimension per action.

    An action moves by at most 0.2 within [-1, 1] (discrete: 1 is +, 0 is -). The episode ends when every position is at
    an end, with a reward of 1.06 times the mean of position times goal. Each earlier step costs 0.01.
    """

    def __init__(self, setup: Setup) -> None:
        self._behavior = Behavior(
            key=f"{setup.behavior or 'Goal'}?team=0",
            sensors=(Sensor(name="VectorSensor_size1", shape=(1,)),),
            continuous=0 if setup.discrete else setup.actions,
            branches=(2,) * setup.actions if setup.discrete else (),
        )
        self._random = np.random.default_rng(setup.seed)
        self._ids = np.arange(setup.areas)
        self._positions = np.zeros((setup.areas, setup.actions))
        self._goals = np.zeros(setup.areas)
        self._restart(self._ids)

    def _restart(self, areas: NDArray[np.int64]) -> None:
        self._positions[areas] = 0
        self._goals[areas] = self._random.choice([-1, 1], len(areas))

    def _entries(self, rewards: NDArray[Any]) -> Entries:
        return Entries(ids=self._ids, observations=(self._goals.astype(np.float32)[:, None],), rewards=rewards)

    def reset(self) -> list[Report]:
        self._restart(self._ids)
        return [Report(behavior=self._behavior, decisions=self._entries(np.zeros(len(self._ids))))]

    def step(self, actions: dict[str, Actions]) -> list[Report]:
        chosen = actions[self._behavior.key]
        moves = chosen.discrete * 0.4 - 0.2 if self._behavior.branches else chosen.continuous.clip(-0.2, 0.2)
        self._positions = (self._positions + moves).clip(-1, 1)
        over: NDArray[np.bool_] = np.abs(self._positions).min(1) >= 1 - 1e-6
        reached = 1.06 * self._positions.round().mean(1) * self._goals
        now = self._entries(np.where(over, reached, -0.01))
        self._restart(over.nonzero()[0])
        return [_report(self._behavior, now, over, self._entries(now.rewards))]


class BalanceGame:
    """Our own game "balance" under another behavior name: 8 floats, 2 continuous actions."""

    def __init__(self, setup: Setup) -> None:
        self._game = Balance(setup.areas, setup.behavior or "Balance")
        ((self._id, spec),) = self._game.behaviors().items()
        size = spec.observations[0].shape
        self._behavior = Behavior(
            key=f"{setup.behavior or 'Balance'}?team=0",
            sensors=(Sensor(name=f"VectorSensor_size{size[0]}", shape=size),),
            continuous=spec.actions.continuous,
        )
        self._seed: int | None = setup.seed
        self._agents = np.arange(setup.areas)
        self._no_discrete = np.zeros((setup.areas, 0), np.int32)

    def reset(self) -> list[Report]:
        (report,) = self._game.reset({}, self._seed)
        self._seed = None
        return [self._translated(report.decisions, None)]

    def step(self, actions: dict[str, Actions]) -> list[Report]:
        tilts = BehaviorActions(
            behavior=self._id,
            agents=self._agents,
            continuous=actions[self._behavior.key].continuous,
            discrete=self._no_discrete,
        )
        (report,) = self._game.step({self._id: tilts})
        return [self._translated(report.decisions, report.ends)]

    def _translated(self, decisions: Decisions | None, ends: Ends | None) -> Report:
        assert decisions is not None
        going_on = Entries(ids=decisions.agents, observations=decisions.observations, rewards=decisions.rewards)
        over = None
        if ends is not None:
            over = Entries(
                ids=ends.agents, observations=ends.observations, rewards=ends.rewards, interrupted=ends.interrupted
            )
        return Report(behavior=self._behavior, ends=over, decisions=going_on)


class MatchThree:
    """A board of random cells in two images with 127 moves, of which about three quarters are forbidden.

    A move earns 0.01 times the last digit of its number; after `max_steps` moves the episode is interrupted.
    """

    MOVES: Final = 127

    def __init__(self, setup: Setup) -> None:
        self._behavior = Behavior(
            key=f"{setup.behavior or 'Match3'}?team=0",
            sensors=(
                Sensor(name="Match3 Sensor (cells)", shape=(6, 9, 8), kind="image", png=setup.png),
                Sensor(name="Match3 Sensor (special)", shape=(3, 9, 8), kind="image", png=setup.png),
            ),
            branches=(self.MOVES,),
        )
        self._random = np.random.default_rng(setup.seed)
        self._ids = np.arange(setup.areas)
        self._ages = np.zeros(setup.areas, np.int64)
        self._limit = setup.max_steps

    def _board(self, kinds: int) -> NDArray[np.uint8]:
        """Returns a random board [areas, kinds, 9, 8], one-hot in each cell."""
        cells = self._random.integers(0, kinds, (len(self._ids), 1, 9, 8))
        return np.where(cells == np.arange(kinds)[:, None, None], np.uint8(255), np.uint8(0))

    def _entries(self, rewards: NDArray[Any]) -> Entries:
        masks = self._random.random((len(self._ids), self.MOVES)) < 0.75
        masks[np.arange(len(self._ids)), self._random.integers(0, self.MOVES, len(self._ids))] = False
        return Entries(ids=self._ids, observations=(self._board(6), self._board(3)), rewards=rewards, masks=masks)

    def reset(self) -> list[Report]:
        self._ages[:] = 0
        return [Report(behavior=self._behavior, decisions=self._entries(np.zeros(len(self._ids))))]

    def step(self, actions: dict[str, Actions]) -> list[Report]:
        self._ages += 1
        over = self._ages >= self._limit
        now = replace(
            self._entries(actions[self._behavior.key].discrete[:, 0] % 10 * 0.01), interrupted=np.ones_like(over)
        )
        self._ages[over] = 0
        return [_report(self._behavior, now, over, self._entries(now.rewards))]


class BasicGame:
    """A walk on 20 squares from the 10th: 0.1 at the 7th, 1 at the 17th, -0.01 a step; each episode has a new id."""

    START, SMALL, LARGE, SQUARES = 10, 7, 17, 20

    def __init__(self, setup: Setup) -> None:
        self._behavior = Behavior(
            key=f"{setup.behavior or 'Basic'}?team=0",
            sensors=(Sensor(name="BasicSensor", shape=(self.SQUARES,)),),
            branches=(3,),
        )
        self._limit = setup.max_steps
        self._next_id = 0
        self._squares = np.zeros(setup.areas, np.int64)
        self._ages, self._ids = self._squares.copy(), self._squares.copy()
        self._restart(np.ones(setup.areas, np.bool_))

    def _restart(self, areas: NDArray[np.bool_]) -> None:
        count = int(areas.sum())
        self._squares[areas], self._ages[areas] = self.START, 0
        self._ids[areas] = np.arange(self._next_id, self._next_id + count)
        self._next_id += count

    def _entries(self, rewards: NDArray[Any]) -> Entries:
        observed = np.eye(self.SQUARES, dtype=np.float32)[self._squares]
        return Entries(ids=self._ids.copy(), observations=(observed,), rewards=rewards)

    def reset(self) -> list[Report]:
        if self._ages.any():
            self._restart(np.ones_like(self._ages, np.bool_))
        return [Report(behavior=self._behavior, decisions=self._entries(np.zeros(len(self._ids))))]

    def step(self, actions: dict[str, Actions]) -> list[Report]:
        moves = np.array([0, -1, 1])[actions[self._behavior.key].discrete[:, 0]]
        self._squares = (self._squares + moves).clip(0, self.SQUARES - 1)
        self._ages += 1
        small, large = self._squares == self.SMALL, self._squares == self.LARGE
        late = (self._ages >= self._limit) & ~small & ~large
        now = replace(self._entries(0.1 * small + 1.0 * large - 0.01), interrupted=late)
        over = small | large | late
        self._restart(over)
        return [_report(self._behavior, now, over, self._entries(now.rewards))]
