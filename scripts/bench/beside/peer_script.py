"""PPO in one file, in the style of CleanRL: `python -m beside.peer_script GAME SEED`.

One process steps the environments one after the other, acts and learns in turn. The clipped objective, generalized
advantage estimation and the bootstrap at a time limit are those of Schulman et al. 2017 (arXiv 1707.06347), 2015
(arXiv 1506.02438) and Pardo et al. 2018 (arXiv 1712.00378).
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import Tensor, nn

from beside.environments import MAKERS
from beside.settings import GAMES, Settings


class Agent(nn.Module):
    """Actor and critic; for images they share a convolutional encoder."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.images = settings.images
        self.encoder: nn.Module = nn.Identity()
        size, continuous = settings.shape[0], settings.continuous
        if self.images:
            self.encoder = nn.Sequential(
                nn.Conv2d(1, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.Flatten()
            )
            size = self.encoder(torch.zeros(1, 1, 40, 40)).shape[1]
        hidden = settings.units
        self.actor, self.critic = (self._head(size, hidden, out) for out in (settings.choices or continuous, 1))
        self.log_std = nn.Parameter(torch.zeros(continuous)) if continuous else None

    def _head(self, size: int, hidden: int, out: int) -> nn.Sequential:
        if self.images:
            return nn.Sequential(nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, out))
        return nn.Sequential(
            nn.Linear(size, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, out)
        )

    def forward(self, observations: Tensor) -> tuple[torch.distributions.Distribution, Tensor]:
        if self.images:
            observations = observations.permute(0, 3, 1, 2) / 255
        encoded = self.encoder(observations.float())
        out, values = self.actor(encoded), self.critic(encoded)[:, 0]
        if self.log_std is None:
            return torch.distributions.Categorical(logits=out), values
        normal = torch.distributions.Normal(out, self.log_std.exp().expand_as(out))
        return torch.distributions.Independent(normal, 1), values


def main() -> None:
    game, seed = sys.argv[1], int(sys.argv[2])
    settings = GAMES[game]
    torch.manual_seed(seed)
    environments = [MAKERS[game]() for _ in range(settings.environments)]
    discrete, agent = settings.choices > 0, Agent(settings)
    optimizer = torch.optim.Adam(agent.parameters(), lr=settings.rate, eps=1e-5)
    now = np.stack([one.reset(seed=seed * 100 + i)[0] for i, one in enumerate(environments)])
    horizon, count = settings.horizon, settings.environments
    observations = np.zeros((horizon, count, *settings.shape), now.dtype)
    actions = torch.zeros((horizon, count) if discrete else (horizon, count, settings.continuous))
    log_probs, values, rewards, ended = (torch.zeros(horizon, count) for _ in range(4))
    for _ in range(settings.steps // (horizon * count)):
        for step in range(horizon):
            observations[step] = now
            with torch.no_grad():
                policy, values[step] = agent(torch.as_tensor(now))
                actions[step] = policy.sample()
                log_probs[step] = policy.log_prob(actions[step])
            for i, one in enumerate(environments):
                action = int(actions[step, i]) if discrete else actions[step, i].numpy().clip(-1, 1)
                now[i], reward, terminated, truncated, _ = one.step(action)
                if truncated:
                    with torch.no_grad():
                        reward += settings.discount * float(agent(torch.as_tensor(now[i : i + 1]))[1])
                rewards[step, i], ended[step, i] = float(reward), float(terminated or truncated)
                if terminated or truncated:
                    now[i] = one.reset()[0]
        with torch.no_grad():
            following, advantage = agent(torch.as_tensor(now))[1], torch.zeros(count)
        advantages = torch.zeros_like(rewards)
        for step in reversed(range(horizon)):
            alive = 1 - ended[step]
            delta = rewards[step] + settings.discount * alive * following - values[step]
            advantage = delta + settings.discount * settings.trace * alive * advantage
            advantages[step], following = advantage, values[step]
        returns = (advantages + values).flatten()
        flat = torch.as_tensor(observations).flatten(0, 1)
        chosen, old, gains = actions.flatten(0, 1), log_probs.flatten(), advantages.flatten()
        for _ in range(settings.epochs):
            for rows in torch.split(torch.randperm(len(returns)), settings.batch):
                policy, value = agent(flat[rows])
                ratio = (policy.log_prob(chosen[rows]) - old[rows]).exp()
                gain = (gains[rows] - gains[rows].mean()) / (gains[rows].std() + 1e-8)
                surrogate = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                loss = 0.5 * (value - returns[rows]).square().mean() - surrogate
                loss = loss - settings.entropy * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()


if __name__ == "__main__":
    main()
