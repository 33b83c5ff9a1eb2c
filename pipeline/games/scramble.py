"""Simulates a round arena with pellets in which every agent plays for itself; the most pellets win.

Each agent observes the arena in its own frame, and its rivals differ by their distance alone, so that one policy plays
all teams.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.games.base import (
    BuiltInGame,
    Float,
    Ints,
    directions,
    half_turn,
    in_own_frame,
    lengths,
    one_vector,
)
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.specs import ActionSpec, Array, BehaviorId

MAX_STEPS: Final = 100
STEP_S: Final = 0.1
ARENA: Final = 5.0
"""Radius of the arena, in meters."""
BODY: Final = 0.4
"""Radius of an agent, in meters."""
REACH: Final = 0.6
"""Distance of an agent's center at which it takes a pellet, in meters."""
SPEED: Final = 3.0
"""Meters per second."""
GRIP: Final = 0.5
"""Share of the way from its velocity to the commanded one that an agent covers in one step."""
TURN: Final = 0.4
"""Radians per step."""
BRANCHES: Final = (3, 3)
PELLET_REWARD: Final = 0.1
LEAD: Final = 5.0
"""Lead in pellets that is observed as 1."""

_COMMANDS: Final = np.array([0.0, 1.0, -1.0])
_ALONE: Final = 6
"""Numbers in the view that are not about pellets or rivals."""
_PER_RIVAL: Final = 5


class Scramble(BuiltInGame):
    """Simulates `areas` round arenas, each with `teams` teams of one agent and `pellets` pellets.

    Observation `view` [6 + 2 x pellets + 5 x (teams - 1)], in the agent's own frame (x ahead, y to the left; lengths
    divided by the arena's radius, speeds by the largest): the arena's center, own velocity, share of the remaining
    time, lead over the best rival; places of the pellets, the nearest first; for each rival, the nearest first, its
    place, its velocity and the lead over it. A lead of 5 pellets or more is 1, one so far behind -1. Actions, 2
    branches of 3: stay, forward, back; keep heading, turn left, turn right.

    The nearest of the agents that reach a pellet takes it for a reward of 0.1, and a new pellet appears at random.
    After 100 steps the match is over by its rules (terminated): an agent's outcome is the share of rivals with fewer
    pellets, an equal number counting half (of three: 1, 0.5 and 0), and its last reward is 2 x outcome - 1. The next
    match starts in the same report.

    Args:
        areas: number of arenas side by side.
        behavior: name of the behavior.
        teams: number of agents in an arena, each a team of its own.
        pellets: number of pellets in an arena at any time.

    Raises:
        SettingsError: there are fewer than 2 teams or no pellet.
    """

    name = "scramble"

    def __init__(self, areas: int = 1, behavior: str = "Scramble", teams: int = 3, pellets: int = 4) -> None:
        if teams < 2 or pellets < 1:
            raise SettingsError(f"got {teams}, {pellets}; expected 2 or more teams and 1 or more pellets; correct both")
        behavior_ids = [str(BehaviorId(name=behavior, team=team)) for team in range(teams)]
        size = _ALONE + 2 * pellets + _PER_RIVAL * (teams - 1)
        spec = one_vector("view", size, ActionSpec(discrete=BRANCHES))
        super().__init__(areas, dict.fromkeys(behavior_ids, spec), teams)
        self._matches = self._areas.copy()
        self._rivals = (np.arange(teams)[:, None] + np.arange(1, teams)) % teams  # [teams, rivals]
        self._places: Float = np.zeros((areas, teams, 2))
        self._velocities: Float = np.zeros((areas, teams, 2))
        self._headings: Float = np.zeros((areas, teams))
        self._pellets: Float = np.zeros((areas, pellets, 2))
        self._taken = np.zeros((areas, teams), np.int64)

    def step(self, actions: Mapping[str, BehaviorActions]) -> tuple[BehaviorReport, ...]:
        """Moves all agents, awards pellets and ends matches whose time is over."""
        self._move(_COMMANDS[np.stack([actions[key].discrete for key in self._ids], 1)])
        rewards: Float = PELLET_REWARD * self._take().astype(np.float64)
        self._ages += 1
        over = self._ages >= MAX_STEPS
        outcomes = _outcomes(self._taken)
        rewards[over] += 2 * outcomes[over] - 1
        return self._play_on(over, rewards, outcomes=outcomes)

    def _begin(self, areas: Ints) -> None:
        """Places agents around the center, at even angles and random distances and headings."""
        teams = len(self._ids)
        angles = self._random.uniform(0, 2 * np.pi, (areas.size, 1)) + 2 * np.pi * np.arange(teams) / teams
        radii = self._random.uniform(0.3 * ARENA, 0.7 * ARENA, angles.shape)
        self._places[areas] = directions(angles) * radii[..., None]
        self._headings[areas] = self._random.uniform(-np.pi, np.pi, (areas.size, teams))
        self._velocities[areas] = 0
        self._pellets[areas] = self._somewhere(areas.size, self._pellets.shape[1])
        self._taken[areas] = 0

    def _somewhere(self, *shape: int) -> Float:
        """Returns uniformly random places that an agent can reach, [*shape, 2]."""
        angles, shares = self._random.uniform(0, 2 * np.pi, shape), self._random.uniform(0, 1, shape)
        return directions(angles) * ((ARENA - BODY) * np.sqrt(shares))[..., None]

    def _move(self, commands: Float) -> None:
        """Moves agents by one step, with commands [areas, teams, 2] in -1, 0, 1: forward, to the left; separates
        overlapping agents.
        """
        self._headings = half_turn(self._headings + TURN * commands[..., 1])
        wanted = directions(self._headings) * (SPEED * commands[..., :1])
        self._velocities += GRIP * (wanted - self._velocities)
        moved = self._places + STEP_S * self._velocities
        apart = moved[:, :, None] - moved[:, self._rivals]  # [areas, teams, rivals, 2]
        distance = np.maximum(lengths(apart), 1e-6)
        moved += (apart * (np.maximum(2 * BODY - distance, 0) / (2 * distance))[..., None]).sum(2)
        moved *= np.minimum((ARENA - BODY) / np.maximum(lengths(moved), 1e-6), 1)[..., None]
        self._velocities = (moved - self._places) / STEP_S
        self._places = moved

    def _take(self) -> Ints:
        """Returns the pellets taken in this step, [areas, teams]; others appear in their place."""
        distance = lengths(self._places[:, :, None] - self._pellets[:, None])  # [areas, teams, pellets]
        nearest = distance.argmin(1)
        gone = distance.min(1) < REACH
        takes = gone[:, None] & (nearest[:, None] == np.arange(len(self._ids))[:, None])
        taken: Ints = takes.sum(2)
        self._taken += taken
        self._pellets[gone] = self._somewhere(int(gone.sum()))
        return taken

    def _observe(self) -> list[list[Array]]:
        place = self._places[:, :, None]
        leads = np.clip((self._taken[:, :, None] - self._taken[:, self._rivals]) / LEAD, -1, 1)  # over each rival
        alone = np.concatenate([-place / ARENA, self._velocities[:, :, None] / SPEED], 2)
        pellets = _nearest_first(self._pellets[:, None] - place)
        away = self._places[:, self._rivals] - place
        moving = self._velocities[:, self._rivals] / SPEED
        rivals = _nearest_first(away, moving, leads[..., None])
        left = np.repeat(1 - self._ages[:, None] / MAX_STEPS, len(self._ids), 1)
        parts = [
            in_own_frame(alone, self._headings),
            np.stack([left, leads.min(2)], -1),
            in_own_frame(pellets / ARENA, self._headings),
            in_own_frame(rivals[..., :2] / ARENA, self._headings),
            in_own_frame(rivals[..., 2:4], self._headings),
            rivals[..., 4],
        ]
        seen = np.concatenate(parts, -1)
        return [[seen.reshape(-1, seen.shape[-1])]] * len(self._ids)


def _outcomes(taken: Ints) -> Float:
    """Returns the share of rivals with fewer pellets, [areas, teams]; an equal number counts half."""
    ahead = np.sign(taken[:, :, None] - taken[:, None]).sum(2)
    outcomes: Float = 0.5 + 0.5 * ahead / (taken.shape[1] - 1)
    return outcomes


def _nearest_first(away: Float, *others: Float) -> Float:
    """Sorts vectors [areas, teams, n, 2] and their columns by length, joined in the last dimension."""
    order = lengths(away).argsort(2, kind="stable")[..., None]
    columns: Float = np.take_along_axis(np.concatenate([away, *others], -1), order, 2)
    return columns
