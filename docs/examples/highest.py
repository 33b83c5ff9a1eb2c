"""A turn-based PettingZoo environment with masks: a card game for two in which the higher card wins a trick."""

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv

CARDS = 6


class Highest(AECEnv):
    """Each player holds the cards 0 to 5 and plays one at each turn; a card that was played is masked.

    Who plays second in a trick sees the first card, and plays first in the next one.
    """

    metadata = {"name": "highest_v0"}

    def __init__(self):
        self.possible_agents = ["player_0", "player_1"]
        self.random = np.random.default_rng()

    def observation_space(self, agent):
        seen = spaces.Box(0, 1, (2 * CARDS + 1,), np.float32)
        return spaces.Dict({"observation": seen, "action_mask": spaces.Box(0, 1, (CARDS,), np.int8)})

    def action_space(self, agent):
        return spaces.Discrete(CARDS)

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        self.hands = {agent: np.ones(CARDS, np.int8) for agent in self.agents}
        self.table = None
        self.points = dict.fromkeys(self.agents, 0)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}
        self.agent_selection = str(self.random.choice(self.agents))

    def observe(self, agent):
        other = self._other(agent)
        table = 0.0 if self.table is None else (self.table + 1) / CARDS
        seen = np.concatenate([self.hands[agent], self.hands[other], [table]]).astype(np.float32)
        return {"observation": seen, "action_mask": self.hands[agent].copy()}  # 1 = legal

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        self.hands[agent][action] = 0
        other = self._other(agent)
        if self.table is None:
            self.table, self.agent_selection = action, other
        else:
            self.points[agent] += action > self.table
            self.points[other] += action < self.table
            self.table = None
            if not self.hands[agent].any():
                won = float(np.sign(self.points[agent] - self.points[other]))
                self.rewards = {agent: won, other: -won}
                self.terminations = dict.fromkeys(self.agents, True)
        self._accumulate_rewards()

    def _other(self, agent):
        return self.possible_agents[1 - self.possible_agents.index(agent)]


def env(**options):
    return Highest(**options)
