"""A Gymnasium environment with an image, in a single form and in a vectorized form: point at the brightest lamp."""

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

SIZE, LAMPS = 20, 4
IMAGE = spaces.Box(0, 255, (SIZE, SIZE, 1), np.uint8)


def draw(lamps):
    """Returns images [n, SIZE, SIZE, 1] in which the quarter of each lamp is bright."""
    images = np.zeros((len(lamps), SIZE, SIZE, 1), np.uint8)
    for image, lamp in zip(images, lamps):
        row, column = divmod(int(lamp), 2)
        image[row * SIZE // 2 :, column * SIZE // 2 :][: SIZE // 2, : SIZE // 2] = 255
    return images


class Lamps(gymnasium.Env):
    """One episode is one choice."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}
    observation_space, action_space = IMAGE, spaces.Discrete(LAMPS)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.lamp = int(self.np_random.integers(LAMPS))
        return draw([self.lamp])[0], {}

    def step(self, action):
        return draw([self.lamp])[0], float(action == self.lamp), True, False, {}

    def render(self):
        return draw([self.lamp])[0].repeat(3, axis=2)  # for `sparring evaluate --video`


class ManyLamps(VectorEnv):
    """The same, for many areas at once. An area that has ended begins anew at the next step."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, num_envs=1):
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = IMAGE, spaces.Discrete(LAMPS)
        self.observation_space = batch_space(IMAGE, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.lamps = self.np_random.integers(LAMPS, size=self.num_envs)
        self.over = np.zeros(self.num_envs, bool)
        return draw(self.lamps), {}

    def step(self, actions):
        new = self.over
        rewards = np.where(new, 0.0, actions == self.lamps)
        self.lamps = np.where(new, self.np_random.integers(LAMPS, size=self.num_envs), self.lamps)
        self.over = ~new
        return draw(self.lamps), rewards, self.over, np.zeros(self.num_envs, bool), {}


gymnasium.register("Lamps-v0", Lamps, vector_entry_point=ManyLamps)
