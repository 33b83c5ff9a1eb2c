"""Simulates a maze with a key, a door and a goal; the only reward is at the goal.

Random actions practically never get there, so that it takes curiosity or demonstrations. The simulator has an expert to
record them from. The maze is small enough to be a table: every transition is looked up in it.
"""

from collections.abc import Mapping
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.games.base import Bools, BuiltInGame, Ints, one_vector
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport, Statistic
from sparring.pipeline.specs import ActionSpec, Array, BehaviorId

MOVES: Final = ((-1, 0), (1, 0), (0, -1), (0, 1))
"""Columns and rows by which each choice moves: left, right, down, up."""
SIZES: Final = range(2, 13)
"""Places along the side of a room."""
ROOMS: Final = range(3, 11)
"""Rooms in a row: that of the goal, that of the start, those on the way to the key."""
SIGNS: Final = 24
"""Numbers that identify a place. Without them networks mistake a new place for a known one."""
SCRIPTS: Final = ("expert", "random")

_SHARES: Final = ("Key", "Door", "Goal")
_KEYS: Final = 2
_SEARCHING, _CARRYING, _PASSED = range(3)
_PHASES: Final = 3
_FAR: Final = np.iinfo(np.int32).max


class Maze:
    """Holds a maze as a table over its states: place of the key, phase, column and row of the agent.

    Args:
        size: places along the side of a room.
        rooms: number of rooms in a row.

    Attributes:
        following: [states, moves] state after each move.
        seen: [states, numbers] observation.
        shares: [states, 3] the key was fetched, the door passed, the goal reached.
        goals: [states] the agent is at the goal, after the door.
        away: [states] least number of moves to the goal.
        best: [states, moves] moves on a shortest way.
        starts: [keys x places of the starting room] states in which an episode begins.
    """

    def __init__(self, size: int, rooms: int) -> None:
        key, phase, column, row = np.indices((_KEYS, _PHASES, rooms * size, size))
        after = [_after(key, phase, column, row, move) for move in MOVES]
        self.following: Ints = np.stack(after, -1).reshape(-1, len(MOVES))
        self.seen = _views(key, phase, column, row)
        goals = (phase == _PASSED) & (column == 0) & (row == 0)
        self.shares: Bools = np.stack([phase >= _CARRYING, phase == _PASSED, goals], -1).reshape(-1, len(_SHARES))
        self.goals = self.shares[:, 2]
        self.away = _distances(self.following, self.goals)
        reached = self.away[self.following]
        self.best: Bools = reached == reached.min(1, keepdims=True)
        self.starts: Ints = ((phase == _SEARCHING) & (column // size == 1)).ravel().nonzero()[0]


class KeyDoor(BuiltInGame):
    """Simulates `areas` mazes with one agent each: a row of `rooms` square rooms of `size` x `size` places.

    An episode begins anywhere in the second room from the left. The key lies in the right column of the last room, at
    the bottom or at the top; an agent that comes there has it. A wall with one opening separates every two rooms: at
    the top between the first and the second, and then alternately at the bottom and at the top. The first opening is
    the door: it stops agents without the key. The goal is the left bottom corner of the first room. The branch of 4
    moves left, right, down or up by one place; an agent that runs into a wall stays.

    Observation `view` [rooms + 2 size + 27]: room, column in the room and row, each one-hot; 1 for a key that lies at
    the top, -1 at the bottom, 0 once it is fetched; whether the agent has the key; whether it has passed the door; 24
    signs, each -1 or 1, that identify the place: the same in all mazes of this size, and different once the key is
    fetched, and once the door is passed. They make new places look new.

    Reward: 1 at the goal (terminated), minus the environment parameter `step_cost` per decision, if that is set. After
    `limit` decisions the episode is truncated (interrupted). The next one begins in the same report.

    Scripts: `expert` takes a random shortest way; `random` moves at random. While one of them plays an agent, reports
    hold the actions of all agents.

    Statistics: the share of episodes in which the key was fetched (`Key`), the door passed (`Door`), the goal reached
    (`Goal`), prefixed by the name of the behavior; reported whenever as many episodes as areas have ended.

    Args:
        areas: number of mazes side by side.
        behavior: name of the behavior.
        size: places along the side of a room, 2 to 12.
        rooms: number of rooms in a row, 3 to 10.
        limit: decisions after which the episode is truncated.

    Raises:
        SettingsError: `size` or `rooms` is out of its range, or `limit` is shorter than the longest way to the goal.
    """

    name = "key-door"
    DEFAULTS: ClassVar = {"step_cost": 0.0}

    def __init__(
        self, areas: int = 1, behavior: str = "KeyDoor", size: int = 4, rooms: int = 4, limit: int = 150
    ) -> None:
        for option, value, allowed in (("size", size, SIZES), ("rooms", rooms, ROOMS)):
            if value not in allowed:
                expected = f"{allowed[0]} to {allowed[-1]}"
                raise SettingsError(f"got {option}={value}; expected {expected}; correct option {option!r}")
        self._maze = Maze(size, rooms)
        longest = int(self._maze.away[self._maze.starts].max())
        if limit < longest:
            raise SettingsError(
                f"got limit={limit}; expected {longest} or more, the longest way; raise limit, or lower size or rooms"
            )
        self._name = behavior
        self._limit = limit
        spec = one_vector("view", self._maze.seen.shape[1], ActionSpec(discrete=(len(MOVES),)))
        super().__init__(areas, {str(BehaviorId(name=behavior)): spec})
        self._states = np.zeros(areas, np.int64)
        self._script_random = np.random.default_rng()
        self._ended, self._reached = 0, np.zeros(len(_SHARES), np.int64)

    def scripts(self) -> Mapping[str, tuple[str, ...]]:
        """Returns the scripts that can play agents."""
        return {self._name: SCRIPTS}

    def reset(self, parameters: Mapping[str, float], seed: int | None) -> tuple[BehaviorReport, ...]:
        """Begins new episodes in all areas."""
        if seed is not None:
            self._script_random = np.random.default_rng((seed, 1))  # so that scripts do not change where episodes begin
        return super().reset(parameters, seed)

    def step(self, actions: Mapping[str, BehaviorActions]) -> tuple[BehaviorReport, ...]:
        """Moves every agent by one place."""
        moves, is_scripted = self._moves(actions[self._ids[0]])
        self._states = self._maze.following[self._states, moves]
        self._ages += 1
        won = self._maze.goals[self._states]
        over = won | (self._ages >= self._limit)
        ended = self._states[over]
        if ended.size:
            self._ended += ended.size
            self._reached += self._maze.shares[ended].sum(0)
        did = moves[:, None, None].astype(np.int32) if is_scripted else None
        return self._play_on(over, won - self._constants["step_cost"], interrupted=~won, did_discrete=did)

    def statistics(self) -> tuple[Statistic, ...]:
        """Returns how far episodes came, once as many episodes as areas have ended.

        The trainer weights each step's statistics equally, and one step may end one episode or all of them.
        """
        if self._ended < self._areas.size:
            return ()
        shares = self._reached / self._ended
        self._ended, self._reached = 0, np.zeros_like(self._reached)
        names = (f"{self._name}/{word}" for word in _SHARES)
        return tuple(Statistic(name=name, value=float(share)) for name, share in zip(names, shares, strict=True))

    def _observe(self) -> list[list[Array]]:
        return [[self._maze.seen[self._states]]]

    def _begin(self, areas: Ints) -> None:
        self._states[areas] = self._random.choice(self._maze.starts, areas.size)

    def _moves(self, actions: BehaviorActions) -> tuple[Array, bool]:
        """Returns the move of each agent, [areas], and whether a script plays any agent."""
        chosen = actions.discrete[:, 0]
        if actions.scripts is None or not actions.scripts.any():
            return chosen, False
        random = self._script_random.random((self._areas.size, len(MOVES)))
        expert = (random + self._maze.best[self._states]).argmax(1)
        return np.choose(actions.scripts, (chosen, expert, random.argmax(1))), True


def _after(key: Ints, phase: Ints, column: Ints, row: Ints, move: tuple[int, int]) -> Ints:
    """Returns the states after a move, [keys, phases, columns, rows]."""
    shape = key.shape
    columns, size = shape[2:]
    there = (column + move[0]).clip(0, columns - 1)
    to_row = (row + move[1]).clip(0, size - 1)
    wall = np.maximum(column, there) // size  # the number of the room to its right
    opening = np.where(wall % 2 == 1, size - 1, 0)
    free = (row == opening) & ((wall > 1) | (phase != _SEARCHING))
    to_column = np.where((column // size == there // size) | free, there, column)
    fetches = (phase == _SEARCHING) & (to_column == columns - 1) & (to_row == key * (size - 1))
    passes = (phase == _CARRYING) & (to_column < size)
    to_phase = np.where(fetches, _CARRYING, np.where(passes, _PASSED, phase))
    return np.ravel_multi_index((key, to_phase, to_column, to_row), shape).astype(np.int64)


def _views(key: Ints, phase: Ints, column: Ints, row: Ints) -> NDArray[np.float32]:
    """Returns the observations, [states, rooms + 2 size + 3 + signs]."""
    columns, size = key.shape[2:]
    room, within = np.divmod(column, size)
    flags = (np.where(phase == _SEARCHING, 2 * key - 1, 0), phase >= _CARRYING, phase == _PASSED)
    parts = (np.eye(columns // size)[room], np.eye(size)[within], np.eye(size)[row], np.stack(flags, -1), _signs(key))
    seen = np.concatenate(parts, -1).astype(np.float32)
    return seen.reshape(-1, seen.shape[-1])


def _signs(key: Ints) -> NDArray[np.float64]:
    """Returns signs of -1 or 1, the same for each place of the key, [keys, phases, columns, rows, signs].

    They are raw bits of a generator, because these never change: policies and recordings must fit mazes of later
    versions.
    """
    raw = np.random.PCG64(0).random_raw(key[0].size)
    signs = (raw[:, None] >> np.arange(SIGNS, dtype=np.uint64)) & np.uint64(1)
    centered = signs.reshape(*key.shape[1:], SIGNS) * 2.0 - 1.0
    return np.broadcast_to(centered, (*key.shape, SIGNS))


def _distances(following: Ints, goals: Bools) -> Ints:
    """Returns the least number of moves to a goal, [states]; each iteration reaches states that are one move further
    away.
    """
    away = np.where(goals, 0, _FAR)
    while True:
        nearer = np.minimum(away, 1 + away[following].min(1))
        if np.array_equal(nearer, away):
            return away
        away = nearer
