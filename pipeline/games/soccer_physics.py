"""Simulates the motion of circles on a walled pitch, over all areas at once.

In each 0.1 s players accelerate towards their commanded velocity and turn; overlapping players are pushed apart
equally; a player that touches the ball drives it away from its center, and kicks it if the contact is ahead and it
commands forward; the ball rolls with friction and bounces off the walls except into the goals.
"""

from typing import Final

import numpy as np

from sparring.pipeline.games.base import Bools, Float, Ints, directions, half_turn, lengths

STEP_S: Final = 0.1
PLAYERS: Final = 4
GOAL_X: Final = 7.0
"""Half the pitch's length, in meters: the goal lines are at x = -7 and 7."""
SIDE_Y: Final = 4.0
"""Half the pitch's width, in meters."""
GOAL_HALF_WIDTH: Final = 1.8
PLAYER_RADIUS: Final = 0.5
BALL_RADIUS: Final = 0.3
MAX_PLAYER_SPEED: Final = 3.0
MAX_BALL_SPEED: Final = 7.0
"""A ball moves less than a contact's reach in one step, so it cannot pass through a player."""
GRIP: Final = 0.5
"""Share of the way from its velocity to the commanded one that a player covers in one step."""
TURN: Final = 0.35
"""Radians per step."""
KICK_SPEED: Final = 4.0
BALL_KEEPS: Final = 0.97
"""Share of its velocity that the ball keeps in one step."""
BOUNCE: Final = 0.6

_REACH: Final = PLAYER_RADIUS + BALL_RADIUS
_PAIRS: Final = np.array([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)])
_PUSH: Final = np.array([[(player == a) - (player == b) for a, b in _PAIRS.tolist()] for player in range(PLAYERS)]) / 2
_PLAYER_LIMITS: Final = np.array([GOAL_X - PLAYER_RADIUS, SIDE_Y - PLAYER_RADIUS])
_BALL_LIMITS: Final = np.array([GOAL_X - BALL_RADIUS, SIDE_Y - BALL_RADIUS])
_KICK_OFF: Final = np.array([(-2.0, 1.2), (-4.5, -1.2), (2.0, -1.2), (4.5, 1.2)])
_FACING: Final = np.array([0.0, 0.0, np.pi, np.pi])


class Pitch:
    """Holds the state of `areas` pitches: positions, velocities in meters (per second), headings in radians.

    Attributes:
        positions: [areas, players, 2].
        velocities: [areas, players, 2].
        headings: [areas, players], 0 along +x, counter-clockwise.
        ball: [areas, 2]. It is beyond a goal line only in the step of a goal.
        ball_velocity: [areas, 2].
    """

    def __init__(self, areas: int) -> None:
        self.positions: Float = np.zeros((areas, PLAYERS, 2))
        self.velocities: Float = np.zeros((areas, PLAYERS, 2))
        self.headings: Float = np.zeros((areas, PLAYERS))
        self.ball: Float = np.zeros((areas, 2))
        self.ball_velocity: Float = np.zeros((areas, 2))

    def place(self, areas: Ints, random: np.random.Generator) -> None:
        """Places players near their kick-off places, facing the rivals, and the ball near the center, at rest."""
        shape = (areas.size, PLAYERS)
        self.positions[areas] = _KICK_OFF + random.uniform(-0.8, 0.8, (*shape, 2))
        self.headings[areas] = _FACING + random.uniform(-0.5, 0.5, shape)
        self.velocities[areas] = 0
        self.ball[areas] = random.uniform(-0.5, 0.5, (areas.size, 2))
        self.ball_velocity[areas] = 0

    def advance(self, forward: Float, left: Float, turn: Float) -> tuple[Bools, Float]:
        """Moves everything by `STEP_S`.

        Args:
            forward: [areas, players] in [-1, 1]: full speed back to full speed ahead.
            left: [areas, players] in [-1, 1]: full speed to the right to full speed to the left.
            turn: [areas, players] in [-1, 1]: to the right to the left.

        Returns:
            touched [areas, players]: players that touched the ball; scored [areas]: 1 where team 0 scored, -1
            where team 1 did, else 0.
        """
        self.headings = half_turn(self.headings + TURN * turn)
        ahead = directions(self.headings)
        self._run(forward, left, ahead)
        self._part()
        touched = self._strike(forward, ahead)
        return touched, self._roll()

    def _run(self, forward: Float, left: Float, ahead: Float) -> None:
        across = np.stack([-ahead[..., 1], ahead[..., 0]], -1)
        wanted = ahead * forward[..., None] + across * left[..., None]
        size = np.maximum(lengths(wanted), 1)[..., None]
        self.velocities += GRIP * (wanted * (MAX_PLAYER_SPEED / size) - self.velocities)
        self.positions += STEP_S * self.velocities

    def _part(self) -> None:
        apart = self.positions[:, _PAIRS[:, 0]] - self.positions[:, _PAIRS[:, 1]]
        distance = np.maximum(lengths(apart), 1e-6)[..., None]
        overlap = np.maximum(2 * PLAYER_RADIUS - distance, 0)
        self.positions += _PUSH @ (apart * (overlap / distance))
        np.clip(self.positions, -_PLAYER_LIMITS, _PLAYER_LIMITS, out=self.positions)

    def _strike(self, forward: Float, ahead: Float) -> Bools:
        away = self.ball[:, None] - self.positions
        distance = np.maximum(lengths(away), 1e-6)
        touched: Bools = distance < _REACH
        normal = away / distance[..., None]
        closing = ((self.velocities - self.ball_velocity[:, None]) * normal).sum(-1)
        kick = KICK_SPEED * np.maximum(forward, 0) * np.maximum((ahead * normal).sum(-1), 0)
        push = np.where(touched, (1 + BOUNCE) * np.maximum(closing, 0) + kick, 0)
        self.ball_velocity += (normal * push[..., None]).sum(1)
        overlap = np.where(touched, _REACH - distance, 0)
        self.ball += (normal * overlap[..., None]).sum(1)
        speed = np.maximum(lengths(self.ball_velocity), 1e-6)
        self.ball_velocity *= np.minimum(MAX_BALL_SPEED / speed, 1)[:, None]
        return touched

    def _roll(self) -> Float:
        self.ball += STEP_S * self.ball_velocity
        self.ball_velocity *= BALL_KEEPS
        mouth = np.abs(self.ball[:, 1]) < GOAL_HALF_WIDTH
        over = mouth & (np.abs(self.ball[:, 0]) > GOAL_X)
        limits = np.where((mouth[:, None]) & np.array([True, False]), GOAL_X + 1, _BALL_LIMITS)
        outside = np.abs(self.ball) > limits
        np.clip(self.ball, -limits, limits, out=self.ball)
        leaving = outside & (self.ball * self.ball_velocity > 0)
        self.ball_velocity *= np.where(leaving, -BOUNCE, 1)
        scored: Float = np.where(over, np.sign(self.ball[:, 0]), 0)
        return scored
