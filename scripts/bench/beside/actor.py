"""A policy of ML-Agents that answers observations: `python -m beside.actor CHECKPOINT.pt SIZE ACTIONS NETWORK SEED`.

It runs in ML-Agents' own environment, because a checkpoint there is a pickle and its network is that package's. From
standard input it reads a number of rows (4 bytes, little endian) and as many observations of SIZE float32; to standard
output it writes as many rows of ACTIONS float32, sampled as ML-Agents would send them to a game.
"""

from __future__ import annotations

import json
import struct
import sys
from typing import Any

import numpy as np
from mlagents.torch_utils import torch
from mlagents.trainers.settings import NetworkSettings
from mlagents.trainers.torch_entities.networks import SimpleActor
from mlagents_envs.base_env import ActionSpec, DimensionProperty, ObservationSpec, ObservationType

Floats = Any


class Actor:
    """A network with the weights of a checkpoint. Args: network: `network_settings` of the configuration."""

    def __init__(self, checkpoint: str, size: int, actions: int, network: dict[str, Any]) -> None:
        seen = ObservationSpec((size,), (DimensionProperty.NONE,), ObservationType.DEFAULT, "state")
        self._actor = SimpleActor([seen], NetworkSettings(**network), ActionSpec(actions, ()))
        self._actor.load_state_dict(torch.load(checkpoint, map_location="cpu", weights_only=True)["Policy"])
        self._actor.eval()

    def act(self, observations: Floats) -> Floats:
        """Samples actions: [n, actions] in [-1, 1]."""
        with torch.no_grad():
            _, outputs, _ = self._actor.get_action_and_stats([torch.from_numpy(observations)])
        return outputs["env_action"].continuous


def main() -> None:
    checkpoint, size, actions, network, seed = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(int(seed))
    actor = Actor(checkpoint, int(size), int(actions), json.loads(network))
    read, write = sys.stdin.buffer, sys.stdout.buffer
    while header := read.read(4):
        (rows,) = struct.unpack("<i", header)
        seen = np.frombuffer(read.read(4 * rows * int(size)), "<f4").reshape(rows, int(size)).copy()
        write.write(actor.act(seen).astype("<f4").tobytes())
        write.flush()


if __name__ == "__main__":
    main()
