"""Simulates the 1-D goal game, in which an agent walks to the side that is shown."""

from collections.abc import Mapping
from typing import Final

import numpy as np

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.games.base import BuiltInGame, Float, Ints
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.specs import ActionSpec, Array, BehaviorId, BehaviorSpec, ObservationKind, ObservationSpec

STEP_SIZE: Final = 0.2
TIME_PENALTY: Final = 0.01
FEWEST_STEPS: Final = 6
SUCCESS: Final = 1 + FEWEST_STEPS * TIME_PENALTY
SHOWN_STEPS: Final = 2
MOST_ENTITIES: Final = 4

_KINDS: Final[tuple[ObservationKind, ...]] = ("vector", "image", "entities", "goal")


class Goal(BuiltInGame):
    """Simulates `areas` games, each with one agent of the same behavior.

    The goal is -1 or +1. Each action moves its own position, from 0, by at most 0.2 within [-1, 1]: a discrete 1 is +,
    a 0 is -. The episode ends when every position is at an end; the reward is then 1.06 times the mean of position
    times goal, before that -0.01 per decision.

    Args:
        areas: number of games side by side.
        actions: number of actions, each with its own position.
        discrete: use branches of two choices instead of continuous actions.
        memory: show the goal only at the first 2 decisions of an episode, then 0.
        behavior: name of the behavior.
        hybrid: use as many branches of two choices beside the continuous actions.
        observe: kinds of observation of the goal, separated by +. `vector` [1] is the goal. `image` [3, pixels, pixels]
            is red for -1, green for +1, black for 0, in bytes. `entities` [4, 2] are 1 to 4 in a random order: one is 1
            and the goal, the others are -1 and a random side. `goal` [2] is one-hot for the side of the goal (1 0 or 0
            1); a vector beside it is the mean position instead.
        pixels: height and width of images.
        team: team of the agents.

    Raises:
        SettingsError: `observe` has an unknown kind, or both discrete and hybrid are set.
    """

    name = "goal"

    def __init__(
        self,
        areas: int = 1,
        actions: int = 1,
        discrete: bool = False,
        memory: bool = False,
        behavior: str = "Goal",
        hybrid: bool = False,
        observe: str = "vector",
        pixels: int = 20,
        team: int = 0,
    ) -> None:
        wanted = observe.split("+")
        if unknown := [kind for kind in wanted if kind not in _KINDS]:
            raise SettingsError(f"got observe={observe!r}; expected {' + '.join(_KINDS)}; correct {unknown[0]!r}")
        if discrete and hybrid:
            raise SettingsError("got discrete and hybrid; expected one of them; leave one out")
        self._kinds = [kind for word in wanted for kind in _KINDS if kind == word]
        self._pixels = pixels
        self._shown = SHOWN_STEPS if memory else None
        names = ["goal"] if len(wanted) == 1 else [f"{kind}-{at}" for at, kind in enumerate(wanted)]
        seen = tuple(self._spec(kind, name) for kind, name in zip(self._kinds, names, strict=True))
        branches = (2,) * (actions if discrete or hybrid else 0)
        spec = ActionSpec(continuous=0 if discrete else actions, discrete=branches)
        behavior_id = str(BehaviorId(name=behavior, team=team))
        super().__init__(areas, {behavior_id: BehaviorSpec(observations=seen, actions=spec)})
        self._positions = np.zeros((areas, spec.parts))
        self._goals = np.ones(areas)

    def step(self, actions: Mapping[str, BehaviorActions]) -> tuple[BehaviorReport, ...]:
        """Moves every position."""
        self._positions += moves(actions[self._ids[0]])
        self._positions.clip(-1, 1, out=self._positions)
        self._ages += 1
        over = np.abs(self._positions).min(1) >= 1
        reached = SUCCESS * (self._positions.sum(1) / self._positions.shape[1]) * self._goals
        return self._play_on(over, np.where(over, reached, -TIME_PENALTY))

    def _spec(self, kind: ObservationKind, name: str) -> ObservationSpec:
        image = (3, self._pixels, self._pixels)
        shape = {"vector": (1,), "image": image, "entities": (MOST_ENTITIES, 2), "goal": (2,)}[kind]
        return ObservationSpec(name=name, shape=shape, dtype="uint8" if kind == "image" else "float32", kind=kind)

    def _observe(self) -> list[list[Array]]:
        goals = self._goals if self._shown is None else np.where(self._ages < self._shown, self._goals, 0)
        seen = {"vector": self._vector, "image": self._image, "entities": self._entities, "goal": _side}
        return [[seen[kind](goals) for kind in self._kinds]]

    def _vector(self, goals: Float) -> Array:
        return (self._positions.mean(1) if "goal" in self._kinds else goals)[:, None]

    def _image(self, goals: Float) -> Array:
        images = np.zeros((len(goals), 3, self._pixels, self._pixels), np.uint8)
        images[goals < 0, 0] = 255
        images[goals > 0, 1] = 255
        return images

    def _entities(self, goals: Float) -> Array:
        areas = len(goals)
        sides = self._random.choice([-1.0, 1.0], (areas, MOST_ENTITIES))
        seen = np.stack([np.full_like(sides, -1.0), sides], 2)
        seen[:, 0] = np.stack([np.ones(areas), goals], 1)
        seen[np.arange(MOST_ENTITIES) >= self._random.integers(1, MOST_ENTITIES + 1, (areas, 1))] = 0
        order = self._random.random((areas, MOST_ENTITIES)).argsort(1)
        return np.take_along_axis(seen, order[:, :, None], 1)

    def _begin(self, areas: Ints) -> None:
        self._positions[areas] = 0
        self._goals[areas] = self._random.integers(0, 2, areas.size) * 2 - 1


def moves(chosen: BehaviorActions) -> Float:
    """Returns how far each action moves, [n, actions]."""
    sides = np.where(chosen.discrete == 1, STEP_SIZE, -STEP_SIZE)
    return np.concatenate([chosen.continuous.clip(-STEP_SIZE, STEP_SIZE), sides], 1)


def _side(goals: Float) -> Array:
    return np.stack([goals < 0, goals > 0], 1).astype(np.float32)
