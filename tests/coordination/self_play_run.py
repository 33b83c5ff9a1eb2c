"""A run folder with self-play, and what coordination keeps and publishes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from sparring.pipeline.coordination.ghosts import Ghosts, SavedGhosts, Snapshots
from sparring.pipeline.coordination.self_play import SelfPlay
from sparring.pipeline.messages.matches import Results
from tests.coordination.self_play_world import (
    Layout,
    RecordingTopic,
    behavior_id,
    make,
    matchups,
    results,
    weights,
)

SAVED = TypeAdapter(SavedGhosts)


class Run:
    """A run folder, in which coordination saves its state, then publishes weights, then the assignment."""

    def __init__(self, root: Path, layout: Layout, **settings: Any) -> None:
        self.root, self.layout, self.settings = root, layout, settings
        self.topic = RecordingTopic()
        self.ghosts = Ghosts(make(layout, **settings), root, self.topic)
        self.published = 0
        self.state = b""
        self.former: set[tuple[str, int]] = set()
        self.most_keys = 0

    @property
    def rules(self) -> SelfPlay:
        assert isinstance(self.ghosts.rules, SelfPlay)
        return self.ghosts.rules

    @property
    def saved(self) -> SavedGhosts:
        return SAVED.validate_json(self.state)

    def begin(self) -> None:
        for name in self.layout:
            self.ghosts.stepped({name: self.layout[name]}, {})
        for name in self.layout:
            self.weights(name, 1, 0)

    def weights(self, name: str, version: int, trained: int) -> None:
        self.ghosts.weights(weights(name, version, trained))
        self.follow()

    def receive(self, message: tuple[str, str, int, int]) -> None:
        kind, name, number, trained = message
        if kind == "weights":
            self.weights(name, number, trained)
        else:
            self.ghosts.stepped({}, {name: number})
            self.follow()

    def keep(self) -> None:
        self.state = SAVED.dump_json(self.ghosts.keep())

    def follow(self) -> None:
        """Saves a new assignment, and then publishes it."""
        serial = 0 if self.rules.assignment is None else self.rules.assignment.serial
        if serial == self.published:
            return
        self.keep()
        playing = self.rules.playing
        for name, number in playing:
            found = Snapshots(self.root).load(name, number)
            assert np.array_equal(found.arrays["actor.weight"], weights(name, number).arrays["actor.weight"])
        self.ghosts.publish()
        published = {(one.behavior, one.version) for one in self.topic.latest.values()}
        assert playing <= published
        self.most_keys = max(self.most_keys, len(playing | self.former))
        assert len(self.topic.latest) <= self.most_keys
        self.former, self.published = playing, serial

    def restart(self) -> Run:
        """Returns the run restarted from its last saved state."""
        new = Run(self.root, self.layout, **self.settings)
        new.ghosts.restore(self.saved)
        new.state = self.state
        new.follow()
        return new


SMALL = {"save_steps": 20, "swap_steps": 30, "team_change": 60, "window": 3}


A0, A1 = behavior_id("A", 0), behavior_id("A", 1)


def matches_of(run: Run, numbers: range, source: str = "stepping-0.5f3a-1") -> Results:
    """Returns the results of matches that a source numbers from 1."""
    matchup = matchups(run.rules)[0].number
    scores = {A0: 1.0, A1: 0.0}
    return results([(matchup, scores)] * len(numbers), numbers=list(numbers), source=source, before=numbers.start - 1)
