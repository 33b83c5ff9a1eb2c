"""A stepper among simulators that play matches, with checks of everything that leaves it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from sparring.pipeline.messages.matches import MatchupAssignment, Results
from sparring.pipeline.messages.state import StepAllowance
from sparring.pipeline.messages.steps import BehaviorSteps
from sparring.pipeline.stepping.acting import TickResult
from sparring.pipeline.stepping.stepper import Stepper
from tests.stepping.matches_simulator import (
    LATEST,
    MUCH,
    AgentEpisode,
    BehaviorIds,
    Contest,
    MatchSimulator,
    Matchups,
    TaggedPolicy,
    name_of,
    team_of,
)
from tests.stepping.stepping_fakes import Reader


class MatchupReader(Reader):
    """Also reads the matchup of each agent episode."""

    def __init__(self, carried: int = 0) -> None:
        super().__init__(carried)
        self.matchups: dict[int, int] = {}

    def _join(self, joined: Any) -> None:
        assert joined.matchups is not None
        for agent, matchup in zip(joined.agents.tolist(), joined.matchups.tolist(), strict=True):
            assert self.matchups.setdefault(agent, matchup) == matchup, "an agent episode is played under one matchup"
        super()._join(joined)


ReportedMatch = tuple[int, int, tuple[tuple[str, float, bool, float], ...]]
"""A match: matchup, simulator, and the result of each behavior id."""


class MatchScene:
    """A stepper among simulators that play matches.

    Args:
        behavior_ids: all behavior ids of the run.
        releasing: unused ghosts are released at each assignment.
        carried: numbers that agents carry, by policy number modulo 3; the latest policies use the first.
    """

    def __init__(
        self,
        behavior_ids: BehaviorIds,
        *,
        lockstep: bool = False,
        expected: int = 1,
        releasing: bool = False,
        carried: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        self.names = sorted({name_of(behavior_id) for behavior_id in behavior_ids})
        self.matchups = Matchups(behavior_ids)
        self.latest = {name: TaggedPolicy(LATEST, carried[0]) for name in self.names}
        self.ghosts: dict[tuple[str, int], TaggedPolicy] = {}
        self.stepper = Stepper(
            self.latest, lockstep=lockstep, expected=expected, self_play=self.names, ghosts=self.ghosts
        )
        self.carried, self.releasing = carried, releasing
        self.simulators: dict[int, MatchSimulator] = {}
        self.gone: list[MatchSimulator] = []
        self.readers = {name: MatchupReader(carried[0]) for name in self.names}
        self.parts: list[BehaviorSteps] = []
        self.results: list[Results] = []
        self.now = 0.0
        self._serial = 0

    # ---------------------------------------------------------------- events

    def assign(self, assignment: MatchupAssignment) -> MatchupAssignment:
        """Adopts an assignment with its ghosts, as the service around the stepper does."""
        for matchup in assignment.matchups:
            for behavior_id, number in matchup.ghosts.items():
                self._hold(name_of(behavior_id), number)
        self.stepper.matches.assignment = assignment
        if self.releasing:
            in_use = self.stepper.matches.in_use(self.stepper.behaviors)
            for key in [key for key in self.ghosts if key not in in_use]:
                del self.ghosts[key]
        return assignment

    def _hold(self, name: str, number: int) -> None:
        if (name, number) not in self.ghosts:
            self.ghosts[name, number] = TaggedPolicy(number, self.carried[number % 3])

    def connect(self, key: int, simulator: MatchSimulator, allowance: int = MUCH) -> MatchSimulator:
        self.stepper.connect(key, simulator.number, simulator.specs)
        self.simulators[key] = simulator
        for name in self.stepper.behaviors:
            self.grant(name, allowance)
        return simulator

    def disconnect(self, key: int) -> None:
        self.stepper.disconnect(key)
        self.gone.append(self.simulators.pop(key))

    def reconnect(self, former: int, key: int, simulator: MatchSimulator) -> None:
        """Replaces a connection that was not reported closed; observation numbers stay unique."""
        old = self.simulators.pop(former)
        self.gone.append(old)
        simulator.continue_numbers_of(old)
        self.connect(key, simulator)

    def grant(self, name: str, allowance: int, assignment: int = 0) -> None:
        self._serial += 1
        self.stepper.grant(name, StepAllowance(serial=self._serial, steps=allowance, assignment=assignment))

    def send(self, *keys: int) -> None:
        for key in keys:
            self.now += 1
            self.stepper.receive(key, self.simulators[key].frame(), self.now)

    def ready(self) -> list[int]:
        return [key for key, simulator in self.simulators.items() if not simulator.waiting]

    def tick(self) -> TickResult:
        """Runs one tick of the stepper and checks everything that leaves it."""
        self.now += 1
        assignment = self.stepper.matches.assignment
        if assignment is not None:
            for simulator in [*self.simulators.values(), *self.gone]:
                simulator.widths = {key: one.carried for key, one in self._policies().items()}
                simulator.take_over(assignment)
        before = {key: len(one.passes) for key, one in self._policies().items()}
        result = self.stepper.tick(self.now)
        self._check_passes(result, before)
        for key, act, *_ in result.acts:
            self.simulators[key].take(act)
        self.take()
        return result

    def take(self) -> None:
        parts = self.stepper.take_steps()
        self.parts += parts
        for part in parts:
            self.readers[part.behavior].read(part)
        self.results += self.stepper.matches.take("stepping-0.1")

    def _policies(self) -> dict[tuple[str, int], TaggedPolicy]:
        return self.ghosts | {(name, LATEST): one for name, one in self.latest.items()}

    def _check_passes(self, result: TickResult, before: dict[tuple[str, int], int]) -> None:
        """Checks that each policy in use runs one pass, over exactly its own rows."""
        wanted: dict[tuple[str, int], list[int]] = {}
        learning = 0
        for key, act, *_ in result.acts:
            for actions in act.actions:
                rows = self.simulators[key].asked[actions.behavior]
                for one, number in zip(rows, actions.continuous[:, 0].astype(int).tolist(), strict=True):
                    wanted.setdefault((name_of(one.behavior_id), number), []).append(one.seen)
                    learning += number == LATEST
        for policy_key, policy in self._policies().items():
            passes = policy.passes[before.get(policy_key, 0) :]
            assert len(passes) == (policy_key in wanted), "one pass for each policy in use, none for others"
            assert sorted(passes[0] if passes else []) == sorted(wanted.get(policy_key, []))
        assert result.acted == sum(map(len, wanted.values()))
        assert result.rows == learning

    # ---------------------------------------------------------------- checks

    def everyone(self) -> list[MatchSimulator]:
        return [*self.simulators.values(), *self.gone]

    def agent_episodes(self, name: str) -> list[AgentEpisode]:
        return [
            one for simulator in self.everyone() for one in simulator.agent_episodes if name_of(one.behavior_id) == name
        ]

    def check_steps(self) -> None:
        """Checks that assembly receives every step of learning agents with its matchup, and no other step."""
        for name, reader in self.readers.items():
            agent_episodes, behavior = self.agent_episodes(name), self.stepper.behaviors[name]
            learned = [one for one in agent_episodes if one.taken and one.learns and one.steps]
            assert sorted(reader.steps) == sorted(one.steps for one in learned)
            assert behavior.produced == reader.completed == sum(len(one.steps) for one in learned)
            ghosts = sum(len(one.steps) for one in agent_episodes if one.taken and not one.learns)
            assert behavior.ghosts == self.stepper.state()[name].ghosts == ghosts
            by_first = {one.steps[0][0]: one for one in learned}
            for episode in [*reader.past, *reader.slots.values()]:
                matchup = self.matchups.made[reader.matchups[episode.agent]]
                assert episode.team == matchup.team
                if episode.steps:
                    possible = by_first[episode.steps[0][0]].contest.possible
                    assert possible is not None
                    assert matchup in possible
            table = behavior.table
            assert set(reader.slots) == set(np.flatnonzero(table.live & table.learning).tolist())

    def reported_matches(self) -> list[ReportedMatch]:
        """Returns the reported matches in any order, and checks that their numbers are unique."""
        reported: list[ReportedMatch] = []
        numbers: list[int] = []
        for results in self.results:
            at = 0
            numbers += results.numbers.tolist()
            columns = (results.matchups, results.simulators, results.row_counts)
            for matchup, simulator, behavior_ids in zip(*(column.tolist() for column in columns), strict=True):
                rows = [
                    (
                        results.names[results.who[row]],
                        round(float(results.scores[row]), 4),
                        bool(results.explicit[row]),
                        round(float(results.rewards[row]), 3),
                    )
                    for row in range(at, at + behavior_ids)
                ]
                if behavior_ids:  # none: its simulator disconnected, or it had no learning agent
                    reported.append((matchup, simulator, tuple(sorted(rows))))
                at += behavior_ids
            assert at == len(results.who)
        assert len(set(numbers)) == len(numbers)

        return reported

    def check_results(self) -> None:
        """Checks that each finished match of learning agents is reported once, with a possible matchup."""
        assert sum(len(one.numbers) for one in self.results) == self.stepper.matches.reported
        before: dict[str, int] = {}
        for one in self.results:
            assert (one.source, one.before) == ("stepping-0.1", before.get(one.behavior, 0))
            before[one.behavior] = one.before + len(one.numbers)
        unmatched = Counter(self.reported_matches())
        for simulator in self.everyone():
            for contest in simulator.finished:
                if contest.possible is None or all(
                    team_of(behavior_id) != contest.team for behavior_id in contest.behavior_ids
                ):
                    continue
                rows = self._rows(simulator, contest)
                found = next(one for one in contest.possible if unmatched[one.number, simulator.number, rows])
                unmatched[found.number, simulator.number, rows] -= 1
        assert not +unmatched, "no other match is reported"

    def _rows(self, simulator: MatchSimulator, contest: Contest) -> tuple[tuple[str, float, bool, float], ...]:
        rows = [
            (behavior_id, round(score, 4), stated, round(reward, 3))
            for behavior_id, (score, stated, reward) in contest.rows.items()
        ]
        if simulator.kind != "ids":
            rows += [
                (behavior_id, -1.0, False, 0.0)
                for behavior_id in simulator.sizes
                if team_of(behavior_id) != contest.team
            ]
        return tuple(sorted(rows))
