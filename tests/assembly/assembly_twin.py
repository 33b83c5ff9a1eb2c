"""A slow twin of the assembler in obvious code: one Python object per agent and per step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.steps import ActionsChosen, AgentsEnded, AgentsStarted, OutcomesReported
from tests.assembly.assembly_world import BehaviorTick

Observed = tuple[tuple[float, ...], ...]
Carried = tuple[float, ...] | None
Mask = tuple[bool, ...] | None


@dataclass
class Action:
    continuous: tuple[float, ...]
    discrete: tuple[int, ...]
    log_prob: float
    mask: Mask
    version: int


@dataclass
class StepTwin:
    observed: Observed
    action: Action
    reward: float
    group_reward: float


@dataclass
class SegmentTwin:
    """A segment; `carried` has an entry for the first step of each of its sequences."""

    agent: int
    group: int
    team: int
    simulator: int
    steps: list[StepTwin]
    following: Observed
    next_mask: Mask = None
    terminated: bool = False
    interrupted: bool = False
    group_ended: bool = False
    carried: list[Carried] = field(default_factory=list)


@dataclass
class AgentTwin:
    agent: int
    group: int
    team: int
    simulator: int
    whole: bool
    observed: Observed | None = None
    mask: Mask = None
    action: Action | None = None
    steps: list[StepTwin] = field(default_factory=list)
    to_action: Carried = None
    to_steps: list[Carried] = field(default_factory=list)
    total: float = 0.0
    group_total: float = 0.0
    length: int = 0


@dataclass
class EpisodesTwin:
    rows: list[tuple[float, int, int, float]] = field(default_factory=list)
    group_returns: list[float] = field(default_factory=list)


class AssemblerTwin:
    """Records what an assembler should record, agent by agent."""

    def __init__(self, horizon: int, sequence: int = 1) -> None:
        self.horizon = horizon
        self.sequence = sequence
        self.agents: dict[int, AgentTwin] = {}
        self.segments: list[SegmentTwin] = []
        self.episodes = EpisodesTwin()
        self.orphaned = 0
        self.completed = 0

    @property
    def open_steps(self) -> int:
        return sum(len(agent.steps) for agent in self.agents.values())

    def apply(self, tick: BehaviorTick) -> None:
        self.completed += tick.completed
        self.orphaned += tick.completed
        if tick.lost is not None:
            self.interrupt(tick.lost.tolist())
        if tick.ended is not None:
            self._end(tick.ended)
        if tick.joined is not None:
            self._join(tick.joined)
        if tick.reported is not None:
            self._report(tick.reported)
        if tick.acted is not None:
            self._act(tick.acted)

    def interrupt(self, slots: list[int]) -> None:
        for slot in slots:
            agent = self.agents.pop(slot, None)
            if agent is not None and agent.steps:
                assert agent.observed is not None
                self._close(agent, agent.observed, agent.mask).interrupted = True

    def flush(self) -> None:
        for agent in self.agents.values():
            if agent.steps:
                assert agent.observed is not None
                self._close(agent, agent.observed, agent.mask)

    def _complete(self, slot: int, rows: AgentsEnded | OutcomesReported, row: int) -> None:
        agent = self.agents.get(slot)
        if agent is None or agent.action is None:
            return
        self.orphaned -= 1
        reward = float(rows.rewards[row])
        group_reward = 0.0 if rows.group_rewards is None else float(rows.group_rewards[row])
        assert agent.observed is not None
        agent.steps.append(StepTwin(agent.observed, agent.action, reward, group_reward))
        agent.to_steps.append(agent.to_action)
        agent.action = None
        agent.total += reward
        agent.group_total += group_reward
        agent.length += 1

    def _close(self, agent: AgentTwin, following: Observed, mask: Mask = None) -> SegmentTwin:
        segment = SegmentTwin(agent.agent, agent.group, agent.team, agent.simulator, agent.steps, following, mask)
        segment.carried = agent.to_steps[:: self.sequence]
        agent.steps, agent.to_steps = [], []
        self.segments.append(segment)
        return segment

    def _end(self, ended: AgentsEnded) -> None:
        slots = ended.slots.tolist()
        left = {agent.group for slot, agent in self.agents.items() if slot not in slots}
        longest: dict[int, AgentTwin] = {}
        for row, slot in enumerate(slots):
            self._complete(slot, ended, row)
            agent = self.agents.pop(slot, None)
            if agent is None:
                continue
            is_last = agent.group == 0 or agent.group not in left
            if agent.steps:
                segment = self._close(agent, observed_row(ended.observations, row))
                segment.interrupted = bool(ended.interrupted[row])
                segment.terminated = not segment.interrupted
                segment.group_ended = is_last
            if not agent.whole or not agent.length:
                continue
            outcome = -1.0 if ended.outcomes is None else float(ended.outcomes[row])
            self.episodes.rows.append((agent.total, agent.length, agent.team, outcome))
            if is_last and agent.group and agent.length > getattr(longest.get(agent.group), "length", 0):
                longest[agent.group] = agent
        self.episodes.group_returns += [agent.group_total for agent in longest.values()]

    def _join(self, joined: AgentsStarted) -> None:
        for row, slot in enumerate(joined.slots.tolist()):
            agent = self.agents.get(slot)
            if agent is None or agent.agent != joined.agents[row]:
                agent = self.agents[slot] = AgentTwin(int(joined.agents[row]), 0, 0, 0, bool(joined.fresh[row]))
            agent.group, agent.team = int(joined.groups[row]), int(joined.teams[row])
            agent.simulator = int(joined.simulators[row])

    def _report(self, reported: OutcomesReported) -> None:
        for row, slot in enumerate(reported.slots.tolist()):
            self._complete(slot, reported, row)
            agent = self.agents.get(slot)
            if agent is None:
                continue
            agent.observed, agent.mask = observed_row(reported.observations, row), mask_row(reported.masks, row)
            if len(agent.steps) >= self.horizon:
                self._close(agent, agent.observed, agent.mask)

    def _act(self, acted: ActionsChosen) -> None:
        assert acted.slots is not None
        assert acted.continuous is not None
        assert acted.discrete is not None
        for row, slot in enumerate(acted.slots.tolist()):
            agent = self.agents.get(slot)
            if agent is None or agent.observed is None:
                continue  # its decision was reported before this assembler began
            agent.action = Action(
                tuple(acted.continuous[row].tolist()),
                tuple(acted.discrete[row].tolist()),
                float(acted.log_probs[row]),
                agent.mask,
                int(acted.versions[row]),
            )
            agent.to_action = None if acted.carried is None else tuple(acted.carried[row].tolist())


def observed_row(columns: tuple[Any, ...], row: int) -> Observed:
    return tuple(tuple(np.ravel(column[row]).tolist()) for column in columns)


def mask_row(masks: Any, row: int) -> Mask:
    """Returns a mask; one that forbids nothing is None."""
    return None if masks is None or not masks[row].any() else tuple(masks[row].tolist())


def read_segments(message: Segments, sequence: int = 1) -> list[SegmentTwin]:
    """Returns the segments of a message as the twin records them."""
    out = []
    at = 0
    carried = None if message.carried is None else iter(message.carried.tolist())
    for index, length in enumerate(message.lengths.tolist()):
        steps = []
        for row in range(at, at + length):
            action = Action(
                tuple(message.continuous[row].tolist()),
                tuple(message.discrete[row].tolist()),
                float(message.log_probs[row]),
                mask_row(message.masks, row),
                int(message.versions[row]),
            )
            observed = observed_row(message.observations, row)
            steps.append(StepTwin(observed, action, float(message.rewards[row]), float(message.group_rewards[row])))
        at += length
        out.append(
            SegmentTwin(
                agent=int(message.agents[index]),
                group=int(message.groups[index]),
                team=int(message.teams[index]),
                simulator=int(message.simulators[index]),
                steps=steps,
                following=observed_row(message.next_observations, index),
                next_mask=mask_row(message.next_masks, index),
                terminated=bool(message.terminated[index]),
                interrupted=bool(message.interrupted[index]),
                group_ended=bool(message.group_ended[index]),
                carried=[None if carried is None else tuple(next(carried)) for _ in range(0, length, sequence)],
            )
        )
    assert at == len(message.log_probs)
    assert not list(carried or ()), "one row for each sequence"
    return out


def by_agent(segments: list[SegmentTwin]) -> dict[int, list[SegmentTwin]]:
    """Returns each agent's segments in their order."""
    out: dict[int, list[SegmentTwin]] = {}
    for segment in segments:
        out.setdefault(segment.agent, []).append(segment)
    return out
