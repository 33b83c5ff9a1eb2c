"""Simulates two teams of two players on a walled pitch with a ball.

Rules and reports are here, the motion is in `soccer_physics.py`, a scripted team in `soccer_script.py`. Team 0 attacks
+x, team 1 attacks -x; each agent observes the pitch in its own frame, so that one policy plays both sides.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final

import numpy as np

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.games.base import Bools, BuiltInGame, Float, Ints, in_own_frame, lengths, one_vector
from sparring.pipeline.games.soccer_physics import (
    BALL_RADIUS,
    GOAL_HALF_WIDTH,
    GOAL_X,
    MAX_BALL_SPEED,
    PLAYER_RADIUS,
    PLAYERS,
    SIDE_Y,
    STEP_S,
    Pitch,
)
from sparring.pipeline.games.soccer_script import scripted, still
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.specs import ActionSpec, Array, BehaviorId

MAX_STEPS: Final = 500
EXISTENCE: Final = -0.2 / MAX_STEPS
"""Agent's own reward per step: a match without goals costs 0.2."""
BEHIND: Final = 1.0
"""Distance behind the ball from which a player can drive it ahead, in meters."""
BRANCHES: Final = (3, 3, 3)
OBSERVATION_SIZE: Final = 27

_SCRIPTS: Final[Mapping[str, Callable[[Pitch, int], Float]]] = {"scripted": scripted, "still": still}
_RIVALS_ARE: Final = ("learning", *_SCRIPTS)
_TEAMMATES: Final = np.array([1, 0, 3, 2])
_RIVALS: Final = np.array([[2, 3, 0, 1], [3, 2, 1, 0]])
_ATTACKS: Final = np.array([1.0, 1.0, -1.0, -1.0])
_LEFT_RIGHT: Final = np.array([0.0, 1.0, -1.0])


class Soccer(BuiltInGame):
    """Simulates `areas` pitches with 4 agents each: players 0 and 1 of team 0, players 2 and 3 of team 1.

    Observation `view` [27], in the agent's own frame (x ahead, y to the left; lengths divided by half the pitch's
    length, speeds by the ball's largest): positions of ball, teammate, two rivals, rival goal, own goal (0-11);
    velocities of ball, itself, teammate, two rivals (12-21); heading relative to the direction of attack, teammate's
    heading relative to its own, each as cosine and sine (22-25); share of elapsed time (26). Actions, 3 branches of 3:
    stay, forward, back; stay, left, right; keep heading, turn left, turn right. Forward contact kicks the ball.

    Own reward: a small cost per step; with these environment parameters also `ball_touch` for contact, `ball_progress`
    for each pitch length that the ball moves towards the rival goal, and `ball_approach` for each that the agent moves
    towards the place from which it would drive it there. Group reward: for a goal, 1 minus the share of elapsed time
    for the scoring team, -1 for the other. After a goal (terminated) or 500 steps (interrupted, outcome 0.5) all agents
    of the area end and the next match starts in the same report.

    Args:
        areas: number of pitches side by side.
        behavior: name of the behavior.
        rivals: policy of team 1. `learning`: the trainer. Otherwise only team 0 is reported, and team 1 is moved here:
            `scripted`, the player nearest to the ball drives it to the other goal, the other one keeps; `still`, both
            stand.
        every: players decide at each `every`-th step of 0.1 s, and repeat their actions in between.

    Raises:
        SettingsError: `rivals` is none of these, or `every` does not divide the steps of a match.
    """

    name = "soccer"
    DEFAULTS: ClassVar = {"ball_touch": 0.0, "ball_progress": 0.0, "ball_approach": 0.0}

    def __init__(self, areas: int = 1, behavior: str = "Soccer", rivals: str = "learning", every: int = 1) -> None:
        if rivals not in _RIVALS_ARE:
            raise SettingsError(f"got rivals={rivals!r}; expected {', '.join(_RIVALS_ARE)}; correct {rivals!r}")
        if every < 1 or MAX_STEPS % every:
            raise SettingsError(f"got every={every}; expected a divisor of {MAX_STEPS}; give 1, 2, 4, 5 or 10")
        self._rivals = _SCRIPTS.get(rivals)
        self._every = every
        teams = (0, 1) if self._rivals is None else (0,)
        behavior_ids = [str(BehaviorId(name=behavior, team=team)) for team in teams]
        spec = one_vector("view", OBSERVATION_SIZE, ActionSpec(discrete=BRANCHES))
        super().__init__(areas, dict.fromkeys(behavior_ids, spec), PLAYERS)
        self._sides = [self._agents.reshape(areas, -1)[:, 2 * team : 2 * team + 2].ravel() for team in teams]
        self._groups = 1 + 2 * self._areas[:, None] + np.array([0, 0, 1, 1])
        self._matches = self._areas.copy()
        self._pitch = Pitch(areas)
        self._scored = np.zeros(areas)

    def scripts(self) -> Mapping[str, tuple[str, ...]]:
        """Returns the scripts that can play either team."""
        return {BehaviorId.parse(self._ids[0]).name: tuple(_SCRIPTS)}

    def scene(self) -> Mapping[str, object]:
        """Returns the pitch, the players and the ball, for replays."""
        x, y, goal = GOAL_X, SIDE_Y, GOAL_HALF_WIDTH
        players = [{"radius": PLAYER_RADIUS, "team": number // 2, "label": str(number % 2 + 1)} for number in range(4)]
        return {
            "game": self.name,
            "field": [-x - 1, -y, x + 1, y],
            "frame_s": STEP_S * self._every,
            "fixed": [
                {"rect": [-x, -y, x, y], "fill": "ground"},
                {"rect": [-x - 1, -goal, -x, goal], "fill": "team 0"},
                {"rect": [x, -goal, x + 1, goal], "fill": "team 1"},
                {"line": [0, -y, 0, y]},
                {"circle": [0, 0, 1.2]},
            ],
            "moving": [*players, {"radius": BALL_RADIUS, "fill": "ball"}],
        }

    def frame(self) -> Sequence[Sequence[float]]:
        """Returns the places of the first pitch."""
        pitch = self._pitch
        players = np.concatenate([pitch.positions[0], pitch.headings[0][:, None]], 1).tolist()
        return [*players, [*pitch.ball[0].tolist(), 0.0]]

    def score(self) -> Sequence[float]:
        """Returns the goals of both teams on the first pitch."""
        return int(self._scored[0] > 0), int(self._scored[0] < 0)

    def step(self, actions: Mapping[str, BehaviorActions]) -> tuple[BehaviorReport, ...]:
        """Plays on to the next decision on all pitches."""
        away = self._to_place()
        touched, progress, scored = self._advance(actions)
        self._scored = scored
        self._ages += self._every
        share = self._ages / MAX_STEPS
        own = np.where(touched, self._constants["ball_touch"], 0.0) + EXISTENCE * self._every
        own += self._constants["ball_progress"] * progress[:, None] * _ATTACKS / (2 * GOAL_X)
        own += self._constants["ball_approach"] * (away - self._to_place()) / (2 * GOAL_X)
        won = scored[:, None] * _ATTACKS  # [areas, players] 1 scored, -1 conceded, 0 neither
        group = np.where(won > 0, 1 - share[:, None], won)
        over = (scored != 0) | (self._ages >= MAX_STEPS)
        return self._play_on(over, own, interrupted=scored == 0, outcomes=won / 2 + 0.5, group_rewards=group)

    def _begin(self, areas: Ints) -> None:
        self._pitch.place(areas, self._random)
        self._scored[areas] = 0

    def _to_place(self) -> Float:
        """Returns the meters to the place behind the ball, as seen from the rival goal, [areas, players]."""
        ball = self._pitch.ball[:, None]
        to_goal = np.stack([_ATTACKS, np.zeros(PLAYERS)], -1) * GOAL_X - ball
        to_goal /= np.maximum(lengths(to_goal), 1e-6)[..., None]
        return lengths(ball - BEHIND * to_goal - self._pitch.positions)

    def _advance(self, actions: Mapping[str, BehaviorActions]) -> tuple[Bools, Float, Float]:
        """Moves everything; after a goal, later steps of the decision do not count.

        Returns:
            touched [areas, players]; motion of the ball along +x in meters [areas]; scored [areas] 1, -1 or 0.
        """
        touched = np.zeros((self._areas.size, PLAYERS), bool)
        progress, scored = np.zeros(self._areas.size), np.zeros(self._areas.size)
        for _ in range(self._every):
            before = self._pitch.ball[:, 0].copy()
            contact, goal = self._pitch.advance(*self._commands(actions))
            undecided = scored == 0
            touched |= contact & undecided[:, None]
            progress += np.where(undecided, self._pitch.ball[:, 0] - before, 0)
            scored = np.where(undecided, goal, scored)
        return touched, progress, scored

    def _commands(self, actions: Mapping[str, BehaviorActions]) -> tuple[Float, ...]:
        """Returns the commands forward, left and turn to the left, each [areas, players] in -1, 0, 1."""
        teams = [self._moves(team, actions[key]) for team, key in enumerate(self._ids)]
        if self._rivals is not None:
            teams.append(self._rivals(self._pitch, 1))
        moves = np.concatenate(teams, 1)
        return moves[..., 0], moves[..., 1], moves[..., 2]

    def _moves(self, team: int, actions: BehaviorActions) -> Float:
        """Returns the commands of both players of a team, [areas, 2, 3]: the trainer's, or those of the script that it
        requests.
        """
        moves = _LEFT_RIGHT[actions.discrete.reshape(-1, 2, 3)]
        if actions.scripts is not None:
            asked = actions.scripts.reshape(-1, 2)
            for number, script in enumerate(_SCRIPTS.values(), 1):
                if np.any(asked == number):
                    moves = np.where((asked == number)[..., None], script(self._pitch, team), moves)
        return moves

    def _observe(self) -> list[list[Array]]:
        pitch, seen_by = self._pitch, (_TEAMMATES, *_RIVALS)
        place, speed, heading = pitch.positions, pitch.velocities, pitch.headings
        goals = np.stack([_ATTACKS, np.zeros(PLAYERS)], -1) * GOAL_X
        away = [pitch.ball[:, None] - place, *(place[:, others] - place for others in seen_by)]
        away += [goals - place, -goals - place]
        ball_speed = pitch.ball_velocity[:, None] + np.zeros_like(speed)
        moving = [ball_speed, speed, *(speed[:, others] for others in seen_by)]
        vectors = [np.stack(away, 2) / GOAL_X, np.stack(moving, 2) / MAX_BALL_SPEED]  # in the pitch's frame
        facing = heading[:, _TEAMMATES] - heading
        share = np.broadcast_to(self._ages[:, None] / MAX_STEPS, heading.shape)
        rest = [np.cos(heading) * _ATTACKS, np.sin(heading) * _ATTACKS, np.cos(facing), np.sin(facing), share]
        seen = np.concatenate([in_own_frame(np.concatenate(vectors, 2), heading), np.stack(rest, -1)], -1)
        return [[seen.reshape(-1, OBSERVATION_SIZE)]] * len(self._ids)
