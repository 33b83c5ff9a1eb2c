"""The networks of the signal: one stays random, the other learns to copy it."""

import numpy as np
import torch
from torch import nn

from sparring.pipeline.learning.signals import RewardNetwork
from sparring.pipeline.networks.perceptron import linear


class Surprise(RewardNetwork):
    def __init__(self, spec, settings, generator, device):
        size = sum(int(np.prod(one.shape)) for one in spec.observations)
        units = settings.network_settings.hidden_units

        def network() -> nn.Sequential:
            return nn.Sequential(linear(size, units, 1.0, generator), nn.Tanh(), linear(units, 16, 1.0, generator))

        self.copy, self.random = network(), network().to(device).requires_grad_(False)
        super().__init__(nn.ModuleList([self.copy, self.random]), self.copy, settings.learning_rate, device)

    def begin(self, steps):
        seen = np.concatenate([one.reshape(len(one), -1) for one in steps.observations], 1)[steps.following]
        self.seen = torch.from_numpy(seen.astype(np.float32)).to(self.optimizer.device)
        with torch.no_grad():
            return self.errors(self.seen).cpu().numpy()

    def learn(self, at):
        loss = self.errors(self.seen[at]).mean()
        self.take_step(loss, {"Losses/Surprise Loss": loss.detach()})

    def errors(self, seen):
        return (self.copy(seen) - self.random(seen)).square().mean(1)
