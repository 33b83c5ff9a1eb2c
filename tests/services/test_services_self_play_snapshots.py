"""Coordination keeps the snapshots that ghosts play with, however fast a learner is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparring.pipeline.coordination.coordinator import SAVED, Coordinator
from sparring.pipeline.coordination.ghosts import Ghosts, Snapshots
from sparring.pipeline.coordination.self_play import SelfPlay
from sparring.pipeline.coordination.settings import SelfPlaySettings
from sparring.pipeline.messages.state import PolicyWeights
from tests.coordination.ledger_parts import through_json

NAME = "Goal"
SAVE = 10


class FakeTopic:
    """A topic that keeps the latest record of each key."""

    def __init__(self) -> None:
        self.latest: dict[str, Any] = {}

    def publish(self, topic: Any, record: Any) -> None:
        self.latest[topic.key] = record

    async def aclose(self) -> None:
        """Holds nothing."""


def weights(version: int) -> PolicyWeights:
    """Returns weights whose values are their version."""
    arrays = {"bias": np.full(2, version, np.float32)}
    return PolicyWeights(behavior=NAME, version=version, arrays=arrays, trained=SAVE * (version - 1))


def ghosts(folder: Path, topic: FakeTopic) -> Ghosts:
    """Returns self-play that saves every version and keeps a window of 3 snapshots."""
    settings = SelfPlaySettings(
        save_steps=SAVE, swap_steps=5, window=3, team_change=10**6, play_against_latest_model_ratio=0.0
    )
    rules = SelfPlay(seed=1, places=4, lockstep=False)
    rules.add(NAME, settings, 10**6, ())
    return Ghosts(rules, folder, topic)


def register_teams(one: Ghosts) -> None:
    """Reports a simulator with two teams."""
    one.stepped({NAME: (0, 1)}, {NAME: 0})


@pytest.mark.parametrize("burst", [1, 2, 3])
def test_every_version_of_the_window_is_on_disk(tmp_path: Path, burst: int) -> None:
    """Each snapshot has the weights of its version, even if several updates end before the next save."""
    topic = FakeTopic()
    one = ghosts(tmp_path, topic)
    register_teams(one)
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


def test_session_without_self_play_keeps_what_an_earlier_one_has_saved(tmp_path: Path) -> None:
    one = ghosts(tmp_path, FakeTopic())
    register_teams(one)
    one.weights(weights(1))
    saved = Coordinator("coordination.1", ghosts=one).saved()
    assert json.loads(saved)["self_play"]["rules"]["sides"][NAME]["window"] == [1]
    without = Coordinator("coordination.2")
    without.restore(SAVED.validate_json(saved))
    assert json.loads(without.saved())["self_play"] == json.loads(saved)["self_play"]


def test_restored_coordination_keeps_the_saved_rules_and_ghosts(tmp_path: Path) -> None:
    """It can save its state and publish the ghosts of its assignment before any learner reports."""
    one = ghosts(tmp_path, FakeTopic())
    register_teams(one)
    for version in (1, 2, 3):
        one.weights(weights(version))
        one.keep()
    saved = through_json(one.keep())
    topic = FakeTopic()
    other = ghosts(tmp_path, topic)
    other.restore(saved)
    assert other.rules == replace(saved.rules, arrived=set())
    other.publish()
    named = {number for matchup in other.rules.assignment.matchups for number in matchup.ghosts.values()}  # type: ignore[union-attr]
    assert {record.version for record in topic.latest.values()} == named
