"""Which opponent plays next."""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from sparring.pipeline.coordination.settings import SelfPlaySettings
from sparring.pipeline.specs import BehaviorId

OPPONENTS_FILE: Final = "opponents.json"


@dataclass(frozen=True, slots=True)
class ExternalOpponent:
    """An opponent that is no snapshot of this run.

    Attributes:
        label: its name as a player.
        weight: relative frequency; all snapshots together have 1.
        script: of the simulators, that plays it; "" for weights.
    """

    label: str
    weight: float
    script: str = ""


def opponents_of(directory: Path) -> dict[str, list[ExternalOpponent]]:
    """Returns the external opponents in the folder of a run, by behavior name, in the order of their numbers."""
    path = directory / OPPONENTS_FILE
    known = json.loads(path.read_text()) if path.exists() else {}
    return {
        name: [ExternalOpponent(label, one["weight"], one["script"]) for label, one in own.items()]
        for name, own in known.items()
    }


@dataclass(slots=True)
class Record:
    """The record of matches against one opponent.

    Attributes:
        matches: how many.
        points: 1 for each won, 0.5 for each drawn.
    """

    matches: int = 0
    points: float = 0.0

    @property
    def rate(self) -> float:
        """Win rate, where a draw counts half, smoothed towards 0.5 while matches are few (Laplace)."""
        return (self.points + 1) / (self.matches + 2)


@dataclass(slots=True)
class Side:
    """One behavior name under self-play.

    Attributes:
        settings: its own.
        max_steps: where its learner ends.
        external: opponents that are no snapshots of this run.
        teams: numbers of its teams.
        version: of its latest weights.
        trained: steps in their lineage.
        steps: learner steps in all, those that a crash rolled back included.
        saved_at: of these, at the last snapshot.
        ghost: steps that ghosts have played.
        swapped_at: of these, at the last change of opponents.
        crossings: changes of opponents so far.
        window: versions of the snapshots, oldest first.
        records: by player, what its learner has made of it.
    """

    settings: SelfPlaySettings
    max_steps: int
    external: list[ExternalOpponent] = field(default_factory=list)
    teams: list[int] = field(default_factory=list)
    version: int = 0
    trained: int = 0
    steps: int = 0
    saved_at: int = 0
    ghost: int = 0
    swapped_at: int = 0
    crossings: int = 0
    window: list[int] = field(default_factory=list)
    records: dict[str, Record] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Whether its learner has reached its end."""
        return self.trained >= self.max_steps


def sample_opponent(seed: Sequence[int], behavior_id: BehaviorId, side: Side, rates: Mapping[int, float]) -> int:
    """Samples what plays a behavior id: a version of its side, or minus the number (from 1) of an external opponent.

    The random numbers come from `seed` and the behavior id alone, so that no sample depends on how many came before.

    Args:
        seed: of the run, and of the occasion.
        behavior_id: that the opponent plays.
        side: of the behavior id.
        rates: win rate of the learning team against each candidate.
    """
    settings = side.settings
    random = np.random.default_rng([*seed, zlib.crc32(str(behavior_id).encode())])
    weights = [1.0, *(one.weight for one in side.external)]
    which = int(random.choice(len(weights), p=np.array(weights) / sum(weights)))
    latest = random.random() < settings.play_against_latest_model_ratio
    share = random.random()
    if which:
        return -which
    if latest or not side.window:
        return side.version
    return _by_share(side.window, [_weight(settings, rates.get(version, 0.5)) for version in side.window], share)


def _weight(settings: SelfPlaySettings, rate: float) -> float:
    """Returns the sampling weight of a snapshot for a win rate against it.

    Prioritised fictitious self-play with weights (1 - rate)^2: the harder the more often (Vinyals et al. 2019,
    "Grandmaster level in StarCraft II using multi-agent reinforcement learning", Methods).
    """
    return (1 - rate) ** 2 if settings.opponent_sampling == "prioritized" else 1.0


def _by_share(values: Sequence[int], weights: Sequence[float], share: float) -> int:
    ends = np.cumsum(weights)
    at = int(np.searchsorted(ends, share * ends[-1], side="right"))
    return values[min(at, len(values) - 1)]
