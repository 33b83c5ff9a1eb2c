"""A parallel PettingZoo environment with two types of agents: hunters catch a rabbit on a ring."""

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

PLACES = 9


class Chase(ParallelEnv):
    """The hunters win where one stands on the rabbit's place, and the rabbit wins after 30 steps."""

    metadata = {"name": "chase_v0"}

    def __init__(self):
        self.possible_agents = ["hunter_0", "hunter_1", "rabbit_0"]

    def observation_space(self, agent):
        return spaces.MultiDiscrete([PLACES] * (2 if agent == "rabbit_0" else 1))  # distances, one-hot

    def action_space(self, agent):
        return spaces.Discrete(3)  # left, wait, right

    def reset(self, seed=None, options=None):
        self.agents, self.steps = list(self.possible_agents), 0
        self.places = dict(zip(self.agents, (0, 1, 5)))
        return self._observe(), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.steps += 1
        for agent, action in actions.items():
            self.places[agent] = (self.places[agent] + int(action) - 1) % PLACES
        caught = self.places["rabbit_0"] in (self.places["hunter_0"], self.places["hunter_1"])
        over = caught or self.steps == 30
        won = float(over) * (1 if caught else -1)
        rewards = {"hunter_0": won, "hunter_1": won, "rabbit_0": -won}
        observations, infos = self._observe(), {agent: {} for agent in self.agents}
        terminations, truncations = dict.fromkeys(self.agents, over), dict.fromkeys(self.agents, False)
        if over:
            self.agents = []
        return observations, rewards, terminations, truncations, infos

    def _observe(self):
        """Returns the way from each hunter to the rabbit: a hunter sees its own, the rabbit both."""
        ways = {agent: (self.places["rabbit_0"] - self.places[agent]) % PLACES for agent in ("hunter_0", "hunter_1")}
        hunters = {agent: np.array([way]) for agent, way in ways.items()}
        return {**hunters, "rabbit_0": np.array([*ways.values()])}


def parallel_env(**options):
    return Chase(**options)
