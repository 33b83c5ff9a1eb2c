"""Simulates a chaser and a runner in a walled square with a pillar in its center.

The two have different behaviors: the chaser is faster in the long run, the runner turns faster and sprints while its
stamina lasts. They also have different observations.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

import numpy as np

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.games.base import BuiltInGame, Float, Ints, directions, lengths
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.specs import ActionSpec, Array, BehaviorId, BehaviorSpec, ObservationSpec

MAX_STEPS: Final = 120
STEP_S: Final = 0.1
HALF: Final = 4.0
"""Half the square's side, in meters."""
PILLAR: Final = 1.0
"""Radius of the pillar, in meters."""
BODY: Final = 0.3
"""Radius of a player, in meters."""
TAG_REACH: Final = 0.8
"""Distance of the centers at which the chaser wins, in meters."""
SPEEDS: Final = np.array([3.2, 2.6])
"""Largest speeds of chaser and runner, in meters per second."""
SPRINT: Final = 1.5
"""Factor of the speed in a sprint."""
RESTED: Final = 80
"""Stamina of a rested runner; a step without a sprint restores 1."""
TIRES: Final = 4
"""Stamina cost of a step of a sprint."""
GRIPS: Final = np.array([0.2, 0.5])
"""Share of the way from its velocity to the commanded one that a player covers in one step."""
FULL_SPEED: Final = 1 / 3
"""Length of an action that commands full speed."""
STEP_COST: Final = 0.5 / MAX_STEPS
VIEW: Final = 9
SURROUNDINGS: Final = 6

_LIMIT: Final = HALF - BODY
_RING: Final = PILLAR + BODY
_START: Final = 2.5
"""Largest distance from the center at the start of a match, in meters."""
_OTHER: Final = np.array([1, 0])


class Tag(BuiltInGame):
    """Simulates `areas` squares with a chaser (team 0) and a runner (team 1) in each.

    Both observe `view` [9]: own place, own velocity, the other's place and velocity relative to their own, two numbers
    each (lengths divided by half the side, speeds by the runner's largest), and the share of remaining time. The runner
    also observes `surroundings` [6]: distance to the walls at -x, +x, -y, +y and to the pillar (divided by half the
    side) and its stamina (1 rested .. 0 tired).

    Actions: continuous, the direction along x and y, at full speed for a length of a third or more; the runner's branch
    of 2 also sprints with 1, as long as it has stamina.

    The chaser wins (outcome 1) when it comes within 0.8 m of the runner; the runner wins when 120 steps are over.
    Either is an end by the rules (terminated), and the next match starts in the same report. The chaser's reward: 1 for
    its win, -1 for the runner's, -0.5 / 120 per step, and the environment parameter `approach` for each meter that the
    two come nearer to each other, if that is set. The runner's is the same with the other sign.

    Args:
        areas: number of squares side by side.
        chaser: name of the chaser's behavior.
        runner: name of the runner's behavior.

    Raises:
        SettingsError: both behaviors have the same name.
    """

    name = "tag"
    DEFAULTS: ClassVar = {"approach": 0.0}

    def __init__(self, areas: int = 1, chaser: str = "Chaser", runner: str = "Runner") -> None:
        if chaser == runner:
            raise SettingsError(f"got {chaser!r} as the name of both behaviors; expected two; rename one of them")
        view = ObservationSpec(name="view", shape=(VIEW,))
        surroundings = ObservationSpec(name="surroundings", shape=(SURROUNDINGS,))
        specs = (
            BehaviorSpec(observations=(view,), actions=ActionSpec(continuous=2)),
            BehaviorSpec(observations=(view, surroundings), actions=ActionSpec(continuous=2, discrete=(2,))),
        )
        behavior_ids = [str(BehaviorId(name=name, team=team)) for team, name in enumerate((chaser, runner))]
        super().__init__(areas, dict(zip(behavior_ids, specs, strict=True)), 2)
        self._agents = np.repeat(self._areas, 2)
        self._matches = self._areas.copy()
        self._places: Float = np.zeros((areas, 2, 2))  # areas, players, x and y
        self._velocities: Float = np.zeros((areas, 2, 2))
        self._stamina = np.full(areas, RESTED)

    def scene(self) -> Mapping[str, object]:
        """Returns the square with its pillar, and both players, for replays."""
        return {
            "game": self.name,
            "field": [-HALF, -HALF, HALF, HALF],
            "frame_s": STEP_S,
            "fixed": [
                {"rect": [-HALF, -HALF, HALF, HALF], "fill": "ground"},
                {"circle": [0, 0, PILLAR], "fill": "wall"},
            ],
            "moving": [{"radius": BODY, "team": team, "label": label} for team, label in enumerate("CR")],
        }

    def frame(self) -> Sequence[Sequence[float]]:
        """Returns the places of the first square; players look where they run."""
        speed = self._velocities[0]
        return np.concatenate([self._places[0], np.arctan2(speed[:, 1], speed[:, 0])[:, None]], 1).tolist()  # type: ignore[no-any-return]

    def step(self, actions: Mapping[str, BehaviorActions]) -> tuple[BehaviorReport, ...]:
        """Moves both players and decides who has won."""
        before = self._apart()
        self._move(actions)
        self._ages += 1
        apart = self._apart()
        tagged = apart < TAG_REACH
        over = tagged | (self._ages >= MAX_STEPS)
        gain = self._constants["approach"] * (before - apart) - STEP_COST  # the chaser's; the runner loses it
        gain[over] += np.where(tagged[over], 1, -1)
        outcomes = np.stack([tagged, ~tagged], 1).astype(np.float64)
        return self._play_on(over, np.stack([gain, -gain], 1), outcomes=outcomes)

    def _begin(self, areas: Ints) -> None:
        """Places both at random around the pillar, at least an eighth of a turn apart."""
        turn, away = self._random.uniform(0, 2 * np.pi, areas.size), self._random.uniform(0.25, 1.75, areas.size)
        angles = np.stack([turn, turn + np.pi * away], -1)
        radii = self._random.uniform(_RING, _START, (areas.size, 2))
        self._places[areas] = directions(angles) * radii[..., None]
        self._velocities[areas] = 0
        self._stamina[areas] = RESTED

    def _move(self, actions: Mapping[str, BehaviorActions]) -> None:
        """Moves the players by one step; they cannot pass a wall or the pillar."""
        commands: Float = np.stack([actions[key].continuous for key in self._ids], 1) / np.float64(FULL_SPEED)
        wanted = commands / np.maximum(lengths(commands), 1)[..., None]
        speeds = np.repeat(SPEEDS[None], self._areas.size, 0)
        sprints = (actions[self._ids[1]].discrete[:, 0] == 1) & (self._stamina >= TIRES)
        speeds[sprints, 1] *= SPRINT
        self._stamina = np.minimum(self._stamina + np.where(sprints, -TIRES, 1), RESTED)
        self._velocities += GRIPS[:, None] * (wanted * speeds[..., None] - self._velocities)
        moved = self._places + STEP_S * self._velocities
        far = np.maximum(lengths(moved), 1e-6)[..., None]
        held = np.clip(moved * np.maximum(_RING / far, 1), -_LIMIT, _LIMIT)
        self._velocities = (held - self._places) / STEP_S
        self._places = held

    def _apart(self) -> Float:
        """Returns the distance between the two in meters, [areas]."""
        return lengths(self._places[:, 1] - self._places[:, 0])

    def _observe(self) -> list[list[Array]]:
        place, speed = self._places / HALF, self._velocities / (SPEEDS[1] * SPRINT)
        left = np.broadcast_to((1 - self._ages / MAX_STEPS)[:, None, None], (self._areas.size, 2, 1))
        parts = [place, speed, place[:, _OTHER] - place, speed[:, _OTHER] - speed, left]
        view = np.concatenate(parts, -1).reshape(-1, VIEW)
        limit, ring = _LIMIT / HALF, _RING / HALF
        own = place[:, 1]
        free = [limit + own[:, 0], limit - own[:, 0], limit + own[:, 1], limit - own[:, 1], lengths(own) - ring]
        around = np.stack([*free, self._stamina / RESTED], -1)  # of the runner
        return [[view], [view, around.repeat(2, 0)]]
