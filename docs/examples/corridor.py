"""A Gymnasium environment with a Dict observation and an action mask: walk to the end of a corridor."""

import gymnasium
import numpy as np
from gymnasium import spaces

LENGTH = 8


class Corridor(gymnasium.Env):
    """The agent observes its place and whether it stands at a wall. It may wait, or walk left or right."""

    observation_space = spaces.Dict({"place": spaces.Discrete(LENGTH), "wall": spaces.Box(0, 1, (1,), np.float32)})
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.steps = int(self.np_random.integers(LENGTH - 1)), 0
        return self._observe(), self._info()

    def step(self, action):
        self.place += (0, -1, 1)[action]
        self.steps += 1
        terminated, truncated = self.place == LENGTH - 1, self.steps == 50
        return self._observe(), 1.0 if terminated else -0.01, terminated, truncated, self._info()

    def _observe(self):
        return {"place": self.place, "wall": np.array([self.place == 0], np.float32)}

    def _info(self):
        return {"action_mask": np.array([1, self.place > 0, 1], np.int8)}  # 1 = legal


gymnasium.register("Corridor-v0", Corridor)
