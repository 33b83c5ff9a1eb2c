"""A stepper whose simulators send the frames that a test writes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np

from sparring.pipeline.messages.matches import Matchup, MatchupAssignment, Results
from sparring.pipeline.messages.simulator import BehaviorReport, Decisions, Ends, Step
from sparring.pipeline.messages.state import StepAllowance
from sparring.pipeline.messages.steps import BehaviorSteps
from sparring.pipeline.stepping.stepper import Stepper
from tests.stepping.matches_simulator import LATEST, BehaviorIds, TaggedPolicy, name_of, observations
from tests.stepping.stepping_fakes import SPEC

MUCH = 10**9
ONE, TWO, THREE = "A?team=0", "A?team=1", "A?team=2"
PAIR: BehaviorIds = (ONE, TWO)
Row = tuple[str, float, int, float]


def first(number: int = 1, **ghosts: int) -> Matchup:
    """Returns a matchup in which team 0 learns; with `A1=7` ghost 7 plays for A?team=1."""
    return Matchup(
        number=number,
        team=0,
        ghosts={f"{behavior_id[0]}?team={behavior_id[1:]}": ghost for behavior_id, ghost in ghosts.items()},
    )


def second(number: int = 1, **ghosts: int) -> Matchup:
    """Returns a matchup in which team 1 learns."""
    return Matchup(number=number, team=1, ghosts=first(0, **ghosts).ghosts)


class SteppedMatches:
    """Feeds a stepper with given frames, and collects what leaves it.

    Args:
        matchups: of the first assignment; without any none is adopted.
        names: behavior names under self-play.
        behavior_ids: of the first simulator, which has number and key 0; without any none connects.
    """

    def __init__(
        self,
        *matchups: Matchup,
        names: Sequence[str] = ("A",),
        behavior_ids: BehaviorIds = PAIR,
        lockstep: bool = False,
        expected: int = 1,
    ) -> None:
        self.latest = {name: TaggedPolicy(LATEST) for name in ("A", "B")}
        self.ghosts: dict[tuple[str, int], TaggedPolicy] = {}
        self.stepper = Stepper(self.latest, self_play=names, ghosts=self.ghosts, lockstep=lockstep, expected=expected)
        self.parts: list[BehaviorSteps] = []
        self.matches: list[Results] = []
        self._sequences: dict[int, int] = {}
        self._numbers = count(1)
        self._serials = count(1)
        self._assignments = count(1)
        if behavior_ids:
            self.connect(0, behavior_ids)
        if matchups:
            self.assign(*matchups)

    def connect(self, key: int, behavior_ids: BehaviorIds = PAIR, number: int | None = None) -> None:
        self.stepper.connect(key, key if number is None else number, dict.fromkeys(behavior_ids, SPEC))
        self._sequences[key] = 0
        for name in {name_of(behavior_id) for behavior_id in behavior_ids}:
            self.grant(name)

    def grant(self, name: str, allowance: int = MUCH, assignment: int = 0) -> None:
        allowance = StepAllowance(serial=next(self._serials), steps=allowance, assignment=assignment)
        self.stepper.grant(name, allowance)

    def assign(self, *matchups: Matchup, release: bool = False) -> None:
        for matchup in matchups:
            for behavior_id, number in matchup.ghosts.items():
                self.ghosts.setdefault((name_of(behavior_id), number), TaggedPolicy(number))
        self.stepper.matches.assignment = MatchupAssignment(serial=next(self._assignments), matchups=matchups)
        if release:
            in_use = self.stepper.matches.in_use(self.stepper.behaviors)
            for key in [key for key in self.ghosts if key not in in_use]:
                del self.ghosts[key]

    def receive(self, key: int, *reports: BehaviorReport) -> None:
        self.stepper.receive(key, Step(sequence=self._sequences[key], reports=reports), 0.0)
        self._sequences[key] += 1

    def tick(self) -> dict[int, dict[str, list[int]]]:
        """Runs a tick; returns the policies that acted, by connection and behavior id."""
        acts = self.stepper.tick(0.0).acts
        self.take()
        return {
            key: {one.behavior: one.continuous[:, 0].astype(int).tolist() for one in act.actions}
            for key, act, *_ in acts
        }

    def play(self, *reports: BehaviorReport, key: int = 0) -> dict[str, list[int]]:
        """Sends a frame of one simulator; returns the policies that acted for its agents."""
        self.receive(key, *reports)
        return self.tick()[key]

    def take(self) -> None:
        parts = self.stepper.take_steps()
        self.parts += parts
        self.matches += self.stepper.matches.take("stepping-0.1")

    def report(
        self,
        behavior_id: str,
        agents: Sequence[int] = (),
        ends: Sequence[int] = (),
        *,
        matches: Sequence[int] | None = None,
        groups: Sequence[int] | None = None,
        rewards: Sequence[float] | None = None,
        shared: Sequence[float] | None = None,
        outcomes: Sequence[float] | None = None,
    ) -> BehaviorReport:
        """Returns decisions of `agents` and ends of `ends`, whose `rewards` and `outcomes` are given."""
        decisions = Decisions(
            agents=np.array(agents, np.int64),
            observations=self._seen(len(agents)),
            rewards=np.zeros(len(agents), np.float32),
            groups=None if groups is None else np.array(groups, np.int64),
            matches=None if matches is None else np.array(matches, np.int64),
        )
        ended = Ends(
            agents=np.array(ends, np.int64),
            observations=self._seen(len(ends)),
            rewards=np.array([0.0] * len(ends) if rewards is None else rewards, np.float32),
            interrupted=np.zeros(len(ends), bool),
            group_rewards=None if shared is None else np.array(shared, np.float32),
            outcomes=None if outcomes is None else np.array(outcomes, np.float32),
        )
        return BehaviorReport(
            behavior=behavior_id, decisions=decisions if len(agents) else None, ends=ended if len(ends) else None
        )

    def _seen(self, n: int) -> tuple[Any, ...]:
        return observations([next(self._numbers) for _ in range(n)])

    @property
    def results(self) -> list[tuple[int, int, list[Row]]]:
        """Returns the matches that ended: matchup, simulator, rows."""
        out = []
        for results in self.matches:
            at = 0
            for matchup, simulator, behavior_ids in zip(
                results.matchups, results.simulators, results.row_counts, strict=True
            ):
                rows = [
                    (
                        results.names[results.who[row]],
                        float(results.scores[row]),
                        int(results.explicit[row]),
                        float(results.rewards[row]),
                    )
                    for row in range(at, at + int(behavior_ids))
                ]
                if rows:  # empty where a match has no result
                    out.append((int(matchup), int(simulator), sorted(rows)))
                at += int(behavior_ids)
        return out
