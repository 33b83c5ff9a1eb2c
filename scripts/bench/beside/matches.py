"""Matches between policies of both trainers: matches between checkpoints, with sampled actions on both sides."""

from __future__ import annotations

import json
import re
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from beside.games import GAMES, Floats, Game
from beside.runs import BENCH
from sparring.pipeline.learning.checkpoints import load
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from sparring.pipeline.stepping.policies import NetworkPolicy
from sparring.services.commands.players import actor_of

ARENAS: Final = 25
_RESAMPLES: Final = 10_000


class Policy(Protocol):
    def act(self, observations: Floats) -> Floats:
        """Samples actions [n, actions] in [-1, 1] for observations [n, size]."""


class Ours:
    """A checkpoint of this project."""

    def __init__(self, checkpoint: Path, game: Game, seed: int) -> None:
        weights = actor_of(load(checkpoint))
        spec = BehaviorSpec(
            observations=(ObservationSpec(name="state", shape=(game.size,)),),
            actions=ActionSpec(continuous=game.actions),
        )
        network = NetworkSettings.model_validate_json(weights.network)
        self._policy = NetworkPolicy(spec, network, np.random.default_rng(seed))
        self._policy.load(weights)

    def act(self, observations: Floats) -> Floats:
        return self._policy.act((observations,), None).executed


class Theirs:
    """A checkpoint of ML-Agents, in a process of its environment. Args: process: of `beside.actor`."""

    def __init__(self, process: subprocess.Popen[bytes], actions: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._write, self._read, self._actions = process.stdin, process.stdout, actions

    def act(self, observations: Floats) -> Floats:
        self._write.write(struct.pack("<i", len(observations)) + observations.astype("<f4").tobytes())
        self._write.flush()
        answer = self._read.read(4 * len(observations) * self._actions)
        return np.frombuffer(answer, "<f4").reshape(len(observations), self._actions)


@contextmanager
def theirs(checkpoint: Path, game: Game, network: Mapping[str, Any], interpreter: Path, seed: int) -> Iterator[Theirs]:
    """A policy of ML-Agents while it is needed. Args: network: `network_settings` of its run."""
    words = [checkpoint, game.size, game.actions, json.dumps(network), seed]
    command = [str(interpreter), "-m", "beside.actor", *map(str, words)]
    with subprocess.Popen(command, cwd=BENCH, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield Theirs(process, game.actions)
        finally:
            process.kill()


def points(game: str, ones: Sequence[Policy], matches: int, seed: int) -> float:
    """Returns the points of the first of two policies, half from each side: 1 for a win, 0.5 for a draw.

    Of each arena the first matches count, so that short ones weigh no more than long ones.

    Args:
        matches: a multiple of 2 `ARENAS`.
        seed: of the starts.
    """
    total = 0.0
    for side in (0, 1):
        played = GAMES[game](ARENAS, seed + side)
        own, other = played.keys[side], played.keys[1 - side]
        seen, left = played.reset(), np.full(ARENAS, matches // 2 // ARENAS)
        while left.any():
            turns = played.step({own: ones[0].act(seen[own]), other: ones[1].act(seen[other])})
            counted = turns[own].ended & (left > 0)
            total += float((1 + turns[own].rewards[counted]).sum() / 2)
            left -= counted
            seen = {key: turn.observations for key, turn in turns.items()}
    return total


def nearest(paths: Sequence[Path], steps: int) -> Path:
    """Returns the checkpoint whose number of steps is nearest to `steps`."""
    return min(paths, key=lambda path: abs(int(re.findall(r"\d+", path.stem)[0]) - steps))


def over_seeds(shares: NDArray[np.float64]) -> tuple[float, float]:
    """Returns a 95 % bootstrap interval of the mean share over pairs of runs: seeds of both sides are resampled.

    Args:
        shares: [our seeds, their seeds] points per match.
    """
    random, (ours, others) = np.random.default_rng(0), shares.shape
    rows, columns = random.integers(ours, size=(_RESAMPLES, ours)), random.integers(others, size=(_RESAMPLES, others))
    means = shares[rows[:, :, None], columns[:, None, :]].mean((1, 2))
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)
