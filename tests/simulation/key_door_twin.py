"""A slow twin of key and door, and helpers for its tests."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from sparring.pipeline.games.key_door import SCRIPTS, SIGNS
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport, Decisions, Ends

KEY = "KeyDoor?team=0"
LEFT, RIGHT, DOWN, UP = range(4)
EXPERT, RANDOM = (SCRIPTS.index(name) + 1 for name in ("expert", "random"))


def act(chosen: Any, scripts: Any = None) -> dict[str, BehaviorActions]:
    discrete = np.array(chosen, np.int32).reshape(-1, 1)
    return {
        KEY: BehaviorActions(
            behavior=KEY,
            agents=np.arange(len(discrete)),
            continuous=np.zeros((len(discrete), 0), np.float32),
            discrete=discrete,
            scripts=None if scripts is None else np.array(scripts, np.int32),
        )
    }


def played(areas: int, script: int) -> dict[str, BehaviorActions]:
    """Returns actions with which one script plays all areas."""
    return act(np.zeros(areas), np.full(areas, script))


def decisions_of(report: BehaviorReport) -> Decisions:
    assert report.decisions is not None
    return report.decisions


def over(report: BehaviorReport) -> dict[int, int]:
    """Returns the row of each agent in the ends."""
    return {} if report.ends is None else {agent: row for row, agent in enumerate(report.ends.agents.tolist())}


def rows_of(report: BehaviorReport) -> list[Decisions | Ends]:
    return [decisions_of(report)] if report.ends is None else [decisions_of(report), report.ends]


class Twin:
    """One maze, move by move.

    Args:
        size: places along the side of a room.
        rooms: number of rooms in a row.
        high: whether the key lies at the top.
        signs_seen: signs by place and phase that any twin of the game has observed.
    """

    def __init__(self, size: int, rooms: int, high: bool, signs_seen: dict[Any, list[float]] | None = None) -> None:
        self.signs_seen = {} if signs_seen is None else signs_seen
        self.size, self.rooms, self.high = size, rooms, high
        self.key = (rooms * size - 1, size - 1 if high else 0)
        self.has_key = self.passed = False
        self.place = (size, 0)
        self.age = 0

    def opening(self, left: int) -> int:
        """Returns the row of the opening between room `left` and the next."""
        return self.size - 1 if left in range(0, self.rooms, 2) else 0

    def move(self, choice: int) -> bool:
        """Moves and returns whether the goal is reached."""
        self.age += 1
        column, row = self.place
        if choice in (DOWN, UP):
            row += 1 if choice == UP else -1
            if 0 <= row < self.size:
                self.place = (column, row)
        elif self.may_pass(column, row, choice):
            self.place = (column + (1 if choice == RIGHT else -1), row)
        self.has_key |= self.place == self.key
        self.passed |= self.place[0] < self.size
        return self.place == (0, 0)

    def may_pass(self, column: int, row: int, choice: int) -> bool:
        room, within = divmod(column, self.size)
        if choice == RIGHT:
            if within < self.size - 1:
                return True
            return room < self.rooms - 1 and row == self.opening(room)
        if within > 0:
            return True
        return room > 0 and row == self.opening(room - 1) and (room > 1 or self.has_key)

    def view(self) -> list[float]:
        room, within = divmod(self.place[0], self.size)
        observed = [float(room == number) for number in range(self.rooms)]
        observed += [float(within == column) for column in range(self.size)]
        observed += [float(self.place[1] == row) for row in range(self.size)]
        lies = 0 if self.has_key else (1 if self.high else -1)
        return [*observed, lies, self.has_key, self.passed]

    def begin(self, seen: np.ndarray) -> None:
        """Begins a new episode with the random place and key of an observation."""
        rooms, size = self.rooms, self.size
        parts = np.split(seen, [rooms, rooms + size, rooms + 2 * size])
        room, within, row = (int(part.argmax()) for part in parts[:3])
        assert room == 1, "an episode begins in the second room"
        self.__init__(size, rooms, bool(parts[3][0] > 0), self.signs_seen)  # type: ignore[misc]
        self.place = (size + within, row)
        self.compare(seen)

    def compare(self, seen: np.ndarray) -> None:
        """Checks an observation; the signs must be equal whenever the agent is in this state."""
        view = self.view()
        assert seen[:-SIGNS].tolist() == view
        signs = self.signs_seen.setdefault((self.place, self.has_key, self.passed), seen[-SIGNS:].tolist())
        assert seen[-SIGNS:].tolist() == signs


def to_goal(twin: Twin) -> int:
    """Returns the fewest moves to the goal by breadth-first search over the twin's moves."""
    first = (twin.place, twin.has_key, twin.passed)
    known, line = {first}, deque([(first, 0)])
    while line:
        (place, has_key, passed), moves = line.popleft()
        for choice in range(4):
            twin.place, twin.has_key, twin.passed = place, has_key, passed
            if twin.move(choice):
                return moves + 1
            state = (twin.place, twin.has_key, twin.passed)
            if state not in known:
                known.add(state)
                line.append((state, moves + 1))
    raise AssertionError("no way to the goal")


def starts(size: int, rooms: int) -> list[Twin]:
    """Returns a twin for each start and each place of the key."""
    found = []
    for high in (False, True):
        for column in range(size):
            for row in range(size):
                found.append(Twin(size, rooms, high))
                found[-1].place = (size + column, row)
    return found
