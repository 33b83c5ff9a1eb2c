"""A fake policy, fake simulators that count their own steps, and a reader of the parts."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from sparring.pipeline.messages.simulator import Act, BehaviorReport, Decisions, Ends, Step
from sparring.pipeline.messages.steps import BehaviorSteps
from sparring.pipeline.specs import ActionSpec, BehaviorId, BehaviorSpec, ObservationSpec
from sparring.pipeline.stepping.steps import SampledActions

SPEC = BehaviorSpec(
    observations=(
        ObservationSpec(name="number", shape=(1,)),
        ObservationSpec(name="pixels", shape=(1, 2, 2), dtype="uint8", kind="image"),
    ),
    actions=ActionSpec(continuous=2, discrete=(3, 2)),
)
MASKS = SPEC.actions.mask_size


REMAINDER = 997
"""Carried numbers are counted modulo this, so that sums stay exact in float32."""

NO_MEMORY = -1.0
"""The executed value of agents that carry nothing, in place of their count of decisions."""


def carried_on(before: list[float], number: int) -> list[float]:
    """Returns what an agent carries after a decision on `number` to which it carried `before`.

    The values are its count of decisions, the sum of the observed numbers and the last of them.
    """
    seen = float(number % REMAINDER)
    return [[carried + 1.0, carried + seen, seen][place] for place, carried in enumerate(before)]


class FakePolicy:
    """Encodes observations in actions: the raw sample is the observed number, the executed action its half.

    Args:
        version: policy version.
        carried: how many numbers agents carry from one decision to the next, as `carried_on` defines; at most 3.
    """

    script = ""

    def __init__(self, version: int = 1, carried: int = 0) -> None:
        self.version = version
        self.carried = carried
        self.calls: list[int] = []

    def act(self, observations: tuple[Any, ...], masks: Any, carried: Any) -> SampledActions:
        number = observations[0][:, 0]
        self.calls.append(len(number))
        decisions = self._carry_on(number, carried)
        assert observations[1].shape == (len(number), 1, 2, 2)
        assert (observations[1][:, 0, 0, 0] == number.astype(np.int64) % 256).all()
        assert masks is None or masks.shape == (len(number), MASKS)
        continuous = np.stack([number, np.full_like(number, self.version)], 1)
        discrete = np.stack([number % 3, number % 2], 1).astype(np.int32)
        executed = np.stack([number * np.float32(0.5), decisions], 1)
        return SampledActions(continuous=continuous, executed=executed, discrete=discrete, log_probs=-number)

    def _carry_on(self, number: Any, carried: Any) -> Any:
        """Returns each agent's count of earlier decisions."""
        if not self.carried:
            assert carried is None
            return np.full_like(number, NO_MEMORY)
        assert (carried.shape, carried.dtype) == ((len(number), self.carried), np.float32)
        decisions = carried[:, 0].copy()
        carried[:, :1] += 1
        carried[:, 1:2] += number[:, None] % REMAINDER
        carried[:, 2:] = number[:, None] % REMAINDER
        return decisions


Recorded = tuple[int, float, float]
"""A step: number of its observation, reward, group reward."""


@dataclass
class FakeAgent:
    agent: int
    steps: list[Recorded] = field(default_factory=list)
    seen: int = 0
    decisions: int = 0
    deciding: bool = False
    acted: bool = False


class FakeSimulator:
    """Has agents that decide, end and begin at random, and checks every Act.

    Args:
        number: of the simulator.
        rng: makes every choice.
        ids: behavior ids.
        agents: how many agents each behavior begins with.
        steady: every agent decides in every frame and none ends.

    Attributes:

        remembering: behavior names whose agents carry something.
    """

    def __init__(
        self, number: int, rng: random.Random, ids: tuple[str, ...] = ("A",), agents: int = 2, *, steady: bool = False
    ) -> None:
        self.number = number
        self.rng = rng
        self.ids = ids
        self.steady = steady
        self.specs = dict.fromkeys(ids, SPEC)
        self.living: dict[str, dict[int, FakeAgent]] = {text: {} for text in ids}
        self.past: list[tuple[str, FakeAgent]] = []
        self.counted: Counter[str] = Counter()
        self.sequence = 0
        self.asked: dict[str, list[FakeAgent]] = {}
        self.remembering: set[str] = set()
        self.waiting = False
        self._agents = agents
        self._numbers = number * 100_000

    def agent_episodes(self, name: str) -> list[FakeAgent]:
        """Returns every agent episode of a behavior name so far."""
        agent_episodes = [
            *self.past,
            *((text, agent) for text, agents in self.living.items() for agent in agents.values()),
        ]
        return [agent for text, agent in agent_episodes if BehaviorId.parse(text).name == name]

    def frame(self) -> Step:
        """Returns the next Step."""
        assert not self.waiting
        self.waiting = True
        ids = list(self.ids)
        self.rng.shuffle(ids)
        reports = [self._report(text) for text in ids if self.steady or self.sequence == 0 or self.rng.random() < 0.9]
        step = Step(sequence=self.sequence, reports=tuple(reports))
        self.sequence += 1
        return step

    def take(self, act: Act) -> None:
        """Checks that an answer is for the last frame and for each of its decisions, in their order."""
        assert self.waiting
        assert act.sequence == self.sequence - 1
        self.waiting = False
        answered = {actions.behavior: actions for actions in act.actions}
        assert len(answered) == len(act.actions)
        assert set(answered) == {text for text, agents in self.asked.items() if agents}
        for text, actions in answered.items():
            agents = self.asked[text]
            assert actions.agents.tolist() == [agent.agent for agent in agents]
            assert actions.continuous[:, 0].tolist() == [agent.seen / 2 for agent in agents]
            assert actions.discrete.tolist() == [[agent.seen % 3, agent.seen % 2] for agent in agents]
            remember = BehaviorId.parse(text).name in self.remembering
            before = [agent.decisions - 1 if remember else NO_MEMORY for agent in agents]
            assert actions.continuous[:, 1].tolist() == before, (
                "an agent carries its own count from its first decision on"
            )
            for agent in agents:
                agent.deciding, agent.acted = False, True
        self.asked = {}

    # ---------------------------------------------------------------- internals

    def _report(self, text: str) -> BehaviorReport:
        living = self.living[text]
        ended = [] if self.steady else [agent for agent in living.values() if agent.acted and self.rng.random() < 0.15]
        ends = self._ends(text, ended) if ended or self.rng.random() < 0.1 else None
        again = [agent.agent for agent in ended if self.rng.random() < 0.6]
        new = self._agents if self.sequence == 0 else 0 if self.steady else self.rng.choice([0, 0, 0, 0, 1, 3])
        free = [number for number in range(-3, 40) if number not in living and number not in again]
        self.rng.shuffle(free)
        for number in [*again, *free[:new]]:
            living[number] = FakeAgent(number)
        rows = [a for a in living.values() if not a.acted or self.steady or self.rng.random() < 0.7]
        self.rng.shuffle(rows)
        self.asked[text] = rows
        decisions = self._decisions(text, rows) if rows or self.rng.random() < 0.1 else None
        return BehaviorReport(behavior=text, decisions=decisions, ends=ends)

    def _ends(self, text: str, ended: list[FakeAgent]) -> Ends:
        rewards, group_rewards = self._settle(text, ended)
        for agent in ended:
            self.past.append((text, self.living[text].pop(agent.agent)))
        n = len(ended)
        return Ends(
            agents=np.array([agent.agent for agent in ended], np.int64),
            observations=self._observations(n)[1],
            rewards=rewards,
            group_rewards=group_rewards,
            interrupted=np.array([agent.seen % 2 == 0 for agent in ended], bool),
            outcomes=np.full(n, 0.5, np.float32) if self.rng.random() < 0.5 else None,
        )

    def _decisions(self, text: str, rows: list[FakeAgent]) -> Decisions:
        rewards, group_rewards = self._settle(text, rows)
        numbers, observations = self._observations(len(rows))
        for agent, number in zip(rows, numbers, strict=True):
            agent.seen, agent.deciding, agent.acted = number, True, False
            agent.decisions += 1
        masks = np.zeros((len(rows), MASKS), bool)
        masks[:, 0] = True
        return Decisions(
            agents=np.array([agent.agent for agent in rows], np.int64),
            groups=np.array([agent.agent % 3 if agent.agent > 0 else 0 for agent in rows], np.int64),
            observations=observations,
            rewards=rewards,
            group_rewards=group_rewards,
            masks=masks if not self.steady and self.rng.random() < 0.5 else None,
        )

    def _settle(self, text: str, rows: list[FakeAgent]) -> tuple[Any, Any]:
        rewards = np.arange(len(rows), dtype=np.float32) + self.sequence
        for agent, reward in zip(rows, rewards.tolist(), strict=True):
            if agent.acted:
                agent.steps.append((agent.seen, reward, reward / 2))
                self.counted[BehaviorId.parse(text).name] += 1
        return rewards, rewards / 2

    def _observations(self, n: int) -> tuple[list[int], tuple[Any, ...]]:
        numbers = list(range(self._numbers, self._numbers + n))
        self._numbers += n
        column = np.array(numbers, np.float32).reshape(n, 1)
        pixels = np.array([number % 256 for number in numbers], np.uint8).reshape(n, 1, 1, 1)
        return numbers, (column, np.broadcast_to(pixels, (n, 1, 2, 2)).copy())


@dataclass
class ReadAgent:
    agent: int
    simulator: int
    team: int
    group: int
    carried: list[float]
    seen: int | None = None
    acted: bool = False
    steps: list[Recorded] = field(default_factory=list)


def ticks_of(steps: BehaviorSteps) -> list[dict[str, Any]]:
    """Returns the rows of each tick: the column of lost slots, and a record or None for each other kind."""
    out = []
    at = np.zeros(5, int)
    for counts in steps.rows:
        tick: dict[str, Any] = {"lost": np.empty(0, np.int32)}
        for number, name in enumerate(("lost", "ended", "joined", "reported", "acted")):
            record, rows = getattr(steps, name), slice(at[number], at[number] + counts[number])
            if name == "lost":
                tick[name] = tick[name] if record is None else record[rows]
            else:
                tick[name] = _rows(record, rows) if counts[number] else None
        out.append(tick)
        at += counts
    for number, name in enumerate(("ended", "joined", "reported", "acted"), start=1):
        record = getattr(steps, name)
        column = None if record is None else record.log_probs if name == "acted" else record.slots
        assert at[number] == (0 if column is None else len(column)), "all rows belong to a tick"
    return out


def _rows(record: Any, rows: slice) -> Any:
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return type(record)(
        **{
            name: tuple(column[rows] for column in value)
            if isinstance(value, tuple)
            else None
            if value is None
            else value[rows]
            for name, value in values.items()
        }
    )


class Reader:
    """Reads the parts of one behavior name as assembly does, slot by slot, and refuses contradictions.

    Args:

        carried: how many numbers its agents carry.
    """

    def __init__(self, carried: int = 0) -> None:
        self.carried = carried
        self.slots: dict[int, ReadAgent] = {}
        self.past: list[ReadAgent] = []
        self.completed = 0
        self.began: int | None = None
        self.tick = 0
        self.agent_episodes: set[int] = set()
        self.versions: list[int] = []

    @property
    def steps(self) -> list[list[Recorded]]:
        """Returns the steps of each agent episode that has any."""
        return [episode.steps for episode in [*self.past, *self.slots.values()] if episode.steps]

    @property
    def waiting(self) -> int:
        """Returns the count of decisions without an action."""
        return sum(agent.seen is not None and not agent.acted for agent in self.slots.values())

    def read(self, steps: BehaviorSteps) -> None:
        if self.began is None:
            self.began = steps.produced_before
        assert steps.produced_before == self.began + self.completed
        assert [self.tick, *steps.ticks.tolist()] == sorted([self.tick, *steps.ticks.tolist()])
        self.tick = int(steps.ticks[-1])
        for tick, completed in zip(ticks_of(steps), steps.completed.tolist(), strict=True):
            before = self.completed
            self._read(tick)
            assert self.completed == before + completed

    def _read(self, tick: dict[str, Any]) -> None:
        for slot in tick["lost"].tolist():
            self.past.append(self.slots.pop(slot))
        ended, reported = tick["ended"], tick["reported"]
        for row, slot in enumerate([] if ended is None else ended.slots.tolist()):
            self._complete(slot, ended, row)
            self.past.append(self.slots.pop(slot))
        if tick["joined"] is not None:
            self._join(tick["joined"])
        slots = [] if reported is None else reported.slots.tolist()
        assert len(set(slots)) == len(slots)
        for row, slot in enumerate(slots):
            self._complete(slot, reported, row)
            self.slots[slot].seen = int(reported.observations[0][row, 0])
        if tick["acted"] is not None:
            self._act(tick["acted"], slots)

    def _complete(self, slot: int, record: Any, row: int) -> None:
        agent = self.slots[slot]
        if agent.acted:
            assert agent.seen is not None
            group_reward = 0.0 if record.group_rewards is None else float(record.group_rewards[row])
            agent.steps.append((agent.seen, float(record.rewards[row]), group_reward))
            agent.acted = False
            self.completed += 1

    def _join(self, joined: Any) -> None:
        for row, slot in enumerate(joined.slots.tolist()):
            agent = int(joined.agents[row])
            known = self.slots.get(slot)
            if joined.fresh[row]:
                assert known is None
                assert agent not in self.agent_episodes
                known = None
            self.agent_episodes.add(agent)
            place = int(joined.simulators[row]), int(joined.teams[row]), int(joined.groups[row])
            if known is None:
                self.slots[slot] = ReadAgent(agent, *place, carried=[0.0] * self.carried)
            else:
                assert known.agent == agent
                known.simulator, known.team, known.group = place

    def _act(self, acted: Any, reported: list[int]) -> None:
        slots = reported if acted.slots is None else acted.slots.tolist()
        assert len(set(slots)) == len(slots)
        assert (acted.carried is None) == (not self.carried)
        for row, slot in enumerate(slots):
            agent = self.slots[slot]
            assert not agent.acted
            assert agent.seen is not None
            if self.carried:
                assert acted.carried[row].tolist() == agent.carried
                agent.carried = carried_on(agent.carried, agent.seen)
            assert acted.continuous[row, 0] == agent.seen
            assert acted.log_probs[row] == -float(agent.seen)
            assert acted.versions[row] == acted.continuous[row, 1]
            agent.acted = True
            self.versions.append(int(acted.versions[row]))
