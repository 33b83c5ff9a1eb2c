"""Plays a team of soccer by script: one player attacks, one keeps.

The scripts are pure functions of the pitch and the team, without memory or randomness.
"""

from typing import Final

import numpy as np

from sparring.pipeline.games.base import Float, half_turn
from sparring.pipeline.games.soccer_physics import GOAL_X, Pitch

_BEHIND: Final = 1.0
"""Distance behind the ball, on the line of the shot, from which a player runs at it, in meters."""
_ASIDE: Final = 1.2
"""Distance beside the ball for a player that has to run round it, in meters."""
_KEEPING: Final = 0.4
"""Share of the way from the own goal to the ball at which the keeper stands."""
_THERE: Final = 0.3
"""Distance from its place at which the keeper stops, in meters."""
_AIM: Final = 0.2
"""Radians off the wanted direction at which a player turns."""
_RUN: Final = 1.0
"""Radians off the wanted direction up to which a player runs."""


def scripted(pitch: Pitch, team: int) -> Float:
    """Returns forward, left and turn of both players of a team, [areas, 2, 3], each -1, 0 or 1.

    The player nearest to the ball runs round it to the side of its own goal and pushes it at the other goal; its
    teammate stands between the ball and the own goal, and looks at the ball.
    """
    players = slice(2 * team, 2 * team + 2)
    own_goal = np.array([GOAL_X if team else -GOAL_X, 0.0])
    place, heading = pitch.positions[:, players], pitch.headings[:, players]
    to_ball = pitch.ball[:, None] - place
    nearest = np.hypot(to_ball[..., 0], to_ball[..., 1]).argmin(1)
    attacks = (np.arange(2) == nearest[:, None])[..., None]
    keeping = (own_goal + _KEEPING * (pitch.ball - own_goal))[:, None] - place
    arrived = ~attacks & ((keeping * keeping).sum(-1, keepdims=True) < _THERE**2)
    way = np.where(attacks, _attack(place, to_ball, -own_goal), np.where(arrived, to_ball, keeping))
    off = half_turn(np.arctan2(way[..., 1], way[..., 0]) - heading)
    forward = (np.abs(off) < _RUN) & ~arrived[..., 0]
    turn = np.where(np.abs(off) > _AIM, np.sign(off), 0)
    return np.stack([forward, np.zeros_like(turn), turn], -1)


def still(pitch: Pitch, team: int) -> Float:
    """Returns zeros, [areas, 2, 3]: no player moves by itself."""
    del team
    return np.zeros((len(pitch.ball), 2, 3))


def _attack(place: Float, to_ball: Float, their_goal: Float) -> Float:
    """Returns where to run, relative to `place`, to get behind the ball and then through it, [areas, 2, 2]."""
    shot = their_goal - (place + to_ball)
    shot = shot / np.maximum(np.hypot(shot[..., 0], shot[..., 1]), 1e-6)[..., None]
    across = np.stack([-shot[..., 1], shot[..., 0]], -1)
    behind, aside = (to_ball * shot).sum(-1), (to_ball * across).sum(-1)
    ready = (behind > _BEHIND / 2) & (np.abs(aside) < 0.4)
    round_it = np.where(behind < _BEHIND / 2, np.where(aside > 0, _ASIDE, -_ASIDE), 0)
    start = to_ball - _BEHIND * shot - across * round_it[..., None]
    way: Float = np.where(ready[..., None], to_ball, start)
    return way
