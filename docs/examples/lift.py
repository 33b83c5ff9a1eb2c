"""A parallel PettingZoo environment: a team lifts a table, which works only while all of them pull."""

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv


class Lift(ParallelEnv):
    """All agents get the same reward: the height that the table has gained."""

    metadata = {"name": "lift_v0"}

    def __init__(self, carriers=3):
        self.possible_agents = [f"carrier_{index}" for index in range(carriers)]

    def observation_space(self, agent):
        return spaces.Box(0, 1, (2,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)  # rest, pull

    def reset(self, seed=None, options=None):
        self.agents, self.height, self.steps = list(self.possible_agents), 0.0, 0
        return self._observe(), {agent: {} for agent in self.agents}

    def step(self, actions):
        lifted = 0.1 if all(actions.values()) else -0.02
        self.height, self.steps = max(0.0, self.height + lifted), self.steps + 1
        rewards = dict.fromkeys(self.agents, lifted)
        terminations = dict.fromkeys(self.agents, self.height >= 1.0)
        truncations = dict.fromkeys(self.agents, self.steps == 40)
        observations, infos = self._observe(), {agent: {} for agent in self.agents}
        if self.height >= 1.0 or self.steps == 40:
            self.agents = []
        return observations, rewards, terminations, truncations, infos

    def _observe(self):
        seen = np.array([self.height, self.steps / 40], np.float32)
        return dict.fromkeys(self.agents, seen)


def parallel_env(**options):
    return Lift(**options)
