"""Simulators that play matches, policies that say who acted, and a stepper between them that is checked."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

import numpy as np

from sparring.pipeline.messages.matches import Matchup, MatchupAssignment, Results
from sparring.pipeline.messages.simulator import Act, BehaviorReport, Decisions, Ends, Step
from sparring.pipeline.messages.state import StepAllowance
from sparring.pipeline.messages.steps import BehaviorSteps
from sparring.pipeline.specs import BehaviorId
from sparring.pipeline.stepping.stepper import Stepper, TickResult
from sparring.pipeline.stepping.steps import SampledActions
from tests.stepping.stepping_fakes import NO_MEMORY, SPEC, FakePolicy, Reader, Recorded

Kind = Literal["ids", "groups", "singles"]
BehaviorIds = tuple[str, ...]
LATEST = 0
MUCH = 10**9

Row = tuple[float, bool, float]
"""Of one seat of a match: score, whether the simulator said so, final reward."""


def team_of(behavior_id: str) -> int:
    return BehaviorId.parse(behavior_id).team


def name_of(behavior_id: str) -> str:
    return BehaviorId.parse(behavior_id).name


def observations(numbers: list[int]) -> tuple[Any, ...]:
    """What agents of `SPEC` see that see `numbers`."""
    pixels = np.array([number % 256 for number in numbers], np.uint8).reshape(-1, 1, 1, 1)
    return np.array(numbers, np.float32).reshape(-1, 1), np.broadcast_to(pixels, (len(numbers), 1, 2, 2)).copy()


class TaggedPolicy(FakePolicy):
    """Executes its number, and how many decisions the agent has made before as far as it carries that.

    Attributes:
        saw: of each pass, the numbers that its rows saw.
    """

    def __init__(self, number: int, carried: int = 0) -> None:
        super().__init__(version=abs(number) + 1, carried=carried)
        self.number = number
        self.saw: list[list[int]] = []

    def act(self, observations: tuple[Any, ...], masks: Any, carried: Any) -> SampledActions:
        self.saw.append(observations[0][:, 0].astype(int).tolist())
        chosen = super().act(observations, masks, carried)
        chosen.executed[:, 0] = self.number
        return chosen


class Draws:
    """Makes assignments in which no two draws and no two seats have the same ghost, so that an action names its draw.

    Args:
        behavior_ids: all that there are.
    """

    def __init__(self, behavior_ids: BehaviorIds) -> None:
        self.behavior_ids = behavior_ids
        self.made: dict[int, Matchup] = {}
        self._serials = count(1)
        self._ghosts = count(1)

    def assignment(self, team: int, matchups: int = 1) -> MatchupAssignment:
        return MatchupAssignment(serial=next(self._serials), matchups=tuple(self._draw(team) for _ in range(matchups)))

    def _draw(self, team: int) -> Matchup:
        ghosts = {}
        for behavior_id in self.behavior_ids:
            if team_of(behavior_id) != team:
                number = next(self._ghosts)
                ghosts[behavior_id] = number if number % 3 else -number  # some come from elsewhere
        matchup = Matchup(number=len(self.made) + 11, team=team, ghosts=ghosts)
        self.made[matchup.number] = matchup
        return matchup


def player_of(matchup: Matchup, behavior_id: str) -> int:
    """Who acts for a seat."""
    return LATEST if team_of(behavior_id) == matchup.team else matchup.ghosts[behavior_id]


@dataclass(eq=False)
class Contest:
    """What the simulator takes for a match: all with one match id, one group, or one agent.

    Attributes:
        possible: draws that it may be played under, by all that was seen of it; None before it was taken over.
        rows: by seat, of those that ended last.
    """

    key: int
    behavior_ids: BehaviorIds
    simulator: int
    possible: tuple[Matchup, ...] | None = None
    rows: dict[str, Row] = field(default_factory=dict)

    @property
    def team(self) -> int:
        """That learns in it."""
        assert self.possible
        return self.possible[0].team

    def narrow(self, behavior_id: str, player: int) -> None:
        """`player` acted for a seat: it is the one of the only draw."""
        assert self.possible is not None
        left = tuple(matchup for matchup in self.possible if player_of(matchup, behavior_id) == player)
        assert left, f"{player} acts for {behavior_id} in a match of {self.possible}"
        self.possible = left


@dataclass(eq=False)
class Player:
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
    """Plays matches of `kind` between seats of `sizes` agents, as `rng` says.

    Attributes:
        contests: under way.
        over: those of which nobody was left.
        agent_episodes: all so far.
    """

    def __init__(self, number: int, rng: random.Random, kind: Kind, sizes: dict[str, int], contests: int = 1) -> None:
        self.number, self.rng, self.kind, self.sizes = number, rng, kind, sizes
        self.specs = dict.fromkeys(sizes, SPEC)
        self.widths: dict[tuple[str, int], int] = {}  # what each policy carries
        self.contests: list[Contest] = []
        self.over: list[Contest] = []
        self.agent_episodes: list[Player] = []
        self.living: list[Player] = []
        self.asked: dict[str, list[Player]] = {}
        self.waiting = False
        self.fresh = False
        self.sequence = 0
        self.several = contests
        self._numbers = number * 100_000

    def numbers_from(self, former: MatchSimulator) -> None:
        """What agents see goes on to be numbered where a former connection stopped."""
        self._numbers = former._numbers

    # ---------------------------------------------------------------- the conversation

    def frame(self) -> Step:
        """The next Step."""
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

    def taken_over(self, assignment: MatchupAssignment) -> None:
        """The stepper heard of the last frame while this assignment was the newest."""
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
        """The answer came: one policy acted for each agent, that of its seat in the draw of its match."""
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

    # ---------------------------------------------------------------- what happens

    def _ending(self) -> list[Player]:
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
        self.over += [contest for contest in self.contests if contest not in playing]
        self.contests = [contest for contest in self.contests if contest in playing]

    def _begin(self) -> None:
        if self.kind != "singles":
            for contest in list(self.contests):  # somebody comes later
                if self.rng.random() < 0.2:
                    present = {one.behavior_id for one in self.living if one.contest is contest}
                    empty = [behavior_id for behavior_id in contest.behavior_ids if behavior_id not in present]
                    self._join(contest, self.rng.choice(empty or contest.behavior_ids))
        for place in range(self.several):
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
        one = Player(self.rng.choice(free[:4]), behavior_id, contest)
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

    def _ends(self, behavior_id: str, ending: list[Player]) -> Ends | None:
        if not ending:
            return None
        rewards, shared = self._settle(ending)
        said = [self.rng.choice([0.0, 0.5, 1.0]) for _ in ending] if self.rng.random() < 0.5 else None
        for contest in {one.contest for one in ending}:
            rows = [row for row, one in enumerate(ending) if one.contest is contest]
            total = float(np.mean([rewards[row] + (0 if shared is None else shared[row]) for row in rows]))
            if said is None:
                contest.rows[behavior_id] = (0.5 + 0.5 * float(np.sign(total)), False, total)
            else:
                contest.rows[behavior_id] = (float(np.mean([said[row] for row in rows])), True, total)
        return Ends(
            agents=np.array([one.agent for one in ending], np.int64),
            observations=observations(self._count(len(ending))),
            rewards=rewards,
            interrupted=np.array([self.rng.random() < 0.5 for _ in ending], bool),
            group_rewards=shared,
            outcomes=None if said is None else np.array(said, np.float32),
        )

    def _settle(self, rows: list[Player]) -> tuple[Any, Any]:
        """Rewards of rows, own and the group's; what they answer is a step."""
        rewards = np.array([self.rng.randint(-3, 3) for _ in rows], np.float32)
        shared = rewards / 2 if self.kind != "singles" else None
        for row, one in enumerate(rows):
            if one.acted:
                one.steps.append((one.seen, float(rewards[row]), 0.0 if shared is None else float(shared[row])))
        return rewards, shared

    def _count(self, n: int) -> list[int]:
        self._numbers += n
        return list(range(self._numbers - n, self._numbers))


class DrawReader(Reader):
    """Reads the draw of each life, too."""

    def __init__(self, carried: int = 0) -> None:
        super().__init__(carried)
        self.matchups: dict[int, int] = {}

    def _join(self, joined: Any) -> None:
        assert joined.matchups is not None
        for agent, matchup in zip(joined.agents.tolist(), joined.matchups.tolist(), strict=True):
            assert self.matchups.setdefault(agent, matchup) == matchup, "a life is played under one draw"
        super()._join(joined)


Told = tuple[int, int, tuple[tuple[str, float, bool, float], ...]]
"""Of a match: draw, simulator, and the rows of its seats."""


class MatchScene:
    """A stepper among simulators that play matches.

    Args:
        behavior_ids: all that there are.
        releasing: ghosts that are not in use are given up at each assignment.
        carried: what policies carry, by number modulo 3; the latest have the first.
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
        self.matchups = Draws(behavior_ids)
        self.latest = {name: TaggedPolicy(LATEST, carried[0]) for name in self.names}
        self.ghosts: dict[tuple[str, int], TaggedPolicy] = {}
        self.stepper = Stepper(
            self.latest, lockstep=lockstep, expected=expected, self_play=self.names, ghosts=self.ghosts
        )
        self.carried, self.releasing = carried, releasing
        self.simulators: dict[int, MatchSimulator] = {}
        self.gone: list[MatchSimulator] = []
        self.readers = {name: DrawReader(carried[0]) for name in self.names}
        self.parts: list[BehaviorSteps] = []
        self.results: list[Results] = []
        self.now = 0.0
        self._serial = 0

    # ---------------------------------------------------------------- what happens

    def assign(self, assignment: MatchupAssignment) -> MatchupAssignment:
        """An assignment is adopted, with its ghosts, as the process around the stepper does."""
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

    def come_back(self, former: int, key: int, simulator: MatchSimulator) -> None:
        """A new connection takes the place of one whose link was not heard to be closed; numbers stay its own."""
        old = self.simulators.pop(former)
        self.gone.append(old)
        simulator.numbers_from(old)
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

    def wake(self) -> TickResult:
        """Wakes the stepper; everything that leaves it is checked."""
        self.now += 1
        assignment = self.stepper.matches.assignment
        if assignment is not None:
            for simulator in [*self.simulators.values(), *self.gone]:
                simulator.widths = {key: one.carried for key, one in self._policies().items()}
                simulator.taken_over(assignment)
        before = {key: len(one.saw) for key, one in self._policies().items()}
        wake = self.stepper.wake(self.now)
        self._check_passes(wake, before)
        for key, act, *_ in wake.acts:
            self.simulators[key].take(act)
        self.take()
        return wake

    def take(self) -> None:
        parts = self.stepper.take_steps()
        self.parts += parts
        for part in parts:
            self.readers[part.behavior].read(part)
            if part.results is not None:
                self.results.append(part.results)

    def _policies(self) -> dict[tuple[str, int], TaggedPolicy]:
        return self.ghosts | {(name, LATEST): one for name, one in self.latest.items()}

    def _check_passes(self, wake: TickResult, before: dict[tuple[str, int], int]) -> None:
        """One pass for each policy that plays, over exactly the rows that it plays for."""
        wanted: dict[tuple[str, int], list[int]] = {}
        learning = 0
        for key, act, *_ in wake.acts:
            for actions in act.actions:
                rows = self.simulators[key].asked[actions.behavior]
                for one, number in zip(rows, actions.continuous[:, 0].astype(int).tolist(), strict=True):
                    wanted.setdefault((name_of(one.behavior_id), number), []).append(one.seen)
                    learning += number == LATEST
        for policy_key, policy in self._policies().items():
            passes = policy.saw[before.get(policy_key, 0) :]
            assert len(passes) == (policy_key in wanted), "one pass for each policy in use, none for others"
            assert sorted(passes[0] if passes else []) == sorted(wanted.get(policy_key, []))
        assert wake.acted == sum(map(len, wanted.values()))
        assert wake.rows == learning

    # ---------------------------------------------------------------- what has come of it

    def everyone(self) -> list[MatchSimulator]:
        return [*self.simulators.values(), *self.gone]

    def agent_episodes(self, name: str) -> list[Player]:
        return [
            one for simulator in self.everyone() for one in simulator.agent_episodes if name_of(one.behavior_id) == name
        ]

    def check_steps(self) -> None:
        """Assembly heard of every step of those that learned, under their draw; and of nobody else."""
        for name, reader in self.readers.items():
            agent_episodes, behavior = self.agent_episodes(name), self.stepper.behaviors[name]
            learned = [one for one in agent_episodes if one.taken and one.learns and one.steps]
            assert sorted(reader.steps) == sorted(one.steps for one in learned)
            assert behavior.produced == reader.completed == sum(len(one.steps) for one in learned)
            ghosts = sum(len(one.steps) for one in agent_episodes if one.taken and not one.learns)
            assert behavior.ghosts == self.stepper.state()[name].ghosts == ghosts
            told = [part.ghosts for part in self.parts if part.behavior == name]
            assert told == sorted(told)
            assert not told or told[-1] == ghosts
            by_first = {one.steps[0][0]: one for one in learned}
            for life in [*reader.past, *reader.slots.values()]:
                matchup = self.matchups.made[reader.matchups[life.agent]]
                assert life.team == matchup.team
                if life.steps:
                    possible = by_first[life.steps[0][0]].contest.possible
                    assert possible is not None
                    assert matchup in possible
            table = behavior.table
            assert set(reader.slots) == set(np.flatnonzero(table.live & table.learning).tolist())

    def told_matches(self) -> list[Told]:
        """What was told of matches, in any order; each has a number of its own."""
        told: list[Told] = []
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
                if behavior_ids:  # else there was none: its simulator went away, or its learning team had nobody in it
                    told.append((matchup, simulator, tuple(sorted(rows))))
                at += behavior_ids
            assert at == len(results.who)
        assert len(set(numbers)) == len(numbers)
        return told

    def check_results(self) -> None:
        """Each match of learning agents that ended was told once, under a draw that it can have been played under."""
        for name in self.names:  # what nothing else was told after
            if (rest := self.stepper.matches.take(name)) is not None:
                self.results.append(rest)
        told = Counter(self.told_matches())
        for simulator in self.everyone():
            for contest in simulator.over:
                if contest.possible is None or all(
                    team_of(behavior_id) != contest.team for behavior_id in contest.behavior_ids
                ):
                    continue
                rows = self._rows(simulator, contest)
                found = next(one for one in contest.possible if told[one.number, simulator.number, rows])
                told[found.number, simulator.number, rows] -= 1
        assert not +told, "nothing else was told"

    def _rows(self, simulator: MatchSimulator, contest: Contest) -> tuple[tuple[str, float, bool, float], ...]:
        rows = [
            (behavior_id, round(score, 4), said, round(reward, 3))
            for behavior_id, (score, said, reward) in contest.rows.items()
        ]
        if simulator.kind != "ids":
            rows += [
                (behavior_id, -1.0, False, 0.0)
                for behavior_id in simulator.sizes
                if team_of(behavior_id) != contest.team
            ]
        return tuple(sorted(rows))
