"""Simulators that play matches, and policies whose actions name the policy that acted."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

import numpy as np

from sparring.pipeline.messages.matches import Matchup, MatchupAssignment
from sparring.pipeline.messages.simulator import Act, BehaviorReport, Decisions, Ends, Step
from sparring.pipeline.specs import BehaviorId
from sparring.pipeline.stepping.steps import SampledActions
from tests.stepping.stepping_fakes import NO_MEMORY, SPEC, FakePolicy, Recorded

Kind = Literal["ids", "groups", "singles"]
BehaviorIds = tuple[str, ...]
LATEST = 0
MUCH = 10**9

Row = tuple[float, bool, float]
"""Result of one behavior id in a match: score, whether the simulator stated it, final reward."""


def team_of(behavior_id: str) -> int:
    return BehaviorId.parse(behavior_id).team


def name_of(behavior_id: str) -> str:
    return BehaviorId.parse(behavior_id).name


def observations(numbers: list[int]) -> tuple[Any, ...]:
    """Returns observations of `SPEC` that encode `numbers`."""
    pixels = np.array([number % 256 for number in numbers], np.uint8).reshape(-1, 1, 1, 1)
    return np.array(numbers, np.float32).reshape(-1, 1), np.broadcast_to(pixels, (len(numbers), 1, 2, 2)).copy()


class TaggedPolicy(FakePolicy):
    """Executes its number, and the count of the agent's earlier decisions where it carries one.

    Attributes:
        passes: the observed numbers of each forward pass.
    """

    def __init__(self, number: int, carried: int = 0) -> None:
        super().__init__(version=abs(number) + 1, carried=carried)
        self.number = number
        self.passes: list[list[int]] = []

    def act(self, observations: tuple[Any, ...], masks: Any, carried: Any) -> SampledActions:
        self.passes.append(observations[0][:, 0].astype(int).tolist())
        chosen = super().act(observations, masks, carried)
        chosen.executed[:, 0] = self.number
        return chosen


class Matchups:
    """Makes assignments whose ghosts are all distinct, so that an action identifies its matchup.

    Args:
        behavior_ids: all behavior ids of the run.
    """

    def __init__(self, behavior_ids: BehaviorIds) -> None:
        self.behavior_ids = behavior_ids
        self.made: dict[int, Matchup] = {}
        self._serials = count(1)
        self._ghosts = count(1)

    def assignment(self, team: int, matchups: int = 1) -> MatchupAssignment:
        return MatchupAssignment(
            serial=next(self._serials), matchups=tuple(self._matchup(team) for _ in range(matchups))
        )

    def _matchup(self, team: int) -> Matchup:
        ghosts = {}
        for behavior_id in self.behavior_ids:
            if team_of(behavior_id) != team:
                number = next(self._ghosts)
                ghosts[behavior_id] = number if number % 3 else -number  # some are external opponents
        matchup = Matchup(number=len(self.made) + 11, team=team, ghosts=ghosts)
        self.made[matchup.number] = matchup
        return matchup


def player_of(matchup: Matchup, behavior_id: str) -> int:
    """Returns the number of the policy that acts for a behavior id."""
    return LATEST if team_of(behavior_id) == matchup.team else matchup.ghosts[behavior_id]


@dataclass(eq=False)
class Contest:
    """One match of a simulator: all agents with one match id, one group, or one agent alone.

    Attributes:
        possible: matchups that all observed actions allow; None until the stepper takes it over.
        rows: by behavior id, of the agents that ended last.
    """

    key: int
    behavior_ids: BehaviorIds
    simulator: int
    possible: tuple[Matchup, ...] | None = None
    rows: dict[str, Row] = field(default_factory=dict)

    @property
    def team(self) -> int:
        """Returns the team that learns."""
        assert self.possible
        return self.possible[0].team

    def narrow(self, behavior_id: str, player: int) -> None:
        """Keeps the matchups in which `player` acts for `behavior_id`."""
        assert self.possible is not None
        left = tuple(matchup for matchup in self.possible if player_of(matchup, behavior_id) == player)
        assert left, f"{player} acts for {behavior_id} in a match of {self.possible}"
        self.possible = left


@dataclass(eq=False)
class AgentEpisode:
    agent: int
    behavior_id: str
    contest: Contest
    seen: int = 0
    acted: bool = False
    players: list[int] = field(default_factory=list)
    steps: list[Recorded] = field(default_factory=list)
    taken: bool = False

    @property
    def learns(self) -> bool:
        return team_of(self.behavior_id) == self.contest.team


class MatchSimulator:
    """Plays random matches of `kind` between behavior ids with `sizes` agents each.

    Attributes:
        contests: matches under way.
        finished: matches without remaining agents.
        agent_episodes: all so far, in order of their start.
    """

    def __init__(self, number: int, rng: random.Random, kind: Kind, sizes: dict[str, int], contests: int = 1) -> None:
        self.number, self.rng, self.kind, self.sizes = number, rng, kind, sizes
        self.specs = dict.fromkeys(sizes, SPEC)
        self.widths: dict[tuple[str, int], int] = {}  # numbers that agents of each policy carry
        self.contests: list[Contest] = []
        self.finished: list[Contest] = []
        self.agent_episodes: list[AgentEpisode] = []
        self.living: list[AgentEpisode] = []
        self.asked: dict[str, list[AgentEpisode]] = {}
        self.waiting = False
        self.fresh = False
        self.sequence = 0
        self.concurrent = contests
        self._next_number = number * 100_000

    def continue_numbers_of(self, former: MatchSimulator) -> None:
        """Continues the observation numbers of a former connection."""
        self._next_number = former._next_number

    # ---------------------------------------------------------------- messages

    def frame(self) -> Step:
        """Returns the next Step."""
        assert not self.waiting
        self.waiting = self.fresh = True
        ending = self._ending() if self.sequence else []
        reports = {
            behavior_id: self._ends(behavior_id, [one for one in ending if one.behavior_id == behavior_id])
            for behavior_id in self.sizes
        }
        self.living = [one for one in self.living if one not in ending]
        self._finish()
        self._begin()
        behavior_ids = list(self.sizes)
        self.rng.shuffle(behavior_ids)
        made = []
        for behavior_id in behavior_ids:
            ends, decisions = reports[behavior_id], self._decisions(behavior_id)
            if ends is not None or decisions is not None:
                made.append(BehaviorReport(behavior=behavior_id, decisions=decisions, ends=ends))
        step = Step(sequence=self.sequence, reports=tuple(made))
        self.sequence += 1
        return step

    def take_over(self, assignment: MatchupAssignment) -> None:
        """Notes that the stepper takes the last frame over while `assignment` is the newest."""
        if not self.fresh:
            return
        self.fresh = False
        for one in self.agent_episodes:
            one.taken = True
            if one.contest.possible is None:
                matchups = assignment.matchups
                own = matchups if self.kind == "ids" else (matchups[self.number % len(matchups)],)
                one.contest.possible = own

    def take(self, act: Act) -> None:
        """Checks an answer: the policy of each agent is the one that its match's matchup names."""
        assert self.waiting
        assert act.sequence == self.sequence - 1
        self.waiting = False
        assert {actions.behavior for actions in act.actions} == set(self.asked)
        for actions in act.actions:
            asked = self.asked[actions.behavior]
            assert actions.agents.tolist() == [one.agent for one in asked]
            for one, (number, before) in zip(asked, actions.continuous.tolist(), strict=True):
                one.contest.narrow(one.behavior_id, int(number))
                width = self.widths.get((name_of(one.behavior_id), int(number)), 0)
                assert before == (len(one.players) if width else NO_MEMORY), "what an agent carries is its own"
                one.players.append(int(number))
                one.acted = True
        self.asked = {}

    # ---------------------------------------------------------------- matches

    def _ending(self) -> list[AgentEpisode]:
        ending = []
        for contest in self.contests:
            here = [one for one in self.living if one.contest is contest]
            if self.rng.random() < 0.15:
                ending += here
            else:
                ending += [one for one in here if self.rng.random() < 0.15]
        self.rng.shuffle(ending)
        return ending

    def _finish(self) -> None:
        playing = {one.contest for one in self.living}
        self.finished += [contest for contest in self.contests if contest not in playing]
        self.contests = [contest for contest in self.contests if contest in playing]

    def _begin(self) -> None:
        if self.kind != "singles":
            for contest in list(self.contests):  # agents that join later
                if self.rng.random() < 0.2:
                    present = {one.behavior_id for one in self.living if one.contest is contest}
                    empty = [behavior_id for behavior_id in contest.behavior_ids if behavior_id not in present]
                    self._join(contest, self.rng.choice(empty or contest.behavior_ids))
        for place in range(self.concurrent):
            if self.sequence and self.rng.random() < 0.3:
                continue
            if self.kind == "ids":
                self._open(place + 5, tuple(self.sizes), self.sizes)
            elif self.kind == "groups":
                for at, behavior_id in enumerate(self.sizes):
                    self._open(100 * (at + 1) + place, (behavior_id,), self.sizes)
            else:
                for at, (behavior_id, size) in enumerate(self.sizes.items()):
                    for agent in range(size):
                        self._open(10_000 * (at + 1) + 100 * place + agent, (behavior_id,), {behavior_id: 1})

    def _open(self, key: int, behavior_ids: BehaviorIds, sizes: dict[str, int]) -> None:
        if any(contest.key == key for contest in self.contests):
            return
        contest = Contest(key, behavior_ids, self.number)
        self.contests.append(contest)
        for behavior_id in behavior_ids:
            for _ in range(sizes[behavior_id]):
                self._join(contest, behavior_id)

    def _join(self, contest: Contest, behavior_id: str) -> None:
        used = {one.agent for one in self.living if one.behavior_id == behavior_id}
        free = [agent for agent in range(60) if agent not in used]
        one = AgentEpisode(self.rng.choice(free[:4]), behavior_id, contest)
        self.living.append(one)
        self.agent_episodes.append(one)

    # ---------------------------------------------------------------- reports

    def _decisions(self, behavior_id: str) -> Decisions | None:
        rows = [
            one for one in self.living if one.behavior_id == behavior_id and (not one.acted or self.rng.random() < 0.8)
        ]
        if not rows:
            return None
        self.rng.shuffle(rows)
        self.asked[behavior_id] = rows
        rewards, shared = self._settle(rows)
        numbers = self._count(len(rows))
        for one, number in zip(rows, numbers, strict=True):
            one.seen, one.acted = number, False
        keys = np.array([one.contest.key for one in rows], np.int64)
        return Decisions(
            agents=np.array([one.agent for one in rows], np.int64),
            observations=observations(numbers),
            rewards=rewards,
            groups={"ids": keys * 10 + team_of(behavior_id), "groups": keys, "singles": None}[self.kind],
            group_rewards=shared,
            matches=keys if self.kind == "ids" else None,
        )

    def _ends(self, behavior_id: str, ending: list[AgentEpisode]) -> Ends | None:
        if not ending:
            return None
        rewards, shared = self._settle(ending)
        stated = [self.rng.choice([0.0, 0.5, 1.0]) for _ in ending] if self.rng.random() < 0.5 else None
        for contest in {one.contest for one in ending}:
            rows = [row for row, one in enumerate(ending) if one.contest is contest]
            total = float(np.mean([rewards[row] + (0 if shared is None else shared[row]) for row in rows]))
            if stated is None:
                contest.rows[behavior_id] = (0.5 + 0.5 * float(np.sign(total)), False, total)
            else:
                contest.rows[behavior_id] = (float(np.mean([stated[row] for row in rows])), True, total)
        return Ends(
            agents=np.array([one.agent for one in ending], np.int64),
            observations=observations(self._count(len(ending))),
            rewards=rewards,
            interrupted=np.array([self.rng.random() < 0.5 for _ in ending], bool),
            group_rewards=shared,
            outcomes=None if stated is None else np.array(stated, np.float32),
        )

    def _settle(self, rows: list[AgentEpisode]) -> tuple[Any, Any]:
        """Returns rewards of rows, own and the group's, and records the steps that they complete."""
        rewards = np.array([self.rng.randint(-3, 3) for _ in rows], np.float32)
        shared = rewards / 2 if self.kind != "singles" else None
        for row, one in enumerate(rows):
            if one.acted:
                one.steps.append((one.seen, float(rewards[row]), 0.0 if shared is None else float(shared[row])))
        return rewards, shared

    def _count(self, n: int) -> list[int]:
        self._next_number += n
        return list(range(self._next_number - n, self._next_number))
