"""What coordination keeps of the weights that ghosts play with, however fast a learner is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparring.pipeline.coordination.ghosts import Ghosts
from sparring.pipeline.coordination.self_play import SelfPlay
from sparring.pipeline.coordination.settings import SelfPlaySettings
from sparring.pipeline.coordination.snapshots import Snapshots
from sparring.pipeline.messages.state import PolicyWeights

NAME = "Goal"
SAVE = 10


class Wall:
    """A board that keeps the latest of each key."""

    def __init__(self) -> None:
        self.latest: dict[str, Any] = {}

    def publish(self, key: str, record: Any) -> None:
        self.latest[key] = record

    async def aclose(self) -> None:
        """Holds nothing."""


def weights(version: int) -> PolicyWeights:
    """Weights that say which version they are of."""
    arrays = {"bias": np.full(2, version, np.float32)}
    return PolicyWeights(behavior=NAME, version=version, arrays=arrays, trained=SAVE * (version - 1))


def ghosts(folder: Path, topic: Wall) -> Ghosts:
    """Self-play that saves at each version, and whose opponents are snapshots of a window of 3."""
    settings = SelfPlaySettings(
        save_steps=SAVE, swap_steps=5, window=3, team_change=10**6, play_against_latest_model_ratio=0.0
    )
    rules = SelfPlay({NAME: settings}, {NAME: 10**6}, seed=1, places=4, lockstep=False)
    return Ghosts(rules, folder, {}, topic)


def behavior_id(one: Ghosts) -> None:
    """A simulator has two teams."""
    one.stepped({NAME: (0, 1)}, {NAME: 0})


@pytest.mark.parametrize("burst", [1, 2, 3])
def test_every_version_of_the_window_is_on_disk_whatever_came_after_it(tmp_path: Path, burst: int) -> None:
    """Several updates may end before the state is written next: each snapshot is of its own weights."""
    topic = Wall()
    one = ghosts(tmp_path, topic)
    behavior_id(one)
    for swaps, first in enumerate(range(1, 8, burst), 1):
        for version in range(first, first + burst):
            one.weights(weights(version))
        one.keep()
        window = one.rules.sides[NAME].window
        for version in window:
            assert Snapshots(tmp_path).load(NAME, version).arrays["bias"].tolist() == [version, version]
        one.stepped({NAME: (0, 1)}, {NAME: 10 * swaps})
        one.keep()
        one.publish()
    playing = {record.version: record.arrays["bias"][0] for record in topic.latest.values()}
    assert playing
    assert all(version == value for version, value in playing.items())


def test_a_start_that_goes_on_keeps_what_an_earlier_one_has_saved(tmp_path: Path) -> None:
    """Before any learner is heard of, it can write its state and publish what the assignment names."""
    one = ghosts(tmp_path, Wall())
    behavior_id(one)
    for version in (1, 2, 3):
        one.weights(weights(version))
        one.keep()
    plain = one.keep()
    topic = Wall()
    other = ghosts(tmp_path, topic)
    other.restore(plain)
    assert other.keep()["rules"] == plain["rules"]
    other.publish()
    named = {number for matchup in other.rules.assignment.matchups for number in matchup.ghosts.values()}  # type: ignore[union-attr]
    assert {record.version for record in topic.latest.values()} == named
